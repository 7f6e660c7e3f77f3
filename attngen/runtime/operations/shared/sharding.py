"""Operators on DTensors, sharded over batch and heads: each rank attends to its own sequences and heads.

The strategy of an operator says how its arguments and results may lie along one axis of a device mesh; torch asks for
it, and redistributes arguments that lie otherwise. q, k and v in other placements are refused, since that would gather
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor

from attngen.dtypes import DESCALES
from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import is_distributed
from attngen.runtime.arguments.given import TENSORS, Given
from attngen.runtime.autograd.transforms import HEADS, SEQUENCES, stand_alone
from attngen.runtime.registry.binding import find

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

#: The module of DTensor, which is not imported for it.
_MODULE = "torch.distributed.tensor"

#: Names of axes by the layout of q, k and v, for messages; those of keys in pages differ.
_AXES = {
    "bshd": ("batch", "seqlen", "heads", "head_dim"),
    "bhsd": ("batch", "heads", "seqlen", "head_dim"),
    "thd": ("total", "heads", "head_dim"),
    "NHD": ("pages", "page_size", "heads", "head_dim"),
    "HND": ("pages", "heads", "page_size", "head_dim"),
}

_INPUTS = frozenset({"q", "k", "v", "k_pages", "v_pages"})

_Shapes = Mapping[str, tuple[int, ...]]

#: Placements that an operator takes, as torch asks for them.
Strategy = Callable[["OpSchema"], "OpStrategy"]


class ShardingError(CallError, NotImplementedError):
    """A placement without a strategy. torch passes on NotImplementedError, and rewrites others."""


def refuse_mixed(given: Given) -> None:
    """Raise CallError for DTensors beside plain tensors, and for DTensors with dropout or a tile map."""
    if _MODULE not in sys.modules:
        return
    named = {**{name: getattr(given, name) for name in TENSORS}, **given.arguments}
    tensors = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}
    first = next((name for name, tensor in tensors.items() if is_distributed(tensor)), None)
    if first is None:
        return
    kind = "dropout" if find(given.variant, given.package).variant.dropout else "a tile map" if given.tile_map else None
    if kind is not None:
        raise CallError(f"{first} is a DTensor, and calls with {kind} take local tensors; allowed: {first}.to_local()")
    if sys.modules[_MODULE].DTensor._op_dispatcher._allow_implicit_replication:
        return
    for name, tensor in tensors.items():
        if not is_distributed(tensor):
            raise CallError(
                f"{name} is a plain tensor, but {first} is a DTensor; allowed: "
                f"DTensor.from_local({name}, {first}.device_mesh) if all ranks have the same, or {first}.to_local()"
            )


@dataclass(frozen=True)
class Sharded:
    """One operator of a variant as torch's DTensor needs to know it."""

    operator: OpOverload  # an OpOverload
    variant: Variant
    form: str
    backward: bool = False

    def strategy(self, schema: OpSchema) -> OpStrategy:
        """All placements that the operator takes; torch calls it with an ``OpSchema``. Raises ShardingError."""
        from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

        given, layout = self._given(schema)
        specs = {name: each.strategies[0].output_spec for name, each in given.items()}
        shapes = {name: tuple(each.shape) for name, each in given.items()}
        call = _Placing(self, shapes, layout)
        for name in specs:
            if name in _INPUTS:
                call.check(name, specs[name])
        results = len(self.operator._schema.returns)
        offered = expand_to_full_mesh_op_strategy(specs["q"].mesh, schema, call.of_one_axis(), input_index=results)
        places = {name: place for place, name in enumerate(given)}
        offered.strategies = [
            each
            for each in offered.strategies
            if call.divides(each.input_specs[places["q"]])
            and ("out" not in places or self.backward or each.input_specs[places["out"]] == specs["out"])
        ]
        if not offered.strategies:
            raise ShardingError(
                f"{self.operator.name()}: out lies as {list(specs['out'].placements)}, and would have to be "
                "redistributed; allowed: the placements of q"
            )
        return offered

    def _given(self, schema: OpSchema) -> tuple[dict[str, OpStrategy], str]:
        """The strategies of all arguments that are DTensors, in torch's order, and the layout."""
        from torch.distributed.tensor._op_schema import OpStrategy

        names = [argument.name for argument in self.operator._schema.arguments]
        values = {**dict(zip(names, schema.args_schema, strict=False)), **schema.kwargs_schema}
        layout = values.get("page_layout" if self.form == "paged" else "layout", "bshd")
        return {name: value for name, value in values.items() if isinstance(value, OpStrategy)}, layout


