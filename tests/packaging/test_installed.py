"""Installed packages: next to torch alone, beside each other and beside attngen, and in many processes at once."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import attngen
from attngen.cli import group
from attngen.runtime.registry import discovery
from attngen.runtime.registry.lookup import registry
from tests.packaging.support import FAKE_COMPILER, install, make, on_path, run

#: Compares what a package computes with attention as one writes it down.
ALONE = """
import torch, attngen_small

assert attngen_small.variants() == ("full", "sliding_window", "allowed", "causal", "own")
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 37, 4, 64)
k, v = k[:, :, :2], v[:, :, :2]
i, j = torch.arange(37)[:, None], torch.arange(37)[None, :]
seen = {
    "full": (i >= 0, {}),
    "causal": (i >= j, {}),
    "sliding_window": ((i >= j) & (i - j < 5), {"window": 5}),
    "own": ((i >= j) & (j % 3 == 0), {"step": 3}),
}
mask = torch.rand(2, 37, 37) < 0.5
mask[:, :, 0] = True

def plain(visible):
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.repeat_interleave(2, 2).double()) / 8
    logits = logits.masked_fill(~visible, float("-inf"))
    out = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.repeat_interleave(2, 2).double())
    return out.float(), logits.logsumexp(-1).float()

for name, (visible, arguments) in seen.items():
    out, lse = attngen_small.attention(q, k, v, variant=name, return_lse=True, **arguments)
    for ours, wanted in zip((out, lse), plain(visible)):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(out, attngen_small.attention(q, k, v, variant="attngen_small/" + name, **arguments))
out = attngen_small.attention(q, k, v, variant="allowed", allowed=mask)
torch.testing.assert_close(out, plain(mask[:, None])[0], rtol=1e-5, atol=1e-5)

cu = torch.tensor([0, 37, 74], dtype=torch.int32)
packed = attngen_small.attention_varlen(*(t.flatten(0, 1) for t in (q, k, v)), cu, cu, 37, 37, variant="causal")
torch.testing.assert_close(packed.view(2, 37, 4, 64), plain(i >= j)[0], rtol=1e-5, atol=1e-5)

@torch.compile(backend="eager", fullgraph=True)
def traced(q):
    return attngen_small.attention(q, k, v, variant="own", step=3)

torch.testing.assert_close(traced(q), plain(seen["own"][0])[0], rtol=1e-5, atol=1e-5)
assert "step" in str(torch.ops.attngen_small.own.default._schema)

print(attngen_small.explain(q, k, v, variant="causal"))
try:
    attngen_small.attention(q, k, v, variant="own", stp=3)
except attngen_small.errors.CallError as error:
    print(error)
try:
    attngen_small.attention(q, k, v, variant="casual")
except attngen_small.errors.NoKernelError as error:
    print(str(error).splitlines()[0])
"""


@pytest.mark.exhaustive
def test_an_installed_package_runs_next_to_torch_alone(site: Path) -> None:
    assert run(ALONE, site).splitlines() == [
        "causal (forward, dense, fp32, head_dim 64): runs reference, since q is on cpu",
        "own: unknown argument 'stp'; did you mean 'step'?; 'own' takes step: int32, at least 1; loud: bool = False",
        "no kernel of variant 'casual' is built; did you mean 'causal'?",
    ]


#: A package with one variant needs no name; an unknown name is no reason to build with a tool that is not there.
ONLY = """
import torch, attngen_other
q = torch.randn(1, 9, 2, 64)
cu = torch.tensor([0, 4, 9], dtype=torch.int32)
wanted = attngen_other.attention(q, q, q, variant="causal")
assert torch.equal(attngen_other.attention(q, q, q), wanted)
packed = [q[0]] * 3 + [cu, cu, 5, 5]
assert torch.equal(attngen_other.attention_varlen(*packed), attngen_other.attention_varlen(*packed, variant="causal"))
print(attngen_other.explain(q, q, q))
print(attngen_other.tile_map(q, q).variant)
compiled = torch.compile(lambda q: attngen_other.attention(q, q, q), backend="eager", fullgraph=True)
assert torch.equal(compiled(q), wanted)
try:
    attngen_other.attention(q, q, q, variant="full")
