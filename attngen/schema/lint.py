"""Warnings about legal specs that are probably mistakes: unused declarations, kernels asked for twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from attngen.errors import Location
from attngen.lang.ir import OPERATORS, Const, Expr, Load, Op, children, walk
from attngen.lang.literals import beyond_float32
from attngen.lang.printing import canonical
from attngen.lang.usage import decides
from attngen.schema.expand import repeats
from attngen.schema.kernel_spec import KernelSpec
from attngen.schema.loading import DeclaredVariant, Spec, doubts_of
from attngen.schema.presets import preset_names

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Remark:
    """One remark and the place that it is about."""

    message: str
    location: Location

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


def lint(spec: Spec, kernels: tuple[KernelSpec, ...]) -> list[Remark]:
    """Return the warnings of a spec, in the order of the file. ``kernels`` is what it expands into."""
    remarks = []
    used = {kernel.variant.without_max_logits().name for kernel in kernels}
    for name in spec.model.variants:
        declared = spec.variants[name]
        remarks.extend(_unused_declarations(declared))
        remarks.extend(_idle_gradients(declared))
        remarks.extend(_floats(declared))
        remarks.extend(doubtful(declared))
        if kernels and name not in used:
            remarks.append(Remark(f"variant '{name}' is used by no kernel", declared.location))
        if name in preset_names() and not _is_preset(spec, name):
            remarks.append(Remark(f"variant '{name}' hides the preset of that name", declared.location))
    for again, first in repeats(spec):
        message = f"asks again for a {again.variant.name} kernel of line {first.location.line}; it is built once"
        remarks.append(Remark(message, again.location))
    return sorted(dict.fromkeys(remarks), key=lambda remark: remark.location.line)


def doubtful(declared: DeclaredVariant) -> list[Remark]:
    """Warnings about a variant's expressions and extents that are legal but probably mistakes."""
    name = declared.variant.name
    return [
        Remark(f"{doubt.field} of variant '{name}': {doubt.message}", doubt.location or declared.location)
        for doubt in doubts_of(declared)
    ]


def _is_preset(spec: Spec, name: str) -> bool:
    return spec.name.endswith(f"specs/presets/{name}.yaml")


def _idle_gradients(declared: DeclaredVariant) -> list[Remark]:
    """Return a remark for each tensor with ``grad: true`` that the mask alone reads."""
    variant = declared.variant
    differentiable = set[str]().union(*(_read(each) for each in (variant.score, variant.sink) if each is not None))
    return [
        Remark(
            f"tensor '{tensor.name}' of variant '{variant.name}' has grad: true, but only the mask reads it: its "
            "gradient is 0",
            declared.tree.locate(("variants", variant.name, "tensors", tensor.name), key=True),
        )
        for tensor in variant.tensors
        if tensor.grad and tensor.name in _read(variant.mask) - differentiable
    ]


def _floats(declared: DeclaredVariant) -> list[Remark]:
    """Return a remark for each number that float32 cannot hold, and each quotient of integers that is compared."""
    variant = declared.variant
    remarks = []
    for field, root in (("mask", variant.mask), ("score", variant.score), ("sink", variant.sink)):
        if root is None:
            continue
        place = declared.tree.locate(("variants", variant.name, field), key=True)
        remarks += [
            Remark(f"{field} of variant '{variant.name}': {canonical(part)} is {value!r} in float32", place)
            for part, value in beyond_float32(root)
        ]
        remarks += [
            Remark(
                f"{field} of variant '{variant.name}': {canonical(part)} is rounded to float32 before it is "
                "compared or rounded to an integer; '//' divides integers exactly",
                place,
            )
            for part in dict.fromkeys(part for node in walk(root) if decides(node) for part in _parts(node))
            if _divides_integers(part)
        ]
    return remarks


def _parts(node: Expr) -> Iterator[Expr]:
    """Nodes that a node compares or rounds, except those inside a function such as ``log``, which rounds by itself."""
    for child in children(node):
        yield child
        rounds = isinstance(child, Op) and OPERATORS[child.op].float_args and child.op != "truediv"
        if not rounds or decides(child):
            yield from _parts(child)


def _divides_integers(node: Expr) -> bool:
    return (
        isinstance(node, Op)
        and node.op == "truediv"
        and all(
            (isinstance(arg, Op) and arg.op == "to_float") or (isinstance(arg, Const) and float(arg.value).is_integer())
            for arg in node.args
        )
    )


def _read(expression: Expr) -> set[str]:
    return {node.tensor for node in walk(expression) if isinstance(node, Load)}


def _unused_declarations(declared: DeclaredVariant) -> list[Remark]:
    """Return a remark for each scalar, tensor and let value that no expression of the variant names."""
    model = declared.model
    texts = [str(model.mask), model.score or "", str(model.sink), *model.let.values()]
    texts += [str(extent) for tensor in model.tensors.values() for extent in tensor.shape]
    named = {name for text in texts for name in _NAME.findall(text)}
    root = ("variants", declared.variant.name)
    return [
        Remark(f"{kind} '{name}' of variant '{declared.variant.name}' is never used", place)
        for kind, section, entries in (
            ("scalar", "scalars", model.scalars),
            ("tensor", "tensors", model.tensors),
            ("let value", "let", model.let),
        )
        for entry in entries
        if (name := entry.split("(")[0].strip()) not in named
        for place in [declared.tree.locate((*root, section, entry), key=True)]
    ]
