"""The kernels of the shipped specs as if they were built: manifests without machine code, for calls on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attngen import resources
from attngen.plan import plan
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import expand, load_spec


@contextmanager
def known(spec: str) -> Iterator[str]:
    """Make the variants of ``specs/integrations/<spec>.yaml`` known, and give the name of their package."""
    kernels = {kernel.variant.name: kernel for kernel in expand(load_spec(resources.specs_dir() / f"{spec}.yaml"))}
    manifests = [{**plan(kernel).to_dict(), "resources": {"shared_memory": 0}} for kernel in kernels.values()]
    package = package_of_kernels([Kernel(manifest, bytes) for manifest in manifests], "tests")
    registry.clear()
    registry.add(package)
    yield package.name
    registry.clear()
