"""Rendered kernels on the CPU, with every access to shared memory checked against the barriers.

A rendered source is compiled by the host's compiler beside stand-ins for what the hardware does (``tests/host``), and
launched by the runtime on tensors of the CPU. ``races.h`` keeps a vector clock of each warp, and of the copies,
products and stores that are under way: an access to shared memory that no barrier orders after an earlier one to the
same place is a race, in whatever order the fibers of this run took turns. So is an access to results and workspaces in
global memory, which an acquire of what was released orders, too. A wait sees only the parity of a phase, so that a
phase that may pass before a wait has seen the one before is an error, too, as is a run that does not end.

Nothing here knows the order of operations of any kernel. A barrier operation without a stand-in does not compile.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from attngen.plan import Plan
from attngen.render import render
from attngen.runtime.arguments import torch_state
from attngen.runtime.device import counters
from attngen.runtime.device import driver as drivers
from attngen.runtime.device.interface import Launch
from attngen.runtime.launch import launches, prepared_backward
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.host_compiler import COMPILER, HOST, compile_host
from tests.render.headers import headers
from tests.render.test_decode_on_host import PTX as COMMON_PTX
from tests.runtime.host_kernels import HostDriver, as_kernels
from tests.sampling import exhaustive

#: Options by which each access to memory is a call of races.cpp.
CHECKED = ("-fno-threadsafe-statics", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0")

#: Bytes on both sides of all memory that launches write, of which they may touch none; a slot of partial results has
#: fewer.
GUARD = 1 << 20

_WORD = "word = *reinterpret_cast<uint{}_t*>(place_of_address(from));"
PTX = {
    **COMMON_PTX,
    **{rf'asm volatile\("ld\.shared\.u{bits} .*?\);': _WORD.format(bits) for bits in (8, 16, 32)},
    r'asm volatile\(\s*"\{\\n\.reg \.pred own, any;.*?\);': (
        "any = named_or(static_cast<int>(first) + which, threads, own);"
    ),
    r'asm volatile\("" : "\+r"\(writes_pairs\), "\+r"\(hashes\)\);': "",
    r'asm volatile\("cp\.async\.wait_all;" .*?\);': "commit_copies(), wait_copies<0>();",
    r'asm volatile\("red\.global\.add\.f32 \[%0\], %1;" ::"l"\(to \+ i\).*?\);': "races::add(to + i, x[i]);",
    r'asm volatile\("red\.relaxed\.gpu\.global\.add\.f32 .*?\);': "races::add(to, x);",
    r'asm volatile\("red\.relaxed\.gpu\.global\.add\.v4\.f32 .*?"f"\(x0\).*?\);': (
        "races::add(to, x0), races::add(to + 1, x1), races::add(to + 2, x2), races::add(to + 3, x3);"
    ),
    r'asm volatile\("ld\.shared\.v2\.u32 .*?\);': (
        "const uint2 both = *reinterpret_cast<uint2*>(place_of_address(from)); first = both.x, second = both.y;"
    ),
    # Hides a value from the compiler alone.
    r'asm(?: volatile)?\("" : "[^"]*"\([^()]*\)(?:, "[^"]*"\([^()]*\))*\);': "",
    r'asm volatile\(\s*"atom\.acquire\.gpu\.global\.cas\.b32 .*?\);': ("now = take_state(state, kUntouched, kTaken);"),
}

_CALL = r"\((?:[^()]|\([^()]*\))*\);"
#: Statements that are a barrier operation: of a ring, an event or a named barrier, a wait of what was issued, or what
#: blocks tell each other.
OPERATION = re.compile(
    r"(?:\w+(?:\([^()]*\))?\.(?:acquire|arrive|arrive_expecting|wait|release|release_last|advance)|Event<\w+>::arrive"
    r"|\w+\.arrive|named_sync|named_arrive|wait_products<\d+>|wait_stores_read|wait_stores_written"
    r"|wait_copies<[^<>;]+>|__syncthreads|arrive_at|arrive_expecting|arrive_when_copied|arrive_once_loaded|sync_cluster"
    r"|leave_cluster|arrive_cluster|wait_cluster|wait_all_copies|await_turn|store_release|store_relaxed|add_release"
    r"|arrive_counted"
    r"|__threadfence)" + _CALL
)
WAITS = re.compile(r"wait|acquire|sync")
#: Helpers of a kernel whose body has one: their calls count as operations.
HELPER = re.compile(r"const auto (\w+) = \[&\](?:\([^()]*\))? (?:-> \w+ )?\{")
#: What stands before a name that is declared, or a value that is used.
DECLARES = re.compile(r"(?:[\w>&*.:=(]|return)\s*$(?<!else)(?<!else )")
INITIALIZED = re.compile(r"(init_barriers\((?:here \+ )?k\w+, \d+, )(\d+)")


@dataclass(frozen=True)
class Mutant:
    """A change of a source: an operation less, a wait behind the product that follows it, or an arrival more."""

    number: int
    line: int
    text: str
    kind: str  # removed | moved | count

    def __str__(self) -> str:
        return f"{self.text} ({self.kind}, line {self.line})"


def mutated(text: str) -> tuple[str, list[Mutant]]:
    """A source of which a number chooses one of these changes when it runs; 0 is none."""
    mutants: list[Mutant] = []
    lines = text.split("\n")
    helpers = _helpers(text)
    operation = re.compile(OPERATION.pattern + (rf"|\b(?:{'|'.join(helpers)}){_CALL}" if helpers else ""))

    def new(at: int, what: str, kind: str) -> int:
        mutants.append(Mutant(len(mutants) + 1, at + 1, what, kind))
        return len(mutants)

    def count(match: re.Match[str], at: int) -> str:
        return f"{match[1]}{match[2]} + (mutation == {new(at, match[0], 'count')})"

    whole = re.compile(rf"\s*(?:{operation.pattern})\s*")
    product = re.compile(rf"\s*issue_\w+{_CALL}\s*")
    codes = [line.partition("//")[0] for line in lines]
    moved = [
        bool(whole.fullmatch(code) and WAITS.search(code) and product.fullmatch(after))
        for code, after in pairwise([*codes, ""])
    ]
    for at, line in enumerate(lines):
        code, comment, rest = line.partition("//")
        code = INITIALIZED.sub(lambda match, at=at: count(match, at), code)  # type: ignore[misc]
        changed, end = "", 0
        for match in operation.finditer(code):
            if DECLARES.search(code[: match.start()]):
                continue
            spared = f"mutation != {new(at, match[0], 'removed')}"
            if moved[at]:
                spared += f" && mutation != {new(at, match[0], 'moved')}"
            changed += code[end : match.start()] + f"{{ if ({spared}) {match[0]} }}"
            end = match.end()
        changed += code[end:]
        if at > 0 and moved[at - 1]:
            (number,) = (one.number for one in mutants if one.line == at and one.kind == "moved")
            changed += f" {{ if (mutation == {number}) {codes[at - 1].strip()} }}"
        lines[at] = changed + comment + rest
    return "\n".join(lines), mutants


def _helpers(text: str) -> list[str]:
    """Names of the lambdas of a kernel that do a barrier operation, and return nothing."""
    helpers: list[str] = []
    for match in HELPER.finditer(text):
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        body = text[match.end() : end]
        uses = [name for name in helpers if re.search(rf"\b{name}\(", body)]
        if (OPERATION.search(body) or uses) and "return " not in body and "load_" not in body:
            helpers.append(match[1])
    return helpers


@dataclass
class Library:
    """A compiled kernel."""

    plan: Plan
    mutants: list[Mutant]
    clusters: set[str]  # symbols of launches whose source fixes how many blocks form one
    functions: ctypes.CDLL


@cache
def runtime_object() -> Path:
    """The checker, compiled once; faster where it checks a single kernel."""
    made = Path(mkdtemp(prefix="attngen-races-")) / "races.o"
    level = "-O2" if exhaustive() else "-O1"
    compile_host(HOST / "races.cpp", made, HOST, level, define={"GUARD": GUARD}, ahead=False)
    return made


def on_host(name: str, text: str) -> str:
    """A header for the host's compiler; it may have nothing that asks the hardware, but for what has a stand-in."""
    text = text.replace("#ifdef __CUDA_ARCH__", "#if 1")
    for pattern, instead in PTX.items():
        text = re.sub(pattern, instead, text, flags=re.DOTALL)
    for number, line in enumerate(text.split("\n"), 1):
        if re.search(r"\basm\b", line):
            raise RefusedError(f"{name}:{number}: {line.strip()}")
    return text


