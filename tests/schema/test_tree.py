"""The YAML reader: places, plain values, and everything that a hostile file may try."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest

from attngen.errors import Location, SpecError
from attngen.resources import specs_dir
from attngen.schema import tree
from tests.sampling import few


def parse(text: str | bytes) -> tree.Node:
    return tree.parse(text if isinstance(text, bytes) else text.encode(), "spec.yaml")


def test_values_follow_yaml_1_2():
    text = "{a: no, b: 'true', c: true, d: 0x10, e: 1e-3, f: 1_000, g: 12:30, h: ~, i: '', j: .5, k: -7, l: 2001-01-01}"
    assert parse(text).plain() == {
        "a": "no", "b": "true", "c": True, "d": 16, "e": 0.001, "f": "1_000", "g": "12:30", "h": None, "i": "",
        "j": 0.5, "k": -7, "l": "2001-01-01",
    }  # fmt: skip


def test_places_count_from_one():
    node = parse("schema: 1\nkernels:\n  - dtype: [bf16, fp16]\n    layout: dense\n")
    assert node.locate(("kernels", 0, "dtype", 1)) == Location("spec.yaml", 3, 19)
    assert node.locate(("kernels", 0, "layout", 0)) == Location("spec.yaml", 4, 13)
    assert node.locate(("kernels", 0, "layout"), key=True) == Location("spec.yaml", 4, 5)
    assert node.locate(("kernels", 0, "tile", "m")) == Location("spec.yaml", 3, 5)
    assert node.locate(()) == Location("spec.yaml", 1, 1)


def test_aliases_stand_for_their_value():
    assert parse("a: &list [1, 2]\nb: *list\n").plain() == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: !!python/object/apply:os.system ['true']", r":1: tag '.*' is not allowed"),
        ("a: !!str 1", "tag"),
        ("a: !local 1", "tag"),
        ("a: ! x", "tag"),
        ("!!map {a: 1}", "tag"),
        ("!!str a: 1", "plain text"),
        ("%TAG ! tag:evil,2000:\n---\na: !x 1", "tag"),
        ("a: 1\nb: 2\na: 3", r":3: field 'a' is given twice, first in line 1"),
        ("a: {<<: {b: 1}}", "merge keys"),
        ("? [a]\n: 1", "plain text"),
        ("? {a: 1}\n: 1", "plain text"),
        ("*a: 1", "plain text|not valid YAML"),
        ("a: &x [*x]", "no anchor"),
        ("a: *missing", "no anchor"),
        ("a: 1\n---\nb: 2", ":3?.*second document"),
        ("", "empty"),
        ("# only a comment", "empty"),
        ("a: [1, 2", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("\tx: 1", "not valid YAML"),
        ("a: @x", "not valid YAML"),
        ('a: "\\UFFFFFFFF"', "not valid YAML"),
        ('a: "\\uD800"', r"U\+D800"),
        ('a: "\\0"', r"U\+0000"),
        ("a: x\0y", r"U\+0000"),
        ("a: x\x07y", r"U\+0007"),
        ("a: x\u202ey", r"U\+202E"),
        ('a: "x\\u200by"', r"U\+200B"),
        ('a: "x\\u2028y"', r"U\+2028"),
        ("%YAML 3.0\n---\na: 1", "not valid YAML"),
        ("%YAML " + "9" * 9000 + ".0\n---\na: 1", "not valid YAML"),
        ("a: 99999999999999999999", "64 bits"),
        ("a: " + "9" * 100_000, "64 bits"),
        ("a: 0x" + "f" * 100_000, "64 bits"),
        ("a: 1e999", "finite"),
        (b"a: \xff\xfe", "not UTF-8"),
        (b"\xff\xfea\0:\0 \0001\0", "not UTF-8"),
        ("[" * 100_000, "nested"),
        ("{a: " * 100_000, "nested"),
        ("- " * 100_000, "nested"),
    ],
)
def test_refuses(text, says):
    with pytest.raises(SpecError, match=says):
        parse(text)


def test_anchor_bomb():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(SpecError, match="aliases counted in full"):
        parse("\n".join(lines))


@few(
    "text",
    [
        "x" * 10_000_000,
        "a: [" + "1, " * 300_000 + "1]",
        "#" * 999_000,
        "a: '" + "y" * 999_000 + "'",
        "- &a x\n" * 140_000,
    ],
    ids=["10 MB", "many values", "comment", "long text", "many anchors"],
    always=range(0, 999, 2),
)
def test_large_files_end_soon(text):
    started = time.process_time()  # of this process alone, whatever else the machine does
    with contextlib.suppress(SpecError):
        parse(text)
    assert time.process_time() - started < 5


def test_too_many_bytes():
    with pytest.raises(SpecError, match="1,000,001 bytes"):
        parse(b" " * 1_000_001)


@pytest.mark.parametrize("path", sorted((specs_dir() / "presets").glob("*.yaml"))[::4], ids=lambda path: path.stem)
def test_the_parser_in_c_gives_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places, values and errors, of shipped specs and of damaged ones."""
    if tree._QUICK is None:
        pytest.skip("PyYAML has no parser in C here")
    content, chance = path.read_bytes(), random.Random(path.stem)
    damaged = [content]
    for piece in (
        b":",
        b"\t",
        b"'",
        b"]",
        b"&a ",
        b"*a",
        b"!x ",
        b"|",
        b"\x00",
        b"\xc2\x85",
        b"? ",
        b"---\n",
        b"\r",
        b"@",
    ):
        at = chance.randrange(min(len(content), 1500))
        damaged.append(content[:at] + piece + content[at + chance.randrange(4) :][: 3000 - at])
    if len(content) > 3000:
        del damaged[0]
    for text in damaged:
        outcomes = []
        for quick in (tree._QUICK, None):
            with monkeypatch.context() as patch:
                patch.setattr(tree, "_QUICK", quick)
                try:
                    outcomes.append(repr(tree.parse(text, "spec.yaml")))
                except SpecError as error:
                    outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("text", "remedy"), [("a:\n\tb: 1", "indent with spaces"), ("mask: q: 1", 'in quotes, as in mask: "q_pos >= kv"')]
)
def test_frequent_mistakes_have_a_remedy(text: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        parse(text)
