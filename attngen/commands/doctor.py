"""``attngen doctor``: checks of the installation, of compilers, of GPUs, and of recorded tests."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen import cli, resources
from attngen.arch import ARCHES
from attngen.cards import SUPPORT
from attngen.commands.output import counted, print_json
from attngen.drivers import cuda_release, driver_text, drivers_text
from attngen.errors import AttngenError, LoadError
from attngen.store.limits import available_bytes, job_limit
from attngen.store.store import Store

if TYPE_CHECKING:
    from attngen.runtime.registry.packages import Package


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. ``state`` is ok, missing or broken; ``text`` is its result, or the remedy."""

    part: str
    name: str
    state: str
    text: str


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Say what works on this machine and what is missing.

    Exits 1 if kernels can be neither built nor run, and if a compiler is broken.
    """
    findings = look()
    built, run = ([finding for finding in findings if finding.part == part] for part in ("build", "run"))
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        for part in dict.fromkeys(finding.part for finding in findings):
            click.secho(part, bold=True)
            for finding in findings:
                if finding.part == part:
                    click.echo(f"  {_MARKS[finding.state]} {finding.name}: {finding.text}")
    works = any(finding.state == "ok" for finding in (*_only(built, "arch "), *_only(run, "GPU ")))
    if not works or any(
        finding.state == "broken" for finding in (*_only(built, "CUDA compiler"), *_only(built, "arch "))
    ):
        context.exit(cli.EXIT_FAILURE)


def look() -> list[Finding]:
    """All checks, in their order."""
    return [*_installed(), *_build(), *_wheels(), *_run(), *_cards(), *_tested()]


_MARKS = {"ok": "+", "missing": "-", "broken": "!"}

#: Distribution → its purpose, and how to install it.
_PARTS = {
    "torch": ("calling kernels", "install the build for your CUDA as pytorch.org says"),
    "cuda-bindings": ("running kernels", "comes with torch's CUDA builds"),
    "triton": ("building", "pip install 'attngen[build]'"),
    "jinja2": ("building", "pip install 'attngen[build]'"),
    "pydantic": ("building", "pip install 'attngen[build]'"),
    "PyYAML": ("building", "pip install 'attngen[build]'"),
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
        result = ("ok", version) if version else ("missing", f"needed for {purpose}; {remedy}")
        findings.append(Finding("installed", name, *result))
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
    return [*findings, *_cuda_compiler(), *_arches()]


def _cuda_compiler() -> list[Finding]:
    """Compile a tiny kernel by CuPy and NVRTC, in a process of its own, which a broken compiler may end.

    If only one of these is missing, builds of CUDA kernels fail, so that it counts as broken.
    """
    from attngen.compile.toolchain import chosen_nvrtc, installed_cupy, lacking_for_cuda, newer_driver_note
    from attngen.store.jobs import Job, run_jobs

    name, nvrtc, lacking = "CUDA compiler", chosen_nvrtc(), lacking_for_cuda()
    if nvrtc is None or lacking is not None:
        return [Finding("build", name, "missing" if _lacking() else "broken", str(lacking))]
    job = Job(f"{nvrtc} for sm90a", "attngen.compile.probe:probe_job", ("cuda", "sm90a"))
    (result,) = run_jobs([job], 1, timeout=120.0)
    if result.error is not None:
        return [Finding("build", name, "broken", str(result.error).splitlines()[0])]
    ((cupy, version),) = installed_cupy().items()
    drivers = {arch.name: nvrtc.min_driver(arch.name) for arch in ARCHES.values() if not arch.portable}
    text = (
        f"{nvrtc} ({nvrtc.distribution}), called by CuPy {version} ({cupy}), compiled a kernel in "
        f"{result.value[0]:.2f} s; its cubins need a driver for {drivers_text(drivers)}"
    )
    note = newer_driver_note(ARCHES)
    return [Finding("build", name, "ok", text), *([Finding("build", name, "missing", note)] if note else ())]


def _cache() -> str:
    store = Store()
    store.require_writable()
    return f"{store.root}, {counted(len(store.all_keys()), 'entry', 'entries')}, writable"


def _lacking() -> list[str]:
    return [name for name, (purpose, _) in _PARTS.items() if purpose == "building" and _version(name) is None]


def _arches() -> list[Finding]:
    """Compile a tiny kernel for each arch, which is the only proof that it works."""
    from attngen.store.jobs import Job, run_jobs

    if lacking := _lacking():
        return [Finding("build", "arches", "missing", f"nothing can be compiled without {', '.join(lacking)}")]
    names = list(ARCHES)
    calls = [Job(name, "attngen.compile.probe:probe_job", ("triton", name)) for name in names]
    findings = {}
    for result in run_jobs(calls, 1, timeout=120.0):
        name = names[result.index]
        if result.error is None:
            seconds, driver = result.value
            text = f"compiled a kernel in {seconds:.2f} s, for drivers from {driver_text(driver)} on"
            findings[name] = Finding("build", f"arch {name}", "ok", text)
        else:
            findings[name] = Finding("build", f"arch {name}", "broken", str(result.error).splitlines()[0])
    return [findings[name] for name in names]


def _wheels() -> list[Finding]:
    """Oldest drivers for the kernels of each installed package, and what of it cannot be read."""
    from attngen.runtime.registry.discovery import read_installed
    from attngen.runtime.registry.shipped import INDEX

    findings = []
    for name, package in read_installed():
        if isinstance(package, Exception):
            findings.append(Finding("wheels", name, "broken", str(package)))
            continue
        if Path(package.origin, INDEX).is_file():
            findings.append(_try("wheels", name, partial(_drivers_of, package)))
        if broken := _unreadable(package):
            kernels = f"{counted(len(broken), 'kernel')} of {sum(map(len, package.sources.values()))}"
            findings.append(Finding("wheels", name, "broken", f"{kernels} cannot be read: {broken[0]}"))
    return findings


def _unreadable(package: Package) -> list[str]:
    """Reasons why kernels of a package cannot be read, one for each."""
    reasons = []
    for read in chain.from_iterable(package.sources.values()):
        try:
            read()
        except LoadError as error:
            reasons.append(str(error))
    return reasons


def _drivers_of(package: Package) -> str:
    from attngen.runtime.registry.shipped import drivers_of_package

    drivers = drivers_of_package(Path(package.origin))
    rows = [f"{arch} with a driver for {driver_text(version)} or later" for arch, version in drivers.items()]
    return f"kernels for {', '.join(rows)}"


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
        kernels = [f"{name} ({SUPPORT[name].evidence})" for name in served]
        text = (
            f"{torch.cuda.get_device_name(device)}, sm{major}{minor}; runs kernels for {', '.join(kernels) or 'none'}"
        )
        findings.append(Finding("run", f"GPU {device}", "ok" if served else "broken", text))
    return findings


def _driver() -> str:
    from attngen.runtime.device.driver import current

    version = current().version()
    return f"supports CUDA {cuda_release(version)}"


def _cards() -> list[Finding]:
    """Say how far the kernels for each GPU have been tested."""
    return [Finding("cards", f"{row.cards} ({arch})", "ok", row.evidence) for arch, row in SUPPORT.items()]


def _tested() -> list[Finding]:
    """Say which GPUs ran the whole test suite, when, why tests failed, and whether the sources are those that ran."""
    from attngen.inspect import known, record

    try:
        rows = record.records()
    except (OSError, ValueError) as error:
        return [Finding("tested", "records", "broken", str(error))]
    if not rows:
        return [Finding("tested", "records", "missing", "no run of the whole GPU test suite is recorded")]
    findings = []
    for row in rows:
        causes = known.explained(row)
        changed = row.changed()
        since = f"changed since: {', '.join(changed)}" if changed else "these sources"
        well = not changed and not row.count(record.NOT_RUN) and all(cause.harmless for cause in causes)
        sources = f"at commit {row.commit}" if row.commit else "with changes"
        text = f"tests/gpu on {row.date} {sources}: {row.counts()}; {since}"
        findings.append(Finding("tested", row.card, "ok" if well else "missing", text))
        for cause in causes:
            state = "ok" if cause.harmless else "missing" if cause.mended else "broken"
            findings.append(Finding("tested", f"{row.card}, {cause.title}", state, cause.text))
    return findings


def _try(part: str, name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(part, name, "ok", look())
    except (AttngenError, OSError) as error:
        return Finding(part, name, "broken", str(error))
