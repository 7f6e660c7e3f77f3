"""``attngen explain``: the plan of a spec's kernels in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.commands.output import print_json, print_table

if TYPE_CHECKING:
    from attngen.tools.explain import Band, PlanExplanation


@click.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.argument("kernel", required=False)
@click.option("--seqlen", "seqlens", type=click.IntRange(1, 32768), multiple=True, metavar="N",
              help="Queries and keys for the tile efficiency; may be repeated.")  # fmt: skip
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="The value of a scalar; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(spec: Path, kernel: str | None, seqlens: tuple[int, ...], given: tuple[str, ...], as_json: bool) -> None:
    """Explain the plan of the kernels of SPEC, or of those whose name contains KERNEL.

    Tile efficiency is the share of visible pairs of a query and a key among all pairs of the tiles that the kernel
    visits, with as many queries as keys.
    """
    from attngen.tools.explain import explain_spec

    values = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals:
            raise click.BadParameter(f"'{item}' is not NAME=VALUE", param_hint="--set")
        values[name.strip()] = value.strip()
    explanations = explain_spec(spec, kernel, seqlens=seqlens or None, given=values)
    if as_json:
        print_json({"kernels": [explanation.to_dict() for explanation in explanations]})
    elif kernel is None and len(explanations) > 1:
        _print_many(explanations)
    else:
        for explanation in explanations:
            _print(explanation)


_COLUMNS = ("kernel", "tile", "stages", "shared B", "loop", "seqlen", "full tiles", "partial tiles", "efficiency")


#: Only where some kernel has floors.
_FLOORS = ("step clk", "bound by")


def _print_many(explanations: Sequence[PlanExplanation]) -> None:
    floors = any(explanation.hopper for explanation in explanations)
    rows = []
    for explanation in explanations:
        plan = explanation.plan
        rows.append(
            [plan.name, f"{plan.tile_m}x{plan.tile_n}", plan.stages, explanation.shared_bytes, plan.driver]
            + (_efficiency(explanation)[-1] if explanation.visits else ["", "", "", ""])
            + (_floor(explanation) if floors else [])
        )
    print_table(_COLUMNS + _FLOORS if floors else _COLUMNS, rows)
    click.echo("name one of them for its bands and more: attngen explain SPEC KERNEL")


def _print(explanation: PlanExplanation) -> None:
    click.secho(explanation.plan.name, bold=True)
    for label, text in explanation.facts():
        click.echo(f"  {label:14s} {text}")
    if explanation.hopper:
        for line in explanation.hopper.floor_lines():
            click.echo(f"  {line}")
    if explanation.gradients:
        for line in explanation.gradients.lines():
            click.echo(f"  {line}")
    click.echo("  keys that the queries q_lo to q_hi see; q_pos_lo and q_pos_hi are their positions")
    _print_bands("some query sees", explanation.visible)
    _print_bands("all queries see", explanation.full)
    if explanation.plan.parts:
        click.echo("  queries that see the keys kv_lo to kv_hi")
        _print_bands("some key is seen", explanation.queries[0])
        _print_bands("all keys are seen", explanation.queries[1])
    if not explanation.exact:
        click.echo("    the mask says more than bands can: single tiles are looked at")
    if not explanation.visits:
        click.echo("  tile efficiency: needs torch")
        return
    values = ", ".join(f"{name}={value}" for name, value in explanation.scalars.items())
    click.echo(f"  tile efficiency{f' with {values}' if values else ''}, one head of one sequence")
    for seqlen, full, partial, share in _efficiency(explanation):
        click.echo(f"    seqlen {seqlen:6d}: {full} full and {partial} partial tiles, {share} of their pairs visible")


def _print_bands(label: str, found: Sequence[Band]) -> None:
    for n, band in enumerate(found):
        click.echo(f"    {label if n == 0 else 'or':16s} {band}")
    if not found:
        click.echo(f"    {label:16s} no key for certain")


def _efficiency(explanation: PlanExplanation) -> list[list[object]]:
    return [[v.seqlen, v.full, v.partial, f"{100 * v.efficiency:.1f} %"] for v in explanation.visits]


def _floor(explanation: PlanExplanation) -> list[object]:
    """Return clocks of a step of the block, and what takes them."""
    if explanation.hopper is None:
        return ["", ""]
    floor = explanation.hopper.floor
    return [floor.block, ", ".join(floor.binding)]
