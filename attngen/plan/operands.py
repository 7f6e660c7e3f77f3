"""The dtype of each matrix of a kernel, derived from the spec in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields

from attngen.arch import Arch
from attngen.dtypes import PROBABILITY_DTYPE, QUANTIZED_DTYPES, REGISTER_BYTES, DType, dtype
from attngen.schema.kernel_spec import KernelSpec

_WARPGROUP_ROWS_PER_THREAD = 2  # 64 rows x n columns over 128 threads: n / 2 elements of each


@dataclass(frozen=True, slots=True)
class Operands:
    """Dtypes of the matrices that a kernel reads (q, k, v, dout), multiplies again (p, ds), accumulates (accumulator)
    and writes (the others).

    A forward does not use those of a backward.
    """

    q: DType
    k: DType
    v: DType
    p: DType
    out: DType
    dout: DType
    ds: DType
    dq: DType
    dk: DType
    dv: DType
    accumulator: DType

    def of(self, name: str) -> DType:
        """Return the dtype of a matrix by its name; AttributeError if there is none."""
        dtype: DType = getattr(self, name)
        return dtype

    def shared(self, *names: str) -> DType:
        """Return the dtype that several matrices share; ValueError if a schedule that needs that was given others."""
        dtypes = {name: self.of(name) for name in names}
        if len(set(dtypes.values())) > 1:
            listed = ", ".join(f"{name} {row.name}" for name, row in dtypes.items())
            raise ValueError(f"these operands must have one dtype: {listed}")
        return self.of(names[0])

    def alike(self, *names: str) -> bool:
        """Whether several matrices have one dtype."""
        return len({self.of(name) for name in names}) == 1

    def bytes_of(self, *names: str) -> int:
        """Return the bytes of an element of several matrices; ValueError where they differ."""
        sizes = {self.of(name).bytes for name in names}
        if len(sizes) > 1:
            raise ValueError(f"elements of {', '.join(names)} must have as many bytes")
        return sizes.pop()

    def to_dict(self) -> dict[str, str]:
        """Return the JSON form of the manifest: names of dtypes."""
        return {field.name: self.of(field.name).name for field in fields(self)}


#: Dtype of the products of split-KV kernels where K and V have 8 bits: it holds every number of 8 bits.
_WIDENED = "fp16"


def operands_of(spec: KernelSpec) -> Operands:
    """Return the dtypes of a spec's kernel; KeyError for one that attngen does not know."""
    element, kv = dtype(spec.dtype), dtype(spec.kv_dtype or spec.dtype)
    out = dtype(spec.out_dtype or QUANTIZED_DTYPES.get(spec.dtype, spec.dtype))
    p = element
    if kv.name in QUANTIZED_DTYPES and not spec.v_of_key:
        p = dtype(_WIDENED if spec.split_kv else PROBABILITY_DTYPE)
    return Operands(
        q=element, k=kv, v=kv, p=p, out=out, dout=out, ds=out, dq=out, dk=out, dv=out,
        accumulator=dtype("fp32"),
    )  # fmt: skip


def dot_precision(arch: Arch, *, fast_math: bool) -> str:
    """Precision of ``tl.dot`` for float32, by Triton's names.

    "ieee": FMAs. Else on tensor cores: each operand is the sum of parts, all pairs of which are multiplied but those
    whose products are below the rounding of float32: three products of two parts in TF32 ("tf32x3"), or six of three
    parts in bf16 ("bf16x6"). These take the same time, but splitting in two takes fewer instructions, and mma.sync
    waits for these in every warp; wgmma and tcgen05 read parts that all warps split together.
    """
    if not fast_math:
        return "ieee"
    return "bf16x6" if arch.wgmma or arch.tensor_memory else "tf32x3"


#: Bytes in shared memory of a float32 number that is kept for many products, in its parts.
_BYTES_OF_PARTS = {"ieee": 4, "tf32x3": 2 * 4, "bf16x6": 3 * 2}


def kept_bytes(arch: Arch, element: DType, *, fast_math: bool) -> int:
    """Bytes in shared memory of an element that ``tl.dot`` multiplies in every step."""
    return element.bytes if element.mma else _BYTES_OF_PARTS[dot_precision(arch, fast_math=fast_math)]


def fragment_registers(columns: int, element: DType) -> int:
    """Registers per thread of a fragment of 64 rows and ``columns`` columns of a warpgroup."""
    return columns // _WARPGROUP_ROWS_PER_THREAD * element.bytes // REGISTER_BYTES
