"""One row per dtype: its name in specs, its names in torch, Triton, CUDA and PTX, and its sizes.

Nothing else in attngen knows how many bytes an element has, or how many of them an MMA, a register or a copy holds.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes of a row that one MMA of a warpgroup sums over, of a register, of what wide loads and swizzles move at once,
#: and of the widest swizzle.
MMA_BYTES, REGISTER_BYTES, CHUNK_BYTES, SWIZZLE_BYTES = 32, 4, 16, 128

#: Keys of a group of V in 8 bits: K of a product, which sums over them.
V_GROUP = 32


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype. ``kind`` is how the expression language sees a value of it: bool, int or float.

    ``mma`` is the PTX type of an operand of an MMA, None where products are FMAs; ``tensor_map`` ends the name of the
    driver's CU_TENSOR_MAP_DATA_TYPE, None where no descriptor loads it.
    """

    name: str
    torch: str
    triton: str  # as in a Triton signature; also the attribute of triton.language, save for i1/iN/uN/fpN
    triton_language: str
    cuda: str  # bf16, fp16, e4m3 and e5m2 are those of templates/cuda/include/types.cuh
    bytes: int
    kind: str
    mma: str | None = None
    tensor_map: str | None = None

    @property
    def mma_k(self) -> int:
        """Elements that one MMA of a warpgroup sums over: 32 bytes of a row (PTX ISA, "wgmma.mma_async")."""
        return MMA_BYTES // self.bytes

    @property
    def register_elements(self) -> int:
        """Elements that a register of 32 bits holds."""
        return REGISTER_BYTES // self.bytes

    @property
    def chunk_elements(self) -> int:
        """Elements of 16 bytes: the unit of wide loads and stores, of swizzles and of strides."""
        return CHUNK_BYTES // self.bytes


_ROWS = (
    DType("bf16", "bfloat16", "bf16", "bfloat16", "bf16", 2, "float", "bf16", "BFLOAT16"),
    DType("fp16", "float16", "fp16", "float16", "fp16", 2, "float", "f16", "FLOAT16"),
    DType("fp32", "float32", "fp32", "float32", "float", 4, "float", None, "FLOAT32"),
    DType("fp8_e4m3", "float8_e4m3fn", "fp8e4nv", "float8e4nv", "e4m3", 1, "float", "e4m3", "UINT8"),
    DType("fp8_e5m2", "float8_e5m2", "fp8e5", "float8e5", "e5m2", 1, "float", "e5m2", "UINT8"),
    DType("bool", "bool", "i8", "int8", "unsigned char", 1, "bool"),
    DType("int8", "int8", "i8", "int8", "signed char", 1, "int", None, "UINT8"),
    DType("uint8", "uint8", "u8", "uint8", "unsigned char", 1, "int", None, "UINT8"),
    DType("int16", "int16", "i16", "int16", "short", 2, "int", None, "UINT16"),
    DType("int32", "int32", "i32", "int32", "int", 4, "int", None, "INT32"),
    DType("int64", "int64", "i64", "int64", "long long", 8, "int"),
    DType("fp8_mla_656", "uint8", "u8", "uint8", "unsigned char", 1, "float"),
    DType("fp8_mla_584", "uint8", "u8", "uint8", "unsigned char", 1, "float"),
)

DTYPES: dict[str, DType] = {row.name: row for row in _ROWS}

#: Other spellings accepted in specs.
ALIASES: dict[str, str] = {
    "fp8": "fp8_e4m3",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "int": "int32",
}

#: Element types of q, k and v that come with scales, and that of the output beside each, unless another is asked for.
QUANTIZED_DTYPES: dict[str, str] = {"fp8_e4m3": "bf16", "fp8_e5m2": "bf16"}

#: Dtypes of the output of quantized q.
OUT_DTYPES: tuple[str, ...] = ("bf16", "fp16")

#: That of probabilities where v is quantized: they need precision more than range.
PROBABILITY_DTYPE = "fp8_e4m3"

#: Those of a cache that may stand beside a wider q: a split-KV kernel converts them on the way to its products.
CACHE_DTYPES: tuple[str, ...] = ("fp8_e4m3",)

#: Dtypes of q beside such a cache that kernels take.
BESIDE_CACHES: tuple[str, ...] = ("bf16", "fp16")

#: The scales that dequantize q, k and v, as arguments of calls and kernels name them.
DESCALES = ("q_descale", "k_descale", "v_descale")


