"""The arguments of each variant in a benchmark, and its form in other libraries.

The presets that peers know are in a table, written by hand: their arguments, FlexAttention's functions, and the flags
of kernels with fixed masks. All other variants get values by their declarations, and have no peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attngen.inspect.cases import Case
from attngen.inspect.efficiency import scalars_of
from attngen.inspect.values import arguments_of, extents_of
from attngen.lab.bench.cases import BenchCase
from attngen.lang.eager import evaluate
from attngen.lang.variant import Variant
from attngen.schema import preset

#: Keys that a window shows, keys that a prefix holds, tokens of a packed document, bound of the capped logits.
WINDOW, PREFIX, DOCUMENT, SOFTCAP = 1024, 4096, 1300, 30.0

#: Features of variants beside which the mask alone decides how many pairs are counted.
SERVES = ("mask", "score", "sink", "dropout", "sink_in_lse", "weights", "max_logits")

#: Pairs whose mask is evaluated at a time.
_PAIRS = 2**22

#: Factors by which the range of integer tensors without a declared one is narrowed, until no index of the mask leaves
#: its extent.
_CALM = (1.0, 0.5, 0.0)


@dataclass(frozen=True, slots=True)
class Flags:
    """A variant as flags of kernels with a fixed set of masks. ``window`` counts the keys that a query sees."""

    causal: bool = False
    window: int | None = None
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class Terms:
    """A preset in the terms of other libraries.

    ``mask_mod`` and ``score_mod`` are FlexAttention's, None where they would change nothing; ``per_sequence`` says that
    the mask differs between sequences. ``flags`` is None for what flags cannot express. ``sinks`` are logits of the
    heads, float32.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    per_sequence: bool = False
    flags: Flags | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """A case with the arguments of its variant, and the pairs that its mask shows over all heads and sequences.

    ``terms`` is None for a variant that no peer knows.
    """

    case: BenchCase
    variant: Variant
    arguments: Mapping[str, Any]
    pairs: float
    terms: Terms | None

    @property
    def flops(self) -> float:
        """Floating-point operations of one call."""
        return self.case.flops(self.pairs)


def workload(variant: Variant, case: BenchCase, device: torch.device | str) -> Workload:
    """The arguments of a variant in a case; the same in every run.

    Raises ValueError for a variant whose tensors would be too large, IndexError for one whose mask reads a tensor out
    of its extent, whatever its integers hold.
    """
    terms = terms_of(variant, case, device)
    if terms is not None:
        if terms.flags == Flags(causal=True) and terms.sinks is None:  # half of the square, as all libraries count it
            pairs = case.batch * case.heads * case.seqlen**2 / 2
        else:
            pairs = visible_pairs(variant, case, terms.arguments, device)
        return Workload(case, variant, terms.arguments, pairs, terms)
    raised: IndexError | None = None
    for calm in _CALM:
        generator = torch.Generator().manual_seed(0)
        drawn = arguments_of(variant, _shape(case), "dense", generator, calm, scalars_of(variant, {}))
        arguments = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in drawn.items()}
        try:
            return Workload(case, variant, arguments, visible_pairs(variant, case, arguments, device), None)
        except IndexError as error:
            raised = error
    assert raised is not None
    raise raised


