"""Kernels without a compiler and a GPU without hardware: manifests by hand, and a driver that runs the reference.

The driver decodes the parameter block by rules of its own, so that a wrong offset, stride or address shows up as a
wrong result.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attngen.dtypes import dtype as dtype_row
from attngen.formats import MANIFEST_FORMAT
from attngen.lang.check import compile_variant, restore_variant
from attngen.lang.divisors import divisors
from attngen.lang.ir import MAX_SEQLEN
from attngen.lang.variant import Scalar, Variant
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.arguments.checked import Call, Packing
from attngen.runtime.arguments.given import KEPT
from attngen.runtime.arguments.paging import Paging, bind_paged
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.device.interface import Launch as KernelLaunch
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.reference.eager import reference
from attngen.store import Store
from attngen.store.index import Index, IndexEntry, write_index
from tests.runtime.eager_map import eager_tile_map

_SCALAR_TYPES = {"int32": "i32", "int64": "i64", "fp32": "fp32", "bool": "i32"}
_STRIDED = {"dense": ("b", "s", "h"), "varlen": ("s", "h"), "paged": ("s", "h")}
_STRIDED_KEYS = _STRIDED | {"paged": ("page", "s", "h")}


def variant(name: str = "causal", mask: str | bool | None = "q_pos >= kv", **fields: Any) -> Variant:
    """Return a variant from texts and declarations."""
    return compile_variant(name, mask, **fields)


def window_variant(name: str = "window", **scalar: Any) -> Variant:
    """Return a causal window whose scalar has these further properties."""
    return variant(
        name, "0 <= q_pos - kv and q_pos - kv < window", scalars=[Scalar("window", "int32", min=1, **scalar)]
    )


def bias_variant() -> Variant:
    """Return a variant with a tensor of a free extent, and scalars of each kind."""
    return variant(
        "bias",
        "kv < limit or loud",
        score="s + gain * table[h, clamp(kv - q_pos, -radius, radius) + radius]",
        scalars=[
            Scalar("limit", "int64", min=0, max="seqlen_k"),
            Scalar("loud", "bool", default=False),
            Scalar("gain", "fp32", default=1.0),
            Scalar("radius", "int32", min=0, max=100),
        ],
        tensors=[Declared("table", "fp32", ("h", "distances"))],
    )


def parameters_of(
    chosen: Variant, *, loads: str, layout: str, dtype: str, tiles: tuple[int, int], dims: tuple[int, int], align: int,
    tile_map: bool, classifier: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a parameter list in the order in which plans write them."""
    rows: list[dict[str, Any]] = []

    def add(name: str, kind: str, type_: str, **more: Any) -> None:
        rows.append({"name": name, "kind": kind, "type": type_, "axis": None, **more})

    element = dtype_row(dtype)
    sources = [] if classifier else ["q", "k", "v"]
    for name in sources:
        if loads == "descriptor":
            extent = (tiles[0] if name == "q" else tiles[1], 1, dims[1] if name == "v" else dims[0])
            box = extent if layout == "varlen" else (1, *extent)
            if layout == "paged":
                box = extent if name == "q" else (1, 1, extent[0], extent[2])
            pages = {"paged": True} if layout == "paged" and name != "q" else {}
            add(f"{name}_desc", "descriptor", "tensordesc", of=name, box=list(box), **pages)
            if layout == "paged":
                continue
            for kind, type_ in (("descriptor_shape", "i32"), ("descriptor_stride", "i64")):
                for axis in range(len(box)):
                    add(f"{name}_{kind}{axis}", kind, type_, of=name, axis=axis)
        else:
            add(f"{name}_ptr", "pointer", f"*{element.triton}", of=name, divisibility=align if align > 2 else 0)
    if not classifier:
        add("out_ptr", "pointer", f"*{element.triton}", of="out")
        add("lse_ptr", "pointer", "*fp32", of="lse", divisibility=4)
    if layout != "dense":
        add("cu_seqlens_q_ptr", "pointer", "*i32", of="cu_seqlens_q", divisibility=4)
    if layout == "varlen":
        add("cu_seqlens_k_ptr", "pointer", "*i32", of="cu_seqlens_k", divisibility=4)
    if layout == "paged":
        add("page_table_ptr", "pointer", "*i32", of="page_table", divisibility=4)
        add("page_table_stride", "stride", "i64", of="page_table", axis="b")
        for size in ("page_size", "num_pages", "box_rows"):
            add(size, "size", "i32", of=size)
        for asked in ("asked_splits", "asked_split_size"):
            add(asked, "size", "i32", of=asked)
    add("seqused_k_ptr", "pointer", "*i32", of="seqused_k", divisibility=4)
    if tile_map:
        add("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)
    for tensor in chosen.tensors:
        add(f"{tensor.name}_ptr", "pointer", f"*{dtype_row(tensor.dtype).triton}", of=f"tensor:{tensor.name}")
    strided = [] if classifier else [*(sources if loads == "pointer" else []), "out"]
    for name in strided:
        for axis in (_STRIDED_KEYS if name in "kv" else _STRIDED)[layout]:
            step = align // element.bytes
            add(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis, divisibility=step if step > 1 else 0)
    if tile_map:
        for axis in ("b", "h", "q"):
            add(f"stride_tile_map_{axis}", "stride", "i64", of="tile_map", axis=axis)
    for tensor in chosen.tensors:
        for kind, type_ in (("stride", "i64"), ("extent", "i32")):
            for axis in range(len(tensor.shape)):
                add(f"{kind}_{tensor.name}_{axis}", kind, type_, of=f"tensor:{tensor.name}", axis=axis)
    for size in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "total_q", "total_k"):
        packed = layout != "dense" and size.startswith("seqlen")
        add(f"max_{size}" if packed else size, "size", "i32", of=size)
    if classifier:
        add("map_heads", "size", "i32", of="map_heads")
    else:
        add("softmax_scale", "scale", "fp32")
    for scalar in chosen.arguments:
        add(scalar.name, "scalar", _SCALAR_TYPES[scalar.dtype], of=scalar.name)
    for divisor in divisors(chosen):
        add(f"by_{divisor.name}", "divisor", "divisor", of=divisor.text)
    if not classifier:
        add("write_lse", "present", "i32", of="lse")
    absent = "cu_seqlens_q" if layout == "paged" else "seqused_k"
    add(f"has_{absent}", "present", "i32", of=absent)
    for i in range(2):
        add(f"scratch{i}", "scratch", "*i8")
    return rows


