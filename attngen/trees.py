"""Prefix trees: sequences that share prefixes, packed so that each prefix is computed once.

The answers of a group share their prompt, and the branches of a search share prefixes at many levels. ``pack`` and
``pack_answers`` merge such sequences into a tree of tokens, in depth-first order. The tokens after a node that descend
from it are then contiguous, so that one number for each key, the end of its subtree, is the whole mask (the preset
``prefix_tree``): query q sees key kv if ``kv <= q < subtree_end[kv]``. Each token's output, and every gradient, is that
of its sequences apart; what they share is computed once.

    pack = attngen.trees.pack_answers(prompts, answers, device="cuda")
    logits = model(**pack.inputs(), logits_to_keep=pack.rows).logits
    log_probs = pack.log_probs(logits)  # one tensor for each answer

Children of a node are laid out by their size, the largest first. A run without a branch is contiguous in any
depth-first order; with the largest child right after it, the ancestors of a token lie in at most 1 + log2(n) ranges,
for n tokens, since each further range means a subtree of at most half the tokens. Fewer ranges mean fewer tiles that
are visited for a few of their pairs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError

__all__ = ["PackedTrees", "pack", "pack_answers"]


@dataclass
class _Masks:
    """Whether a pack made a mask for models, and the configs of those that asked for it."""

    made: bool = False
    taken: set[type] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class PackedTrees:
    """Sequences of tokens as one packed sequence of n tokens, in which each shared prefix occurs once.

    ``ids`` (1, n) int64 are the tokens, ``positions`` (1, n) int64 the position of each in its own sequences, and
    ``subtree_end`` (1, n) int32 the mask. ``parents`` (n,) int64 is the place of the token before each one, −1 at the
    first token of a sequence. ``places[i]`` (length,) int64 is where the tokens of sequence i are, so that
    ``ids[0, places[i]]`` are those that were given; ``log_probs`` begins with that of number ``first[i]``. ``targets``
    (t,) int64 are the places of all tokens that it scores, and ``rows`` (m,) int64 of those whose logits it needs, for
    ``logits_to_keep``; both are sorted.
    """

    ids: Tensor
    positions: Tensor
    subtree_end: Tensor
    parents: Tensor
    targets: Tensor
    rows: Tensor
    places: tuple[Tensor, ...]
    first: tuple[int, ...]
    _masks: _Masks = field(default_factory=_Masks, repr=False)

    def arguments(self) -> dict[str, Any]:
        """Keywords of ``attngen.attention`` over q, k and v (1, n, heads, head_dim): the variant and its tensor."""
        return {"variant": "prefix_tree", "subtree_end": self.subtree_end}

    def inputs(self) -> dict[str, Any]:
        """Keywords of a causal model of transformers with ``attn_implementation="attngen"``.

        Layers with a sliding window see the tokens of their own sequence that the window holds. A model that cannot
        take a tree raises CallError or NoKernelError: one with another implementation of attention, or with layers
        that carry a state from token to token.
        """
        from attngen.integrations.transformers.tree_mask import TreeMask

        mask = TreeMask.of(self.subtree_end, self.positions.to(torch.int32), taken=self._masks.taken)
        self._masks.made = True
        return {"input_ids": self.ids, "position_ids": self.positions, "attention_mask": mask, "use_cache": False}

    def log_probs(self, logits: Tensor) -> list[Tensor]:
        """Log-probability of each token of each sequence given those before it: (length − first,), float32 or float64.

        ``logits`` are (1, n, vocabulary), or (1, m, vocabulary) of the ``rows`` alone. The logits of a token score all
        of its children. A token that sequences share has one log-probability, whose gradient is the sum of theirs.
        Raises CallError for logits of another shape, and if no model asked for the mask of ``inputs``: one without
        attention would ignore the tree.
        """
        if self._masks.made and not self._masks.taken:
            raise CallError(
                "the model did not ask for the attention_mask of inputs(), so that branches saw each other; it takes "
                "attn_implementation='attngen', and attention in all layers; run the sequences of the pack one by one "
                "with other models"
            )
        count, kept = self.ids.shape[1], len(self.rows)
        if logits.ndim != 3 or logits.shape[0] != 1 or logits.shape[1] not in (count, kept):
            raise CallError(
                f"logits must be (1, {count}, vocabulary), or (1, {kept}, vocabulary) with logits_to_keep=pack.rows, "
                f"got {tuple(logits.shape)}"
            )
        values = logits[0] if logits.dtype == torch.float64 else logits[0].float()
        row = self.parents[self.targets]
        if values.shape[0] != count:
            row = torch.searchsorted(self.rows, row)
        of_row = values.logsumexp(-1)
        log_probs = values[row, self.ids[0, self.targets]] - of_row[row]
        scored = [places[first:] for places, first in zip(self.places, self.first, strict=True)]
        own = log_probs[torch.searchsorted(self.targets, torch.cat(scored))]
        return list(own.split([len(places) for places in scored]))

    def to(self, device: torch.device | str) -> PackedTrees:
        """Move all tensors to a device."""
        tensors = {one.name: getattr(self, one.name) for one in fields(self)}
        moved = {name: tensor.to(device) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        return replace(self, places=tuple(places.to(device) for places in self.places), **moved)


def pack(sequences: Iterable[Any], *, device: torch.device | str | None = None) -> PackedTrees:
    """Merge sequences into trees, one for each first token, in one pack.

    Each of ``sequences`` is a list of integers or a tensor (length,) of an integer dtype. Sequences may be equal, or
    the beginning of others, or empty. ``log_probs`` of the result has all tokens but the first of each sequence. The
    result is on ``device``; by default on that of the tensors, or the CPU. The time is in proportion to the tokens of
    all sequences. Raises CallError for anything else than tokens, for no token at all, and for tensors on several
    devices without ``device``.
    """
    read = _TokenReader(device)
    given = [read(one, f"sequences[{i}]") for i, one in enumerate(sequences)]
    return _packed([(one, min(1, len(one))) for one in given], read.device)


def pack_answers(
    prompts: Sequence[Any], answers: Sequence[Iterable[Any]], *, device: torch.device | str | None = None
) -> PackedTrees:
    """Merge prompts and their answers into trees: ``answers[i]`` is a list of answers to ``prompts[i]``.

    Sequences of the result are prompts with one answer each, in the order of the answers. ``log_probs`` has the tokens
    of the answers alone; an empty answer has none. Prompts that begin alike share that, and a prompt without answers is
    left out. Arguments and errors are those of ``pack``; a prompt has at least one token.
    """
    if len(prompts) != len(answers):
        raise CallError(f"got {len(prompts)} prompts and {len(answers)} lists of answers: each prompt has a list")
    read = _TokenReader(device)
    given = []
    for i, (prompt, group) in enumerate(zip(prompts, answers, strict=True)):
        start = read(prompt, f"prompts[{i}]")
        if not start:
            raise CallError(
                f"prompts[{i}] is empty, so that nothing predicts the first token of its answers; begin it with a "
                "token such as BOS"
            )
        given += [(start + read(one, f"answers[{i}][{j}]"), len(start)) for j, one in enumerate(group)]
    return _packed(given, read.device)


class _TokenReader:
    """Reads sequences as arrays of int64, and notes on which device they were."""

    def __init__(self, device: torch.device | str | None) -> None:
        self._asked = None if device is None else torch.device(device)
        self._seen: dict[torch.device, str] = {}

    def __call__(self, tokens: Any, name: str) -> array[int]:
        if isinstance(tokens, Tensor):
            if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
                raise CallError(
                    f"{name} must be a tensor (length,) of an integer dtype, got {tuple(tokens.shape)} of "
                    f"{tokens.dtype}"
                )
            self._seen.setdefault(tokens.device, name)
            tokens = tokens.tolist()
        try:
            return array("q", tokens if isinstance(tokens, list) else list(tokens))
        except (TypeError, OverflowError) as error:
            raise CallError(f"{name} must be a list of integers or a tensor (length,): {error}") from None

    @property
    def device(self) -> torch.device:
        """The device of the result. Raises CallError if tensors were on several, and none was asked for."""
        if self._asked is not None:
            return self._asked
        if len(self._seen) > 1:
            places = ", ".join(f"{name} on {device}" for device, name in self._seen.items())
            raise CallError(f"tokens are on several devices ({places}): pass device= for that of the result")
        return next(iter(self._seen), torch.device("cpu"))


# --- the tree -----------------------------------------------------------------------------------------------


class _Run:
    """Tokens without a branch: ``source[start:stop]``, after those of the parent. ``children`` by their first token."""

    __slots__ = ("children", "parent", "place", "position", "size", "source", "start", "stop")

    def __init__(self, source: array[int], start: int, stop: int, parent: _Run | None) -> None:
        self.source, self.start, self.stop, self.parent = source, start, stop, parent
        self.children: dict[int, _Run] = {}
        self.place = self.position = 0  # of its first token, in the pack and in its sequences
        self.size = stop - start  # later with all descendants

    def insert(self, tokens: array[int]) -> _Run:
        """Add a sequence below the root, and return the run at whose end it ends."""
        run, read = self, 0
        while read < len(tokens):
            child = run.children.get(tokens[read])
            if child is None:
                child = run.children[tokens[read]] = _Run(tokens, read, len(tokens), run)
                return child
            same = _same(child.source, child.start, child.stop, tokens, read)
            run = child if same == child.stop - child.start else child.split(same)
            read += same
        return run

    def path(self) -> list[_Run]:
        """The runs from below the root to this one."""
        runs, run = [], self
        while run.parent is not None:
            runs.append(run)
            run = run.parent
        return runs[::-1]

    def split(self, tokens: int) -> _Run:
        """Cut the first tokens off into a run of their own, the new parent of this one."""
        assert self.parent is not None
        upper = _Run(self.source, self.start, self.start + tokens, self.parent)
        self.parent.children[self.source[self.start]] = upper
        self.start += tokens
        self.size -= tokens
        self.parent, upper.children[self.source[self.start]] = upper, self
        return upper


def _same(one: array[int], start: int, stop: int, other: array[int], begin: int) -> int:
    """The number of equal tokens at the beginning of ``one[start:stop]`` and ``other[begin:]``, by halving."""
    same, limit = 0, min(stop - start, len(other) - begin)
    step = limit
    while step:
        low, high = start + same, begin + same
        if one[low : low + step] == other[high : high + step]:
            same += step
            step = min(step, limit - same)
        else:
            limit = same + step - 1
            step //= 2
    return same


def _packed(given: Sequence[tuple[array[int], int]], device: torch.device) -> PackedTrees:
    """Pack sequences, each with the number of its first token that is scored."""
    root = _Run(array("q"), 0, 0, None)
    ends = [root.insert(tokens) for tokens, _ in given]
    runs = _laid_out(root)
    if not runs:
        raise CallError("there are no tokens to pack: pass at least one sequence that is not empty")
    count = runs[-1].place + runs[-1].stop - runs[-1].start
    line = array("q", range(max(count, *map(len, (tokens for tokens, _ in given)))))  # its slices are copied fast
    ids, positions, subtree_ends, parents = (array("q") for _ in range(4))
    for run in runs:
        length = run.stop - run.start
        ids += run.source[run.start : run.stop]
        positions += line[run.position : run.position + length]
        subtree_ends += array("q", [run.place + run.size]) * length
        parents.append(_last_place(run.parent))
        parents += line[run.place : run.place + length - 1]
    places = array("q")
    for end in ends:
        for run in end.path():
            places += line[run.place : run.place + run.stop - run.start]
    of_sequences = _int64(places).split([len(tokens) for tokens, _ in given])
    first = tuple(first for _, first in given)
    targets = _each_once([one[start:] for one, start in zip(of_sequences, first, strict=True)], count)
    parent = _int64(parents)
    packed = PackedTrees(
        ids=_int64(ids)[None], positions=_int64(positions)[None],
        subtree_end=_int64(subtree_ends)[None].to(torch.int32), parents=parent, targets=targets,
        rows=_each_once([parent[targets]], count), places=of_sequences, first=first,
    )  # fmt: skip
    return packed.to(device)


def _each_once(places: Sequence[Tensor], count: int) -> Tensor:
    """Places of ``count``, each once and sorted."""
    marks = torch.zeros(count, dtype=torch.bool, device="cpu")
    marks[torch.cat(tuple(places))] = True
    return marks.nonzero()[:, 0]


def _laid_out(root: _Run) -> list[_Run]:
    """The runs below the root in depth-first order, with their places, positions and sizes of subtrees."""
    order, todo = [], list(root.children.values())
    while todo:
        run = todo.pop()
        order.append(run)
        todo += run.children.values()
    for run in reversed(order):
        assert run.parent is not None
        run.parent.size += run.size
    runs, place = [], 0
    todo = _smallest_first(root)
    while todo:
        run = todo.pop()
        assert run.parent is not None
        run.place, run.position = place, run.parent.position + run.parent.stop - run.parent.start
        place += run.stop - run.start
        runs.append(run)
        todo += _smallest_first(run)
    return runs


def _smallest_first(run: _Run) -> list[_Run]:
    """The children of a run by size, as a stack takes them; of equal ones, the first that was given comes last."""
    return sorted(run.children.values(), key=lambda child: -child.size)[::-1]


def _last_place(run: _Run | None) -> int:
    """The place of a run's last token; −1 for the root, which has none."""
    return -1 if run is None or run.parent is None else run.place + run.stop - run.start - 1


def _int64(values: array[int]) -> Tensor:
    """Integers as a tensor, which holds a copy."""
    return (
        torch.frombuffer(values, dtype=torch.int64).clone()
        if values
        else torch.empty(0, dtype=torch.int64, device="cpu")
    )
