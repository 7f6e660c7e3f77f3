"""``attngen list``: built and installed kernels, and the coverage of each variant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click

from attngen.commands.output import print_json, print_table
from attngen.errors import suggest


@click.command()
@click.option("--package", "packages", multiple=True, metavar="NAME", help="Only this package; may be repeated.")
@click.option("--coverage", is_flag=True, help="Only what each variant is built for, not each kernel.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(packages: tuple[str, ...], coverage: bool, as_json: bool) -> None:
    """List the kernels that are found: those of installed packages and those that you built."""
    rows = _kernels(packages)
    covered = _coverage(rows)
    if as_json:
        print_json({"kernels": rows, "coverage": covered})
        return
    if not rows:
        named = dict.fromkeys(row["package"] for row in (_kernels(()) if packages else ()))
        where = "".join(f" in package '{name}'{suggest(name, named)}" for name in packages[:1])
        click.echo(f"no kernels{where}; 'attngen build SPEC' makes some")
        return
    if not coverage:
        print_table(_COLUMNS, [[row[column] for column in _COLUMNS] for row in rows])
    columns = list(covered[0])
    print_table(columns, [[row[column] for column in columns] for row in covered])
    counts = Counter(row["package"] for row in rows)
    click.echo(", ".join(f"{name}: {count} kernel{'' if count == 1 else 's'}" for name, count in counts.items()))


_COLUMNS = ("package", "kernel", "from", "registers", "spills", "shared_memory", "cubin_bytes")


def _kernels(wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row for each kernel, in the order in which calls look for them."""
    from attngen.runtime.registry.lookup import registry

    rows = []
    for rank, package in registry.packages():
        if wanted and package.name not in wanted:
            continue
        rows += [_row(kernel.manifest, rank) for kernel in package.every_kernel]
    return rows


def _row(manifest: Mapping[str, Any], rank: str) -> dict[str, Any]:
    qk, v = manifest["head_dim_qk"], manifest["head_dim_v"]
    resources = manifest["resources"]
    return {
        "package": manifest["package"],
        "kernel": manifest["name"],
        "from": rank,
        "variant": manifest["variant"]["name"],
        "arch": manifest["arch"],
        "dtype": manifest["dtype"],
        "head_dim": str(qk) if qk == v else f"{qk}/{v}",
        "layout": manifest["layout"],
        "direction": manifest["direction"],
        "backend": manifest["backend"],
        # figures for people, which no call reads: a manifest may lack them
        **{name: resources.get(name) for name in ("registers", "spills", "shared_memory", "cubin_bytes")},
    }


_AXES = ("arch", "dtype", "head_dim", "layout", "direction", "backend")


def _coverage(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each variant of each package, the values that its kernels take along each axis, and their number."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["package"], row["variant"]), []).append(row)
    return [
        {
            "package": package,
            "variant": variant,
            **{axis: " ".join(dict.fromkeys(row[axis] for row in members)) for axis in _AXES},
            "kernels": len(members),
        }
        for (package, variant), members in groups.items()
    ]
