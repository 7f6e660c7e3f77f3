"""``attngen bench``: attngen's kernels beside FlashAttention, cuDNN and FlexAttention, as far as installed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from attngen import cli
from attngen.commands.bench_ladder import print_ladders
from attngen.commands.bench_small import print_readings
from attngen.commands.output import print_table, refuse_unwritable
from attngen.files import cause

if TYPE_CHECKING:
    from attngen.tools.bench.masks.report import MaskReport
    from attngen.tools.bench.report import BenchReport, Mean, Result, Row
    from attngen.tools.bench.serving.report import ServingReport
    from attngen.tools.bench.small.oracle import OracleReport
    from attngen.tools.bench.small.report import SmallReport


#: Endings of the names of pictures.
_PICTURES = (".png", ".pdf", ".svg")

#: Options that say nothing about the comparison of kernels.
_NOT_FOR_THE_ORACLE = (
    "variants", "passes", "suite", "cells", "seqlens", "tokens", "peer_parts", "taken", "check", "plot_path",
    "ladder", "sustained", "dry_run", "head_dims", "limit",
)  # fmt: skip

#: Options that say nothing about masks.
_NOT_FOR_MASKS = (
    "spec", "part", "variants", "passes", "tokens", "peer_parts", "taken", "plot_path", "ladder", "sustained",
)  # fmt: skip


@click.command()
@click.argument("spec", type=click.Path(path_type=Path), required=False)
@click.option("--kernel", "part", metavar="PART", help="Only kernels whose name contains this.")
@click.option("--variant", "variants", multiple=True, metavar="NAME", help="Only this variant; may be repeated.")
@click.option("--pass", "passes", type=click.Choice(("forward", "backward", "both")),
              help="What is raced; default: both, as far as the spec builds them.")  # fmt: skip
@click.option("--suite", type=click.Choice(("grid", "variants", "small", "serving", "masks")),
              help="Only the grid of full and causal masks; only the other variants; or, instead of both, calls of "
                   "little work; decoding, appending and prefill over caches; or masks and scores of models, which "
                   "take no SPEC.")  # fmt: skip
@click.option("--cell", "cells", multiple=True, metavar="PART",
              help="For suites small, serving and masks: only cells whose name contains this; may be "
                   "repeated.")  # fmt: skip
@click.option("--head-dim", "head_dims", type=click.IntRange(8, 256), multiple=True, metavar="N",
              help="For suite masks: head dimensions; may be repeated.  [default: 128]")  # fmt: skip
@click.option("--limit", type=click.FloatRange(min=1), metavar="SECONDS",
              help="For suite masks: leave out cells for which there is no time.")  # fmt: skip
@click.option("--seqlen", "seqlens", type=click.IntRange(1, 2**20), multiple=True, metavar="N",
              help="Queries and keys of a sequence; may be repeated.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(1, 2**24), default=16384, show_default=True,
              help="Tokens of a call, in all sequences together.")  # fmt: skip
@click.option("--peer", "peer_parts", metavar="PART", multiple=True,
              help="Only libraries whose name contains this; may be repeated.")  # fmt: skip
@click.option("--taken", is_flag=True,
              help="Race only the forward that a call would take.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 1000), default=7, show_default=True,
              help="Samples of each contestant; their median counts.")  # fmt: skip
@click.option("--check/--no-check", default=True, show_default=True,
              help="Compare results with float64 before they are timed.")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write all figures so far to this file after each case.")  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.png",
              help="Draw TFLOP/s over seqlen; needs matplotlib.")  # fmt: skip
@click.option("--ladder", is_flag=True,
              help="Race the steps that lead to each CUDA kernel, each with one more choice of the spec.")  # fmt: skip
@click.option("--sustained", is_flag=True,
              help="Keep the card busy: samples of 60 ms in random order, without pauses, with clocks and "
                   "power.")  # fmt: skip
@click.option("--oracle", is_flag=True,
              help="Time every kernel of the spec on calls of many shapes, and compare the one that a call takes with "
                   "the fastest.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="List cases and contestants, and measure nothing.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Compiles at once; default: as cores and memory allow.")
@click.pass_context
def command(
    context: click.Context,
    spec: Path | None,
    part: str | None,
    variants: tuple[str, ...],
    passes: str | None,
    suite: str | None,
    cells: tuple[str, ...],
    head_dims: tuple[int, ...],
    limit: float | None,
    seqlens: tuple[int, ...],
    tokens: int,
    peer_parts: tuple[str, ...],
    taken: bool,
    rounds: int,
    check: bool,
    json_path: Path | None,
    plot_path: Path | None,
    ladder: bool,
    sustained: bool,
    oracle: bool,
    dry_run: bool,
    jobs: int | None,
) -> None:
    """Race the dense kernels of a spec against the attention libraries that are installed, in one process.

    Kernels that the cache lacks are compiled; those for other GPUs are left out. Prints TFLOP/s over visible pairs,
    medians of interleaved rounds; for backwards also the memory that they take. With --suite serving, dense and paged
    kernels decode, append and prefill in replays of CUDA graphs, and microseconds and TB/s are printed. With --suite
    masks, functions of models and papers are called through FlexAttention and through attngen, and no spec is read.
    Exits 1 if a kernel of attngen fails, or if none could be measured.
    """
    for path in (json_path, plot_path):
        if path is not None:
            refuse_unwritable(path)
    if plot_path is not None and plot_path.suffix.lower() not in _PICTURES:
        raise click.BadParameter(f"--plot {plot_path}: a picture's name ends in {', '.join(_PICTURES)}")
    if suite == "masks" and not oracle:
        _refuse_beside(context, "masks and scores of models", "--suite masks", _NOT_FOR_MASKS)
        from attngen.commands.bench_masks import run_masks
        from attngen.tools.bench.masks.run import MaskOptions

        masks = MaskOptions(cells, seqlens, head_dims, rounds, check, jobs, limit)
        if not run_masks(masks, dry_run, partial(_write, path=json_path)):
            context.exit(cli.EXIT_FAILURE)
        return
    if head_dims or limit is not None:
        raise click.UsageError(f"{'--head-dim' if head_dims else '--limit'} is for masks of models; add --suite masks")
    if spec is None:
        raise click.UsageError("Missing argument 'SPEC'; only --suite masks takes none")
    if oracle:
        _refuse_beside(context, "the comparison", "--oracle", _NOT_FOR_THE_ORACLE)
        from attngen.commands.bench_small import run_oracle

        if not run_oracle(spec, part, rounds, jobs, partial(_write, path=json_path)):
            context.exit(cli.EXIT_FAILURE)
        return
    if suite == "serving":
        _refuse_beside(context, "the serving suite", "--suite serving",
                       ("passes", "seqlens", "tokens", "peer_parts", "taken", "plot_path", "ladder",
                        "sustained"))  # fmt: skip
        from attngen.commands.bench_serving import run_serving
        from attngen.tools.bench.serving.run import ServingOptions

        serving = ServingOptions(part, variants, cells, rounds, check, jobs)
        if not run_serving(spec, serving, dry_run, partial(_write, path=json_path)):
            context.exit(cli.EXIT_FAILURE)
        return
    if suite == "small":
        _refuse_beside(context, "the suite of small calls", "--suite small",
                       ("variants", "passes", "seqlens", "tokens", "taken", "plot_path", "ladder"))  # fmt: skip
        from attngen.commands.bench_small import run_small
        from attngen.tools.bench.small.run import SmallOptions

        small = SmallOptions(part, cells, rounds, check, jobs, sustained, peer_parts)
        if not run_small(spec, small, dry_run, partial(_write, path=json_path)):
            context.exit(cli.EXIT_FAILURE)
        return
    if cells:
        raise click.UsageError(
            "--cell names cells of the serving suite, of small calls, and of masks; add --suite serving, small or masks"
        )
    if ladder and plot_path is not None:
        raise click.UsageError("--plot draws races with peers; leave it out, or --ladder")
    if ladder and (peer_parts or taken):
        raise click.UsageError("a ladder races its own rungs; leave --peer and --taken out, or --ladder")
    if ladder and passes in ("backward", "both"):
        raise click.UsageError("a ladder leads to a forward; leave --pass out, or --ladder")
    if plot_path is not None:
        import_module("matplotlib")  # fail now, not after all the work
    from attngen.tools.bench import run as bench

    directions = ("forward",) if ladder else bench.DIRECTIONS if passes in (None, "both") else (passes,)
    suites = bench.SUITES if suite is None else (suite,)
    options = bench.Options(
        part, variants, tokens, seqlens, rounds, check, jobs, ladder, directions, suites, sustained, peer_parts, taken
    )
    if dry_run:
        report = bench.dry_run(spec, options)
        _write(report, json_path)
        _print_plan(report)
        return

    def observe(report: BenchReport, total: int) -> None:
        _write(report, json_path)
        click.echo(f"[{len(report.rows)}/{total}] {_line(report.rows[-1])}", err=True)

    report = bench.bench(spec, options, observe)
    _write(report, json_path)
    _print(report)
    if plot_path is not None and report.rows:
        from attngen.tools.bench.plot import plot

        try:
            plot(report, plot_path)
        except OSError as error:
            raise click.FileError(str(plot_path), hint=cause(error)) from error
    if not report.ok:
        context.exit(cli.EXIT_FAILURE)


def _refuse_beside(context: click.Context, what: str, chosen: str, others: Sequence[str]) -> None:
    """Raise a UsageError if an option was given that says nothing about ``what`` was chosen by another one."""
    for name in others:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            (option,) = [each for each in context.command.params if each.name == name]
            said = option.opts[0] if isinstance(option, click.Option) else option.human_readable_name
            raise click.UsageError(f"{said} is not for {what}; leave it out, or {chosen}")


def _write(report: BenchReport | ServingReport | OracleReport | SmallReport | MaskReport, path: Path | None) -> None:
    if path is None:
        return
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise click.FileError(str(path), hint=cause(error)) from error


def _line(row: Row) -> str:
    figures = [f"{result.contestant} {result.tflops:.0f}" for result in row.results if result.tflops is not None]
    return f"{row.case.name}: {', '.join(figures) or 'nothing was measured'}"


def _print(report: BenchReport) -> None:
    measured = [result for result in report.results if result.tflops is not None]
    if report.ladders:
        print_ladders(report)
    elif measured:
        for direction in report.directions:
            _print_figures(report, direction)
        for direction in report.directions:
            _print_to_causal(report, direction)
        _print_workspace(report)
    print_readings([(row.case.name, row.results) for row in report.rows])
    if any(result.timing is not None and result.timing.host_bound for result in measured):
        click.echo("* bound by the host: launching takes as long as the kernel")
    _print_reasons(report)
    for row in report.rows:
        for result in row.results:
            if result.status == "failed":
                click.secho(f"{row.case.name}: {result.contestant}: {result.reason}", fg="red", err=True)
    if report.gpu is not None and report.ceilings is not None:
        reached = report.ceilings
        click.echo(
            f"{report.package} on {report.gpu['name']}: bf16 matrix product {reached.matrix_tflops:.0f} TFLOP/s, "
            f"copy {reached.copy_gbps:.0f} GB/s; medians of {report.rounds} rounds"
        )
    if report.stopped is not None:
        click.secho(report.stopped, fg="red", err=True)
    if not any(result.ours for result in measured):
        click.secho("no kernel was measured", fg="red", err=True)


def _print_figures(report: BenchReport, direction: str) -> None:
    """Print TFLOP/s of all contestants of one direction, and the ratios of ours to the best peer."""
    found = replace(report, rows=tuple(row for row in report.rows if row.case.direction == direction))
    measured = [result for result in found.results if result.tflops is not None]
    names, ours = _columns(measured), _columns(result for result in measured if result.ours)
    means = {mean.of: mean for mean in found.means}
    lines: list[list[str]] = []
    for group, rows in found.groups.items():
        lines += [_cells(row, names, ours) for row in rows]
        if group in means:
            lines.append(_mean_cells(means[group], names, ours))
    lines += [_mean_cells(mean, names, ours) for of, mean in means.items() if of not in found.groups]
    if lines and measured:
        print_table(["TFLOP/s", *names, *(f"{name.removeprefix('attngen ')} / best peer" for name in ours)], lines)


def _print_to_causal(report: BenchReport, direction: str) -> None:
    """Print what variants cost: the time of a visible pair over that of our causal kernel at the same sizes."""
    _print_of_rows(
        "time per visible pair / our causal",
        [(row, report.to_causal(row)) for row in report.rows if row.case.direction == direction],
        _ratio,
    )


def _print_workspace(report: BenchReport) -> None:
    """Print the memory that backwards took besides inputs and gradients, and our bound on it."""
    rows = []
    for row in report.rows:
        held: dict[str, float] = {r.contestant: r.workspace for r in row.results if r.workspace is not None}
        bounds = [r.workspace_bound for r in row.results if r.workspace is not None and r.workspace_bound is not None]
        rows.append((row, {**held, "our bound": max(bounds)} if bounds else held))
    _print_of_rows("MiB besides inputs and gradients", rows, lambda size: "" if size is None else f"{size / 2**20:.1f}")


def _print_of_rows(
    title: str, rows: Sequence[tuple[Row, Mapping[str, float]]], text: Callable[[float | None], str]
) -> None:
    """Print a figure of each contestant in each case; nothing if there is none."""
    found = dict.fromkeys(name for _, figures in rows for name in figures)
    contestants = _columns(result for row, _ in rows for result in row.results)
    names = [name for name in contestants if name in found] + [name for name in found if name not in contestants]
    lines = [[row.case.name, *(text(figures.get(name)) for name in names)] for row, figures in rows if figures]
    if lines:
        print_table([title, *names], lines)


def _columns(results: Iterable[Result]) -> list[str]:
    """Return the names of contestants, each once: peers first, then ours."""
    ordered = sorted(results, key=lambda result: result.ours)
    return list(dict.fromkeys(result.contestant for result in ordered))


def _cells(row: Row, names: Sequence[str], ours: Sequence[str]) -> list[str]:
    results = {result.contestant: result for result in row.results}
    figures = [_figure(results.get(name)) for name in names]
    return [row.case.name, *figures, *(_ratio(row.ratios.get(name)) for name in ours)]


def _figure(result: Result | None) -> str:
    if result is None or result.tflops is None:
        return ""
    mark = "*" if result.timing is not None and result.timing.host_bound else ""
    return f"{result.tflops:5.0f}{mark}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _mean_cells(mean: Mean, names: Sequence[str], ours: Sequence[str]) -> list[str]:
    return [f"{mean.of}: geometric mean", *("" for _ in names), *(_ratio(mean.ratios.get(name)) for name in ours)]


def _print_plan(report: BenchReport) -> None:
    if report.ladders:
        print_ladders(report)
    names = _columns(result for result in report.results if result.status == "planned")
    rows = []
    for row in report.rows:
        planned = {result.contestant for result in row.results if result.status == "planned"}
        shape = f"b{row.case.batch} s{row.case.seqlen} h{row.case.heads}/{row.case.kv_heads}"
        rows.append([row.case.name, shape, *("x" if name in planned else "" for name in names)])
    if rows and report.ladders:
        print_table(["case", "shape"], [row[:2] for row in rows])
    elif rows:
        print_table(["case", "shape", *names], rows)
    _print_reasons(report)
    click.echo(f"{report.package}: {_count(len(rows), 'case')}; nothing was measured")


def _print_reasons(report: BenchReport) -> None:
    """Print who is not in the race, and why."""
    unsupported = [(result.contestant, result.reason) for result in report.results if result.status == "unsupported"]
    for (name, reason), count in Counter(unsupported).items():
        click.echo(f"not in {_count(count, 'case')}: {name}: {reason}")
    for reason, count in Counter(report.left_out.values()).items():
        click.echo(f"left out: {_count(count, 'kernel')}: {reason}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
