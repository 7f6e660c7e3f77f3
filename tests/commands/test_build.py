"""build, list, show and cache, from the command line, with a fake compiler where the real one is not the point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attngen.build import pipeline as build_module
from attngen.build.compiles import BuiltKernel
from attngen.build.pipeline import BuildReport
from attngen.cli import group
from attngen.commands import build as build_command
from attngen.commands import doctor
from attngen.commands.output import Progress
from attngen.compile import toolchain
from attngen.store import Store
from tests.build.test_build import SPEC
from tests.sampling import few
from tests.store import fakes

ROOT = Path(__file__).parents[2]
RESOURCES = {"registers", "spills", "shared_memory", "cubin_bytes", "compile_seconds"}


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fakes.compile_by(monkeypatch)
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return path


def attngen(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(group, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.mark.exhaustive
def test_build_prints_what_each_kernel_costs(spec: Path) -> None:
    output = attngen("build", spec, "--jobs", 2).stdout
    assert "registers" in output
    assert output.count("fwd_sm80") == 2
    assert "mine: 4 kernels, 4 built in" in output
    assert attngen("build", spec).stdout == "mine: 4 kernels up to date, nothing to do\n"


def test_build_as_json(spec: Path) -> None:
    report = json.loads(attngen("build", spec, "--json").stdout)
    assert len(report["kernels"]) == 4
    for kernel in report["kernels"]:
        assert {"name", "backend", "arch", "resources", "variant", "origin", "key"} <= set(kernel)
        assert set(kernel["resources"]) == RESOURCES
    assert (report["package"], report["up_to_date"], report["failures"]) == ("mine", False, [])
    assert json.loads(attngen("build", spec, "--json").stdout)["up_to_date"]


@pytest.mark.exhaustive
def test_build_of_a_kernel_that_fails(spec: Path) -> None:
    spec.write_text(SPEC.replace("near", "reject"))
    result = attngen("build", spec, code=1)
    assert "2 kernels, 2 built" in result.stdout
    assert "2 failed" in result.stdout
    assert result.stderr.count(": rejected") == 2
    report = json.loads(attngen("build", spec, "--json", code=1).stdout)
    assert [failure["error"].partition(": ")[2] for failure in report["failures"]] == ["rejected"] * 2


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (
            ["small", "large"],
            ["small: 40 B of spills; the other choices are slower", "small: in place of large: 40 B of"],
        ),
        (["small"], ["small: 40 B of spills; the plan has no other choice"]),
        (["large"], ["small: in place of large: 40 B of spills"]),
        (["large", "wide"], ["small: in place of large: 40 B of spills", "  and of wide: 40 B of spills"]),
    ],
)
def test_a_kernel_is_never_in_place_of_itself(
    refused: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One that spills, and is kept since it spills least, was refused at first under the name that it has."""
    resources = dict.fromkeys(RESOURCES, 0)
    rows = [{"name": name, "backend": "cuda", "reason": "40 B of spills"} for name in refused]
    kernel = BuiltKernel("small", "key", "built", {"backend": "cuda", "resources": resources, "refused": rows})
    build_command._print(BuildReport("mine", "mine.yaml", (kernel,), 1.0))
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if "spills;" in line or "place of" in line or "and of" in line]
    assert len(told) == len(said)
    assert all(line.startswith(part) for line, part in zip(told, said, strict=True))


@few("command", ["build", "package"], always=(1,))
def test_ctrl_c_says_that_finished_kernels_are_kept(
    spec: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "finished", interrupt)
        result = attngen(command, spec, "--jobs", 1, code=1)
    assert "Aborted" not in result.output
    assert result.stderr.splitlines()[-1] == (
        f"stopped; 1 of 4 kernels are compiled and kept in {cache}, and the next build compiles the others"
    )
    (entry,) = Store(cache).all_keys()
    report = json.loads(attngen("build", spec, "--json").stdout)
    assert [kernel["origin"] for kernel in report["kernels"] if kernel["key"] == entry] == ["cached"]


