"""The plan of a kernel in words and numbers: what was chosen, what it costs, and which tiles the kernel visits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from attngen.inspect.gradients import GradientFloors
from attngen.inspect.pipes import barrier_lines, pipes_dict, ring_lines
from attngen.inspect.predicted import times_text
from attngen.lang.facts import Facts
from attngen.lang.printing import canonical
from attngen.lang.spans import Interval
from attngen.lang.statistics import separated
from attngen.parts.columns import padded_width
from attngen.parts.explained.backward import DROPOUT, backward_facts, derivatives
from attngen.parts.explained.base import ScheduleExplanation
from attngen.plan.budget import SharedMemory
from attngen.plan.model import Argument, Columns, Plan

if TYPE_CHECKING:
    from attngen.inspect.visits import Visits
    from attngen.lang.variant import Scalar


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
            "tile_reason": plan.tile_reason,
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
            "variant", "score", *derived, "sink", "weights", "dropout", "takes", "target", "gradients", "tile",
            "chosen", "loop", "a step", "expected",
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
            *([("weights", plan.variant.weights)] if not plan.variant.has_lse else []),
            *([("dropout", DROPOUT)] if plan.variant.dropout else []),
            ("takes", _takes(plan)),
            ("target", target),
            ("backend", f"{plan.backend}, {plan.backend_reason}"),
            ("head_dim", _head_dims(plan)),
            ("tile", f"{_tile_rows(plan)} x {plan.tile_n} keys, {plan.num_warps} warps ({plan.threads} threads)"),
            *([("chosen", plan.tile_reason)] if plan.tile_reason else []),
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
    parts = [scalar_text(scalar) for scalar in variant.scalars]
    for tensor in variant.tensors:
        fact = f", {tensor.monotone.summary()}" if tensor.monotone else ""
        parts.append(f"{tensor.name} {tensor.dtype} [{', '.join(map(str, tensor.shape))}]{fact}")
    return "; ".join(parts) or "nothing of its own"


def scalar_text(scalar: Scalar) -> str:
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