except attngen_other.errors.NoKernelError as error:
    print(error)
"""


@pytest.mark.exhaustive
def test_the_only_variant_needs_no_name(tmp_path: Path, wheels: dict[str, Path]) -> None:
    assert run(ONLY, install(tmp_path / "site", wheels["attngen_other"])).splitlines() == [
        "causal (forward, dense, fp32, head_dim 64): runs reference, since q is on cpu",
        "causal",
        "no kernel of variant 'full' is built",
        "  built: attngen_other/causal",
        "This package was made without one. Its maker can add to its spec, and package it again:",
        "  kernels:",
        "    - variant: full",
        "      head_dim: 64",
        "      dtype: fp32",
        "      layout: dense",
    ]


#: A program that one process exports, and that another one loads.
EXPORT = """
import torch, attngen_small

class Model(torch.nn.Module):
    def forward(self, q):
        return attngen_small.attention(q, q, q, variant="causal")

q = torch.randn(1, 9, 2, 64)
torch.export.save(torch.export.export(Model(), (q,)), {path!r})
torch.save((q, Model()(q)), {path!r} + ".results")
"""
LOAD = """
import torch, attngen_small

print(*attngen_small.define_operators("causal"))
program = torch.export.load({path!r}).module()
q, out = torch.load({path!r} + ".results")
print(torch.equal(program(q), out))
"""


@pytest.mark.exhaustive
def test_an_exported_program_is_loaded_by_another_process(site: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "program.pt2")
    run(EXPORT.format(path=path), site)
    assert run(LOAD.format(path=path), site).splitlines() == ["attngen_small::causal", "True"]


#: Two packages, the second one with a runtime of another version, and an attngen that finds both.
TOGETHER = """
import sys, torch, attngen

q = torch.randn(1, 9, 2, 64)
out = attngen.attention(q, q, q, variant="attngen_small/causal")
assert torch.equal(out, attngen.attention(q, q, q, variant="causal", package="attngen_other"))
assert torch.equal(out, attngen.attention(q, q, q, variant="causal"))  # one definition is one variant
assert not {"attngen_small", "attngen_other"} & set(sys.modules)  # found without their runtimes

import attngen_other, attngen_small
from attngen_other._runtime.formats import VERSION
assert VERSION == "0.0.9"
assert attngen_other.errors.CallError is not attngen_small.errors.CallError is not attngen.errors.CallError

def compiled(attention, **more):
    return torch.compile(lambda q: attention(q, q, q, variant="causal", **more), backend="eager", fullgraph=True)(q)

for attention, more in (
    (attngen_small.attention, {}), (attngen_other.attention, {}),
    (attngen.attention, {"package": "attngen_small"}), (attngen.attention, {"package": "attngen_other"}),
):
    assert torch.equal(compiled(attention, **more), out)
    with torch.no_grad():
        assert torch.equal(attention(q, q, q, variant="causal", **more), out)
names = sorted(n.rpartition("::")[0] for n in torch._C._dispatch_get_all_op_names() if n.endswith("::causal"))
print(*names)
try:
    attngen_other.attention(q, q, q, variant="own", step=1)
except attngen_other.errors.NoKernelError as error:
    print(str(error).splitlines()[1])
with attngen_small.debug():
    assert attngen_small._runtime.runtime.arguments.debug.active()
    assert not attngen_other._runtime.runtime.arguments.debug.active()
