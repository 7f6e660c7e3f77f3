"""The plan of a kernel in words and numbers: what was chosen, what it costs, and which tiles the kernel visits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngen.errors import CallError, LoadError, suggest
from attngen.formats import HELPERS
from attngen.lang.bands import bands
from attngen.lang.facts import Facts
from attngen.lang.ir import names
from attngen.lang.parser import FLOAT32_MAX
from attngen.lang.printing import canonical
from attngen.lang.ranges import DTYPE_RANGES
from attngen.lang.spans import Interval
from attngen.lang.statistics import separated
from attngen.plan.budget import SharedMemory, shared_memory
from attngen.plan.model import Argument, Columns, Plan
from attngen.plan.tiles import padded_width
from attngen.schema import load_spec
from attngen.tools.build.pipeline import plans as plans_of
from attngen.tools.explain.backward import DROPOUT, backward_facts, derivatives
from attngen.tools.explain.floor import HeadFloor
from attngen.tools.explain.gradients import GradientFloors
from attngen.tools.explain.pipes import barrier_lines, pipes_dict, ring_lines
from attngen.tools.explain.predicted import predicted, times_text
from attngen.tools.explain.schedule import ScheduleExplanation, explanation_of

if TYPE_CHECKING:
    import torch

    from attngen.lang.variant import Scalar, Variant
    from attngen.tools.explain.visits import Visits

#: Lengths at which the efficiency of one kernel is shown, and of each in a list of many.
SEQLENS, SEQLENS_OF_MANY = (1024, 4096, 8192), (2048,)

#: Tiles along an axis of a picture, unless a given tensor or length needs more.
_MOST_TILES = 64

_ITERATIONS = {
    "ranges": "loops over ranges of tiles whose ends are formulas; full tiles run without mask code",
    "classified": "lists 32 tiles at a time inside the kernel, as full or partial, within the hull of the bands",
    "tile_map": "visits the tiles of a map that {classifier} makes on the GPU before it, and that calls keep{known}",
}


@dataclass(frozen=True, slots=True)
class Band:
    """One interval of keys as a formula over the corners of a query tile."""

    lo: str
    hi: str
    axis: str = "kv"

    @classmethod
    def of(cls, interval: Interval, axis: str = "kv") -> Band:
        """Print an interval; its open ends are those of the axis."""
        lo = "0" if interval.lo is None else canonical(interval.lo)
        end = "seqlen_k" if axis == "kv" else "seqlen_q"
        return cls(lo, end if interval.hi is None else canonical(interval.hi), axis)

    def __str__(self) -> str:
        return f"{self.lo} <= {self.axis} < {self.hi}"


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """A plan, its bands, and its tile efficiency. ``visits`` is empty where torch is not installed.

    ``queries`` are the bands of a backward's kernel for dK and dV: which queries see some key of a tile, and which see
    all.
    """

    plan: Plan
    visible: tuple[Band, ...]
    full: tuple[Band, ...]
    exact: bool
    memory: SharedMemory
    schedule: ScheduleExplanation
    scalars: Mapping[str, bool | int | float]
    visits: tuple[Visits, ...] = ()
    queries: tuple[tuple[Band, ...], tuple[Band, ...]] = ((), ())
    gradients: GradientFloors | None = None  # of Hopper backward kernels in 16 bits
    tensors: Mapping[str, str] = field(default_factory=dict)  # what those that the mask reads were assumed to hold
    assumed: tuple[str, ...] = ()  # scalars that were neither given nor have a default
    seed: int = 0
    predicted: tuple[tuple[int, float], ...] = ()  # queries and keys, and the microseconds of a call
    place: str = "one head of one sequence"  # what ``visits`` count
    tiles: tuple[tuple[int, ...], ...] = ()  # of a picture: 0, 1, 2 for empty, partial and full tiles
    tiles_seqlen: int = 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes: operands, and all that the plan of a CUDA kernel lists besides them."""
        return self.plan.structure.shared_bytes or self.memory.total

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attngen explain --json``."""
        plan = self.plan
        regions = [{**asdict(one), "holds": self.schedule.holds(one.name)} for one in plan.structure.shared]
        return {
            "plan": plan.to_dict(),
            "backend_reason": plan.backend_reason,
            "mask": canonical(plan.variant.mask),
            "score": canonical(plan.variant.score) if plan.variant.score is not None else "s",
            **({"sink": canonical(plan.variant.sink)} if plan.variant.sink is not None else {}),
            "bands": {
                "visible": [{"lo": band.lo, "hi": band.hi} for band in self.visible],
                "full": [{"lo": band.lo, "hi": band.hi} for band in self.full],
                "exact": self.exact,
            },
            "shared_memory": {
                "q": self.memory.q,
                "k": self.memory.k,
                "v": self.memory.v,
                "stages": self.memory.stages,
                "total": self.shared_bytes,
                "limit": plan.arch.shared_memory,
                **({"regions": regions} if regions else {}),
            },
            "predicted": [{"seqlen": seqlen, "microseconds": round(us, 2)} for seqlen, us in self.predicted],
            "scalars": dict(self.scalars),
            "assumed": {"scalars": list(self.assumed), "tensors": dict(self.tensors), "seed": self.seed},
            "counted": self.place,
            "efficiency": [
                {
                    "seqlen": visit.seqlen,
                    "heads": visit.heads,
                    "visible_pairs": visit.visible_pairs,
                    "full_tiles": visit.full,
                    "partial_tiles": visit.partial,
                    "steps": visit.steps,
                    "skipped_steps": visit.skipped,
                    "efficiency": visit.efficiency,
                    "query_tiles": {"looked_at": visit.sampled[0], "of": visit.sampled[1]},
                    **({"outside": visit.outside} if visit.outside else {}),
                }
                for visit in self.visits
            ],
            **self.schedule.to_dict(),
            **({"pipes": pipes_dict(self.schedule.pipes)} if self.schedule.pipes else {}),
            **(
                {"derivatives": dict(derivatives(plan)), "queries": self._queries()}
                if plan.direction == "backward"
                else {}
            ),
            **({"floors": self.gradients.to_dict()} if self.gradients else {}),
        }

    def _queries(self) -> dict[str, Any]:
        names = ("visible", "full")
        return {
            name: [{"lo": band.lo, "hi": band.hi} for band in sides]
            for name, sides in zip(names, self.queries, strict=True)
        }

    def summary(self) -> list[tuple[str, str]]:
        """Label and text of the few facts that say what a kernel is."""
        plan, floor = self.plan, self.schedule.floor
        texts = {label: text for label, text in reversed(self.facts()) if label}  # the first line of each
        stages = f", {plan.stages} stages" if plan.direction == "forward" else ""
        texts["variant"] = f"{plan.variant.name}: {texts.pop('mask')}"
        texts["target"] += f", head_dim {_head_dims(plan)}, {plan.backend} ({plan.backend_reason})"
        if "tile" in texts:
            texts["tile"] += f"{stages}, {self.shared_bytes} B of shared memory"
        if floor is not None:
            texts["a step"] = f"{floor.block} clocks, bound by {' and '.join(floor.binding)}"
        derived = (label for label, _ in self.facts() if label.startswith("by "))
        shown = (
            "variant", "score", *derived, "sink", "dropout", "takes", "target", "gradients", "tile", "loop", "a step",
            "expected",
        )  # fmt: skip
        usual = {("score", "s"), ("takes", "nothing of its own")}
        return [(label, texts[label]) for label in shown if label in texts and (label, texts[label]) not in usual]

    def facts(self) -> list[tuple[str, str]]:
        """Return label and text of everything but bands, floors and efficiency, for people."""
        plan = self.plan
        if plan.direction == "backward":
            return [*backward_facts(plan, self.schedule), *self._pipes()]
        classifier = plan.launch("classify").symbol if plan.has_launch("classify") else ""
        of_schedule = self.schedule.facts()
        target = f"{plan.arch_name}, {plan.dtype_name}, {plan.layout}, {plan.direction}"
        operands = f"{self.memory.total} B of {plan.arch.shared_memory} B: {self.memory}"
        return [
            ("variant", plan.variant.name),
            ("mask", canonical(plan.variant.mask)),
            ("score", canonical(plan.variant.score) if plan.variant.score is not None else "s"),
            *([("sink", canonical(plan.variant.sink))] if plan.variant.sink is not None else []),
            *([("dropout", DROPOUT)] if plan.variant.dropout else []),
            ("takes", _takes(plan)),
            ("target", target),
            ("backend", f"{plan.backend}, {plan.backend_reason}"),
            ("head_dim", _head_dims(plan)),
            ("tile", f"{_tile_rows(plan)} x {plan.tile_n} keys, {plan.num_warps} warps ({plan.threads} threads)"),
            ("stages", f"{plan.stages} pairs of K and V tiles in flight"),
            ("loads", _loads(plan)),
            *_labelled("roles", of_schedule.get("roles", [])),
            *_labelled("registers", of_schedule.get("registers", [])),
            *_labelled("shared memory", of_schedule.get("shared memory", [operands])),
            *self._pipes(),
            ("softmax", f"{plan.softmax}{', approximate functions' if plan.approximate else ', exact functions'}"),
            ("loop", _loop(plan, classifier)),
            *_labelled("steps", of_schedule.get("steps", [])),
            *([("time", times_text(plan))] if plan.times else []),
            *_labelled("expected", of_schedule.get("expected", [])),
            ("grid", self.schedule.grid(_heads_in_l2(plan))),
            *_labelled("arguments", argument_lines(plan.arguments)),
        ]

    def _pipes(self) -> list[tuple[str, str]]:
        pipes = self.schedule.pipes
        if pipes is None:
            return []
        return [*_labelled("rings", ring_lines(pipes)), *_labelled("barriers", barrier_lines(pipes))]


def _loop(plan: Plan, classifier: str) -> str:
    """The order in which a kernel visits keys; ``classifier`` names the kernel that makes its tile map."""
    if plan.variant.keys is not None:
        return f"goes through the keys that the call lists for each query, {plan.tile_n} at a time"
    return f"{plan.iteration}: {_ITERATIONS[plan.iteration].format(classifier=classifier, known=_known(plan))}"


def _known(plan: Plan) -> str:
    """Name the statistics by which the kernel that makes a tile map decides tiles, if it has any."""
    values = [canonical(each.value) for each in separated(plan.variant.mask, Facts.of(plan.variant)).statistics]
    if plan.backend != "cuda" or not values:
        return ""
    return f"; tiles are classified by the ranges of {', '.join(values)} over them, the rest pair by pair"


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return lines under one label."""
    return [("" if n else label, line) for n, line in enumerate(lines)]


