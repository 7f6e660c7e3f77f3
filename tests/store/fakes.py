"""Stand-ins for a compiler: they take milliseconds, keep a log of what they compiled, and fail on demand.

Each worker process imports this module, which therefore imports little.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngen.compile.artifact import Artifact
from attngen.errors import ChoiceError, CompileError, Location, SpecError
from attngen.formats import MANIFEST_FORMAT
from attngen.store import files as store_files
from attngen.store import worker

if TYPE_CHECKING:
    import pytest

#: Names the file that gets one line for each compile.
LOG = "ATTNGEN_TEST_LOG"


#: A compiler that takes no time.
QUICK = "tests.store.fakes:compile_quickly"


def compile_by(patch: pytest.MonkeyPatch, compiler: str = QUICK) -> None:
    """Have builds call a stand-in; their workers load no compiler then, which takes longer than all else they do."""
    from attngen.build import compiles, pipeline
    from attngen.store import jobs
    from tests import forked

    patch.setattr(jobs, "subprocess", forked.starting(forked.WITHOUT_TORCH))
    patch.setattr(pipeline, "COMPILER", compiler)
    for module in (pipeline, compiles):
        patch.setattr(module, "LOAD", None)


def key_of(name: str) -> str:
    """A key such as the real ones: 64 hexadecimal digits."""
    return sha256(name.encode()).hexdigest()


def artifact(name: str, size: int = 20_000, *, classifier: bool = False) -> Artifact:
    """An artifact whose bytes depend on its name alone."""
    cubin = (sha256(name.encode()).digest() * (size // 32 + 1))[:size]
    resources = {"registers": 90, "spills": 0, "shared_memory": 1024, "cubin_bytes": size, "compile_seconds": 0.5}
    manifest: dict[str, Any] = {
        "format": MANIFEST_FORMAT,
        "main": "forward",
        "launches": [{"name": "classify"}, {"name": "forward"}],
        "name": name,
        "package": "fake",
        "variant": {"name": "causal"},
        "arch": "sm90a",
        "backend": "triton",
        "resources": resources,
        "toolchain": {"triton": "0.0"},
        "cuda_major": 13,
        "min_driver": 13000,
        "sha256": sha256(cubin).hexdigest(),
    }
    texts = {"source.py": f"# {name}\n", "ptx": ".version 8.7\n", "ttgir": "module {}\n"}
    return Artifact(cubin, manifest, texts, {"classify": cubin[::-1]} if classifier else {})


def builder(name: str, log: Path, seconds: float = 0.0) -> Callable[[], Artifact]:
    """A build function that writes one line to ``log`` each time that it is called."""

    def build() -> Artifact:
        _append(log, name)
        time.sleep(seconds)
        return artifact(name)

    return build


def compile_quickly(plan: Any, source: Any) -> Artifact:
    """In place of ``compile_source``."""
    if LOG in os.environ:
        _append(Path(os.environ[LOG]), plan.name)
    if "reject" in plan.name:
        raise CompileError(f"{plan.name}: rejected")
    if "abort" in plan.name:
        os.abort()
    made = artifact(plan.name)
    return replace(made, manifest={**made.manifest, **plan.to_dict()})


def compile_narrow(plan: Any, source: Any) -> Artifact:
    """In place of ``compile_source``: wide tiles spill, and "hopeless" kernels do whatever their tile."""
    made = compile_quickly(plan, source)
    spills = 0 if plan.tile_n <= 32 and "hopeless" not in plan.name else 10 * plan.tile_n
    if spills and "spill" not in plan.allow:
        raise ChoiceError(f"{plan.name}: {spills} B of spills", slow=(False, spills))
    return made


def compile_no_cuda(plan: Any, source: Any) -> Artifact:
    """In place of ``compile_source``: whatever is in CUDA spills."""
    if plan.backend == "cuda":
        raise ChoiceError(f"{plan.name}: 660 B of spills", slow=(False, 660))
    return compile_quickly(plan, source)


def compile_misspelt(plan: Any, source: Any) -> Artifact:
    """In place of ``compile_source``: NVRTC does not know a name in the first line."""
    compile_quickly(plan, source)
    raise ChoiceError(f'{plan.name}: NVRTC refused it\n{plan.name}.cu(1): error: identifier "a" is undefined')


def compile_without_room(plan: Any, source: Any) -> Artifact:
    """In place of ``compile_source``: there is no room for temporary files, and the compiler wraps what it met."""
    compile_quickly(plan, source)
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise ChoiceError(f"{plan.name}: Triton's compiler failed with OSError") from error


def compile_and_fill(plan: Any, source: Any) -> Artifact:
    """In place of ``compile_source``: the second kernel fills the disk, so that none is kept from then on."""
    made = compile_quickly(plan, source)
    if len(Path(os.environ[LOG]).read_text().split()) > 1:
        store_files.write_synced = _no_room
    return made


def _no_room(path: Path, data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def compile_slowly(plan: Any, source: Any) -> Artifact:
    """In place of ``compile_source``, for long enough that builds meet each other."""
    time.sleep(0.05)
    return compile_quickly(plan, source)


def compile_two(plan: Any, source: Any) -> Artifact:
    """In place of ``compile_source``: it compiles two kernels, and is at the others until the log says "killed"."""
    made = compile_quickly(plan, source)
    log = Path(os.environ[LOG])
    if len(log.read_text().splitlines()) > 2:
        while "killed" not in log.read_text():
            time.sleep(0.01)
        os._exit(0)
    return made


def _append(log: Path, line: str) -> None:
    with open(log, "a") as file:  # short appends are atomic
        file.write(line + "\n")


# Jobs for attngen.store.jobs: the last argument tells whether all others are done.


def add(a: int, b: int, last: bool) -> int:
    """An ordinary job."""
    return a + b


def chatty(last: bool) -> str:
    """A job that writes where its answers go."""
    os.write(1, b"noise on standard output")
    print("more noise", flush=True)
    return "x" * 300_000


def crash(last: bool) -> None:
    """A job that takes its process along."""
    os.write(2, b"LLVM ERROR: out of ideas\n")
    os.abort()


def leave(last: bool) -> None:
    """A job that ends its process in good order."""
    os._exit(3)


def hang(last: bool) -> None:
    """A job that never ends."""
    time.sleep(3600)


def refuse(last: bool) -> None:
    """A job that fails for the user to see."""
    raise SpecError("no", location=Location("a.yaml", 3), field="mask")


def fill(wrapped: str, last: bool) -> None:
    """A job that finds the disk full: by an error of its own, of the system, or in what a compiler prints."""
    if wrapped == "printed":
        raise CompileError("ptxas: cannot write a.cubin: No space left on device")
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/file")
    except OSError as error:
        if wrapped == "plain":
            raise
        raise ChoiceError("refused") from error


def blunder(last: bool) -> None:
    """A job with a mistake in it."""
    raise ZeroDivisionError("oops")


def not_yet(name: str, last: bool) -> str | None:
    """A job that wants to be the last."""
    return name if last else None


def process(last: bool) -> int:
    """Id of the process that runs the job."""
    return os.getpid()


class Meeting:
    """An argument that is unpickled only when another process unpickles one too, and is long."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[Path, str], int], tuple[Path, str]]:
        return meet, (self.folder, "x" * 300_000)