def test_ctrl_c_anywhere_else_leaves_no_traceback(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attngen.schema.loading.read_spec", interrupt)
    result = attngen("check", spec, "--json", code=1)
    assert result.stderr == "\nstopped\n"
    assert json.loads(result.stdout)["errors"][0]["message"] == "stopped"


def test_mistakes_of_the_user(spec: Path, tmp_path: Path) -> None:
    assert "there is no file" in attngen("build", tmp_path / "none.yaml", code=2).stderr
    assert "no kernels for 'sm75'" in attngen("build", spec, "--arch", "sm75", code=2).stderr
    spec.write_text(SPEC.replace("mask", "mesk"))
    assert "mine.yaml:" in attngen("build", spec, code=2).stderr
    assert "--jobs" in attngen("build", spec, "--jobs", 0, code=2).stderr


def test_a_cache_that_cannot_be_written(spec: Path, cache: Path) -> None:
    cache.write_text("")
    result = attngen("build", spec, code=1)
    assert "cannot write to the cache" in result.stderr
    assert "Traceback" not in result.output


def test_render_only(spec: Path, tmp_path: Path) -> None:
    arguments = ("build", spec, "--render-only", "--out", tmp_path / "out")
    assert "4 written, 0 unchanged, 0 removed" in attngen(*arguments).stdout
    assert "0 written, 4 unchanged, 0 removed" in attngen(*arguments).stdout
    report = json.loads(attngen(*arguments, "--json").stdout)
    assert all(Path(kernel["file"]).is_file() for kernel in report["kernels"])


def test_list(spec: Path) -> None:
    assert "no kernels" in attngen("list").stdout
    attngen("build", spec)
    from attngen.runtime.registry.lookup import registry

    registry.clear()
    output = attngen("list").stdout
    assert output.count("fwd_sm80") == 2
    assert "mine: 4 kernels" in output
    listed = json.loads(attngen("list", "--json").stdout)
    assert len(listed["kernels"]) == 4
    assert {row["from"] for row in listed["kernels"]} == {"built"}
    assert [(row["variant"], row["arch"], row["kernels"]) for row in listed["coverage"]] == [
        ("causal", "sm80 sm90a", 2),
        ("near", "sm80 sm90a", 2),
    ]
    assert "fwd_sm80" not in attngen("list", "--coverage").stdout
    assert json.loads(attngen("list", "--package", "other", "--json").stdout)["kernels"] == []
    assert "no kernels in package 'mines'; did you mean 'mine'?" in attngen("list", "--package", "mines").stdout


def test_show(spec: Path) -> None:
    report = json.loads(attngen("build", spec, "--json").stdout)
    kernel = report["kernels"][0]
    name = kernel["name"]
    output = attngen("show", name).stdout
    assert f"mine/{name}" in output
    assert "q_pos >= kv" in output
    source = attngen("show", f"mine/{name}", "--source").stdout
    assert source == Store().text(kernel["key"], "source.py")
    assert attngen("show", name, "--ptx").stdout == Store().text(kernel["key"], "ptx")
    assert attngen("show", name, "--ttgir").stdout == Store().text(kernel["key"], "ttgir")
    assert json.loads(attngen("show", name, "--json").stdout)["name"] == name
    assert "2 kernels have 'causal' in their names" in attngen("show", "causal", code=2).stderr
    assert f"did you mean '{name}'" in attngen("show", name.replace("causal", "casual"), code=2).stderr
    (Store().path(kernel["key"]) / "ptx").unlink()
    assert "has no ptx" in attngen("show", name, "--ptx", code=1).stderr


def test_cache(spec: Path, cache: Path) -> None:
    assert "0 entries" in attngen("cache", "list").stdout
    attngen("build", spec)
    assert "4 entries" in attngen("cache", "list").stdout
    entries = json.loads(attngen("cache", "list", "--json").stdout)["entries"]
    assert {entry["packages"] for entry in entries} == {"mine"}
    assert "0 damaged, 0 missing" in attngen("cache", "verify").stdout
    store = Store(cache)
    (store.path(entries[0]["key"]) / "kernel.cubin").write_bytes(b"")
    store.remove(entries[1]["key"])
    result = attngen("cache", "verify", code=1)
    assert "kernel.cubin" in result.stderr
    assert "1 damaged, 1 missing" in result.stdout
    assert "1 damaged, removed" in attngen("cache", "verify", "--remove", code=1).stdout
    attngen("build", spec)
    spec.write_text(SPEC.replace("< width", "<= width"))
    attngen("build", spec)
    assert "removed 2 entries" in attngen("cache", "clear", "--unused", "--yes").stdout
    assert "0 damaged, 0 missing" in attngen("cache", "verify").stdout
    assert CliRunner().invoke(group, ["cache", "clear"], input="n\n").exit_code == 1
    assert len(store.all_keys()) == 4
    assert "removed 4 entries" in attngen("cache", "clear", "--yes").stdout
    assert "0 entries" in attngen("cache", "list").stdout


@pytest.mark.exhaustive
def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = json.loads(attngen("doctor", "--json").stdout)["findings"]
    states = {finding["name"]: finding["state"] for finding in findings}
    assert states["triton"] == states["cache"] == states["templates"] == states["arch sm90a"] == "ok"
    monkeypatch.setattr(doctor, "_arches", lambda: [doctor.Finding("build", "arch sm80", "broken", "no ptxas")])
    output = attngen("doctor", code=1).stdout
    assert "! arch sm80: no ptxas" in output
    assert "+ Python: 3." in output


def test_a_machine_without_nvrtc_builds_no_other_kernel_instead(monkeypatch: pytest.MonkeyPatch, spec: Path) -> None:
    spec.write_text(SPEC.replace("    backend: triton\n", ""))
    monkeypatch.setattr(toolchain, "installed_nvrtc", lambda: ())
    result = attngen("build", spec, code=1)
    assert result.stderr.startswith("CUDA kernels cannot be compiled: NVRTC is not installed; pip install")
    assert "or say 'backend: triton' in the spec" in result.stderr


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, spec: Path) -> None:
    monkeypatch.setattr(toolchain, "toolchain", lambda backend, arch: {"triton": None})
    result = attngen("build", spec, code=1)
    assert "pip install 'attngen[build]'" in result.stderr
    with monkeypatch.context() as patch:

        def lacking(*_: object, **__: object) -> None:
            raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")

        patch.setattr(build_module, "build", lacking)
        result = attngen("build", spec, code=1)
    assert "this needs pydantic, which is not installed; pip install 'attngen[build]'" in result.stderr


#: Modules that a build with nothing to do must not import.
HEAVY = (
    "triton",
    "torch",
    "jinja2",
    "pydantic",
    "yaml",
    "rich",
    "numpy",
    "attngen.plan",
    "attngen.schema",
    "attngen.render",
)


def test_a_build_with_nothing_to_do_imports_nothing_that_takes_time(spec: Path) -> None:
    attngen("build", spec)
    script = (
        "import sys\nfrom attngen.cli import main\ntry:\n    main(['build', sys.argv[1]])\n"
        f"finally:\n    print([name for name in {HEAVY} if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, spec], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["mine: 4 kernels up to date, nothing to do", "[]"]
