"""Results of ``attngen verify``: a verdict on each kernel, and the report of them all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from attngen.lab.verify.trial import CaseResult, Trial, facts_of
from attngen.plan.model import Plan


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one kernel. Without a trial, ``reason`` says why it was not run, or why it failed before.

    ``remark`` says what differs between the kernel of the spec and what ran.
    """

    plan: Plan
    trial: Trial | None = None
    reason: str | None = None
    failed_before: bool = False  # it did not even compile, or gave no results
    crashed: bool = False  # it ended its process, or broke it for others
    remark: str | None = None

    @property
    def status(self) -> str:
        """``passed``, ``failed`` or ``not run``."""
        if self.trial is None:
            return "failed" if self.failed_before else "not run"
        return "failed" if self.trial.problems else "passed"

    @property
    def problems(self) -> tuple[str, ...]:
        """The faults of the kernel, a line each."""
        if self.trial is None:
            return (self.reason or "",) if self.failed_before else ()
        return self.trial.problems

    def to_dict(self) -> dict[str, Any]:
        """Its entry in the document of ``attngen verify --json``."""
        row: dict[str, Any] = {
            "name": self.plan.name,
            "variant": self.plan.variant.name,
            "arch": self.plan.arch_name,
            "dtype": self.plan.dtype_name,
            "status": self.status,
            "crashed": self.crashed,
            "reason": self.reason,
            "remark": self.remark,
            "facts": facts_of(self.plan.variant),
            "problems": list(self.problems),
        }
        if self.trial is not None:
            row |= _figures(self.trial)
        return row


def _figures(trial: Trial) -> dict[str, Any]:
    tally = trial.tally
    worst = tally.worst
    return {
        "max_error": _finite(worst and worst.max_error),
        "max_error_allowed": _finite(worst and worst.max_allowed),
        "rmse": _finite(tally.rmse),
        "rmse_allowed": _finite(tally.rmse_allowed),
        "dead_rows": tally.dead_rows,
        "cases": [_case(result) for result in trial.results],
    }


def _case(result: CaseResult) -> dict[str, Any]:
    deviation = result.deviation
    return {
        "case": result.case,
        "seed": result.seed,
        "ok": result.ok,
        "skipped": result.skipped,
        "max_error": _finite(deviation and deviation.max_error),
        "max_error_allowed": _finite(deviation and deviation.max_allowed),
        "lse_error": _finite(deviation and deviation.lse_error),
        "lse_error_allowed": _finite(deviation and deviation.lse_allowed),
    }


def _finite(value: Any) -> float | None:
    """Return a number that JSON has; an error of infinity stands for NaN in a result, which ``problems`` tells."""
    return value if isinstance(value, float) and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The verdicts on a spec's kernels; ``device`` names what ran them."""

    spec: str
    package: str
    device: str
    seed: int
    verdicts: tuple[Verdict, ...]

    def with_status(self, status: str) -> tuple[Verdict, ...]:
        """Return the verdicts of one status."""
        return tuple(verdict for verdict in self.verdicts if verdict.status == status)

    @property
    def ok(self) -> bool:
        """Whether no kernel failed, and at least one was run."""
        return bool(self.with_status("passed")) and not self.with_status("failed")

    def to_dict(self) -> dict[str, Any]:
        """Its entry in the document of ``attngen verify --json``."""
        counts = {status: len(self.with_status(status)) for status in ("passed", "failed", "not run")}
        return {
            "spec": self.spec,
            "package": self.package,
            "device": self.device,
            "seed": self.seed,
            "ok": self.ok,
            **{status.replace(" ", "_"): count for status, count in counts.items()},
            "kernels": [verdict.to_dict() for verdict in self.verdicts],
        }