"""


@pytest.mark.exhaustive
def test_two_packages_two_runtimes_and_attngen_side_by_side(tmp_path: Path, wheels: dict[str, Path]) -> None:
    site = install(tmp_path / "site", *wheels.values())
    for name in ("_runtime/formats.py", "package.json"):
        path = site / "attngen_other" / name
        assert attngen.__version__ in path.read_text()
        path.write_text(path.read_text().replace(f'"{attngen.__version__}"', '"0.0.9"', 1))
    spaces, built = run(TOGETHER, site, alone=False).splitlines()
    assert spaces == "attngen_installed_attngen_other attngen_installed_attngen_small attngen_other attngen_small"
    assert built == "  built: attngen_other/causal"  # it knows itself alone


@pytest.mark.exhaustive
def test_an_entry_point_is_followed_without_an_import(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("attngen_small", "attngen_small", discovery.ENTRY_POINTS)
    monkeypatch.setattr(discovery.metadata, "entry_points", lambda group: [point])
    with on_path(site):
        (package,) = discovery.installed_packages().values()
        assert "attngen_small" not in sys.modules
    assert (package.name, package.namespace) == ("attngen_small", "attngen_installed_attngen_small")
    gone = SimpleNamespace(name="gone", attr="", module="attngen_gone")
    monkeypatch.setattr(discovery.metadata, "entry_points", lambda group: [gone])
    with pytest.warns(UserWarning, match="installed package 'gone': there is no package of the name 'attngen_gone'"):
        assert discovery.installed_packages() == {}


#: Twenty processes, none of which has imported the package, start at one moment; torch is there already.
TWENTY = """
import os, sys, torch
torch.set_num_threads(1)
q = torch.randn(1, 9, 2, 64)
read, write = os.pipe()
children = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent closes its end
        import attngen_small
        out = attngen_small.attention(q, q, q, variant="sliding_window", window=2)
        os._exit(0 if out.shape == q.shape and out.isfinite().all() else 1)
    children.append(child)
