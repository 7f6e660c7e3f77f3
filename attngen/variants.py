"""Variants made in Python: the language of specs without a file.

The checks are those of a spec, by the same models, which are imported when the first variant is made.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from attngen.errors import LoadError, SpecError, needs_torch
from attngen.lang.constant_conditions import fold_conditions
from attngen.lang.variant import Variant, VariantSettings
from attngen.runtime.registry.lookup import registry

if TYPE_CHECKING:
    import torch

    from attngen.inspect.picture import Picture
    from attngen.inspect.seen import SeenKeys, Sizes


class PythonVariant(str):
    """A variant made by ``attngen.variant``: a string, accepted wherever the name of a variant is.

    It names this definition alone. ``handle`` is the name as a plain str, the same in every process; ``value`` the
    checked variant; ``fields`` the arguments as they were given.
    """

    handle: str
    value: Variant
    fields: Mapping[str, Any]

    def __new__(cls, value: Variant, fields: Mapping[str, Any]) -> PythonVariant:
        """Register a checked variant, so that calls find it, and return it under its name."""
        handle = registry.declare(value)
        made = super().__new__(cls, handle)
        made.handle, made.value, made.fields = handle, value, fields
        return made

    def __repr__(self) -> str:
        arguments = [f"{name}={value!r}" for name, value in {**self.fields, "name": self.name}.items()]
        return f"attngen.variant({', '.join(arguments)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.name, dict(self.fields))

    @property
    def name(self) -> str:
        """The name of the variant in a spec and in its kernels."""
        return self.value.name

    def to_yaml(self, *, package: str | None = None, **kernel: Any) -> str:
        """Return a spec with this variant, as text.

        ``kernel`` are the fields of an entry of ``kernels:``, such as ``arch``, ``head_dim``, ``dtype``, ``layout`` and
        ``passes``. Without any, the spec builds nothing, but other specs may include it. Raises SpecError for an entry
        that a spec may not have.
        """
        from attngen.schema import expand, load_spec_text
        from attngen.schema.writing import spec_text

        text = spec_text({self.name: self.fields}, [{"variant": self.name, **kernel}] if kernel else [], package)
        spec = load_spec_text(text, f"{self.name}.yaml")
        if kernel:
            expand(spec)
        return text

    def mask(self, sizes: Sizes | None = None, /, *, kv_heads: int | None = None, **arguments: Any) -> torch.Tensor:
        """Mask of visible keys: bool, (batch, heads, queries, keys).

        ``sizes`` is a number of queries and keys, (queries, keys), or (batch, heads, queries, keys). Batch and heads
        that it leaves out are those of the tensors, else 1; a mask that depends on them needs one or the other. The
        mask's own tensors and scalars are keywords, as at a call; the result is on their device. Raises CallError for
        one that is missing, unknown, wrong, or not what was declared, and for a variant with ``keys``, whose calls list
        what is seen; LoadError without torch.
        """
        with _torch("a mask"):
            from attngen.inspect.seen import seen

        return seen(self.value, self._sizes(sizes, arguments), kv_heads, arguments)  # type: ignore[arg-type]

    def explain(
        self, sizes: Sizes | None = None, /, *, b: int | None = None, h: int | None = None,
        kv_heads: int | None = None, **arguments: Any,
    ) -> SeenKeys:  # fmt: skip
        """Bands of keys that a tile of queries sees, as formulas that print as text.

        With ``sizes`` and arguments as ``mask`` takes them, it also counts visible pairs, and tiles that are full,
        partial and empty, over all sequences and heads, or those of sequence ``b`` and head ``h``. If an argument that
        the mask reads is missing, nothing is counted, and the result says what is missing. Raises CallError, and
        LoadError without torch.
        """
        with _torch("explaining a mask"):
            from attngen.inspect.seen import seen_keys

        return seen_keys(self.value, self._sizes(sizes, arguments), kv_heads, arguments, b, h)

    def plot(
        self, sizes: Sizes | None = None, /, *, b: int | None = None, h: int | None = None,
        kv_heads: int | None = None, **arguments: Any,
    ) -> Picture:  # fmt: skip
        """Return a picture of the mask, text in a terminal: of sequence ``b`` and head ``h``, or of all together.

        With matplotlib, a notebook shows it as an image, and its ``save`` writes one. ``sizes`` and arguments are as
        for ``mask``. Raises CallError, and LoadError without torch.
        """
        with _torch("a picture of a mask"):
            from attngen.inspect.picture import picture

        return picture(self.name, self.mask(sizes, kv_heads=kv_heads, **arguments), b, h)

    def _sizes(self, sizes: Sizes | None, arguments: dict[str, Any]) -> Sizes | None:
        """The sizes, even if they were passed by name: only a variant's own argument may be called ``sizes``."""
        own = {scalar.name for scalar in self.value.scalars} | {tensor.name for tensor in self.value.tensors}
        if sizes is None and "sizes" in arguments and "sizes" not in own:
            return arguments.pop("sizes")
        return sizes


