"""Kernels that are compiled when a call first lacks them: ``attngen.jit``.

It compiles the kernel that the error of a missing one says to add to a spec, with the plan, the cache and the locks of
``attngen build``. The copy of the runtime in a package does not have this module.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attngen.errors import AttngenError, CallError, NoKernelError, ToolchainError, internal_error
from attngen.runtime.registry import on_demand

if TYPE_CHECKING:
    from concurrent.futures import Future

    from attngen.build.compiles import BuiltKernel, Failure
    from attngen.lang.variant import Variant
    from attngen.runtime.registry.select import Request
    from attngen.schema import KernelSpec

#: The name of the package in the manifests of kernels that a call compiled.
PACKAGE = "compiled_on_call"

#: Function that loads the compilers in a worker process before its first kernel.
LOAD = "attngen.build.compiles:load"


class Jit:
    """Compiling on the first call, on or off for the whole process.

    ``attngen.jit()`` turns it on, ``attngen.jit(False)`` off; either is also a context manager, which restores the
    state before it.
    """

    def __init__(self) -> None:
        self._maker = _Maker()

    def __call__(self, on: bool = True, *, fast_math: bool = True) -> _Switched:
        """Turn it on or off, and return a context manager that restores the state before.

        Without ``fast_math``, what is compiled from now on takes no approximations (docs/spec.md), such as that of
        tanh. Kernels that are there already serve calls as before. Raises CallError unless both are bools.
        """
        for name, value in (("on", on), ("fast_math", fast_math)):
            if not isinstance(value, bool):
                raise CallError(f"attngen.jit: {name} must be True or False, got {value!r}")
        before = on_demand.maker, self._maker.fast_math
        on_demand.maker, self._maker.fast_math = (self._maker if on else None), fast_math
        _forget()
        return _Switched(self._maker, *before)

    @property
    def on(self) -> bool:
        """Whether a call that lacks a kernel has it compiled."""
        return on_demand.maker is not None

    def save(self, path: str | Path) -> None:
        """Write a spec of every kernel that calls of this process used while this was on, one entry for each.

        Raises CallError if there was none, SpecError for a file name that no spec may have, and OSError.
        """
        Path(path).write_text(self._maker.spec(Path(path)), "utf-8")

    def __repr__(self) -> str:
        return f"<attngen.jit: {'on' if self.on else 'off'}>"


class _Switched:
    """A context manager that restores what the switch was before."""

    def __init__(self, own: _Maker, before: on_demand.Maker | None, fast_math: bool) -> None:
        self._own, self._before, self._fast_math = own, before, fast_math

    def __enter__(self) -> None:
        """Do nothing: the switch was turned when this was made."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        on_demand.maker, self._own.fast_math = self._before, self._fast_math
        _forget()


def _forget() -> None:
    """Clear the registry's cached answers, if it is loaded: which operators a name has depends on the switch."""
    module = sys.modules.get("attngen.runtime.registry.lookup")
    if module is not None:
        module.registry.forget()


