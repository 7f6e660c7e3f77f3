"""Packages for tests: specs, and installations that come and go."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

from attngen.packaging.make import PackageFiles, package
from attngen.packaging.project import Choices
from tests import forked

ROOT = Path(__file__).parents[2]

#: Four variants, one of them from an included file, dense and packed, and a kernel that needs a tile map.
SPEC = """
schema: 1
package: attngen_small
arch: [sm90a]
include: masks/own.yaml
kernels:
  - {variant: [full, sliding_window, allowed], head_dim: 64, backend: triton}
  - {variant: causal, head_dim: 64, layout: [dense, varlen], arch: [sm80, sm90a], backend: triton}
  - {variant: own, head_dim: {qk: 64, v: 32}, backend: triton}
"""
INCLUDED = """
schema: 1
variants:
  own:
    mask: "q_pos >= kv and (loud or kv % step == 0)"
    scalars: {step: {type: int32, min: 1}, loud: {type: bool, default: false}}
"""
OTHER = "schema: 1\npackage: attngen_other\narch: sm90a\nkernels: [{variant: causal, head_dim: 64, backend: triton}]\n"

FAKE_COMPILER = "tests.runtime.manifests:compile_as_manifest"

#: Modules that a package must do without.
BLOCKED = (
    "attngen", "triton", "cupy", "cupy_backends", "jinja2", "pydantic", "yaml", "click", "rich", "platformdirs",
    "hatchling",
)  # fmt: skip

#: Put in front of a program: those modules cannot be imported, and nothing can be reached.
WITHOUT_ANYTHING = f"""
import socket, sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))  # torch asks for the spec of some, and is to find none
def unreachable(*_, **__):
    raise OSError("no network")
socket.socket.connect = socket.create_connection = unreachable
"""


def write_spec(folder: Path, text: str = SPEC, name: str = "small.yaml") -> Path:
    """Write a spec and what it includes, and return it."""
    (folder / "masks").mkdir(parents=True, exist_ok=True)
    (folder / "masks/own.yaml").write_text(INCLUDED)
    (folder / name).write_text(text)
    return folder / name


def make(spec: Path, out: Path, *targets: str, **choices: Any) -> PackageFiles:
    """Package a spec in one process, which takes longer to start than its kernels to compile."""
    return package(spec, out, Choices(**choices), targets=targets or ("wheel",), jobs=1)


def install(site: Path, *wheels: Path) -> Path:
    """Unpack wheels as an installer does, and return the folder."""
    for wheel in wheels:
        with ZipFile(wheel) as archive:
            archive.extractall(site)
    return site


@contextmanager
def on_path(site: Path, *names: str) -> Iterator[list[ModuleType]]:
    """Import packages of a folder; afterwards this process has never heard of them."""
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(site))
        for name in [n for n in sys.modules if n.partition(".")[0] in names]:
            del sys.modules[name]


def run(program: str, *sites: Path, alone: bool = True, options: Sequence[str] = ()) -> str:
    """Run a program in a fresh process that finds these folders, and return what it prints.

    ``alone``: it finds nothing of attngen, and no module of ``BLOCKED``; else it finds what this process finds.
    """
    text = WITHOUT_ANYTHING + program if alone else program
    places = sites if alone else (*sites, ROOT, *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *options, "-c", text]
    if alone and not options:  # torch takes two seconds to import, and what compiles programs four
        done = forked.preload(WITHOUT_ANYTHING + "import torch, torch._dynamo", ()).run(
            command, env=environment, cwd=sites[0]
        )
    else:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=sites[0])
    assert done.returncode == 0, done.stderr
    return done.stdout
