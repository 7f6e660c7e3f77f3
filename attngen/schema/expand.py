"""Expands a spec into its kernels: each list in an entry of ``kernels`` is expanded, nothing else is added.

Two rules keep the result free of duplicates. A value given twice in one list is refused as a mistake. A kernel that two
entries ask for is built once, and belongs to the first; ``repeats`` lists these for ``attngen check``.

A variant's tensors may be shaped by ``seqlen_q`` and ``seqlen_k``. In a dense call these are the lengths of q and k. In
a varlen call, where each sequence has lengths of its own, a shape means the maxima that the call gives
(``max_seqlen_q``, ``max_seqlen_k``), ``b`` the number of sequences: the tensor is padded, and what lies beyond a
sequence's own length is not read. Expressions still see each sequence's own lengths. With this rule every variant works
in both layouts, so none is refused. In a paged call ``seqlen_k`` is how many keys a row of the page table can hold.

``split_kv: true`` asks for two forward kernels of each variant: the ordinary one, and one whose blocks share the keys
of a sequence; ``split_kv: tiles`` for the ordinary one, and one whose blocks share the keys of a tile of queries. A
call runs one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from itertools import product
from math import prod
from typing import Any

from attngen.arch import ARCHES
from attngen.dtypes import DESCALE_BLOCKS, DTYPES, HEAD_DIMS, LATENT_ROWS, QUANTIZED_DTYPES
from attngen.errors import Gathered, Location, SpecError, suggest
from attngen.formats import (
    APPEND,
    APPEND_VARIANT,
    INDEX_SCORES,
    QUANTIZE,
    QUANTIZE_VARIANT,
    SCHEMA,
    TOPK,
    TOPK_VARIANT,
    WIDEN,
    WIDEN_VARIANT,
)
from attngen.lang.variant import Variant
from attngen.schema.fields import IN_GROUPS, SPLIT_TILES
from attngen.schema.loading import DeclaredVariant, Spec
from attngen.schema.messages import field_path
from attngen.schema.models import (
    BackwardModel,
    GradientModel,
    HeadDimModel,
    KernelModel,
    TileModel,
    WarpsModel,
)
from attngen.schema.presets import declared_preset, preset_names
from attngen.schema.quoting import show

MAX_KERNELS = 4096

#: dtypes that kernels quantize.
_UNQUANTIZED = ("bf16", "fp16")

#: Head dims of which kernels quantize whole tiles.
QUANTIZED_IN_TILES = (64, 128)


@dataclass(frozen=True, slots=True)
class Roles:
    """Warp roles of a warp-specialized kernel: what the spec fixes, None for what the plan chooses."""

    producer: int | None = None
    consumer: int | None = None
    schedule: str | None = None
    overlap: bool | None = None
    producer_registers: int | None = None
    consumer_registers: int | None = None


@dataclass(frozen=True, slots=True)
class Gradient:
    """Choices that the spec fixes for one of the two gradient kernels; None leaves a choice to the plan."""

    tile_m: int | None = None
    tile_n: int | None = None
    stages: int | None = None
    num_warps: int | None = None


@dataclass(frozen=True, slots=True)
class Backward:
    """The kernels of a backward: one by tiles of keys, one by tiles of queries."""

    dkdv: Gradient = Gradient()
    dq: Gradient = Gradient()


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


#: Fields of a kernel to fields of the spec, where the names differ.
_FIELD_OF = {
    "head_dim_qk": "head_dim", "head_dim_v": "head_dim", "direction": "passes", "tile_m": "tile", "tile_n": "tile",
    "scale_block": "descale", "num_warps": "warps", "roles": "warps", "pipeline": "stages", "split_tiles": "split_kv",
}  # fmt: skip

#: Fields that expand, slowest first: kernels of one variant stand together.
_AXES = (
    "variant", "arch", "dtype", "kv_dtype", "out_dtype", "head_dim", "descale", "layout", "passes", "backend", "tile",
    "stages", "warps", "loads", "tile_map", "alignment", "fast_math", "softmax", "deterministic", "persistent", "order",
    "epilogue", "pack_gqa", "transposed_v", "split_kv",
)  # fmt: skip


#: Fields that concern the forward only; those of the backward are in ``backward``.
_FORWARDS = (
    "backend", "tile", "stages", "warps", "softmax", "persistent", "order", "epilogue", "pack_gqa", "split_kv",
    "kv_dtype", "out_dtype", "transposed_v", "descale",
)  # fmt: skip
#: Fields that concern the ordinary forward only; a split-KV one leaves them to the plan.
_UNSPLIT = ("tile", "stages", "warps", "persistent", "order", "epilogue", "pack_gqa")
#: Those of them that one whose blocks share the keys of a tile leaves to the plan, too.
_UNSPLIT_TILES = ("persistent", "order", "epilogue")


#: Fields that say how a kernel is cut for its GPU, which one of the fallback leaves to the plan.
_CUTS = (
    "backend", "tile", "stages", "warps", "loads", "tile_map", "softmax", "persistent", "order", "epilogue", "pack_gqa",
    "transposed_v",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Value:
    value: Any
    location: Location
    fallback: bool = False  # an arch that the spec's fallback names


def expand(spec: Spec) -> tuple[KernelSpec, ...]:
    """Return the kernels that a spec asks for, in its order, each once; SpecError for a wrong name or list."""
    return tuple(dict.fromkeys(_all(spec)))


def appends(kernels: Sequence[KernelSpec]) -> tuple[KernelSpec, ...]:
    """Kernels that append to the caches that kernels read: one for each arch, dtype of new rows and dtype of the cache
    of those with pages. A cache of quantized pages gets rows of any dtype that is quantized.

    No entry of a spec asks for them. Their head dimensions are the largest that they have to serve.
    """
    by_key: dict[tuple[str, str, str | None], KernelSpec] = {}
    for kernel in kernels:
        if kernel.layout != "paged" or kernel.direction == INDEX_SCORES:
            continue
        quantized = kernel.dtype in QUANTIZED_DTYPES
        for dtype in _UNQUANTIZED if quantized else (kernel.dtype,):
            kv_dtype = kernel.dtype if quantized else kernel.kv_dtype
            key = kernel.arch, dtype, kv_dtype
            first = by_key.get(key) or KernelSpec(
                package=kernel.package, variant=Variant(APPEND_VARIANT), arch=kernel.arch, head_dim_qk=0, head_dim_v=0,
                dtype=dtype, kv_dtype=kv_dtype, layout=kernel.layout, direction=APPEND, backend="cuda",
                spec_file=kernel.spec_file, location=kernel.location, places=kernel.places,
            )  # fmt: skip
            by_key[key] = replace(
                first,
                head_dim_qk=max(first.head_dim_qk, kernel.head_dim_qk),
                head_dim_v=max(first.head_dim_v, kernel.head_dim_v),
            )
    return tuple(by_key.values())


def quantizers(kernels: Sequence[KernelSpec]) -> tuple[KernelSpec, ...]:
    """Return the kernels that quantize the operands of kernels in 8 bits: for each arch of those, one for each dtype
    that ``attngen.quantize`` reads with a kernel, and one for each head dim that has a kernel of its own there.

    No entry of a spec asks for them. Their head dimensions are the largest that they have to serve.
    """
    by_arch: dict[str, KernelSpec] = {}
    own: dict[str, set[int]] = {}
    for kernel in kernels:
        if kernel.dtype in QUANTIZED_DTYPES and kernel.direction != INDEX_SCORES:
            first = by_arch.get(kernel.arch) or KernelSpec(
                package=kernel.package, variant=Variant(QUANTIZE_VARIANT), arch=kernel.arch, head_dim_qk=0,
                head_dim_v=0, dtype=_UNQUANTIZED[0], direction=QUANTIZE, backend="cuda", spec_file=kernel.spec_file,
                location=kernel.location, places=kernel.places,
            )  # fmt: skip
            by_arch[kernel.arch] = replace(
                first,
                head_dim_qk=max(first.head_dim_qk, kernel.head_dim_qk),
                head_dim_v=max(first.head_dim_v, kernel.head_dim_v),
            )
            if ARCHES[kernel.arch].wgmma and kernel.head_dim_qk == kernel.head_dim_v in QUANTIZED_IN_TILES:
                own.setdefault(kernel.arch, set()).add(kernel.head_dim_qk)
    general = [replace(kernel, dtype=dtype) for kernel in by_arch.values() for dtype in _UNQUANTIZED]
    return tuple(general) + tuple(
        replace(kernel, head_dim_qk=head_dim, head_dim_v=head_dim, loads="descriptor")
        for kernel in general
        for head_dim in sorted(own.get(kernel.arch, ()))
    )


def wideners(kernels: Sequence[KernelSpec]) -> tuple[KernelSpec, ...]:
    """Return the kernels that widen caches in 8 bits, so that many queries in 16 bits take a kernel whose keys have 16,
    too: one for each arch and dtype of queries of which there are kernels of both kinds.

    No entry of a spec asks for them. Their head dimensions are the largest that they have to serve.
    """

    def serves(kernel: KernelSpec) -> tuple[Any, ...]:
        dims = kernel.head_dim_qk, kernel.head_dim_v
        return kernel.arch, kernel.variant.name, kernel.dtype, kernel.layout, dims

    ordinary = {
        serves(kernel) for kernel in kernels
        if kernel.direction == "forward" and kernel.kv_dtype is None and not kernel.split_kv
    }  # fmt: skip
    by_key: dict[tuple[str, str], KernelSpec] = {}
    for kernel in kernels:
        if kernel.kv_dtype in (None, *LATENT_ROWS) or kernel.dtype in QUANTIZED_DTYPES or kernel.v_of_key:
            continue
        if serves(kernel) not in ordinary:
            continue
        first = by_key.get((kernel.arch, kernel.dtype)) or KernelSpec(
            package=kernel.package, variant=Variant(WIDEN_VARIANT), arch=kernel.arch, head_dim_qk=0, head_dim_v=0,
            dtype=kernel.dtype, kv_dtype=kernel.kv_dtype, direction=WIDEN, backend="cuda",
            spec_file=kernel.spec_file, location=kernel.location, places=kernel.places,
        )  # fmt: skip
        by_key[kernel.arch, kernel.dtype] = replace(
            first,
            head_dim_qk=max(first.head_dim_qk, kernel.head_dim_qk),
            head_dim_v=max(first.head_dim_v, kernel.head_dim_v),
        )
    return tuple(by_key.values())


def selectors(kernels: Sequence[KernelSpec]) -> tuple[KernelSpec, ...]:
    """The kernels that select the largest scores of rows: one for each arch with kernels that score keys for an index.

    No entry of a spec asks for them.
    """
    by_arch: dict[str, KernelSpec] = {}
    for kernel in kernels:
        if kernel.direction == INDEX_SCORES:
            by_arch.setdefault(
                kernel.arch,
                KernelSpec(
                    package=kernel.package, variant=Variant(TOPK_VARIANT), arch=kernel.arch, head_dim_qk=1,
                    head_dim_v=1, dtype="fp32", direction=TOPK, backend="cuda", spec_file=kernel.spec_file,
                    location=kernel.location, places=kernel.places,
                ),
            )  # fmt: skip
    return tuple(by_arch.values())


def repeats(spec: Spec) -> tuple[tuple[KernelSpec, KernelSpec], ...]:
    """Return the kernels that a later entry asks for again, each with the earlier one that serves it."""
    first: dict[KernelSpec, KernelSpec] = {}
    pairs = [(kernel, first.setdefault(kernel, kernel)) for kernel in _all(spec)]
    return tuple((kernel, earlier) for kernel, earlier in pairs if earlier is not kernel)


def spec_hash(spec: Spec) -> str:
    """Return a hash of what a spec builds, through its includes and presets too.

    Comments, the order of keys and of kernels, and how an expression is spelt leave it unchanged.
    """
    kernels = sorted(json.dumps(kernel.to_dict(), sort_keys=True) for kernel in expand(spec))
    return sha256(json.dumps([SCHEMA, spec.package, kernels]).encode()).hexdigest()


def _all(spec: Spec) -> list[KernelSpec]:
    gathered = Gathered()
    entries = []
    listed: Sequence[KernelModel | None] = spec.model.kernels
    for index, entry in enumerate(listed):
        if entry is None:  # which the loader has found to be wrong
            continue
        with gathered:
            entries.append((index, _axes(spec, index, entry)))
    count = sum(prod(map(len, axes.values())) for _, axes in entries)
    if count > MAX_KERNELS:
        raise SpecError(
            f"the lists expand into {count:,} kernels; a spec builds at most {MAX_KERNELS:,}",
            location=spec.tree.locate(("kernels",)),
            field="kernels",
        )
    kernels = []
    for index, axes in entries:
        for choice in product(*axes.values()):
            splits = True in spec.model.kernels[index].split_kv and _needs_split_kv(axes, choice)
            if not splits and not _is_redundant(axes, choice):
                with gathered:
                    kernels.append(_kernel(spec, index, dict(zip(axes, choice, strict=True))))
    gathered.throw()
    return kernels


def _is_redundant(axes: dict[str, list[_Value]], choice: tuple[_Value, ...]) -> bool:
    """Whether a choice differs from an earlier one only in fields that do not concern it: a backward in fields of the
    forward, a split-KV forward in fields of the ordinary one."""
    chosen = dict(zip(axes, choice, strict=True))
    others = _FORWARDS if chosen["passes"].value != "forward" else _left_to_the_plan(chosen["split_kv"].value)
    if chosen["arch"].fallback:
        if chosen["split_kv"].value == SPLIT_TILES:
            return True
        others = (*others, *_CUTS)
    return any(chosen[name] is not axes[name][0] for name in others)


def _left_to_the_plan(split_kv: bool | str) -> tuple[str, ...]:
    """Fields of the ordinary forward that a kernel whose blocks share keys does not use."""
    return _UNSPLIT_TILES if split_kv == SPLIT_TILES else _UNSPLIT if split_kv else ()


def _needs_split_kv(axes: dict[str, list[_Value]], choice: tuple[_Value, ...]) -> bool:
    """Whether a choice is an ordinary forward of a cache that only split-KV kernels read: one in fewer bits than q, or
    one whose pages have scales."""
    chosen = {name: item.value for name, item in zip(axes, choice, strict=True)}
    if chosen["split_kv"] or chosen["passes"] != "forward":
        return False
    read_whole = (None, chosen["dtype"], *LATENT_ROWS)
    other = chosen["kv_dtype"] not in read_whole and chosen["dtype"] not in QUANTIZED_DTYPES
    return other or chosen["descale"] == "page"


def _axes(spec: Spec, index: int, entry: KernelModel) -> dict[str, list[_Value]]:
    """Return the values of each field that expands; one None where a field is left out."""
    lists: dict[str, Sequence[Any]] = {name: getattr(entry, name, None) or (None,) for name in _AXES}
    paths: dict[str, tuple[str | int, ...]] = {name: ("kernels", index, name) for name in _AXES}
    lists["stages"] = (entry.pipeline and entry.pipeline.stages) or (None,)
    paths["stages"] = ("kernels", index, "pipeline", "stages")
    lists["split_kv"] = (False, *filter(None, entry.split_kv))
    fallback = spec.model.fallback
    if entry.arch is None:
        lists["arch"], paths["arch"] = spec.model.arch or (), ("arch",)
        if not spec.model.arch:
            raise SpecError(
                "missing; name it here or for the whole spec, as in 'arch: [sm90a]'",
                location=spec.tree.locate(("kernels", index)),
                field=f"kernels[{index}].arch",
            )
    axes = {}
    for name, values in lists.items():
        path = paths[name]
        places = (path if name == "split_kv" else (*path, i) for i in range(len(values)))
        axes[name] = [_Value(value, spec.tree.locate(place)) for value, place in zip(values, places, strict=True)]
        for i, value in enumerate(values):
            if value in values[:i]:
                raise SpecError(
                    f"{_describe(value)} is given twice in one list",
                    location=axes[name][i].location,
                    field=field_path(path),
                )
    if entry.arch is None and fallback is not None and fallback not in lists["arch"]:
        axes["arch"].append(_Value(fallback, spec.tree.locate(("fallback",)), fallback=True))
    return axes


def _describe(value: object) -> str:
    if isinstance(value, HeadDimModel):
        return f"{value.qk}/{value.v}" if value.qk != value.v else str(value.qk)
    return show(value.model_dump(exclude_none=True) if isinstance(value, TileModel | WarpsModel) else value)


def _kernel(spec: Spec, index: int, chosen: dict[str, _Value]) -> KernelSpec:
    entry = spec.model.kernels[index]
    values = {name: item.value for name, item in chosen.items()}
    declared = resolve(spec, values["variant"], chosen["variant"].location)
    backward = values["passes"] == "backward"
    if backward:
        _refuse_forward_fields(spec, index, entry)
        _refuse_paged(chosen["passes"], index, values["layout"])
        values |= dict.fromkeys(_FORWARDS) | {"backend": _backend_of_backward(entry), "split_kv": False}
    elif values["passes"] == INDEX_SCORES:
        _refuse_forward_fields(spec, index, entry)
        _refuse_values_of_keys(chosen["passes"], index, entry)
        values |= dict.fromkeys(_FORWARDS) | {"split_kv": False}
    elif entry.backward is not None and "backward" not in entry.passes:
        raise SpecError(
            "sets how a backward is computed, but 'passes' has no backward; allowed: passes: [forward, backward]",
            location=spec.tree.locate(("kernels", index, "backward")),
            field=f"kernels[{index}].backward",
        )
    shares = entry.v is not None or declared.variant.keys is not None
    if shares and any(entry.split_kv):
        asked = "'v: key'" if entry.v is not None else f"'keys: {declared.variant.keys}'"
        raise SpecError(
            f"kernels with {asked} always share the keys of a sequence; leave it out",
            location=spec.tree.locate(("kernels", index, "split_kv")),
            field=f"kernels[{index}].split_kv",
        )
    values |= dict.fromkeys(_left_to_the_plan(values["split_kv"]))
    if left_open := chosen["arch"].fallback:
        values |= dict.fromkeys(_CUTS)
    beyond_256 = max(values["head_dim"].qk, values["head_dim"].v) > HEAD_DIMS[-1]  # their blocks always share keys
    tile, warps = values["tile"] or TileModel(), values["warps"] or WarpsModel()
    alignment = values["alignment"]
    return KernelSpec(
        package=spec.package,
        variant=declared.variant,
        arch=values["arch"],
        head_dim_qk=values["head_dim"].qk,
        head_dim_v=values["head_dim"].v,
        dtype=values["dtype"],
        kv_dtype=None if values["kv_dtype"] == values["dtype"] else values["kv_dtype"],
        out_dtype=_out_dtype(values),
        layout=values["layout"],
        direction=values["passes"],
        backend=values["backend"],
        tile_m=tile.m,
        tile_n=tile.n,
        stages=values["stages"],
        num_warps=warps.count,
        roles=roles_of(warps),
        backward=gradients_of(None if left_open else entry.backward) if backward else None,
        loads=values["loads"],
        tile_map=values["tile_map"],
        alignment=DTYPES[values["dtype"]].bytes if alignment == "element" else alignment,
        fast_math=values["fast_math"],
        softmax=None if backward or left_open else values["softmax"] or declared.model.softmax,
        softmax_scale=_first(entry.softmax_scale, declared.model.softmax_scale),
        deterministic=values["deterministic"],
        persistent=values["persistent"],
        order=values["order"],
        epilogue=values["epilogue"],
        pack_gqa=values["pack_gqa"],
        transposed_v=bool(values["transposed_v"]),
        grouped_v=values["transposed_v"] == IN_GROUPS,
        v_of_key=entry.v is not None,
        split_kv=values["split_kv"] is True or (values["passes"] == "forward" and (shares or beyond_256)),
        split_tiles=values["split_kv"] == SPLIT_TILES,
        scale_block=DESCALE_BLOCKS[values["descale"] or "head"],
        allow=tuple(sorted(set(entry.allow))),
        spec_file=spec.name,
        location=spec.tree.locate(("kernels", index)),
        places=_places(spec, index, chosen, declared),
    )


def _out_dtype(values: dict[str, Any]) -> str | None:
    """Return the dtype of an output that is not the usual one."""
    usual = QUANTIZED_DTYPES.get(values["dtype"], values["dtype"])
    return None if values["out_dtype"] == usual else values["out_dtype"]


def _backend_of_backward(entry: KernelModel) -> str | None:
    """Backend that the entry names for the backward, or Triton if the entry allows only Triton for the forward."""
    if entry.backward is not None and entry.backward.backend is not None:
        return entry.backward.backend
    return "triton" if set(entry.backend or ()) == {"triton"} else None


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def roles_of(warps: WarpsModel) -> Roles | None:
    """Return the roles that a spec gives, or None if it gives none."""
    registers = warps.registers
    roles = Roles(
        warps.producer,
        warps.consumer,
        warps.schedule,
        warps.overlap,
        registers.producer if registers else None,
        registers.consumer if registers else None,
    )
    return None if roles == Roles() else roles


def _refuse_forward_fields(spec: Spec, index: int, entry: KernelModel) -> None:
    """Raise SpecError for a field of the forward in an entry without a forward."""
    if "forward" in entry.passes:
        return
    fields = ("pipeline" if name == "stages" else name for name in _FORWARDS)
    unsplit = not any(entry.split_kv)  # the default of an entry
    given = [name for name in fields if getattr(entry, name) is not None and not (name == "split_kv" and unsplit)]
    for name in given:
        raise SpecError(
            "is for the forward, but 'passes' has no forward; for the backward, write it under 'backward', as in "
            "'backward: {dkdv: {tile: {m: 64, n: 128}}}'",
            location=spec.tree.locate(("kernels", index, name)),
            field=f"kernels[{index}].{name}",
        )


def _refuse_paged(asked: _Value, index: int, layout: str) -> None:
    """Raise SpecError for the backward of a layout that has none."""
    if layout == "paged":
        raise SpecError(
            "'layout: paged' has no backward; allowed: forward; write a backward of another layout as an entry of "
            "its own",
            location=asked.location,
            field=f"kernels[{index}].passes",
        )


def _refuse_values_of_keys(asked: _Value, index: int, entry: KernelModel) -> None:
    """Raise SpecError for index scores, which have no values, with values that are columns of the keys."""
    if entry.v is not None:
        raise SpecError(
            f"'v: key' has no {INDEX_SCORES}; allowed: forward, backward",
            location=asked.location,
            field=f"kernels[{index}].passes",
        )


def gradients_of(model: BackwardModel | None) -> Backward:
    """Choices that a spec fixes for the kernels of a backward."""
    if model is None:
        return Backward()
    return Backward(*(_gradient(getattr(model, name) or GradientModel()) for name in ("dkdv", "dq")))


def _gradient(model: GradientModel) -> Gradient:
    tile = model.tile or TileModel()
    return Gradient(tile.m, tile.n, model.stages, model.warps)


def _places(spec: Spec, index: int, chosen: dict[str, _Value], declared: DeclaredVariant) -> dict[str, Location]:
    """Return the place of each field that the file gives: in the entry or, for some, in the variant."""
    entry = spec.model.kernels[index]
    places = {name: item.location for name, item in chosen.items()}
    if entry.backward is not None:
        places["backward"] = spec.tree.locate(("kernels", index, "backward"))
    for name in ("softmax", "softmax_scale", "allow"):
        in_entry = name in entry.model_fields_set
        places[name] = spec.tree.locate(("kernels", index, name)) if in_entry else declared.locate(name)
    return places


def resolve(spec: Spec, name: str, location: Location) -> DeclaredVariant:
    """Return the variant that a kernel names: the spec's own or included one, else the preset."""
    if name in spec.variants:
        return spec.variants[name]
    if name in preset_names():
        return declared_preset(name)
    known = [*spec.variants, *preset_names()]
    raise SpecError(
        f"unknown variant '{name}'{suggest(name, known)}; declared here: {', '.join(spec.variants) or 'none'}; "
        f"presets: {', '.join(preset_names())}",
        location=location,
        field="variant",
    )
