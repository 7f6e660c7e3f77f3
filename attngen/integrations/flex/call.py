"""A call of ``flex_attention`` that is not in a program: what its functions mean, checks, and torch's own."""

from __future__ import annotations

from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from attngen.errors import AttngenError, CallError
from attngen.integrations.flex.identity import Watch
from attngen.integrations.flex.mask import BlockMask, Mod
from attngen.integrations.flex.meaning import Traced, meaning
from attngen.integrations.shared import row_maxima
from attngen.runtime.operations.attention import entry as calls

#: Meaning of a score_mod at its last call without a mask, and the facts under which it still holds.
_LAST: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


class _Known:
    """The meaning of functions at a call, until they change: the next call checks that in about a microsecond."""

    __slots__ = ("_score", "_traced", "_watch", "checked")

    def __init__(self, mask_mod: Mod | None, score_mod: Mod | None, traced: Traced) -> None:
        self._watch = Watch(*(one for one in (mask_mod, score_mod) if one is not None))
        try:
            self._score = None if score_mod is None else ref(score_mod)
        except TypeError:  # something that is not a function, and keeps no references
            self._watch.complete = False
        self._traced = traced
        #: Shapes of query and key, and enable_gqa, of which nothing is left to check.
        self.checked: tuple[Any, Any, bool] | None = None

    def of(self, score_mod: Mod | None) -> Traced | None:
        """The meaning for a call with this score_mod, or None."""
        watch = self._watch
        if not watch.complete or score_mod is not (None if self._score is None else self._score()):
            return None
        return self._traced if watch.holds() else None


def last_of(block_mask: BlockMask | None, score_mod: Mod | None) -> _Known | None:
    if block_mask is not None:
        return block_mask.last if block_mask.is_known() else None
    return _LAST.get(score_mod) if type(score_mod) is FunctionType else None


def known(block_mask: BlockMask | None, score_mod: Mod | None, device: torch.device) -> tuple[Traced, _Known]:
    """The meaning of a call's functions, and the object that keeps it for the next one."""
    last = last_of(block_mask, score_mod)
    traced = None if last is None else last.of(score_mod)
    if last is None or traced is None:
        mask_mod = None if block_mask is None else block_mask.function
        traced = meaning(mask_mod, score_mod, device)
        last = _Known(mask_mod, score_mod, traced)
        if block_mask is not None:
            block_mask.last = last
        elif type(score_mod) is FunctionType:
            _LAST[score_mod] = last
    return traced, last


def now(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None, block_mask: BlockMask | None,
    scale: float | None, enable_gqa: bool, return_lse: bool, return_aux: Any, fallback: bool,
) -> Any:  # fmt: skip
    wants_lse, wants_maxima = requested_outputs(block_mask, return_lse, return_aux)
    if block_mask is not None and block_mask.listed:
        block_mask.check_lists()
    check_call(query, key, block_mask, enable_gqa)
    try:
        if block_mask is not None and block_mask.listed:
            _check_lists(query, block_mask)
        traced, last = known(block_mask, score_mod, query.device)
        if key.shape[0] == 1 != query.shape[0]:
            key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
        else:
            last.checked = query.shape, key.shape, enable_gqa
        result = attended(query, key, value, traced.handle, scale, wants_lse, wants_maxima, traced.tensors(query.dtype))
    except AttngenError:
        if not fallback:
            raise
        return _by_torch(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)
    return result if return_aux is None else with_aux(result, wants_lse=wants_lse, wants_maxima=wants_maxima)


def attended(
    query: Tensor, key: Tensor, value: Tensor, variant: str, scale: float | None, wants_lse: bool, wants_maxima: bool,
    tensors: dict[str, Tensor],
) -> Any:  # fmt: skip
    """Output, with the log-sum-exp where one is wanted; where the largest logit of each row is, all three."""
    if wants_maxima:
        return row_maxima.attention(query, key, value, variant=variant, softmax_scale=scale, layout="bhsd", **tensors)
    return calls.attention(
        query, key, value, variant=variant, softmax_scale=scale, layout="bhsd", return_lse=wants_lse, **tensors
    )


def requested_outputs(block_mask: Any, return_lse: bool, return_aux: Any) -> tuple[bool, bool]:
    """Whether the log-sum-exp and the largest logits are asked for. Raises CallError for what is not served."""
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise CallError(
            "block_mask must be made by create_block_mask or BlockMask of attngen.integrations.flex_attention, got "
            f"{type(block_mask).__module__}.{type(block_mask).__name__}"
        )
    if return_aux is None:
        return return_lse, False
    if return_lse:
        raise CallError("return_lse and return_aux cannot both be given; return_aux=AuxRequest(lse=True) has the same")
    if not isinstance(return_aux, AuxRequest):
        raise CallError(f"return_aux must be an AuxRequest, such as AuxRequest(lse=True), got {return_aux!r}")
    return return_aux.lse, return_aux.max_scores


def with_aux(result: Any, *, wants_lse: bool, wants_maxima: bool) -> Any:
    """The output and what torch returns beside it, from the result of ``attended``."""
    if wants_maxima:
        out, lse, maxima = result
        return out, AuxOutput(lse=lse if wants_lse else None, max_scores=maxima)
    out, lse = result if wants_lse else (result, None)
    return out, AuxOutput(lse=lse, max_scores=None)


def _check_lists(query: Tensor, block_mask: BlockMask) -> None:
    """Refuse lists for another number of sequences or heads, or on another device."""
    for axis, name in enumerate(("sequences", "heads")):
        if block_mask.shape[axis] not in (1, query.shape[axis]):
            raise CallError(
                f"block_mask has lists for {block_mask.shape[axis]} {name}, but query has {query.shape[axis]}; "
                "allowed: as many, or 1"
            )
    if block_mask.device.type != query.device.type:
        raise CallError(
            f"block_mask has lists on {block_mask.device}, but query is on {query.device}; block_mask.to(query.device) "
            "moves them"
        )


def check_call(query: Tensor, key: Tensor, block_mask: BlockMask | None, enable_gqa: bool) -> None:
    if query.is_nested or key.is_nested:
        raise CallError("nested tensors are not supported; attngen.attention_varlen takes packed sequences")
    rows, keys = query.shape, key.shape
    if len(rows) != 4 or len(keys) != 4:
        raise CallError(f"query must have shape (B, H, L, E), got {tuple(rows)} and key {tuple(keys)}")
    if not enable_gqa and rows[1] != keys[1]:
        raise CallError(f"query has {rows[1]} heads and key {keys[1]}; enable_gqa=True lets them differ")
    if block_mask is not None and (rows[2], keys[2]) != tuple(block_mask.seq_lengths):
        wanted = "{} queries and {} keys".format(*block_mask.seq_lengths)
        raise CallError(
            f"block_mask is for {wanted}, but the call has {rows[2]} and {keys[2]}; make one for these lengths, or "
            "crop a longer one by block_mask._adjust(queries, keys)"
        )


def _by_torch(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None, block_mask: BlockMask | None,
    scale: float | None, enable_gqa: bool, return_lse: bool, return_aux: Any,
) -> Any:  # fmt: skip
    from torch.nn.attention import flex_attention as flex

    function: Any = torch.compile(flex.flex_attention) if query.is_cuda else flex.flex_attention
    options: dict[str, Any] = {"return_aux": return_aux} if return_aux is not None else {"return_lse": return_lse}
    mask = None if block_mask is None else block_mask.plain()
    return function(
        query, key, value, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=enable_gqa, **options
    )
