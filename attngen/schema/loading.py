"""Loads a spec file: it is read and checked against the models, its includes are followed, its variants compiled.

Includes bring variants only: what the included file would build on its own is not built. An included file is named
relative to the file that includes it and lies in the folder of the spec that is loaded, or below it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from attngen import resources
from attngen.arch import ARCHES
from attngen.errors import AttngenError, Gathered, Location, SpecError, suggest
from attngen.formats import SCHEMA
from attngen.lang.check import compile_variant, with_listed
from attngen.lang.doubts import Doubt, doubts, extent_doubts
from attngen.lang.facts import Facts
from attngen.lang.ir import Const, Type
from attngen.lang.parser import Written
from attngen.lang.source import locate
from attngen.lang.variant import Monotone, Scalar, Tensor, Variant, declared_settings
from attngen.schema import names, tree
from attngen.schema.messages import field_path, spec_error, spec_errors, unknown_fields
from attngen.schema.models import KernelModel, ScalarModel, SpecModel, TensorModel, VariantModel
from attngen.schema.quoting import show

MAX_INCLUDE_DEPTH = 8
MAX_INCLUDED_FILES = 64


@dataclass(frozen=True)
class DeclaredVariant:
    """A variant with what its declaration says besides the expressions; ``path`` is its place in ``tree``."""

    variant: Variant
    model: VariantModel
    tree: tree.Node
    location: Location

    def locate(self, name: str) -> Location:
        """Return the place of one of its fields, or of the variant where it lacks that field."""
        return self.tree.locate(("variants", self.variant.name, name))

    def __repr__(self) -> str:
        return f"DeclaredVariant({self.variant.name}, {self.location})"


@dataclass(frozen=True)
class SpecSource:
    """A file that a spec was read from: ``name`` is never absolute, ``path`` is as the user wrote it."""

    name: str
    sha256: str
    path: str


@dataclass(frozen=True)
class Spec:
    """A loaded spec: its form is right and every variant in it, or included by it, compiles.

    ``file`` names it in messages (as the user wrote it), ``name`` in what is generated (never absolute).
    """

    file: str
    name: str
    package: str
    model: SpecModel
    tree: tree.Node
    variants: Mapping[str, DeclaredVariant] = field(default_factory=dict)
    sources: tuple[SpecSource, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Spec({self.file}, package {self.package}: {len(self.variants)} variants, "
            f"{len(self.model.kernels)} entries of kernels)"
        )


@dataclass(frozen=True)
class Draft:
    """A spec as far as it can be read, and its errors.

    Malformed entries of ``kernels`` are None in its model, and variants with errors (``broken``) show every key, or
    are what the rest of their fields declares. ``unsure`` tells that a file which may declare variants cannot be read.
    """

    spec: Spec
    errors: tuple[AttngenError, ...] = ()
    unsure: bool = False
    broken: frozenset[str] = frozenset()


def read_spec(path: str | Path) -> Draft:
    """Read a spec; SpecError for one of which nothing can be read."""
    path = Path(path)
    return _Loader(path.parent).load(path, _read(path, Location(str(path))))


def read_spec_text(text: str, file: str) -> Draft:
    """Read the spec in ``text``; includes are looked for beside ``file``, which need not exist."""
    return _Loader(Path(file).parent).load(Path(file), text.encode("utf-8", "surrogatepass"))


def _read(path: Path, asked: Location) -> bytes:
    """Return the content of a file, at most one byte more than a spec may hold."""
    try:
        if path.is_dir():
            raise SpecError(f"'{path}' is a folder; name a YAML file in it", location=asked)
        if not path.is_file():
            others = {str(one) for folder in (path.parent, Path("specs")) for one in folder.glob("*.yaml")}
            raise SpecError(f"there is no file '{path}'{suggest(str(path), sorted(others))}", location=asked)
        with path.open("rb") as stream:
            content = stream.read(tree.MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SpecError(f"cannot read {str(path)!r}: {error}", location=asked) from error
    if len(content) > tree.MAX_BYTES:
        raise SpecError(
            f"larger than {tree.MAX_BYTES:,} bytes, the most that a spec holds", location=Location(str(path))
        )
    return content


class _Loader:
    """Loads one spec. It reads each file once, and detects circular includes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: dict[str, SpecSource] = {}
        self.loaded: dict[Path, dict[str, DeclaredVariant]] = {}
        self.gathered = Gathered()
        self.broken: set[str] = set()  # names of variants with errors
        self.without_include = False  # whether variants may be declared in a file that cannot be read

    def load(self, path: Path, content: bytes) -> Draft:
        model, node, unsure = self.parse(path, content)
        variants = self.variants(path, model, node, unsure, chain=(path.resolve(),))
        package = model.package or "unnamed"
        with self.gathered:
            package = model.package or _package_of(path)
        spec = Spec(
            file=str(path),
            name=resources.display_name(path),
            package=package,
            model=model,
            tree=node,
            variants=variants,
            sources=tuple(self.sources.values()),
        )
        return Draft(spec, tuple(self.gathered.errors), self.without_include, frozenset(self.broken))

    def parse(self, path: Path, content: bytes) -> tuple[SpecModel, tree.Node, dict[str, frozenset[str] | None]]:
        """Return a file as it is, or what of it is well-formed; then its errors are gathered.

        The names that malformed declarations of a variant may have declared come with it, by the variant; None where
        nothing of it can be read. Raises SpecError for a file of which nothing can be read.
        """
        try:
            names.check_file_name(path.name)
        except ValueError as error:
            raise SpecError(str(error), location=Location(repr(str(path))), field="file name") from error
        file = str(path)
        node = tree.parse(content, file)
        _check_schema(node)
        self.sources[file] = SpecSource(resources.display_name(path), sha256(content).hexdigest(), file)
        with self.gathered:
            _refuse_empty(node)
        try:
            return SpecModel.model_validate(node.plain()), node, {}
        except ValidationError as error:
            self.gathered.errors += spec_errors(error, node, SpecModel, empty=False)
        return _well_formed(node)

    def variants(
        self,
        path: Path,
        model: SpecModel,
        node: tree.Node,
        unsure: Mapping[str, frozenset[str] | None],
        chain: tuple[Path, ...],
    ) -> dict[str, DeclaredVariant]:
        """Return the variants of a file and of its includes; a name that two files give is refused.

        A variant that has errors shows every key, so that the entries which name it can be checked.
        """
        by_name: dict[str, DeclaredVariant] = {}
        for name, variant in model.variants.items():
            before = len(self.gathered.errors)
            if unsure.get(name, frozenset()) is not None:
                with self.gathered:
                    by_name[name] = _declare(name, variant, node, Location(str(path)), unsure.get(name) or ())
            if unsure.get(name):  # a tensor that cannot be read may have the extent that a bound names
                told = self.gathered.errors[before:]
                self.gathered.errors[before:] = [error for error in told if not _names_an_extent(error, variant)]
            if name in unsure or name not in by_name:
                self.broken.add(name)
            if name not in by_name:
                hidden = with_listed(Variant(name), variant.keys, dropout=False)
                by_name[name] = DeclaredVariant(hidden, variant, node, Location(str(path)))
        for index, text in enumerate(model.include or ()):
            place = node.locate(("include", index))
            included: dict[str, DeclaredVariant] | None = None
            with self.gathered:
                included = self.included(path, text, place, chain)
            self.without_include |= included is None
            for name, declared in (included or {}).items():
                if by_name.setdefault(name, declared).location != declared.location:
                    message = f"variant '{name}' of {declared.location} is already declared in {by_name[name].location}"
                    self.gathered.errors.append(SpecError(message, location=place, field="include"))
        return by_name

    def included(self, path: Path, text: str, place: Location, chain: tuple[Path, ...]) -> dict[str, DeclaredVariant]:
        target = self.resolve(path, text, place)
        resolved = target.resolve()
        if resolved in chain:
            circle = " -> ".join(step.name for step in (*chain, resolved))
            raise SpecError(f"circular includes: {circle}", location=place, field="include")
        if len(chain) > MAX_INCLUDE_DEPTH or len(self.sources) > MAX_INCLUDED_FILES:
            raise SpecError(
                f"more than {MAX_INCLUDE_DEPTH} includes deep or {MAX_INCLUDED_FILES} files",
                location=place,
                field="include",
            )
        if resolved not in self.loaded:
            model, node, unsure = self.parse(target, _read(target, place))
            self.loaded[resolved] = self.variants(target, model, node, unsure, (*chain, resolved))
        return self.loaded[resolved]

    def resolve(self, path: Path, text: str, place: Location) -> Path:
        """Return the file that an include names, which lies in the folder of the spec also after links are followed."""
        relative = PurePosixPath(text)
        if relative.is_absolute() or ".." in relative.parts or "\\" in text or ":" in text:
            raise SpecError(
                f"found {show(text)}; allowed: a file in the spec's folder or below, by a relative path without '..'",
                location=place,
                field="include",
            )
        target = path.parent / relative
        try:
            inside = target.resolve().is_relative_to(self.folder.resolve())
        except (OSError, ValueError, RuntimeError) as error:  # too long, NUL, a circle of links
            raise SpecError(
                f"found {show(text)}, which is not a path: {error}", location=place, field="include"
            ) from error
        if not inside:
            raise SpecError(f"{show(text)} leads out of the spec's folder", location=place, field="include")
        return target


