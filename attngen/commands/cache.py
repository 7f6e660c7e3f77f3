"""``attngen cache``: list the cache, check it, or empty it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import click

from attngen import cli
from attngen.commands.output import counted, print_json, print_table
from attngen.store.index import read_indexes
from attngen.store.store import Store


@click.group()
def command() -> None:
    """Show the cache, check it, or empty it."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_(as_json: bool) -> None:
    """List the entries of the cache and the packages that use them."""
    store = Store()
    users = _users(store)
    rows = []
    for key in store.all_keys():
        artifact, damage = store.read(key)
        name = artifact.name if artifact else None
        rows.append((key, name, _size(store.path(key)), " ".join(users.get(key, ())), "damaged" if damage else ""))
    total = sum(row[2] for row in rows)
    if as_json:
        columns = ("key", "kernel", "bytes", "packages", "state")
        print_json({"root": str(store.root), "bytes": total, "entries": [dict(zip(columns, row)) for row in rows]})  # noqa: B905
        return
    if rows:
        print_table(("key", "kernel", "bytes", "packages", ""), ((row[0][:12], *row[1:]) for row in rows))
    click.echo(f"{store.root}: {counted(len(rows), 'entry', 'entries')}, {total / 1e6:.1f} MB")


@command.command()
@click.option("--remove", is_flag=True, help="Remove damaged entries; the next build makes them again.")
@click.pass_context
def verify(context: click.Context, remove: bool) -> None:
    """Check every file against its checksum. Exits 1 if an entry is damaged or missing."""
    store = Store()
    keys, damaged = store.all_keys(), store.verify()
    for damage in damaged:
        click.secho(f"{store.path(damage.key)}: {damage.reason}", fg="red", err=True)
        if remove:
            store.remove(damage.key)
    missing = [(i.package, kernel.name) for i in read_indexes(store) for kernel in i.kernels if kernel.key not in keys]
    for package, name in missing:
        click.secho(f"{package}/{name} is listed, but not in the cache; build its spec again", fg="red", err=True)
    removed = ", removed" if remove and damaged else ""
    entries = counted(len(keys), "entry", "entries")
    click.echo(f"{store.root}: {entries}, {len(damaged)} damaged{removed}, {len(missing)} missing")
    if damaged or missing:
        context.exit(cli.EXIT_FAILURE)


@command.command()
@click.option("--unused", is_flag=True, help="Only entries that no package uses, such as kernels of earlier builds.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(unused: bool, yes: bool) -> None:
    """Empty the cache. What a call needs must then be built again."""
    store = Store()
    users = _users(store) if unused else {}
    keys = [key for key in store.all_keys() if key not in users]
    size = sum(_size(store.path(key)) for key in keys)
    if not yes and keys:
        click.confirm(
            f"Remove {counted(len(keys), 'entry', 'entries')} ({size / 1e6:.1f} MB) of {store.root}?", abort=True
        )
    if not unused:
        store.forget()
    for key in keys:
        store.remove(key)
    store.sweep()
    click.echo(f"{store.root}: removed {counted(len(keys), 'entry', 'entries')}, {size / 1e6:.1f} MB")


def _users(store: Store) -> dict[str, list[str]]:
    """Return key → packages that list it."""
    users: dict[str, list[str]] = {}
    for index in read_indexes(store):
        for kernel in index.kernels:
            users.setdefault(kernel.key, []).append(index.package)
    return users


def _size(folder: Path) -> int:
    """Bytes of the files of a folder, as far as they can be asked for."""
    size = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            size += entry.stat(follow_symlinks=False).st_size
    return size