def _tile_rows(plan: Plan) -> str:
    if plan.variant.keys is not None:
        return f"{plan.tile_m} heads of one query"
    if plan.pack_gqa:
        return f"{plan.tile_m} rows (all query heads of a KV head, then the next query)"
    return f"{plan.tile_m} queries"


def _takes(plan: Plan) -> str:
    variant = plan.variant
    parts = [_scalar(scalar) for scalar in variant.scalars]
    for tensor in variant.tensors:
        fact = f", {tensor.monotone.summary()}" if tensor.monotone else ""
        parts.append(f"{tensor.name} {tensor.dtype} [{', '.join(map(str, tensor.shape))}]{fact}")
    return "; ".join(parts) or "nothing of its own"


def _scalar(scalar: Scalar) -> str:
    if scalar.const is not None:
        return f"{scalar.name} {scalar.dtype} = {scalar.const}, fixed"
    low = "" if scalar.min is None else f", at least {scalar.min}"
    high = "" if scalar.max is None else f", at most {scalar.max}"
    return f"{scalar.name} {scalar.dtype}{low}{high}"


def _head_dims(plan: Plan) -> str:
    if plan.head_dim_qk == plan.head_dim_v:
        return _columns(plan.head_dim_qk, plan.columns_qk)
    return (
        f"{_columns(plan.head_dim_qk, plan.columns_qk)} for q and k, {_columns(plan.head_dim_v, plan.columns_v)} for v"
    )


