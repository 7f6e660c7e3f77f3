"""A plugin of pytest that notes, line by line, what becomes of each test: what is written outlives a killed process.

``-p tests.gpu.events`` with the file in ``ATTNGEN_TEST_EVENTS``. pytest-xdist's controller writes what its workers
report, and that a worker ended in a test.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

#: The file of the kernels that are compiled ahead which says that one of twelve is left, or none.
NEARLY = "nearly"


class Events:
    """Appends a line of JSON for each event."""

    def __init__(self, path: str) -> None:
        self._path, self._collected = path, False

    def _write(self, **event: Any) -> None:
        with open(self._path, "a") as file:  # lines of several processes: each one is written at once
            file.write(json.dumps(event) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self._collected:  # every worker collects the same
            self._write(event="collected", tests=list(ids))
        self._collected = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(event="uncollected", test=report.nodeid, text=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(event="begins", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = report.longreprtext
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ")
        node = getattr(report, "node", None)
        self._write(
            event="report", test=report.nodeid, when=report.when, outcome=report.outcome,
            seconds=round(getattr(report, "duration", 0.0), 3), worker=node.gateway.id if node else "",
            text="" if report.passed else text,
        )  # fmt: skip


class LeftOut:
    """Notes how many tests the expression of marks leaves out."""

    def __init__(self, path: str) -> None:
        self._path = path

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        count = sum(1 for item in items if item.get_closest_marker("exhaustive"))
        with open(self._path, "a") as file:
            file.write(json.dumps({"event": "left out", "exhaustive": count}) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("ATTNGEN_TEST_EVENTS")
    worker = getattr(config, "workerinput", {}).get("workerid")
    if path and worker is None:
        config.pluginmanager.register(Events(path), "events")
    elif path and worker == "gw0":
        config.pluginmanager.register(LeftOut(path), "left-out")