def _check_schema(node: tree.Node) -> None:
    """Refuse anything but a spec of this schema, before the models complain about everything in it."""
    if not isinstance(node.value, dict):
        raise SpecError(f"found {show(node.plain())}; a spec is a mapping that starts with 'schema: {SCHEMA}'",
                        location=node.location)  # fmt: skip
    if "schema" not in node.value:
        raise SpecError(f"missing; write 'schema: {SCHEMA}'", location=node.location, field="schema")
    version = node.value["schema"]
    if version.value == SCHEMA and isinstance(version.value, int) and not isinstance(version.value, bool):
        return
    newer = isinstance(version.value, int) and version.value > SCHEMA
    advice = "; it was written for a newer attngen" if newer else ""
    raise SpecError(
        f"found {show(version.plain())}; allowed: {SCHEMA}{advice}", location=version.location, field="schema"
    )


def _refuse_empty(node: tree.Node, path: tuple[str | int, ...] = ()) -> None:
    """Refuse a field or an element that is named but empty: it would mean the same as leaving it out."""
    gathered = Gathered()
    if node.value is None:
        hint = "; 'mask: true' lets every query see every key" if path[-1:] == ("mask",) else ""
        raise SpecError(f"empty; give it a value or leave it out{hint}", location=node.location, field=field_path(path))
    below = node.value.items() if isinstance(node.value, dict) else ()
    for step, child in enumerate(node.value) if isinstance(node.value, tuple) else below:
        with gathered:
            _refuse_empty(child, (*path, step))
    gathered.throw()