def manifest_of(
    chosen: Variant,
    *,
    name: str | None = None,
    package: str = "mine",
    arch: str = "sm90a",
    dtype: str = "bf16",
    head_dim: int | tuple[int, int] = 64,
    layout: str = "dense",
    backend: str = "triton",
    loads: str = "pointer",
    align: int = 16,
    tiles: tuple[int, int] = (64, 32),
    tile_map: tuple[bool, bool] | None = None,
    shared_memory: int = 65536,
    min_driver: int = 13000,
    direction: str = "forward",
    split_kv: bool = False,
    **launch: Any,
) -> dict[str, Any]:
    """Return a manifest as a build writes it; ``launch`` has more entries of the main launch."""
    dims = (head_dim, head_dim) if isinstance(head_dim, int) else head_dim
    name = name or f"fwd_{arch}_{loads}_{dtype}_d{dims[0]}_{chosen.name}_{layout}" + "_split" * split_kv
    form: dict[str, Any] = {
        "loads": loads, "layout": layout, "dtype": dtype, "tiles": tiles, "dims": dims, "align": align,
        "tile_map": tile_map is not None,
    }  # fmt: skip
    axes = {"owner": "forward", "batch": tile_map[0], "heads": tile_map[1]} if tile_map else None
    of_launches = {"tile_m": tiles[0], "tile_n": tiles[1], "threads": 128, "num_warps": 4, "tile_map": axes}
    return {
        "format": MANIFEST_FORMAT, "name": name, "package": package, "variant": chosen.to_dict(), "arch": arch,
        "dtype": dtype, "head_dim_qk": dims[0], "head_dim_v": dims[1], "layout": layout, "direction": direction,
        "backend": backend, "l2_keys": 65536, "loads": loads, "alignment": align,
        "tile_m": tiles[0], "tile_n": tiles[1],
        "threads": 128, "iteration": "tile_map" if tile_map else "ranges", "min_driver": min_driver,
        "resources": {"shared_memory": shared_memory, "registers": 128, "spills": 0},
        "main": "forward", "split_kv": split_kv,
        "launches": [
            *([{
                **of_launches, "name": "classify", "symbol": f"classify_{name}", "grid": "query_words",
                "parameters": parameters_of(chosen, **form, classifier=True),
            }] if tile_map else []),
            {
                **of_launches, "name": "forward", "symbol": name, "grid": "queries",
                "parameters": parameters_of(chosen, **form), "resources": {"shared_memory": shared_memory}, **launch,
            },
        ],
    }  # fmt: skip


