"""The kernels of operations, compiled for the host, and a driver that runs them on CPU tensors."""

from __future__ import annotations

import ctypes
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.build.pipeline import Prepared
from attngen.dtypes import dtype as dtype_row
from attngen.plan import Plan, plan
from attngen.runtime.arguments import torch_state
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.device.interface import Launch
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import appends, block_maskers, expand, load_spec_text, mergers, quantizers, selectors, wideners
from tests.host_compiler import COMPILER, HOST, compile_host, shared
from tests.render.headers import headers

SPEC = """
schema: 1
package: appending
arch: [sm90a]
kernels:
  - {variant: causal, dtype: [bf16, fp16], head_dim: [64, {qk: 192, v: 128}], layout: paged, backend: cuda}
"""

#: Entry that asks for 8 bits, and so brings the kernels that quantize.
SPEC_OF_8_BITS = """
schema: 1
package: eight
arch: [sm90a]
kernels:
  - {variant: causal, dtype: fp8_e4m3, head_dim: [64, 128], backend: cuda}
"""

#: Entry that asks for caches in 8 bits and ordinary kernels, and so brings those that widen.
SPEC_OF_CACHES = """
schema: 1
package: caches
arch: [sm90a]
kernels:
  - {variant: causal, dtype: [bf16, fp16], head_dim: [64, {qk: 192, v: 128}], layout: paged, backend: cuda}
  - variant: causal
    dtype: [bf16, fp16]
    kv_dtype: fp8_e4m3
    head_dim: [64, {qk: 192, v: 128}]
    layout: paged
    backend: cuda
    split_kv: true
"""

#: Entry that asks for index scores, and so brings the kernel that selects.
SPEC_OF_INDEX = """
schema: 1
package: index
arch: [sm90a]
kernels:
  - {variant: causal, dtype: bf16, head_dim: [64, 128], layout: [dense, paged], passes: index_scores}
  - {variant: [sliding_window, chunked], dtype: fp16, head_dim: 128, passes: index_scores}
"""

#: Entry that asks for scores of blocks, and so brings the kernel that selects from short rows, too.
SPEC_OF_BLOCK_SCORES = """
schema: 1
package: block_scores
arch: [sm90a]
kernels:
  - {variant: causal, dtype: bf16, head_dim: [64, 128], layout: [dense, paged], passes: block_scores}
  - {variant: sliding_window, dtype: fp16, head_dim: 128, passes: block_scores}
"""

#: Entry whose variant takes a block mask, and so brings the kernel that makes one.
SPEC_OF_BLOCKS = """
schema: 1
package: blocks
arch: [sm90a]
variants:
  blockwise: {blocks: 64}
kernels:
  - {variant: blockwise, dtype: bf16, head_dim: 128}
"""

#: Dtypes of the kernels that append, and of their caches where these have fewer bits.
APPENDED = ("bf16", "fp16", "fp32", "bf16_kv_fp8_e4m3", "fp16_kv_fp8_e4m3")

#: Dtypes of the kernels that merge.
MERGED = ("bf16", "fp16")


@cache
def prepared(*dtypes: str, arch: str = "sm90a") -> list[Prepared]:
    """Return the kernels of these dtypes, also of those that no kernel over pages has."""
    first = appends(expand(load_spec_text(SPEC)))[0]
    prepared = []
    for dtype in dtypes:
        of_rows, _, of_cache = dtype.partition("_kv_")
        spec = replace(first, dtype=of_rows, kv_dtype=of_cache or None, arch=arch)
        planned = plan(spec)
        prepared.append(Prepared(spec, planned))
    return prepared


def plans(*dtypes: str) -> list[Plan]:
    """Return their plans."""
    return [one.plan for one in prepared(*dtypes)]