def _well_formed(node: tree.Node) -> tuple[SpecModel, tree.Node, dict[str, frozenset[str] | None]]:
    """The well-formed part of a file with errors, as ``parse`` returns it.

    Each malformed entry of ``kernels`` becomes None, unless what is wrong is only a field that there is not.
    """
    plain = node.plain()
    fields: dict[str, Any] = {"arch": (next(iter(ARCHES)),)}  # a wrong arch must not look like a missing one
    for name in ("package", "arch", "include"):
        with suppress(ValidationError):
            fields[name] = getattr(SpecModel.model_validate({"schema": SCHEMA, name: plain.get(name)}), name)
    declared, entries = plain.get("variants"), plain.get("kernels")
    variants: dict[str, VariantModel] = {}
    unsure: dict[str, frozenset[str] | None] = {}
    for name, variant in declared.items() if isinstance(declared, dict) else ():
        try:
            variants[name] = VariantModel.model_validate(variant)
        except ValidationError as error:
            variants[name], unsure[name] = _sound_fields(variant, error)
    kernels = [_sound_entry(entry) for entry in (entries if isinstance(entries, list) else ())]
    model = SpecModel.model_construct(version=SCHEMA, variants=variants, kernels=tuple(kernels), **fields)
    return model, node, unsure


def _sound_entry(entry: Any) -> KernelModel | None:
    """An entry of ``kernels`` without its unknown fields, or None: one that is misspelt may change its meaning."""
    try:
        return KernelModel.model_validate(entry)
    except ValidationError as error:
        unknown = unknown_fields(error, KernelModel)
    with suppress(ValidationError):
        if unknown and not any(unknown.values()):
            return KernelModel.model_validate({name: value for name, value in entry.items() if name not in unknown})
    return None


#: Fields of a variant that declare names, by these.
_DECLARING = ("scalars", "tensors", "let")


def _sound_fields(fields: Any, error: ValidationError) -> tuple[VariantModel, frozenset[str] | None]:
    """The rest of a variant without its malformed fields, and the names that these may have declared.

    Of declarations, only the malformed ones are left out. None: nothing can be said about the rest.
    """
    rest, names_of = deepcopy(fields), set[str]()
    for path in [detail["loc"] for detail in error.errors(include_url=False)]:
        if not path or path[0] == "keys":
            return VariantModel(), None
        field, *below = path
        value = rest.get(field)
        if field in _DECLARING and below and isinstance(value, dict):
            value.pop(below[0], None)
            names_of.add(_base(below[0]))
        else:
            names_of |= {_base(name) for name in value} if isinstance(value, dict) else set()
            rest.pop(field, None)
    try:
        return VariantModel.model_validate(rest), frozenset(names_of)
    except ValidationError:
        return VariantModel(), None


def _base(name: Any) -> str:
    """The name that the left side of a let entry declares."""
    return str(name).partition("(")[0].strip()


def _names_an_extent(error: AttngenError, model: VariantModel) -> bool:
    """Whether an error is about a declaration with a bound that is an extent."""
    section, _, name = str(error.to_dict()["field"]).partition(".")
    name = name.partition(".")[0]
    limits = model.tensors[name].range if section == "tensors" and name in model.tensors else model.scalars.get(name)
    return limits is not None and any(isinstance(bound, str) for bound in (limits.min, limits.max))