def main_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of the main launch of a manifest."""
    return next(row for row in manifest["launches"] if row["name"] == manifest["main"])


def launch_of(manifest: Mapping[str, Any], symbol: str) -> dict[str, Any]:
    """Return the row of the launch of a symbol."""
    return next(row for row in manifest["launches"] if row["symbol"] == symbol)


def kernel(chosen: Variant, **fields: Any) -> Kernel:
    """Return a kernel whose cubin is its own manifest, which ``FakeDriver`` reads back."""
    return kernel_of(manifest_of(chosen, **fields))


def kernel_of(manifest: Mapping[str, Any]) -> Kernel:
    """Return the kernel of a manifest."""
    image = json.dumps(manifest).encode()
    return Kernel(manifest, lambda: image, origin="memory")


def write_kernel(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """Write a kernel's folder as the store lays it out, and return it."""
    image = json.dumps(manifest).encode()
    folder.mkdir(parents=True)
    (folder / "kernel.cubin").write_bytes(image)
    full = {**manifest, "sha256": sha256(image).hexdigest()}
    data = json.dumps(full).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "SHA256SUMS").write_text(f"{sha256(data).hexdigest()}  manifest.json\n")
    return folder


def write_build(name: str, *variants: Variant, inputs: Mapping[str, str] | None = None, **fields: Any) -> Store:
    """Put kernels and an index where a build puts them, and return the store."""
    store = Store()
    entries = []
    for i, chosen in enumerate(variants):
        manifest = manifest_of(chosen, package=name, **fields)
        key = sha256(json.dumps([manifest, i]).encode()).hexdigest()
        write_kernel(store.path(key), manifest)
        entries.append(IndexEntry(manifest["name"], key, chosen.name, "sm90a", "triton"))
    write_index(store, Index(name, "/spec.yaml", "hash", dict(inputs or {}), tuple(entries)))
    return store


@dataclass
class Launch:
    """One launch as the driver saw it."""

    symbol: str
    grid: int
    threads: int
    shared: int
    device: int
    values: dict[str, Any]