@cache
def prepared_quantizers(*arches: str, tiles: bool = False) -> list[Prepared]:
    """Return the kernels that quantize, for these arches: those of any head dim, or those of ``tiles``."""
    prepared = []
    for arch in arches or ("sm90a",):
        first = expand(load_spec_text(SPEC_OF_8_BITS))
        for spec in quantizers([replace(one, arch=arch) for one in first]):
            if (spec.loads == "descriptor") == tiles:
                planned = plan(spec)
                prepared.append(Prepared(spec, planned))
    return prepared


@cache
def prepared_wideners() -> list[Prepared]:
    """Return the kernels that widen caches."""
    prepared = []
    for spec in wideners(expand(load_spec_text(SPEC_OF_CACHES))):
        planned = plan(spec)
        prepared.append(Prepared(spec, planned))
    return prepared


@cache
def prepared_for_indices(text: str = SPEC_OF_INDEX) -> list[Prepared]:
    """Return the kernels that score keys, or blocks of them, for an index, and those that select."""
    prepared = []
    scoring = expand(load_spec_text(text))
    for spec in (*scoring, *selectors(scoring)):
        planned = plan(spec)
        prepared.append(Prepared(spec, planned))
    return prepared


@cache
def prepared_block_maskers(arch: str = "sm90a") -> list[Prepared]:
    """Return the kernel that makes block masks."""
    prepared = []
    for spec in block_maskers(expand(load_spec_text(SPEC_OF_BLOCKS))):
        planned = plan(replace(spec, arch=arch))
        prepared.append(Prepared(spec, planned))
    return prepared


@cache
def prepared_mergers(*dtypes: str, arch: str = "sm90a") -> list[Prepared]:
    """Return the kernels of these dtypes that merge, all that there are by default."""
    first = mergers(expand(load_spec_text(SPEC)))[0]
    prepared = []
    for dtype in dtypes or MERGED:
        spec = replace(first, dtype=dtype, arch=arch)
        planned = plan(spec)
        prepared.append(Prepared(spec, planned))
    return prepared


@cache
def library(name: str) -> ctypes.CDLL:
    """Return the launch of a symbol for this machine."""
    every = [
        *prepared(*APPENDED), *prepared_quantizers(), *prepared_quantizers(tiles=True), *prepared_wideners(),
        *prepared_for_indices(), *prepared_for_indices(SPEC_OF_BLOCK_SCORES), *prepared_block_maskers(),
        *prepared_mergers(),
    ]  # fmt: skip
    source = next(one.source for one in every if name in [launch.symbol for launch in one.plan.launches])
    symbol = name
    folder = Path(mkdtemp(prefix="attngen-host-"))
    (folder / "kernel.inc").write_text(source.text.replace("extern __shared__ char shared_memory[];", ""))
    for name in (
        "append.cuh", "rotary.cuh", "rounded.cuh", "row_scales.cuh", "divisor.cuh", "hadamard.cuh", "scales.cuh",
        "pieces.cuh", "ring.cuh", "topk.cuh", "slots.cuh", "index.cuh", "maxima.cuh", "packed_tiles.cuh",
        "division.cuh", "expression.cuh", "search_by_warp.cuh",
    ):  # fmt: skip
        (folder / name).write_text(headers()[name])
        assert "asm" not in headers()[name].split("#ifdef __CUDA_ARCH__")[0]
    defined = {"KERNEL": symbol}
    if source.name.startswith(("quantize", "index", "block_scores")) or source.name.endswith("_short"):
        defined["ANY_THREADS"] = "1"
    if source.name.startswith(("index", "block_scores")):
        defined["MOST_THREADS"] = "384"
    if source.name.endswith("_short"):
        defined["MOST_THREADS"] = "256"
    made = shared(f"{symbol}.so", lambda made: compile_host(HOST / "blocks.cpp", made, folder, define=defined))
    shutil.rmtree(folder)
    return ctypes.CDLL(str(made))


