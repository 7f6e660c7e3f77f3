"""The meaning of functions: a variant, and the tensors that its calls pass.

Functions of the same code that capture the same, up to what tensors hold, are traced once. What is kept of that does
not keep captured tensors alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any
from weakref import ref

import torch
from torch import Tensor

import attngen
from attngen.errors import SpecError
from attngen.integrations.flex.facts import Look, looks
from attngen.integrations.flex.identity import FunctionInputs, state_of
from attngen.integrations.flex.plain import legal, plain
from attngen.integrations.flex.trace import Trace, refusal, traced
from attngen.integrations.flex.translate import WORDS, Translator
from attngen.integrations.flex.values import Captured, Translation, Values
from attngen.runtime.cache import RecentCache

Mod = Callable[..., Any]

_NONE: frozenset[int] = frozenset()
_NOTHING: dict[str, Tensor] = {}


class Declared:
    """A variant that was checked. What takes longer, and cannot fail, is left to its first call."""

    def __init__(self, fields: dict[str, Any], text: str) -> None:
        """Raises SpecError for expressions that no spec may have."""
        self._fields = fields
        self._makers: Any = sys.modules[attngen.variant.__module__]  # only the front door may reach what checks
        self._value = self._makers.checked(f"flex_{sha256(text.encode()).hexdigest()[:8]}", fields)

    @cached_property
    def variant(self) -> Any:
        """The variant that ``attngen.variant`` makes of it."""
        return self._makers.python_variant(self._value, self._fields)


#: Variants by their fields.
_DECLARED: RecentCache[Declared] = RecentCache(256)


def declared(fields: dict[str, Any]) -> Declared:
    """Return the variant of these fields. Raises SpecError."""
    text = repr(sorted(fields.items()))
    known = _DECLARED[text]
    if known is None:
        known = Declared(fields, text)
        _DECLARED.put(text, known)
    return known


class Traced:
    """The present meaning of functions: a variant, and the tensors of its calls. It keeps no captured tensor alive."""

    __slots__ = ("_declared", "_given", "entries")

    def __init__(self, declared: Declared, entries: Sequence[Captured], tensors: Sequence[Tensor]) -> None:
        """``tensors`` are those of the reading of the functions."""
        self._declared, self.entries = declared, entries
        finds = (_kept(one.constant) if one.slot is None else ref(tensors[one.slot]) for one in entries)
        self._given = [(one.name, find, one.dims == 0, one.converted) for one, find in zip(entries, finds, strict=True)]

    @property
    def variant(self) -> Any:
        """The variant as calls take it, made in Python."""
        return self._declared.variant

    @property
    def handle(self) -> str:
        """The name of the variant."""
        handle: str = self._declared.variant.handle
        return handle

    def tensors(self, query: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the arguments of a call whose query has this dtype."""
        if not self._given:
            return _NOTHING
        given = self._given
        if query is torch.float64:
            given = [(name, find, scalar, in_double(dtype)) for name, find, scalar, dtype in given]
        return {name: argument(_there(find), dtype, scalar=scalar) for name, find, scalar, dtype in given}

    def captured(self) -> list[tuple[Captured, Tensor]]:
        """Return the tensors as they were captured, each with its entry."""
        return [(entry, _there(given[1])) for entry, given in zip(self.entries, self._given, strict=True)]


def _kept(constant: Tensor | None) -> Callable[[], Tensor | None]:
    return lambda: constant


def _there(find: Callable[[], Tensor | None]) -> Tensor:
    tensor = find()
    assert tensor is not None, "its function has it"
    return tensor


def argument(tensor: Tensor, converted: torch.dtype | None, *, scalar: bool) -> Tensor:
    """The argument of a call for a captured tensor: a number as one element, and other dtypes converted."""
    made = tensor.view(1) if scalar else tensor
    return made if converted is None else made.to(converted)


def in_double(converted: torch.dtype | None) -> torch.dtype | None:
    """The dtype that a call in float64 passes a captured tensor in: float64 stays, since only the reference runs."""
    return None if converted is torch.float32 else converted


