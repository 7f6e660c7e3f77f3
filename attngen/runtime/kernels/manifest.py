"""Reading a kernel's manifest: whole, unchanged since it was written, and of the types that the runtime goes by."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from attngen.errors import LoadError
from attngen.files import read_regular
from attngen.formats import MANIFEST_FORMAT
from attngen.lang.host import is_bound
from attngen.runtime.device.driver import REMEDY

MANIFEST = "manifest.json"
CHECKSUMS = "SHA256SUMS"

#: Grids of split-KV launches, and of those whose blocks share the keys of a tile of queries.
GRID, SHARES = "splits", "key_shares"

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Kind:
    """What may stand in a place of a manifest: in words, and as a test."""

    words: str
    fits: Callable[[Any], bool]

    def or_none(self) -> _Kind:
        return _Kind(f"{self.words} or null", lambda value: value is None or self.fits(value))


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of an object: what it holds, and whether it must be there."""

    form: Any  # _Kind | _Object | _List
    required: bool = False


@dataclass(frozen=True, slots=True)
class _List:
    of: Any


@dataclass(frozen=True, slots=True)
class _Object:
    entries: Mapping[str, _Entry]
    null: bool = False  # whether null may stand for it
    others: Any = None  # form of all other entries; None: they are not looked at


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (
        isinstance(value, dict) and set(value) == {"inf"} and type(value["inf"]) is int and value["inf"] in (1, -1)
    )


_NAME = _Kind("a name", lambda v: isinstance(v, str) and v.isprintable() and v != "" and "/" not in v)
_TEXT = _Kind("a text", lambda v: isinstance(v, str) and "\0" not in v)
_FLAG = _Kind("true or false", lambda v: isinstance(v, bool))
_COUNT = _Kind(f"a number from 0 to {_MOST}", lambda v: type(v) is int and 0 <= v <= _MOST)
_BLOCK = _Kind(f"a number from -1 to {_MOST}", lambda v: type(v) is int and -1 <= v <= _MOST)
_SOME = _Kind(f"a number from 1 to {_MOST}", lambda v: type(v) is int and 0 < v <= _MOST)
_NUMBER = _Kind("a number", _is_number)
_BOUND = _Kind("a number or an extent", lambda v: isinstance(v, str) or _is_number(v))
_AXIS = _Kind("an axis", lambda v: isinstance(v, str) or (type(v) is int and 0 <= v <= _MOST))
_EXTENT = _Kind("an extent", lambda v: isinstance(v, str) or (type(v) is int and 0 < v <= _MOST))


def _required(**forms: Any) -> dict[str, _Entry]:
    return {name: _Entry(form, required=True) for name, form in forms.items()}


def _optional(**forms: Any) -> dict[str, _Entry]:
    return {name: _Entry(form) for name, form in forms.items()}


_PARAMETERS = _List(
    _Object({
        **_required(name=_NAME, kind=_TEXT),
        **_optional(of=_TEXT.or_none(), axis=_AXIS.or_none(), type=_TEXT, offset=_COUNT, box=_List(_SOME),
                    divisibility=_COUNT.or_none(), swizzle=_COUNT.or_none(), window=_COUNT.or_none(), packed=_FLAG,
                    paged=_FLAG, transposed=_FLAG),
    })
)  # fmt: skip

_RESOURCES = _Object(_optional(shared_memory=_COUNT), null=True)
_TILE_MAP = _Object(
    {**_required(owner=_NAME, batch=_FLAG, heads=_FLAG), **_optional(slots=_FLAG, bits=_COUNT)}, null=True
)

_VARIANT = _Object({
    **_required(
        name=_NAME, mask=_TEXT, score=_TEXT.or_none(), let=_Object({}, others=_TEXT), mask_text=_TEXT.or_none(),
        score_text=_TEXT.or_none(),
        scalars=_List(_Object({
            **_required(name=_NAME, dtype=_TEXT),
            **_optional(const=_NUMBER.or_none(), min=_BOUND.or_none(), max=_BOUND.or_none(),
                        default=_NUMBER.or_none(), grad=_FLAG),
        })),
        tensors=_List(_Object({
            **_required(name=_NAME, dtype=_TEXT, shape=_List(_EXTENT),
                        monotone=_Object(_required(axis=_AXIS, order=_TEXT), null=True)),
            **_optional(range=_Kind(
                "null or two bounds",
                lambda v: v is None
                or (isinstance(v, list | tuple) and len(v) == 2 and all(b is None or _BOUND.fits(b) for b in v)),
            ), grad=_FLAG),
        })),
    ),
    **_optional(sink=_TEXT.or_none(), sink_text=_TEXT.or_none(), dropout=_FLAG),
})  # fmt: skip

_FACTOR = _Kind("a number or a size", lambda v: (type(v) is int and 0 <= v <= _MOST) or isinstance(v, str))

_LAUNCH = _Object({
    **_required(
        name=_NAME, symbol=_NAME, grid=_TEXT, tile_m=_SOME, tile_n=_SOME, threads=_SOME, parameters=_PARAMETERS,
    ),
    **_optional(persistent=_FLAG, cluster=_SOME, row_warps=_SOME, split=_FLAG, pdl=_FLAG, cooperative=_FLAG,
                resources=_RESOURCES, sha256=_TEXT, tile_map=_TILE_MAP),
})  # fmt: skip