@dataclass
class FakeDriver:
    """A GPU that decodes each launch, checks what the manifest promised, and computes it with the reference."""

    compute_capability: int = 90
    cuda_version: int = 13000
    most_shared: int = 227 * 1024
    launches: list[Launch] = field(default_factory=list)
    loads: list[tuple[str, int]] = field(default_factory=list)
    encoded: int = 0
    cleared: list[tuple[int, ctypes.Array[ctypes.c_char]]] = field(default_factory=list)

    def version(self) -> int:
        return self.cuda_version

    def capability(self, device: int) -> int:
        return self.compute_capability

    def shared_memory(self, device: int) -> int:
        return self.most_shared

    def name(self, device: int) -> str:
        return "a card"

    def multiprocessors(self, device: int) -> int:
        return 132

    def bandwidth(self, device: int) -> float:
        return 3350.0

    def clusters(self, function: Any, size: int, threads: int, shared: int, device: int) -> int:
        return 15

    def stream(self, device: int) -> int:
        return 0

    def zeros(self, size: int, device: int) -> int:
        self.cleared.append((device, (ctypes.c_char * size)()))
        return ctypes.addressof(self.cleared[-1][1])

    def load(self, image: bytes, symbol: str, device: int, shared: int, sizes: Sequence[int], cluster: int = 1) -> Any:
        self.loads.append((symbol, device))
        manifest = json.loads(image)
        rows = launch_of(manifest, symbol)["parameters"]
        assert list(sizes) == [size_of(row) for row in rows]
        return symbol, manifest, rows

    def extent_at(self, rank: int, axis: int, device: int) -> int | None:
        return None

    def ready(self, device: int) -> bool:
        return True

    def recorder(self, event: int, stream: int) -> Callable[[], None]:
        return lambda: None

    def waiter(self, event: int, stream: int) -> Callable[[], None]:
        return lambda: None

    def bound(self, kernels: Sequence[Any], device: int, stream: int) -> Callable[[], None]:
        return lambda: self.launch(kernels, device)

    def launch(self, kernels: Sequence[KernelLaunch], device: int) -> None:
        for kernel in kernels:
            self.launch_one(kernel, device)

    def launch_one(self, kernel: KernelLaunch, device: int) -> None:
        (symbol, manifest, rows), grid, threads, shared, _, parameters = kernel
        values = decode(rows, parameters)
        self.launches.append(Launch(symbol, grid, threads, shared, device, values))
        if symbol == main_of(manifest)["symbol"]:
            run_forward(manifest, values)
        else:
            run_classifier(manifest, values)

    def encode_tensor_map(
        self, dtype: str, address: int, extents: Sequence[int], strides: Sequence[int], box: Sequence[int],
        swizzle: int, device: int,
    ) -> bytes:  # fmt: skip
        self.encoded += 1
        size = dtype_row(dtype).bytes
        assert address % 16 == 0
        assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in strides)
        assert len(strides) == len(extents) - 1 == len(box) - 1
        assert all(0 < extent <= 256 for extent in box)
        assert swizzle == 0 or box[0] * size <= swizzle
        packed = struct.pack(f"<Qq{len(extents)}q{len(strides)}q", address, len(extents), *extents, *strides)
        return packed.ljust(120, b"\0") + struct.pack("<q", swizzle)


def code_of(row: Mapping[str, Any]) -> str:
    """Return the struct code of a parameter."""
    if row["kind"] == "descriptor":
        return "128s"
    if row["kind"] == "divisor":
        return "12s"
    if row["kind"] in ("pointer", "scratch"):
        return "Q"
    return {"i1": "b", "i8": "b", "i32": "i", "i64": "q", "fp32": "f"}[row["type"]]


def size_of(row: Mapping[str, Any]) -> int:
    """Return the bytes of a parameter."""
    return struct.calcsize(code_of(row))


def decode(rows: Sequence[Mapping[str, Any]], parameters: int) -> dict[str, Any]:
    """Return the values behind an array of pointers by what they are, whatever the manifest calls them."""
    pointers = (ctypes.c_uint64 * len(rows)).from_address(parameters)
    values: dict[str, Any] = {}
    for row, pointer in zip(rows, pointers, strict=True):
        assert pointer % (4 if row["kind"] == "divisor" else min(size_of(row), 64)) == 0
        value = struct.unpack("<" + code_of(row), ctypes.string_at(pointer, size_of(row)))[0]
        divisibility = row.get("divisibility") or 1
        assert not isinstance(value, int) or value % divisibility == 0, f"{row['name']} = {value}"
        of = (row.get("of") or row["name"]).removeprefix("tensor:")
        key = {
            "pointer": f"{of}_ptr",
            "size": of,
            "scalar": of,
            "scale": "softmax_scale",
            "scratch": row["name"],
            "present": f"has_{of}",
            "descriptor": f"{of}_desc",
        }.get(row["kind"], f"{row['kind']}_{of}_{row.get('axis')}")
        if row["kind"] == "scratch":
            assert value == 0
        if row["kind"] == "descriptor" and key in values:  # one for each block of columns: they differ in the box
            assert values[key][:72] == value[:72]
        values.setdefault(key, value)
    return values


def at(address: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> torch.Tensor | None:
    """Return the tensor at an address; strides in elements. None for a null pointer or an empty tensor."""
    if not address or 0 in shape:
        return None
    size = dtype_row(dtype).bytes
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_uint8 * (span * size)).from_address(address)
    flat = np.frombuffer(raw, dtype=f"i{size}")
    values = torch.from_numpy(flat).as_strided(tuple(shape), tuple(strides))
    return values.view(getattr(torch, dtype_row(dtype).torch))


