"""A call of ``flex_attention`` in a program that torch compiles. Imported by such calls alone: torch's compiler takes a
second to import."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime

from attngen.errors import AttngenError
from attngen.integrations.flex.call import attended, check_call, now, requested_outputs, with_aux
from attngen.integrations.flex.mask import PROGRAMS, UNASKED, BlockMask, Mod
from attngen.integrations.flex.meaning import Functions, argument, in_double, meaning
from attngen.integrations.flex.paths import NoPathError, follow, paths_of


def in_a_program(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None, block_mask: BlockMask | None,
    scale: float | None, *, enable_gqa: bool, return_lse: bool, return_aux: Any,
) -> Any:  # fmt: skip
    """The same, traced: what the functions mean is a constant, and all that it depends on is read here.

    A mask means what it meant when it was made. Nothing is taken for granted of what a score_mod's tensors hold. Where
    the program cannot read what a function captures, its graph breaks.
    """
    wants_lse, wants_maxima = requested_outputs(block_mask, return_lse, return_aux)
    check_call(query, key, block_mask, enable_gqa)
    _ask_all()
    double = query.dtype == torch.float64
    handle, tensors, of_mask = None, {}, {}
    if block_mask is not None:
        handle, of_mask = block_mask.handle, block_mask.double_tensors if double else block_mask.tensors
    unread = block_mask is not None and handle is None
    if unread or (score_mod is not None and (_made_inside(score_mod) or _is_partial_of_tensors(score_mod))):
        handle = None
    elif score_mod is not None or block_mask is None:
        mask_mod = None if block_mask is None else block_mask.mask_mod
        handle, entries, numbers = _meaning_at_trace(mask_mod, score_mod, query.device.type, double)
        for path, expected in numbers:
            if follow(score_mod, path) != expected:  # never: reading and comparing makes the guard
                handle = None
        for name, path, shape, dtype in entries:
            tensor = of_mask[name] if path is None else follow(score_mod, path)
            if list(tensor.shape) != list(shape):  # torch 2.11 cannot trace the comparison of the tuples
                handle = None
            if path is not None:
                tensor = tensor.view(1) if not shape else tensor
                tensor = tensor if dtype is None else tensor.to(dtype)
            tensors[name] = tensor
    elif handle is not None:
        tensors = of_mask
    if handle is None:
        return _outside_of_the_graph(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux, False
        )
    if key.shape[0] == 1 != query.shape[0]:
        key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    result = attended(query, key, value, handle, scale, wants_lse, wants_maxima, tensors)
    return result if return_aux is None else with_aux(result, wants_lse=wants_lse, wants_maxima=wants_maxima)


@torch.compiler.assume_constant_result
def _ask_all() -> bool:
    """Find out what masks mean that exist, before a program reads it; those made from now on find out at once."""
    PROGRAMS[0] = True
    while UNASKED:
        UNASKED.pop().ask()
    return True


#: Whether the score_mod that is being traced has no source: set and read while torch traces.
_SOURCELESS = [False]


def _made_inside(score_mod: Any) -> bool:
    """Whether the traced program made this function, so that no path leads to what it captures.

    Only the compiler knows. What it says about attributes of such a function, its closure for one, differs from release
    to release.
    """
    comptime(_note_source)
    return _sourceless()


def _is_partial_of_tensors(score_mod: Any) -> bool:
    """Whether a partial function has arguments that a trace cannot take for constants."""
    if not isinstance(score_mod, partial):
        return False
    given = (*score_mod.args, *score_mod.keywords.values())
    return not all(isinstance(one, bool | int | float | str) for one in given)


def _note_source(context: Any) -> None:
    score_mod = context.get_local("score_mod")._i_will_not_complain_if_bc_breaks_VariableTracker()
    _SOURCELESS[0] = score_mod.source is None


@torch.compiler.assume_constant_result
def _sourceless() -> bool:
    return _SOURCELESS[0]


_outside_of_the_graph = torch.compiler.disable(now)


@torch.compiler.assume_constant_result
def _meaning_at_trace(
    mask_mod: Mod | None, score_mod: Mod | None, device: str, double: bool
) -> tuple[str | None, tuple[Any, ...], tuple[Any, ...]]:
    """Return the name of the variant; of each of its tensors the name, the path from the score_mod (None for the
    mask's), shape, and the dtype that it is converted to, of a call in float64 if ``double``; and the numbers that the
    score_mod reads, by path.

    The name is None where a trace cannot say it: what is wrong is told by the call that then runs.
    """
    where = torch.device(device)
    entries: list[tuple[str, Any, tuple[int, ...], torch.dtype | None]] = []
    try:
        paths, numbers = ({}, ()) if score_mod is None else paths_of(score_mod)
        shared = [] if mask_mod is None else [tensor for _, tensor in meaning(mask_mod, None, where).captured()]
        of_mask = {id(tensor) for tensor in shared}
        traced = Functions(mask_mod, score_mod, where).meaning_whatever_they_hold(shared)
        for one, tensor in traced.captured():
            if id(tensor) in of_mask:
                given = argument(tensor, one.converted, scalar=not one.dims)
                entries.append((one.name, None, tuple(given.shape), None))
            else:  # what no path leads to was made inside the function
                converted = in_double(one.converted) if double else one.converted
                entries.append((one.name, paths[id(tensor)], tuple(tensor.shape), converted))
    except (AttngenError, NoPathError, KeyError):
        return None, (), ()
    return traced.handle, tuple(entries), numbers