class Template:
    """The trace of functions, for all tensors of the same shapes that they may capture."""

    def __init__(self, traces: Mapping[str, Trace]) -> None:
        self._traces = traces
        #: Captured tensors, by slot, whose numbers decided what was traced, and what tells whether they changed.
        self._numbers: dict[int, tuple[ref[Tensor], tuple[int, int]]] = {}
        #: Meaning of the function, for each set of answers to what was asked about the tensors.
        self._known: list[tuple[Mapping[tuple[int, str], bool], Declared, Sequence[Captured]]] = []
        self._asked: set[int] = set()
        #: Whether it may be used again.
        self.lasts = not any(trace.strange for trace in traces.values())
        #: Whether answers about tensors may make it one that is refused.
        self.may_fail = False

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is what the functions compute with these tensors."""
        return all(
            find() is tensors[slot] and state_of(tensors[slot]) == state and not tensors[slot].is_inference()
            for slot, (find, state) in self._numbers.items()
        )

    def taken(self, functions: Mapping[str, Mod], tensors: Sequence[Tensor]) -> bool:
        """Whether the language takes it for certain, so that ``meaning`` can wait until it is needed.

        Raises CallError, as ``meaning`` does, for what has no translation.
        """
        if any(kind != "mask_mod" or not plain(trace) for kind, trace in self._traces.items()):
            return False
        values = Values(tensors, _unanswered, _NONE)
        fields, entries = self._translated(functions, values)
        if not legal(fields["mask"], [one.name for one in entries]):
            return False
        self._depends(values, tensors)
        return True

    def look(self, tensors: Sequence[Tensor]) -> None:
        """Queue looks at the tensors whose numbers will be asked about."""
        for slot in self._asked:
            looks.at(tensors[slot])

    def meaning(
        self, functions: Mapping[str, Mod], tensors: Sequence[Tensor], closed: frozenset[int] = _NONE
    ) -> Traced:
        """Its meaning with these tensors. Nothing is assumed about the values of the ``closed`` ones.

        Raises CallError, which names one of the functions.
        """
        for answers, known, entries in () if closed else self._known:
            if all(_answer(tensors[slot], question) is answer for (slot, question), answer in answers.items()):
                return Traced(known, entries, tensors)
        values = Values(tensors, _answer, closed)
        fields, entries = self._translated(functions, values)
        try:
            known = declared(fields)
        except SpecError as error:
            kind = next(iter(functions))
            raise refusal(functions[kind], kind, " ".join(str(error).split("\n")[0].split())) from error
        self._depends(values, tensors)
        self.may_fail = self.may_fail or any(question == "positive" for _, question in values.asked)
        self._known = [*self._known[-7:], (values.asked, known, entries)]
        return Traced(known, entries, tensors)

    def _translated(self, functions: Mapping[str, Mod], values: Values) -> tuple[dict[str, Any], Sequence[Captured]]:
        """Return the fields of the variant, and its tensors."""
        names = Translation(values)
        fields: dict[str, Any] = {}
        for kind, trace in self._traces.items():
            fields[kind.removesuffix("_mod")] = Translator(functions[kind], kind, trace, names).expression()
        entries = list(names.tensors.values())
        if entries:
            fields["tensors"] = {one.name: one.fields() for one in entries}
        return fields, entries

    def _depends(self, values: Values, tensors: Sequence[Tensor]) -> None:
        """Take note of the tensors whose numbers were read, and of those that are asked about."""
        for slot in values.fixed.union(*(trace.fixed for trace in self._traces.values())):
            self._numbers[slot] = ref(tensors[slot]), state_of(tensors[slot])
        self._asked |= {slot for slot, _ in values.asked}


def _answer(tensor: Tensor, question: str) -> bool:
    look: Look = looks.at(tensor)
    return bool(getattr(look, question))


def _unanswered(tensor: Tensor, question: str) -> bool:
    return False


#: Templates, by what tells functions apart.
_TRACED: RecentCache[Template] = RecentCache(256)


class Functions:
    """A mask_mod and a score_mod as they are now."""

    def __init__(self, mask_mod: Mod | None, score_mod: Mod | None, device: torch.device) -> None:
        pairs = (("mask_mod", mask_mod), ("score_mod", score_mod))
        self._functions = {kind: function for kind, function in pairs if function is not None}
        self._device = device
        self._reading = FunctionInputs(*self._functions.values())
        self._key = (*self._functions, str(device), self._reading.key)
        self._tensors = [tensor for _, tensor in self._reading.tensors]

    def _known(self) -> Template | None:
        template = _TRACED[self._key] if self._reading.complete else None
        return template if template is not None and template.fits(self._tensors) else None

    def _traced(self) -> Template:
        return Template({
            kind: traced(function, kind, self._device, self._reading, WORDS)
            for kind, function in self._functions.items()
        })  # fmt: skip

    def check(self) -> None:
        """Raise CallError for what the language lacks, and queue the checks of tensors that ``meaning`` needs."""
        template = self._known()
        if template is None:
            template = self._traced()
            if not template.taken(self._functions, self._tensors):
                template.meaning(self._functions, self._tensors)
            self._keep(template)
        elif template.may_fail:
            template.meaning(self._functions, self._tensors)
            return
        template.look(self._tensors)

    def _keep(self, made: Template) -> None:
        if self._reading.complete and made.lasts:
            _TRACED.put(self._key, made)

    def meaning(self) -> Traced:
        """Their meaning. Raises CallError for functions that the language cannot express."""
        traced = self._known()
        if traced is not None:
            return traced.meaning(self._functions, self._tensors)
        made = self._traced()
        meaning = made.meaning(self._functions, self._tensors)
        self._keep(made)
        return meaning

    def meaning_whatever_they_hold(self, shared: Sequence[Tensor]) -> Traced:
        """Their meaning without knowledge of the values of tensors that are not ``shared`` with a mask."""
        open_ones = {id(tensor) for tensor in shared}
        closed = frozenset(slot for slot, tensor in enumerate(self._tensors) if id(tensor) not in open_ones)
        return self._traced().meaning(self._functions, self._tensors, closed)


def meaning(mask_mod: Mod | None, score_mod: Mod | None, device: torch.device) -> Traced:
    """The meaning of functions. Raises CallError for functions that the language cannot express."""
    return Functions(mask_mod, score_mod, device).meaning()


def forget() -> None:
    """Forget all functions, as a process begins; for measurements."""
    _TRACED.clear()
    _DECLARED.clear()
