"""The variant that serves a call in another library's form: the first of several that a built kernel takes.

A specific variant (``causal``) comes before the general one that includes it (``window``, with run-time sides), so that
a user's own build of the presets is enough where possible.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attngen import resources
from attngen.errors import CallError, NoKernelError
from attngen.integrations.shared import catalogue, row_maxima
from attngen.integrations.shared.catalogue import variant
from attngen.lang.dropout import DROPOUT_P, MAX_RATE, RNG_STATE
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import ATTENTION_DTYPES
from attngen.runtime.arguments.latent_rows import latent_name, value_columns
from attngen.runtime.arguments.torch_state import is_traced
from attngen.runtime.autograd.training import asks_for_determinism
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.attention import entry as calls
from attngen.runtime.operations.attention import introspection
from attngen.runtime.operations.attention.dropout_state import random_state
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.lookup import registry

#: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k of a packed call.
Packing = tuple[Tensor, Tensor, int, int]


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a call, as ``attngen.attention_paged`` takes them."""

    page_table: Tensor
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None
    num_splits: int | None = None
    out: Tensor | None = None


#: False in the copy that a package carries, whose user builds nothing.
_IN_ATTNGEN = __name__ == "attngen.integrations.shared.choice"

#: No limit on a side of a window, as the variants with sides write it.
NO_LIMIT = -1


@dataclass(frozen=True, slots=True)
class VariantCandidate:
    """A variant that computes what a call asks for, and the variant's own arguments.

    ``late`` returns further arguments: tensors that are made only when the candidate is tried. ``finish`` computes the
    result from (out, lse) where the variant computes only a part of what is asked for.
    """

    variant: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    late: Callable[[], Mapping[str, Any]] | None = None
    finish: Callable[[Tensor, Tensor], Tensor] | None = None

    def own(self) -> Mapping[str, Any]:
        """Return all arguments of the variant."""
        return self.arguments if self.late is None else {**self.arguments, **self.late()}


def with_dropout(
    candidates: Sequence[VariantCandidate], rate: float, rng_state: Tensor | None = None
) -> Sequence[VariantCandidate]:
    """Return candidates that also drop probabilities at a rate; at a rate of 0 the candidates as they are.

    ``rng_state`` holds seed and offset, (2,) int64; without it each call draws its own. Raises CallError for a rate
    below 0, and for one of 1 or more.
    """
    if not rate:
        return candidates
    if not 0 < rate <= MAX_RATE:
        raise CallError(f"the rate of dropout must be at least 0 and below 1, got {rate}")
    given = {DROPOUT_P.name: rate} if rng_state is None else {DROPOUT_P.name: rate, RNG_STATE.name: rng_state}
    return [
        replace(each, variant=each.variant + catalogue.DROPOUT, arguments={**each.arguments, **given})
        for each in candidates
    ]


#: Candidate that served the last call of a kind, by what a kernel is built for. A hint: the others are still tried.
_LAST: RecentCache[int] = RecentCache(512)


