"""Manifests and indexes that somebody made: each loads or is an error of attngen's own, never a traceback or a wait."""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attngen
from attngen.errors import AttngenError, LoadError
from attngen.plan import plan
from attngen.runtime.kernels.module import Kernel, read_kernel
from attngen.runtime.registry.lookup import BrokenKernelWarning, registry
from attngen.schema import expand, load_spec_text
from attngen.store import StoreWarning
from attngen.store.key import digest
from tests.runtime.manifests import compile_as_manifest
from tests.runtime.support import manifest_of, variant, window_variant, write_build, write_kernel
from tests.sampling import few

SPEC = """
schema: 1
package: mine
arch: sm90a
variants:
  band:
    scalars: {window: {type: int32, min: 0, default: 64}, cap: {type: fp32, const: 30.0}}
    tensors: {doc: {dtype: int32, shape: [b, seqlen_k], monotone: {axis: 1}, range: {min: 0, max: 100}}}
    let: {gap: q_pos - kv}
    mask: gap <= window and doc[b, kv] > 3
    score: cap * tanh(s / cap)
kernels: [{variant: band, head_dim: 64, backend: triton, passes: [forward, backward]}]
"""

DEEP: Any = None
for _ in range(300):
    DEEP = [DEEP]

VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**4000, -(10**30), 0.5, 1e308, float("inf"), float("nan"), "", "\0",
    "a\0b", "../../etc/passwd", "x" * 100_000, "(" * 5_000, "q_pos >= nonsense", "\ud800", [], [[]], [None], {},
    {"": None}, {"inf": 1}, {"inf": []}, {"inf": "a"}, [1, 2, 3], DEEP,
)  # fmt: skip


def real_manifests() -> list[dict[str, Any]]:
    """Manifests as builds write them: of a forward and of a backward with parts."""
    plans = [plan(kernel) for kernel in expand(load_spec_text(SPEC, "mine.yaml"))]
    manifests = [dict(compile_as_manifest(made, SimpleNamespace(text="")).manifest) for made in plans]
    assert [len(manifest["launches"]) > 1 for manifest in manifests] == [False, True]
    mapped = manifest_of(variant(), tile_map=(True, False))
    assert mapped["launches"][0]["name"] == "classify"
    return [json.loads(json.dumps(manifest)) for manifest in (*manifests, mapped)]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON value, down to a depth that no manifest has."""
    yield path
    if len(path) > 8:
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(value: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value of which one to three places are gone, moved or of another type."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        paths = list(places(value))
        depths = sorted({len(path) for path in paths})
        depth = rng.choice(depths)
        path = rng.choice([path for path in paths if len(path) == depth])
        if not path:
            if rng.random() < 0.2:
                return rng.choice(VALUES)
            continue
        holder = value
        for step in path[:-1]:
            holder = holder[step]
        kind = rng.randrange(3)
        if kind == 0:
            del holder[path[-1]]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(("extra", "", "\0"))] = holder.pop(path[-1])
        else:
            holder[path[-1]] = json.loads(json.dumps(rng.choice(VALUES)))
    return value


def encoded(value: Any, rng: random.Random) -> bytes:
    """Return a JSON value as bytes, at times cut off, flipped or with foreign bytes inside."""
    with unlimited_digits():
        data = json.dumps(value).encode()
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(12)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.choice((b"\0", b"\xff", b"[" * 100_000, b"9" * 5_000)) + data[at:]
    if kind == 2 and at < len(data):
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    return data


@contextmanager
def unlimited_digits() -> Iterator[None]:
    """Let this process write numbers that it would not read."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def use(kernel: Kernel) -> None:
    """Ask a kernel for all that a call asks it for, but for its launch."""
    repr(kernel)
    for ask in (
        lambda: kernel.variant, lambda: kernel.const_scalars, lambda: kernel.main.entry.layout,
        lambda: kernel.main.needs_tile_map and kernel.main.tile_map,
        lambda: [(part.entry.layout, part.by_keys, part.needs_tile_map) for part in kernel.launches],
        lambda: [one.elements({}) for one in kernel.workspaces], lambda: kernel._image_bytes,
    ):  # fmt: skip
        with suppress(AttngenError):
            ask()


def put_manifest(folder: Path, data: bytes) -> None:
    """Put a manifest in place of a kernel's, with the checksum that makes it pass for what was written."""
    (folder / "manifest.json").write_bytes(data)
    (folder / "SHA256SUMS").write_text(f"{sha256(data).hexdigest()}  manifest.json\n")


