"""Specs of the kernels that come with those of attention: append, merge, quantize, widen, select, make block masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attngen.arch import ARCHES
from attngen.dtypes import HEAD_DIMS, LATENT_ROWS, QUANTIZED_DTYPES
from attngen.lang.blocks import BLOCK_MASK as BLOCK_MASK_TENSOR
from attngen.lang.variant import Variant
from attngen.operations import (
    APPEND,
    APPEND_VARIANT,
    BLOCK_MASK,
    BLOCK_MASK_VARIANT,
    BLOCK_SCORES,
    MERGE,
    MERGE_VARIANT,
    QUANTIZE,
    QUANTIZE_VARIANT,
    SCORES,
    TOPK,
    TOPK_VARIANT,
    WIDEN,
    WIDEN_VARIANT,
)
from attngen.schema.kernel_spec import KernelSpec

#: dtypes that kernels quantize.
_UNQUANTIZED = ("bf16", "fp16")

#: Scores of a row that the kernel for short rows selects from, at most.
SHORT_ROWS = 2048

#: Head dims of which kernels quantize whole tiles.
QUANTIZED_IN_TILES = (64, 128)


def appends(kernels: Sequence[KernelSpec]) -> tuple[KernelSpec, ...]:
    """Kernels that append to the caches that kernels read: one for each arch, dtype of new rows and dtype of the cache
    of those with pages. A cache of quantized pages gets rows of any dtype that is quantized.

    No entry of a spec asks for them. Their head dimensions are the largest that they have to serve.
    """
    by_key: dict[tuple[str, str, str | None], KernelSpec] = {}
    for kernel in kernels:
        if kernel.layout != "paged" or kernel.direction in SCORES:
            continue
        quantized = kernel.dtype in QUANTIZED_DTYPES
        for dtype in _UNQUANTIZED if quantized else (kernel.dtype,):
            kv_dtype = kernel.dtype if quantized else kernel.kv_dtype
            key = kernel.arch, dtype, kv_dtype
            first = by_key.get(key) or KernelSpec(
                package=kernel.package, variant=Variant(APPEND_VARIANT), arch=kernel.arch, head_dim_qk=0, head_dim_v=0,
                dtype=dtype, kv_dtype=kv_dtype, layout=kernel.layout, direction=APPEND, backend="cuda",
                spec_file=kernel.spec_file, location=kernel.location, places=kernel.places,
            )  # fmt: skip
            by_key[key] = replace(
                first,
                head_dim_qk=max(first.head_dim_qk, kernel.head_dim_qk),
                head_dim_v=max(first.head_dim_v, kernel.head_dim_v),
            )
    return tuple(by_key.values())


def mergers(kernels: Sequence[KernelSpec]) -> tuple[KernelSpec, ...]:
    """The kernels that merge results over two sets of keys, such as a prefix that sequences share and their own pages:
    one for each arch and dtype of outputs of kernels with pages.

    No entry of a spec asks for them. Head dims are numbers of their calls.
    """
    by_key: dict[tuple[str, str], KernelSpec] = {}
    for kernel in kernels:
        if kernel.layout != "paged" or kernel.direction in SCORES:
            continue
        dtype = QUANTIZED_DTYPES.get(kernel.dtype, kernel.dtype)
        by_key.setdefault(
            (kernel.arch, dtype),
            KernelSpec(
                package=kernel.package, variant=Variant(MERGE_VARIANT), arch=kernel.arch, head_dim_qk=1, head_dim_v=1,
                dtype=dtype, direction=MERGE, backend="cuda", spec_file=kernel.spec_file, location=kernel.location,
                places=kernel.places,
            ),
        )  # fmt: skip
    return tuple(by_key.values())


def quantizers(kernels: Sequence[KernelSpec]) -> tuple[KernelSpec, ...]:
    """Return the kernels that quantize the operands of kernels in 8 bits: for each arch of those, one for each dtype
    that ``attngen.quantize`` reads with a kernel, and one for each head dim that has a kernel of its own there.

    No entry of a spec asks for them. Their head dimensions are the largest that they have to serve.
    """
    by_arch: dict[str, KernelSpec] = {}
    own: dict[str, set[int]] = {}
    for kernel in kernels:
        if kernel.dtype in QUANTIZED_DTYPES and kernel.direction not in SCORES:
            first = by_arch.get(kernel.arch) or KernelSpec(
                package=kernel.package, variant=Variant(QUANTIZE_VARIANT), arch=kernel.arch, head_dim_qk=0,
                head_dim_v=0, dtype=_UNQUANTIZED[0], direction=QUANTIZE, backend="cuda", spec_file=kernel.spec_file,
                location=kernel.location, places=kernel.places,
            )  # fmt: skip
            by_arch[kernel.arch] = replace(
                first,
                head_dim_qk=max(first.head_dim_qk, kernel.head_dim_qk),
                head_dim_v=max(first.head_dim_v, kernel.head_dim_v),
            )
            if ARCHES[kernel.arch].wgmma and kernel.head_dim_qk == kernel.head_dim_v in QUANTIZED_IN_TILES:
                own.setdefault(kernel.arch, set()).add(kernel.head_dim_qk)
    general = [replace(kernel, dtype=dtype) for kernel in by_arch.values() for dtype in _UNQUANTIZED]
    return tuple(general) + tuple(
        replace(kernel, head_dim_qk=head_dim, head_dim_v=head_dim, loads="descriptor")
        for kernel in general
        for head_dim in sorted(own.get(kernel.arch, ()))
    )


def wideners(kernels: Sequence[KernelSpec]) -> tuple[KernelSpec, ...]:
    """Return the kernels that widen caches in 8 bits, so that many queries in 16 bits take a kernel whose keys have 16,
    too: one for each arch and dtype of queries of which there are kernels of both kinds.

    No entry of a spec asks for them. Their head dimensions are the largest that they have to serve.
    """

    def serves(kernel: KernelSpec) -> tuple[Any, ...]:
        dims = kernel.head_dim_qk, kernel.head_dim_v
        return kernel.arch, kernel.variant.name, kernel.dtype, kernel.layout, dims

    ordinary = {
        serves(kernel) for kernel in kernels
        if kernel.direction == "forward" and kernel.kv_dtype is None
        and (not kernel.split_kv or max(kernel.head_dim_qk, kernel.head_dim_v) > HEAD_DIMS[-1])
    }  # fmt: skip
    by_key: dict[tuple[str, str], KernelSpec] = {}
    for kernel in kernels:
        if kernel.kv_dtype in (None, *LATENT_ROWS) or kernel.dtype in QUANTIZED_DTYPES or kernel.v_of_key:
            continue
        if serves(kernel) not in ordinary:
            continue
        first = by_key.get((kernel.arch, kernel.dtype)) or KernelSpec(
            package=kernel.package, variant=Variant(WIDEN_VARIANT), arch=kernel.arch, head_dim_qk=0, head_dim_v=0,
            dtype=kernel.dtype, kv_dtype=kernel.kv_dtype, direction=WIDEN, backend="cuda",
            spec_file=kernel.spec_file, location=kernel.location, places=kernel.places,
        )  # fmt: skip
        by_key[kernel.arch, kernel.dtype] = replace(
            first,
            head_dim_qk=max(first.head_dim_qk, kernel.head_dim_qk),
            head_dim_v=max(first.head_dim_v, kernel.head_dim_v),
        )
    return tuple(by_key.values())


def selectors(kernels: Sequence[KernelSpec]) -> tuple[KernelSpec, ...]:
    """The kernels that select the largest scores of rows: one for each arch with kernels that score keys for an index,
    and one for short rows where there are kernels that score blocks of keys.

    No entry of a spec asks for them.
    """
    by_key: dict[tuple[str, int | None], KernelSpec] = {}
    for kernel in kernels:
        if kernel.direction in SCORES:
            for columns in (None, SHORT_ROWS) if kernel.direction == BLOCK_SCORES else (None,):
                by_key.setdefault(
                    (kernel.arch, columns),
                    KernelSpec(
                        package=kernel.package, variant=Variant(TOPK_VARIANT), arch=kernel.arch, head_dim_qk=1,
                        head_dim_v=1, dtype="fp32", direction=TOPK, backend="cuda", tile_n=columns,
                        spec_file=kernel.spec_file, location=kernel.location, places=kernel.places,
                    ),
                )  # fmt: skip
    return tuple(by_key.values())


def block_maskers(kernels: Sequence[KernelSpec]) -> tuple[KernelSpec, ...]:
    """The kernels that make block masks: one for each arch with kernels of variants that take one (``blocks``).

    No entry of a spec asks for them. Their dtype means nothing: lists and masks have one each.
    """
    by_arch: dict[str, KernelSpec] = {}
    for kernel in kernels:
        if BLOCK_MASK_TENSOR in kernel.variant.tensors:
            by_arch.setdefault(
                kernel.arch,
                KernelSpec(
                    package=kernel.package, variant=Variant(BLOCK_MASK_VARIANT), arch=kernel.arch, head_dim_qk=1,
                    head_dim_v=1, dtype="fp32", direction=BLOCK_MASK, backend="cuda", spec_file=kernel.spec_file,
                    location=kernel.location, places=kernel.places,
                ),
            )  # fmt: skip
    return tuple(by_arch.values())
