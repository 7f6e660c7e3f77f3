"""``attngen explain``: the plan of a spec's kernels in words and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.commands.arguments import SPEC
from attngen.commands.output import print_json, print_table
from attngen.errors import StoreError
from attngen.files import cause

if TYPE_CHECKING:
    from attngen.inspect.explanation import Band, PlanExplanation
    from attngen.inspect.visits import Visits


@click.command()
@click.argument("spec", type=SPEC)
@click.argument("kernel", required=False)
@click.option("--seqlen", "seqlens", type=click.IntRange(1, 32768), multiple=True, metavar="N",
              help="Queries and keys for the tile efficiency; may be repeated.")  # fmt: skip
@click.option("--scalar", "--set", "given", multiple=True, metavar="NAME=VALUE",
              help="The value of a scalar, such as window=1024; may be repeated.")  # fmt: skip
@click.option("--tensor", "tensors", multiple=True, metavar="NAME=FILE",
              help="The values of a tensor, from a .pt or .npy file; may be repeated.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True,
              help="Seed of the random values of tensors that are not given.")  # fmt: skip
@click.option("--head", type=click.IntRange(0), metavar="H",
              help="Where the mask differs by head, count this one; default: all of them together.")  # fmt: skip
@click.option("--batch", type=click.IntRange(0), metavar="B",
              help="Where the mask differs by sequence, count this one; default: all of them together.")  # fmt: skip
@click.option("--full", is_flag=True, help="Print the whole plan: roles, memory, barriers, arguments, floors.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write a page of tiles, bands, plan, floors and source, which loads nothing.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text, always whole.")
def command(
    spec: Path,
    kernel: str | None,
    seqlens: tuple[int, ...],
    given: tuple[str, ...],
    tensors: tuple[str, ...],
    seed: int,
    head: int | None,
    batch: int | None,
    full: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Explain the plan of the kernels of SPEC, or of those whose name contains KERNEL.

    Tile efficiency is the share of visible pairs of a query and a key among all pairs that the kernel multiplies, with
    as many queries as keys. Consumers of CUDA kernels may skip tiles of their block that their own rows do not see.
    Where a mask reads tensors, or scalars without a default, it depends on their values; assumed ones are printed.
    """
    from attngen.inspect.of_spec import explain_spec
    from attngen.inspect.operations import explain_helpers

    files = {name: Path(file) for name, file in _pairs(tensors, "--tensor", "NAME=FILE").items()}
    values = _pairs(given, "--scalar", "NAME=VALUE")
    explanations = explain_spec(
        spec, kernel, seqlens=seqlens or None, given=values, files=files, seed=seed, b=batch, h=head,
        pictures=html is not None,
    )  # fmt: skip
    if html is not None:
        _write_page(html, f"{spec.name}{f', {kernel}' if kernel else ''}", explanations)
        return
    helpers = explain_helpers(spec, kernel)
    if as_json:
        print_json({"kernels": [*(one.to_dict() for one in explanations), *(one.to_dict() for one in helpers)]})
        return
    if kernel is None and len(explanations) > 1:
        _print_many(explanations)
    else:
        for explanation in explanations:
            (_print if full else _print_short)(explanation)
        if explanations and not full:
            click.echo("--full prints the whole plan: roles, memory, barriers, arguments, floors")
    for helper in helpers:
        click.secho(helper.plan.name, bold=True)
        for label, text in helper.facts() if full else helper.facts()[:1]:
            click.echo(f"  {label:14s} {text}")


def _write_page(file: Path, title: str, explanations: Sequence[PlanExplanation]) -> None:
    from attngen.inspect.page import page

    try:
        file.write_text(page(title, explanations), "utf-8")
    except OSError as error:
        raise StoreError(f"{file} cannot be written: {cause(error)}") from error
    click.echo(f"{file}: {len(explanations)} kernel{'s' if len(explanations) != 1 else ''}")


