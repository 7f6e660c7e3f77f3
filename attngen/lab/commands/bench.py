"""``attngen bench``: attngen's kernels beside FlashAttention, cuDNN and FlexAttention, as far as installed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from attngen import __version__, cli, resources
from attngen.commands.arguments import SPEC
from attngen.commands.output import counted, print_json, print_table, refuse_unwritable
from attngen.files import cause
from attngen.lab.commands.bench_ladder import print_ladders
from attngen.lab.commands.bench_output import (
    columns,
    print_absent,
    print_end,
    print_failed,
    print_readings,
    ratio,
)

if TYPE_CHECKING:
    from attngen.lab.bench.grid import GridReport, GridResult, GridRow
    from attngen.lab.bench.report import Mean, Report
    from attngen.lab.bench.runner import BenchOptions, Suite

#: The value of ``--json`` without a file.
_STDOUT = Path("-")

#: Endings of the names of pictures.
_PICTURES = (".png", ".pdf", ".svg")

#: By suite, its description, the option that chooses it, and the options that do not apply to it.
_REFUSED: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "oracle": ("the comparison", "--oracle", (
        "variants", "passes", "suite", "cells", "seqlens", "tokens", "peer_parts", "taken", "check", "plot_path",
        "ladder", "sustained", "dry_run", "head_dims", "limit", "record_path",
    )),
    "masks": ("masks and scores of models", "--suite masks", (
        "spec", "part", "variants", "passes", "tokens", "peer_parts", "taken", "plot_path", "ladder", "sustained",
    )),
    "trees": ("prefix trees", "--suite trees", (
        "spec", "part", "variants", "passes", "seqlens", "tokens", "peer_parts", "taken", "plot_path", "ladder",
        "limit", "jobs", "record_path",
    )),
    "serving": ("the serving suite", "--suite serving", (
        "passes", "seqlens", "tokens", "peer_parts", "taken", "plot_path", "ladder", "sustained", "record_path",
    )),
    "parallel": ("the parallel suite", "--suite parallel", (
        "spec", "part", "variants", "passes", "tokens", "taken", "check", "plot_path", "ladder", "sustained",
        "head_dims", "limit", "jobs", "record_path",
    )),
    "small": ("the suite of small calls", "--suite small", (
        "variants", "passes", "seqlens", "tokens", "taken", "plot_path", "ladder", "record_path",
    )),
}  # fmt: skip


@click.command()
@click.argument("spec", type=SPEC, required=False)
@click.option("--kernel", "part", metavar="PART", help="Only kernels whose name contains this.")
@click.option("--variant", "variants", multiple=True, metavar="NAME", help="Only this variant; may be repeated.")
@click.option("--pass", "passes", type=click.Choice(("forward", "backward", "both")),
              help="Direction; default: both, as far as the spec builds them.")  # fmt: skip
@click.option("--suite", type=click.Choice(("grid", "variants", "small", "serving", "masks", "trees", "parallel")),
              help="Only the grid of full and causal masks; only the other variants; or, instead of both, calls of "
                   "little work; decoding, appending and prefill over caches; or masks and scores of models, prefix "
                   "trees beside their sequences apart, or one sequence on the ranks of torchrun, which take no "
                   "SPEC.")  # fmt: skip
@click.option("--cell", "cells", multiple=True, metavar="PART",
              help="For suites small, serving, masks, trees and parallel: only cells whose name contains this; may be "
                   "repeated.")  # fmt: skip
@click.option("--head-dim", "head_dims", type=click.IntRange(8, 256), multiple=True, metavar="N",
              help="For suites masks and trees: head dimensions; may be repeated.  [default: 128]")  # fmt: skip
@click.option("--limit", type=click.FloatRange(min=1), metavar="SECONDS",
              help="For suite masks: leave out cells for which there is no time.")  # fmt: skip
@click.option("--seqlen", "seqlens", type=click.IntRange(1, 2**20), multiple=True, metavar="N",
              help="Queries and keys of a sequence; may be repeated.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(1, 2**24), default=16384, show_default=True,
              help="Tokens of a call, in all sequences together.")  # fmt: skip
@click.option("--peer", "peer_parts", metavar="PART", multiple=True,
              help="Only libraries whose name contains this; may be repeated.")  # fmt: skip
@click.option("--taken", is_flag=True,
              help="Of forward kernels, only the one that a call would take.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 1000), default=7, show_default=True,
              help="Samples of each contender; their median counts.")  # fmt: skip
@click.option("--check/--no-check", default=True, show_default=True,
              help="Compare results with float64 before they are timed.")  # fmt: skip
@click.option("--json", "json_path", is_flag=False, flag_value="-", metavar="[FILE]",
              type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
              help="Print JSON instead of tables; with a FILE, print tables, and write all figures so far to this file "
                   "after each case.")  # fmt: skip
@click.option("--report", "report_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write one file to send back from a GPU that docs/cards.md has no figures of: all figures, and the "
                   "checks of attngen doctor.")  # fmt: skip
@click.option("--record", "record_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Put the figures, with card, date and commit, into a file of runs, such as docs/figures/speed.json, "
                   "in the place of earlier ones of the same kind and card.")  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.png",
              help="Draw TFLOP/s over seqlen; needs matplotlib.")  # fmt: skip
@click.option("--ladder", is_flag=True,
              help="Time the steps that lead to each CUDA kernel, each with one more choice of the spec.")  # fmt: skip
@click.option("--sustained", is_flag=True,
              help="Keep the card busy: samples of 60 ms in random order, without pauses, with clocks and "
                   "power.")  # fmt: skip
@click.option("--oracle", is_flag=True,
              help="Time every kernel of the spec on calls of many shapes, and compare the one that a call takes with "
                   "the fastest.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="List cases and contenders, and measure nothing.")
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
    report_path: Path | None,
    record_path: Path | None,
    plot_path: Path | None,
    ladder: bool,
    sustained: bool,
    oracle: bool,
    dry_run: bool,
    jobs: int | None,
) -> None:
    """Time the dense kernels of a spec beside the attention libraries that are installed, in one process.

    Kernels that the cache lacks are compiled; those for other GPUs are left out. Prints TFLOP/s over visible pairs,
    medians of interleaved rounds; for backward passes also the memory that they take. With --suite serving, dense and
    paged kernels decode, append and prefill in replays of CUDA graphs, and microseconds and TB/s are printed. With
    --suite masks, functions of models and papers are called through FlexAttention and through attngen, and no spec is
    read. With --suite trees, attention over packs of prefix trees is timed beside that over their sequences apart. With
    --suite parallel, under torchrun, one sequence is spread over the ranks; with --dry-run 8 to 64 ranks are simulated.
    Exits 1 if a kernel of attngen fails, or if none could be measured.
    """
    spec, json_path, as_json = _json_target(spec, json_path)
    for path in (json_path, report_path, record_path, plot_path):
        if path is not None:
            refuse_unwritable(path)
    if plot_path is not None and plot_path.suffix.lower() not in _PICTURES:
        raise click.BadParameter(f"--plot {plot_path}: a picture's name ends in {', '.join(_PICTURES)}")
    chosen = "oracle" if oracle else suite or "grid"
    if chosen in _REFUSED:
        _refuse_beside(context, *_REFUSED[chosen])
    elif cells:
        raise click.UsageError(
            "--cell names cells of the serving suite, of small calls, of masks and of trees; add --suite serving, "
            "small, masks or trees"
        )
    if report_path is not None and (dry_run or chosen == "parallel"):
        raise click.UsageError("--report holds figures of one GPU; leave it out, or --dry-run and --suite parallel")
    if chosen == "parallel":
        from attngen.lab.commands import bench_parallel

        if not bench_parallel.run(
            cells=cells, seqlens=seqlens, peers=peer_parts, rounds=rounds, json_path=json_path, as_json=as_json,
            dry_run=dry_run,
        ):  # fmt: skip
            context.exit(cli.EXIT_FAILURE)
        return
    if chosen not in ("masks", "trees") and (head_dims or limit is not None):
        raise click.UsageError(f"{'--head-dim' if head_dims else '--limit'} is for masks of models; add --suite masks")
    if ladder and plot_path is not None:
        raise click.UsageError("--plot draws attngen beside peers; leave it out, or --ladder")
    if ladder and (peer_parts or taken):
        raise click.UsageError("a ladder has only its own rungs; leave --peer and --taken out, or --ladder")
    if ladder and passes in ("backward", "both"):
        raise click.UsageError("a ladder leads to a forward kernel; leave --pass out, or --ladder")
    if record_path is not None and ladder:
        raise click.UsageError("--record keeps figures beside peers; leave it out, or --ladder")
    commit = None if record_path is None else _begin_record(record_path)
    if plot_path is not None:
        import_module("matplotlib")  # fail now, not after all the work
    from attngen.lab.bench import runner
    from attngen.lab.bench.cases import DENSE_SUITES, DIRECTIONS

    directions = ("forward",) if ladder else DIRECTIONS if passes in (None, "both") else (passes,)
    options = runner.BenchOptions(
        part=part, variants=variants, cells=cells, peers=peer_parts, directions=directions,
        suites=(suite,) if suite in DENSE_SUITES else DENSE_SUITES, tokens=tokens, seqlens=seqlens, head_dims=head_dims,
        rounds=rounds, check=check, jobs=jobs, limit=limit, ladder=ladder, taken=taken, sustained=sustained,
    )  # fmt: skip
    todo, print_report, print_plan = _suite(chosen, spec, options)
    if as_json:
        print_report = print_plan = _print_document
    if dry_run:
        report = runner.dry_run(todo)
        _write(report, json_path)
        print_plan(report)
        return

    def observe(so_far: Report[Any], line: str) -> None:
        _write(so_far, json_path)
        click.echo(line, err=True)

    try:
        report = runner.bench(todo, observe)
    except KeyboardInterrupt as stop:
        kept = f"stopped; the figures of the cases before are in {json_path}" if json_path is not None else ""
        raise KeyboardInterrupt(str(stop) or kept) from None
    _write(report, json_path)
    if report_path is not None:
        from attngen.commands.doctor import look

        checks = [asdict(finding) for finding in look()]
        _write_document({"attngen": __version__, "findings": checks, "bench": report.to_dict()}, report_path)
    if record_path is not None and report.rows:
        from attngen.lab.bench.figures import runs_of, write_runs

        given = {"--suite": suite, "--sustained": sustained, "--taken": taken, "--rounds": rounds}
        words = [f"{name} {value}" if value is not True else name for name, value in given.items() if value]
        source = " ".join(["attngen bench", *([str(spec)] if spec else []), *words])
        try:
            write_runs(record_path, runs_of(report.to_dict(), commit, source))
        except OSError as error:
            raise click.FileError(str(record_path), hint=cause(error)) from error
    print_report(report)
    if plot_path is not None and report.rows:
        from attngen.lab.bench.plot import plot

        try:
            plot(report, plot_path)
        except OSError as error:
            raise click.FileError(str(plot_path), hint=cause(error)) from error
    if not report.ok:
        context.exit(cli.EXIT_FAILURE)


def _begin_record(path: Path) -> str | None:
    """The commit that is measured, before the run writes anything. Refuses a file that holds something else."""
    from attngen.lab.bench.figures import clean_commit, read_runs

    try:
        read_runs(path)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"--record {path}: {error}") from None
    return clean_commit()


def _json_target(spec: Path | None, given: Path | None) -> tuple[Path | None, Path | None, bool]:
    """The spec, the file that ``--json`` writes, and whether it prints instead: as in ``--json SPEC``, too."""
    if given is None or given == _STDOUT:
        return spec, None, given is not None
    if cli.is_report(str(given)):
        return spec, given, False
    if spec is not None:
        raise click.UsageError(f"--json {given}: the name of a spec; --json alone prints, and a FILE ends in .json")
    return resources.spec_file(given), None, True


def _suite(
    chosen: str, spec: Path | None, options: BenchOptions
) -> tuple[Suite[Any, Any], Callable[[Any], None], Callable[[Any], None]]:
    """The suite that is chosen, and the functions that print its report and its plan."""
    from attngen.lab.bench.runner import capability

    if chosen == "masks":
        from attngen.lab.bench.masks.suite import MaskSuite
        from attngen.lab.commands import bench_masks

        return MaskSuite(options), bench_masks.print_masks, bench_masks.print_plan
    if chosen == "trees":
        from attngen.lab.bench.trees import TreeSuite
        from attngen.lab.commands import bench_trees

        return TreeSuite(options), bench_trees.print_trees, bench_trees.print_plan
    if spec is None:
        raise click.UsageError("Missing argument 'SPEC'; only --suite masks and trees take none")
    if chosen == "serving":
        from attngen.lab.bench.serving.suite import ServingSuite
        from attngen.lab.commands import bench_serving

        return ServingSuite(spec, options, capability()), bench_serving.print_serving, bench_serving.print_plan
    if chosen in ("small", "oracle"):
        from attngen.lab.bench.small.oracle import OracleSuite
        from attngen.lab.bench.small.suite import SmallSuite
        from attngen.lab.commands import bench_small

        if chosen == "oracle":
            return OracleSuite(spec, options, capability()), bench_small.print_oracle, bench_small.print_plan
        return SmallSuite(spec, options, capability()), bench_small.print_small, bench_small.print_plan
    from attngen.lab.bench.grid import GridSuite

    return GridSuite(spec, options, capability()), _print, _print_plan


def _refuse_beside(context: click.Context, what: str, chosen: str, others: Sequence[str]) -> None:
    """Raise a UsageError for a given option that does not apply to the suite that another one chose."""
    for name in others:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            (option,) = [each for each in context.command.params if each.name == name]
            name = option.opts[0] if isinstance(option, click.Option) else option.human_readable_name
            raise click.UsageError(f"{name} is not for {what}; leave it out, or {chosen}")


def _print_document(report: Report[Any]) -> None:
    print_json(report.to_dict())


def _write(report: Report[Any], path: Path | None) -> None:
    if path is not None:
        _write_document(report.to_dict(), path)


def _write_document(document: dict[str, Any], path: Path) -> None:
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise click.FileError(str(path), hint=cause(error)) from error


def _print(report: GridReport) -> None:
    measured = [result for result in report.results if result.tflops is not None]
    if report.ladders:
        print_ladders(report)
    elif measured:
        for direction in report.directions:
            _print_figures(report, direction)
        for direction in report.directions:
            _print_to_causal(report, direction)
        _print_workspace(report)
    print_readings(report)
    if any(result.timing is not None and result.timing.host_bound for result in measured):
        click.echo("* bound by the host: launching takes as long as the kernel")
    _print_reasons(report)
    print_failed(report)
    reached = report.ceilings
    print_end(
        report, None if reached is None else f": bf16 matrix product {reached.matrix_tflops:.0f} TFLOP/s, "
        f"copy {reached.copy_gbps:.0f} GB/s; medians of {report.rounds} rounds"
    )  # fmt: skip


def _print_figures(report: GridReport, direction: str) -> None:
    """Print TFLOP/s of all contenders of one direction, and the ratios of attngen to the best peer."""
    report = replace(report, rows=tuple(row for row in report.rows if row.case.direction == direction))
    measured = [result for result in report.results if result.tflops is not None]
    names, own = columns(measured), columns(result for result in measured if not result.peer)
    means = {mean.of: mean for mean in report.means}
    lines: list[list[str]] = []
    for group, rows in report.lengths.items():
        lines += [_cells(row, names, own) for row in rows]
        if group in means:
            lines.append(_mean_cells(means[group], names, own))
    lines += [_mean_cells(mean, names, own) for of, mean in means.items() if of not in report.lengths]
    if lines and measured:
        print_table(["TFLOP/s", *names, *(f"{name.removeprefix('attngen ')} / best peer" for name in own)], lines)


def _print_to_causal(report: GridReport, direction: str) -> None:
    """Print the cost of variants: the time of a visible pair over that of attngen's causal kernel at the same sizes."""
    _print_of_rows(
        "time per visible pair / attngen causal",
        [(row, report.to_causal(row)) for row in report.rows if row.case.direction == direction],
        ratio,
    )


