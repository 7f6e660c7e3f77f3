"""Tables of choices in ``tuned/``: a row in a file is all that a choice takes; a wrong one is refused by its place."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attngen import resources
from attngen.errors import SpecError
from attngen.families.hopper_backward.choices import TABLE, BackwardChoice
from attngen.families.hopper_backward.kinds import WORDS
from attngen.families.hopper_forward.choices import FACTS, ForwardChoice
from attngen.families.hopper_forward.choices import TABLES as FORWARD_TABLES
from attngen.inspect.of_spec import explain_spec
from attngen.plan import plan
from attngen.schema.measured import ChoiceTable
from attngen.schema.measured_times import TileTimes, TimesModel, measured_times
from tests.plan.specs import kernel_spec

TABLES: dict[str, ChoiceTable[Any]] = {**FORWARD_TABLES, "hopper_backward": TABLE}

#: A spec's fields, a row for its kernels, and the part of their names that the row decides.
ROWS: dict[str, tuple[dict[str, object], str, tuple[str, str]]] = {
    "hopper_forward": (
        {"variant": "causal", "backend": "cuda"},
        "- {work: [bounds], columns: 64, tile: {n: 80}, warps: {consumer: 2, schedule: pingpong}}",
        ("m192n128", "m128n80"),
    ),
    "hopper_fp8": (
        {"variant": "causal", "backend": "cuda", "dtype": "fp8_e4m3"},
        "- {work: [bounds], columns: 64, tile: {n: 64}, warps: {consumer: 2, schedule: pingpong}}",
        ("m192n128", "m128n64"),
    ),
    "hopper_backward": (
        {"variant": "causal", "passes": "backward", "backward": "{backend: cuda}"},
        "- {work: [bounds], columns: 64, tile: {m: 64}, overlap: pingpong, packed: true, q_stages: 3}",
        ("m128n128", "m64n128"),
    ),
}


def forget() -> None:
    """Let the planner read its tables again."""
    for table in TABLES.values():
        table.forget()


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the shipped tables, which the planner reads instead."""
    folder = tmp_path / "tuned"
    shutil.copytree(resources.tuned_dir(), folder)
    monkeypatch.setattr(resources, "tuned_dir", lambda: folder)
    forget()
    yield folder
    forget()


def put(file: Path, row: str) -> int:
    """Put a row before all others of a table; its line."""
    head, choices, rows = file.read_text().partition("choices:\n")
    file.write_text(f"{head}{choices}{row}\n{rows}")
    return head.count("\n") + 2


@pytest.mark.parametrize("schedule", TABLES)
def test_a_row_in_the_file_is_a_choice(tables: Path, schedule: str) -> None:
    fields, row, (before, after) = ROWS[schedule]
    spec = kernel_spec(**fields)  # type: ignore[arg-type]
    assert before in plan(spec).name
    put(tables / f"{schedule}.yaml", row)
    forget()
    assert after in plan(spec).name


@pytest.mark.parametrize("schedule", TABLES)
@pytest.mark.parametrize(
    ("old", "new", "field", "message"),
    [
        ("work: [", "work: [plane, ", ".work[0]", "found 'plane'; "),
        ("columns: 64", "colums: 64", ".colums", "unknown field; did you mean 'columns'?"),
        ("columns: 64", "columns: many", ".columns", "found 'many'; allowed: an integer"),
        ("}$", ", gpu: a}", "", "a measured choice has gpu, date and method; missing: date, method"),
        ("}$", ", speedup: 1.1}", "", "missing: gpu, date, method"),
        ("}$", ", gpu: a, date: 28 Nov, method: b}", ".date", "found '28 Nov'; allowed: a date such as 2026-11-28"),
    ],
)
def test_a_wrong_row_is_refused_by_its_place(
    tables: Path, schedule: str, old: str, new: str, field: str, message: str
) -> None:
    file = tables / f"{schedule}.yaml"
    row = re.sub(old if old == "}$" else re.escape(old), new, ROWS[schedule][1])
    line = put(file, row)
    with pytest.raises(SpecError) as raised:
        TABLES[schedule].load()
    text = str(raised.value)
    assert f"{file}:{line}: choices[0]{field}: " in text
    assert message in text


def test_a_table_is_that_of_its_schedule(tables: Path) -> None:
    for name, table in TABLES.items():
        file = tables / f"{name}.yaml"
        file.write_text(file.read_text().replace(f"schedule: {name}", "schedule: other"))
        with pytest.raises(SpecError, match=f"found 'other'; allowed: {name}"):
            table.load()