class _Placing:
    """Allowed placements of the arguments and results of one call."""

    def __init__(self, sharded: Sharded, shapes: _Shapes, layout: str) -> None:
        self._sharded, self._shapes = sharded, shapes
        self._variant, self._form = sharded.variant, sharded.form
        self._keys = "k_pages" if self._form == "paged" else "k"
        rows = "thd" if len(shapes["q"]) == 3 else "bshd" if self._form == "paged" else layout
        self._layouts = {"rows": rows, "keys": layout if self._form == "paged" else rows}
        self._packed = rows == "thd"
        scaled = [len(shapes.get(name, ())) > 1 for name in DESCALES]
        whole = self._variant.dropout or "tile_map" in shapes
        self.over_batch = not self._packed and not whole and stand_alone(self._variant, SEQUENCES)
        self.over_batch = self.over_batch and not (self._form == "paged" and any(scaled))
        self.over_heads = self._heads > 1 and not whole and stand_alone(self._variant, HEADS)
        for tensor in self._variant.tensors:  # one placement shards one axis
            self.over_batch = self.over_batch and tensor.shape.count("b") < 2
            self.over_heads = self.over_heads and tensor.shape.count("h") + tensor.shape.count("hk") < 2

    def of_one_axis(self) -> list[list[Placement]]:
        """Placements of results and arguments along one axis of the mesh: all replicated, by sequence, by head."""
        from torch.distributed.tensor import Replicate

        everything = [*self._results(), *self._shapes]
        placements: list[list[Placement]] = [[Replicate() for _ in everything]]
        for kind, offered in (("batch", self.over_batch), ("heads", self.over_heads)):
            if offered:
                given = [self._placement(name, kind) for name in self._shapes]
                placements.append([*(self._result(name, kind) for name in self._results()), *given])
        return placements

    def _results(self) -> list[str]:
        """Results by the arguments that lie as they do; a gradient is that of its argument."""
        if self._sharded.backward:
            own = [tensor.name for tensor in self._variant.tensors if tensor.grad]
            return ["q", "k", "v", *own]
        return ["lse"] if len(self._sharded.operator._schema.returns) == 1 else ["out", "lse"]

    def _result(self, name: str, kind: str) -> Placement:
        """Placement of a result: what all ranks add to is a sum over them."""
        from torch.distributed.tensor import Partial

        placement = self._placement(name, kind)
        return Partial() if self._sharded.backward and placement.is_replicate() else placement

    def _placement(self, name: str, kind: str) -> Placement:
        from torch.distributed.tensor import Replicate, Shard

        axis = self._axis(name, kind)
        shared = kind == "heads" and self._shapes.get(name, (0,) * 8)[axis or 0] == 1 == self._kv_heads
        return Replicate() if axis is None or shared else Shard(axis)

    @property
    def _kv_heads(self) -> int:
        return self._shapes[self._keys][_AXES[self._layouts["keys"]].index("heads")]

    @property
    def _heads(self) -> int:
        return self._shapes["q"][_AXES[self._layouts["rows"]].index("heads")]

    def _axis(self, name: str, kind: str) -> int | None:
        """The axis of a tensor along which its sequences, or heads, lie; None for none."""
        if name in ("q", "out", "dout") or (name in ("k", "v") and self._form != "paged"):
            return _index(_AXES[self._layouts["rows"]], kind)
        if name in ("k_pages", "v_pages"):
            return _index(_AXES[self._layouts["keys"]], kind)
        if name in ("lse", "dlse"):
            return _index(("heads", "total") if self._packed else ("batch", "heads", "seqlen"), kind)
        if name in ("seqused_k", "page_table"):
            return 0 if kind == "batch" else None
        if name in DESCALES:
            return _index(("batch", "heads"), kind) if len(self._shapes[name]) > 1 else None
        shape = next((tensor.shape for tensor in self._variant.tensors if tensor.name == name), ())
        extents = ("b",) if kind == "batch" else ("h", "hk")
        return next((axis for axis, extent in enumerate(shape) if extent in extents), None)

    def divides(self, spec: DTensorSpec) -> bool:
        """Whether each rank gets whole groups of heads, if q lies so."""
        axis = self._axis("q", "heads")
        ranks = prod(size for size, each in zip(spec.mesh.shape, spec.placements, strict=True) if each.is_shard(axis))
        return self._heads % ranks == 0 and (self._kv_heads == 1 or self._kv_heads % ranks == 0)

    def check(self, name: str, spec: DTensorSpec) -> None:
        """Raise ShardingError for q, k or v in a placement that no strategy has."""
        axes = _AXES[self._layouts["rows" if name in ("q", "k", "v") else "keys"]]
        for placement in spec.placements:
            if placement.is_replicate():
                continue
            axis = axes[placement.dim] if hasattr(placement, "dim") else ""
            reason = self._reason(name, axis, placement, spec)
            if reason is not None:
                allowed = ["Replicate()"]
                allowed += [f"Shard({axes.index('batch')}) over the batch"] * (self.over_batch and "batch" in axes)
                allowed += [f"Shard({axes.index('heads')}) over the heads"] * self.over_heads
                raise ShardingError(
                    f"{self._sharded.operator.name()}: {name} is {placement!r}{reason}; allowed: {', '.join(allowed)}, "
                    f"or {name}.to_local()"
                )

    def _reason(self, name: str, axis: str, placement: Placement, spec: DTensorSpec) -> str | None:
        """Reason why q, k or v cannot be sharded so, or None."""
        from torch.distributed.tensor import Shard

        if type(placement) is not Shard:
            return ""
        if axis == "batch" and not self.over_batch:
            return f", and {self._variant.name} reads the number of a sequence, or of all of them"
        if axis == "heads" and not self.over_heads:
            return f", and {self._variant.name} reads the number of a head, or of all of them"
        if axis == "heads":
            heads = self._heads if name == "q" else self._kv_heads
            ranks = prod(size for size, each in zip(spec.mesh.shape, spec.placements, strict=True) if each == placement)
            if heads % ranks or (self._kv_heads > 1 and self._kv_heads % ranks):
                return f", and {ranks} ranks do not divide {self._heads} heads and {self._kv_heads} KV heads"
        return None if axis in ("batch", "heads") else f", along its {axis}"


def _index(axes: Sequence[str], axis: str) -> int | None:
    return axes.index(axis) if axis in axes else None


#: Strategies that wait until DTensor is imported.
_waiting: list[tuple[OpOverload, Strategy]] = []


def register(operator: OpOverload, strategy: Strategy) -> None:
    """Tell DTensor the strategy of an operator, now or as soon as a call finds that it was imported."""
    _waiting.append((operator, strategy))
    register_waiting()


def register_waiting() -> None:
    """Tell DTensor the strategies that wait for it, if it was imported."""
    if not _waiting or _MODULE not in sys.modules:
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    while _waiting:
        operator, strategy = _waiting.pop()
        # all arguments that are no tensors count: the layout says which axis is that of the heads
        DTensor._op_dispatcher.sharding_propagator.register_op_strategy(operator, strategy, RuntimeSchemaInfo(0))


def refuse(operator: OpOverload, what: str) -> None:
    """Tell DTensor that an operator takes local tensors alone."""

    def strategy(schema: OpSchema) -> OpStrategy:
        raise ShardingError(f"{what} takes local tensors, and got DTensors; allowed: their .to_local()")

    register(operator, strategy)
