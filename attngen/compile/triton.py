"""Triton source → cubin, offline: no GPU, no driver, no torch, nothing read from the environment."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import linecache
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attngen.arch import Arch
from attngen.compile.artifact import Artifact
from attngen.compile.assembler import assembler
from attngen.compile.environment import scrubbed
from attngen.compile.hazards import misjudged_clamps, overwritten_operands
from attngen.compile.inspect import Resources, parameter_places, resources_of_log
from attngen.compile.layouts import repeated_operands
from attngen.compile.options import triton_options
from attngen.compile.parameters import check_parameters, placed_parameters, triton_parameters
from attngen.compile.ptx import cuda_major, driver_of_ptx, image_of, without_register_limit
from attngen.compile.speed import require_fast
from attngen.compile.toolchain import missing, toolchain
from attngen.drivers import min_driver
from attngen.errors import ChoiceError, CompileError, ToolchainError

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

    from attngen.plan.model import Argument, Launch, Plan
    from attngen.render import Source

#: Errors of cubins that ptxas compiled wrongly.
WRONG_CODE = "ptxas compiled the loop wrongly; another tile, or a newer Triton, may help"
WRONG_CLAMPS = "ptxas compiled a comparison wrongly; a newer Triton may help"

#: The error of a kernel whose operands Triton laid out wrongly.
WRONG_LAYOUT = "Triton multiplies some elements twice; another tile, or a newer Triton, may help"

#: Kernels of a backward that take nearly all of its time.
_PRODUCTS = ("dkdv", "dk", "dv", "dq")


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """One compiled function: the cubin, the texts, and its parameters and resources. ``image`` is what is kept: the
    cubin, or the PTX for a portable arch."""

    cubin: bytes
    image: bytes
    ptx: str
    ttgir: str
    parameters: tuple[Argument, ...]
    registers_and_spills: Resources
    max_registers: int | None  # the limit that it was assembled with
    shared_memory: int
    num_warps: int  # of a block; warp specialization adds to the planned number

    def resources(self) -> dict[str, int]:
        """The resources as the manifest lists them."""
        return {
            "registers": self.registers_and_spills.registers,
            "spills": self.registers_and_spills.spills,
            "shared_memory": self.shared_memory,
            "cubin_bytes": len(self.image),
        }


def compile_triton(plan: Plan, source: Source) -> Artifact:
    """Compile the launches of a plan, each into a cubin of its own. Raises CompileError as ``compile_source``."""
    _import_triton()
    start = time.perf_counter()
    compiled: dict[str, CompiledFunction] = {}
    for launch in plan.launches:
        options = triton_options(launch.num_warps, launch.stages, launch.max_registers, fast_math=plan.fast_math)
        function = compile_function(
            source.text, launch.symbol, launch.arguments, plan.arch, options, max_spills=launch.max_spills
        )
        compiled[launch.name] = function
        _check_layouts(launch.symbol, function.ttgir)
        _check_hopper(plan, function, launch)
    main, manifest = compiled[plan.main], dict(plan.to_dict())
    manifest |= _toolchain_and_driver(plan, main)
    manifest["num_warps"], manifest["threads"] = main.num_warps, 32 * main.num_warps
    manifest["max_registers"] = main.max_registers
    manifest["sha256"] = sha256(main.image).hexdigest()
    manifest["launches"] = [_row(launch, compiled[launch.name]) for launch in plan.launches]
    # The maximum of each, since launches run one after the other, but the sum of their bytes.
    resources = [function.resources() for function in compiled.values()]
    manifest["resources"] = {
        **{name: max(row[name] for row in resources) for name in ("registers", "spills", "shared_memory")},
        "cubin_bytes": sum(row["cubin_bytes"] for row in resources),
        "compile_seconds": round(time.perf_counter() - start, 3),
    }
    return Artifact(
        cubin=main.image,
        manifest=manifest,
        others={name: function.image for name, function in compiled.items() if name != plan.main},
        texts={"source.py": source.text, **{name: _texts(plan, compiled, name) for name in ("ptx", "ttgir")}},
    )


def _row(launch: Launch, compiled: CompiledFunction) -> dict[str, Any]:
    """The row of a launch in the manifest."""
    return {
        **launch.to_dict(),
        "parameters": [argument.to_dict() for argument in compiled.parameters],
        "num_warps": compiled.num_warps,
        "threads": 32 * compiled.num_warps,
        "max_registers": compiled.max_registers,
        "resources": compiled.resources(),
        "sha256": sha256(compiled.image).hexdigest(),
    }


def _texts(plan: Plan, compiled: Mapping[str, CompiledFunction], name: str) -> str:
    """One of the compiler's texts (``ptx``, ``ttgir``) for all launches, each under its symbol."""
    if len(plan.launches) == 1:
        return str(getattr(compiled[plan.main], name))
    return "".join(f"// {launch.symbol}\n{getattr(compiled[launch.name], name)}\n" for launch in plan.launches)


