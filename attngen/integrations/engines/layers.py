"""Shared parts of the backends for serving engines: a layer's variant, its arguments, and a user's own mask.

Nothing here imports an engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.arch import arch_of
from attngen.cards import KINDS
from attngen.dtypes import CACHE_DTYPES, DTYPES, HEAD_DIM_STEP, HEAD_DIMS, WIDE_HEAD_DIMS
from attngen.errors import CallError, suggest
from attngen.integrations.shared import catalogue
from attngen.integrations.shared.choice import NO_LIMIT
from attngen.lang.variant import Variant
from attngen.runtime.registry.lookup import registry

#: The shipped spec that builds what the backends ask for.
SPEC = "engines"

#: Environment variable that names a mask of the user's own: see ``configured``.
MASK_VARIABLE = "ATTNGEN_MASK"

#: Environment variable with which users ask that keys of blocks which requests share are read once for all of them.
SHARED_VARIABLE = "ATTNGEN_SHARED_PREFIX"

#: Most queries of a request in batches for which a shared prefix is sought. Not measured: products of more rows take as
#: long as the loads.
MOST_SHARED_QUERIES = 8

#: Features of variants that masks of the user's own may have.
SERVES = ("mask", "score", "sink", "keys")

#: Keys that one block reads where results must not depend on the batch.
INVARIANT_SPLIT = 4096

#: Significant bits of a bound of lengths: it is at most a quarter more than the longest.
_BOUND_BITS = 3

#: Queries of a request up to which their number decides between kernels.
_SHORT_PROMPT = 128

#: Layers that a user's mask is for.
_LAYERS = ("all", "full", "sliding")


def bound_of(number: int) -> int:
    """A bound of a number that others share: what is prepared for a size serves later steps with the same bounds."""
    zeros = max(number.bit_length() - _BOUND_BITS, 0)
    return -(-number >> zeros) << zeros


def bound_of_queries(number: int) -> int:
    """A bound of the queries of a request; the number itself where kernels are chosen by it."""
    return bound_of(number) if number > _SHORT_PROMPT else number


@dataclass(frozen=True, slots=True)
class Step:
    """One batch of an engine, as a user's mask sees it: requests in order, their queries packed.

    Of the requests, ``query_starts`` (requests + 1,) and ``lengths`` (requests,) int32 are on the device: where the
    queries of each begin, and how many keys it has, those of its queries included. ``tokens`` counts queries, padding
    too; ``longest_query`` and ``longest`` are bounds.
    """

    query_starts: Tensor
    lengths: Tensor
    tokens: int
    longest_query: int
    longest: int


@dataclass(frozen=True, slots=True)
class Mask:
    """A user's variant for an engine: its name or the value of ``attngen.variant``, and its arguments.

    ``arguments`` are numbers and tensors by name, or a function of a ``Step`` that returns them; it is called once a
    step, before the layers run. A variant that declares ``window``, ``sinks``, ``slope`` or ``cap`` gets those of the
    layer. ``layers``: all decoder layers, or only those without (``full``) or with a sliding window (``sliding``).
    Raises CallError for other types and layers.
    """

    variant: str | Variant
    arguments: Mapping[str, Any] | Callable[[Step], Mapping[str, Any]] = field(default_factory=dict)
    layers: str = "all"

    def __post_init__(self) -> None:
        variant: object = self.variant
        if not isinstance(variant, (str, Variant)):
            kind = type(variant).__name__
            raise CallError(f"the variant of a mask is a name or what attngen.variant returns, got a {kind}")
        arguments: object = self.arguments
        if not (isinstance(arguments, Mapping) or callable(arguments)):
            kind = type(arguments).__name__
            raise CallError(f"arguments of a mask are a mapping or a function of a Step, got a {kind}")
        if self.layers not in _LAYERS:
            nearest = suggest(str(self.layers), _LAYERS)
            raise CallError(f"layers of a mask must be one of {', '.join(_LAYERS)}, got {self.layers!r}{nearest}")

    def of_step(self, step: Step) -> Mapping[str, Any]:
        """Arguments of a step."""
        return self.arguments(step) if callable(self.arguments) else self.arguments

    def for_window(self, window: int | None) -> bool:
        """Whether it is for layers with such a window, None for none."""
        return self.layers == "all" or (self.layers == "full") == (window is None)


def asked_for(variable: str) -> bool:
    """Whether an environment variable is set to anything but 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def shared_prefixes() -> int:
    """The most prefixes of a batch whose keys are read once, as ``ATTNGEN_SHARED_PREFIX`` says; 0 without it. Raises
    CallError for a text that is no number."""
    given = os.environ.get(SHARED_VARIABLE) or "0"
    if not given.isascii() or not given.isdigit():
        raise CallError(f"{SHARED_VARIABLE} must be the most prefixes that requests of a batch share, got {given!r}")
    return int(given)