def compiled(plan: Plan, change: Callable[[str], str] = lambda text: text, harmless: Sequence[str] = ()) -> Library:
    """Compile the rendered source of a plan, and its headers, after a ``change``; RefusedError names the line that is
    unknown.

    ``harmless``: patterns of races with products whose results are not used, the last of a warpgroup.
    """
    for one in _KEPT:  # counters are 0 between launches, but for those of a kernel that was wrong
        ctypes.memset(ctypes.addressof(one) + GUARD, 0, ctypes.sizeof(one) - 2 * GUARD)
    source = render(plan)
    text, mutants = mutated(on_host("kernel.inc", change(source.text)))
    included = re.findall(r'#include "(\w+\.cuh)"', text)
    folder = Path(mkdtemp(prefix="attngen-barriers-"))
    text = re.sub(r"extern __shared__ .*?char shared_memory\[\];", "", text)
    named = "".join(f"using namespace {name};\n" for name in re.findall(r"^namespace (\w+) \{$", text, re.MULTILINE))
    (folder / "kernel.inc").write_text(text + named)
    waiting, seen = list(included), set()
    while waiting:
        name = waiting.pop()
        if name not in seen and not (HOST / name).exists():
            (folder / name).write_text(on_host(name, change(headers()[name])))
            waiting += re.findall(r'#include "(\w+\.cuh)"', headers()[name])
        seen.add(name)
    kernels = " ".join(f"KERNEL({launch.symbol})" for launch in plan.launches)
    done = compile_host(
        HOST / "checked.cpp",
        folder / "kernel.o",
        folder,
        *CHECKED,
        define={"RACES": 1, "KERNELS": kernels},
        check=False,
        ahead=exhaustive(),
    )
    if done.returncode != 0:
        raise RefusedError(done.stderr)
    made = folder / "kernel.so"
    subprocess.run(
        [str(COMPILER), "-shared", str(runtime_object()), str(folder / "kernel.o"), "-o", str(made)], check=True
    )
    functions = ctypes.CDLL(str(made))
    functions.run.restype = functions.run_without.restype = ctypes.c_char_p
    shutil.rmtree(folder)
    assert plan.structure is not None
    regions = "".join(f"{region.name} {region.offset}\n" for region in plan.structure.shared)
    functions.describe(
        regions.encode(),
        "".join(f"{pattern}\n" for pattern in harmless).encode(),
        getattr(plan.structure, "ordered", False),
    )
    clusters = {match[1] for match in re.finditer(r"__cluster_dims__[^{]*?(\w+)\(\n", source.text)}
    return Library(plan, mutants, clusters, functions)


