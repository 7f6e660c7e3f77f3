"""``attngen check``: all checks of a spec that need no compiler."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attngen import cli
from attngen.build.compiles import Failure
from attngen.build.kernel_filter import EVERYTHING, KernelFilter
from attngen.commands.arguments import SPEC
from attngen.commands.filtering import filtering
from attngen.commands.output import counted, print_json, print_table, warn
from attngen.errors import AttngenError, SpecError

if TYPE_CHECKING:
    from attngen.build.pipeline import Repeated
    from attngen.plan.model import Plan
    from attngen.schema.kernel_spec import KernelSpec
    from attngen.schema.lint import Remark


@dataclass
class CheckReport:
    """Result of the check of one spec.

    ``plans`` are the first choices that no earlier build refused. ``unseen`` of them are in CUDA and were never
    compiled, so that their registers are unknown.
    """

    file: str
    package: str | None = None
    plans: list[Plan] = field(default_factory=list)
    warnings: list[Remark] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    unseen: int = 0

    @property
    def errors(self) -> list[AttngenError]:
        """The errors, each once: one entry may ask for many kernels that fail for the same reason."""
        return list({str(failure.error): failure.error for failure in self.failures}.values())

    @property
    def notes(self) -> list[str]:
        """Remarks on variants that make CUDA kernels slower than necessary."""
        from attngen.lang.divisors import wide_divisions

        variants = {plan.variant.name: plan.variant for plan in self.plans if plan.backend == "cuda"}
        return [f"{name}: {note}" for name, variant in variants.items() for note in wide_divisions(variant)]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as ``--json`` prints it."""
        return {
            "file": self.file,
            "package": self.package,
            "errors": [_failure(failure) for failure in self.failures],
            "warnings": [_remark(warning) for warning in self.warnings],
            "kernels": [_row(plan) for plan in self.plans],
            "never_compiled": self.unseen,
            "notes": self.notes,
        }


def check_spec(path: str, only: KernelFilter = EVERYTHING) -> CheckReport:
    """Load, expand, plan and render a spec, or its kernels that pass a filter. Errors are kept, one for each kernel
    that cannot be made."""
    from attngen.build.compiles import Task, after_refusals
    from attngen.build.pipeline import prepare_each
    from attngen.schema.lint import Remark, lint
    from attngen.schema.loading import read_spec
    from attngen.schema.reading import errors_of, place_of
    from attngen.store.store import Store

    report = CheckReport(path)
    try:
        draft = read_spec(path)
    except SpecError as error:  # nothing of it can be read
        report.failures += [Failure("", each) for each in error.each or (error,)]
        return report
    spec = draft.spec
    errors, kernels = errors_of(draft)
    if errors:
        report.failures += [Failure("", each) for each in (*errors, *_not_planned(kernels, draft.broken))]
        report.failures.sort(key=lambda failure: place_of(failure.error))
        return report
    report.package = spec.package
    report.warnings = lint(spec, kernels)
    repeated: list[Repeated] = []
    try:
        prepared, failures = prepare_each(spec, only, repeated=repeated)
    except SpecError as error:  # it has no kernels, or none that passes
        report.failures.append(Failure("", error))
        return report
    store = Store()
    likely = [after_refusals(store, kernel) or kernel for kernel in prepared]
    report.plans = [kernel.plan for kernel in likely]
    report.unseen = sum(
        kernel.plan.backend == "cuda" and not store.path(Task.of(kernel).key).is_dir() for kernel in likely
    )
    report.failures = failures
    for pair in repeated:
        message = f"becomes the same kernel as one of line {pair.first.location.line}: {pair.name}"
        report.warnings.append(Remark(message, pair.again.location))
    return report


def _not_planned(kernels: Iterable[KernelSpec], broken: Collection[str]) -> Iterator[AttngenError]:
    """Yield the refusals of plans for a spec that has other errors.

    Of variants with errors, only the head dimension says something: other refusals may go with the errors.
    """
    from attngen.plan import plan

    for kernel in kernels:
        try:
            plan(kernel)
        except SpecError as error:
            if kernel.variant.name not in broken or error.field == "head_dim":
                yield error