def attend(
    candidates: Sequence[VariantCandidate],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: str,
    packing: Packing | None = None,
    pages: Pages | None = None,
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    or_reference: bool = False,
    deterministic: bool = False,
    descales: Mapping[str, Tensor] | None = None,
    heads_first: bool = False,
    rows: bool = False,
) -> Any:
    """Run the first candidate that a kernel takes: q (b, s, h, d), or (b, h, s, d) if ``heads_first``, or (total, h, d)
    with ``packing``. With ``pages`` k and v are (pages, page_size, hk, d), and ``seqused_k`` is needed.

    Returns what ``attngen.attention`` returns; with ``rows``, of a dense call, the output, the log-sum-exp and
    the largest logit of each row. On the CPU, and with ``backend='reference'``, the first candidate runs
    on the reference, built or not, traced or not. Candidates with dropout share one state of random numbers, drawn
    here. Raises NoKernelError, which names the shipped ``spec`` that builds the candidates; an eager call
    ``or_reference`` warns instead, with the same text, and runs on the reference. With ``deterministic``, gradients
    have the same bits on every run. ``descales`` are the scales of quantized tensors, by their keywords.
    """
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "seqused_k": seqused_k, "return_lse": return_lse, "backend": backend,
        "deterministic": deterministic, "rows": rows, **(descales or {}),
        **({"layout": "bhsd"} if heads_first else {}),
    }  # fmt: skip
    if DROPOUT_P.name in candidates[0].arguments and RNG_STATE.name not in candidates[0].arguments:
        state = {RNG_STATE.name: random_state(q)}
        candidates = [replace(each, arguments={**each.arguments, **state}) for each in candidates]
    traced = is_traced(q)
    if not on_gpu(q) or backend == "reference":
        only = candidates[0]
        known = _declared(only.variant) if traced else variant(only.variant)
        return _call(only, known, q, k, v, packing, pages, options)
    if traced:
        learns, ordered = _learns(candidates, q, k, v), deterministic or asks_for_determinism() == 2
        names = tuple(candidate.variant for candidate in candidates)
        layout = _layout(packing, pages)
        dtype, kv_dtype = _dtype(q), latent_name(v) or _dtype(v)
        built = _head_dims(names)
        dims = _number(q.shape[-1], built), _number(value_columns(v), built)
        place, name = _built_at_trace(names, dtype, kv_dtype, *dims, layout, q.device.index, spec, learns, ordered)
        return _call(candidates[place], name, q, k, v, packing, pages, options)
    kind: tuple[Any, ...] | None = None
    last, first = None, 0
    if len(candidates) > 1:
        learns, ordered = _learns(candidates, q, k, v), deterministic or asks_for_determinism() == 2
        layout = _layout(packing, pages)
        kind = _kind(candidates, q, v, layout, learns, ordered)
        last = _LAST.get(kind)
        first = last or 0
        if last is None and learns:
            first = _with_backward(candidates, q, v, layout, ordered)
    error: NoKernelError | None = None
    for place in (first, *(i for i in range(len(candidates)) if i != first)):
        chosen = candidates[place]
        try:
            result = _call(chosen, variant(chosen.variant), q, k, v, packing, pages, options)
        except NoKernelError as refused:
            error = refused
            continue
        if kind is not None and place != last:
            _LAST.put(kind, place)
        return result
    refusal = none_takes(candidates, spec, error)
    if not or_reference:
        raise refusal
    warnings.warn(f"attention runs on the slow reference: {refusal}", RuntimeWarning, stacklevel=3)
    options["backend"] = "reference"
    return _call(candidates[0], variant(candidates[0].variant), q, k, v, packing, pages, options)


def _learns(candidates: Sequence[VariantCandidate], *tensors: Tensor) -> bool:
    """Whether a call is to be differentiated."""
    own = candidates[0].arguments.values()
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (*tensors, *own))


def reason_against(
    candidate: VariantCandidate,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: str,
    softmax_scale: float | None = None,
    backend: str | None = None,
) -> str | None:
    """The reason why a dense call cannot run, as in ``attend``, or None. Launches nothing, and draws nothing."""
    registry.refresh_if_built()
    try:
        explanation = introspection.explain(
            q, k, v, variant=variant(candidate.variant), softmax_scale=softmax_scale, backend=backend,
            **candidate.own(),
        )  # fmt: skip
    except CallError as error:
        return str(error)
    if explanation.runs != "no kernel":
        return None
    return str(none_takes((candidate,), spec, NoKernelError(explanation.reason)))


def on_gpu(tensor: Tensor) -> bool:
    """Whether kernels, not the reference, compute on this tensor."""
    return tensor.is_cuda