def leading_decodes(starts: Tensor) -> int:
    """Number of sequences before the first one that has more than one query; 0 where none has. ``starts``: where the
    queries of each begin, on the host."""
    before = 0  # a loop of a list: a step's operators of torch take longer, and ten times as long after other work
    for sequence, start in enumerate(starts.tolist()):
        if start - before > 1:
            return sequence - 1
        before = start
    return 0


def configured(setting: Any = None) -> Mask | None:
    """The user's mask: that of ``setting``, else of the environment variable ``ATTNGEN_MASK``, or None.

    Either is a ``Mask``; the name of a variant, built or a preset; ``module:attribute``, a ``Mask`` or what
    ``attngen.variant`` returned; or a mapping, in the variable as JSON, with ``mask`` (one of these names),
    ``arguments`` and ``layers``. Raises CallError for anything else.
    """
    if setting is None:
        setting = os.environ.get(MASK_VARIABLE) or None
    if setting is None or isinstance(setting, Mask):
        return setting
    if isinstance(setting, str) and setting.lstrip().startswith("{"):
        try:
            setting = json.loads(setting)
        except ValueError as error:
            raise CallError(f"{MASK_VARIABLE} is not JSON: {error}") from None
    if isinstance(setting, str):
        return _named(setting)
    if not isinstance(setting, Mapping) or not isinstance(setting.get("mask"), str):
        raise CallError(f"a mask is a name, or a mapping with 'mask', 'arguments' and 'layers', got {setting!r}")
    unknown = sorted(set(setting) - {"mask", "arguments", "layers"})
    if unknown:
        raise CallError(f"a mask has no field '{unknown[0]}', only 'mask', 'arguments' and 'layers'")
    mask = _named(setting["mask"])
    return Mask(mask.variant, setting.get("arguments", mask.arguments), setting.get("layers", mask.layers))


def _named(name: str) -> Mask:
    module, colon, attribute = name.partition(":")
    if not colon:
        return Mask(name)
    try:
        value = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise CallError(f"the mask '{name}' cannot be imported: {error}") from None
    if isinstance(value, Mask):
        return value
    if isinstance(value, (str, Variant)):
        return Mask(value)
    raise CallError(f"the mask '{name}' is a {type(value).__name__}, not a Mask or what attngen.variant returns")


class VariantCall(NamedTuple):
    """A variant and its arguments, as the calls take them."""

    variant: str | Variant
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The variant's name."""
        return self.variant.name if isinstance(self.variant, Variant) else str(self.variant)


def _shipped(name: str, arguments: Mapping[str, Any]) -> VariantCall:
    """A variant of the shipped specs: kernels that compute exactly it serve, whichever package has them."""
    return VariantCall(catalogue.variant(name), arguments)


