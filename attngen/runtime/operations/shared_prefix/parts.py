"""The variants of the two parts of attention behind a shared prefix, and which of a call's arguments each takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attngen.errors import CallError
from attngen.lang.ir import names, tensors
from attngen.lang.printing import canonical
from attngen.lang.variant import VISIBLE, Variant
from attngen.runtime.cache import RecentCache
from attngen.runtime.registry.binding import find
from attngen.runtime.registry.lookup import registry

#: Features of variants whose queries see every key of a prefix, and see it in the same way wherever they stand.
_SERVED = {"mask", "score", "sink", "sink_in_lse"}
_CAUSAL = "q_pos >= kv"

#: What a score may read beside its own scalars and tensors: a prefix is one of other sequences, at other positions.
_OF_SCORE = {"s", "h", "hk"}


@dataclass(frozen=True)
class PrefixParts:
    """Variant of the keys of a prefix, which shows all of them, and the arguments of a call that it takes: the others
    are of the keys that each sequence has of its own.

    ``by_sequence`` is the name of the variant if it tells sequences apart. ``kept``: what keys of parts refer to by
    identity.
    """

    prefix: str | Variant
    arguments: frozenset[str]
    by_sequence: str
    kept: object

    def of_prefix(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the part of the prefix."""
        return {name: value for name, value in arguments.items() if name in self.arguments}


_PARTS: RecentCache[PrefixParts] = RecentCache(64)


def parts_of(variant: str | Variant, package: str | None) -> PrefixParts:
    """The parts of a variant. Raises CallError for one whose queries do not see all keys before them, or whose score
    depends on where they stand."""
    key = (variant if isinstance(variant, str) else id(variant), package, registry.generation)
    parts = _PARTS[key]
    if parts is None:
        parts = _found(variant, package)
        _PARTS.put(key, parts)
    return parts


def _found(variant: str | Variant, package: str | None) -> PrefixParts:
    known = find(variant, package).variant
    known.require(_SERVED, "a shared prefix")
    if known.masked and canonical(known.mask) != _CAUSAL:
        raise CallError(f"{known.name}: its mask may hide keys of a shared prefix; allowed: full and causal masks")
    by_sequence = known.name if known.sink is not None and "b" in names(known.sink) else ""
    if known.score is None:
        return PrefixParts("full", frozenset(), by_sequence, variant)
    read, loaded = names(known.score), tensors(known.score)
    if beyond := sorted(read - {one.name for one in known.scalars} - _OF_SCORE):
        raise CallError(
            f"{known.name}: its score reads '{beyond[0]}', which a shared prefix does not know; allowed: "
            f"{', '.join(sorted(_OF_SCORE))}, and scalars and tensors of the variant"
        )
    scalars = tuple(one for one in known.scalars if one.name in read or one.const is not None)
    of_score = tuple(tensor for tensor in known.tensors if tensor.name in loaded)
    prefix = replace(
        known, name=f"{known.name}_full", mask=VISIBLE, mask_text=None, sink=None, sink_text=None, sink_in_lse=True,
        scalars=scalars, tensors=of_score,
    )  # fmt: skip
    return PrefixParts(prefix, frozenset((*(one.name for one in prefix.arguments), *loaded)), by_sequence, variant)