def visible_pairs(variant: Variant, case: BenchCase, arguments: Mapping[str, Any], device: torch.device | str) -> float:
    """Count the pairs of a query and a key that the mask shows, exactly, over all heads and sequences."""
    variant.require(SERVES, "a benchmark, which counts the pairs of the mask,")
    if not variant.masked:
        return case.batch * case.heads * case.seqlen**2
    variables, loaded = variant.uses(variant.mask)
    # The count depends only on what the mask reads.
    batches = case.batch if loaded or variables & {"b", "q_global", "kv_global"} else 1
    heads = case.heads if variables & {"h", "hk"} else 1
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    names: dict[str, Any] = {
        **{scalar.name: scalar.const for scalar in variant.scalars if scalar.const is not None},
        **{name: value for name, value in arguments.items() if name not in tensors},
        **extents_of(_shape(case), "dense"),
    }
    kv = torch.arange(case.seqlen, device=device)[None, :]
    step = max(_PAIRS // case.seqlen, 1)
    counted = 0
    for b, h in product(range(batches), range(heads)):
        names |= {"b": b, "h": h, "hk": h // (case.heads // case.kv_heads)}
        for first in range(0, case.seqlen, step):
            q = torch.arange(first, min(first + step, case.seqlen), device=device)[:, None]
            names |= {"q": q, "q_pos": q, "kv": kv}
            names |= {"q_global": q + b * case.seqlen, "kv_global": kv + b * case.seqlen}
            visible = evaluate(variant.mask, names, tensors).broadcast_to((len(q), case.seqlen))
            counted += int(visible.sum())
    return counted * (case.batch // batches) * (case.heads // heads)


def _shape(case: BenchCase) -> Case:
    lengths = (case.seqlen,) * case.batch
    return Case(case.name, lengths, lengths, case.heads, case.kv_heads)


# --- presets in the terms of other libraries ----------------------------------------------------------------


def terms_of(variant: Variant, case: BenchCase, device: torch.device | str) -> Terms | None:
    """A variant in the terms of other libraries, which give no largest logits; None unless it is exactly a preset of
    the table."""
    variant = variant.without_max_logits()
    write = _TERMS.get(variant.name)
    return write(case, device) if write is not None and variant == preset(variant.name) else None


def _causal_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def _full(case: BenchCase, device: torch.device | str) -> Terms:
    return Terms(flags=Flags())


def _causal(case: BenchCase, device: torch.device | str) -> Terms:
    return Terms(mask_mod=_causal_mask, flags=Flags(causal=True))


def _causal_sink(case: BenchCase, device: torch.device | str) -> Terms:
    # the same numbers in 16 bits, as some libraries take them
    sinks = torch.linspace(-1.0, 1.0, case.heads, device=device, dtype=torch.float32).bfloat16().float()
    return Terms({"sinks": sinks}, _causal_mask, flags=Flags(causal=True), sinks=sinks)


def _sliding_window(case: BenchCase, device: torch.device | str) -> Terms:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < WINDOW)

    return Terms({"window": WINDOW}, mask, flags=Flags(causal=True, window=WINDOW))


def _prefix_lm(case: BenchCase, device: torch.device | str) -> Terms:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) | (kv < PREFIX)

    return Terms({"prefix": torch.full((case.batch,), PREFIX, device=device, dtype=torch.int32)}, mask)


def _packed_documents(case: BenchCase, device: torch.device | str) -> Terms:
    doc = torch.arange(case.seqlen, device=device, dtype=torch.int32) // DOCUMENT
    doc = doc.expand(case.batch, case.seqlen).contiguous()

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (doc[b, q] == doc[b, kv])

    return Terms({"doc": doc}, mask, per_sequence=case.batch > 1)


def _softcap(case: BenchCase, device: torch.device | str) -> Terms:
    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return SOFTCAP * torch.tanh(s / SOFTCAP)

    return Terms({"cap": SOFTCAP}, _causal_mask, score, flags=Flags(causal=True, softcap=SOFTCAP))


def _alibi(case: BenchCase, device: torch.device | str) -> Terms:
    slope = torch.exp2(-8.0 * (torch.arange(case.heads, device=device) + 1) / case.heads).float()

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + slope[h] * (kv - q)

    return Terms({"slope": slope}, _causal_mask, score)


_TERMS: dict[str, Callable[[BenchCase, torch.device | str], Terms]] = {
    "full": _full,
    "causal": _causal,
    "causal_sink": _causal_sink,
    "sliding_window": _sliding_window,
    "prefix_lm": _prefix_lm,
    "packed_documents": _packed_documents,
    "softcap": _softcap,
    "alibi": _alibi,
}
