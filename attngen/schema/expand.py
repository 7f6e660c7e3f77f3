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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from math import prod
from typing import Any

from attngen.dtypes import DESCALE_BLOCKS, DTYPES, HEAD_DIMS, LATENT_ROWS, QUANTIZED_DTYPES
from attngen.errors import AttngenError, Gathered, Location, SpecError, suggest
from attngen.formats import SCHEMA
from attngen.operations import JVP, SCORES
from attngen.schema.fields import IN_GROUPS, SPLIT_TILES
from attngen.schema.kernel_spec import Backward, Gradient, KernelSpec, Roles
from attngen.schema.loading import DeclaredVariant, Spec
from attngen.schema.messages import field_path
from attngen.schema.models import (
    BackwardModel,
    GradientModel,
    HeadDimModel,
    KernelModel,
    KeysGradientModel,
    TileModel,
    WarpsModel,
)
from attngen.schema.presets import declared_preset, preset_names
from attngen.schema.quoting import show

MAX_KERNELS = 4096

#: Fields that expand, slowest first: kernels of one variant stand together.
_AXES = (
    "variant", "arch", "dtype", "kv_dtype", "out_dtype", "head_dim", "descale", "layout", "passes", "backend", "tile",
    "stages", "warps", "loads", "tile_map", "alignment", "fast_math", "softmax", "deterministic", "persistent", "order",
    "epilogue", "pack_gqa", "transposed_v", "split_kv", "max_logits",
)  # fmt: skip

