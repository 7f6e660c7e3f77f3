"""``attngen doctor``: what is installed, what can be compiled, what can be run, what was tested."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata

import click

from attngen import cli, resources
from attngen.arch import ARCHES
from attngen.commands.output import counted, print_json
from attngen.errors import AttngenError
from attngen.store.limits import available_bytes, job_limit
from attngen.store.store import Store


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``state`` is ok, missing or broken; ``text`` says what was found, or what to do."""

    part: str
    name: str
    state: str
    text: str


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Say what works on this machine and what is missing. Exits 1 if kernels can be neither built nor run."""
    installed, built, run = _installed(), _build(), _run()
    findings = [*installed, *built, *run, *_tested()]
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        for part in dict.fromkeys(finding.part for finding in findings):
            click.secho(part, bold=True)
            for finding in findings:
                if finding.part == part:
                    click.echo(f"  {_MARKS[finding.state]} {finding.name}: {finding.text}")
    if not any(finding.state == "ok" for finding in (*_only(built, "arch "), *_only(run, "GPU "))):
        context.exit(cli.EXIT_FAILURE)


_MARKS = {"ok": "+", "missing": "-", "broken": "!"}

#: Distribution → what it is for, and how to get it.
_PARTS = {
    "torch": ("calling kernels", "install the build for your CUDA as pytorch.org says"),
    "cuda-bindings": ("running kernels", "comes with torch's CUDA builds"),
    "triton": ("building", "pip install 'attngen[build]'"),
    "jinja2": ("building", "pip install 'attngen[build]'"),
    "pydantic": ("building", "pip install 'attngen[build]'"),
    "PyYAML": ("building", "pip install 'attngen[build]'"),
    "cupy-cuda13x": ("building CUDA kernels", "pip install 'attngen[build]'"),
    "nvidia-cuda-nvrtc": ("building CUDA kernels", "pip install 'attngen[build]'"),
    "hatchling": ("packaging", "pip install 'attngen[build]'"),
}


def _only(findings: list[Finding], prefix: str) -> list[Finding]:
    return [finding for finding in findings if finding.name.startswith(prefix)]


def _installed() -> list[Finding]:
    from attngen import __version__

    python = f"{platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})"
    findings = [Finding("installed", "attngen", "ok", __version__), Finding("installed", "Python", "ok", python)]
    for name, (purpose, remedy) in _PARTS.items():
        version = _version(name)
        found = ("ok", version) if version else ("missing", f"needed for {purpose}; {remedy}")
        findings.append(Finding("installed", name, *found))
    return findings


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _build() -> list[Finding]:
    findings = [_try("build", "templates", lambda: str(resources.root())), _try("build", "cache", _cache)]
    memory = available_bytes()
    limit = f"{job_limit()} compiles at once" + (f", {memory / 1e9:.1f} GB of memory free" if memory else "")
    findings.append(Finding("build", "jobs", "ok", limit))
    from attngen.compile.inspect import nvidia_tool, tool_version

    for tool in ("ptxas", "ptxas-blackwell", "nvdisasm", "cuobjdump"):
        path = nvidia_tool(tool)
        state = "ok" if path else "missing"
        findings.append(Finding("build", tool, state, tool_version(path) if path else "not in the Triton wheel"))
    findings.append(_try("build", "NVRTC", _nvrtc))
    return [*findings, *_arches()]


def _nvrtc() -> str:
    from attngen.compile.cuda import compile_text

    start = time.perf_counter()
    compile_text("probe", 'extern "C" __global__ void probe(int* x) { x[blockIdx.x] = 1; }', {}, "sm90a")
    return f"compiled a kernel in {time.perf_counter() - start:.2f} s"


def _cache() -> str:
    store = Store()
    store.require_writable()
    return f"{store.root}, {counted(len(store.all_keys()), 'entry', 'entries')}, writable"


def _arches() -> list[Finding]:
    """Compile a tiny kernel for each arch, which is the only proof that it works."""
    from attngen.store.jobs import Job, run_jobs

    lacking = [name for name, (purpose, _) in _PARTS.items() if purpose == "building" and _version(name) is None]
    if lacking:
        return [Finding("build", "arches", "missing", f"nothing can be compiled without {', '.join(lacking)}")]
    names = list(ARCHES)
    calls = [Job(name, "attngen.compile.probe:probe_job", (name,)) for name in names]
    findings = {}
    for result in run_jobs(calls, 1, timeout=120.0):
        name = names[result.index]
        if result.error is None:
            findings[name] = Finding("build", f"arch {name}", "ok", result.value)
        else:
            findings[name] = Finding("build", f"arch {name}", "broken", str(result.error).splitlines()[0])
    return [findings[name] for name in names]


def _run() -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [Finding("run", "torch", "missing", f"cannot be imported ({error}); no kernel can be called")]
    if not torch.cuda.is_available():
        reason = "torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU or no driver"
        return [Finding("run", "GPUs", "missing", f"{reason}; the eager reference works on CPU tensors")]
    findings = [_try("run", "driver", _driver)]
    for device in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(device)
        served = [arch.name for arch in ARCHES.values() if arch.runs_on(10 * major + minor)]
        text = f"{torch.cuda.get_device_name(device)}, sm{major}{minor}; runs kernels for {', '.join(served) or 'none'}"
        findings.append(Finding("run", f"GPU {device}", "ok" if served else "broken", text))
    return findings


def _driver() -> str:
    from attngen.runtime.driver import current

    version = current().version()
    return f"supports CUDA {version // 1000}.{version % 1000 // 10}"


def _tested() -> list[Finding]:
    """Say which GPUs ran the whole test suite, and whether the sources of the kernels are those that ran."""
    from attngen.tools import record

    try:
        rows = record.records()
    except (OSError, ValueError) as error:
        return [Finding("tested", "records", "broken", str(error))]
    if not rows:
        return [Finding("tested", "records", "missing", "no run of the whole GPU test suite is recorded")]
    findings = []
    for row in rows:
        changed = row.changed()
        since = f"changed since: {', '.join(changed)}" if changed else "these sources"
        well = not changed and not row.count(record.FAILED) and not row.count(record.NOT_RUN)
        findings.append(
            Finding("tested", row.card, "ok" if well else "missing", f"{row.date}: {row.counts()}; {since}")
        )
    return findings


def _try(part: str, name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(part, name, "ok", look())
    except (AttngenError, OSError) as error:
        return Finding(part, name, "broken", str(error))
