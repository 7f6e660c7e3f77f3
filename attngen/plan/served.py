"""Fields of specs and variants that a schedule serves, those that no schedule serves together, and their refusals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from attngen.dtypes import (
    BESIDE_CACHES,
    BESIDE_LATENT_ROWS,
    CACHE_DTYPES,
    DESCALE_BLOCKS,
    KEY_VALUE_DIMS,
    LATENT_ROWS,
    OUT_DTYPES,
    PAGE_BLOCK,
    QUANTIZED_DTYPES,
)
from attngen.errors import PlanError
from attngen.lang.ir import Expr
from attngen.lang.printing import canonical
from attngen.operations import APPEND
from attngen.plan.choices import refuse
from attngen.schema.kernel_spec import Backward, KernelSpec, Roles


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
    "grouped_v": "transposed_v", "scale_block": "descale", "max_logits": "max_logits",
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
        choices = [_shown(field, each) for each in values.allowed if each not in (None, Backward())]
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
        yield name, _NAMES.get(name, f"variant.{name}"), value, default


def _shown(field: str, value: Any) -> str:
    """A value as specs say it."""
    if field == "scale_block":
        return next((str(name) for name, block in DESCALE_BLOCKS.items() if block == value), str(value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Expr):
        return canonical(value)
    if isinstance(value, Roles | Backward):
        return _shown(field, value.said())
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_shown(field, part)}' for name, part in value.items())}}}"
    return str(value)


def check_together(spec: KernelSpec) -> None:
    """Raise PlanError for fields that no schedule serves together."""
    kv_dtype = spec.kv_dtype or spec.dtype
    quantized = spec.dtype in QUANTIZED_DTYPES
    beside = QUANTIZED_DTYPES if quantized else CACHE_DTYPES if spec.dtype in BESIDE_CACHES else ()
    if spec.kv_dtype in LATENT_ROWS:
        _check_latent_rows(spec)
    elif spec.kv_dtype is not None and kv_dtype not in beside:
        raise refuse(
            spec, "kv_dtype", f"no kernel mixes q of {spec.dtype} with k and v of {kv_dtype}; allowed: "
            f"{' or '.join(beside) or f'{CACHE_DTYPES[0]} with dtype {BESIDE_CACHES[0]}'}, or leave it out"
        )  # fmt: skip
    if spec.variant.max_logits and (quantized or spec.kv_dtype not in (None, spec.dtype)):
        raise refuse(
            spec, "max_logits", f"kernels of {spec.dtype if quantized else spec.kv_dtype} keep no largest logits; "
            "leave it out"
        )  # fmt: skip
    if spec.out_dtype is not None and not (quantized and spec.direction == "forward"):
        raise refuse(
            spec, "out_dtype", f"the output of {spec.dtype} is {spec.dtype}; leave it out, or say 'dtype: fp8_e4m3', "
            f"whose output may be {' or '.join(OUT_DTYPES)}"
        )  # fmt: skip
    needs = {
        "dtype: fp8_e4m3": quantized, "layout: dense": spec.layout == "dense", "split_kv: false": not spec.split_kv,
        "passes: forward": spec.direction == "forward",
    }  # fmt: skip
    lacking = " and ".join(f"'{field}'" for field, given in needs.items() if not given)
    if spec.transposed_v and lacking:
        what = "only dense 8-bit forward kernels take v with contiguous keys"
        raise refuse(spec, "transposed_v", f"{what}; leave it out, or say {lacking}")
    if quantized and (spec.split_kv or spec.layout == "paged"):
        if {spec.dtype, kv_dtype} - set(CACHE_DTYPES):
            raise refuse(
                spec, "kv_dtype" if spec.dtype in CACHE_DTYPES else "dtype", f"no kernel reads a cache of {kv_dtype} "
                f"beside q of {spec.dtype}; allowed: {' or '.join(CACHE_DTYPES)}"
            )  # fmt: skip
        if spec.out_dtype is not None:
            raise refuse(spec, "out_dtype", f"over caches the output of {spec.dtype} is {QUANTIZED_DTYPES[spec.dtype]}")
    in_fewer_bits = spec.kv_dtype not in (None, *LATENT_ROWS) and not quantized
    if in_fewer_bits and not (spec.split_kv or spec.v_of_key) and spec.direction == "forward":
        raise refuse(
            spec, "kv_dtype", "only split-KV kernels read k and v in fewer bits than q; allowed: "
            "split_kv: true"
        )  # fmt: skip
    if spec.scale_block and kv_dtype not in QUANTIZED_DTYPES:
        raise refuse(spec, "descale", f"{kv_dtype} has no scales; leave it out, or say 'dtype: fp8_e4m3'")
    if spec.scale_block == PAGE_BLOCK and spec.layout != "paged":
        raise refuse(spec, "descale", f"layout {spec.layout} has no pages; allowed: head, 64, 128, or layout: paged")
    if spec.scale_block == PAGE_BLOCK and not (spec.split_kv or spec.v_of_key):
        raise refuse(
            spec, "descale", "only split-KV kernels take a scale of each page; allowed: head, or "
            "page with split_kv: true"
        )  # fmt: skip
    if spec.scale_block == 1 and spec.layout == "paged" and (spec.v_of_key or not spec.split_kv):
        raise refuse(
            spec, "descale", "in pages only split-KV kernels take a scale of each key; allowed: head, page, or token "
            "with split_kv: true"
        )  # fmt: skip
    for name, value in (("persistent", True), ("order", spec.order), ("epilogue", "staged")):
        if spec.split_tiles and value is not None and getattr(spec, name) == value:
            reason = "with 'split_kv: tiles' a block has a part of one tile, and stores it from registers"
            raise refuse(spec, name, f"{reason}; found {_shown(name, value)}; leave it out")


def _check_latent_rows(spec: KernelSpec) -> None:
    """Raise PlanError for a kernel that cannot read its cache of latents."""
    name = str(spec.kv_dtype)
    row = LATENT_ROWS[name]
    if spec.dtype != BESIDE_LATENT_ROWS:
        raise refuse(spec, "dtype", f"{name} holds rotary columns in bf16; allowed: {BESIDE_LATENT_ROWS}")
    if spec.direction == APPEND:
        return
    if not spec.v_of_key:
        raise refuse(spec, "kv_dtype", f"{name} is a cache of latents, whose first columns are v; allowed: v: key")
    dims = next(dims for dims in KEY_VALUE_DIMS if dims[0] == row.columns)
    if (spec.head_dim_qk, spec.head_dim_v) != dims:
        raise refuse(spec, "head_dim", f"{name} has rows of head_dim {{qk: {dims[0]}, v: {dims[1]}}}")
    if row.scales_after_rows and spec.layout != "paged":
        raise refuse(spec, "layout", f"scales of {name} follow the rows of each page; allowed: paged")