def _toolchain_and_driver(plan: Plan, kernel: CompiledFunction) -> dict[str, Any]:
    """The compiler of a kernel and the oldest driver for it, as the manifest lists them."""
    major = cuda_major(kernel.ptx, kernel.cubin)
    return {
        "toolchain": toolchain("triton", plan.arch.name),
        "cuda_major": major,
        "min_driver": driver_of_ptx(kernel.ptx) if plan.arch.portable else min_driver(major, plan.arch.capability),
    }


def _import_triton() -> None:
    """Import Triton with a clean environment, since some of it is read at import."""
    with tempfile.TemporaryDirectory(prefix="attngen-") as scratch, _environment(scratch):
        try:
            import triton.compiler
            import triton.language
            import triton.runtime
        except ImportError as error:
            raise ToolchainError(f"Triton cannot be imported ({error}); pip install 'attngen[build]'") from None
        if not isinstance(triton.language.cdiv, triton.runtime.JITFunction):
            raise CompileError(
                "this process imported Triton with TRITON_INTERPRET=1, which replaced its compiler; "
                "compile in another process"
            )


def _environment(scratch: str, arch: Arch | None = None) -> contextlib.AbstractContextManager[None]:
    return scrubbed(
        scratch,
        **_assembler(arch),
        TRITON_HOME=scratch,
        TRITON_CACHE_DIR=str(Path(scratch, "cache")),
        # Line information embeds absolute paths and triples the cubin.
        TRITON_DISABLE_LINE_INFO="1",
        # Prints the log, which names spills and serialized wgmma, to standard output.
        TRITON_DUMP_PTXAS_LOG="1",
    )


def _assembler(arch: Arch | None) -> dict[str, str]:
    """Settings that make Triton call the ptxas for ``arch``; its releases differ in which they read for Hopper."""
    path = assembler(arch) if arch else None
    return {"TRITON_PTXAS_PATH": str(path), "TRITON_PTXAS_BLACKWELL_PATH": str(path)} if path else {}


@contextlib.contextmanager
def _cheap_cache_key() -> Iterator[None]:
    """Keep Triton from hashing its whole installation for a cache key: its cache is thrown away after a compile."""
    import triton.compiler.compiler as compiler

    original = getattr(compiler, "get_cache_key", None)
    if original is None:
        yield
        return
    compiler.get_cache_key = lambda source, *_, **__: source.name
    try:
        yield
    finally:
        compiler.get_cache_key = original


def _load(text: str, path: Path) -> ModuleType:
    """Import a source from a file, from which Triton reads it back."""
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"_attngen_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise CompileError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CompileError(f"{path.stem}: the source is not a valid module: {error}") from error
    return module


def compile_function(
    text: str,
    name: str,
    arguments: Sequence[Argument],
    arch: Arch,
    options: Mapping[str, Any],
    *,
    max_spills: int | None = None,
) -> CompiledFunction:
    """Compile one ``@triton.jit`` function of a source for ``arch``.

    A limit of registers (``maxnreg``) under which a thread spills more than ``max_spills`` bytes is dropped. Raises
    CompileError if Triton or ptxas rejects the function, if its parameters are not those of ``arguments``, or if it
    needs more shared memory than the arch has, and ToolchainError where no ptxas that is fit for ``arch`` is installed.
    """
    _import_triton()
    if lacking := missing("triton", arch.name):
        raise ToolchainError(lacking)
    with tempfile.TemporaryDirectory(prefix="attngen-") as scratch, _environment(scratch, arch):
        path = Path(scratch, f"{name}.py")
        try:
            return _compile(_load(text, path), name, arguments, arch, options, max_spills or 0)
        finally:
            linecache.cache.pop(str(path), None)