#: Fields that concern the forward only; those of the backward are in ``backward``.
_FORWARDS = (
    "backend", "tile", "stages", "warps", "softmax", "persistent", "order", "epilogue", "pack_gqa", "split_kv",
    "kv_dtype", "out_dtype", "transposed_v", "descale", "max_logits",
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
class _FieldValue:
    value: Any
    location: Location
    fallback: bool = False  # an arch that the spec's fallback names


def expand(spec: Spec) -> tuple[KernelSpec, ...]:
    """Return the kernels that a spec asks for, in its order, each once; SpecError for a wrong name or list."""
    return tuple(dict.fromkeys(_all(spec)))


def expand_each(spec: Spec) -> tuple[tuple[KernelSpec, ...], list[AttngenError]]:
    """The kernels of the entries of a spec that can be expanded, and the errors of the others."""
    gathered = Gathered()
    kernels: list[KernelSpec] = []
    with gathered:
        kernels = _each(spec, gathered)
    return tuple(dict.fromkeys(kernels)), gathered.errors


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
    kernels = _each(spec, gathered)
    gathered.throw()
    return kernels


def _each(spec: Spec, gathered: Gathered) -> list[KernelSpec]:
    """The kernels of a spec; errors of entries are gathered. Raises SpecError if there are too many kernels."""
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
    return kernels


def _is_redundant(axes: dict[str, list[_FieldValue]], choice: tuple[_FieldValue, ...]) -> bool:
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


def _needs_split_kv(axes: dict[str, list[_FieldValue]], choice: tuple[_FieldValue, ...]) -> bool:
    """Whether a choice is an ordinary forward of a cache that only split-KV kernels read: one in fewer bits than q, or
    one whose pages, or keys in pages, have scales."""
    chosen = {name: item.value for name, item in zip(axes, choice, strict=True)}
    if chosen["split_kv"] or chosen["passes"] != "forward":
        return False
    read_whole = (None, chosen["dtype"], *LATENT_ROWS)
    other = chosen["kv_dtype"] not in read_whole and chosen["dtype"] not in QUANTIZED_DTYPES
    return other or chosen["descale"] == "page" or (chosen["descale"], chosen["layout"]) == ("token", "paged")


def _axes(spec: Spec, index: int, entry: KernelModel) -> dict[str, list[_FieldValue]]:
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
        axes[name] = [_FieldValue(value, spec.tree.locate(place)) for value, place in zip(values, places, strict=True)]
        for i, value in enumerate(values):
            if value in values[:i]:
                raise SpecError(
                    f"{_describe(value)} is given twice in one list",
                    location=axes[name][i].location,
                    field=field_path(path),
                )
    if entry.arch is None and fallback is not None and fallback not in lists["arch"]:
        axes["arch"].append(_FieldValue(fallback, spec.tree.locate(("fallback",)), fallback=True))
    return axes


def _describe(value: object) -> str:
    if isinstance(value, HeadDimModel):
        return f"{value.qk}/{value.v}" if value.qk != value.v else str(value.qk)
    return show(value.model_dump(exclude_none=True) if isinstance(value, TileModel | WarpsModel) else value)


def _kernel(spec: Spec, index: int, chosen: dict[str, _FieldValue]) -> KernelSpec:
    entry = spec.model.kernels[index]
    values = {name: item.value for name, item in chosen.items()}
    declared = resolve(spec, values["variant"], chosen["variant"].location)
    backward = values["passes"] == "backward"
    if backward:
        _refuse_forward_fields(spec, index, entry)
        _refuse_paged(chosen["passes"], index, values["layout"])
        values |= dict.fromkeys(_FORWARDS) | {"backend": _backend_of_backward(entry), "split_kv": False}
    elif values["passes"] in (*SCORES, JVP):
        _refuse_forward_fields(spec, index, entry)
        _refuse_values_of_keys(chosen["passes"], index, entry)
        if values["passes"] == JVP:
            _refuse_paged(chosen["passes"], index, values["layout"])
        values |= dict.fromkeys(_FORWARDS) | {"split_kv": False}
    if entry.backward is not None and "backward" not in entry.passes:
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
    variant = declared.variant
    if values["max_logits"]:
        if not variant.has_lse:
            raise SpecError(
                f"weights: {variant.weights} keep no row max; leave it out",
                location=chosen["max_logits"].location,
                field=f"kernels[{index}].max_logits",
            )
        variant = variant.with_max_logits()
    tile, warps = values["tile"] or TileModel(), values["warps"] or WarpsModel()
    alignment = values["alignment"]
    return KernelSpec(
        package=spec.package,
        variant=variant,
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
        softmax=None if values["passes"] != "forward" or left_open else values["softmax"] or declared.model.softmax,
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
            "is for the forward, but 'passes' has no forward; " + _instead(entry),
            location=spec.tree.locate(("kernels", index, name)),
            field=f"kernels[{index}].{name}",
        )


def _instead(entry: KernelModel) -> str:
    """Advice about a field of the forward in an entry without a forward."""
    if "backward" in entry.passes:
        return "for the backward, write it under 'backward', as in 'backward: {dkdv: {tile: {m: 64, n: 128}}}'"
    return f"leave it out: the plan of {entry.passes[0]} has its own"


def _refuse_paged(asked: _FieldValue, index: int, layout: str) -> None:
    """Raise SpecError for the derivative of a layout that has none."""
    if layout == "paged":
        raise SpecError(
            f"'layout: paged' has no {asked.value}; allowed: forward; write a {asked.value} of another layout as an "
            "entry of its own",
            location=asked.location,
            field=f"kernels[{index}].passes",
        )


def _refuse_values_of_keys(asked: _FieldValue, index: int, entry: KernelModel) -> None:
    """Raise SpecError for passes that take no values, or only values of their own, with values that are columns of the
    keys."""
    if entry.v is not None:
        raise SpecError(
            f"'v: key' has no {asked.value}; allowed: forward, backward",
            location=asked.location,
            field=f"kernels[{index}].passes",
        )


def gradients_of(model: BackwardModel | None) -> Backward:
    """Choices that a spec fixes for the kernels of a backward."""
    if model is None:
        return Backward()
    keys = model.dkdv or KeysGradientModel()
    dkdv = replace(
        _gradient(keys), overlap=keys.overlap, packed=keys.packed, q_stages=keys.q_stages, rows_ahead=keys.rows_ahead
    )
    return Backward(dkdv, _gradient(model.dq or GradientModel()))


def _gradient(model: GradientModel) -> Gradient:
    tile = model.tile or TileModel()
    return Gradient(tile.m, tile.n, model.stages, model.warps)


def _places(spec: Spec, index: int, chosen: dict[str, _FieldValue], declared: DeclaredVariant) -> dict[str, Location]:
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
