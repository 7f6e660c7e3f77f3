"""The table [tool.attngen], sizes and tags."""

from __future__ import annotations

from typing import Any

import pytest

from attngen.build.kernel_filter import KernelFilter
from attngen.errors import PackageError
from attngen.packaging.settings import PLATFORMS, Settings, check_platforms, size_in_bytes


def test_a_table_is_read() -> None:
    table = {"specs": ["a.yaml", "masks/b.yaml"], "arch": ["sm90a"], "platforms": ["linux_x86_64"], "max-size": "8 MB"}
    assert Settings.of(table) == Settings(
        ("a.yaml", "masks/b.yaml"), KernelFilter(arch=("sm90a",)), ("linux_x86_64",), 8_000_000
    )
    plain = Settings.of({"specs": ["a.yaml"]})
    assert (plain.only, plain.platforms, plain.max_size, plain.tuned) == (KernelFilter(), PLATFORMS, None, ())
    assert Settings.of({"specs": ["a.yaml"], "tuned": ["cards/h200.yaml"]}).tuned == ("cards/h200.yaml",)
    assert plain.tag == "py3-none-manylinux_2_17_aarch64.manylinux_2_17_x86_64"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, r"there is no table \[tool.attngen\]"),
        ({}, "specs: missing"),
        ({"specs": []}, "specs: missing"),
        ({"specs": "a.yaml"}, "specs: found 'a.yaml'; allowed: a list"),
        ({"specs": ["/a.yaml"]}, "specs: found '/a.yaml'; allowed: files inside the project"),
        ({"specs": ["x/../../a.yaml"]}, "allowed: files inside the project"),
        ({"specs": ['"""/a.yaml']}, "specs: found .*; allowed: a path without quotation marks"),
        ({"specs": ["a\\b/a.yaml"]}, "specs: found .*; allowed: a path without"),
        (
            {"specs": ["a.yaml"], "tuned": ["../h200.yaml"]},
            "tuned: found '../h200.yaml'; allowed: files inside the project",
        ),
        ({"specs": ["a.yaml"], "tuned": "h200.yaml"}, "tuned: found .*; allowed: a list of texts"),
        ({"specs": ["a.yaml"], "arhc": ["sm80"]}, "arhc: unknown key; did you mean 'arch'"),
        ({"specs": ["a.yaml"], "arch": ["sm90"]}, "arch: found 'sm90'; did you mean 'sm90a'"),
        ({"specs": ["a.yaml"], "platforms": ["linux"]}, r"\[tool.attngen\]: platform 'linux' is not a platform tag"),
        ({"specs": ["a.yaml"], "max-size": "8 MiBB"}, r"\[tool.attngen\]: size '8 MiBB' is not understood"),
    ],
)
def test_a_wrong_table_is_refused_by_key(table: Any, message: str) -> None:
    with pytest.raises(PackageError, match=message):
        Settings.of(table)


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("8 MB", 8_000_000), ("1.5kB", 1500), ("2 MiB", 2 << 20), ("1GiB", 1 << 30), ("9B", 9)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1 MB", "1e3", "8 Mb", "8 XB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(PackageError, match="allowed: a number"):
        size_in_bytes(text)


@pytest.mark.parametrize("platform", ["", "linux", "Linux_x86_64", "linux-x86_64", "a_b\n", "../x_y"])
def test_platforms_that_are_none(platform: str) -> None:
    with pytest.raises(PackageError, match="is not a platform tag"):
        check_platforms((platform,))