def _package_of(path: Path) -> str:
    """Return the name of the package that a file's name implies."""
    stem = path.name.split(".")[0].replace("-", "_").lower()
    try:
        return names.check_package_name(stem)
    except ValueError as error:
        raise SpecError(
            f"missing, and the file's name gives none: {error}", location=Location(str(path), 1), field="package"
        ) from error


def declare_variant(name: str, fields: Mapping[str, Any]) -> Variant:
    """Return the variant of these fields, given as plain Python values and checked like those of a file.

    Raises SpecError, which names the field.
    """
    node = tree.of_values(fields)
    _refuse_empty(node)
    try:
        names.check_variant_name(name)
    except ValueError as error:
        raise SpecError(str(error), field="name") from error
    try:
        model = VariantModel.model_validate(node.plain())
    except ValidationError as error:
        raise spec_error(error, node, VariantModel) from error
    return _compile(name, model, None)


def doubts_of(declared: DeclaredVariant) -> list[Doubt]:
    """Warnings about parts of a variant that are legal but probably mistakes, with their places in the file."""
    name = declared.variant.name
    return _doubts(name, declared.model, _places(declared.tree.value["variants"].value[name]))


def doubts_of_fields(name: str, fields: Mapping[str, Any]) -> list[Doubt]:
    """Warnings about fields, as ``declare_variant`` takes them, that are legal but probably mistakes."""
    return _doubts(name, VariantModel.model_validate(tree.of_values(fields).plain()), None)


def _doubts(name: str, model: VariantModel, places: Mapping[str, Location] | None) -> list[Doubt]:
    written: list[Written] = []
    variant = _compile(name, model, places, written)
    values = {one.snippet.field.removeprefix("let."): one.values.get(one.tree) for one in written}
    constants = {scalar.name for scalar in variant.scalars if scalar.const is not None}
    constants |= {key for key, value in values.items() if isinstance(value, Const)}
    known = {*names.EXTENTS, *(scalar.name for scalar in variant.scalars if scalar.type is Type.INT)}
    misspelled = extent_doubts(variant.tensors, known)
    misspelled = [replace(doubt, location=locate(places, doubt.field)) for doubt in misspelled]
    return [*misspelled, *doubts(written, Facts.of(variant), constants)]


def _declare(
    name: str, model: VariantModel, node: tree.Node, file: Location, unsure: Collection[str]
) -> DeclaredVariant:
    place = node.value["variants"].keys[name] if "variants" in node.value else file
    places = _places(node.value["variants"].value[name])
    return DeclaredVariant(_compile(name, model, places, unsure=unsure), model, node, place)


def _compile(
    name: str,
    model: VariantModel,
    places: Mapping[str, Location] | None,
    written: list[Written] | None = None,
    unsure: Collection[str] = (),
) -> Variant:
    return compile_variant(
        name,
        mask=model.mask,
        score=model.score,
        sink=model.sink,
        scalars=tuple(_scalar(key, scalar) for key, scalar in model.scalars.items() if not _is_learned(scalar)),
        tensors=(
            *(_tensor(key, tensor) for key, tensor in model.tensors.items()),
            *(_learned(key, scalar) for key, scalar in model.scalars.items() if _is_learned(scalar)),
        ),
        let=dict(model.let),
        locate=places,
        written=written,
        unsure=unsure,
        blocks=model.blocks,
        **{one.name: getattr(model, one.name) for one in declared_settings()},
    )


def _places(node: tree.Node, prefix: str = "") -> dict[str, Location]:
    """Return the place of every field below a node, named as ``scalars.window.min``; the node itself is ``""``."""
    places = {prefix: node.location}
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            places |= _places(child, f"{prefix}.{key}".lstrip("."))
    return places


def _scalar(name: str, model: ScalarModel) -> Scalar:
    return Scalar(
        name=name,
        dtype=model.type,
        const=model.fixed,
        min=model.min,
        max=model.max,
        default=model.default if model.fixed is None else None,
        grad=model.grad,
    )


def _is_learned(model: ScalarModel) -> bool:
    """Whether a scalar gets a gradient, which only a tensor can have; others that ask for one are refused later."""
    return model.grad and model.type == "fp32" and model.fixed is None and model.default is None


def _learned(name: str, model: ScalarModel) -> Tensor:
    """Return a scalar that gets a gradient: a call passes it as a tensor with one element."""
    return Tensor(name=name, dtype=model.type, range=(model.min, model.max), grad=True)


def _tensor(name: str, model: TensorModel) -> Tensor:
    return Tensor(
        name=name,
        dtype=model.dtype,
        shape=model.shape,
        monotone=Monotone(model.monotone.axis, model.monotone.order, model.monotone.runs) if model.monotone else None,
        range=(model.range.min, model.range.max) if model.range else None,
        grad=model.grad,
    )