def _print_workspace(report: GridReport) -> None:
    """Print the memory that backward passes took besides inputs and gradients, and attngen's bound on it."""
    rows = []
    for row in report.rows:
        held: dict[str, float] = {r.contender: r.workspace for r in row.results if r.workspace is not None}
        bounds = [r.workspace_bound for r in row.results if r.workspace is not None and r.workspace_bound is not None]
        rows.append((row, {**held, "attngen's bound": max(bounds)} if bounds else held))
    _print_of_rows("MiB besides inputs and gradients", rows, lambda size: "" if size is None else f"{size / 2**20:.1f}")


def _print_of_rows(
    title: str, rows: Sequence[tuple[GridRow, Mapping[str, float]]], text: Callable[[float | None], str]
) -> None:
    """Print a figure of each contender in each case; nothing if there is none."""
    known = dict.fromkeys(name for _, figures in rows for name in figures)
    contenders = columns(result for row, _ in rows for result in row.results)
    names = [name for name in contenders if name in known] + [name for name in known if name not in contenders]
    lines = [[row.name, *(text(figures.get(name)) for name in names)] for row, figures in rows if figures]
    if lines:
        print_table([title, *names], lines)


def _cells(row: GridRow, names: Sequence[str], own: Sequence[str]) -> list[str]:
    results = {result.contender: result for result in row.results}
    figures = [_figure(results.get(name)) for name in names]
    return [row.name, *figures, *(ratio(row.ratios.get(name)) for name in own)]


