"""The spec of one kernel, as plans take it: an entry of a spec with one choice of each list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from attngen.errors import Location
from attngen.lang.variant import Variant

#: Fields of a kernel to fields of the spec, where the names differ.
_FIELD_OF = {
    "head_dim_qk": "head_dim", "head_dim_v": "head_dim", "direction": "passes", "tile_m": "tile", "tile_n": "tile",
    "scale_block": "descale", "num_warps": "warps", "roles": "warps", "pipeline": "stages", "split_tiles": "split_kv",
}  # fmt: skip


def fixed(**choices: Any) -> dict[str, Any]:
    """Those of the choices that a spec fixes."""
    return {name: value for name, value in choices.items() if value is not None and value != {}}


@dataclass(frozen=True, slots=True)
class Roles:
    """Warp roles of a warp-specialized kernel: what the spec fixes, None for what the plan chooses."""

    producer: int | None = None
    consumer: int | None = None
    schedule: str | None = None
    overlap: bool | None = None
    producer_registers: int | None = None
    consumer_registers: int | None = None

    def said(self) -> dict[str, Any]:
        """Fixed choices, as specs say them."""
        registers = fixed(producer=self.producer_registers, consumer=self.consumer_registers)
        return fixed(
            producer=self.producer, consumer=self.consumer, schedule=self.schedule, overlap=self.overlap,
            registers=registers,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gradient:
    """Choices that the spec fixes for one of the two gradient kernels; None leaves a choice to the plan.

    The last four are of kernels by wgmma, and of tiles of keys, alone.
    """

    tile_m: int | None = None
    tile_n: int | None = None
    stages: int | None = None
    num_warps: int | None = None
    overlap: str | None = None
    packed: bool | None = None
    q_stages: int | None = None
    rows_ahead: int | None = None

    @property
    def of_roles(self) -> dict[str, Any]:
        """Fixed choices of kernels by wgmma alone."""
        return fixed(overlap=self.overlap, packed=self.packed, q_stages=self.q_stages, rows_ahead=self.rows_ahead)

    def said(self) -> dict[str, Any]:
        """Fixed choices, as specs say them."""
        tile = fixed(m=self.tile_m, n=self.tile_n)
        return fixed(tile=tile, stages=self.stages, warps=self.num_warps, **self.of_roles)


@dataclass(frozen=True, slots=True)
class Backward:
    """The kernels of a backward: one by tiles of keys, one by tiles of queries."""

    dkdv: Gradient = Gradient()
    dq: Gradient = Gradient()

    def said(self) -> dict[str, Any]:
        """Fixed choices, as specs say them."""
        return fixed(dkdv=self.dkdv.said(), dq=self.dq.said())


@dataclass(frozen=True)
class KernelSpec:
    """One kernel that a spec asks for. None leaves a choice to the plan. Places in the file are not compared."""

    package: str
    variant: Variant
    arch: str
    head_dim_qk: int
    head_dim_v: int
    dtype: str
    kv_dtype: str | None = None  # of k and v, where another than that of q
    out_dtype: str | None = None  # of the output, where another than the usual one
    layout: str = "dense"
    direction: str = "forward"
    backend: str | None = None
    tile_m: int | None = None
    tile_n: int | None = None
    stages: int | None = None
    num_warps: int | None = None
    roles: Roles | None = None
    backward: Backward | None = None
    loads: str | None = None
    tile_map: str = "auto"
    alignment: int | None = None  # bytes
    fast_math: bool = True
    softmax: str | None = None
    softmax_scale: float | None = None
    deterministic: bool = False
    persistent: bool | None = None
    order: str | None = None
    epilogue: str | None = None
    pack_gqa: bool | None = None
    transposed_v: bool = False  # keys lie side by side in v
    grouped_v: bool = False  # in groups of 32, in the order of the lanes of an accumulator
    v_of_key: bool = False  # v is the first columns of k
    split_kv: bool = False
    split_tiles: bool = False  # blocks share the keys of a tile of queries
    scale_block: int = 0  # tokens that share a scale of quantized q, k and v; 0: all of a head
    allow: tuple[str, ...] = ()
    spec_file: str = field(default="", compare=False)  # as headers name it, never absolute
    location: Location = field(default=Location(""), compare=False)
    places: Mapping[str, Location] = field(default_factory=dict, compare=False, repr=False)

    def locate(self, name: str) -> Location:
        """Return the place of the field that decided ``name`` (of this class or of the spec), or of the entry."""
        name = name.split(".")[0]
        return self.places.get(_FIELD_OF.get(name, name), self.location)

    @property
    def fixes_choices(self) -> bool:
        """Whether the spec chooses a tile, stages or warps itself."""
        fixed = (self.tile_m, self.tile_n, self.stages, self.num_warps, self.roles)
        return any(value is not None for value in fixed) or self.backward not in (None, Backward())

    def to_dict(self) -> dict[str, Any]:
        """JSON value of what is built, without places, file names and the formatting of expressions."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        variant = self.variant.to_dict()
        data["variant"] = {name: None if name.endswith("_text") else value for name, value in variant.items()}
        data["roles"] = asdict(self.roles) if self.roles else None
        data["backward"] = asdict(self.backward) if self.backward else None
        data["allow"] = list(self.allow)
        return data
