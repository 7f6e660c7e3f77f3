"""A variant of attention as a value: mask, score, sink and what they read. Frozen, comparable, JSON both ways."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from attngen.errors import CallError
from attngen.lang.declared import Bound, Monotone, Scalar, Tensor
from attngen.lang.ir import Const, Expr, Op, Type, Var, names, tensors
from attngen.lang.listed import KEYS
from attngen.lang.ranges import Range, declared_ranges
from attngen.records import VariantName

__all__ = [
    "VISIBLE", "Bound", "Monotone", "Scalar", "VariantSettings", "Tensor", "Variant", "VariantText",
    "declared_settings",
]  # fmt: skip

#: Fields of a variant that name and declare what others read, and its expressions; all others are settings.
_NO_FEATURES = frozenset(("name", "scalars", "tensors", "let", "mask_text", "score_text", "sink_text"))
_EXPRESSIONS = frozenset(("mask", "score", "sink"))

_LOGIT = Var("s", Type.FLOAT)

#: How logits become the weights of values: relative to all logits of a row (None), or each for itself, by a function of
#: the logit. The reference and the yardsticks of tests compute it from here.
WEIGHTS: dict[str, Expr | None] = {"softmax": None, "sigmoid": Op("sigmoid", (_LOGIT,), Type.FLOAT)}

#: What is appended to the name of a variant whose kernels also give the largest logits.
_MAX_LOGITS = "_max_logits"

#: The mask that hides nothing.
VISIBLE: Expr = Const(True, Type.BOOL)


def _setting(default: Any, description: str, **more: Any) -> Any:
    return field(default=default, metadata={"description": description, **more})


@dataclass(frozen=True, kw_only=True)
class VariantSettings:
    """VariantSettings of a variant beside its expressions and what these read: one declaration of each.

    Specs, JSON, definitions and comparisons of variants follow. ``choices`` are the allowed texts, and ``unset`` is the
    word for None. A setting that nobody serves is refused by all (``Variant.features``). One ``of_calls`` is asked for
    by calls and by entries of ``kernels``, and no declaration of a variant has it.
    """

    dropout: bool = _setting(False, "drop probabilities, at the rate `dropout_p` of the call")
    keys: str | None = _setting(
        None, "`index`: each query sees only keys that `indices` of the call lists", choices=tuple(KEYS), unset="all"
    )
    sink_in_lse: bool = _setting(True, "whether the log-sum-exp includes the sink")
    weights: str = _setting(
        "softmax",
        "how logits become the weights of values; `sigmoid`: each by itself, without a sum over the row",
        choices=tuple(WEIGHTS),
    )
    max_logits: bool = _setting(False, "also give the largest logit of each row", of_calls=True)

    @property
    def settings(self) -> dict[str, Any]:
        """The value of each setting."""
        return {one.name: getattr(self, one.name) for one in _settings_of(type(self))}

    @property
    def given(self) -> dict[str, Any]:
        """The settings whose value is not the default."""
        defaults = {one.name: one.default for one in _settings_of(type(self))}
        return {name: value for name, value in self.settings.items() if value != defaults[name]}


def declared_settings() -> tuple[Field[Any], ...]:
    """The settings that declarations of variants have."""
    return tuple(one for one in fields(VariantSettings) if not one.metadata.get("of_calls"))


def _settings_of(owner: type[VariantSettings]) -> tuple[Field[Any], ...]:
    others = _NO_FEATURES | _EXPRESSIONS
    return tuple(one for one in fields(owner) if one.name not in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantText(VariantSettings):
    """The JSON form of a variant: its expressions are texts of the language."""

    name: VariantName
    mask: str
    score: str | None
    let: Mapping[str, str]
    scalars: tuple[Scalar, ...]
    tensors: tuple[Tensor, ...]
    mask_text: str | None
    score_text: str | None
    sink: str | None = None
    sink_text: str | None = None


@dataclass(frozen=True)
class Variant(VariantSettings):
    """A mask, a score and a sink over declared scalars and tensors.

    ``mask`` is BOOL, true where visible (``Const(True)``: everywhere). ``score`` is FLOAT, or None for ``s``. ``sink``
    is FLOAT over batch and head: a logit that every row has besides those of its keys, without a value; None for none.
    The log-sum-exp includes it, unless ``sink_in_lse`` is false. ``weights`` is one of ``WEIGHTS``. With ``max_logits``
    results beside the output are a pair along a first axis: the log-sum-exp, and the largest logit of each row.
    With ``dropout``, probabilities are dropped at the rate and with the random numbers that the last scalar and the
    last tensor give (``lang.dropout``). ``keys`` names the tensors by which calls list the keys of each query
    (``lang.listed``), which come last but for that of dropout; None: the mask alone decides. Constant scalars are
    inlined in the expressions, but stay listed in ``scalars``. ``let`` keeps the named values of the spec, inlined as
    well, so that generated code can use the same names. The texts are the user's own.
    """

    name: str
    mask: Expr = VISIBLE
    score: Expr | None = None
    scalars: tuple[Scalar, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    mask_text: str | None = None
    score_text: str | None = None
    let: tuple[tuple[str, Expr], ...] = ()
    sink: Expr | None = None
    sink_text: str | None = None

    def features(self) -> Iterator[tuple[str, Any, Any]]:
        """Each field that decides what kernels compute, with its value and its default: those of ``_NO_FEATURES`` only
        declare or name something."""
        for one in fields(self):
            if one.name not in _NO_FEATURES:
                yield one.name, getattr(self, one.name), one.default

    @cached_property
    def _features(self) -> frozenset[str]:
        return frozenset(name for name, value, default in self.features() if value != default)

    def beyond(self, served: Collection[str]) -> list[str]:
        """Features of this variant that are not among those that are ``served``."""
        return sorted(self._features - frozenset(served))

    def require(self, served: Collection[str], who: str) -> None:
        """Raise CallError if this variant has a feature that is not among those that ``who`` has ``served``."""
        if beyond := self.beyond(served):
            raise CallError(f"{self.name}: {who} does not serve '{beyond[0]}'")

    @property
    def masked(self) -> bool:
        """Whether the mask hides anything at all."""
        return self.mask != VISIBLE

    @property
    def has_lse(self) -> bool:
        """Whether a row has a log-sum-exp: its weights are those of a softmax."""
        return WEIGHTS[self.weights] is None

    def with_max_logits(self) -> Variant:
        """The variant whose results have the largest logits, too. CallError for weights that keep no maximum."""
        if not self.has_lse:
            raise CallError(
                f"{self.name} has weights: {self.weights}, whose kernels look for no largest logit; leave out "
                "return_max_logits"
            )
        return self if self.max_logits else replace(self, name=self.name + _MAX_LOGITS, max_logits=True)

    def without_max_logits(self) -> Variant:
        """The variant of which ``with_max_logits`` made this one, or itself."""
        if not self.max_logits:
            return self
        return replace(self, name=self.name.removesuffix(_MAX_LOGITS), max_logits=False)

    @property
    def arguments(self) -> tuple[Scalar, ...]:
        """The scalars that a call passes, in order of declaration."""
        return tuple(scalar for scalar in self.scalars if scalar.const is None)

    @property
    def labels(self) -> dict[Expr, str]:
        """Name of each ``let:`` value, for the emitter."""
        return {value: name for name, value in self.let}

    @cached_property
    def ranges(self) -> dict[str, Range]:
        """Inclusive numeric ranges of every name that the expressions may hold."""
        return declared_ranges(self.scalars, self.tensors)

    @cached_property
    def definition(self) -> tuple[object, ...]:
        """The computation and its arguments as a value: variants with equal definitions compute the same.

        Neither texts nor the names of ``let`` values are part of it, nor the variant's name and the order of its
        declarations.
        """
        scalars = tuple(sorted(self.scalars, key=lambda s: s.name))
        tensors = tuple(sorted(self.tensors, key=lambda t: t.name))
        return self.mask, self.score, self.sink, scalars, tensors, *self.settings.values()

    def differences(self, other: Variant) -> list[tuple[str, str, str]]:
        """Each field in which two definitions differ, with the text of both variants."""
        mine, others = self._summaries(), other._summaries()
        return [
            (field, mine.get(field, "nothing"), others.get(field, "nothing"))
            for field in dict.fromkeys((*mine, *others))
            if mine.get(field) != others.get(field)
        ]

    def _summaries(self) -> dict[str, str]:
        from attngen.lang.printing import canonical

        summaries = {"mask": canonical(self.mask)}
        summaries["score"] = "s" if self.score is None else canonical(self.score)
        summaries["sink"] = "none" if self.sink is None else canonical(self.sink)
        for setting in _settings_of(type(self)):
            value = getattr(self, setting.name)
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            summaries[setting.name] = setting.metadata.get("unset", "none") if value is None else shown
        summaries |= {f"scalars.{scalar.name}": scalar.summary() for scalar in self.scalars}
        return summaries | {f"tensors.{tensor.name}": tensor.summary() for tensor in self.tensors}

    def tensor(self, name: str) -> Tensor:
        """Return a declared tensor; KeyError if there is none."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    def scalar(self, name: str) -> Scalar:
        """Return a declared scalar; KeyError if there is none."""
        for scalar in self.scalars:
            if scalar.name == name:
                return scalar
        raise KeyError(name)

    def uses(self, *expressions: Expr | None) -> tuple[frozenset[str], frozenset[str]]:
        """Return the variable names and the tensor names that the expressions (by default all) hold."""
        chosen = [e for e in (expressions or (self.mask, self.score, self.sink)) if e is not None]
        variables = frozenset[str]().union(*(names(e) for e in chosen))
        loaded = frozenset[str]().union(*(tensors(e) for e in chosen))
        return variables, loaded

    def packed_keys(self) -> str | None:
        """Return ``kv_global`` or ``total_k`` if the variant reads it, else None.

        It may do so in expressions, shapes or bounds. Keys in pages have no position in a packed tensor.
        """
        read: set[object] = set(self.uses()[0])
        for tensor in self.tensors:
            read |= {*tensor.shape, *(tensor.range or ())}
        for scalar in self.scalars:
            read |= {scalar.min, scalar.max}
        return next((name for name in ("kv_global", "total_k") if name in read), None)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON value that ``restore_variant`` turns into an equal variant: a ``VariantText``."""
        from attngen.lang.printing import canonical

        return {
            "name": self.name,
            "mask": canonical(self.mask),
            "score": None if self.score is None else canonical(self.score),
            "let": {name: canonical(value) for name, value in self.let},
            "scalars": [_plain(asdict(scalar)) for scalar in self.scalars],
            "tensors": [_plain(_fields(tensor)) for tensor in self.tensors],
            "mask_text": self.mask_text,
            "score_text": self.score_text,
            **({} if self.sink is None else {"sink": canonical(self.sink), "sink_text": self.sink_text}),
            **self.given,
        }


def _fields(tensor: Tensor) -> dict[str, Any]:
    fields = asdict(tensor)
    if fields["monotone"] is not None and fields["monotone"]["runs"] is None:
        del fields["monotone"]["runs"]
    return fields


def _plain(value: Any) -> Any:
    """Spell infinities as text, since JSON has none."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return {"inf": 1 if value > 0 else -1}
    return value
