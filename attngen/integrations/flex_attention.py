"""FlexAttention's functions on attngen's kernels: replace one import.

    from attngen.integrations.flex_attention import create_block_mask, flex_attention

The signatures are those of ``torch.nn.attention.flex_attention``. A ``mask_mod`` or ``score_mod`` is traced once into
the language of specs, as a variant that ``attngen build`` or ``attngen.jit()`` compiles like any other; bands replace
lists of blocks, so that making a mask costs no more than a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen.errors import AttngenError, CallError, SpecError
from attngen.integrations.flex_trace import refusal, traced
from attngen.integrations.flex_translate import Translation, Translator
from attngen.runtime import calls
from attngen.runtime.cache import RecentCache

__all__ = ["BlockMask", "and_masks", "create_block_mask", "flex_attention", "noop_mask", "or_masks"]

Mod = Callable[..., Any]

_BLOCK_SIZE = 128


class Traced:
    """What functions mean: a variant, and the tensors that its calls pass."""

    def __init__(self, mask_mod: Mod | None, score_mod: Mod | None, device: torch.device) -> None:
        """Raises CallError for a function that the language cannot express."""
        names = Translation()
        fields: dict[str, Any] = {}
        for kind, field, function in (("mask_mod", "mask", mask_mod), ("score_mod", "score", score_mod)):
            if function is not None:
                graph = traced(function, kind, device)
                fields[field] = Translator(function, kind, graph, names).expression()
        captured = list(names.tensors.values())
        if captured:
            fields["tensors"] = {one.name: one.fields() for one in captured}
        digest = sha256(repr(sorted(fields.items())).encode()).hexdigest()[:8]
        try:
            self.variant = attngen.variant(**fields, name=f"flex_{digest}")
        except SpecError as error:
            told = score_mod if mask_mod is None else mask_mod
            kind = "score_mod" if mask_mod is None else "mask_mod"
            assert told is not None
            raise refusal(told, kind, " ".join(str(error).split("\n")[0].split())) from error
        self._captured = captured

    def holds(self) -> bool:
        """Whether all captured tensors still exist; else others may have taken their identities."""
        return all(one.find() is not None for one in self._captured)

    def tensors(self) -> dict[str, Tensor]:
        """Return the arguments of a call."""
        return {one.name: one.given() for one in self._captured}


#: Captured tensors are part of a key by identity and version, and are not kept alive by it.
_TRACED: RecentCache[Traced] = RecentCache(256)


def meaning(mask_mod: Mod | None, score_mod: Mod | None, device: torch.device) -> Traced:
    """Return what functions mean. The same code over the same captured values is traced once."""
    key = (_identity(mask_mod), _identity(score_mod), device.type)
    found = _TRACED[key]
    if found is None or not found.holds():
        found = Traced(mask_mod, score_mod, device)
        _TRACED.put(key, found)
    return found


def _identity(value: Any, depth: int = 0) -> Any:
    """Return what identifies a function, or captured value: its code and what it captures, not the object."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, Tensor):
        return "tensor", id(value), value._version, value.requires_grad
    if depth > 4 or isinstance(value, ModuleType | type):
        return "object", id(value)
    if isinstance(value, FunctionType):
        cells = tuple(_identity(cell.cell_contents, depth + 1) for cell in value.__closure__ or () if _filled(cell))
        seen = tuple(
            _identity(value.__globals__[name], depth + 1)
            for name in _names(value.__code__)
            if name in value.__globals__ and value.__globals__[name] is not value
        )
        given = tuple(_identity(one, depth + 1) for one in value.__defaults__ or ())
        return value.__code__, cells, seen, given
    if isinstance(value, MethodType):
        return "method", _identity(value.__func__, depth + 1), _identity(value.__self__, depth + 1)
    if isinstance(value, partial):
        given = tuple(_identity(one, depth + 1) for one in (*value.args, *value.keywords.values()))
        return "partial", _identity(value.func, depth + 1), given
    if isinstance(value, tuple | list):
        return type(value), tuple(_identity(one, depth + 1) for one in value)
    if isinstance(value, dict):
        return "dict", tuple((key, _identity(one, depth + 1)) for key, one in value.items())
    fields = (
        tuple((key, _identity(one, depth + 1)) for key, one in vars(value).items())
        if hasattr(value, "__dict__")
        else ()
    )
    return "object", id(value), fields


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function looks up, and those of functions that are written inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (an empty cell raises)
    except ValueError:
        return False
    return True