@contextmanager
def _torch(what: str) -> Iterator[None]:
    """Raise LoadError, in one sentence, where an import inside fails for want of torch."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise LoadError(needs_torch(what, error)) from None


def variant(
    mask: str | bool | None = None,
    score: str | float | None = None,
    *,
    name: str = "custom",
    sink: str | float | None = None,
    let: Mapping[str, Any] | None = None,
    scalars: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    blocks: int | None = None,
    dropout: bool = False,
    keys: str | None = None,
    sink_in_lse: bool = True,
    weights: str = "softmax",
) -> PythonVariant:
    """Return a variant of attention, to be passed to calls as ``variant=``.

    The arguments are the fields of a variant in a spec, described in docs/spec.md: ``mask`` is true where a query sees
    a key; ``score`` is the logit in terms of ``s``; ``sink`` is a logit of each head that has no key, and
    ``sink_in_lse=False`` leaves it out of the log-sum-exp; with ``blocks=64`` or 128, queries see, of what ``mask``
    shows, the blocks of keys that ``block_mask`` of the call shows, bool, (batch, heads, query blocks, key blocks);
    ``let`` names values and functions, in order; ``scalars`` and ``tensors`` declare the arguments of a call, for
    example ``tensors={"window": {"dtype": "int32", "shape": ["h"]}}``; ``weights="sigmoid"`` takes the sigmoid of each
    logit in place of the softmax; ``dropout`` drops probabilities; with ``keys="index"``, queries see only the keys
    that the call lists in ``indices``. Kernels built from a spec under the same ``name``, with the same definition,
    serve its calls.

    Raises SpecError, which names the argument and marks the place in an expression. Warns about expressions that
    are legal but probably mistakes, such as a condition that is never true.
    """
    given = {
        "mask": mask, "score": score, "sink": sink, "blocks": blocks, "let": let, "scalars": scalars,
        "tensors": tensors,
    }  # fmt: skip
    settings = {"dropout": dropout, "keys": keys, "sink_in_lse": sink_in_lse, "weights": weights}
    defaults = {one.name: one.default for one in dataclasses.fields(VariantSettings)}
    given |= {setting: value for setting, value in settings.items() if value is not defaults[setting]}
    named = {field: value for field, value in given.items() if value is not None}
    fields = {field: value for field, value in named.items() if not isinstance(value, Mapping) or value}
    made = _made(name, fields)
    from attngen.schema import doubts_of_fields

    for doubt in doubts_of_fields(name, fields):
        warnings.warn(f"variant '{name}': {doubt.field}: {doubt.message}", UserWarning, stacklevel=2)
    return made


def _made(name: str, fields: dict[str, Any]) -> PythonVariant:
    """Return the variant of a name and fields."""
    return python_variant(checked(name, fields), fields)


def checked(name: str, fields: Mapping[str, Any]) -> Variant:
    """Return the variant of a name and fields, as declared; a fraction of the work. Raises SpecError."""
    try:
        from attngen.schema import declare_variant
    except ModuleNotFoundError as error:
        raise SpecError(
            f"making a variant needs {error.name}, which is not installed: pip install 'attngen[build]'"
        ) from None
    return declare_variant(name, fields)


def python_variant(declared: Variant, fields: Mapping[str, Any]) -> PythonVariant:
    """The value that calls take for a checked variant and its fields."""
    return PythonVariant(fold_conditions(declared), deepcopy(fields))