#: Mutations of each manifest or index.
TRIES = 60


@few("number", range(3), always=(1,))
def test_a_mutated_manifest_loads_or_is_a_load_error(tmp_path: Path, number: int) -> None:
    rng = random.Random(number)
    real = real_manifests()[number]
    folder = write_kernel(tmp_path / "k", real)
    use(read_kernel(folder, sealed=True))
    messages: list[str] = []
    for _ in range(TRIES):
        put_manifest(folder, encoded(mutated(real, rng), rng))
        try:
            kernel = read_kernel(folder)
        except LoadError as error:
            messages.append(str(error))
        else:
            use(kernel)
        with suppress(AttngenError):
            attngen.load(folder)
    assert TRIES / 4 < len(messages) < TRIES
    for message in messages:
        assert str(folder) in message
        assert len(message) < 1000


@pytest.mark.exhaustive
def test_a_mutated_entry_of_a_build_is_passed_over() -> None:
    rng = random.Random(0)
    store = write_build("own", variant(), window_variant())
    (folder,) = (store.path(k["key"]) for k in index_of(store.root)["kernels"] if k["variant"] == "causal")
    real = json.loads((folder / "manifest.json").read_bytes())
    for _ in range(100):
        put_manifest(folder, encoded(mutated(real, rng), rng))
        registry.refresh()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BrokenKernelWarning)
            with suppress(AttngenError):
                registry.find("causal")
            assert registry.find("window").package == "own"


def index_of(root: Path) -> dict[str, Any]:
    """The index that a build wrote."""
    index = json.loads((root / "builds" / "own.json").read_bytes())
    assert isinstance(index, dict)
    return index


@few("sealed", [True, False])
def test_a_mutated_index_is_damage(sealed: bool) -> None:
    """Most are refused, with their path, also those with a digest that fits: it is no signature."""
    rng = random.Random(sealed)
    store = write_build("own", variant(), window_variant())
    path = store.root / "builds" / "own.json"
    real = index_of(store.root)
    messages: list[str] = []
    for _ in range(TRIES):
        value = mutated(real, rng)
        if sealed and isinstance(value, dict):
            value.pop("digest", None)
            with suppress(ValueError, TypeError, UnicodeEncodeError), unlimited_digits():
                value["digest"] = digest(value)
        path.write_bytes(encoded(value, rng))
        registry.refresh()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            warnings.simplefilter("ignore", BrokenKernelWarning)
            with suppress(AttngenError):
                registry.find("causal")
            try:
                attngen.load(path)
            except AttngenError as error:
                messages.append(str(error))
        registry.clear()
    assert len(messages) > 3 * TRIES / 4
    assert all(str(path) in message for message in messages)


@pytest.mark.parametrize("name", ["manifest.json", "SHA256SUMS", "kernel.cubin"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_files_that_are_not_regular_neither_hang_nor_fill_memory(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    folder = write_kernel(tmp_path / "k", manifest_of(variant()))
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(LoadError, match="regular file|[Dd]irectory"):
        _ = attngen.load(folder).kernels("causal")[0]._image_bytes


def test_a_manifest_that_is_not_what_was_written_is_damage() -> None:
    store = write_build("own", variant(), window_variant())
    key = next(k["key"] for k in index_of(store.root)["kernels"] if k["variant"] == "causal")
    manifest = store.path(key) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"tile_m": 64', b'"tile_m": 32'))
    with pytest.raises(LoadError, match="manifest.json is damaged .it does not match SHA256SUMS"):
        read_kernel(store.path(key))
    (store.path(key) / "SHA256SUMS").unlink()
    assert read_kernel(store.path(key)).tile_m == 32  # a folder that was put together by hand
    with pytest.warns(BrokenKernelWarning, match="holds no SHA256SUMS"):
        assert registry._rank("built")["own"].kernels("causal") == ()


def test_a_wrong_type_is_named_with_its_place(tmp_path: Path) -> None:
    manifest = manifest_of(variant())
    manifest["launches"][0]["parameters"][2]["offset"] = "8"
    with pytest.raises(LoadError, match=r'has "8" in launches\[0\].parameters\[2\].offset, where a number from 0 to'):
        attngen.load(write_kernel(tmp_path / "k", manifest))