@pytest.mark.parametrize("schedule", TABLES)
def test_measurements_are_on_the_pages_that_rows_name(schedule: str) -> None:
    rows = TABLES[schedule].load()
    assert any(row.gpu for row in rows)
    assert_on_pages(row.method for row in rows)


def test_measured_times_are_on_the_pages_that_their_file_names() -> None:
    times = measured_times()
    assert_on_pages([times.method, *(row.method for row in times.times)])
    assert len({row.sizes for row in times.times}) == len(times.times)


def assert_on_pages(methods: Iterable[str | None]) -> None:
    """Each method is a page of the docs with a heading on it."""
    for method in filter(None, methods):
        page, _, anchor = method.partition("#")
        headings = re.findall(r"^#+ (.+)$", (resources.root() / page).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert anchor in anchors, method


@pytest.mark.parametrize("schedule", TABLES)
def test_every_row_is_for_some_kernel_alone(schedule: str) -> None:
    """The last row is for all, and no row is hidden by an earlier one that asks for less."""
    rows = TABLES[schedule].load()
    assert rows[-1].work == rows[-1].without == ()
    for place, row in enumerate(rows):
        for earlier in rows[:place]:
            asks_less = {*earlier.work} <= {*row.work} and {*earlier.without} <= {*row.without}
            covers = earlier.beyond <= row.beyond and row.columns <= earlier.columns
            assert not (asks_less and covers and getattr(earlier, "within", None) is None), row


def test_a_table_without_a_row_for_a_kernel_is_refused(tables: Path) -> None:
    for name, (fields, _, _) in ROWS.items():
        file = tables / f"{name}.yaml"
        head = file.read_text().partition("choices:")[0]
        file.write_text(f"{head}choices:\n{ROWS[name][1].replace('work: [', 'work: [tile_map, ')}\n")
        forget()
        with pytest.raises(SpecError, match="no choice for the work of this kernel, at 64 columns; a last row"):
            plan(kernel_spec(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", TABLES)
def test_explain_says_where_a_tile_comes_from(tables: Path, schedule: str) -> None:
    """A row's card and date; nothing of it is in manifests."""
    fields, row, _ = ROWS[schedule]
    spec = kernel_spec(**fields)  # type: ignore[arg-type]
    measured = re.sub("}$", ", gpu: NVIDIA H20, date: 2027-01-02, method: by hand, speedup: 1.5}", row)
    put(tables / f"{schedule}.yaml", measured)
    forget()
    planned = plan(spec)
    assert planned.tile_reason == "measured on NVIDIA H20, 2027-01-02, 1.5 times as fast as the next choice (by hand)"
    assert "tile_reason" not in planned.to_dict()


def test_explain_shows_where_tiles_come_from(tmp_path: Path) -> None:
    spec = tmp_path / "mine.yaml"
    entry = "{variant: causal, head_dim: 64, passes: [forward, backward]}"
    spec.write_text(f"schema: 1\npackage: mine\narch: [sm90a]\nkernels: [{entry}]\n")
    for explained in explain_spec(spec):
        reason = dict(explained.facts())["chosen"]
        assert reason.startswith("measured on NVIDIA H200, 2026-11-2")
        assert ("chosen", reason) in explained.summary()
        assert explained.to_dict()["tile_reason"] == reason


def test_a_prediction_says_so() -> None:
    reason = plan(kernel_spec("sliding_window", head_dim=128, backend="cuda")).tile_reason
    assert reason.startswith(
        "predicted to take less than 1.045 times the time of the next row; measured on NVIDIA H200"
    )
    fixed = plan(kernel_spec("causal", head_dim=128, backend="cuda", tile="{n: 96}")).tile_reason
    assert fixed.startswith("the spec's own; what it leaves open: measured on")


def test_the_docs_explain_each_fact_and_field() -> None:
    text = (resources.root() / "docs/tuning.md").read_text().partition("## Tables")[2]
    forward, _, backward = text.partition("A backward's kernel has one of")
    named = [set(re.findall(r"`(\w+)`", part)) for part in (forward, backward)]
    assert FACTS.keys() <= named[0]
    assert {*WORDS} <= named[1]
    for row in (ForwardChoice, BackwardChoice, TileTimes):
        assert row.model_fields.keys() <= named[0]
    assert TimesModel.model_fields.keys() <= {*named[0], "tuned", "times"}
