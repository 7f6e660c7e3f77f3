"""Explanations of the kernels of a spec: their plans, and what is counted for given lengths, scalars and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngen.build.pipeline import plans as plans_of
from attngen.errors import CallError, LoadError, suggest
from attngen.inspect.explanation import Band, PlanExplanation, scalar_text
from attngen.inspect.gradients import GradientFloors
from attngen.inspect.predicted import predicted
from attngen.lang.bands import bands
from attngen.lang.facts import Facts
from attngen.lang.ir import names
from attngen.lang.parser import FLOAT32_MAX
from attngen.lang.ranges import DTYPE_RANGES
from attngen.operations import ATTENTION, JVP, operation_of
from attngen.parts.columns import padded_width
from attngen.parts.explained.base import ScheduleExplanation, explanation_of
from attngen.parts.explained.floor import HeadFloor
from attngen.plan.budget import shared_memory
from attngen.plan.model import Plan
from attngen.schema import load_spec

if TYPE_CHECKING:
    import torch

    from attngen.inspect.visits import Visits
    from attngen.lang.variant import Scalar, Variant

#: Lengths at which the efficiency of one kernel is shown, and of each in a list of many.
SEQLENS, SEQLENS_OF_MANY = (1024, 4096, 8192), (2048,)

#: Tiles along an axis of a picture, unless a given tensor or length needs more.
_MOST_TILES = 64


def explain_spec(
    spec: str | Path,
    kernel: str | None = None,
    *,
    seqlens: Sequence[int] | None = None,
    given: Mapping[str, str] | None = None,
    files: Mapping[str, Path] | None = None,
    seed: int = 0,
    b: int | None = None,
    h: int | None = None,
    pictures: bool = False,
) -> list[PlanExplanation]:
    """Explain the attention kernels of a spec, or those of them whose name contains ``kernel``.

    ``given`` maps scalars to their values as text, for the tile efficiency at ``seqlens``, and ``files`` tensors to
    files of their values (see ``tensor_files.read_tensor``); others hold random values by ``seed`` (see ``assumed``).
    Where a mask differs by head or sequence, all of them are counted, or those of sequence ``b`` and head ``h``.
    With ``pictures`` each has the tiles of a picture. Raises SpecError if the spec is wrong, CallError if there is no
    such kernel, scalar or tensor, or if a value is not as declared.
    """
    known = [plan for _, plan in plans_of(load_spec(spec))]
    plans = [plan for plan in known if kernel is None or kernel in plan.name]
    exact = [plan for plan in plans if plan.name == kernel]
    plans = exact or plans
    if not plans:
        names = [plan.name for plan in known]
        hint = suggest(str(kernel), names) or "".join(f"; its first: {name}" for name in names[:1])
        raise CallError(f"{spec} has no kernel '{kernel}'{hint}")
    plans = [plan for plan in plans if operation_of(plan.direction) is ATTENTION]
    values = _values(plans, given or {})
    measured = _MeasuredTiles(
        seqlens, SEQLENS if len(plans) == 1 else SEQLENS_OF_MANY, values, _tensors(plans, files or {}), seed, b, h
    )
    explained = [_explain(plan, measured) for plan in plans]
    if not pictures:
        return explained
    drawn = [measured.tiles(plan) for plan in plans]
    return [replace(one, tiles_seqlen=n, tiles=tiles) for one, (n, tiles) in zip(explained, drawn, strict=True)]


def _values(plans: Sequence[Plan], given: Mapping[str, str]) -> dict[str, bool | int | float]:
    """Read the values of scalars; each must be a scalar of one of the plans, and in its range."""
    known = {scalar.name: scalar for plan in plans for scalar in plan.variant.arguments}
    values = {}
    for name, text in given.items():
        if name not in known:
            raise CallError(f"no scalar '{name}' in these kernels{suggest(name, known)}")
        values[name] = _value(known[name], text)
    return values


def _value(scalar: Scalar, text: str) -> bool | int | float:
    try:
        value: bool | int | float
        if scalar.dtype == "bool":
            value = {"true": True, "false": False}[text.lower()]
        else:
            value = float(text) if scalar.dtype == "fp32" else int(text)
        low, high = (-FLOAT32_MAX, FLOAT32_MAX) if scalar.dtype == "fp32" else DTYPE_RANGES[scalar.dtype]
        if not low <= value <= high:
            raise ValueError(value)
    except (ValueError, KeyError):
        raise CallError(f"scalar '{scalar.name}' is {scalar.dtype}, which '{text}' is not") from None
    for bound, outside in ((scalar.min, lambda b: value < b), (scalar.max, lambda b: value > b)):
        if isinstance(bound, int | float) and outside(bound):
            raise CallError(f"scalar {scalar_text(scalar)}: {text} is outside")
    return value


def _tensors(plans: Sequence[Plan], files: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Read the tensors that are given; each must be one that a mask of the plans reads."""
    if not files:
        return {}
    if find_spec("torch") is None:
        raise LoadError("--tensor needs torch, which is not installed")
    from attngen.inspect.assumed import read_by
    from attngen.inspect.tensor_files import read_tensor

    read = {}
    for name, path in files.items():
        known = {tensor.name: tensor for plan in plans for tensor in read_by(plan.variant)}
        if name not in known:
            raise CallError(f"no mask of these kernels reads a tensor '{name}'{suggest(name, known)}")
        for declared in {t for plan in plans for t in read_by(plan.variant) if t.name == name}:
            read[name] = read_tensor(declared, path)
    return read


