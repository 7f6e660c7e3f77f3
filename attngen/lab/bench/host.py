"""Host time, cold start and import of an installed package, beside SDPA, FlashAttention-3 and FlexAttention.

    python -m attngen.lab.bench.host [--spec SPEC] [--rounds N] [--json FILE]

Packages the spec, which needs the variant ``causal`` at head_dim 128 in bf16, installs the wheel into a folder of its
own, and measures in fresh processes, in which attngen cannot be imported. A library that is missing is left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from attngen.lab.bench import host_programs
from attngen.store.temporary import TemporaryFolder

#: The spec that is packaged unless one is given: forward and backward of two kernels, in CUDA on Hopper.
SPEC = """
schema: 1
package: attngen_host
arch: [{arch}]
kernels:
  - {{variant: [causal, full], head_dim: 128, dtype: bf16, passes: [forward, backward]{backend}}}
"""

_IN_CUDA = ", backend: cuda, backward: {backend: cuda}"

#: Fresh processes that call the package; the one with the median time of the first call counts.
PROCESSES = 3


@click.command()
@click.option("--spec", type=click.Path(path_type=Path), help="Measure the package of this spec.")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Samples of each contender.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write all figures there.")
def main(spec: Path | None, rounds: int, json_path: Path | None) -> None:
    """Print the host times of calls of a package. Needs a GPU."""
    with TemporaryFolder() as folder:
        figures = measure(folder, spec, rounds)
    text = json.dumps(figures, indent=1)
    if json_path is not None:
        json_path.write_text(text + "\n")
    click.echo(text)


def measure(folder: Path, spec: Path | None, rounds: int) -> dict[str, Any]:
    """Measure all figures; ``folder`` takes the wheel and its installation."""
    chosen = spec if spec is not None else _default_spec(folder)
    _log("packaging and installing")
    start = time.perf_counter()
    command = [sys.executable, "-m", "attngen", "package", str(chosen), "-o", str(folder / "dist"), "--json"]
    made = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    package, wheel = made["package"], made["files"][0]
    figures: dict[str, Any] = {
        "package": package, "wheel bytes": wheel["bytes"], "made in s": time.perf_counter() - start
    }  # fmt: skip
    site = folder / "site"
    start = time.perf_counter()
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*command, wheel["path"]], check=True)
    figures["pip install s"] = time.perf_counter() - start
    shutil.copy(host_programs.__file__, site)
    _log("cold start of the package")
    cold = [_run(site, "cold", package) for _ in range(PROCESSES)]
    figures["cold start"] = {"attngen": _median(cold)}
    for peer in host_programs.PEERS:
        _log(f"cold start of {peer}")
        figures["cold start"][peer] = _run(site, "peer", peer)
    _log("host time of calls")
    return {**figures, **_run(site, "calls", package, str(rounds))}


def _log(step: str) -> None:
    click.echo(f"{step} ...", err=True)


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return sorted(runs, key=lambda run: run.get("first call ms", 0.0))[len(runs) // 2]


def _default_spec(folder: Path) -> Path:
    import torch

    from attngen.arch import arch_of

    major, minor = torch.cuda.get_device_capability()
    arch = arch_of(10 * major + minor)
    if arch is None:
        raise click.ClickException(f"no kernels can be built for sm{major}{minor}")
    path = folder / "host.yaml"
    path.write_text(SPEC.format(arch=arch.name, backend=_IN_CUDA if arch.wgmma else ""))
    return path


def _run(site: Path, *arguments: str) -> dict[str, Any]:
    """Run one of the programs in a process that finds the installed package; if it fails, its error is the result."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, Path(host_programs.__file__).name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=site)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