_WORKSPACE = _Object({**_required(name=_NAME, dtype=_TEXT, terms=_List(_List(_FACTOR))), **_optional(multiple=_SOME)})

_TIMES = _Kind(
    "three numbers of nanoseconds, or none",
    lambda v: (
        isinstance(v, list | tuple) and len(v) in (0, 3) and all(type(n) in (int, float) and 0 <= n < 1e12 for n in v)
    ),
)
_TUNED = _Object(_required(file=_TEXT, gpu=_TEXT, times=_TIMES))
_VISIBLE = _List(_Kind("two bounds", lambda v: isinstance(v, list | tuple) and len(v) == 2 and all(map(is_bound, v))))

_MANIFEST = _Object({
    **_required(
        name=_NAME, package=_NAME, variant=_VARIANT, arch=_TEXT, dtype=_TEXT, head_dim_qk=_SOME, head_dim_v=_SOME,
        layout=_TEXT, direction=_TEXT, section_keys=_SOME, backend=_TEXT, loads=_TEXT, tile_m=_SOME, tile_n=_SOME,
        main=_NAME, launches=_List(_LAUNCH), resources=_Object(_required(shared_memory=_COUNT)),
    ),
    **_optional(
        section_heads=_SOME, scale_block=_BLOCK, split_size=_COUNT, times=_TIMES, visible=_VISIBLE,
        pack_gqa=_FLAG, split_kv=_FLAG, transposed_v=_FLAG, tuned=_List(_TUNED),
        sum_columns=_COUNT,
        ordered=_FLAG, sha256=_TEXT, min_driver=_COUNT.or_none(), iteration=_TEXT, workspaces=_List(_WORKSPACE),
        operands=_Object({}, others=_NAME), structure=_Object({**_optional(skips=_FLAG, uneven=_FLAG)}),
    ),
})  # fmt: skip


def check_manifest(manifest: Any, origin: str) -> None:
    """Raise LoadError unless a manifest has this version's format and each entry that the runtime reads its type."""
    if not isinstance(manifest, dict):
        raise LoadError(f"{origin}: its manifest is not an object but {_shown(manifest)}; {REMEDY}")
    version = manifest.get("format")
    if type(version) is not int or version != MANIFEST_FORMAT:
        raise LoadError(
            f"{origin}: manifest format {'unknown' if version is None else _shown(version)}, but this version of "
            f"attngen reads format {MANIFEST_FORMAT}; {REMEDY}"
        )
    for fault in _faults(manifest, _MANIFEST, ""):
        raise LoadError(f"{origin}: the manifest {fault}; {REMEDY}")


def read_manifest(folder: Path, *, sealed: bool = False) -> Any:
    """Return the JSON value of a kernel's manifest, which may be anything: ``Kernel`` checks what it holds.

    Where the folder has ``SHA256SUMS``, as every entry of the cache (``sealed``) must, the manifest is checked against
    it. Raises LoadError.
    """
    path = folder / MANIFEST
    try:
        data = read_regular(path)
    except FileNotFoundError:
        raise LoadError(f"{folder} holds no {MANIFEST}") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    expected = _checksum(folder, sealed)
    if expected is not None and sha256(data).hexdigest() != expected:
        raise LoadError(f"{path} is damaged (it does not match {CHECKSUMS}); {REMEDY}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error


def _checksum(folder: Path, sealed: bool) -> str | None:
    """Return the checksum that ``SHA256SUMS`` has of the manifest; None in a folder that has none."""
    try:
        lines = read_regular(folder / CHECKSUMS).decode("ascii", "replace").splitlines()
    except FileNotFoundError:
        if not sealed:
            return None
        raise LoadError(f"{folder} is damaged (it holds no {CHECKSUMS}); {REMEDY}") from None
    except OSError as error:
        raise LoadError(f"{folder / CHECKSUMS} cannot be read: {error.strerror}") from error
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if MANIFEST not in digests:
        raise LoadError(f"{folder} is damaged ({CHECKSUMS} does not list {MANIFEST}); {REMEDY}")
    return digests[MANIFEST]


def _faults(value: Any, form: Any, place: str) -> Iterator[str]:
    """Yield each fault of a value, as the end of a sentence; the depth is that of the form."""
    if isinstance(form, _Kind):
        if not form.fits(value):
            yield f"has {_shown(value)} in {place}, where {form.words} must stand"
    elif isinstance(form, _List):
        if not isinstance(value, list | tuple):  # tuples: a plan, before it is JSON
            yield f"has {_shown(value)} in {place}, where a list must stand"
            return
        for i, item in enumerate(value):
            yield from _faults(item, form.of, f"{place}[{i}]")
    elif value is None and form.null:
        return
    elif not isinstance(value, dict):
        yield f"has {_shown(value)} in {place}, where an object must stand"
    else:
        before = f"{place}." if place else ""
        for name, entry in form.entries.items():
            if name in value:
                yield from _faults(value[name], entry.form, before + name)
            elif entry.required:
                yield f"lacks '{before}{name}'"
        if form.others is not None:
            for name in value.keys() - form.entries.keys():
                yield from _faults(value[name], form.others, before + name)


def _shown(value: Any) -> str:
    """Return a value for a message, shortened; containers by their kind, since they may be deep."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return "a huge number"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
