"""One typed operator of ``torch.library`` for each variant of a package, so that compiled programs keep it whole.

``<package>::<variant>`` takes dense tensors, ``<variant>__varlen`` packed ones, and ``…__backward`` belongs to each.
``<variant>__paged`` takes keys in pages (``paged_operators``). All return (out, lse). They are defined when a traced
program first names the variant; outside a trace ``attention`` does without them, since an operator costs several
microseconds a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.dropout import DROPOUT_P, RNG_STATE
from attngen.lang.variant import Variant
from attngen.runtime import dispatch
from attngen.runtime.arguments import hint_for
from attngen.runtime.dropout import check_rate, draw
from attngen.runtime.registry import registry
from attngen.runtime.tile_map import TileMap

SCALAR_SCHEMAS = {"int32": "SymInt", "int64": "SymInt", "fp32": "float", "bool": "bool"}
_PACKING = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

#: Strides reach the operator as the program made them: kernels take any, and selection depends on them.
TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "needs_exact_strides" if hasattr(torch.Tag, "needs_exact_strides") else "")
    if name
)


@dataclass(frozen=True, slots=True)
class Signature:
    """How an operator takes a variant's own arguments: names and defaults in order of the schema."""

    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    defaults: tuple[Any, ...]  # of the scalars; None where the caller has to say
    differentiable: tuple[str, ...]  # float tensors that the spec wants a gradient of

    @classmethod
    def of(cls, variant: Variant) -> Signature:
        """Return the signature of a variant's operators."""
        return cls(
            tensors=tuple(t.name for t in variant.tensors),
            scalars=tuple(s.name for s in variant.arguments),
            defaults=tuple(s.default for s in variant.arguments),
            differentiable=tuple(t.name for t in variant.tensors if t.grad),
        )


def schema_of(variant: Variant, *, packed: bool) -> str:
    """Return the arguments and results of a variant's forward operator in torch's schema language."""
    parts = ["Tensor q", "Tensor k", "Tensor v"]
    if packed:
        parts += ["Tensor cu_seqlens_q", "Tensor cu_seqlens_k", "SymInt max_seqlen_q", "SymInt max_seqlen_k"]
    parts += [f"Tensor {t.name}" for t in variant.tensors]
    parts += [f"{SCALAR_SCHEMAS[s.dtype]} {s.name}" for s in variant.arguments]
    parts += ["float? softmax_scale", "Tensor? seqused_k", "Tensor? tile_map", "str layout", "str? backend"]
    parts.append("bool deterministic=False")
    return f"({', '.join(parts)}) -> (Tensor out, Tensor lse)"


def _backward_schema(variant: Variant, *, packed: bool) -> str:
    arguments = schema_of(variant, packed=packed).partition(" -> ")[0]
    gradients = ["Tensor"] * (3 + len(Signature.of(variant).differentiable))
    return f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {arguments[1:]} -> ({', '.join(gradients)})"


def namespace_of(package: str) -> str:
    """Return the operator namespace of a package; never one of torch's own."""
    return package if package.startswith("attngen") else f"attngen_{package}"


class _Operators:
    """The operators of one variant of one package."""

    def __init__(self, library: torch.library.Library, full_name: str, variant: Variant, name: str) -> None:
        self.signature = Signature.of(variant)
        self.full_name = full_name
        self._library = library
        self._namespace = library.ns
        for packed in (False, True):
            self._define(variant, f"{name}__varlen" if packed else name, packed)
        if variant.packed_keys() is None:
            from attngen.runtime import paged_operators

            paged_operators.define(library, name, self.full_name, variant, self.signature)

    def _define(self, variant: Variant, name: str, packed: bool) -> None:
        library, signature = self._library, self.signature
        backward_name = f"{name}__backward"
        library.define(name + schema_of(variant, packed=packed), tags=TAGS)
        library.define(backward_name + _backward_schema(variant, packed=packed), tags=TAGS)
        calls = _Calls(self.full_name, signature, packed)
        for key in ("CPU", "CUDA"):
            library.impl(name, calls.forward, key)
            library.impl(backward_name, calls.backward, key)
        torch.library.register_fake(f"{self._namespace}::{name}", calls.fake_forward, lib=library)
        torch.library.register_fake(f"{self._namespace}::{backward_name}", calls.fake_backward, lib=library)
        backward = getattr(getattr(torch.ops, self._namespace), backward_name)
        torch.library.register_autograd(
            f"{self._namespace}::{name}",
            _Differentiation(calls, backward).backward,
            setup_context=calls.setup_context,
            lib=library,
        )
        torch.library.register_autograd(f"{self._namespace}::{backward_name}", calls.refuse_another, lib=library)