def _pairs(items: Sequence[str], option: str, form: str) -> dict[str, str]:
    """Names and values of an option."""
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals:
            raise click.BadParameter(f"'{item}' is not {form}", param_hint=option)
        pairs[name.strip()] = value.strip()
    return pairs


_COLUMNS = ("kernel", "tile", "stages", "shared B", "loop", "seqlen", "full tiles", "partial tiles", "efficiency")

#: Only where some kernel has floors.
_FLOORS = ("step clk", "bound by")

#: Reason why the tiles that a call visits are not counted.
_NO_TILES = "a call lists the keys of each query"


def _lists_keys(explanation: PlanExplanation) -> bool:
    """Whether calls of a kernel list the keys of each query."""
    return explanation.plan.variant.keys is not None


def _print_many(explanations: Sequence[PlanExplanation]) -> None:
    floors = any(explanation.schedule.floor for explanation in explanations)
    foreseen = any(explanation.predicted for explanation in explanations)
    rows = []
    for explanation in explanations:
        plan = explanation.plan
        rows.append(
            [plan.name, f"{plan.tile_m}x{plan.tile_n}", plan.stages, explanation.shared_bytes, plan.iteration]
            + (_efficiency(explanation)[-1] if explanation.visits else ["", "", "", ""])
            + (_floor(explanation) if floors else [])
            + ([_predicted(explanation)] if foreseen else [])
        )
    print_table([*_COLUMNS, *(_FLOORS if floors else ()), *(("predicted µs",) if foreseen else ())], rows)
    if foreseen:
        from attngen.inspect.predicted import HEADS, KV_HEADS

        click.echo(f"predicted: a call of one sequence of {HEADS} query heads to {KV_HEADS}, with the values below")
    by_variant = {explanation.plan.variant.name: explanation for explanation in explanations if explanation.visits}
    for name, explanation in by_variant.items():
        for line in _assumptions(explanation):
            click.echo(f"{name}: {line}")
        if explanation.visits[0].heads > 1:
            click.echo(f"{name}: counted for {explanation.place}")
    click.echo("name one of them for its bands and more: attngen explain SPEC KERNEL")


def _print_short(explanation: PlanExplanation) -> None:
    """Print the summary: the variant, the tile and the loop, visible keys, and the predicted time."""
    plan = explanation.plan
    click.secho(plan.name, bold=True)
    for label, text in explanation.summary():
        click.echo(f"  {label:14s} {text}")
    _print_bands("some query sees", explanation.visible, indent=2)
    _print_bands("all queries see", explanation.full, indent=2)
    if not explanation.visits:
        click.echo(f"  tile efficiency: {_NO_TILES if _lists_keys(explanation) else 'needs torch'}")
        return
    click.echo(f"  {_counted(explanation)}")
    for line in _assumptions(explanation):
        click.echo(f"    {line}")
    times = dict(explanation.predicted)
    for visits in explanation.visits:
        tiles = f"{visits.full} full and {visits.partial} partial tiles, {_percent(visits)} of their pairs visible"
        time = f"; predicted {times[visits.seqlen]:.1f} µs" if visits.seqlen in times else ""
        click.echo(f"    seqlen {visits.seqlen:6d}: {tiles}{time}")
    if times:
        click.echo(f"    predicted: {_call(explanation)}")


def _counted(explanation: PlanExplanation) -> str:
    values = ", ".join(f"{name}={value}" for name, value in explanation.scalars.items())
    return f"tile efficiency{f' with {values}' if values else ''}, {explanation.place}"


def _call(explanation: PlanExplanation) -> str:
    """The call of a predicted time in words, with its assumed values."""
    from attngen.inspect.predicted import HEADS, KV_HEADS

    given = ", ".join(
        f"{name}={value}" for name, value in explanation.scalars.items() if name not in explanation.assumed
    )
    assumed = ", ".join(f"{name}={explanation.scalars[name]}" for name in explanation.assumed)
    values = "; ".join(part for part in (given, f"{assumed} assumed" if assumed else "") if part)
    differs = explanation.tensors or any(visits.heads > 1 for visits in explanation.visits)
    whole = "; keys that only tensors or some heads hide count as seen" if differs else ""
    return f"one sequence of {HEADS} query heads to {KV_HEADS}{f', {values}' if values else ''}{whole}"