os.close(write)
print([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.exhaustive
def test_twenty_processes_import_and_call_a_fresh_package_at_once(site: Path) -> None:
    before = {path for path in site.rglob("*") if path.is_file()}
    assert run(TWENTY, site).strip() == str([0] * 20)
    written = {path for path in site.rglob("*") if path.is_file()} - before
    assert {path.suffix for path in written} <= {".pyc"}


@pytest.mark.exhaustive
def test_attngen_finds_a_folder_of_a_package(site: Path) -> None:
    registry.clear()
    q = torch.randn(1, 9, 2, 64)
    assert attngen.load(site / "attngen_small").name == "attngen_small"
    out = attngen.attention(q, q, q, variant="own", step=2)
    registry.clear()
    with on_path(site, "attngen_small") as (package,):
        assert torch.equal(package.attention(q, q, q, variant="own", step=2), out)


def test_commands_show_an_installed_package(site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    registry.clear()
    attngen.load(site / "attngen_small")
    listed = CliRunner().invoke(group, ["list", "--coverage"])
    assert "attngen_small: 8 kernels" in listed.output
    shown = CliRunner().invoke(group, ["show", "d64_full"])
    assert shown.exit_code == 0, shown.output
    assert "attngen_small/fwd_sm90a" in shown.output
    assert "def fwd_sm90a" in CliRunner().invoke(group, ["show", "d64_full", "--source"]).output
    registry.clear()


USER = """
from typing import Any
import torch
from torch import Tensor
import attngen_small
q = torch.zeros(1)
a: Tensor = attngen_small.attention(q, q, q)
b: tuple[Tensor, Tensor] = attngen_small.attention(q, q, q, variant="own", step=2, return_lse=True)
c: Tensor = attngen_small.attention(q, q, q, variant="sliding_window", window=3, softmax_scale=0.5)
d: Tensor = attngen_small.attention_varlen(q, q, q, q, q, 1, 1, variant="allowed", allowed=q)
attngen_small.attention(q, q, q, variant="sliding_window")  # error: window is missing
attngen_small.attention(q, q, q, variant="own", stp=2)  # error: stp
attngen_small.attention(q, q, q, variant="casual")  # error: casual
e: int = attngen_small.attention(q, q, q)  # error: a tensor
def either(with_lse: bool, name: Any, text: str) -> None:
    f: Tensor | tuple[Tensor, Tensor] = attngen_small.attention(q, q, q, return_lse=with_lse)
    g: Tensor = attngen_small.attention(q, q, q, return_lse=with_lse)  # error: it may be a pair
    attngen_small.attention(q, q, q, variant=name, step=2)
    attngen_small.attention(q, q, q, variant=text)  # error: any text
reveal = attngen_small.variants()[0] == "nonsense"  # error: no such name
"""


@pytest.mark.exhaustive
def test_the_stubs_name_what_there_is(site: Path) -> None:
    stub = ast.parse((site / "attngen_small/__init__.pyi").read_text())
    functions = [node for node in stub.body if isinstance(node, ast.FunctionDef)]
    own = {"window", "allowed", "step", "loud"}  # of the variants
    with on_path(site, "attngen_small") as (package,):
        others = {"errors", "Quantized", "SharedPrefix", "TileMap"}
        assert {node.name for node in functions} | others == set(package.__all__)
        stated: dict[str, set[str]] = {}
        for node in functions:
            taken = inspect.signature(getattr(package, node.name)).parameters
            arguments = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
            assert arguments - own <= set(taken), node.name
            stated.setdefault(node.name, set()).update(arguments)
        for name, arguments in stated.items():
            taken = inspect.signature(getattr(package, name)).parameters
            named = {each.name for each in taken.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
            assert named - {"package"} <= arguments, name  # which is the package itself
        for node in stub.body:
            if isinstance(node, ast.ImportFrom) and node.level:  # what mypy skips below
                module = importlib.import_module(f".{node.module}", "attngen_small")
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.exhaustive
def test_the_stubs_know_each_variant(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    # torch itself takes minutes, and the runtime, which is checked as attngen's, ten seconds
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict_equality = true\n[mypy-attngen_small._runtime.*]\nfollow_imports = skip\n"
    )
    (tmp_path / "torch.pyi").write_text("class Tensor: ...\nclass dtype: ...\ndef zeros(n: int) -> Tensor: ...\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "user.py", "--no-incremental", "--hide-error-context"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"MYPYPATH": str(site), "PATH": ""},
    )  # fmt: skip
    errors = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    wanted = {number for number, line in enumerate(USER.splitlines(), 1) if "# error" in line}
    assert errors == wanted, done.stdout + done.stderr


#: Program that uses a package's cache, beside the places and the rotation written out.
APPENDS = """
import torch, attngen_cached

assert attngen_cached.variants() == ("causal",)
torch.manual_seed(0)
k, v, q = torch.randn(2, 3, 2, 64), torch.randn(2, 3, 2, 64), torch.randn(2, 3, 4, 64)
cos, sin = torch.randn(2, 16, 32)
used, table = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)

def program(k, v, q, *pages):
    return attngen_cached.append_kv(k, v, *pages, used, page_table=table, q=q, rotary_cos=cos, rotary_sin=sin)

for call in (program, torch.compile(program, backend="aot_eager", fullgraph=True)):
    pages = [torch.zeros(4, 8, 2, 64) for _ in "kv"]
    turned = call(k, v, q, *pages)
    for b, j in ((b, j) for b in range(2) for j in range(3)):
        position = int(used[b]) + j
        entry, row = int(table[b, position // 8]), position % 8
        assert torch.equal(pages[1][entry, row], v[b, j])
        for turned_row, x in ((pages[0][entry, row], k[b, j]), (turned[b, j], q[b, j])):
            first, second = x[:, :32], x[:, 32:]
            c, s = cos[position], sin[position]
            torch.testing.assert_close(turned_row, torch.cat([first * c - second * s, first * s + second * c], dim=1))
print(torch.ops.attngen_cached.kv__append.default._schema.name)
"""


@pytest.mark.exhaustive
def test_a_package_with_pages_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package holds the append kernel, has no variant of that name, and its operator a namespace of its own."""
    monkeypatch.setattr("attngen.build.pipeline.COMPILER", FAKE_COMPILER)
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    spec = tmp_path / "cached.yaml"
    entry = "{variant: causal, head_dim: [64, 128], layout: paged, backend: cuda}"
    spec.write_text(f"schema: 1\npackage: attngen_cached\narch: sm90a\nkernels: [{entry}]\n")
    (wheel,) = make(spec, tmp_path / "dist").files
    site = install(tmp_path / "site", wheel)
    assert run(APPENDS, site).splitlines() == ["attngen_cached::kv__append"]
    index = json.loads((site / "attngen_cached" / "package.json").read_text())
    others = [("append_sm90a_bf16", "append"), ("merge_sm90a_bf16", "merge")]
    assert [(row["name"], row["direction"]) for row in index["kernels"]][2:] == others
    with on_path(site, "attngen_cached"):
        package = discovery.installed_packages()["attngen_cached"]
    (kernel,) = package.kernels("append-kv")
    assert (kernel.direction, kernel.main.grid) == ("append", "vectors")
    assert package.variants == ("causal",)