def _figure(result: GridResult | None) -> str:
    if result is None or result.tflops is None:
        return ""
    mark = "*" if result.timing is not None and result.timing.host_bound else ""
    return f"{result.tflops:5.0f}{mark}"


def _mean_cells(mean: Mean, names: Sequence[str], own: Sequence[str]) -> list[str]:
    return [f"{mean.of}: geometric mean", *("" for _ in names), *(ratio(mean.ratios.get(name)) for name in own)]


def _print_plan(report: GridReport) -> None:
    if report.ladders:
        print_ladders(report)
    names = columns(result for result in report.results if result.status == "planned")
    rows = []
    for row in report.rows:
        planned = {result.contender for result in row.results if result.status == "planned"}
        shape = f"b{row.case.batch} s{row.case.seqlen} h{row.case.heads}/{row.case.kv_heads}"
        rows.append([row.name, shape, *("x" if name in planned else "" for name in names)])
    if rows and report.ladders:
        print_table(["case", "shape"], [row[:2] for row in rows])
    elif rows:
        print_table(["case", "shape", *names], rows)
    _print_reasons(report)
    click.echo(f"{report.package}: {counted(len(rows), 'case')}; nothing was measured")


def _print_reasons(report: GridReport) -> None:
    """Print the contenders that are not in some cases and the kernels that are in none, with the reasons."""
    print_absent(report, "case")
    for reason, count in Counter(report.left_out.values()).items():
        click.echo(f"left out: {counted(count, 'kernel')}: {reason}")
