"""Kinds of fields that the models are made of: choices, names, lists that may be one value, plain numbers.

Each kind says itself what it allows, once for messages and once for the JSON Schema. No field is a union: pydantic
reports a wrong value of a union once for each of its members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, PlainValidator, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from attngen import arch, dtypes
from attngen.errors import suggest
from attngen.schema import names
from attngen.schema.quoting import show

T = TypeVar("T")

#: Values of ``split_kv`` beside true and false.
SPLIT_TILES = "tiles"

#: Order of v in kernels that take it as ``quantize="fp8"`` makes it.
IN_GROUPS = "groups"


@dataclass(frozen=True, slots=True)
class OneOf:
    """A value that is one of ``allowed``, or one of ``aliases``, which stand for allowed names."""

    allowed: tuple[str | int, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        literal = core_schema.literal_schema([*self.allowed, *(alias for alias, _ in self.aliases)])
        table = dict(self.aliases)
        return core_schema.no_info_after_validator_function(lambda value: table.get(value, value), literal)


@dataclass(frozen=True, slots=True)
class AsTuple:
    """A list, kept as a tuple; with ``one``, a single value stands for a list of it."""

    one: bool

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._convert, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        many = handler(schema)
        return {"anyOf": [many["items"], many | {"minItems": 1}]} if self.one else many

    def _convert(self, value: object) -> object:
        if self.one and value == []:
            raise ValueError("found an empty list; leave the field out or name at least one value")
        if isinstance(value, list):
            return tuple(value)
        return (value,) if self.one and value is not None else value


OneOrMany = Annotated[tuple[T, ...], Field(max_length=256), AsTuple(one=True)]
Many = Annotated[tuple[T, ...], Field(max_length=1024), AsTuple(one=False)]


def _pattern(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern})


VariantName = Annotated[str, PlainValidator(names.check_variant_name), _pattern(names.VARIANT_PATTERN)]
PackageName = Annotated[str, PlainValidator(names.check_package_name), _pattern(names.VARIANT_PATTERN)]
SymbolName = Annotated[str, PlainValidator(names.check_symbol), _pattern(names.SYMBOL_PATTERN)]
LetName = Annotated[str, PlainValidator(names.check_let_name), _pattern(names.LET_PATTERN)]

_EXTENT_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 2**31},
        {"type": "string", "pattern": names.SYMBOL_PATTERN},
    ]
}
Extent = Annotated[int | str, PlainValidator(names.check_extent), WithJsonSchema(_EXTENT_SCHEMA)]


#: Keys of a mapping of dtypes.
_OPERANDS = ("q", "k", "v", "out")


def _dtype_choice(allowed: tuple[str, ...]) -> OneOf:
    return OneOf(allowed, tuple((alias, name) for alias, name in dtypes.ALIASES.items() if name in allowed))


def fields_of_dtypes(given: dict[Any, Any]) -> str:
    """Error message for a mapping of q, k, v and out to dtypes, with the fields to write instead."""
    for name in given:
        if name not in _OPERANDS:
            return f"found a mapping with '{name}'{suggest(str(name), _OPERANDS)}; allowed: a dtype, which is that of q"
    q = given.get("q", "bf16")
    k, v = given.get("k", given.get("v", q)), given.get("v", given.get("k", q))
    if k != v:
        return f"found k of {show(k)} and v of {show(v)}; k and v have one dtype, which 'kv_dtype' names"
    lines = [f"'dtype: {q}'", *([f"'kv_dtype: {k}'"] if k != q else [])]
    if given.get("out", q) != q:
        lines.append(f"'out_dtype: {given['out']}'")
    return f"found a mapping; allowed: the dtype of q, and fields beside it for others; here {', '.join(lines)}"


ArchName = Annotated[str, OneOf(tuple(arch.ARCHES))]
FallbackName = Annotated[str, OneOf(tuple(name for name, row in arch.ARCHES.items() if row.portable))]
AttentionDType = Annotated[str, _dtype_choice(dtypes.ATTENTION_DTYPES)]
KeyDType = Annotated[str, _dtype_choice(dtypes.KV_DTYPES)]
OutDType = Annotated[str, _dtype_choice(dtypes.OUT_DTYPES)]
TensorDType = Annotated[str, _dtype_choice(dtypes.TENSOR_DTYPES)]
ScalarDType = Annotated[str, _dtype_choice(dtypes.SCALAR_DTYPES)]


def _limit(value: object) -> int | float | str:
    if isinstance(value, str):
        extent = names.check_extent(value)
        assert isinstance(extent, str)
        return extent
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"found {show(value)}; allowed: a number, or an extent such as seqlen_k")
    return value


def _literal(value: object) -> bool | int | float:
    if not isinstance(value, bool | int | float):
        raise ValueError(f"found {show(value)}; allowed: a number, true or false")
    return value


def _refuse_function(value: object) -> None:
    if callable(value):
        raise ValueError(
            "found a function; allowed: an expression, as text. attngen.integrations.flex_attention takes functions "
            "(mask_mod, score_mod)"
        )


def _expression(value: object) -> str:
    _refuse_function(value)
    # YAML reads `score: 0` as a number; it is as good an expression as any
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"found {show(value)}; allowed: an expression")
    return value if isinstance(value, str) else repr(value)


def _mask(value: object) -> bool | str:
    _refuse_function(value)
    if not isinstance(value, bool | str):
        raise ValueError(f"found {show(value)}; allowed: an expression, true or false")
    return value


Limit = Annotated[int | float | str, PlainValidator(_limit), WithJsonSchema({"type": ["number", "string"]})]
Literal = Annotated[bool | int | float, PlainValidator(_literal), WithJsonSchema({"type": ["number", "boolean"]})]
Expression = Annotated[str, PlainValidator(_expression), WithJsonSchema({"type": ["string", "number"]})]
MaskExpression = Annotated[bool | str, PlainValidator(_mask), WithJsonSchema({"type": ["string", "boolean"]})]
SplitKv = Annotated[
    bool | str,
    OneOf((True, False, SPLIT_TILES)),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": SPLIT_TILES}]}),
]
TransposedV = Annotated[
    bool | str, OneOf((True, False, IN_GROUPS)), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": IN_GROUPS}]})
]
Descale = Annotated[int | str, OneOf(tuple(dtypes.DESCALE_BLOCKS))]
Alignment = Annotated[int | str, OneOf(("element", 2, 4, 8, 16))]
