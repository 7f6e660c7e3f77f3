"""The spec of a model: the kernels that it asks for, as few as serve it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from re import sub
from typing import Any

from attngen.arch import ARCHES
from attngen.cards import KINDS
from attngen.errors import PackageError, PlanError, SpecError
from attngen.integrations.shared import catalogue
from attngen.integrations.transformers.model_requests import Asking, ModelRequest, Use
from attngen.packaging.sizes import WheelSizes, estimated
from attngen.plan import plan
from attngen.schema import expand, load_spec_text, preset_names
from attngen.schema.kernel_spec import KernelSpec
from attngen.schema.writing import declaration, spec_text

#: Kinds of kernels that servers ask for, and their dtypes.
_SERVED, _SERVED_DTYPES = ("keys in pages", "split-KV"), ("bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Wish:
    """Uses of a spec for a model besides its forward."""

    arches: tuple[str, ...]
    training: bool = False
    serving: bool = False


@dataclass(frozen=True, slots=True)
class SpecEntry:
    """An entry of ``kernels``: one variant at one head dimension. The comment above it says which layers use it."""

    variant: str
    head_dim_qk: int
    head_dim_v: int
    dtype: str
    layout: str
    backward: bool = False
    split_kv: bool = False
    pack_gqa: bool = False
    uses: tuple[tuple[ModelRequest, Use], ...] = field(default=(), compare=False)

    def fields(self) -> dict[str, Any]:
        """Return the entry as a spec has it."""
        qk, v = self.head_dim_qk, self.head_dim_v
        values: dict[str, Any] = {
            "variant": self.variant, "head_dim": qk if qk == v else {"qk": qk, "v": v}, "dtype": self.dtype
        }  # fmt: skip
        if self.layout != "dense":
            values["layout"] = self.layout
        if self.backward:
            values["passes"] = ["forward", "backward"]
        if self.pack_gqa:
            values["pack_gqa"] = [False, True]
        if self.split_kv:
            values["split_kv"] = True
        return values

    def serves(self, request: ModelRequest, learns: bool) -> bool:
        """Whether its kernels take the calls of a request."""
        form = (self.head_dim_qk, self.head_dim_v, self.dtype, self.layout)
        asked = (request.head_dim_qk, request.head_dim_v, request.dtype, request.layout)
        return self.variant in request.variants and form == asked and (self.backward or not learns)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that call it, in the model's order."""
        return tuple(dict.fromkeys(name for _, use in self.uses for name in use.layers))

    def __str__(self) -> str:
        qk, v = self.head_dim_qk, self.head_dim_v
        dim = str(qk) if qk == v else f"{qk}/{v}"
        return f"{self.variant}, head_dim {dim}, {self.dtype}{'' if self.layout == 'dense' else f', {self.layout}'}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A spec as text, and remarks on what it leaves out."""

    text: str
    remarks: tuple[str, ...]


def model_spec(
    asking: Sequence[Asking], wish: Wish, *, package: str, source: str, max_size: int | None = None
) -> ModelSpec:
    """Return the spec that serves a model; ``asking`` has the model's requests in each dtype.

    A wheel of it takes at most ``max_size`` bytes, by estimate: kernels whose calls other kernels take, too, are left
    out until it does, those of the fewest layers first. Raises PackageError if that is not enough, and SpecError if no
    kernel can be built.
    """
    _check(asking, wish)
    remarks = list(dict.fromkeys(gap for each in asking for gap in each.gaps))
    entries: list[SpecEntry] = []
    for entry in _entries(asking, wish):
        planned = _planned(entry, wish)
        if isinstance(planned, SpecEntry):
            entries.append(planned)
        else:
            remarks.append(f"left out, since no kernel can be built: {entry}: {planned}")
    if not entries:
        raise SpecError(f"--model: {remarks[-1]}")
    if max_size is not None:
        entries, dropped = _within(entries, wish, max_size)
        remarks += dropped
    layers = dict.fromkeys(layer for each in asking for layer in each.layers)
    head = f"# What the layers of a model ask for ({source}), as attngen spec --model found it."
    return ModelSpec(_text(entries, wish, package, head, layers), tuple(remarks))


def _check(asking: Sequence[Asking], wish: Wish) -> None:
    """Raise SpecError for a wish that no kernel fulfils."""
    if not wish.serving:
        return
    served = [name for name in ARCHES if all(name in KINDS[kind].arches for kind in _SERVED)]
    for arch in wish.arches:
        if arch not in served:
            raise SpecError(f"--serving: kernels for caches are for {', '.join(served)}, found --arch {arch}")
    for request in (request for each in asking for request in each.requests):
        if request.dtype not in _SERVED_DTYPES:
            raise SpecError(
                f"--serving: kernels for caches are in {' and '.join(_SERVED_DTYPES)}, found {request.dtype}"
            )