class _Maker:
    """Compiles what requests ask for, and remembers what was used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiles = False  # whether the last kernel that was asked for had to be compiled
        self._used: list[tuple[Variant, str, bool]] = []  # each with the lines of a spec that ask for it, and fast_math
        self.fast_math = True

    def make(self, request: Request, soon: Request | None = None) -> bool:
        """See ``on_demand.Maker``.

        Raises NoKernelError, with the reason, for a kernel that cannot be compiled, and ToolchainError if that is the
        compiler's fault: nothing else answers the call then.
        """
        from attngen.arch import arch_of
        from attngen.runtime.device import driver as drivers
        from attngen.runtime.registry.no_kernel import describe, no_spec_adds

        capability = drivers.current().capability(request.device)
        if no_spec_adds(request, capability) is not None or arch_of(capability) is None:
            return False
        what = f"{request.call.variant.name}, {describe(request.call, request.direction)}"
        if _capturing():
            raise NoKernelError(
                f"no kernel takes this call: {what}; attngen.jit compiles nothing while a CUDA graph is captured: run "
                "the call once before"
            )
        with self._lock:
            try:
                wanted = [_asked(request, capability)]
                if soon is not None and no_spec_adds(soon, capability) is None:
                    wanted.append(_asked(soon, capability))
                self._compile(*wanted)
            except ToolchainError:
                raise
            except ModuleNotFoundError as error:
                raise NoKernelError(
                    f"no kernel takes this call: {what}; attngen.jit needs {error.name}, which is not installed: "
                    "pip install 'attngen[build]'"
                ) from None
            except Exception as error:  # whatever fails: the call has no kernel, and its error says why
                known = error if isinstance(error, AttngenError) else internal_error(what, error)
                reason = f"attngen.jit cannot build one: {known}"
                raise NoKernelError(f"no kernel takes this call: {what}; {reason}") from error
        return True

    def _compile(self, asked: KernelSpec, *soon: KernelSpec) -> None:
        """Find or compile one kernel in the cache, and add it to the registry; a line says what was compiled.

        Those that are needed ``soon`` are compiled at the same time, if they can be.
        """
        from concurrent.futures import ThreadPoolExecutor

        from attngen.runtime.kernels.module import read_kernel
        from attngen.runtime.registry.lookup import registry
        from attngen.store import Store
        from attngen.store.spare import spare

        start = time.perf_counter()
        store = Store()
        store.require_trusted()
        wanted = [asked, *soon]
        # Compilers are loaded while kernels are planned and rendered, where these are likely to be missing.
        ahead = self._compiles or not store.all_keys()
        built: list[BuiltKernel] = []
        with spare.given(LOAD, ahead=ahead) as workers, ThreadPoolExecutor(len(wanted)) as threads:
            from attngen.build.compiles import Prepared
            from attngen.build.pipeline import compile_kernels
            from attngen.plan import plan
            from attngen.render import render

            def begin(kernel: KernelSpec) -> Future[tuple[Mapping[str, BuiltKernel], Sequence[Failure]]]:
                kernel = kernel if self.fast_math else exact(kernel)
                planned = plan(kernel)
                prepared = [Prepared(kernel, planned, render(planned))]
                return threads.submit(compile_kernels, prepared, store=store, jobs=1, workers=workers)

            compiling = []
            for other in reversed(soon):  # a backward takes longer: the forward is planned while it is compiled
                with suppress(AttngenError):  # reported when it is requested
                    compiling.append(begin(other))
            try:
                kernels, failures = begin(asked).result()
                for failure in failures:
                    raise failure.error
                built.extend(kernels.values())
                for each in compiling:
                    with suppress(AttngenError):
                        built.extend(each.result()[0].values())
            except KeyboardInterrupt:
                workers.stop()
                raise
        self._compiles = any(kernel.origin == "built" for kernel in built)
        for kernel in built:
            registry.add_compiled(read_kernel(store.path(kernel.key), sealed=True))
            if kernel.origin == "built":
                print(f"attngen.jit: compiled {kernel.name} in {time.perf_counter() - start:.1f} s", file=sys.stderr)

    def used(self, request: Request) -> None:
        """Remember the kernel that a request used; see ``on_demand.Maker``."""
        from attngen.arch import arch_of
        from attngen.runtime.device import driver as drivers
        from attngen.runtime.registry.no_kernel import yaml_lines

        capability = drivers.current().capability(request.device)
        if arch_of(capability) is not None:
            lines = "\n".join(yaml_lines(request.call, capability, request))
            with self._lock:
                entry = request.call.variant, lines, self.fast_math
                if not any(
                    known.definition == entry[0].definition and (lines, self.fast_math) == tuple(said)
                    for known, *said in self._used
                ):
                    self._used.append(entry)

    def spec(self, path: Path) -> str:
        """Return a spec of the kernels that were used, as checked YAML text."""
        import yaml

        from attngen.schema import load_spec_text
        from attngen.schema.writing import declaration, spec_text

        with self._lock:
            used = list(self._used)
        if not used:
            raise CallError("no call used a kernel while attngen.jit was on, so there is nothing to save")
        names: dict[object, str] = {}
        kernels: list[dict[str, Any]] = []
        for variant, lines, fast_math in used:
            variant = variant.without_max_logits()  # which the lines say
            name = names.setdefault(variant.definition, _free(variant.name, set(names.values())))
            said = yaml.safe_load(lines)
            kernels.append({**said["kernels"][0], "variant": name, "arch": said["arch"]})
            if not fast_math:
                kernels[-1]["fast_math"] = False
        forwards = [{key: entry[key] for key in entry if key not in ("passes", "deterministic")} for entry in kernels]
        implied = [forward for forward, entry in zip(forwards, kernels, strict=True) if forward != entry]
        kernels = [entry for entry in kernels if entry not in implied]  # a backward's entry builds its forward, too
        plain = [variant.without_max_logits() for variant, *_ in used]
        variants = {names[variant.definition]: declaration(variant) for variant in plain}
        text = spec_text(variants, kernels)
        load_spec_text(text, str(path))
        return text


def _asked(request: Request, capability: int) -> KernelSpec:
    """Return the kernel that the error of the missing one says to add to a spec."""
    from attngen.runtime.registry.no_kernel import yaml_lines
    from attngen.schema import expand, load_spec_text

    variant = request.call.variant
    lines = "\n".join(line.removeprefix("  ") for line in yaml_lines(request.call, capability, request))
    keys = "" if variant.keys is None else f", keys: {variant.keys}"  # which decides what kernels there are
    name = variant.without_max_logits().name
    placeholder = f"schema: 1\npackage: {PACKAGE}\nvariants:\n  {name}: {{mask: true{keys}}}\n{lines}\n"
    kernels = [
        kernel for kernel in expand(load_spec_text(placeholder, "call.yaml")) if kernel.direction == request.direction
    ]
    return replace(kernels[0], variant=variant)


def exact(asked: KernelSpec) -> KernelSpec:
    """Return the kernel without approximations, on the backend that the one with them has, if that can be."""
    from attngen.plan import plan

    backend = plan(asked).backend
    for kernel in (replace(asked, fast_math=False, backend=backend), replace(asked, fast_math=False)):
        with suppress(AttngenError):
            plan(kernel)
            return kernel
    return asked


def _free(name: str, taken: set[str]) -> str:
    """Return the name, with a number appended if it is taken by another definition."""
    return next(each for n in range(1, len(taken) + 2) if (each := name if n == 1 else f"{name}_{n}") not in taken)


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


jit = Jit()