def _call(
    candidate: VariantCandidate,
    chosen: str | Variant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing | None,
    pages: Pages | None,
    options: Mapping[str, Any],
) -> Any:
    if candidate.finish is not None:
        options = {**options, "return_lse": True}
    result: Any
    own = candidate.own()
    options = {**options}
    if options.pop("rows"):
        del options["return_lse"]
        return row_maxima.attention(q, k, v, variant=chosen, **options, **own)
    if pages is not None:
        rest = {**options, **own}
        del rest["deterministic"], rest["seqused_k"]
        result = calls.attention_paged(
            q, k, v, pages.page_table, options["seqused_k"], cu_seqlens_q=pages.cu_seqlens_q,
            max_seqlen_q=pages.max_seqlen_q, num_splits=pages.num_splits, out=pages.out, variant=chosen, **rest,
        )  # fmt: skip
    elif packing is None:
        result = calls.attention(q, k, v, variant=chosen, **options, **own)
    else:
        starts_q, starts_k, longest_q, longest_k = packing
        result = calls.attention_varlen(
            q, k, v, starts_q, starts_k, longest_q, longest_k, variant=chosen, **options, **own
        )
    return result if candidate.finish is None else candidate.finish(*result)


def _layout(packing: Packing | None, pages: Pages | None) -> str:
    """Return the layout of the kernels that a call needs."""
    return "paged" if pages is not None else "dense" if packing is None else "varlen"


def _kind(
    candidates: Sequence[VariantCandidate], q: Tensor, v: Tensor, layout: str, learns: bool, ordered: bool
) -> tuple[Any, ...]:
    names = tuple(candidate.variant for candidate in candidates)
    ordering = ordered if learns else None
    return (names, q.dtype, v.dtype, q.shape[-1], v.shape[-1], layout, ordering, q.device.index, registry.generation)


def _with_backward(candidates: Sequence[VariantCandidate], q: Tensor, v: Tensor, layout: str, ordered: bool) -> int:
    """Return the first candidate that can be differentiated, or else the first."""
    places = (
        i for i, candidate in enumerate(candidates) if has_backward(candidate.variant, q, v, layout, ordered=ordered)
    )
    return next(places, 0)


def none_takes(candidates: Sequence[VariantCandidate], spec: str, error: NoKernelError | None) -> NoKernelError:
    """Return the error that says which variants were tried, why the last one failed, and what to build."""
    tried = ", ".join(candidate.variant for candidate in candidates)
    lines = [f"no built kernel takes this call; variants that would serve it: {tried}"]
    if error is not None:
        lines.append(str(error))
    if not _IN_ATTNGEN:
        return NoKernelError("\n".join(lines))
    if any(catalogue.is_shipped(candidate.variant) for candidate in candidates):
        lines.append(f"'attngen build {shipped(spec)}' builds the shipped kernels of these variants")
    else:  # of dropout only: every other variant is in a spec
        name = candidates[0].variant
        plain = name.removesuffix(catalogue.DROPOUT)
        lines.append(f"no shipped spec has '{name}': declare it in your own, as {plain} with 'dropout: true'")
    return NoKernelError("\n".join(lines))


def shipped(spec: str) -> str:
    """Path of the spec of an integration, for messages."""
    return str(resources.specs_dir() / "integrations" / f"{spec}.yaml")


def kernels_of(
    name: str, *, direction: str, dtype: str, head_dim_qk: int, head_dim_v: int, layout: str, kv_dtype: str = ""
) -> list[tuple[str, Kernel]]:
    """Return the kernels that compute exactly this variant at these dimensions, each with its package's name."""
    wanted = variant(name)
    kernels = []
    for _, package in registry.packages():
        if name not in package.sources:
            continue
        kernels += [
            (package.name, kernel)
            for kernel in package.kernels(name)
            if (kernel.direction, kernel.dtype, kernel.layout) == (direction, dtype, layout)
            and (kernel.head_dim_qk, kernel.head_dim_v) == (head_dim_qk, head_dim_v)
            and kernel.dtype_of("k").name == (kv_dtype or dtype)
            and kernel.variant.definition == wanted.definition
        ]
    return kernels


