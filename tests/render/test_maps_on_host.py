"""Kernels that make tile maps, on the CPU: threads are fibers. Every tile and every visible pair is compared with the
mask; for forward and backward kernels, ragged lengths, and values at the ends of their types."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from attngen.build.pipeline import Prepared, prepare_unrendered
from attngen.plan import Plan
from attngen.resources import root
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.given import Given
from attngen.runtime.device.interface import Launch
from attngen.runtime.geometry.map_shape import MapShape
from attngen.runtime.launch.prepared import PreparedCall
from attngen.runtime.launch.prepared_backward import PreparedBackward
from attngen.runtime.registry.binding import bind_call
from attngen.schema import load_spec
from tests.host_compiler import COMPILER, HOST, compile_host
from tests.map_oracle import VARIANTS, check_map, tiles_of, values
from tests.render.headers import headers
from tests.runtime.host_kernels import HostDriver, as_kernels
from tests.sampling import exhaustive, sampled

SPEC = root() / "tests" / "gpu" / "maps.yaml"
#: Batch, heads, queries and keys.
SHAPES = ((1, 1, 70, 4200), (2, 2, 330, 330), (2, 1, 1, 259))

#: Kernels of other tests, of which a symbol may be asked for, too.
OTHERS: list[Prepared] = []

#: Stand-ins for the parts of CUDA that the host lacks.
LACKING = """
inline int __float2int_rz(float x) {
  return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x <= -2147483648.0f ? -2147483647 - 1 : int(x);
}
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@cache
def prepared() -> dict[tuple[str, int, str, str], Prepared]:
    made = {}
    for one in prepare_unrendered(load_spec(SPEC)):
        plan = one.plan
        made[plan.variant.name, plan.head_dim_qk, plan.layout, plan.direction] = one
    return made


@cache
def library(symbol: str) -> ctypes.CDLL:
    """Return the kernel of a symbol for this machine, by itself."""
    (one,) = (
        one for one in (*prepared().values(), *OTHERS) if symbol in [launch.symbol for launch in one.plan.launches]
    )
    (launch,) = (launch for launch in one.plan.launches if launch.symbol == symbol)
    text = one.source.text
    constants = "".join(
        f"constexpr int kBlock{axis} = {size};\n" for axis, size in (("M", launch.tile_m), ("N", launch.tile_n))
    )
    constants += "".join(f"{line}\n" for line in re.findall(r"constexpr int k(?:MapRows|BlockKeys) = .*", text))
    start = text.rindex("// Makes the tile map", 0, text.index(f" {symbol}("))
    kernel = text[start : text.index("\n}\n", start) + 3]
    folder = Path(mkdtemp(prefix="attngen-host-"))
    helpers = "".join(
        f'#include "{name}"\n' for name in re.findall(r'#include "((?:divisor|division|expression|search)\.cuh)"', text)
    )
    (folder / "kernel.inc").write_text(
        f'#include "types.cuh"\n#include "pdl.cuh"\n{LACKING}#include "tile_map.cuh"\n{helpers}{constants}'
        f"constexpr int kThreads = {32 * launch.num_warps};\n{kernel}"
    )
    for name in ("tile_map.cuh", "divisor.cuh", "division.cuh", "expression.cuh", "search.cuh"):
        (folder / name).write_text(headers()[name])
    made = folder / "kernel.so"
    compile_host(HOST / "blocks.cpp", made, folder, define={"KERNEL": symbol})
    loaded = ctypes.CDLL(str(made))
    shutil.rmtree(folder)
    return loaded


class Driver(HostDriver):
    """Runs the kernels that make maps, on few blocks where they go through a list."""

    def stream(self, device: int) -> int:
        return 0

    def launch(self, kernels: Sequence[Launch], device: int) -> None:
        for symbol, grid, threads, *_, parameters in kernels:
            library(symbol).run_blocks(grid, threads, ctypes.c_void_p(parameters))


def made(plan: Plan, given: Given, call: Call) -> list[tuple[str, MapShape, list[torch.Tensor]]]:
    """Return each map of a call, on its first use and on its second: by the launch that reads it, with its shape."""
    (kernel,) = as_kernels([plan])
    tensors = [tensor.name for tensor in plan.variant.tensors]
    if plan.direction == "forward":
        ready: Any = PreparedCall(call, kernel, tensors, Driver(), 0)
    else:
        ready = PreparedBackward(kernel, call, tensors, call.out_view(), None, Driver(), 0, dlse=False)
    launches, maker = ready._launch, ready._maps
    held = {f"tensor:{name}": given.arguments[name].data_ptr() for name in tensors}
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        if getattr(given, name) is not None:
            held[name] = getattr(given, name).data_ptr()
    numbers = [call.scalars[rule.name] for rule in call.rules]
    maps = []
    for _ in range(2):
        addresses = [held.get(name, 0) for name in launches.names[: launches.first_map]]
        maps.append(maker.append(given, addresses, 1.0, numbers))
    uses = zip(*maps, strict=True)
    return [(owner, shape, list(words)) for (owner, shape), words in zip(launches.maps.items(), uses, strict=True)]


def check(name: str, head_dim: int, layout: str, given: Given) -> None:
    call, _ = bind_call(given)
    for direction in ("forward", "backward"):
        plan = prepared()[name, head_dim, layout, direction].plan
        for owner, shape, maps in made(plan, given, call):
            assert len(maps[1]) >= len(maps[0])
            for words in maps:
                check_map(words, shape, tiles_of(plan.launch(owner)), call, by_keys=shape.by_keys)


@pytest.mark.exhaustive
@sampled(every=2, name=VARIANTS, shape={str(shape): shape for shape in SHAPES})
def test_every_tile_and_every_pair(name: str, shape: tuple[int, int, int, int]) -> None:
    batch, heads, queries, keys = shape
    arguments = values(name, batch, heads, queries, keys, seed=SHAPES.index(shape))
    # with maps of tiles, and of consumers
    of_consumers = exhaustive() and name in ("blocks", "causal_blocks")
    for head_dim in (64, 128) if of_consumers else (64,):
        variant = prepared()[name, head_dim, "dense", "forward"].plan.variant
        q, k = (torch.zeros(batch, n, heads, head_dim, dtype=torch.bfloat16) for n in (queries, keys))
        check(name, head_dim, "dense", Given(q, k, k, variant=variant, arguments=arguments))


@pytest.mark.exhaustive
def test_packed_sequences() -> None:
    sizes = (130, 1, 0, 200)
    bounds = torch.tensor([0, *sizes]).cumsum(0).int()
    q = torch.zeros(sum(sizes), 1, 64, dtype=torch.bfloat16)
    variant = prepared()["ids", 64, "varlen", "forward"].plan.variant
    packing = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 200, "max_seqlen_k": 200}
    arguments = values("ids", len(sizes), 1, 200, 200, seed=4)
    check("ids", 64, "varlen", Given(q, q, q, variant=variant, arguments=arguments, form="varlen", **packing))
