"""Values for the texts of a package: its name, its variants and their calls, its compilers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from attngen.compile.assembler import PTXAS_WHEEL
from attngen.compile.toolchain import NVRTC_ELSEWHERE, NVRTC_WHEELS
from attngen.dtypes import SCALAR_TYPES
from attngen.formats import VERSION
from attngen.lang.dropout import RNG_STATE
from attngen.lang.printing import canonical
from attngen.lang.variant import Scalar, Variant
from attngen.operations import ATTENTION, OPERATIONS
from attngen.packaging.stubs import operation_stubs
from attngen.render.environment import environment

#: Distribution that a manifest names as its compiler → its common name.
_COMPILERS = {"triton": "Triton", PTXAS_WHEEL: "ptxas", **dict.fromkeys((*NVRTC_WHEELS, NVRTC_ELSEWHERE), "NVRTC")}

#: Beginning of the README's line that names the oldest drivers. It is written when the kernels are compiled.
DRIVER_LINE = "NVIDIA driver: "


@dataclass(frozen=True, slots=True)
class VariantView:
    """A variant as stubs and tables show it."""

    name: str
    arguments: tuple[str, ...]  # as a stub declares them
    listed: str  # as a table lists them
    summary: str

    @classmethod
    def of(cls, variant: Variant) -> VariantView:
        """Return the view of a variant."""
        tensors = [f"{tensor.name}: Tensor" for tensor in variant.tensors if tensor != RNG_STATE]
        scalars = [_declared(scalar) for scalar in variant.arguments]
        names = [f"`{tensor.name}`" for tensor in variant.tensors if tensor != RNG_STATE]
        names += [f"`{scalar.name}`" for scalar in variant.arguments]
        parts = [f"Mask `{canonical(variant.mask)}`" if variant.masked else "Every query sees every key"]
        if variant.score is not None:
            parts.append(f"score `{canonical(variant.score)}`")
        if variant.sink is not None:
            parts.append(f"sink `{canonical(variant.sink)}`")
        if not variant.has_lse:
            parts.append(f"weights {variant.weights}")
        if variant.keys is not None:
            parts.append("keys by `indices`")
        if variant.dropout:
            parts.append("dropout at the rate `dropout_p`")
        if variant.dropout:
            scalars.append(f"{RNG_STATE.name}: Tensor | None = ...")
        return cls(variant.name, (*tensors, *scalars), ", ".join(names), "; ".join(parts) + ".")


def _declared(scalar: Scalar) -> str:
    text = f"{scalar.name}: {SCALAR_TYPES[scalar.dtype].python.__name__}"
    return text if scalar.default is None else f"{text} = ..."


@dataclass(frozen=True, slots=True)
class PackageView:
    """Values for the texts of a package. ``spec`` is the spec's file, never absolute."""

    module: str
    version: str
    spec: str
    arches: tuple[str, ...]
    variants: tuple[VariantView, ...]
    toolchain: tuple[str, ...] = ()
    headers: bool = False
    attngen: str = VERSION

    @property
    def only(self) -> str | None:
        """The variant that calls run without naming one, where there is no other."""
        return self.variants[0].name if len(self.variants) == 1 else None

    @property
    def calls(self) -> dict[str, list[str]]:
        """Module of the runtime → the names that the package exports from it, in the order of its imports."""
        exported = {
            module: sorted((*names, *operation.results))
            for operation in OPERATIONS
            for module, names in operation.modules.items()
        }
        return {module: exported[module] for module in sorted(exported, key=_own_name)}

    @property
    def results(self) -> list[tuple[str, str]]:
        """Module and name of each class of results."""
        return [(module, name) for one in OPERATIONS for module in one.modules for name in one.results]

    @property
    def declared(self) -> list[str]:
        """Stubs of the operations beside attention."""
        return list(operation_stubs())

    def listed(self, *others: str) -> list[str]:
        """Lines of ``__all__``: the names of all calls, and others."""
        names = sorted((*others, *(name for names in self.calls.values() for name in names)))
        return wrap(", ".join(f'"{name}"' for name in names) + ",", 117)

    @property
    def distribution(self) -> str:
        """The name by which pip knows the package; it has to end in a letter or a digit."""
        return self.module.rstrip("_").replace("_", "-")


def _own_name(module: str) -> str:
    """A module of operations by the name of its operation, or of itself in the folder of attention."""
    return module.removeprefix("runtime.operations.").removeprefix(f"{ATTENTION.name}.")


def compilers_of(manifests: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the version of each compiler that made the kernels, by the name of its distribution, sorted."""
    versions = {name: text for m in manifests for name, text in m.get("toolchain", {}).items() if name in _COMPILERS}
    return {name: str(versions[name]) for name in sorted(versions)}


def drivers_of(manifests: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the oldest driver on which all kernels for an arch run, by arch."""
    oldest: dict[str, int] = {}
    for manifest in manifests:
        oldest[manifest["arch"]] = max(oldest.get(manifest["arch"], 0), manifest.get("min_driver") or 0)
    return oldest


def compiler_lines(compilers: Mapping[str, str]) -> tuple[str, ...]:
    """Lines of the notice about the kernels' origin, one for each compiler."""
    return tuple(
        f"sources that attngen rendered from the spec, and what {_COMPILERS[name]} {version} ({name}) made of them"
        for name, version in compilers.items()
    )


def fill(template: str, **values: Any) -> str:
    """Return the text of a template of ``templates/package``, without trailing blank lines."""
    text = environment("package").get_template(f"package/{template}").render(**values)
    return re.sub(r"\n{4,}", "\n\n\n", text).rstrip() + "\n"
