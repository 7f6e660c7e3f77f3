"""Masks of FlexAttention, and a call that is not in a program: what its functions mean, checks, and torch's own."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from attngen.errors import AttngenError, CallError
from attngen.integrations.flex_identity import Watch
from attngen.integrations.flex_meaning import Functions, Traced, meaning
from attngen.runtime import calls

Mod = Callable[..., Any]


#: What a score_mod meant at its last call without a mask, and what tells whether it still does.
_LAST: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


class _Known:
    """What functions meant at a call, while they are as they were: the next call finds out in about a microsecond."""

    __slots__ = ("_found", "_score", "_watch", "checked")

    def __init__(self, mask_mod: Mod | None, score_mod: Mod | None, found: Traced) -> None:
        self._watch = Watch(*(one for one in (mask_mod, score_mod) if one is not None))
        try:
            self._score = None if score_mod is None else ref(score_mod)
        except TypeError:  # something that is not a function, and keeps no references
            self._watch.complete = False
        self._found = found
        #: Shapes of query and key, and enable_gqa, of which nothing is left to check.
        self.checked: tuple[Any, Any, bool] | None = None

    def of(self, score_mod: Mod | None) -> Traced | None:
        """Return it for a call with this score_mod, or None."""
        watch = self._watch
        if not watch.complete or score_mod is not (None if self._score is None else self._score()):
            return None
        return self._found if watch.holds() else None


def last_of(block_mask: BlockMask | None, score_mod: Mod | None) -> _Known | None:
    if block_mask is not None:
        return block_mask.last
    return _LAST.get(score_mod) if type(score_mod) is FunctionType else None


def known(block_mask: BlockMask | None, score_mod: Mod | None, device: torch.device) -> tuple[Traced, _Known]:
    """Return what a call's functions mean, and where that is kept for the next one."""
    last = last_of(block_mask, score_mod)
    found = None if last is None else last.of(score_mod)
    if last is None or found is None:
        mask_mod = None if block_mask is None else block_mask.mask_mod
        found = meaning(mask_mod, score_mod, device)
        last = _Known(mask_mod, score_mod, found)
        if block_mask is not None:
            block_mask.last = last
        elif type(score_mod) is FunctionType:
            _LAST[score_mod] = last
    return found, last


#: Masks that no call has asked yet what they mean; and whether compiled programs take masks, which ask at once.
UNASKED: WeakSet[BlockMask] = WeakSet()
PROGRAMS = [False]


def _check_sizes(**sizes: tuple[Any, ...]) -> None:
    """Raise CallError unless all are integers: blocks at least 1, the others at least 0; B and H may be None."""
    for name, given in sizes.items():
        least = 1 if name == "BLOCK_SIZE" else 0
        for size in given:
            if isinstance(size, torch.SymInt) or (size is None and name in ("B", "H")):
                continue
            try:
                fits = operator.index(size) >= least
            except TypeError:
                fits = False
            if not fits:
                raise CallError(f"{name} must be an integer of at least {least}, got {size!r}")


class BlockMask:
    """A mask of queries and keys, as FlexAttention's calls take it: a function, and the variant that it means."""

    def __init__(
        self, mask_mod: Mod, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int,
        device: torch.device, block_size: int | tuple[int, int], *, fallback: bool,
    ) -> None:  # fmt: skip
        """``batch`` and ``heads`` are None where the mask is the same for all. Raises CallError."""
        if not callable(mask_mod):
            raise CallError(f"mask_mod must be a function of (b, h, q_idx, kv_idx), got {mask_mod!r}")
        self.mask_mod = mask_mod
        self.seq_lengths = (seqlen_q, seqlen_k)
        self.BLOCK_SIZE = (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)
        _check_sizes(B=(batch,), H=(heads,), Q_LEN=(seqlen_q,), KV_LEN=(seqlen_k,), BLOCK_SIZE=self.BLOCK_SIZE)
        self._batch, self._heads, self._device, self._theirs = batch, heads, device, None
        self.last: _Known | None = None  # what it meant at its last call
        #: What a compiled program takes of it: the name of the variant, and its tensors by name.
        self.handle: str | None = None
        self.tensors: dict[str, Tensor] = {}
        if not fallback:
            Functions(mask_mod, None, device).check()
            if PROGRAMS[0]:
                self.ask()
            else:
                UNASKED.add(self)

    def ask(self) -> None:
        """Find out what a compiled program takes of it, for which it may have to wait for the GPU."""
        found = meaning(self.mask_mod, None, self._device)
        self.handle, self.tensors = found.handle, found.tensors()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        return (self._batch or 1, self._heads or 1, *self.seq_lengths)

    def visible(self) -> Tensor:
        """Return which key each query sees: bools of ``shape``."""
        found = meaning(self.mask_mod, None, self._device)
        return found.variant.mask(self.shape, **found.tensors())

    def to_dense(self) -> Tensor:
        """Return 1 for each block of queries and keys in which something is seen, (batch, heads, rows, columns)."""
        rows, columns = self.BLOCK_SIZE
        seen = self.visible()
        pad = (0, -seen.shape[-1] % columns, 0, -seen.shape[-2] % rows)
        blocks = torch.nn.functional.pad(seen, pad).unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        return blocks.any(-1).any(-2).int()

    def sparsity(self) -> float:
        """Return the percentage of blocks in which nothing is seen."""
        return 100.0 * (1.0 - float(self.to_dense().float().mean()))

    def numel(self) -> int:
        """Return the number of pairs of queries and keys."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        found = meaning(self.mask_mod, None, self._device)
        return f"BlockMask(shape={self.shape}, mask={found.variant.fields.get('mask', True)!r})"

    def theirs(self) -> Any:
        """Return torch's mask of the same function, which is made when it is first needed."""
        if self._theirs is None:
            from torch.nn.attention.flex_attention import create_block_mask as create

            self._theirs = create(
                self.mask_mod, self._batch, self._heads, *self.seq_lengths, device=str(self._device),
                BLOCK_SIZE=self.BLOCK_SIZE,
            )  # fmt: skip
        return self._theirs