class RefusedError(Exception):
    """A source has something without a stand-in: what the compiler says, with the line."""


class BarrierError(Exception):
    """A launch has a race, waits forever, or may miss a phase."""


class Made(TorchFunctionMode):
    """Tensors that are made to be written, each between guards; they live as long as the device, so that nothing else
    takes their place."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.places: set[tuple[int, int]] = set()  # first address and bytes of each
        self.parts: dict[int, list[tuple[int, int]]] = {}  # of blocks of workspaces: offsets and bytes, by bytes of all

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.__name__ not in ("empty", "new_empty", "empty_like", "empty_strided", "zeros"):
            return result
        held = result.untyped_storage().nbytes() if result.device.type == "cpu" else 0
        if not held:
            return result
        item = result.element_size()
        whole = torch.empty((held + 2 * GUARD) // item, dtype=result.dtype, device="cpu")
        own = whole[GUARD // item :][: held // item]
        own.copy_(result.as_strided(own.shape, (1,), 0))
        self.kept.append(whole)
        self.places |= {(own.data_ptr() + at, size) for at, size in self.parts.get(held, [(0, held)])}
        return whole.as_strided(result.shape, result.stride(), GUARD // item + result.storage_offset())

    def laid_out(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """``laid_out`` of the runtime, with guards between workspaces."""
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // 4) * 4 + GUARD // 4
        self.parts[4 * end] = [(4 * offset, 4 * sizes[name]) for name, offset in offsets.items()]
        return offsets, end


#: Counters that drivers have allocated, which the runtime keeps for all of them.
_KEPT: list[Any] = []


@dataclass
class CheckedDriver(HostDriver):
    """Runs a library. ``tried``: the changes of a launch that multiplies, or of a call's only one, that are run before
    it, with their faults."""

    library: Library | None = None
    tried: Sequence[Mutant] = ()
    faults: dict[Mutant, str] = field(default_factory=dict)
    blocks: int = 2
    order: int = 0
    made: Made = field(default_factory=Made)

    @property
    def plan(self) -> Plan:
        """The plan of what it runs."""
        assert self.library is not None
        return self.library.plan

    def capability(self, device: int) -> int:
        return self.plan.arch.capability

    def multiprocessors(self, device: int) -> int:
        return self.blocks

    def clusters(self, function: Any, size: int, threads: int, shared: int, device: int) -> int:
        return self.blocks

    def stream(self, device: int) -> int:
        return 0

    def zeros(self, size: int, device: int) -> int:
        _KEPT.append((ctypes.c_char * (size + 2 * GUARD))())
        return ctypes.addressof(_KEPT[-1]) + GUARD

    def load(self, image: bytes, symbol: str, device: int, shared: int, sizes: Sequence[int], cluster: int = 1) -> Any:
        return symbol, cluster

    def launch(self, kernels: Sequence[Launch], device: int) -> None:
        assert self.library is not None
        planned = self.library.plan.launches
        kept = {(ctypes.addressof(one) + GUARD, ctypes.sizeof(one) - 2 * GUARD) for one in _KEPT}
        bounds = [bound for first, size in sorted(kept | self.made.places) for bound in (first, first + size)]
        self.library.functions.watch((ctypes.c_size_t * len(bounds))(*bounds), len(bounds) // 2)
        for (symbol, cluster), grid, threads, *_, parameters in kernels:
            (number,) = (i for i, launch in enumerate(planned) if launch.symbol == symbol)
            launch = planned[number]
            blocks = launch.cluster if symbol in self.library.clusters else cluster  # chosen by the call
            given = (number, grid, blocks, threads, self.order, ctypes.c_void_p(parameters))
            self.launches.append((symbol, grid))
            if launch.products or symbol == kernels[-1][0][0] == kernels[0][0][0]:
                for mutant in self.tried:
                    said = _apart(partial(self.library.functions.run_without, mutant.number, *given))
                    self.faults[mutant] = self.faults.get(mutant, "") or said
            said = self.library.functions.run(*given).decode()
            if said:
                raise BarrierError(f"{symbol}: {said}")
        for counted in map(memoryview, _KEPT):
            if counted[GUARD:-GUARD].tobytes().strip(b"\0"):
                raise BarrierError(f"{kernels[-1][0][0]}: counters are not 0 after it, as the next launch needs them")


def _apart(run: Callable[[], bytes]) -> str:
    """Result of a run in a process of its own: a broken source may write anywhere."""
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        ended = 1
        try:  # whatever is raised, the child must not go on as a second test process
            os.write(tells, run()[:4096])
            ended = 0
        finally:
            os._exit(ended)
    os.close(tells)
    with open(told, "rb") as said:
        text = said.read().decode()
    _, status = os.waitpid(child, 0)
    return "the process crashed" if status != 0 else text


@contextmanager
def device(library: Library, tried: Sequence[Mutant] = (), blocks: int = 2, order: int = 0) -> Iterator[CheckedDriver]:
    """A device whose memory is the host's, with one kernel. ``order``: of the turns of warps."""
    registry.clear()
    registry.add(package_of_kernels(as_kernels([library.plan]), "here"))
    driver = CheckedDriver(library=library, tried=tried, blocks=blocks, order=order)
    try:
        with pytest.MonkeyPatch.context() as patch, drivers.use(driver), driver.made:
            patch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
            # a stream keeps more than a launch asks for
            patch.setattr(counters, "of_splits", lambda count, *_: driver.zeros(4 * count, 0))
            patch.setattr(counters, "workspace", lambda *_: 0)
            for module in (launches, prepared_backward):
                patch.setattr(module, "laid_out", driver.made.laid_out)
            yield driver
    finally:
        registry.clear()
