"""The arguments of a call that quantizes, and their checks. What tensors hold is not read."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from attngen.errors import CallError, suggest
from attngen.runtime.arguments.checked import LAYOUTS, refuse_unreadable
from attngen.runtime.arguments.shapes import check_rank, index_vector
from attngen.runtime.operations.shared.operands import check_rotary
from attngen.runtime.operations.shared.records import Fields, Flag, OptionalTensor, TensorArgument, Text

#: Extent of a scale. The numbers are tokens: a block of so many, of one head.
GRANULARITIES: tuple[str | int, ...] = ("tensor", "head", 64, 128, "token")

#: dtypes of inputs and of rotary tables, and of results with the largest number of each.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = {dtype: float(torch.finfo(dtype).max) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}

#: The least scale, the smallest normal float32: its reciprocal is finite.
LEAST_SCALE = 2.0**-126


class Quantize(NamedTuple):
    """A call as its caller made it: see ``quantize``. Its operator takes a granularity as text.

    ``k_mean`` (batch, kv_heads, head_dim), of k's dtype and contiguous: what is subtracted from each key first. Only
    ``quantized`` gives it.
    """

    q: TensorArgument
    k: TensorArgument
    v: TensorArgument
    granularity: Annotated[str | int, "str"]
    hadamard: Flag
    signs: OptionalTensor
    seed: Annotated[int, "int"]
    layout: Text
    rotary_cos: OptionalTensor
    rotary_sin: OptionalTensor
    rotary_interleaved: Flag
    rotary_offsets: OptionalTensor
    dtype: Annotated[torch.dtype, "ScalarType"]
    k_mean: OptionalTensor = None


FIELDS = Fields(Quantize)


@dataclass(frozen=True, slots=True)
class QuantizeSizes:
    """Sizes of a call, and the shape of each scale by the name of its tensor."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim_qk: int
    head_dim_v: int
    scales: dict[str, tuple[int, ...]]


def check(call: Quantize) -> QuantizeSizes:
    """Check shapes, dtypes and devices. Raises CallError."""
    refuse_unreadable({name: getattr(call, name) for name in FIELDS.tensors})
    if not isinstance(call.layout, str) or call.layout not in LAYOUTS:
        raise CallError(
            f"layout must be one of {', '.join(LAYOUTS)}, got {call.layout!r}{suggest(str(call.layout), LAYOUTS)}"
        )
    if type(call.granularity) not in (str, int) or call.granularity not in GRANULARITIES:
        names = [str(one) for one in GRANULARITIES]
        raise CallError(
            f"granularity must be one of {', '.join(map(repr, GRANULARITIES))}, got {call.granularity!r}"
            f"{suggest(str(call.granularity), names)}"
        )
    if not isinstance(call.dtype, torch.dtype) or call.dtype not in LARGEST:
        raise CallError(f"dtype must be one of {', '.join(map(str, LARGEST))}, got {call.dtype}")
    sizes = _check_shapes(call)
    _check_signs(call)
    _check_rotary(call, sizes)
    return sizes


def _check_shapes(call: Quantize) -> QuantizeSizes:
    q, k, v = call.q, call.k, call.v
    middle = "seqlen x heads" if call.layout == "bshd" else "heads x seqlen"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(name, tensor, 4, f"batch x {middle} x head_dim")
        if tensor.dtype not in DTYPES:
            raise CallError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, DTYPES))}")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise CallError(f"q is {q.dtype} on {q.device}, but {name} is {tensor.dtype} on {tensor.device}")
    (b, sq, h, d), (bk, sk, hk, dk), (bv, sv, hv, dv) = (in_rows(tensor, call.layout).shape for tensor in (q, k, v))
    if not b == bk == bv:
        raise CallError(f"q has {b} batch entries, but k has {bk} and v has {bv}")
    if dk != d or not d or not dv:
        raise CallError(f"q and k must have one head_dim, and v must have one; got {d}, {dk} and {dv}")
    if (sk, hk) != (sv, hv):
        raise CallError(f"k has {sk} tokens of {hk} heads, but v has {sv} of {hv}")
    if not hk or h % hk:
        raise CallError(f"q has {h} heads, which is not a multiple of k's {hk}")
    scales: dict[str, tuple[int, ...]]
    if call.granularity == "tensor":
        scales = dict.fromkeys("qkv", ())
    elif call.granularity == "head":
        scales = dict.fromkeys("qkv", (b, hk))
    elif call.granularity == "token":
        scales = {"q": (b, h, sq), "k": (b, hk, sk), "v": (b, hk)}
    else:
        tiles_q, tiles_k = (-(-length // call.granularity) for length in (sq, sk))
        scales = {"q": (b, h, tiles_q), **dict.fromkeys("kv", (b, hk, tiles_k))}
    return QuantizeSizes(b, h, hk, sq, sk, d, dv, scales)


def _check_signs(call: Quantize) -> None:
    if not isinstance(call.hadamard, bool):
        raise CallError(f"hadamard must be True or False, got {call.hadamard!r}")
    if not isinstance(call.seed, int) or isinstance(call.seed, bool):
        raise CallError(f"seed must be an integer, got {call.seed!r}")
    if not -(2**63) <= call.seed < 2**63:
        raise CallError(f"seed must fit 64 bits, got {call.seed}")
    signs = call.signs
    if signs is None:
        return
    if not call.hadamard:
        raise CallError("signs are for the Hadamard transform; leave them out, or pass hadamard=True")
    if not isinstance(signs, Tensor):
        raise CallError(f"signs must be a torch.Tensor, got {type(signs).__name__}")
    if tuple(signs.shape) != (call.q.shape[-1],) or signs.dtype.is_complex or signs.dtype == torch.bool:
        raise CallError(
            f"signs must hold 1 or -1 for each of {call.q.shape[-1]} numbers of a row, got {signs.dtype} of shape "
            f"{tuple(signs.shape)}"
        )
    if signs.device != call.q.device:
        raise CallError(f"signs are on {signs.device}, but q is on {call.q.device}")


def _check_rotary(call: Quantize, sizes: QuantizeSizes) -> None:
    """Raise CallError unless the tables of a rotation fit each other and the rows, and offsets the sequences."""
    cos, offsets, device = call.rotary_cos, call.rotary_offsets, call.q.device
    check_rotary(cos, call.rotary_sin, call.rotary_interleaved, device, sizes.head_dim_qk, DTYPES)
    if offsets is not None:
        if cos is None:
            raise CallError("rotary_offsets are for a rotation; pass rotary_cos and rotary_sin, or leave them out")
        if index_vector("rotary_offsets", offsets, device).shape[0] != sizes.batch:
            raise CallError(f"rotary_offsets must have shape ({sizes.batch},), got {tuple(offsets.shape)}")
    if cos is not None and not cos.shape[0]:
        raise CallError("rotary_cos has no row")


def in_rows(tensor: Tensor, layout: str) -> Tensor:
    """View of a tensor as (batch, seqlen, heads, head_dim)."""
    return tensor if layout == "bshd" else tensor.transpose(1, 2)


def transform_size(head_dim: int) -> int:
    """Size of the Hadamard transform: the largest power of two that divides ``head_dim``."""
    return head_dim & -head_dim


def random_signs(seed: int, head_dim: int) -> int:
    """Signs of a seed: bit i is set where number i of a row changes its sign.

    The same in every version of Python: of ``random`` it is ``random()`` whose numbers stay as they are.
    """
    generator = random.Random(seed)
    return sum((generator.random() < 0.5) << i for i in range(head_dim))