@dataclass(frozen=True, slots=True)
class Layer:
    """An attention layer of a model. ``window`` counts the keys that a query sees, its own included; ``slopes`` (h,)
    are ALiBi's, ``sinks`` (h,) logits that join the softmax, both float32."""

    window: int | None = None
    softcap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None

    def causal(self) -> VariantCall:
        """Keys up to the query's own, within the window."""
        window = {} if self.window is None else {"window": self.window}
        if self.slopes is not None:
            return self.sides(self._left(), 0) if window else _shipped("alibi", {"slope": self.slopes})
        if self.softcap:
            return _shipped("softcap_window" if window else "softcap", {"cap": self.softcap, **window})
        name = "sliding_window" if window else "causal"
        if self.sinks is not None:
            return _shipped(f"{name}_sink", {"sinks": self.sinks, **window})
        return _shipped(name, window)

    def bidirectional(self) -> VariantCall:
        """Keys before and after the query, within the window on both sides."""
        side = NO_LIMIT if self.window is None else self.window - 1
        plain = side == NO_LIMIT and not self.softcap and self.slopes is None and self.sinks is None
        return _shipped("full", {}) if plain else self.sides(side, side)

    def sides(self, left: int, right: int) -> VariantCall:
        """Keys from ``left`` before the query to ``right`` after it; -1 is no limit."""
        window = {"left": left, "right": right}
        if self.slopes is not None:
            return _shipped("window_slope", {"slope": self.slopes, **window})
        if self.softcap:
            return _shipped("window_softcap", {"cap": self.softcap, **window})
        if self.sinks is not None:
            return _shipped("window_sink", {"sinks": self.sinks, **window})
        return _shipped("window", window)

    def by_request(self, causal: Tensor) -> VariantCall:
        """Causal for requests whose flag, int32, is not 0; bidirectional for others."""
        self._only_windows("causal flags of requests")
        return _shipped("causal_by_request", {"left": self._left(), "causal": causal})

    def with_images(self, first: Tensor, last: Tensor, clamped: bool) -> VariantCall:
        """Causal, and both ways within the range of positions that each query has; ``clamped`` to the window."""
        if self.slopes is not None or self.sinks is not None:
            raise CallError("image ranges are not served together with ALiBi or sinks")
        limit = self._left() if clamped else NO_LIMIT
        arguments = {"left": self._left(), "limit": limit, "first": first, "last": last}
        if self.softcap:
            return _shipped("image_ranges_softcap", {"cap": self.softcap, **arguments})
        return _shipped("image_ranges", arguments)

    def with_prompts(self, prompt: Tensor, window: int) -> VariantCall:
        """Causal, all keys of each request's prompt, and the last ``window`` ones."""
        self._only_windows("reference sliding windows")
        return _shipped("prompt_window", {"prompt": prompt, "window": window})

    def with_tree(self, tree: Tensor) -> VariantCall:
        """Keys before the queries, which are drafts, and of these the ones that ``tree`` (requests, drafts, drafts)
        shows to each."""
        if self.window is not None:
            raise CallError("trees of drafts are served for layers without windows only")
        self._only_windows("trees of drafts")
        return _shipped("draft_tree", {"tree": tree})

    def own(self, mask: Mask) -> VariantCall:
        """A user's mask in place of the layer's, with what the layer gives to it. Raises CallError where the layer has
        what the variant does not declare."""
        variant = _variant_of(mask.variant)
        variant.require(SERVES, "a serving engine")
        declared = {scalar.name for scalar in variant.scalars} | {tensor.name for tensor in variant.tensors}
        given = {"window": self.window, "cap": self.softcap or None, "slope": self.slopes, "sinks": self.sinks}
        for name, label in (("cap", "a soft cap"), ("slope", "ALiBi slopes"), ("sinks", "sinks")):
            if given[name] is not None and name not in declared:
                raise CallError(f"the layer has {label}, but the mask '{variant.name}' declares no '{name}'")
        arguments = {name: value for name, value in given.items() if name in declared and value is not None}
        if not callable(mask.arguments):
            arguments |= mask.arguments
            needed = {s.name for s in variant.scalars if s.default is None} | {t.name for t in variant.tensors}
            if missing := sorted(needed - set(arguments)):
                raise CallError(
                    f"the mask '{variant.name}' needs {', '.join(missing)}, which its arguments do not have"
                )
        named = type(mask.variant) is str and catalogue.is_shipped(mask.variant)
        return VariantCall(variant if named else mask.variant, arguments)

    def _left(self) -> int:
        return NO_LIMIT if self.window is None else self.window - 1

    def _only_windows(self, what: str) -> None:
        if self.softcap or self.slopes is not None or self.sinks is not None:
            raise CallError(f"{what} are served for layers without soft-capping, ALiBi and sinks only")


