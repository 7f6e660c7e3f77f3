"""The form of a spec: one frozen model for each mapping of the YAML.

A model checks form only: fields, types, names, choices. What an expression means is checked by ``attngen.lang``,
and whether a kernel can be built by ``attngen.plan``; so a field may be legal here and refused there. Text that
ends up in a user's editor through the JSON Schema is in the fields' descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from attngen.formats import SCHEMA
from attngen.lang.blocks import BLOCKS
from attngen.lang.variant import VariantSettings, declared_settings
from attngen.schema.fields import (
    Alignment,
    ArchName,
    AttentionDType,
    Descale,
    Expression,
    Extent,
    FallbackName,
    KeyDType,
    LetName,
    Limit,
    Literal,
    Many,
    MaskExpression,
    OneOf,
    OneOrMany,
    OutDType,
    PackageName,
    ScalarDType,
    SplitKv,
    SymbolName,
    TensorDType,
    TransposedV,
    VariantName,
    fields_of_dtypes,
)
from attngen.schema.quoting import show

Softmax = Annotated[
    str, OneOf(("exact_max", "lazy", "first_max", "bounded"), aliases=(("fixed_reference", "first_max"),))
]
ValuesOf = Annotated[str, OneOf(("key",))]
Layout = Annotated[str, OneOf(("dense", "varlen", "paged"))]
Pass = Annotated[str, OneOf(("forward", "backward", "jvp", "index_scores", "block_scores"))]
Backend = Annotated[str, OneOf(("triton", "cuda"))]
Loads = Annotated[str, OneOf(("descriptor", "pointer"))]
TileMap = Annotated[str, OneOf(("auto", "never", "always"))]
Schedule = Annotated[str, OneOf(("pingpong", "cooperative"))]
Overlap = Annotated[str, OneOf(("gradients", "pingpong", "nothing", "roles", "dv"))]
Epilogue = Annotated[str, OneOf(("staged", "direct"))]
Order = Annotated[str, OneOf(("longest_first", "natural"))]
Allowance = Annotated[str, OneOf(("spill", "serialized_wgmma"))]

HeadDimension = Annotated[int, Field(ge=1, le=1024)]
TileExtent = Annotated[int, Field(ge=1, le=1024)]


class Model(BaseModel):
    """Base of all: frozen, no unknown field, no value converted to another type."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Shorthand:
    """Lets an integer stand for a mapping: ``head_dim: 64`` for ``{qk: 64, v: 64}``."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "integer", "minimum": 1}, handler(schema)]}

    def _expand(self, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return dict.fromkeys(self.fields, value)
        if not isinstance(value, dict):
            raise ValueError(f"found {show(value)}; allowed: an integer or a mapping")
        return value


class ScalarModel(Model):
    """A number that masks and scores name; given at the call, unless fixed by ``const``."""

    type: ScalarDType
    min: Limit | None = Field(default=None, description="smallest legal value: a number or an extent")
    max: Limit | None = Field(default=None, description="largest legal value: a number or an extent")
    default: Literal | None = Field(default=None, description="the value of a call that gives none")
    const: Literal | None = Field(
        default=None, description="a value fixed at build time; `true` fixes the one that `default` gives"
    )
    grad: bool = Field(default=False, description="the backward computes a gradient for it")

    @model_validator(mode="after")
    def _const_has_a_value(self) -> ScalarModel:
        if self.const is True and self.default is None:
            raise ValueError("'const: true' fixes the value that 'default' gives, and there is none")
        return self

    @property
    def fixed(self) -> bool | int | float | None:
        """The value fixed at build time, or None for a scalar of the call."""
        if self.const is True:
            return self.default
        return None if self.const is False else self.const


class MonotoneModel(Model):
    """A declared fact: values never decrease along an axis. Trusted by kernels, checked by ``verify``."""

    axis: Annotated[int, Field(ge=0, le=7)]
    order: Annotated[str, OneOf(("nondecreasing",))] = "nondecreasing"
    runs: Annotated[int, Field(ge=2, lt=2**31)] | None = Field(
        default=None, description="within so many elements, each is greater by one than the one before"
    )


class RangeModel(Model):
    """A declared fact: the smallest and largest value that a tensor holds."""

    min: Limit | None = None
    max: Limit | None = None


class TensorModel(Model):
    """A tensor that masks and scores index; always given at the call."""

    dtype: TensorDType
    shape: Many[Extent] = Field(max_length=8, description="integers, b h hk seqlen_q seqlen_k total_q total_k, names")
    monotone: MonotoneModel | None = None
    range: RangeModel | None = None
    grad: bool = Field(default=False, description="the backward computes a gradient for it")


class _Expressions(Model):
    description: str | None = Field(default=None, max_length=400)
    mask: MaskExpression | None = Field(
        default=None, description="true where the query sees the key; left out: everywhere"
    )
    score: Expression | None = Field(default=None, description="the logit, from s = scale * (q . k); left out: s")
    sink: Expression | None = Field(
        default=None, description="a logit of each head that joins the softmax and has no value; left out: none"
    )
    blocks: Annotated[int, OneOf(BLOCKS)] | None = Field(
        default=None, description="queries and keys of a block; a call shows blocks by `block_mask`"
    )
    let: dict[LetName, Expression] = Field(default={}, description="named intermediate values and functions, in order")
    scalars: dict[SymbolName, ScalarModel] = {}
    tensors: dict[SymbolName, TensorModel] = {}
    softmax: Softmax | None = None
    softmax_scale: Annotated[float, Field(gt=0)] | None = None


def _setting(hint: Any, metadata: Mapping[str, Any], default: Any) -> tuple[Any, Any]:
    """Type and field of a setting of variants."""
    kind = hint
    if "choices" in metadata:
        kind = Annotated[str, OneOf(metadata["choices"])]
        kind = kind | None if default is None else kind
    return kind, Field(default=default, description=metadata["description"])


_HINTS = get_type_hints(VariantSettings)
_SETTINGS: dict[str, Any] = {
    one.name: _setting(_HINTS[one.name], one.metadata, one.default) for one in declared_settings()
}
_Settings = create_model("_Settings", __base__=Model, **_SETTINGS)


class VariantModel(_Settings, _Expressions):  # type: ignore[misc, valid-type]
    """A variant: which keys a query sees, how the score changes the logit, and what else joins the softmax."""


class HeadDimModel(Model):
    """Head dimensions of queries and keys, and of values."""

    qk: HeadDimension
    v: HeadDimension


class TileModel(Model):
    """Rows of queries (m) and of keys (n) in a tile."""

    m: TileExtent | None = None
    n: TileExtent | None = None


class PipelineModel(Model):
    """Depth of the ring of K and V tiles."""

    stages: OneOrMany[Annotated[int, Field(ge=1, le=16)]] | None = None


class ChosenStages(Model):
    """Depth of the ring of K and V tiles of one kernel."""

    stages: Annotated[int, Field(ge=1, le=16)]


class RegistersModel(Model):
    """Registers per thread of each role."""

    producer: Annotated[int, Field(ge=24, le=256)] | None = None
    consumer: Annotated[int, Field(ge=24, le=256)] | None = None


class WarpsModel(Model):
    """Warps of a block: a count, or roles for a warp-specialized schedule."""

    count: Annotated[int, Field(ge=1, le=32)] | None = Field(
        default=None, description="warps of a kernel without roles"
    )
    producer: Annotated[int, Field(ge=1, le=4)] | None = Field(default=None, description="producer warpgroups")
    consumer: Annotated[int, Field(ge=1, le=4)] | None = Field(default=None, description="consumer warpgroups")
    schedule: Schedule | None = None
    overlap: bool | None = None
    registers: RegistersModel | None = None

    @model_validator(mode="after")
    def _count_or_roles(self) -> WarpsModel:
        roles = (self.producer, self.consumer, self.schedule, self.overlap, self.registers)
        if self.count is not None and any(role is not None for role in roles):
            raise ValueError("'count' is for a kernel without roles; leave out 'count', or the roles")
        return self


class GradientModel(Model):
    """Tile, stages and warps of one of the two kernels that compute gradients."""

    tile: TileModel | None = None
    stages: Annotated[int, Field(ge=1, le=16)] | None = Field(default=None, description="tiles in flight")
    warps: Annotated[int, Field(ge=1, le=32)] | None = Field(default=None, description="warps of a block")


class KeysGradientModel(GradientModel):
    """Choices for the kernel by tiles of keys; the last four are of kernels by wgmma alone."""

    overlap: Overlap | None = Field(default=None, description="what the softmax of a step runs beside")
    packed: bool | None = Field(default=None, description="dS is computed from probabilities in 16 bits")
    q_stages: Annotated[int, Field(ge=2, le=4)] | None = Field(default=None, description="tiles of Q in flight")
    rows_ahead: Annotated[int, Field(ge=0, le=4)] | None = Field(
        default=None, description="row statistics that consumers load ahead, in 16 rows"
    )


class BackwardModel(Model):
    """Choices for the backward; `tile`, `pipeline`, `warps` and most other fields beside it are the forward's."""

    backend: Backend | None = Field(
        default=None,
        description="left out: triton where `backend` is, else the fastest that can do everything in the entry",
    )
    dkdv: KeysGradientModel | None = Field(default=None, description="the kernel of dK and dV, tile by tile of keys")
    dq: GradientModel | None = Field(default=None, description="the kernel of dQ, tile by tile of queries")