class _Calls:
    """The implementations of one forward operator and its backward, which only differ in how lengths come."""

    def __init__(self, full_name: str, signature: Signature, packed: bool) -> None:
        self.full_name = full_name
        self.signature = signature
        self.packed = packed
        self._own = 7 if packed else 3  # tensors and lengths before the variant's own arguments

    def split(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """Return the leading arguments, the variant's own by name, and the trailing ones; torch drops defaults."""
        names = (*self.signature.tensors, *self.signature.scalars)
        end = self._own + len(names)
        own = dict(zip(names, arguments[self._own : end], strict=True))
        trailing = arguments[end:] if len(arguments) > end + 5 else (*arguments[end:], False)
        return arguments[: self._own], own, trailing

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Run the call. Results that a graph owns must not alias the inputs, and never do."""
        (q, k, v, *packing), own, (scale, seqused_k, words, layout, backend, deterministic) = self.split(arguments)
        tile_map = None if words is None else TileMap.of_words(words)
        out, lse = dispatch.run(
            q, k, v, tuple(packing) if self.packed else None, self.full_name, scale, seqused_k, True,
            layout, backend, None, own, tile_map, deterministic,
        )  # fmt: skip
        return out, lse.to(torch.float32)

    def fake_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return results of the right shapes, for tracing. What depends on values is checked when the program runs."""
        (q, _, v, *_), _, trailing = self.split(arguments)
        layout = trailing[3]
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse_shape: tuple[int, ...]
        if self.packed:
            lse_shape = (q.shape[1], q.shape[0])
        elif layout == "bhsd":
            lse_shape = (q.shape[0], q.shape[1], q.shape[2])
        else:
            lse_shape = (q.shape[0], q.shape[2], q.shape[1])
        return out, q.new_empty(lse_shape, dtype=torch.float32)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what the backward needs: the inputs, the output and its log-sum-exp."""
        self._refuse_undeclared(ctx, inputs)
        ctx.tensor_places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*output, *(inputs[i] for i in ctx.tensor_places))
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]

    def _refuse_undeclared(self, ctx: Any, inputs: tuple[Any, ...]) -> None:
        own = self.signature.tensors
        for i, name in enumerate(own, self._own):
            if ctx.needs_input_grad[i] and name not in self.signature.differentiable:
                raise CallError(
                    f"{self.full_name}: tensor '{name}' asks for a gradient that its spec does not declare "
                    "(grad: true); detach it"
                )

    def backward(
        self, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v and of the declared tensors."""
        leading, own, trailing = self.split(arguments)
        if not dispatch._on_gpu(leading[0]) or trailing[4] == "reference":
            return self._backward_of_reference(dout, dlse, leading, own, trailing)
        from attngen.runtime import training

        (q, k, v, *packing), (scale, seqused_k, _, layout, _, deterministic) = leading, trailing
        tensors = [own.pop(name) for name in self.signature.tensors]
        lengths = (packing[2], packing[3]) if self.packed else None
        settings = (self.full_name, scale, layout, None, lengths, own, self.signature.tensors, deterministic)
        dq, dk, dv, gradients = training.differentiate(
            q, k, v, out, lse, dout, dlse, tuple(packing) if self.packed else None, seqused_k, settings, tensors,
            self.signature.differentiable,
        )  # fmt: skip
        return dq, dk, dv, *(gradients[name] for name in self.signature.differentiable)

    def _backward_of_reference(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        leading: tuple[Any, ...],
        own: dict[str, Any],
        trailing: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad(), _recording():
            inputs = [tensor.detach().requires_grad_() for tensor in leading[:3]]
            for name in self.signature.differentiable:
                own[name] = own[name].detach().requires_grad_()
            out, lse = self.forward(*inputs, *leading[3:], *own.values(), *trailing)
        inputs += [own[name] for name in self.signature.differentiable]
        pairs = [(o, g) for o, g in ((out, dout), (lse, dlse)) if g is not None and o.requires_grad]
        if not pairs:
            return tuple(torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)
        outputs, gradients = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
        return tuple(
            (torch.zeros_like(tensor) if gradient is None else gradient).contiguous()
            for tensor, gradient in zip(inputs, found, strict=True)
        )

    def refuse_another(self, ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Refuse a second derivative, as eager calls of kernels do; torch would return a part of it and warn."""
        raise NotImplementedError(f"{self.full_name}: gradients of attention cannot be differentiated again")

    def fake_backward(
        self, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
    ) -> tuple[Tensor, ...]:
        """Return gradients of the right shapes, for tracing; they are contiguous."""
        leading, own, _ = self.split(arguments)
        inputs = [*leading[:3], *(own[name] for name in self.signature.differentiable)]
        return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)


def _recording() -> Any:
    """Let autograd record inside an operator, which a compiled program may call with autograd left out of dispatch."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


class _Differentiation:
    """The autograd formula of a forward operator: calls the backward operator and puts its results in place."""

    def __init__(self, calls: _Calls, operator: Callable[..., Any]) -> None:
        self._calls = calls
        self._operator = operator

    def backward(self, ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """Return one gradient or None for each argument of the forward operator."""
        arguments = list(ctx.others)
        out, lse, *inputs = ctx.saved_tensors
        for place, tensor in zip(ctx.tensor_places, inputs, strict=True):
            arguments[place] = tensor
        found = iter(self._operator(dout, dlse, out, lse, *arguments))
        gradients: list[Any] = [None] * len(arguments)
        for i in range(3):
            gradients[i] = next(found)
        for i, name in enumerate(self._calls.signature.tensors, self._calls._own):
            if name in self._calls.signature.differentiable:
                gradients[i] = next(found)
        return tuple(gradients)


_libraries: dict[str, torch.library.Library] = {}
_operators: dict[tuple[str, str, str, str], tuple[str, _Operators]] = {}
_lock = threading.RLock()


def operators_of(variant: str, package: str | None = None) -> tuple[str, str, Signature]:
    """Return namespace, name and signature of a variant's operators, which are defined at the first use.

    A variant that was built again with other arguments gets operators of another name, since torch keeps the first.
    """
    found = registry.find(variant, package)
    namespace, name = found.namespace or namespace_of(found.package), found.operator
    schema = schema_of(found.variant, packed=True)
    with _lock:
        known = _operators.get((namespace, name, found.full_name, schema))
        if known is None:
            others = sum(key[:2] == (namespace, name) for key in _operators)
            chosen = name if not others else f"{name}__{others + 1}"
            library = _libraries.get(namespace)
            if library is None:
                library = _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
            known = _operators[namespace, name, found.full_name, schema] = (
                chosen,
                _Operators(library, found.full_name, found.variant, chosen),
            )
    return namespace, known[0], known[1].signature


def define(variants: Sequence[str]) -> tuple[str, ...]:
    """Define the operators of these variants, or of all that can be read, and return ``namespace::name`` of each."""
    if not variants:
        variants = [f"{p.name}/{name}" for _, p in registry.packages() for name in p.variants if p.kernels(name)]
    found = (operators_of(variant)[:2] for variant in dict.fromkeys(variants))
    return tuple(f"{namespace}::{name}" for namespace, name in found)


@torch.compiler.assume_constant_result
def _resolve(variant: str, package: str | None, given: tuple[str, ...]) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    """Return namespace and name of the operator, and its own arguments with their defaults. Raises CallError.

    Runs at trace time on plain values, and the trace takes the result as a constant.
    """
    namespace, name, signature = operators_of(variant, package)
    tensors = [(tensor, None) for tensor in signature.tensors]
    takes = (*tensors, *zip(signature.scalars, signature.defaults, strict=True))
    names = [argument for argument, _ in takes]
    for argument in given:
        if argument == DROPOUT_P.name and argument not in names:
            continue
        if argument not in names:
            raise CallError(f"{variant}: unknown argument '{argument}'{hint_for(argument, names)}")
    missing = [argument for argument, default in takes if default is None and argument not in (*given, RNG_STATE.name)]
    if missing:
        raise CallError(f"{variant}: missing {', '.join(map(repr, missing))}")
    return namespace, name, takes


def resolved(
    variant: str | Variant, package: str | None, arguments: Mapping[str, Any], q: Tensor
) -> tuple[Any, str, list[Any]]:
    """Return the namespace of a variant's operators, their name, and the variant's own arguments in their order."""
    variant = getattr(variant, "handle", variant)  # what attngen.variant made: a trace takes plain text
    if not isinstance(variant, str):
        raise CallError("a traced call must name its variant; a Variant as a value works in eager calls only")
    namespace, name, takes = _resolve(variant, package, tuple(arguments))
    names = [argument for argument, _ in takes]
    if DROPOUT_P.name in arguments and DROPOUT_P.name not in names:
        check_rate(variant, arguments[DROPOUT_P.name])
    if RNG_STATE.name in names and arguments.get(RNG_STATE.name) is None:
        arguments = {**arguments, RNG_STATE.name: draw(q.device)}
    return getattr(torch.ops, namespace), name, [arguments.get(argument, default) for argument, default in takes]


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: tuple[Any, Any, Any, Any] | None,
    variant: str | Variant,
    softmax_scale: Any,
    seqused_k: Any,
    return_lse: bool,
    layout: str,
    backend: str | None,
    package: str | None,
    arguments: Mapping[str, Any],
    tile_map: TileMap | None,
    deterministic: bool,
) -> Any:
    """Call the operator of a variant; what is traced is this function and nothing below it. Raises CallError."""
    operators, name, own = resolved(variant, package, arguments, q)
    words = None if tile_map is None else tile_map.words
    if packing is None:
        operator = getattr(operators, name)
        out, lse = operator(q, k, v, *own, softmax_scale, seqused_k, words, layout, backend, deterministic)
    else:
        operator = getattr(operators, name + "__varlen")
        out, lse = operator(q, k, v, *packing, *own, softmax_scale, seqused_k, words, layout, backend, deterministic)
    return (out, lse) if return_lse else out