def combination_reason(softcap: bool, alibi: bool, sinks: bool) -> str | None:
    """The parts of a layer that no variant has together, or None."""
    both = [name for name, given in (("soft-capping", softcap), ("ALiBi", alibi), ("sinks", sinks)) if given]
    return f"{both[0]} together with {both[1]}" if len(both) > 1 else None


def _variant_of(name: str | Variant) -> Variant:
    """The definition of a variant: the value itself, that of a preset, or what a package has of this name."""
    if isinstance(name, Variant):
        return name
    value = getattr(name, "value", None)
    if isinstance(value, Variant):
        return value
    if catalogue.is_shipped(name):
        return catalogue.variant(name)
    return registry.find(name).variant


def head_dim_reason(head_dim: int, *, fp8: bool = False) -> str | None:
    """Reason why no kernel has this head dimension, over a cache in ``fp8`` or in 16 bits; None if one does."""
    step = DTYPES[CACHE_DTYPES[0]].chunk_elements if fp8 else HEAD_DIM_STEP
    if head_dim % step == 0 and head_dim in (*HEAD_DIMS, *WIDE_HEAD_DIMS):
        return None
    cache = " over a cache in fp8" if fp8 else ""
    return f"head size {head_dim}{cache} is not a multiple of {step} from {step} to {WIDE_HEAD_DIMS[-1]}"


def card_reason(major: int, minor: int, *kinds: str) -> str | None:
    """The first of some ``kinds`` of kernels (``cards.KINDS``) that cannot be built for a card, in words, or None."""
    arch = arch_of(10 * major + minor)
    for kind in kinds:
        arches = KINDS[kind].arches
        if arch is None or arch.name not in arches:
            return f"{kind}, of which there are kernels for {', '.join(arches)}; the card is sm{major}{minor}"
    return None


def paged_kinds(head_dim: int, *, fp8: bool) -> list[str]:
    """Kinds of kernels (``cards.KINDS``) that layers over a cache ask for, of which ``head_dim`` is the largest."""
    return ["keys in pages", *["head dims beyond 256"] * (head_dim > HEAD_DIMS[-1]), *["caches in e4m3"] * fp8]


def image_ranges(
    ranges: Mapping[int, list[tuple[int, int]]], query_starts: Tensor, lengths: Tensor, out: Tensor
) -> int:
    """Write the range of positions that each query of a batch belongs to, and return how many queries are written.

    ``ranges`` has the first and the last position of each image by the index of its request; ``query_starts`` and
    ``lengths`` are on the CPU. ``out`` is (2, most queries) int32: first and last positions, -1 for text. Nothing is
    written, and 0 returned, where no query lies in a range.
    """
    starts = query_starts.tolist()
    inside = []
    for request, pairs in ranges.items():
        begin, end = starts[request], starts[request + 1]
        before = int(lengths[request]) - (end - begin) if end > begin else 0
        for first, last in pairs:
            low, high = max(first - before, 0), min(last - before, end - begin - 1)
            if first < last and low <= high:
                inside.append((begin + low, begin + high + 1, first, last))
    if not inside:
        return 0
    out[:, : starts[-1]] = -1
    for begin, end, first, last in inside:
        out[0, begin:end], out[1, begin:end] = first, last
    return int(starts[-1])


def scale_of_requests(scale: Tensor, requests: int, kv_heads: int) -> Tensor:
    """The scale of a layer's cache as ``attention_paged`` takes it, a view: () or one for each KV head."""
    return scale.reshape(()) if scale.numel() == 1 else scale.reshape(1, kv_heads).expand(requests, kv_heads)


def float32_on(device: torch.device, numbers: Any) -> Tensor | None:
    """Numbers of a layer, such as slopes, as float32 on a device; None stays None."""
    return None if numbers is None else torch.as_tensor(numbers, dtype=torch.float32, device=device)