class BlockMask:
    """A mask of queries and keys, as FlexAttention's calls take it: a function, and the variant that it means."""

    def __init__(
        self, mask_mod: Mod, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int,
        device: torch.device, block_size: int | tuple[int, int], *, fallback: bool,
    ) -> None:  # fmt: skip
        """``batch`` and ``heads`` are None where the mask is the same for all. Raises CallError."""
        self.mask_mod = mask_mod
        self.seq_lengths = (seqlen_q, seqlen_k)
        self.BLOCK_SIZE = (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)
        self._batch, self._heads, self._device, self._theirs = batch, heads, device, None
        if not fallback:
            meaning(mask_mod, None, device)  # what cannot be expressed is refused here, not at the first call

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


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = _BLOCK_SIZE,
    _compile: bool = False,
    *,
    fallback: bool = False,
) -> BlockMask:
    """Return the mask of ``mask_mod(b, h, q_idx, kv_idx)``, for sequences of ``Q_LEN`` queries and ``KV_LEN`` keys.

    The function is traced, and captured tensors are read once: if a tensor that is compared with itself never
    decreases, as document numbers do, that makes a band. ``BLOCK_SIZE`` is only for ``to_dense``, ``sparsity`` and
    torch; ``_compile`` changes nothing. Raises CallError for a function that the language cannot express, unless
    ``fallback`` leaves such functions to torch.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return BlockMask(mask_mod, B, H, Q_LEN, KV_LEN, where, BLOCK_SIZE, fallback=fallback)


@torch.compiler.disable
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: Any = None,
    fallback: bool = False,
) -> Any:
    """Return attention of query (B, Hq, L, E) over key and value (B, Hkv, S, E), as (B, Hq, L, Ev).

    ``score_mod(score, b, h, q_idx, kv_idx)`` changes the scaled logit; ``block_mask`` says which keys a query sees.
    With ``return_lse`` the result is (out, lse); ``return_aux`` gives (out, AuxOutput), with the log-sum-exp where it
    asks for it. Captured tensors that require gradients get them. ``kernel_options`` tune torch's kernels, and change
    nothing here. What the language cannot express raises CallError, and what no kernel computes NoKernelError; with
    ``fallback``, both run on torch's FlexAttention.
    """
    del kernel_options
    aux = return_aux is not None
    if aux and getattr(return_aux, "max_scores", False):
        raise CallError("return_aux asks for max_scores, which no kernel keeps; lse is there")
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise CallError(
            "block_mask must be made by attngen.integrations.flex_attention.create_block_mask, got "
            f"{type(block_mask).__module__}.{type(block_mask).__name__}"
        )
    _check(query, key, block_mask, enable_gqa)
    wants_lse = return_lse or (aux and getattr(return_aux, "lse", False))
    try:
        found = meaning(None if block_mask is None else block_mask.mask_mod, score_mod, query.device)
        tensors = found.tensors()
        if key.shape[0] == 1 != query.shape[0]:
            key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
        result = calls.attention(
            query,
            key,
            value,
            variant=found.variant,
            softmax_scale=scale,
            layout="bhsd",
            return_lse=wants_lse,
            **tensors,
        )
    except AttngenError:
        if not fallback:
            raise
        return _theirs(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)
    if not aux:
        return result
    from torch.nn.attention.flex_attention import AuxOutput

    out, lse = result if wants_lse else (result, None)
    return out, AuxOutput(lse=lse, max_scores=None)


def _check(query: Tensor, key: Tensor, block_mask: BlockMask | None, enable_gqa: bool) -> None:
    if query.dim() != 4 or key.dim() != 4:
        raise CallError(f"query must have shape (B, H, L, E), got {tuple(query.shape)} and key {tuple(key.shape)}")
    if query.is_nested or key.is_nested:
        raise CallError("nested tensors are not served; attngen.attention_varlen takes packed sequences")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise CallError(f"query has {query.shape[1]} heads and key {key.shape[1]}; enable_gqa=True lets them differ")
    if block_mask is not None and (query.shape[2], key.shape[2]) != block_mask.seq_lengths:
        queries, keys = block_mask.seq_lengths
        raise CallError(
            f"block_mask is for {queries} queries and {keys} keys, but the call has {query.shape[2]} and {key.shape[2]}"
        )


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


def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """Return True: every query sees every key."""
    return batch.new_ones((), dtype=torch.bool)


def and_masks(*mask_mods: Mod) -> Mod:
    """Return a mask_mod that is true where all of these are."""

    def and_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found = b.new_ones((), dtype=torch.bool)
        for mask in mask_mods:
            found = found & mask(b, h, q_idx, kv_idx)
        return found

    return and_mask


def or_masks(*mask_mods: Mod) -> Mod:
    """Return a mask_mod that is true where any of these is."""

    def or_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found = b.new_zeros((), dtype=torch.bool)
        for mask in mask_mods:
            found = found | mask(b, h, q_idx, kv_idx)
        return found

    return or_mask
