"""Everything that goes into a compile goes into the key; how it is written down does not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attngen.compile.options import triton_options
from attngen.compile.toolchain import toolchain
from attngen.store.key import cache_key, compile_digest, digest

PLAN: dict[str, Any] = {
    "format": 1,
    "name": "fwd_sm90a",
    "variant": {"name": "causal", "mask": "q_pos >= kv", "scalars": [{"name": "window", "min": 1}], "tensors": []},
    "tile_m": 128,
    "stages": 2,
    "fast_math": True,
    "allow": [],
    "parameters": [{"name": "q", "kind": "pointer", "axis": None}],
}
INPUTS: dict[str, Any] = {
    "plan": PLAN,
    "source": "def f(): pass\n",
    "headers": {"tma.cuh": "#pragma once"},
    "options": {"triton": triton_options(4, 2)},
    "toolchain": {"triton": "3.9.0", "content": "abc"},
}


def key(inputs: dict[str, Any]) -> str:
    inputs = dict(inputs)
    return cache_key(inputs.pop("plan"), inputs.pop("source"), **inputs)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for name, child in value.items():
            yield from leaves(child, (*path, name))
    elif isinstance(value, list):
        yield path
        for i, child in enumerate(value):
            yield from leaves(child, (*path, i))
    else:
        yield path


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "more"]
    return f"{value} " if isinstance(value, str) else "something"


@pytest.mark.parametrize("path", list(leaves(INPUTS)), ids=lambda path: ".".join(map(str, path)))
def test_each_input_changes_the_key(path: tuple[Any, ...]) -> None:
    inputs = copy.deepcopy(INPUTS)
    parent = inputs
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = changed(parent[path[-1]])
    assert key(inputs) != key(INPUTS)


@pytest.mark.parametrize("part", ["plan", "headers", "options", "toolchain"])
def test_an_added_entry_changes_the_key(part: str) -> None:
    inputs = copy.deepcopy(INPUTS)
    inputs[part]["extra"] = None
    assert key(inputs) != key(INPUTS)


def test_the_order_of_mappings_does_not_change_the_key() -> None:
    def backwards(value: Any) -> Any:
        return {k: backwards(value[k]) for k in reversed(value)} if isinstance(value, dict) else value

    assert key(backwards(INPUTS)) == key(INPUTS)


def test_types_that_print_alike_differ() -> None:
    values = [1, "1", 1.0, True, "true", None, "null", [1], ["1"]]
    assert len({digest(value) for value in values}) == len(values)


def test_the_code_that_calls_the_compiler_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import attngen.compile

    before = compile_digest()
    for path in Path(attngen.compile.__file__).parent.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(attngen.compile, "__file__", str(tmp_path / "__init__.py"))
    assert compile_digest.__wrapped__() == before  # the place does not count
    (tmp_path / "options.py").write_text("")
    assert compile_digest.__wrapped__() != before


def test_the_key_is_one_hash() -> None:
    assert len(key(INPUTS)) == 64
    assert set(key(INPUTS)) <= set("0123456789abcdef")


def test_the_toolchain_is_told_by_version_and_content() -> None:
    tools = toolchain("triton", "sm80")
    assert tools["triton"]
    assert len(tools["content"] or "") == 16


def test_the_place_of_an_installation_is_no_part_of_the_toolchain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that an installer writes begins with the path of its interpreter."""

    def installed(place: str, library: str, command: str) -> dict[str, str | None]:
        folder = tmp_path / place / "triton-9.9.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 9.9\n")
        (folder / "RECORD").write_text(
            f"triton/lib.so,sha256={library},9\n../../../bin/proton,sha256={command},9\n/x/proton,sha256={command},9\n"
        )
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder.parent))
            return toolchain.__wrapped__("triton", "sm80")

    here = installed("here", "a", "b")
    assert here["triton"] == "9.9"
    assert installed("there", "a", "c") == here
    assert installed("changed", "x", "b") != here