def has_backward(name: str, q: Tensor, v: Tensor, layout: str = "dense", *, ordered: bool) -> bool:
    """Whether this device has a kernel for the gradients of a call, with a fixed order of sums if ``ordered``.

    q and v are (…, head_dim).
    """
    registry.refresh_if_built()
    key = (name, q.dtype, q.shape[-1], v.shape[-1], layout, q.device.index, ordered, registry.generation)
    known = _BACKWARD.get(key)
    if known is None:
        capability = drivers.current().capability(q.device.index or 0)
        backward_kernels = kernels_of(
            name, direction="backward", dtype=_dtype(q), head_dim_qk=q.shape[-1],
            head_dim_v=v.shape[-1], layout=layout,
        )  # fmt: skip
        known = any(
            kernel.arch.runs_on(capability) and (kernel.reproducible or not ordered) for _, kernel in backward_kernels
        )
        known = known or on_demand.maker is not None
        _BACKWARD.put(key, known)
    return known


def _dtype(q: Tensor) -> str:
    """Return the name of a dtype in manifests; one that no kernel has stays as it is, and the call refuses it."""
    return ATTENTION_DTYPES.get(q.dtype, str(q.dtype))


_BACKWARD: RecentCache[bool] = RecentCache(512)


@torch.compiler.assume_constant_result
def _head_dims(names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the head dimensions that any of these variants is built for."""
    kernels = [k for _, package in registry.packages() for name in names for k in package.kernels(name)]
    return tuple(sorted({dim for kernel in kernels for dim in (kernel.head_dim_qk, kernel.head_dim_v)}))


def _number(size: int, known: tuple[int, ...]) -> int:
    """Return a size, which may be a symbol in a trace, as the known number that it equals; 0 if it equals none."""
    for number in known:
        if size == number:
            return number
    return 0


@torch.compiler.assume_constant_result
def _declared(name: str) -> str:
    """Full name by which a trace calls a variant of the catalogue, whether it is built or not."""
    return registry.declare(variant(name))


@torch.compiler.assume_constant_result
def _built_at_trace(
    names: tuple[str, ...],
    dtype: str,
    kv_dtype: str,
    head_dim_qk: int,
    head_dim_v: int,
    layout: str,
    index: int | None,
    spec: str,
    learns: bool,
    ordered: bool,
) -> tuple[int, str]:
    """Return the place of the candidate that a trace calls, and its full name. Runs on plain values.

    A trace that ``learns`` takes the first candidate whose package can also differentiate it, if there is one, with a
    fixed order of sums if ``ordered``. What this GPU cannot run comes last, so that the call says why.
    """
    registry.refresh_if_built()
    form: dict[str, Any] = {
        "dtype": dtype, "kv_dtype": kv_dtype, "head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v, "layout": layout
    }  # fmt: skip
    capability = None
    if torch.cuda.is_available():  # a tensor of a trace may be on a GPU that is not there
        capability = drivers.current().capability(index or 0)
    turns = [("backward", capability)] if learns else []
    for direction, runs_on in (*turns, ("forward", capability), ("forward", None)):
        for place, name in enumerate(names):
            packages = _packages_of(name, runs_on, direction, form, ordered)
            if packages:
                return place, f"{packages[0]}/{name}"
    if on_demand.maker is not None:  # the program has the kernel compiled when it first runs
        return 0, _declared(names[0])
    raise none_takes([VariantCandidate(name) for name in names], spec, None)


def _packages_of(
    name: str, capability: int | None, direction: str, form: Mapping[str, Any], ordered: bool
) -> list[str]:
    """Return the packages that have a forward of a variant, and its backward where ``direction`` says so.

    Kernels for GPUs of another ``capability`` do not count, if it is given.
    """

    def built(direction: str) -> list[tuple[str, Kernel]]:
        kernels = kernels_of(name, direction=direction, **form)
        return [built_one for built_one in kernels if capability is None or built_one[1].arch.runs_on(capability)]

    packages = [package for package, _ in built("forward")]
    trained = {
        package for package, kernel in built(direction) if direction == "forward" or kernel.reproducible or not ordered
    }
    return [package for package in packages if package in trained]