def _print(explanation: PlanExplanation) -> None:
    click.secho(explanation.plan.name, bold=True)
    for label, text in explanation.facts():
        click.echo(f"  {label:14s} {text}")
    for line in explanation.schedule.floor_lines():
        click.echo(f"  {line}")
    if explanation.gradients:
        for line in explanation.gradients.lines():
            click.echo(f"  {line}")
    click.echo("  keys that the queries q_lo to q_hi see; q_pos_lo and q_pos_hi are their positions")
    _print_bands("some query sees", explanation.visible)
    _print_bands("all queries see", explanation.full)
    if explanation.plan.direction == "backward":
        click.echo("  queries that see the keys kv_lo to kv_hi")
        _print_bands("some key is seen", explanation.queries[0])
        _print_bands("all keys are seen", explanation.queries[1])
    if not explanation.exact:
        click.echo("    bands cannot express all of the mask: tiles are classified one by one")
    if not explanation.visits:
        click.echo(f"  tile efficiency: {_NO_TILES if _lists_keys(explanation) else 'needs torch'}")
        return
    click.echo(f"  {_counted(explanation)}")
    for line in _assumptions(explanation):
        click.echo(f"    {line}")
    for visits in explanation.visits:
        tiles, share = f"{visits.full} full and {visits.partial} partial tiles", _percent(visits)
        if visits.skipped:
            steps = f"{visits.steps + visits.skipped} steps of consumers, of which they skip {visits.skipped}"
            click.echo(f"    seqlen {visits.seqlen:6d}: {tiles}; {steps}; {share} of the pairs of the others visible")
        else:
            click.echo(f"    seqlen {visits.seqlen:6d}: {tiles}, {share} of their pairs visible")
        if not visits.complete:
            click.echo(f"                   scaled up from {visits.sampled[0]} of {visits.sampled[1]} tiles of queries")
    if explanation.predicted:
        times = ", ".join(f"{us:.1f} µs at {seqlen}" for seqlen, us in explanation.predicted)
        click.echo(f"  predicted time: {times}; {_call(explanation)}")
    outside = next((visits.outside for visits in explanation.visits if visits.outside), None)
    if outside:
        click.echo(f"    {outside}; kernels read 0 there, and so do these figures")


def _assumptions(explanation: PlanExplanation) -> Iterator[str]:
    """Yield the assumed values that the efficiency depends on."""
    if explanation.assumed:
        values = ", ".join(f"{name}={explanation.scalars[name]}" for name in explanation.assumed)
        yield f"assumed {values}, on which the shares depend; --scalar NAME=VALUE gives others"
    for name, values in explanation.tensors.items():
        yield f"{name}: {values}"
    if any(not values.endswith("as given") for values in explanation.tensors.values()):
        yield f"the shares depend on these values (seed {explanation.seed}); --tensor NAME=FILE gives real ones"


def _print_bands(label: str, bands: Sequence[Band], indent: int = 4) -> None:
    for n, band in enumerate(bands):
        click.echo(f"{' ' * indent}{label if n == 0 else 'or':16s} {band}")
    if not bands:
        click.echo(f"{' ' * indent}{label:16s} no key for certain")


def _efficiency(explanation: PlanExplanation) -> list[list[object]]:
    return [[visits.seqlen, visits.full, visits.partial, _percent(visits)] for visits in explanation.visits]


def _percent(visits: Visits) -> str:
    return f"{100 * visits.efficiency:.1f} %"


def _predicted(explanation: PlanExplanation) -> str:
    return f"{explanation.predicted[-1][1]:.1f}" if explanation.predicted else ""


def _floor(explanation: PlanExplanation) -> list[object]:
    """Clocks of a step of the block, and the resource that takes them."""
    floor = explanation.schedule.floor
    if floor is None:
        return ["", ""]
    return [floor.block, ", ".join(floor.binding)]