def _input(manifest: Mapping[str, Any], values: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return q, k or v as a launch describes it, in the order (b,) s, h, d."""
    varlen = manifest["layout"] == "varlen"
    if f"{name}_desc" in values:
        packed = values[f"{name}_desc"]
        address, rank = struct.unpack_from("<Qq", packed)
        extents = struct.unpack_from(f"<{rank}q", packed, 16)
        strides = struct.unpack_from(f"<{rank - 1}q", packed, 16 + 8 * rank)
        size = dtype_row(manifest["dtype"]).bytes
        shape, steps = extents[::-1], (*(s // size for s in strides[::-1]), 1)
        if manifest["layout"] == "paged":
            tensor = at(address, shape, steps, manifest["dtype"])
            assert tensor is not None
            return tensor if name == "q" else tensor.transpose(1, 2)
        assert tuple(values[f"descriptor_shape_{name}_{axis}"] for axis in range(rank)) == shape
        assert tuple(values[f"descriptor_stride_{name}_{axis}"] for axis in range(rank)) == steps
        tensor = at(address, shape, steps, manifest["dtype"])
        assert tensor is not None
        return tensor
    heads = values["heads"] if name == "q" else values["kv_heads"]
    dim = manifest["head_dim_v"] if name == "v" else manifest["head_dim_qk"]
    if manifest["layout"] == "paged" and name != "q":
        shape = (values["num_pages"], values["page_size"], heads, dim)
    elif manifest["layout"] == "paged":
        shape = (values["total_q"], heads, dim)
    elif varlen:
        shape = (values["total_q" if name == "q" else "total_k"], heads, dim)
    else:
        shape = (values["batch"], values["seqlen_q" if name == "q" else "seqlen_k"], heads, dim)
    axes = (_STRIDED if name == "q" else _STRIDED_KEYS)[manifest["layout"]]
    steps = (*(values[f"stride_{name}_{axis}"] for axis in axes), 1)
    tensor = at(values[f"{name}_ptr"], shape, steps, manifest["dtype"])
    assert tensor is not None
    return tensor


def call_of(manifest: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """Rebuild the call that a launch describes."""
    chosen = restore_variant(manifest["variant"])
    if "q_ptr" in values or "q_desc" in values:
        q, k, v = (_input(manifest, values, name) for name in ("q", "k", "v"))
    else:  # a classifier sees neither, only lengths
        layout = manifest["layout"]
        row = [(values["batch"], values["seqlen_q"]) if layout == "dense" else (values["total_q"],)]
        keys = {"dense": ("batch", "seqlen_k"), "varlen": ("total_k",), "paged": ("num_pages", "page_size")}[layout]
        row += [tuple(values[name] for name in keys)] * 2
        heads = [values["heads"], values["kv_heads"], values["kv_heads"]]
        q, k, v = (torch.zeros(*r, h, 16) for r, h in zip(row, heads, strict=True))
    arguments: dict[str, Any] = {scalar.name: values[scalar.name] for scalar in chosen.arguments}
    for scalar in chosen.arguments:
        if scalar.dtype == "bool":
            arguments[scalar.name] = bool(arguments[scalar.name])
    for tensor in chosen.tensors:
        axes = range(len(tensor.shape))
        shape = [values[f"extent_{tensor.name}_{axis}"] for axis in axes]
        strides = [values.get(f"stride_{tensor.name}_{axis}", 1) for axis in axes]
        arguments[tensor.name] = at(values[f"{tensor.name}_ptr"], shape, strides, tensor.dtype)
    batch = values["batch"]
    packing = None
    if manifest["layout"] == "varlen":
        packing = Packing(
            at(values["cu_seqlens_q_ptr"], [batch + 1], [1], "int32"),
            at(values["cu_seqlens_k_ptr"], [batch + 1], [1], "int32"),
            values["seqlen_q"],
            values["seqlen_k"],
        )
    used = at(values["seqused_k_ptr"], [batch], [1], "int32")
    if manifest["layout"] == "paged":
        return call_of_pages(chosen, values, (q, k, v), used, arguments)
    assert bool(values["has_seqused_k"]) == (used is not None)
    call = bind(
        chosen, q, k, v, packing, softmax_scale=values.get("softmax_scale"), seqused_k=used,
        return_lse=KEPT, layout="bshd", arguments=arguments,
    )  # fmt: skip
    return call, (q, k, v)


def call_of_pages(
    chosen: Variant, values: Mapping[str, Any], tensors: tuple[torch.Tensor, ...], used: torch.Tensor | None,
    arguments: Mapping[str, Any],
) -> tuple[Call, tuple[torch.Tensor, ...]]:  # fmt: skip
    """Rebuild the call that a launch over pages describes. Entries of the table are read by the reference alone."""
    q, k, v = tensors
    batch, stride = values["batch"], values["stride_page_table_b"]
    starts = at(values["cu_seqlens_q_ptr"], [batch + 1], [1], "int32")
    assert bool(values["has_cu_seqlens_q"]) == (starts is not None)
    assert values["seqlen_k"] % values["page_size"] == 0
    table = at(values["page_table_ptr"], [batch, values["seqlen_k"] // values["page_size"]], [stride, 1], "int32")
    if starts is None:
        q = q.unflatten(0, (batch, values["seqlen_q"]))
    elif not values.get("has_lse"):  # rows of no sequence may be those of another launch
        first, last = int(starts[0]), int(starts[-1])
        q, starts = q[first:last], starts - first
    longest = q.shape[0] if values.get("most_queries", MAX_SEQLEN) < MAX_SEQLEN else values["seqlen_q"]
    paging = Paging(table, starts, longest)
    call = bind_paged(
        chosen, q, k, v, paging, softmax_scale=values.get("softmax_scale"), seqused_k=used,
        return_lse=KEPT, page_layout="NHD", arguments=arguments,
    )  # fmt: skip
    return call, (q, k, v)


def first_row(values: Mapping[str, Any]) -> int:
    """The row of q at which the first sequence of a launch over pages begins: others may be those of another launch."""
    starts = at(values["cu_seqlens_q_ptr"], [1], [1], "int32")
    return 0 if starts is None else int(starts)


def run_forward(manifest: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Compute what the launch asks for and write it where the launch says."""
    call, tensors = call_of(manifest, values)
    out, lse = reference(call, *tensors)
    strides = (*(values[f"stride_out_{axis}"] for axis in _STRIDED[manifest["layout"]]), 1)
    if out.dim() > len(strides):  # pages, and queries of equal lengths: kernels see packed rows
        out = out.flatten(0, 1)
    first = first_row(values) * strides[0] * out.element_size() if manifest["layout"] == "paged" else 0
    target = at(values["out_ptr"] + first, out.shape, strides, manifest["dtype"])
    assert target is not None
    starts = call.cu_seqlens_q
    if values.get("least_queries", 0) or values.get("most_queries", MAX_SEQLEN) < MAX_SEQLEN:
        least, most = values.get("least_queries", 0), values.get("most_queries", MAX_SEQLEN)
        assert starts is not None
        for begin, end in pairwise(starts.tolist()):
            if least <= end - begin <= most:
                target[begin:end].copy_(out[begin:end])
    else:
        target.copy_(out)
    if values["has_lse"]:
        place = at(values["lse_ptr"], lse.shape, lse.stride(), "fp32")
        assert place is not None
        place.copy_(lse)


def run_classifier(manifest: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Write the tile map that the launch asks for."""
    call, _ = call_of(manifest, values)
    axes = main_of(manifest)["tile_map"]
    by_batch, by_head = axes["batch"], axes["heads"]
    by_batch = by_batch or call.ragged or call.seqused_k is not None
    words = eager_tile_map(call, manifest["tile_m"], manifest["tile_n"], per_batch=by_batch, per_head=by_head)
    strides = [values[f"stride_tile_map_{axis}"] for axis in ("b", "h", "q")]
    place = at(values["tile_map_ptr"], words.shape, (*strides, words.shape[-1], 1), "int32")
    assert place is not None
    place.copy_(words)
