"""``attngen package`` from the command line. The compiler is a fake one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from attngen.build import pipeline as build_module
from attngen.formats import VERSION
from tests.commands.test_build import attngen
from tests.packaging.support import FAKE_COMPILER, SPEC, write_spec

WHEEL = f"attngen_small-{VERSION}-py3-none-manylinux_2_17_aarch64.manylinux_2_17_x86_64.whl"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build_module, "COMPILER", FAKE_COMPILER)
    monkeypatch.chdir(tmp_path)
    return write_spec(tmp_path)


@pytest.mark.exhaustive
def test_a_wheel_and_what_costs_how_much(spec: Path) -> None:
    output = attngen("package", spec).stdout
    size = os.path.getsize(f"dist/{WHEEL}")
    assert output.splitlines()[-2:] == [
        f"dist/{WHEEL}: {size:,} B",
        "The wheel needs an NVIDIA driver: CUDA 13.0 (r580) or later for sm80, sm90a.",
    ]
    for row in ("sliding_window", "64/32", "(runtime, stubs, metadata)"):
        assert row in output
    assert os.listdir("dist") == [WHEEL]


@pytest.mark.exhaustive
def test_a_source_distribution_alone_or_beside_the_wheel(spec: Path) -> None:
    assert attngen("package", spec, "--sdist", "-o", "one").stdout.startswith(f"one/attngen_small-{VERSION}.tar.gz: ")
    assert os.listdir("one") == [f"attngen_small-{VERSION}.tar.gz"]
    attngen("package", spec, "--sdist", "--wheel", "-o", "two", "--version", "3.1", "--platform", "linux_x86_64")
    assert sorted(os.listdir("two")) == ["attngen_small-3.1-py3-none-linux_x86_64.whl", "attngen_small-3.1.tar.gz"]


def test_as_json(spec: Path) -> None:
    report = json.loads(attngen("package", spec, "--arch", "sm80", "--json").stdout)
    (file,) = report["files"]
    assert (report["package"], file["path"], file["bytes"]) == (
        "attngen_small", f"dist/{WHEEL}", report["wheel"]["bytes"],
    )  # fmt: skip
    (share,) = report["wheel"]["shares"]
    assert (share["variant"], share["arch"], share["head_dim"], share["kernels"]) == ("causal", "sm80", "64", 2)
    assert report["wheel"]["rest_bytes"] + share["wheel_bytes"] == file["bytes"]


@pytest.mark.exhaustive
def test_errors_are_said_without_a_traceback(spec: Path) -> None:
    refused = attngen("package", spec, "--max-size", "10 kB", code=1)
    assert "more than the 10,000 B that max-size allows" in refused.stderr
    assert os.listdir("dist") == []
    assert "size 'big' is not understood" in attngen("package", spec, "--max-size", "big", code=2).stderr
    assert "lists no kernels for 'sm86'" in attngen("package", spec, "--arch", "sm86", code=2).stderr
    spec.write_text(SPEC.replace("full", "fulll"))
    assert "did you mean 'full'" in attngen("package", spec, code=2).stderr


@pytest.mark.exhaustive
def test_packaging_builds_nothing_for_the_user_to_call(spec: Path, cache: Path) -> None:
    attngen("package", spec)
    assert not (cache / "builds").exists()
