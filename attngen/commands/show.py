"""``attngen show``: one kernel, as facts, source, intermediate text or machine code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attngen.commands.output import print_json, print_table
from attngen.drivers import driver_text
from attngen.errors import REMEDY, CallError, LoadError, StoreError, suggest
from attngen.files import cause, read_regular
from attngen.store.entry import CUBIN

if TYPE_CHECKING:
    from attngen.runtime.kernels.module import Kernel


@click.command()
@click.argument("kernel")
@click.option("--source", "form", flag_value="source", help="The rendered source: Triton or CUDA.")
@click.option("--ttgir", "form", flag_value="ttgir", help="Triton's GPU dialect: layouts and pipelining.")
@click.option("--ptx", "form", flag_value="ptx", help="The PTX, of kernels in Triton and of those for ptx80.")
@click.option("--sass", "form", flag_value="sass", help="The machine code, disassembled by nvdisasm.")
@click.option("--json", "form", flag_value="json", help="The whole manifest.")
def command(kernel: str, form: str | None) -> None:
    """Show a kernel. KERNEL is its name, PACKAGE/NAME, or a part of the name that only one has."""
    built = find_kernel(kernel)
    folder = Path(built.origin)
    if form is None:
        try:
            rows = facts(built.manifest, folder)
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # entries that no call reads
            raise LoadError(f"{folder}: its manifest has no {error} that can be shown; {REMEDY}") from None
        print_table(("", ""), rows)
    elif form == "json":
        print_json(built.manifest)
    elif form == "source":
        click.echo(_source(folder), nl=False)
    elif form == "ptx" and built.arch.portable:
        click.echo(_images(folder)[CUBIN].rstrip(b"\0"), nl=False)
    elif form == "sass" and built.arch.portable:
        raise CallError(f"{built.full_name} is PTX, which the driver compiles: it has no machine code; --ptx shows it")
    elif form == "sass":
        click.echo(_machine_code(folder), nl=False)
    elif built.backend == "cuda":
        raise CallError(
            f"{built.full_name} has no {_LABELS[form]}: CUDA kernels are compiled to machine code directly; "
            "--sass shows that, and --source what it was compiled from"
        )
    else:
        click.echo(_text(folder, form), nl=False)


_LABELS = {"ptx": "PTX", "ttgir": "TTGIR"}

#: Names of the source in a kernel's folder, by backend.
_SOURCES = ("source.cu", "source.py")


def find_kernel(name: str) -> Kernel:
    """Return the one kernel that a name means; CallError if there is none or more than one."""
    kernels = _kernels()
    exact = [full for full in kernels if name in (full, full.partition("/")[2])]
    matches = exact or [full for full in kernels if name in full]
    if len(matches) == 1:
        return kernels[matches[0]]
    if not matches:
        short = [full.partition("/")[2] for full in kernels]
        raise CallError(f"no kernel '{name}' is built{suggest(name, short)}; 'attngen list' shows what is")
    shown = "\n  ".join(matches[:20]) + ("\n  …" if len(matches) > 20 else "")
    raise CallError(f"{len(matches)} kernels have '{name}' in their names; name one of\n  {shown}")


def _kernels() -> dict[str, Kernel]:
    """Return ``package/kernel`` → kernel, for all that calls would find."""
    from attngen.runtime.registry.lookup import registry

    kernels: dict[str, Kernel] = {}
    for _, package in registry.packages():
        for kernel in package.every_kernel:
            kernels.setdefault(kernel.full_name, kernel)
    return kernels


def facts(manifest: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """The main facts about a kernel, as labels and values."""
    variant, resources = manifest["variant"], manifest["resources"]
    score = variant.get("score_text") or variant.get("score") or "s"
    return [
        ("kernel", f"{manifest['package']}/{manifest['name']}"),
        ("variant", variant["name"]),
        ("mask", str(variant.get("mask_text") or variant.get("mask"))),
        ("score", str(score)),
        *([("sink", str(variant.get("sink_text") or variant["sink"]))] if "sink" in variant else []),
        *([("keys", f"{variant['keys']}: those that the call lists")] if "keys" in variant else []),
        *([("weights", variant["weights"])] if "weights" in variant else []),
        *([("dropout", "at the rate dropout_p of the call")] if variant.get("dropout") else []),
        ("arch", f"{manifest['arch']}, needs a driver for {driver_text(manifest['min_driver'])} or later"),
        ("tile", f"{manifest['tile_m']} x {manifest['tile_n']}, {manifest['stages']} stages, "
                 f"{manifest['num_warps']} warps, {manifest['loads']} loads"),
        ("registers", f"{resources['registers']}, {resources['spills']} B spilled"),
        ("shared memory", f"{resources['shared_memory']} B"),
        ("cubin", f"{resources['cubin_bytes']} B{_compiled(resources)}"),
        ("toolchain", ", ".join(f"{name} {value}" for name, value in manifest["toolchain"].items())),
        ("folder", str(folder)),
    ]  # fmt: skip


def _compiled(resources: Mapping[str, Any]) -> str:
    """Duration of the compile, in words; packages leave it out, so that each build of one gives the same bytes."""
    return f", compiled in {resources['compile_seconds']} s" if "compile_seconds" in resources else ""


def _source(folder: Path) -> str:
    """Return the source of a kernel. StoreError if its folder has none."""
    name = next((name for name in _SOURCES if (folder / name).exists()), None)
    if name is None:
        raise StoreError(
            f"{folder} has neither {' nor '.join(_SOURCES)}; 'attngen build' makes a kernel with its source"
        )
    return _text(folder, name)


def _machine_code(folder: Path) -> str:
    """Return the machine code of all cubins of a kernel: its own, and those of its other launches."""
    from attngen.compile.inspect import disassemble

    return "".join(f"// {name}\n{disassemble(image)}" for name, image in _images(folder).items())


def _images(folder: Path) -> dict[str, bytes]:
    """The images of a kernel by file name, its own first. StoreError if there is none."""
    cubins = sorted(folder.glob("*.cubin"), key=lambda path: (path.name != CUBIN, path.name))
    if not cubins:
        raise StoreError(f"{folder} has no {CUBIN}; 'attngen build' makes the kernel again")
    return {path.name: _read(path) for path in cubins}


def _text(folder: Path, name: str) -> str:
    """Return a text of a kernel's folder. StoreError if it is not there: packages may be shipped without."""
    return _read(folder / name).decode("utf-8", "replace")


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise StoreError(f"{path.parent} has no {path.name}: {cause(error)}") from None
