"""Calls that are recognized by their tensors: an earlier call had the same, but for their places in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from attngen.lang.dropout import DROPOUT_P
from attngen.lang.listed import INDICES
from attngen.runtime.arguments.addresses import FORWARD
from attngen.runtime.arguments.given import TENSORS, Given, kind_settings_of
from attngen.runtime.arguments.keys import NUMBERS, PLAIN
from attngen.runtime.arguments.kinds import INDEX_VECTORS, by_page, free_of
from attngen.runtime.arguments.seen import SeenTensors, seen
from attngen.runtime.cache import PREPARED_CALLS, RecentCache
from attngen.runtime.registry.lookup import registry

if TYPE_CHECKING:
    from attngen.runtime.arguments.checked import Results
    from attngen.runtime.autograd.training import TrainedCall
    from attngen.runtime.launch.chain import Sized
    from attngen.runtime.launch.prepared import PreparedCall, Repeats
    from attngen.runtime.launch.ragged import RaggedCalls

#: The tensors of an earlier call, or of an earlier call of a kind, and what ran it: a prepared call, or those of the
#: kind. By ``seen_key``: a call with tensors like these is recognized in one step, without any other key. False: its
#: tensors cannot be recognized.
SEEN: RecentCache[tuple[SeenTensors, PreparedCall | TrainedCall | None, RaggedCalls | None] | Literal[False]] = (
    RecentCache(PREPARED_CALLS)
)


#: Key of a call in ``SEEN``, and the tensors of its variant.
Lookup = tuple[tuple[object, ...], tuple[Tensor, ...]]


def seen_key(given: Given) -> Lookup | None:
    """Key of a call that ``may_repeat`` in ``SEEN``, and the tensors of its variant; None if its arguments have to be
    looked at each time."""
    q, arguments, variant = given.q, given.arguments, given.variant
    own: tuple[Tensor, ...] = ()
    names: tuple[object, ...] = ()
    if given.tile_map is not None:
        return None
    if arguments:
        for name, value in arguments.items():
            if type(value) in PLAIN:
                own += (value,)
                names += ((name,),)
            elif type(value) in NUMBERS and name != DROPOUT_P.name:
                names += (name,)
            else:
                return None
    try:
        lengths: tuple[object, ...] = ()
        if of_one_size(given):
            shapes = [tensor.shape for tensor in own]
            lengths = q.shape, given.k.shape, given.max_seqlen_q, given.max_seqlen_k, *shapes
        elif given.page_table is not None:  # layers may have caches of several sizes
            shape, q_scale, k_scale, v_scale = given.k.shape, given.q_descale, given.k_descale, given.v_descale
            lengths = shape
            if k_scale is not None or q_scale is not None or v_scale is not None:
                lengths = shape, by_page((q_scale, k_scale, v_scale), shape[0])
    except (AttributeError, RuntimeError):  # a nested tensor, or none at all
        return None
    chosen = variant if isinstance(variant, str) else id(variant)
    # torch's check asks whether tensors require gradients, but not whether these are recorded
    learns = torch.is_grad_enabled()
    return (chosen, registry.generation, kind_settings_of(given), lengths, names, learns), own


def of_one_size(given: Given) -> bool:
    """Whether the key of a call in ``SEEN`` has its lengths, as of calls that have no kind."""
    return given.form == "dense" or INDICES.name in given.arguments


def note_seen(
    lookup: Lookup | None,
    given: Given,
    prepared: PreparedCall | TrainedCall | None = None,
    calls: RaggedCalls | None = None,
) -> None:
    """Remember the tensors of a call that is made for the second time, so that the next one is recognized by them.

    ``lookup``: what ``seen_key`` returned, or None for a call that is not to be remembered. The call ran ``prepared``,
    or as one of ``calls``.
    """
    if lookup is None or SEEN[lookup[0]] is False:
        return
    free = {} if calls is None else free_of(given)
    noted = seen(given, lookup[1], range(len(TENSORS)), len(FORWARD), INDEX_VECTORS, free)
    SEEN.put(lookup[0], False if noted is None else (noted, prepared, calls))


def of_its_kind(calls: RaggedCalls | None, result: Results, repeats: Repeats | None) -> Results:
    """The result of a call. What repeats it learns what serves its kind, if that has prepared calls."""
    if repeats and repeats[-1] is not None and calls is not None:
        repeats[-1].calls = calls
    return result


def calls_of_kind(given: Given) -> RaggedCalls | None:
    """Prepared calls of the kind of a call that is recognized by its tensors; or None."""
    lookup = seen_key(given)
    alike = None if lookup is None else SEEN[lookup[0]]
    return alike[2] if alike else None


def recognized(given: Given) -> tuple[PreparedCall | TrainedCall, Sized | None] | None:
    """The prepared call of a call recognized by its tensors, and its numbers where it is one of a kind; or None."""
    lookup = seen_key(given)
    alike = None if lookup is None else SEEN[lookup[0]]
    if lookup is None or not alike:
        return None
    tensors, prepared, calls = alike
    if tensors.addresses(given, lookup[1]) is None:
        return None
    if calls is not None:
        return calls.ready(given)
    return None if prepared is None else (prepared, None)
