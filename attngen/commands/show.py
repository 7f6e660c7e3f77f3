"""``attngen show``: one kernel, as facts, source, intermediate text or machine code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from attngen.commands.output import print_json, print_table
from attngen.errors import CallError, StoreError, suggest


@click.command()
@click.argument("kernel")
@click.option("--source", "form", flag_value="source.py", help="The rendered source.")
@click.option("--ttgir", "form", flag_value="ttgir", help="Triton's GPU dialect: layouts and pipelining.")
@click.option("--ptx", "form", flag_value="ptx", help="The PTX.")
@click.option("--sass", "form", flag_value="sass", help="The machine code, disassembled by nvdisasm.")
@click.option("--json", "form", flag_value="json", help="The whole manifest.")
def command(kernel: str, form: str | None) -> None:
    """Show a kernel. KERNEL is its name, PACKAGE/NAME, or a part of the name that only one has."""
    folder = find_folder(kernel)
    if form == "sass":
        from attngen.compile.inspect import disassemble

        click.echo(disassemble((folder / "kernel.cubin").read_bytes()))
    elif form in (None, "json"):
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
        if form == "json":
            print_json(manifest)
        else:
            print_table(("", ""), facts(manifest, folder))
    else:
        click.echo(_text(folder, form), nl=False)


def find_folder(name: str) -> Path:
    """Return the folder of the one kernel that a name means; CallError if there is none or more than one."""
    folders = _folders()
    exact = [full for full in folders if name in (full, full.partition("/")[2])]
    found = exact or [full for full in folders if name in full]
    if len(found) == 1:
        return folders[found[0]]
    if not found:
        short = [full.partition("/")[2] for full in folders]
        raise CallError(f"no kernel '{name}' is built{suggest(name, short)}; 'attngen list' shows what is")
    shown = "\n  ".join(found[:20]) + ("\n  …" if len(found) > 20 else "")
    raise CallError(f"{len(found)} kernels are called '{name}'; say one of\n  {shown}")


def _folders() -> dict[str, Path]:
    """Return ``package/kernel`` → folder, for all that calls would find."""
    from attngen.runtime.registry import registry

    folders: dict[str, Path] = {}
    for _, package in registry.packages():
        for variant in package.variants:
            for kernel in package.kernels(variant):
                folders.setdefault(kernel.full_name, Path(kernel.origin))
    return folders


def facts(manifest: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Return what a reader wants to know first about a kernel, as label and value."""
    variant, resources = manifest["variant"], manifest["resources"]
    score = variant.get("score_text") or variant.get("score") or "s"
    return [
        ("kernel", f"{manifest['package']}/{manifest['name']}"),
        ("variant", variant["name"]),
        ("mask", str(variant.get("mask_text") or variant.get("mask"))),
        ("score", str(score)),
        *([("sink", str(variant.get("sink_text") or variant["sink"]))] if "sink" in variant else []),
        *([("dropout", "at the rate dropout_p of the call")] if variant.get("dropout") else []),
        ("arch", f"{manifest['arch']}, needs a driver for CUDA {_cuda(manifest['min_driver'])}"),
        ("tile", f"{manifest['tile_m']} x {manifest['tile_n']}, {manifest['stages']} stages, "
                 f"{manifest['num_warps']} warps, {manifest['loads']} loads"),
        ("registers", f"{resources['registers']}, {resources['spills']} B spilled"),
        ("shared memory", f"{resources['shared_memory']} B"),
        ("cubin", f"{resources['cubin_bytes']} B{_compiled(resources)}"),
        ("toolchain", ", ".join(f"{name} {value}" for name, value in manifest["toolchain"].items())),
        ("folder", str(folder)),
    ]  # fmt: skip


def _compiled(resources: Mapping[str, Any]) -> str:
    """Return how long the compile took; a package that was shipped does not say, to be the same each time."""
    return f", compiled in {resources['compile_seconds']} s" if "compile_seconds" in resources else ""


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _text(folder: Path, name: str) -> str:
    """Return a text of a kernel's folder. StoreError if it is not there: packages may be shipped without."""
    try:
        return (folder / name).read_text("utf-8")
    except OSError as error:
        raise StoreError(f"{folder} has no {name}: {error.strerror}") from None
