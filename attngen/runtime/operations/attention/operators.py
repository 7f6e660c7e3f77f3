"""One typed operator of ``torch.library`` for each variant of a package, so that compiled programs keep it whole.

``<package>::<variant>`` takes dense tensors, ``<variant>__varlen`` packed ones, and ``…__backward`` belongs to each.
``<variant>__paged`` takes keys in pages (``paged_operators``). All return (out, lse). They are defined when a traced
program first names the variant, or a call runs under a dispatch mode. Other calls do without them, since an operator
costs several microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngen.errors import CallError, NoKernelError
from attngen.lang.dropout import DROPOUT_P, RNG_STATE
from attngen.lang.variant import Variant
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.checked import Results, lse_dtype_of, out_dtype_of
from attngen.runtime.arguments.declared import hint_for
from attngen.runtime.arguments.dropout import check_rate
from attngen.runtime.arguments.given import Given, tensors_of
from attngen.runtime.arguments.latent_rows import value_columns
from attngen.runtime.arguments.paging import in_rows
from attngen.runtime.arguments.shapes import require_lse
from attngen.runtime.autograd import training
from attngen.runtime.autograd.derivatives import Plain, reference_gradients
from attngen.runtime.operations.attention import at_trace, dispatch, flops, paged_operators
from attngen.runtime.operations.attention.dropout_state import random_state, with_random_state
from attngen.runtime.operations.attention.paged_operators import INTO
from attngen.runtime.operations.attention.signature import Signature, arguments_of, first_own, parameters_of
from attngen.runtime.operations.shared.library import BUSY, LOCK, defining, namespace_of
from attngen.runtime.operations.shared.sharding import Sharded, refuse_mixed, register, register_waiting
from attngen.runtime.operations.shared.tags import TAGS
from attngen.runtime.registry.binding import bind_call
from attngen.runtime.registry.lookup import NO_PACKAGE, SHARED_NAMESPACE, Resolved, registry

if TYPE_CHECKING:
    from typing import Protocol

    from attngen.runtime.arguments.scalars import Number
    from attngen.runtime.autograd.context import Context

    class _OperatorContext(Context, Protocol):
        tensor_places: list[int]
        others: list[object]


#: Suffixes of the names of operators, by the form of their calls.
_SUFFIXES = {"dense": "", "varlen": "__varlen", "paged": paged_operators.SUFFIX}

#: Arguments of a backward operator before those of its forward: dout, dlse, out, lse.
_BEFORE_INPUTS = 4


def schema_of(variant: Variant, *, packed: bool) -> str:
    """Return the arguments and results of a variant's forward operator in torch's schema language."""
    return f"({parameters_of(variant, _form(packed))}) -> (Tensor out, Tensor lse)"


def _form(packed: bool) -> str:
    return "varlen" if packed else "dense"


def _backward_schema(variant: Variant, *, packed: bool) -> str:
    gradients = ["Tensor"] * (3 + len(Signature.of(variant).differentiable))
    taken = f"Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {parameters_of(variant, _form(packed))}"
    return f"({taken}) -> ({', '.join(gradients)})"


class _Operators:
    """The operators of one variant of one package."""

    def __init__(self, library: torch.library.Library, full_name: str, variant: Variant, name: str) -> None:
        self.signature = Signature.of(variant)
        self.full_name = full_name
        self._library = library
        self._namespace = library.ns
        for packed in (False, True):
            self._define(variant, name + _SUFFIXES[_form(packed)], packed)
        if variant.packed_keys() is None:
            paged_operators.define(library, name, self.full_name, variant, self.signature)

    def _define(self, variant: Variant, name: str, packed: bool) -> None:
        library, signature = self._library, self.signature
        backward_name = f"{name}__backward"
        library.define(name + schema_of(variant, packed=packed), tags=TAGS)
        library.define(backward_name + _backward_schema(variant, packed=packed), tags=TAGS)
        calls = _Calls(self.full_name, signature, _form(packed))
        for key in ("CPU", "CUDA"):
            library.impl(name, calls.forward, key)
            library.impl(backward_name, calls.backward, key)
        torch.library.register_fake(f"{self._namespace}::{name}", calls.fake_forward, lib=library)
        torch.library.register_fake(f"{self._namespace}::{backward_name}", calls.fake_backward, lib=library)
        forward, backward = (getattr(getattr(torch.ops, self._namespace), each) for each in (name, backward_name))
        flops.count_forward(forward, calls.given)
        flops.count_backward(backward, calls.given, first=_BEFORE_INPUTS)
        for operator in (forward.default, backward.default):
            of_backward = operator is backward.default
            register(operator, Sharded(operator, variant, _form(packed), of_backward).strategy)
        torch.library.register_autograd(
            f"{self._namespace}::{name}",
            _Differentiation(calls, backward).backward,
            setup_context=calls.setup_context,
            lib=library,
        )
        torch.library.register_autograd(
            f"{self._namespace}::{backward_name}", calls.second, setup_context=calls.keep_for_second, lib=library
        )


class _Calls:
    """The implementations of one forward operator and its backward, which only differ in how lengths come."""

    def __init__(self, full_name: str, signature: Signature, form: str) -> None:
        self.full_name = full_name
        self.signature = signature
        self.form = form

    def given(self, arguments: tuple[object, ...]) -> Given:
        """Return the call that an operator is asked for."""
        return self.signature.given(self.full_name, self.form, arguments)

    def forward(self, *arguments: object) -> tuple[Tensor, Tensor]:
        """Run the call. Results that a graph owns must not alias the inputs, and never do."""
        if forward_ad._current_level >= 0 and training.carries_tangent(*arguments):  # torch would drop it
            raise CallError(
                f"{self.full_name}: compiled programs have no forward-mode derivative of attention; call it eagerly"
            )
        out, lse = dispatch.run(self.given(arguments))
        return out, lse

    def fake_forward(self, *arguments: object) -> tuple[Tensor, Tensor]:
        """Return results of the right shapes, for tracing. What depends on values is checked when the program runs."""
        given = self.given(arguments)
        at_trace.prepare(given, torch_state.on_gpu)
        q = given.q
        out = q.new_empty((*q.shape[:-1], value_columns(given.v)), dtype=out_dtype_of(q.dtype, given.out_dtype))
        both = (2,) if self.signature.max_logits else ()
        lse_shape: tuple[int, ...]
        if given.form == "varlen":
            lse_shape = (q.shape[1], q.shape[0])
        elif given.layout == "bhsd":
            lse_shape = (q.shape[0], q.shape[1], q.shape[2])
        else:
            lse_shape = (q.shape[0], q.shape[2], q.shape[1])
        lse = q.new_empty((*both, *lse_shape), dtype=lse_dtype_of(q.dtype))
        return out, lse.movedim(0, -1) if both else lse

    def setup_context(self, ctx: _OperatorContext, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the backward needs: the inputs, the output and its log-sum-exp."""
        self._refuse_undeclared(ctx, inputs)
        ctx.tensor_places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*output, *(inputs[i] for i in ctx.tensor_places))
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.set_materialize_grads(False)  # a program that does not use the log-sum-exp would fill zeros for it

    def _refuse_undeclared(self, ctx: _OperatorContext, inputs: tuple[object, ...]) -> None:
        own = self.signature.tensors
        for i, name in enumerate(own, first_own(self.form)):
            if ctx.needs_input_grad[i] and name not in self.signature.differentiable:
                raise CallError(
                    f"{self.full_name}: tensor '{name}' requires a gradient that its spec does not "
                    "declare; add 'grad: true' to the spec, or detach the tensor"
                )

    def backward(
        self, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: object
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v and of the declared tensors."""
        given, asked = self.given(arguments), self.signature.differentiable
        if not torch_state.on_gpu(given.q) or given.backend == "reference":
            return reference_gradients(dispatch.run, given, dout, dlse, asked)
        dq, dk, dv, gradients = training.differentiate(given, out, lse, dout, dlse, asked)
        return dq, dk, dv, *(gradients[name] for name in asked)

    def keep_for_second(self, ctx: _OperatorContext, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what a second derivative needs: the gradients of the results, and the inputs of the forward."""
        ctx.tensor_places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.tensor_places))
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]

    def second(self, ctx: _OperatorContext, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the backward's arguments, in plain torch; out and lse are taken for functions of the rest."""
        everything = list(ctx.others)
        for place, tensor in zip(ctx.tensor_places, ctx.saved_tensors, strict=True):
            everything[place] = tensor
        dout, dlse, out, lse, *arguments = everything
        given, asked = self.given(tuple(arguments)), self.signature.differentiable
        above = [torch.zeros_like(result) if t is None else t for t, result in ((dout, out), (dlse, lse))]
        inputs = [given.q, given.k, given.v, *(given.arguments[name] for name in asked)]
        gradients = iter(Plain(given, asked).second(inputs, above, cotangents))
        first = [None if t is None else gradient for t, gradient in ((dout, next(gradients)), (dlse, next(gradients)))]
        return (*first, None, None, *self.in_place(gradients, len(arguments)))

    def in_place(self, values: Iterator[Tensor], count: int) -> list[Tensor | None]:
        """Gradients of q, k, v and the declared tensors at the places of these, among ``count`` arguments."""
        gradients: list[Tensor | None] = [None] * count
        for i in range(3):
            gradients[i] = next(values)
        for i, name in enumerate(self.signature.tensors, first_own(self.form)):
            if name in self.signature.differentiable:
                gradients[i] = next(values)
        return gradients

    def fake_backward(
        self, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: object
    ) -> tuple[Tensor, ...]:
        """Return gradients of the right shapes, for tracing; they are contiguous."""
        given = self.given(arguments)
        at_trace.prepare(given, torch_state.on_gpu, "backward")
        inputs = [given.q, given.k, given.v, *(given.arguments[name] for name in self.signature.differentiable)]
        return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)