def now(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None, block_mask: BlockMask | None,
    scale: float | None, enable_gqa: bool, return_lse: bool, return_aux: Any, fallback: bool,
) -> Any:  # fmt: skip
    wants_lse = asked_lse(block_mask, return_lse, return_aux)
    check_call(query, key, block_mask, enable_gqa)
    try:
        found, last = known(block_mask, score_mod, query.device)
        if key.shape[0] == 1 != query.shape[0]:
            key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
        else:
            last.checked = query.shape, key.shape, enable_gqa
        result = calls.attention(
            query, key, value, variant=found.handle, softmax_scale=scale, layout="bhsd", return_lse=wants_lse,
            **found.tensors(),
        )  # fmt: skip
    except AttngenError:
        if not fallback:
            raise
        return _theirs(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)
    return result if return_aux is None else with_aux(result, wants_lse=wants_lse)


def asked_lse(block_mask: Any, return_lse: bool, return_aux: Any) -> bool:
    """Return whether the log-sum-exp is asked for. Raises CallError for what is not served."""
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise CallError(
            "block_mask must be made by attngen.integrations.flex_attention.create_block_mask, got "
            f"{type(block_mask).__module__}.{type(block_mask).__name__}"
        )
    if return_aux is None:
        return return_lse
    if getattr(return_aux, "max_scores", False):
        raise CallError("return_aux: max_scores is not supported, since no kernel keeps it; lse is")
    return return_lse or bool(getattr(return_aux, "lse", False))


def with_aux(result: Any, *, wants_lse: bool) -> Any:
    from torch.nn.attention.flex_attention import AuxOutput

    out, lse = result if wants_lse else (result, None)
    return out, AuxOutput(lse=lse, max_scores=None)


def check_call(query: Tensor, key: Tensor, block_mask: BlockMask | None, enable_gqa: bool) -> None:
    if query.is_nested or key.is_nested:
        raise CallError("nested tensors are not supported; attngen.attention_varlen takes packed sequences")
    rows, keys = query.shape, key.shape
    if len(rows) != 4 or len(keys) != 4:
        raise CallError(f"query must have shape (B, H, L, E), got {tuple(rows)} and key {tuple(keys)}")
    if not enable_gqa and rows[1] != keys[1]:
        raise CallError(f"query has {rows[1]} heads and key {keys[1]}; enable_gqa=True lets them differ")
    if block_mask is not None and (rows[2], keys[2]) != block_mask.seq_lengths:
        wanted = "{} queries and {} keys".format(*block_mask.seq_lengths)
        raise CallError(f"block_mask is for {wanted}, but the call has {rows[2]} and {keys[2]}")


def _theirs(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None, block_mask: BlockMask | None,
    scale: float | None, enable_gqa: bool, return_lse: bool, return_aux: Any,
) -> Any:  # fmt: skip
    from torch.nn.attention import flex_attention as flex

    function: Any = torch.compile(flex.flex_attention) if query.is_cuda else flex.flex_attention
    options: dict[str, Any] = {"return_aux": return_aux} if return_aux is not None else {"return_lse": return_lse}
    mask = None if block_mask is None else block_mask.theirs()
    return function(
        query, key, value, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=enable_gqa, **options
    )