def _entries(asking: Sequence[Asking], wish: Wish) -> list[SpecEntry]:
    """Return an entry for each variant that is the most specific one of a request."""
    uses_by_entry: dict[SpecEntry, list[tuple[ModelRequest, Use]]] = {}
    for request, use in (pair for each in asking for pair in each.requests.items()):
        form = (request.head_dim_qk, request.head_dim_v, request.dtype, request.layout)
        uses_by_entry.setdefault(SpecEntry(request.variants[0], *form), []).append((request, use))
    layouts = ("dense", "varlen", "paged")
    return sorted(
        (
            replace(
                entry,
                backward=wish.training and any(use.learns for _, use in uses),
                split_kv=wish.serving and (entry.layout == "paged" or any(use.steps for _, use in uses)),
                pack_gqa=wish.serving
                and any(use.grouped and (entry.layout == "paged" or use.steps) for _, use in uses),
                uses=tuple(uses),
            )
            for entry, uses in uses_by_entry.items()
        ),
        key=lambda entry: layouts.index(entry.layout),
    )


def _planned(entry: SpecEntry, wish: Wish) -> SpecEntry | str:
    """Return the entry, without packed heads or split keys if that cannot be planned, or why it cannot at all."""
    reason = ""
    for tried in dict.fromkeys((entry, replace(entry, pack_gqa=False), replace(entry, pack_gqa=False, split_kv=False))):
        try:
            for kernel in _kernels([tried], wish):
                plan(kernel)
        except (PlanError, SpecError) as error:
            reason = reason or error.message
        else:
            return tried
    return reason


def _kernels(entries: Sequence[SpecEntry], wish: Wish) -> tuple[KernelSpec, ...]:
    fields = [entry.fields() for entry in entries]
    return expand(load_spec_text(spec_text(_declarations(entries), fields, "model", wish.arches)))


def _within(entries: list[SpecEntry], wish: Wish, most: int) -> tuple[list[SpecEntry], list[str]]:
    """Return the entries that fit into a wheel of ``most`` bytes, by estimate, and remarks on those that do not."""
    remarks: list[str] = []
    while (sizes := estimated(_kernels(entries, wish))).total > most:
        spare = [(entry, others) for entry in entries if (others := _instead_of(entry, entries)) is not None]
        if not spare:
            raise _too_large(sizes, most)
        entry, others = min(spare, key=lambda pair: len(pair[0].layers))
        names = ", ".join(dict.fromkeys(other.variant for other in others))
        remarks.append(f"left out, since the wheel would be too large: {entry}; its calls run on {names}")
        entries = [
            replace(
                each, uses=(*each.uses, *(use for use, other in zip(entry.uses, others, strict=True) if other is each))
            )
            for each in entries
            if each is not entry
        ]
    return entries, remarks


def _instead_of(entry: SpecEntry, entries: Iterable[SpecEntry]) -> list[SpecEntry] | None:
    """Return another entry for each use of one, or None if some calls have no other."""
    others = [each for each in entries if each is not entry]
    takes = [
        next((each for each in others if each.serves(request, entry.backward and use.learns)), None)
        for request, use in entry.uses
    ]
    return [each for each in takes if each is not None] if None not in takes else None


def _too_large(sizes: WheelSizes, most: int) -> PackageError:
    try:
        sizes.require(most, "the wheel of this spec, by estimate,")
    except PackageError as error:
        return error
    raise AssertionError("what is small enough was refused")


# --- text -----------------------------------------------------------------------------------------------------


def _text(entries: Sequence[SpecEntry], wish: Wish, package: str, head: str, layers: Iterable[str]) -> str:
    """Return a spec, with a line above each entry that says who uses it. Entries that differ in dtype alone are one."""
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for entry in entries:
        comment, fields = _comment(entry, layers), entry.fields()
        _, row = rows.setdefault(f"{comment} {fields | {'dtype': None}}", (comment, {**fields, "dtype": []}))
        row["dtype"].append(fields["dtype"])
    for _, row in rows.values():
        row["dtype"] = row["dtype"][0] if len(row["dtype"]) == 1 else row["dtype"]
    comments, kernels = zip(*rows.values(), strict=True)
    return spec_text(_declarations(entries), kernels, package, wish.arches, head, comments)


def _declarations(entries: Iterable[SpecEntry]) -> dict[str, Mapping[str, Any]]:
    """Declarations of a spec: the variants that are not presets."""
    names = dict.fromkeys(entry.variant for entry in entries)
    return {name: declaration(catalogue.variant(name)) for name in names if name not in preset_names()}


def _comment(entry: SpecEntry, layers: Iterable[str]) -> str:
    """The layers that use an entry, in words, and when, if not always."""
    counts: Mapping[str, int] = _counts(entry.layers)
    totals = _counts(layers)
    parts = []
    for pattern, count in counts.items():
        total = totals.get(pattern, count)
        parts.append(pattern if total == 1 else f"{pattern} ({'all ' if count == total else f'{count} of '}{total})")
    occasions = dict.fromkeys(occasion for _, use in entry.uses for occasion in use.occasions)
    when = "" if "" in occasions else f"; {', '.join(occasions)}"
    return f"{', '.join(parts)}{when}"


def _counts(layers: Iterable[str]) -> dict[str, int]:
    """Number of layers of each kind: those whose names differ only in the first number."""
    counts: dict[str, int] = {}
    for layer in layers:
        pattern = sub(r"(^|\.)\d+(?=\.|$)", r"\1*", layer, count=1)
        counts[pattern] = counts.get(pattern, 0) + 1
    return counts