def _compile(
    module: ModuleType,
    name: str,
    arguments: Sequence[Argument],
    arch: Arch,
    options: Mapping[str, Any],
    max_spills: int,
) -> CompiledFunction:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module, name, None)
    if function is None:
        raise CompileError(f"{name}: the source defines no function of this name")
    if list(function.arg_names) != [a.name for a in arguments]:
        planned = ", ".join(a.name for a in arguments)
        raise CompileError(
            f"{name}: the source takes ({', '.join(function.arg_names)}), but the plan passes ({planned})"
        )
    attributes = {
        (i,): [["tt.divisibility", argument.divisibility]]
        for i, argument in enumerate(arguments)
        if argument.divisibility
    }
    target, limit = GPUTarget("cuda", arch.capability, 32), options["maxnreg"]
    with _compiler(name) as log, _cheap_cache_key():
        kernel = triton.compile(
            ASTSource(function, {a.name: a.type for a in arguments}, constexprs={}, attrs=attributes),
            target=target,
            options=dict(options),
        )
    ptx, cubin, resources = kernel.asm["ptx"], kernel.asm["cubin"], resources_of_log(log.getvalue())
    if limit is not None and resources.spills > max_spills:
        limit, ptx = None, without_register_limit(ptx)
        with _compiler(name) as log:
            cubin = _assemble(ptx, target, options)
        resources = resources_of_log(log.getvalue())
    metadata = kernel.metadata._asdict()
    parameters = triton_parameters(arguments, metadata.get("tensordesc_meta") or ())
    check_parameters(name, parameters, ptx)
    _check_memory(name, metadata, arch)
    return CompiledFunction(
        cubin=cubin,
        image=image_of(ptx) if arch.portable else cubin,
        ptx=ptx,
        ttgir=kernel.asm["ttgir"],
        parameters=placed_parameters(name, parameters, parameter_places(cubin)),
        registers_and_spills=resources,
        max_registers=limit,
        shared_memory=metadata["shared"],
        num_warps=metadata["num_warps"],
    )


def _assemble(ptx: str, target: GPUTarget, options: Mapping[str, Any]) -> bytes:
    """Assemble a PTX text by the last stage of Triton's pipeline, with its options for ptxas."""
    from triton.backends.compiler import Language
    from triton.compiler.compiler import make_backend

    backend, stages = make_backend(target), dict[str, Callable[[str, dict[str, Any]], bytes]]()
    backend.add_stages(stages, backend.parse_options(dict(options)), Language.TRITON)
    return stages["cubin"](ptx, {})


@contextlib.contextmanager
def _compiler(name: str) -> Iterator[io.StringIO]:
    """Collect what Triton prints, the log of ptxas too, and raise what it raises as a CompileError."""
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            yield log
    except Exception as error:
        raise ChoiceError(f"{name}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The message of a Triton error, without the reproducer command, which names temporary files."""
    text = str(error).strip() or type(error).__name__
    kept = [line for line in text.splitlines() if not line.startswith("Repro command:")]
    return f"Triton's compiler failed with {type(error).__name__}:\n" + "\n".join(kept)


def _check_memory(name: str, metadata: Mapping[str, Any], arch: Arch) -> None:
    if metadata["shared"] > arch.shared_memory:
        raise ChoiceError(
            f"{name}: shared memory {metadata['shared']} B exceeds {arch.shared_memory} B on {arch.name}; "
            "a smaller tile or fewer stages need less"
        )
    for scratch in ("global_scratch_size", "profile_scratch_size"):
        if metadata.get(scratch):
            raise ChoiceError(f"{name}: needs {metadata[scratch]} B of {scratch}, which no launch provides")


def _check_layouts(name: str, ttgir: str) -> None:
    if repeated := repeated_operands(ttgir):
        raise ChoiceError(f"{name}: {WRONG_LAYOUT}: {repeated[0]}")


def _check_hopper(plan: Plan, kernel: CompiledFunction, launch: Launch) -> None:
    """Refuse wrong machine code, and spills and serialized wgmma in a launch whose speed matters."""
    if not plan.arch.wgmma:
        return
    if clamps := misjudged_clamps(kernel.cubin):
        raise ChoiceError(f"{launch.symbol}: {WRONG_CLAMPS}: {clamps}")
    if "wgmma" in kernel.ptx and (overwritten := overwritten_operands(kernel.cubin)):
        raise ChoiceError(f"{launch.symbol}: {WRONG_CODE}: {overwritten[0]}")
    if launch.max_spills is not None:
        require_fast(plan, launch.symbol, kernel.registers_and_spills, launch.max_spills)
