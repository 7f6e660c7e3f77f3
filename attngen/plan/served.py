"""Fields of specs and variants that a schedule serves, and the refusal of all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any

from attngen.dtypes import DESCALE_BLOCKS
from attngen.errors import PlanError
from attngen.lang.ir import Expr
from attngen.lang.printing import canonical
from attngen.plan.choices import refuse
from attngen.schema.kernel_spec import KernelSpec


@dataclass(frozen=True, slots=True)
class ServedValues:
    """Values of a field that kernels serve, and why they serve no others; None: ``plan`` of the schedule decides."""

    allowed: tuple[Any, ...] | None = None
    why: str = ""


ANY = ServedValues()


def only(*allowed: Any, why: str) -> ServedValues:
    """Values that kernels serve, with the condition that others fail."""
    return ServedValues(allowed, why)


#: Fields of a schedule without a declaration, whose ``plan`` refuses what it cannot do. A field that comes later is not
#: among them, since such a schedule cannot know it.
UNDECLARED: Mapping[str, ServedValues] = dict.fromkeys(
    (
        "dtype", "kv_dtype", "out_dtype", "tile_m", "tile_n", "stages", "num_warps", "roles", "backward", "loads",
        "tile_map", "alignment", "fast_math", "softmax", "softmax_scale", "deterministic", "persistent", "order",
        "epilogue", "pack_gqa", "transposed_v", "grouped_v", "scale_block", "mask", "score", "sink", "dropout", "keys",
    ),
    ANY,
)  # fmt: skip

#: Fields of a spec that no declaration lists: the catalogue takes schedules by them (``candidates``), each schedule has
#: ``layouts``, its plan decides about head dims, and the rest says nothing about the kernel.
_OTHERS = frozenset((
    "package", "variant", "arch", "head_dim_qk", "head_dim_v", "layout", "direction", "backend", "v_of_key", "split_kv",
    "split_tiles", "allow", "spec_file", "location", "places",
))  # fmt: skip

#: Names in specs, where ``KernelSpec`` has others.
_NAMES = {
    "tile_m": "tile.m", "tile_n": "tile.n", "stages": "pipeline.stages", "num_warps": "warps", "roles": "warps",
    "grouped_v": "transposed_v", "scale_block": "descale",
}  # fmt: skip


def unserved(spec: KernelSpec, served: Mapping[str, ServedValues], name: str) -> PlanError | None:
    """The refusal of the first field whose value the schedule ``name`` does not serve, or None.

    Fields that it ``served`` come in its order. A field that it does not list keeps its default.
    """
    given = {field: (label, value, default) for field, label, value, default in _fields_of(spec)}
    for field in (*(field for field in served if field in given), *given):
        label, value, default = given[field]
        values = served.get(field) or ServedValues((default,), f"{name} does not serve it")
        if values.allowed is None or value in values.allowed:
            continue
        choices = [_shown(field, each) for each in values.allowed if each is not None]
        hint = f"allowed: {', '.join(choices)}" if choices else "leave it out"
        return refuse(spec, label, f"{values.why}; found {_shown(field, value)}; {hint}")
    return None


def _fields_of(spec: KernelSpec) -> Iterator[tuple[str, str, Any, Any]]:
    """Each field that schedules serve or refuse: its name, its name in specs, its value and its default."""
    for field in fields(spec):
        if field.name not in _OTHERS:
            default = None if field.default is MISSING else field.default
            yield field.name, _NAMES.get(field.name, field.name), getattr(spec, field.name), default
    for name, value, default in spec.variant.features():
        yield name, f"variant.{name}", value, default


def _shown(field: str, value: Any) -> str:
    """A value as specs say it."""
    if field == "scale_block":
        return next((str(name) for name, block in DESCALE_BLOCKS.items() if block == value), str(value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Expr):
        return canonical(value)
    if is_dataclass(value) and not isinstance(value, type):
        return f"{{{', '.join(f'{name}: {part}' for name, part in asdict(value).items() if part is not None)}}}"
    return str(value)