@dataclass(frozen=True, slots=True)
class LatentRow:
    """A row of a cache of latents: ``latents`` columns of e4m3, with a scale for each ``group`` of them, then
    ``rotary`` columns of bf16.

    Scales are float32 and lie between both; or they are powers of two, of which a byte holds the biased exponent, and
    those of all rows of a block follow its rows; or they are a tensor beside the cache.
    """

    latents: int
    rotary: int
    group: int
    scales_after_rows: bool
    scales_beside: bool = False

    @property
    def columns(self) -> int:
        """Columns of the row: the head dim of q and k."""
        return self.latents + self.rotary

    @property
    def scales(self) -> int:
        """Scales of the row."""
        return self.latents // self.group

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a row; exponents are padded to 8."""
        if self.scales_beside:
            return 0
        return 8 if self.scales_after_rows else 4 * self.scales

    @property
    def scales_in_row(self) -> bool:
        """Whether the scales of a row lie in it."""
        return not (self.scales_after_rows or self.scales_beside)

    @property
    def bytes(self) -> int:
        """Bytes of a token: the last extent of a cache."""
        return self.latents + self.scale_bytes + 2 * self.rotary

    @property
    def row_step(self) -> int:
        """Bytes from a row to the next one of its block."""
        return self.bytes - self.scale_bytes * self.scales_after_rows

    @property
    def rotary_at(self) -> int:
        """Bytes of a row before its rotary columns."""
        return self.row_step - 2 * self.rotary


#: Caches of bytes that kernels with ``v: key`` read beside q in bf16.
LATENT_ROWS: dict[str, LatentRow] = {
    "fp8_mla_656": LatentRow(512, 64, 128, scales_after_rows=False),
    "fp8_mla_584": LatentRow(448, 64, 64, scales_after_rows=True),
}

#: Dtype of q beside these, and beside rows of e4m3 alone, and of rotary columns.
BESIDE_LATENT_ROWS = "bf16"


def row_of_keys(kv_dtype: str, columns: int) -> LatentRow | None:
    """Rows in 8 bits that kernels with ``v: key`` convert as they load them; None for rows of 16 bits."""
    if kv_dtype in CACHE_DTYPES:
        return LatentRow(columns, 0, columns, scales_after_rows=False, scales_beside=True)
    return LATENT_ROWS.get(kv_dtype)


#: Placeholder for the number of tokens of a cache page.
PAGE_BLOCK = -1

#: Tokens that share a scale, by the name that specs give it: all of a head, those of a block, each of q and k alone, or
#: those of a page of a cache.
DESCALE_BLOCKS: dict[str | int, int] = {"head": 0, "token": 1, 64: 64, 128: 128, "page": PAGE_BLOCK}

#: Element types of q, k and v that the output has as well.
PLAIN_DTYPES: tuple[str, ...] = ("bf16", "fp16", "fp32")

#: Element types of q, k and v.
ATTENTION_DTYPES: tuple[str, ...] = (*PLAIN_DTYPES, *QUANTIZED_DTYPES)

#: Element types of k and v.
KV_DTYPES: tuple[str, ...] = (*ATTENTION_DTYPES, *LATENT_ROWS)

#: Head dimensions that kernels are made for; a schedule may take fewer. Rows of 8 elements of 16 bits are the 16 bytes
#: that descriptors and wide loads step by.
HEAD_DIM_STEP = 8
HEAD_DIMS: tuple[int, ...] = tuple(range(HEAD_DIM_STEP, 257, HEAD_DIM_STEP))

#: Head dims beyond these, which have kernels of their own on Hopper.
WIDE_HEAD_DIMS: tuple[int, ...] = tuple(range(HEAD_DIMS[-1] + HEAD_DIM_STEP, 513, HEAD_DIM_STEP))

#: Head dimensions of kernels whose values are the first columns of the keys: those of q and k, and that of v.
KEY_VALUE_DIMS: tuple[tuple[int, int], ...] = ((512, 512), (576, 512))
#: Dtypes of these kernels.
KEY_VALUE_DTYPES = ("bf16", "fp16")
#: Rows of a block of theirs that merges partial results.
MERGED_ROWS = 4
#: Their backward takes chunks of query rows: query rows and keys of a tile of P, tiles of rows over which a block sums
#: dK (three times as many tiles keep a Hopper GPU busy), and tiles of keys and columns of such a block.
CHUNK_TILE, CHUNK_ROW_TILES, CHUNK_KEY_TILES, CHUNK_COLUMNS = 64, 44, 4, 192

#: Element types of a variant's tensors.
TENSOR_DTYPES: tuple[str, ...] = tuple(name for name in DTYPES if name not in (*QUANTIZED_DTYPES, *LATENT_ROWS))


@dataclass(frozen=True, slots=True)
class ScalarType:
    """Forms of a variant's scalar: in Python, in a Triton signature, and in the schema of a torch operator."""

    python: type
    triton: str
    torch_schema: str


#: Types of a variant's scalars.
SCALAR_TYPES: dict[str, ScalarType] = {
    "int32": ScalarType(int, "i32", "SymInt"),
    "int64": ScalarType(int, "i64", "SymInt"),
    "fp32": ScalarType(float, "fp32", "float"),
    "bool": ScalarType(bool, "i32", "bool"),
}
SCALAR_DTYPES: tuple[str, ...] = tuple(SCALAR_TYPES)


def dtype(name: str) -> DType:
    """Return the row of a dtype by its name or alias; KeyError if there is none."""
    return DTYPES[ALIASES.get(name, name)]
