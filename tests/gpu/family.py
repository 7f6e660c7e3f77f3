"""The kernels under test, built once for the GPU that is here, and runs of one of them on given inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from attngen.arch import Arch, arch_of
from attngen.build.pipeline import Prepared, compile_kernels, plans, prepare
from attngen.inspect.cases import Case
from attngen.lab.verify.inputs import Element, Inputs, make_inputs
from attngen.lab.verify.poison import Poisoned, poisoned
from attngen.lab.verify.retarget import retarget
from attngen.lang.eager import evaluate
from attngen.plan import Plan
from attngen.render import render
from attngen.runtime.arguments.checked import Call, Packing
from attngen.runtime.kernels.module import Kernel, read_kernel
from attngen.runtime.launch.pinned import Buffers, Pinned
from attngen.runtime.reference.eager import lengths, names_of
from attngen.runtime.registry.lookup import Package, package_of_kernels, registry
from attngen.schema import KernelSpec, load_spec
from attngen.store.store import Store
from tests.sampling import covering, exhaustive

SPEC = Path(__file__).with_name("kernels.yaml")
PACKAGE = "attngen_gpu_tests"
DEVICE = "cuda"


Planned = dict[str, tuple[KernelSpec, Plan]]
Built = TypeVar("Built")


@cache
def _planned() -> Planned:
    return {label(plan): (spec, plan) for spec, plan in plans(load_spec(SPEC))}


def rare(plans: Mapping[str, Plan], always: Callable[[str], bool] = lambda name: False) -> frozenset[str]:
    """Return the near-duplicates among kernels, which only ``-m exhaustive`` compiles and runs.

    They show no variant, head dim, dtype, layout or flag that another kernel of the same schedule does not show.
    """
    kept = covering({name: (_kind(plan), _facts(plan)) for name, plan in plans.items()})
    return frozenset(name for name in plans if name not in kept and not always(name))


def _kind(plan: Plan) -> tuple[object, ...]:
    return plan.direction, plan.backend, plan.name.split("_")[2], plan.pack_gqa, plan.ordered


def _facts(plan: Plan) -> tuple[object, ...]:
    words = plan.name.split("_")
    tile = next(place for place, word in enumerate(words) if re.fullmatch(r"m\d+n\d+\w*", word))
    flags = [word for word in words[tile + 1 :] if not re.fullmatch(r"m\d+n\d+\w*", word)]
    return (
        plan.variant.name, (plan.head_dim_qk, plan.head_dim_v), (plan.dtype_name, plan.operands.k.name),
        plan.layout, tuple(flags),
    )  # fmt: skip


def mentioned(name: str) -> bool:
    """Whether a test of this folder asks for a kernel by its label."""
    return f'"{name.removeprefix("backward ")}"' in _texts()


@cache
def _texts() -> str:
    return "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))


@cache
def left_out() -> frozenset[str]:
    """Return the labels of the kernels of ``kernels.yaml`` that only ``-m exhaustive`` compiles and runs."""
    return rare({name: plan for name, (_, plan) in _planned().items()}, mentioned)


def compiled_labels() -> list[str]:
    """Return the labels of the kernels that this run compiles."""
    return list(some_of(_planned(), left_out()))


def some_of(planned: Mapping[str, Built], rarely: Container[str]) -> dict[str, Built]:
    """Return the kernels that this run compiles: without those that are left to ``-m exhaustive``."""
    return {name: one for name, one in planned.items() if exhaustive() or name not in rarely}


def rendered(planned: Planned) -> dict[str, Prepared]:
    """Return kernels with their sources; collecting tests needs their labels alone."""
    return {name: Prepared(spec, plan, render(plan)) for name, (spec, plan) in planned.items()}


def label(plan: Plan) -> str:
    """Name a kernel by what it computes, not by how."""
    dims = {plan.head_dim_qk, plan.head_dim_v}
    head_dim = "x".join(map(str, sorted(dims, reverse=True)))
    parts = [
        plan.variant.name,
        plan.dtype_name,
        f"d{head_dim}",
        plan.layout,
        plan.loads if plan.backend == "triton" else plan.name.split("_")[2],  # descriptor, pointer, wgmma
        *(["pack"] if plan.pack_gqa else []),
        *(["ordered"] if plan.ordered else []),
    ]
    return "-".join(parts)


def labels() -> list[str]:
    """Return the labels of all kernels."""
    return list(_planned())


def of_variants(*variants: str) -> list[str]:
    """Return the labels of the kernels of some variants."""
    return [name for name in _planned() if name.split("-")[0] in variants]


def arch_here() -> Arch:
    """Return the architecture to build for: that of the GPU that is here, or sm90a without one."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    arch = arch_of(10 * major + minor)
    assert arch is not None
    return arch


def for_this_gpu(kernel: Prepared) -> Prepared:
    """Return a kernel as it is, or planned again for the GPU that is here."""
    arch = arch_here()
    return kernel if kernel.plan.arch.runs_on(arch.capability) else retarget(kernel, arch)


def known(build: Callable[[], tuple[Built, Package]]) -> Callable[[], Built]:
    """Build once in a process, and make the package known again wherever a test has cleared the registry.

    The fixtures of ``conftest.py`` call ``known_again`` before each test of a module that has the function.
    """
    once = cache(build)

    @wraps(build)
    def built() -> Built:
        result, package = once()
        if not any(other is package for other in loaded()):
            registry.add(package)
        return result

    built.known_again = lambda: built() if once.cache_info().currsize else None  # type: ignore[attr-defined]
    return built