def _columns(head_dim: int, blocks: tuple[Columns, ...]) -> str:
    """The blocks of a head_dim: ``192 = 128 + 64``, ``112 in 128``."""
    width = padded_width(blocks)
    cut = f" = {' + '.join(str(block.width) for block in blocks)}" if len(blocks) > 1 else ""
    return f"{head_dim}{cut}" if width == head_dim else f"{head_dim} padded to {width}{cut}"


def _loads(plan: Plan) -> str:
    if plan.loads == "descriptor":
        return f"by tensor descriptors (TMA); strides and addresses are multiples of {plan.alignment} B"
    return f"by pointers; strides and addresses are multiples of {plan.alignment} B"


def _heads_in_l2(plan: Plan) -> str:
    if plan.l2_bytes < 2**20:
        return "one KV head after the other"
    return f"heads run side by side while their K and V fit {plan.l2_bytes // 2**20} MiB"


def argument_lines(arguments: Sequence[Argument]) -> list[str]:
    """Return the argument list, arguments of one kind on one line."""
    by_kind: dict[str, list[str]] = {}
    for argument in arguments:
        by_kind.setdefault(argument.kind, []).append(argument.name)
    return [f"{kind}: {', '.join(names)}" for kind, names in by_kind.items()]


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
    plans = [plan for plan in plans if plan.direction not in HELPERS]
    values = _values(plans, given or {})
    measured = _Measured(
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
            raise CallError(f"scalar {_scalar(scalar)}: {text} is outside")
    return value


def _tensors(plans: Sequence[Plan], files: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Read the tensors that are given; each must be one that a mask of the plans reads."""
    if not files:
        return {}
    if find_spec("torch") is None:
        raise LoadError("--tensor needs torch, which is not installed")
    from attngen.tools.explain.assumed import read_by
    from attngen.tools.explain.tensor_files import read_tensor

    read = {}
    for name, path in files.items():
        known = {tensor.name: tensor for plan in plans for tensor in read_by(plan.variant)}
        if name not in known:
            raise CallError(f"no mask of these kernels reads a tensor '{name}'{suggest(name, known)}")
        for declared in {t for plan in plans for t in read_by(plan.variant) if t.name == name}:
            read[name] = read_tensor(declared, path)
    return read


class _Measured:
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
        from attngen.tools.explain.efficiency import efficiency, scalars_of

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
        from attngen.tools.explain.efficiency import scalars_of, tensor_values

        scalars, longest = scalars_of(plan.variant, self._given), max(self._lengths(plan.variant))
        texts = tensor_values(plan, longest, scalars, self._of_variant(plan.variant), self.seed)
        read = names(plan.variant.mask) | {e for t in plan.variant.tensors for e in t.shape}
        assumed = (s.name for s in plan.variant.arguments if s.default is None and s.name not in self._given)
        return texts, tuple(name for name in assumed if name in read)

    def tiles(self, plan: Plan) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Length and kinds of the tiles of a picture: of the longest of the lengths that has few enough tiles."""
        if find_spec("torch") is None:
            return 0, ()
        from attngen.tools.explain.efficiency import kinds_of_tiles, scalars_of

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
        from attngen.tools.explain.assumed import Heads

        return Heads.of(plan.variant, self._of_variant(plan.variant)).text(plan.variant, self._b, self._h)

    def _of_variant(self, variant: Variant) -> dict[str, torch.Tensor]:
        declared = {tensor.name for tensor in variant.tensors}
        return {name: tensor for name, tensor in self._tensors.items() if name in declared}

    def _lengths(self, variant: Variant) -> Sequence[int]:
        """Return the lengths to look at; CallError where a given tensor is for another one."""
        from attngen.tools.explain.efficiency import length_of

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


def _explain(plan: Plan, measured: _Measured) -> PlanExplanation:
    of_mask = bands(plan.variant.mask, Facts.of(plan.variant), over="kv", heads=plan.box_heads)
    memory = shared_memory(
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        stages=plan.stages,
        width_qk=padded_width(plan.columns_qk),
        width_v=padded_width(plan.columns_v),
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