class _MeasuredTiles:
    """Tile efficiencies; kernels that differ only in what does not affect them share one."""

    def __init__(
        self,
        seqlens: Sequence[int] | None,
        usual: Sequence[int],
        given: Mapping[str, bool | int | float],
        tensors: Mapping[str, torch.Tensor],
        seed: int,
        b: int | None,
        h: int | None,
    ) -> None:
        """``usual`` are the lengths where neither ``seqlens`` nor a given tensor says any."""
        self._seqlens = seqlens
        self._usual = usual
        self._given = given
        self._tensors = tensors
        self.seed = seed
        self._b, self._h = b, h
        self._known: dict[tuple[Any, ...], tuple[Visits, ...]] = {}

    def of(self, plan: Plan) -> tuple[Mapping[str, bool | int | float], tuple[Visits, ...]]:
        """Return the values of the scalars, and the efficiency at each length; none without torch."""
        if find_spec("torch") is None or plan.variant.keys is not None:
            return {}, ()
        from attngen.inspect.efficiency import efficiency, scalars_of

        scalars = scalars_of(plan.variant, self._given)
        tensors = self._of_variant(plan.variant)
        consumers = (plan.structure.consumers, plan.structure.skips, plan.stages) if plan.structure.consumers else None
        key = (plan.variant.name, plan.tile_m, plan.tile_n, plan.iteration, plan.pack_gqa, consumers)
        if key not in self._known:
            self._known[key] = efficiency(
                plan, self._lengths(plan.variant), scalars, tensors, self.seed, self._b, self._h
            )
        return scalars, self._known[key]

    def tensors(self, plan: Plan) -> tuple[Mapping[str, str], tuple[str, ...]]:
        """The values of the tensors of a mask at the greatest length, and the names of the assumed scalars."""
        if find_spec("torch") is None or plan.variant.keys is not None:
            return {}, ()
        from attngen.inspect.efficiency import scalars_of, tensor_values

        scalars, longest = scalars_of(plan.variant, self._given), max(self._lengths(plan.variant))
        texts = tensor_values(plan, longest, scalars, self._of_variant(plan.variant), self.seed)
        read = names(plan.variant.mask) | {e for t in plan.variant.tensors for e in t.shape}
        assumed = (s.name for s in plan.variant.arguments if s.default is None and s.name not in self._given)
        return texts, tuple(name for name in assumed if name in read)

    def tiles(self, plan: Plan) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Length and kinds of the tiles of a picture: of the longest of the lengths that has few enough tiles."""
        if find_spec("torch") is None:
            return 0, ()
        from attngen.inspect.efficiency import kinds_of_tiles, scalars_of

        lengths = sorted(self._lengths(plan.variant))
        small = [length for length in lengths if length <= _MOST_TILES * min(plan.tile_m, plan.tile_n)]
        seqlen = max(small, default=lengths[0])
        tensors = self._of_variant(plan.variant)
        scalars = scalars_of(plan.variant, self._given)
        return seqlen, kinds_of_tiles(plan, seqlen, scalars, tensors, self.seed, self._b, self._h)

    def place(self, plan: Plan) -> str:
        """The heads and sequences that are counted, in words."""
        if find_spec("torch") is None:
            return ""
        from attngen.inspect.assumed import Heads

        return Heads.of(plan.variant, self._of_variant(plan.variant)).text(plan.variant, self._b, self._h)

    def _of_variant(self, variant: Variant) -> dict[str, torch.Tensor]:
        declared = {tensor.name for tensor in variant.tensors}
        return {name: tensor for name, tensor in self._tensors.items() if name in declared}

    def _lengths(self, variant: Variant) -> Sequence[int]:
        """Return the lengths to look at; CallError where a given tensor is for another one."""
        from attngen.inspect.efficiency import length_of

        made_for = length_of(variant, self._of_variant(variant))
        if made_for is None:
            return self._seqlens or self._usual
        if made_for == 0 or any(seqlen != made_for for seqlen in self._seqlens or ()):
            lengths = ", ".join(map(str, self._seqlens or ())) or "sequences of at least one token"
            raise CallError(f"the given tensors are made for a sequence of {made_for} tokens, not for {lengths}")
        return (made_for,)

    def schedule(self, plan: Plan) -> ScheduleExplanation:
        """The explanation of the schedule, with the floors of a head by the steps of its consumers, if it has some."""
        explanation = explanation_of(plan)
        if explanation.floor is None:
            return explanation
        each = (visits.of_heads(1) for visits in self.of(plan)[1])
        heads = (HeadFloor.of(plan, explanation.floor, v.seqlen, v.steps, v.visible_pairs) for v in each)
        return replace(explanation, heads=tuple(heads))

    def gradients(self, plan: Plan) -> GradientFloors | None:
        """Return the floors of the kernels of a backward."""
        return GradientFloors.of(plan, lambda part: [visits.of_heads(1) for visits in self.of(part)[1]])


def _explain(plan: Plan, measured: _MeasuredTiles) -> PlanExplanation:
    of_mask = bands(plan.variant.mask, Facts.of(plan.variant), over="kv", heads=plan.box_heads)
    both = 2 if plan.direction == JVP else 1  # tangents lie beside their tensors
    memory = shared_memory(
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        stages=plan.stages,
        width_qk=both * padded_width(plan.columns_qk),
        width_v=both * padded_width(plan.columns_v),
        kept_bytes=plan.kept_bytes,
        operands=plan.operands,
    )
    scalars, visits = measured.of(plan)
    visible, full = (tuple(map(Band.of, part)) for part in (of_mask.visible, of_mask.full))
    explained = PlanExplanation(plan, visible, full, of_mask.exact, memory, measured.schedule(plan), scalars, visits)
    tensors, assumed = measured.tensors(plan)
    explained = replace(
        explained, tensors=tensors, assumed=assumed, seed=measured.seed, place=measured.place(plan)
    )  # fmt: skip
    if plan.direction == "forward":
        foreseen = ((visit.seqlen, predicted(plan, visit.seqlen, scalars)) for visit in visits)
        return replace(explained, predicted=tuple((length, us) for length, us in foreseen if us is not None))
    turned = bands(plan.variant.mask, Facts.of(plan.variant), over="q")
    some, every = (tuple(Band.of(one, "q") for one in part) for part in (turned.visible, turned.full))
    return replace(explained, queries=(some, every), gradients=measured.gradients(plan))