@dataclass
class HostDriver:
    """Runs kernels at once, on the addresses that they are given. ``launches``: name and blocks of each."""

    launches: list[tuple[str, int]] = field(default_factory=list)

    def version(self) -> int:
        return 13000

    def capability(self, device: int) -> int:
        return 90

    def shared_memory(self, device: int) -> int:
        return 232448

    def name(self, device: int) -> str:
        return "a card"

    def bandwidth(self, device: int) -> float:
        return 100.0

    def multiprocessors(self, device: int) -> int:
        return 1  # so that blocks of few units have several

    def encode_tensor_map(
        self, dtype: str, address: int, extents: Sequence[int], strides: Sequence[int], box: Sequence[int],
        swizzle: int, device: int,
    ) -> bytes:  # fmt: skip
        """Return a TensorMap of tests/host/tma.cuh."""
        size, rest = dtype_row(dtype).bytes, 5 - len(extents)
        steps = (1, *(stride // size for stride in strides), *[0] * rest)
        return struct.pack(
            "P4i10q5i4x", address, size, len(extents), swizzle, 0, *extents, *[0] * rest, *steps, *box, *[0] * rest
        )

    def load(self, image: bytes, symbol: str, device: int, shared: int, sizes: Sequence[int], cluster: int = 1) -> Any:
        return symbol

    def extent_at(self, rank: int, axis: int, device: int) -> int | None:
        return None

    def ready(self, device: int) -> bool:
        return True

    def bound(self, kernels: Sequence[Any], device: int, stream: int) -> Callable[[], None]:
        return lambda: self.launch(kernels, device)

    def launch(self, kernels: Sequence[Launch], device: int) -> None:
        for symbol, grid, threads, *_, parameters in kernels:
            self.launches.append((symbol, grid))
            library(symbol).run_blocks(grid, threads, ctypes.c_void_p(parameters))


def kernels() -> list[Kernel]:
    """Return the kernels of all dtypes that append as the runtime sees them."""
    return as_kernels(plans(*APPENDED))


def quantizing_kernels(*, tiles: bool = False) -> list[Kernel]:
    """Return those that quantize."""
    return as_kernels([one.plan for one in prepared_quantizers(tiles=tiles)])


def widening_kernels() -> list[Kernel]:
    """Return those that widen caches."""
    return as_kernels([one.plan for one in prepared_wideners()])


def kernels_for_indices(text: str = SPEC_OF_INDEX) -> list[Kernel]:
    """Return those that score keys, or blocks of them, for an index, and those that select."""
    return as_kernels([one.plan for one in prepared_for_indices(text)])


def block_masking_kernels() -> list[Kernel]:
    """Return the one that makes block masks."""
    return as_kernels([one.plan for one in prepared_block_maskers()])


def merging_kernels() -> list[Kernel]:
    """Return those that merge."""
    return as_kernels([one.plan for one in prepared_mergers()])


def as_kernels(planned: Sequence[Plan]) -> list[Kernel]:
    """Return kernels of plans."""
    none = {"registers": 0, "spills": 0, "shared_memory": 0, "cubin_bytes": 0, "compile_seconds": 0.0}
    return [Kernel({**one.to_dict(), "resources": none}, bytes, origin=one.name) for one in planned]


@contextmanager
def on_host(
    monkeypatch: pytest.MonkeyPatch, kernels: Sequence[Kernel], prepared: RecentCache[Any], *, unchecked: Any = None
) -> Iterator[HostDriver]:
    """A device whose memory is the host's, with these kernels; skips without a compiler.

    ``prepared``: the calls that their helper keeps. ``unchecked``: the module whose ``check_contents`` looks at what
    tensors hold, which nobody does on a GPU.
    """
    if COMPILER is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, Tensor))
    if unchecked is not None:
        monkeypatch.setattr(unchecked, "check_contents", lambda call, more: None)
    registry.clear()
    registry.add(package_of_kernels(kernels, "here"))
    prepared.clear()
    torch.manual_seed(3)
    driver = HostDriver()
    with drivers.use(driver):
        yield driver
    prepared.clear()
    registry.clear()
