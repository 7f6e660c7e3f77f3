"""Attention of tensors in 16 bits on a kernel of 8 bits: they are quantized on the way, as SageAttention does.

Keys are taken relative to their mean first. That adds the same number to all logits of a row, which a softmax does not
see, and takes away what keys have in common, so that less is lost by rounding. The Hadamard transform spreads outliers.
Scales are those of a sample of the rows, where a kernel can take them from one, else of the largest magnitudes.

Source: Zhang et al., SageAttention, arXiv 2410.02367, section 4.2 (smoothing K); Shah et al., FlashAttention-3, arXiv
2407.08608, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attngen.errors import CallError, suggest
from attngen.lang.shifts import shifts_with_logits
from attngen.lang.variant import Variant
from attngen.runtime.arguments import arrays
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments.torch_state import is_compiling
from attngen.runtime.operations.quantize.arguments import in_rows
from attngen.runtime.operations.quantize.call import quantize_by_sample, quantize_centered
from attngen.runtime.registry.binding import find

if TYPE_CHECKING:
    from attngen.runtime.arguments.checked import Results

#: Values of ``quantize=`` of a call. "fp8": e4m3, a scale for each KV head of a batch entry.
FORMATS = ("fp8",)

_SIXTEEN = (torch.bfloat16, torch.float16)


def attend(
    call: Callable[..., Results], form: str, q: Tensor, k: Tensor, v: Tensor, *, variant: str | Variant,
    package: str | None, layout: str, softmax_scale: float | None, seqused_k: Tensor | None, return_lse: bool,
    **rest: object,
) -> Results:  # fmt: skip
    """Result of a call whose tensors are quantized first; the output has their dtype. Raises CallError."""
    if arrays.is_array(q):
        fields = {
            "q": q, "k": k, "v": v, "variant": variant, "package": package, "layout": layout,
            "softmax_scale": softmax_scale, "seqused_k": seqused_k, "return_lse": return_lse, **rest,
        }  # fmt: skip
        return arrays.serve(partial(attend, call, form), fields)
    _check(form, q, k, v, rest)
    rest = {name: value for name, value in rest.items() if not name.endswith("_descale")}
    dtype = q.dtype
    with torch.no_grad():
        centered = _may_shift(variant, package)
        if seqused_k is not None:
            length = in_rows(k, layout).shape[1]
            used = _used(seqused_k, length, layout)
            k, v = torch.where(used, k, 0), torch.where(used, v, 0)
            mean = _mean_of_used(k, seqused_k, layout) if centered and length else None
            eight = quantize_centered(q, k, v, layout=layout, k_mean=mean)
        else:
            grouped = not (is_compiling() or debugging.active()) and _takes_groups(q, v, variant, package, rest)
            eight, mean = quantize_by_sample(q, k, v, layout=layout, centered=centered, grouped=grouped)
    result = call(
        eight.q, eight.k, eight.v, variant=variant, package=package, layout=layout,
        softmax_scale=softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5, seqused_k=seqused_k,
        return_lse=return_lse, **eight.descales, **rest,
    )  # fmt: skip
    results: Sequence[Tensor] = result if return_lse else (result,)
    out, *lse = results
    out = out if out.dtype == dtype else out.to(dtype)
    if not lse:
        return out
    return out, lse[0] if mean is None else lse[0] + _taken(q, mean, softmax_scale, layout)


def _may_shift(variant: str | Variant, package: str | None) -> bool:
    """Whether keys may be taken relative to a vector."""
    if is_compiling():
        from attngen.runtime.operations.attention.quantized_trace import may_shift  # it brings a compiler

        return bool(may_shift(variant, package))
    return shifts_with_logits(find(variant, package).variant)


def _takes_groups(
    q: Tensor, v: Tensor, variant: str | Variant, package: str | None, rest: Mapping[str, object]
) -> bool:
    """Whether a kernel of the variant takes v in groups of keys."""
    if rest.get("backend") not in (None, "cuda") or rest.get("out_dtype") is not None:
        return False
    dims = q.shape[-1], v.shape[-1]
    return any(
        kernel.grouped_v and (kernel.head_dim_qk, kernel.head_dim_v) == dims and kernel.dtype_of("out").name == "bf16"
        for kernel in find(variant, package).kernels
    )


def _mean_of_used(k: Tensor, seqused_k: Tensor, layout: str) -> Tensor:
    """The mean of the keys that count of each batch entry and head, (batch, kv_heads, head_dim); other keys are 0."""
    rows = in_rows(k, layout)
    parts = (rows.shape[1] / seqused_k.clamp(min=1).float())[:, None, None]
    return (rows.mean(dim=1, dtype=torch.float32) * parts).to(k.dtype)


def _check(form: str, q: Tensor, k: Tensor, v: Tensor, rest: Mapping[str, object]) -> None:
    if form not in FORMATS:
        given = suggest(form, FORMATS) if isinstance(form, str) else ""
        raise CallError(f"quantize must be {' or '.join(map(repr, FORMATS))}, or None, got {form!r}{given}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in _SIXTEEN or tensor.dim() != 4:
            got = f"{tensor.dtype} with {tensor.dim()} axes" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CallError(f"quantize={form!r} takes tensors of four axes in bfloat16 or float16; {name} is {got}")
    for name in ("q_descale", "k_descale", "v_descale"):
        if rest.get(name) is not None:
            raise CallError(f"{name} is for tensors that are quantized already; quantize={form!r} makes the scales")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise CallError(f"quantize={form!r} has no backward; call it under torch.no_grad()")


def _used(seqused_k: Tensor, tokens: int, layout: str) -> Tensor:
    """Boolean mask of the keys that count, which broadcasts to k and v."""
    counts = torch.arange(tokens, device=seqused_k.device)[None] < seqused_k[:, None]
    return counts[:, :, None, None] if layout == "bshd" else counts[:, None, :, None]


def _taken(q: Tensor, mean: Tensor, softmax_scale: float | None, layout: str) -> Tensor:
    """Part of each row's logits that was removed with the mean of the keys: (batch, heads, seqlen_q)."""
    rows = q.transpose(1, 2) if layout == "bshd" else q
    groups = rows.float().unflatten(1, (mean.shape[1], -1))
    scale = rows.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return (groups @ mean.float()[:, :, None, :, None]).squeeze(-1).flatten(1, 2) * scale