def meet(folder: Path, text: str) -> int:
    """Number of processes that have come, two at best."""
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(os.listdir(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(os.listdir(folder))


def met(count: int, last: bool) -> int:
    """Number of processes that unpickled their argument at once."""
    return count


def load() -> None:
    """Remember which process has loaded."""
    global _loader
    _loader = os.getpid()


_loader: int | None = None


def loaded(last: bool) -> int | None:
    """Id of the process that has loaded, for this one too."""
    return _loader


#: Threads of the process that forks, and the large modules that it has imported, once it has loaded what jobs need.
_loaded_compilers: tuple[int, list[str]] = (0, [])


def load_of_build() -> None:
    """Load the compilers of a build, and count threads: a fork ends those of OpenBLAS."""
    from attngen.build import compiles

    worker._named(compiles.LOAD)()
    _count()


def load_of_jit() -> None:
    """The same for ``attngen.jit``."""
    from attngen.build import first_call

    worker._named(first_call.LOAD)()
    _count()


def _count() -> None:
    global _loaded_compilers
    names = ("cupy", "numpy", "triton", "torch")
    _loaded_compilers = len(os.listdir("/proc/self/task")), [name for name in names if name in sys.modules]


def loaded_compilers(_last: bool) -> tuple[int, list[str]]:
    """Threads and modules of the process that forked this one, before it did."""
    return _loaded_compilers


def parent(last: bool) -> int:
    """Id of the process that forked the one that runs the job."""
    return os.getppid()


def environment(name: str, last: bool) -> str:
    """Environment of a job."""
    return os.environ.get(name, "absent")


def last_of_its_process(last: bool) -> int:
    """Return the process, which takes no other job."""
    worker.retire()
    return os.getpid()