class KernelModel(Model):
    """One entry of ``kernels``; a list in a field expands into one kernel for each element."""

    variant: OneOrMany[VariantName]
    head_dim: OneOrMany[Annotated[HeadDimModel, Shorthand("qk", "v")]]
    arch: OneOrMany[ArchName] | None = Field(default=None, description="instead of the spec's own")
    dtype: OneOrMany[AttentionDType] = ("bf16",)
    kv_dtype: OneOrMany[KeyDType] | None = Field(
        default=None,
        description="of k and v, if not q's: the other 8-bit type, or a cache in fewer bits than q",
    )
    out_dtype: OneOrMany[OutDType] | None = Field(
        default=None, description="of the output of a quantized q, bf16 or fp16; left out: bf16"
    )
    v: ValuesOf | None = Field(
        default=None, description="`key`: v is the first columns of k, one tensor that is loaded once"
    )
    layout: OneOrMany[Layout] = ("dense",)
    descale: OneOrMany[Descale] | None = Field(
        default=None,
        description="which tokens share a scale of quantized q, k and v: of a head, a block, a page, or none (token)",
    )
    passes: OneOrMany[Pass] = ("forward",)
    backend: OneOrMany[Backend] | None = Field(
        default=None, description="left out: the fastest that can do everything in the entry"
    )
    tile: OneOrMany[TileModel] | None = None
    pipeline: PipelineModel | None = None
    warps: OneOrMany[Annotated[WarpsModel, Shorthand("count")]] | None = None
    loads: OneOrMany[Loads] | None = Field(default=None, description="tensor descriptors (TMA) or pointers")
    tile_map: OneOrMany[TileMap] = Field(
        default=("auto",), description="precomputed tile map, for masks without bounds"
    )
    alignment: OneOrMany[Alignment] | None = Field(
        default=None, description="bytes that strides and pointers are multiples of: 16, or `element`"
    )
    fast_math: OneOrMany[bool] = Field(default=(True,), description="approximate tanh, exp2 and the like")
    softmax: OneOrMany[Softmax] | None = Field(default=None, description="instead of the variant's own")
    softmax_scale: Annotated[float, Field(gt=0)] | None = Field(default=None, description="fixed at build time")
    backward: BackwardModel | None = Field(default=None, description="how the backward is computed")
    deterministic: OneOrMany[bool] = (False,)
    max_logits: OneOrMany[bool] | None = Field(
        default=None, description="the forward also gives the largest logit of each row; left out: no"
    )
    persistent: OneOrMany[bool] | None = None
    order: OneOrMany[Order] | None = Field(default=None, description="which query tiles come first")
    epilogue: OneOrMany[Epilogue] | None = Field(
        default=None, description="outputs leave through shared memory, or directly from registers"
    )
    transposed_v: OneOrMany[TransposedV] | None = Field(
        default=None,
        description="v in 8 bits has contiguous keys, and need not be transposed in the kernel; `groups`: it comes in "
        'groups of 32 keys, as `quantize="fp8"` makes it',
    )
    pack_gqa: OneOrMany[bool] | None = Field(
        default=None, description="query heads of one KV head share the rows of a tile; left out: no"
    )
    split_kv: OneOrMany[SplitKv] = Field(
        default=(False,),
        description="besides each forward, one for few queries and many keys, which blocks share; `tiles`: one whose "
        "blocks share the keys of a tile of queries, for calls of few tiles",
    )
    allow: Many[Allowance] = Field(default=(), description="what would otherwise fail the build")

    @field_validator("dtype", mode="before")
    @classmethod
    def _one_dtype(cls, value: object) -> object:
        """Say what to write instead of a mapping of operands, since each has a field of its own."""
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                raise ValueError(fields_of_dtypes(one))
        return value


class SpecModel(Model):
    """A whole spec file."""

    version: Annotated[int, WithJsonSchema({"const": SCHEMA})] = Field(alias="schema")
    package: PackageName | None = Field(default=None, description="name when shipped; left out: the file's name")
    arch: OneOrMany[ArchName] | None = Field(default=None, description="targets of every kernel that names none")
    fallback: FallbackName | None = Field(
        default=None, description="one more target of these, for GPUs that are none of 'arch', without tuned fields"
    )
    include: OneOrMany[Annotated[str, Field(min_length=1, max_length=255)]] | None = Field(
        default=None, description="spec files, relative to this one, whose variants may be used here"
    )
    variants: dict[VariantName, VariantModel] = {}
    kernels: Many[KernelModel] = ()