def loaded() -> Iterator[Package]:
    """Yield the packages that were named explicitly; the user's builds are not looked for."""
    for rank, package in registry.packages():
        if rank != "loaded":
            return
        yield package


@contextmanager
def only_known(*packages: Package) -> Iterator[None]:
    """Make these packages known, and no others; those known before are known again at the end."""
    before = list(loaded())
    registry.clear()
    for package in packages:
        registry.add(package)
    try:
        yield
    finally:
        registry.clear()
        for package in before:
            registry.add(package)


def compiled_kernels(prepared: Sequence[Prepared]) -> list[Kernel]:
    """Compile what the cache lacks, and read all kernels, in their order; a failure is the test's."""
    store = Store()
    built, failures = compile_kernels(prepared, store=store)
    assert not failures, "\n".join(f"{failure.name}: {failure.error}" for failure in failures)
    return [read_kernel(store.path(built[one.plan.name].key)) for one in prepared]


@cache
def package_of_spec(path: Path) -> Package:
    """The kernels of a spec of this folder, for the GPU that is here."""
    here = [for_this_gpu(kernel) for kernel in prepare(load_spec(path))]
    return package_of_kernels(compiled_kernels(here), f"tests/gpu/{path.stem}")


def in_graph(step: Callable[[], Built]) -> tuple[torch.cuda.CUDAGraph, Built]:
    """Capture a step, after one on a side stream that loads what is loaded once; its results are the graph's."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


class Kernels(dict[str, Kernel]):
    """Kernels by label; whoever asks for one that could not be compiled fails with the reason."""

    def __init__(self, prepared: Mapping[str, Prepared]) -> None:
        """Compile what the cache of ``ATTNGEN_CACHE`` lacks. No index is written: only this process sees them."""
        here = {name: for_this_gpu(kernel) for name, kernel in prepared.items()}
        store = Store()
        built, failures = compile_kernels(list(here.values()), store=store)
        errors = {failure.name: failure.error for failure in failures}
        self._errors = {name: errors[kernel.plan.name] for name, kernel in here.items() if kernel.plan.name in errors}
        for name, kernel in here.items():
            if name not in self._errors:
                self[name] = read_kernel(store.path(built[kernel.plan.name].key))

    def __missing__(self, name: str) -> Kernel:
        pytest.fail(f"{name} was not compiled: {self._errors.get(name, 'only -m exhaustive asks for it')}")


def to_build() -> list[Prepared]:
    """Return the kernels with their sources."""
    return list(rendered(some_of(_planned(), left_out())).values())


@known
def kernels() -> tuple[Kernels, Package]:
    """Return the kernels by their labels, and make the package known."""
    by_label = Kernels(rendered(some_of(_planned(), left_out())))
    return by_label, package_of_kernels(list(by_label.values()), "tests/gpu")


@dataclass
class Run:
    """A kernel, inputs that a test may change in place, and the call that binds them."""

    kernel: Kernel
    inputs: Inputs
    call: Call

    @classmethod
    def of(cls, name: str, case: Case, seed: int = 0, **arguments: Any) -> Run:
        """Return a kernel on random inputs; ``arguments`` replaces scalars or tensors of the variant."""
        kernel = kernels()[name]
        element = Element(kernel.dtype, kernel.head_dim_qk, kernel.head_dim_v)
        made = make_inputs(kernel.variant, case, kernel.layout, element, DEVICE, seed)
        return cls.with_inputs(
            kernel, made.q, made.k, made.v, made.packing, made.seqused_k, {**made.arguments, **arguments}
        )

    @classmethod
    def with_inputs(
        cls,
        kernel: Kernel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packing: Packing | None = None,
        seqused_k: Tensor | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Run:
        """Return a kernel on these tensors."""
        inputs = Inputs(q, k, v, packing, seqused_k, arguments or {})
        return cls(kernel, inputs, inputs.bind(kernel.variant))

    def memory(self) -> Poisoned:
        """Return fresh poisoned buffers."""
        return poisoned(self.kernel, self.call, self.inputs.q, self.inputs.k, self.inputs.v)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one launch into poisoned memory."""
        memory = self.memory()
        self.launch(memory.buffers)
        assert memory.overrun() == ()
        assert memory.buffers.lse is not None
        return memory.buffers.out, memory.buffers.lse

    def launch(self, buffers: Buffers) -> None:
        """Enqueue the kernel."""
        Pinned(self.kernel, self.call, buffers)()

    def visible(self) -> list[Tensor]:
        """Return for each sequence which pairs the mask shows: (heads, rows, keys)."""
        masks = []
        for b, (rows, keys, q_offset, k_offset) in enumerate(lengths(self.call)):
            names = names_of(self.call, b, slice(0, rows), rows, keys, q_offset, k_offset)
            value = evaluate(self.call.variant.mask, names, self.call.tensors)
            masks.append(torch.as_tensor(value, device=DEVICE).broadcast_to(self.call.heads, rows, keys))
        return masks

    def keys_of(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Return the views of k and v that hold a sequence's keys, to be changed in place."""
        _, keys, _, start = lengths(self.call)[sequence]
        if self.call.layout == "varlen":
            return self.inputs.k[start : start + keys], self.inputs.v[start : start + keys]
        return self.inputs.k[sequence, :keys], self.inputs.v[sequence, :keys]


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Whether results are equal bit for bit; NaN equals NaN of the same bits."""
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(kind)