class _Differentiation:
    """The autograd formula of a forward operator: calls the backward operator and puts its results in place."""

    def __init__(self, calls: _Calls, operator: Callable[..., Sequence[Tensor]]) -> None:
        self._calls = calls
        self._operator = operator

    def backward(self, ctx: _OperatorContext, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return one gradient or None for each argument of the forward operator."""
        arguments = list(ctx.others)
        out, lse, *inputs = ctx.saved_tensors
        for place, tensor in zip(ctx.tensor_places, inputs, strict=True):
            arguments[place] = tensor
        gradients = iter(self._operator(dout, dlse, out, lse, *arguments))
        return tuple(self._calls.in_place(gradients, len(arguments)))


_libraries: dict[str, torch.library.Library] = {}
_operators: dict[tuple[str, str, str, str], tuple[str, _Operators]] = {}


def operators_of(variant: str, package: str | None = None) -> tuple[str, str, Signature]:
    """Return namespace, name and signature of a variant's operators, which are defined at the first use.

    A variant that was built again with other arguments gets operators of another name, since torch keeps the first.
    """
    register_waiting()
    resolved = registry.find(variant, package)
    return _defined(resolved, *_place_of(resolved))


def _place_of(resolved: Resolved) -> tuple[str, str]:
    """Namespace and name of the operators of a variant."""
    return resolved.namespace or namespace_of(resolved.package), resolved.operator


def _defined(resolved: Resolved, namespace: str, name: str) -> tuple[str, str, Signature]:
    """Define the operators of a variant unless they are, and return their place and signature."""
    schema = schema_of(resolved.variant, packed=True)
    with LOCK:
        known = _operators.get((namespace, name, resolved.full_name, schema))
        if known is None:
            others = sum(key[:2] == (namespace, name) for key in _operators)
            chosen = name if not others else f"{name}__{others + 1}"
            library = _libraries.get(namespace)
            if library is None:
                library = _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
            with defining():
                made = _Operators(library, resolved.full_name, resolved.variant, chosen)
            known = _operators[namespace, name, resolved.full_name, schema] = chosen, made
    return namespace, known[0], known[1].signature


def define(variants: Sequence[str]) -> tuple[str, ...]:
    """Define the operators of these variants, or of all that can be read, and return ``namespace::name`` of each."""
    if not variants:
        variants = [f"{p.name}/{name}" for _, p in registry.packages() for name in p.variants if p.kernels(name)]
    for variant in variants:
        if not isinstance(variant, str):
            raise CallError(f"a variant is given by its name, got {type(variant).__name__}")
    places = (operators_of(variant)[:2] for variant in dict.fromkeys(variants))
    return tuple(f"{namespace}::{name}" for namespace, name in places)


def define_named(namespace: str, operator: str) -> bool:
    """Define the operators of the variant to which one belongs, by its namespace and name, and return True; False while
    this thread defines others. Raises NoKernelError, with what to do, for a variant that this process does not know.
    """
    if getattr(BUSY, "defining", False):
        return False
    name = operator
    for suffix in ("__backward", INTO, *filter(None, _SUFFIXES.values())):
        name = name.removesuffix(suffix)
    asked = [f"{package.name}/{name}" for _, package in registry.packages() if name in package.variants]
    for candidate in (f"{NO_PACKAGE}/{name}", name, *asked):
        try:
            resolved = registry.find(candidate)
        except CallError:  # among them NoKernelError, and names that are ambiguous
            continue
        if _place_of(resolved) == (namespace, name):
            _defined(resolved, namespace, name)
            return True
    preset = registry.preset(name) if namespace == SHARED_NAMESPACE else None
    if preset is not None:  # which packages have, so that its own operators are theirs
        _defined(registry.find(registry.declare(preset)), namespace, name)
        return True
    package = namespace.removeprefix("attngen_installed_").removeprefix("attngen_")
    if namespace == SHARED_NAMESPACE:
        remedy = "make the variant known first, by attngen.variant with the same definition"
    else:
        remedy = f"build the spec of package '{package}', or attngen.load it, or call define_operators() of its wheel"
    known = sorted({f"{owner.name}/{variant}" for _, owner in registry.packages() for variant in owner.variants})
    raise NoKernelError(f"no variant '{name}' is known; {remedy}. Built: {', '.join(known) or 'nothing'}")


@torch.compiler.assume_constant_result
def _refuse_tangents() -> None:
    """Raise CallError inside of torch.func.jvp; runs at trace time."""
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    if any(transform.key() == torch._C._functorch.TransformType.Jvp for transform in transforms):
        raise CallError(
            "operators of compiled programs have no tangents, and torch would take 0: call torch.func.jvp outside of "
            "torch.compile"
        )


@torch.compiler.assume_constant_result
def _resolve(
    variant: str, package: str | None, given: tuple[str, ...], lse: bool
) -> tuple[str, str, tuple[tuple[str, Number | None], ...]]:
    """Return namespace and name of the operator, and its own arguments with their defaults; with ``lse`` the
    log-sum-exp is asked for. Raises CallError.

    Runs at trace time on plain values, and the trace takes the result as a constant.
    """
    namespace, name, signature = operators_of(variant, package)
    if lse:
        require_lse(registry.find(variant, package).variant)
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


def _resolved(given: Given) -> tuple[ModuleType, str, list[object]]:
    """Return the namespace of a variant's operators, their name, and the variant's own arguments in their order."""
    arguments = given.arguments
    variant = getattr(given.variant, "handle", given.variant)  # what attngen.variant made: a trace takes plain text
    if not isinstance(variant, str):
        raise CallError("a traced call must name its variant; a Variant as a value works in eager calls only")
    namespace, name, takes = _resolve(variant, given.package, tuple(arguments), given.return_lse is True)
    names = [argument for argument, _ in takes]
    if DROPOUT_P.name in arguments and DROPOUT_P.name not in names:
        check_rate(variant, arguments[DROPOUT_P.name])
    if RNG_STATE.name in names and arguments.get(RNG_STATE.name) is None:
        arguments = {**arguments, RNG_STATE.name: random_state(given.q)}
    return getattr(torch.ops, namespace), name, [arguments.get(argument, default) for argument, default in takes]


def call(given: Given) -> Results:
    """Call the operator of a variant; what is traced is this function and nothing below it. Raises CallError."""
    if torch.compiler.is_compiling():
        _refuse_tangents()
    else:
        if type(given.variant) is Variant:
            given = given._replace(variant=registry.declare(given.variant))
        refuse_mixed(given)
    operators, name, own = _resolved(given)
    arguments = arguments_of(given, own)
    if given.out is not None:
        out, lse = given.out, getattr(operators, name + INTO)(given.out, *arguments)
    else:
        out, lse = getattr(operators, name + _SUFFIXES[given.form])(*arguments)
    return (out, lse) if given.return_lse else out


def watched(given: Given) -> Results:
    """Run a call as an operator, or as it is where an operator would do less: transforms of torch.func, tangents, and
    gradients that only the reference has. Raises what an eager call would."""
    if DROPOUT_P.name in given.arguments:
        given = with_random_state(given)
    bound, resolved = bind_call(in_rows(given))
    if torch_state.transforms_active() or torch_state.is_tracing() or _does_more(given, resolved.variant):
        return dispatch.run(given)
    values = {name: value for name, value in bound.scalars.items() if given.arguments.get(name) is not None}
    return call(
        given._replace(
            softmax_scale=None if given.softmax_scale is None else bound.scale,
            max_seqlen_q=_integer(given.max_seqlen_q), max_seqlen_k=_integer(given.max_seqlen_k),
            num_splits=_integer(given.num_splits), split_size=_integer(given.split_size),
            arguments={**given.arguments, **values},
        )
    )  # fmt: skip


def _integer(value: Any) -> int | None:
    """A checked integer of any type as Python's, which operators take."""
    return None if value is None else int(value)


def _does_more(given: Given, variant: Variant) -> bool:
    """Whether an eager call has a derivative that its operator lacks."""
    tensors = [value for value in (*tensors_of(given), *given.arguments.values()) if isinstance(value, Tensor)]
    if forward_ad._current_level >= 0 and training.carries_tangent(*tensors):
        return True
    if any(isinstance(given.arguments.get(scalar.name), Tensor) for scalar in variant.scalars):
        return True
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return False
    graded = {id(t) for t in (given.q, given.k, given.v)}
    graded |= {id(given.arguments.get(name)) for name in Signature.of(variant).differentiable}
    return given.form == "paged" or any(t.requires_grad and id(t) not in graded for t in tensors)