@click.command()
@click.argument("specs", type=SPEC, nargs=-1, metavar="SPEC...")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of specs, for editors, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--strict", is_flag=True, help="Count a warning as an error.")
@filtering
@click.pass_context
def command(
    context: click.Context, specs: tuple[Path, ...], schema: bool, as_json: bool, strict: bool, only: KernelFilter
) -> None:
    """Check specs without compiling: names, masks, shapes, budgets. Exits 2 if one cannot be built.

    Every kernel is planned and rendered; one that cannot be is named, and the others are checked anyway.
    """
    if schema:
        from attngen.schema.export import json_schema

        print_json(json_schema())
        return
    if not specs:
        raise click.UsageError("name at least one spec, for example specs/hopper.yaml")
    reports = [check_spec(str(path), only) for path in specs]
    if as_json:
        print_json({"specs": [report.to_dict() for report in reports]})
    else:
        for report in reports:
            _print(report)
    errors = [error for report in reports for error in report.errors]
    if errors:
        context.exit(cli.exit_code_of(errors))
    if strict and any(report.warnings for report in reports):
        context.exit(cli.EXIT_USAGE)


def _print(report: CheckReport) -> None:
    if report.plans:
        print_table(_SHOWN, [[row[name] for name in _SHOWN] for row in map(_row, report.plans)])
    for backend, reason in dict.fromkeys((plan.backend, plan.backend_reason) for plan in report.plans):
        if reason.startswith("not "):
            of_it = [plan.name for plan in report.plans if (plan.backend, plan.backend_reason) == (backend, reason)]
            click.echo(f"{backend} for {of_it[0]}{f' and {len(of_it) - 1} more' if of_it[1:] else ''}: {reason}")
    for plan in report.plans:
        for row in [row for row in plan.refused if row.name != plan.name][:1]:
            click.echo(f"{plan.name}: in place of {row.name}, which an earlier build refused: {row.reason}")
    if report.unseen:
        click.echo(
            f"{counted(report.unseen, 'kernel')} in cuda not compiled yet: only the compiler sees registers, and a "
            "build may take another tile or backend"
        )
    for note in report.notes:
        click.echo(note)
    for warning in report.warnings:
        warn(str(warning))
    for error in report.errors:
        cli.print_error(error)
    verdict = counted(len(report.errors), "error") if report.errors else "nothing wrong"
    click.echo(f"{report.file}: {counted(len(report.plans), 'kernel')}, {verdict}")


#: Columns of the table; a kernel's name says the rest.
_SHOWN = ("name", "variant", "head_dim", "backend", "tile", "stages", "warps", "iteration")


def _row(plan: Plan) -> dict[str, Any]:
    same = plan.head_dim_qk == plan.head_dim_v
    return {
        "name": plan.name,
        "variant": plan.variant.name,
        "arch": plan.arch_name,
        "dtype": plan.dtype_name,
        "head_dim": str(plan.head_dim_qk) if same else f"{plan.head_dim_qk}/{plan.head_dim_v}",
        "layout": plan.layout,
        "direction": plan.direction,
        "backend": plan.backend,
        "backend_reason": plan.backend_reason,
        "tile": f"{plan.tile_m}x{plan.tile_n}",
        "stages": plan.stages,
        "warps": plan.num_warps,
        "iteration": plan.iteration,
    }


def _remark(remark: Remark) -> dict[str, Any]:
    place = remark.location
    return {"message": remark.message, "file": place.file if place else None, "line": place.line if place else None}


def _failure(failure: Failure) -> dict[str, Any]:
    """Return an error as JSON, with the kernel that it is about; None if it is about the whole spec."""
    placed = {name: value for name, value in failure.to_dict().items() if name in ("file", "line", "field")}
    return {"kernel": failure.name or None, "message": failure.error.to_dict()["message"], **placed}
