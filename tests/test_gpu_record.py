"""The recorded run of the GPU tests, on suites that need no GPU; its records, and what quotes them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from click.testing import CliRunner

from attngen import cli, resources
from attngen.compile import toolchain
from attngen.inspect import known
from attngen.inspect import record as records
from attngen.inspect.record import Record
from tests.gpu import prebuilt, record
from tests.gpu.conftest import PARTS, in_order, parts_of
from tests.gpu.record import FAMILIES, family_of, run
from tests.sampling import few

ROOT = Path(__file__).parents[1]

#: Tests that pass, fail, are refused, crash, hang, and lose a CUDA context, between others that do not notice.
SUITE = """
    import ctypes, os, time
    import pytest, torch
    from tests.gpu.conftest import _clean

    @pytest.mark.parametrize("number", range(12))
    def test_passes(number):
        pass

    def test_fails():
        assert 1 == 2, "one is not two"

    def test_refused():
        pytest.skip("refused: wrong code")

    def test_lacks_a_card():
        pytest.skip("needs two GPUs")

    def test_crashes():
        ctypes.string_at(0)

    def test_waits_forever():
        time.sleep(3600)

    def test_loses_the_context():  # for this process, which runs no other test
        def lost():
            raise RuntimeError("an illegal memory access was encountered")
        torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, lost

    @pytest.fixture
    def broken():
        raise ValueError("no fixture")

    def test_has_no_fixture(broken):
        pass

    @pytest.mark.alone
    def test_alone():
        assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == "1"

    @pytest.mark.exhaustive
    def test_left_out():
        assert False

    @pytest.mark.parametrize("number", range(12))
    def test_passes_later(number):
        pass
"""


def suite_in(folder: Path, text: str) -> str:
    pytest.importorskip("xdist")
    folder.mkdir(exist_ok=True)
    path = folder / "test_few.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def names(tests: dict[str, record.Test], outcome: str) -> list[str]:
    return sorted(name.split("::")[-1] for name, test in tests.items() if test.outcome()[0] == outcome)


@pytest.mark.exhaustive
def test_a_crash_a_hang_and_a_lost_context_cost_one_test_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "TEST_SECONDS", 5)
    suite, said = run([suite_in(tmp_path / "suite", SUITE)], workers=2, limit=None, folder=tmp_path, prebuild=False)
    tests = suite.tests
    assert names(tests, "failed") == [
        "test_crashes", "test_fails", "test_has_no_fixture", "test_loses_the_context", "test_waits_forever",
    ], (tmp_path / "tests").read_text()  # fmt: skip
    assert names(tests, "refused") == ["test_refused"]
    assert names(tests, "not run") == ["test_lacks_a_card"]
    assert len(names(tests, "passed")) == 25
    assert suite.exhaustive == 1
    texts = {name.split("::")[-1]: "\n".join(test.texts) for name, test in tests.items()}
    assert "one is not two" in texts["test_fails"]
    assert "crashed while running" in texts["test_crashes"]
    printed = (tmp_path / "tests").read_text()
    assert "test_loses_the_context lost the CUDA context: an illegal memory access" in printed
    assert "Timeout" in printed
    assert len(said) == 2


@pytest.mark.exhaustive
def test_tests_that_the_limit_cuts_off_are_named(tmp_path: Path) -> None:
    text = """
        import time
        import pytest

        @pytest.mark.parametrize("number", range(400))
        def test_slow(number):
            time.sleep(0.25)
    """
    suite, _ = run([suite_in(tmp_path / "suite", text)], workers=2, limit=12, folder=tmp_path, prebuild=False)
    assert len(suite.tests) == 400
    passed, rest = names(suite.tests, "passed"), names(suite.tests, "not run")
    assert len(passed) + len(rest) == 400
    assert passed
    assert rest
    why = {test.outcome()[1] for test in suite.tests.values()} - {""}
    assert why <= {"cut off at the limit", "the limit was reached before"}


def test_tests_that_ran_out_of_memory_run_again(tmp_path: Path) -> None:
    """The second run of a test decides."""
    told = {"event": "report", "when": "call", "seconds": 1.0, "worker": "gw0"}
    lines: list[dict[str, Any]] = [{"event": "collected", "tests": ["one", "other"]}]
    for name in ("one", "other"):
        lines.append({"event": "begins", "test": name})
        lines.append(
            {**told, "test": name, "outcome": "failed", "text": "E   torch.OutOfMemoryError: CUDA out of memory"}
        )
    path, suite = tmp_path / "events", record.Suite()
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    suite.read(path)
    assert suite.short_of_memory() == ["one", "other"]
    lines += [{"event": "begins", "test": "one"}, {**told, "when": "teardown", "test": "one", "outcome": "passed"}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    suite.read(path)
    assert names(suite.tests, "passed") == ["one"]
    assert suite.short_of_memory() == names(suite.tests, "failed") == ["other"]


@pytest.mark.exhaustive
@pytest.mark.long
def test_of_several_cards_one_is_for_the_tests_that_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of that card begin when these have ended, workers of others at once."""
    text = """
        import os
        import time
        from pathlib import Path
        import pytest

        HERE = Path(__file__).parent

        @pytest.mark.alone
        def test_alone():
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
            while not (HERE / "card 0").exists():
                time.sleep(0.1)
            (HERE / "alone").touch()

        @pytest.mark.parametrize("number", range(8))
        def test_beside_others(number):
            card = os.environ["CUDA_VISIBLE_DEVICES"][0]
            (HERE / f"card {card}").touch()
            assert card == "0" or (HERE / "alone").exists()
            while not (HERE / "card 1").exists():
                time.sleep(0.1)
    """
    path = suite_in(tmp_path / "suite", text)
    (tmp_path / "suite/conftest.py").write_text(
        "import torch\ntorch.cuda.device_count = lambda: 2\n\nfrom tests.gpu.conftest import pytest_runtest_protocol\n"
    )
    monkeypatch.setattr(record, "cards", lambda: 2)
    for name in ("CUDA_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER"):  # of this process, if it is a worker itself
        monkeypatch.delenv(name, raising=False)
    suite, said = run([path], workers=2, limit=200, folder=tmp_path, prebuild=False)
    assert len(names(suite.tests, "passed")) == 9, (tmp_path / "tests").read_text()
    assert len(said) == 2


@pytest.mark.exhaustive
@pytest.mark.long
def test_tests_wait_for_their_kernels_before_their_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several cards, workers begin while kernels are compiled."""
    first = "import os\nfrom pathlib import Path\nREADY = Path(os.environ['ATTNGEN_TEST_READY'])\n\ndef test_it():\n"
    texts = {
        # it calls no kernel of these
        "test_package": "    assert not (READY / 'family').exists()\n    (READY / 'first').touch()",
        "test_memory": "    assert (READY / 'family').exists()\n    assert not (READY / 'nearly').exists()\n"
        "    (READY / 'second').touch()",
        "test_others": "    assert (READY / 'nearly').exists()",
    }
    compiling = (
        "import sys, time; from pathlib import Path; ready = Path(sys.argv[-1])\n"
        "def wait(name):\n    for _ in range(2400):\n        (ready / name).exists() or time.sleep(0.1)\n"
        "wait('first')\n"
        "(ready / 'family').touch()\n"
        "wait('second')\n"
        "time.sleep(6)"  # 'nearly' follows when it has ended
    )
    folder = tmp_path / "bin"
    folder.mkdir()
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = tests.gpu.prebuilt ]; then exec {sys.executable} -c "{compiling}" "$@"; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(record, "TEST_SECONDS", 5)
    monkeypatch.setattr(record, "cards", lambda: 4)
    monkeypatch.setattr(sys, "executable", str(python))
    pytest.importorskip("xdist")
    suite_folder = tmp_path / "suite"
    suite_folder.mkdir()
    for name, text in texts.items():
        (suite_folder / f"{name}.py").write_text(first + text)
    (suite_folder / "conftest.py").write_text("from tests.gpu.conftest import pytest_runtest_protocol")
    suite, said = run([str(suite_folder)], workers=3, limit=300, folder=tmp_path)
    assert len(names(suite.tests, "passed")) == 3, (tmp_path / "tests").read_text()
    assert all(test.seconds < 5 for test in suite.tests.values())
    assert [line.split(":")[0] for line in said][:2] == ["nearly all kernels are compiled", "kernels are compiled"]


def test_long_tests_and_those_that_wait_for_few_kernels_come_first() -> None:
    class Item:
        def __init__(self, name: str) -> None:
            self.nodeid, self.path = name, Path(name.split("::")[0])

    names = [f"test_{file}.py::test_{n}" for file in ("accuracy", "calls", "memory", "pages") for n in range(20)]
    long = ["test_memory.py::test_nothing_is_read", "test_x.py::test_static_cache", "test_package.py::test_it"]
    items: Any = [Item(name) for name in [*names, *long]]
    ordered = in_order(list(items), 3)
    assert sorted(map(id, ordered)) == sorted(map(id, items))
    for share in (ordered[:27], ordered[27:55], ordered[55:]):
        waits = ["nearly" in parts_of(item) for item in share]
        assert waits == sorted(waits)
        assert 10 < sum(waits) < 16
    assert ordered[0].nodeid == long[0]
    assert ordered[27].nodeid == long[2]
    assert ordered[55].nodeid == long[1]


@pytest.mark.exhaustive
def test_a_file_that_cannot_be_imported_fails_alone(tmp_path: Path) -> None:
    folder = tmp_path / "suite"
    suite_in(folder, "def test_passes():\n    pass")
    (folder / "test_broken.py").write_text("import nothing_of_this_name")
    suite, _ = run([str(folder)], workers=2, limit=None, folder=tmp_path, prebuild=False)
    assert names(suite.tests, "passed") == ["test_passes"]
    assert [Path(name).name for name in names(suite.tests, "failed")] == ["test_broken.py"]


@pytest.mark.exhaustive
def test_the_command_writes_a_record_for_each_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = suite_in(tmp_path / "suite", "def test_passes():\n    pass\ndef test_fails():\n    assert 0")
    out, log = tmp_path / "record.json", tmp_path / "log"
    for card in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        monkeypatch.setattr(record, "card_and_driver", lambda card=card: (card, "580.1"))
        options = ["--out", str(out), "--log", str(log), "--workers", "1", "--no-prebuild", "--commit", "abc"]
        assert record.main([path, *options]) == 1
    records.write(out, records.records(out)[1])  # the same card again
    first, second = records.records(out)
    assert (first.card, second.card) == ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    assert first.counts() == "1 passed, 1 failed, 0 refused, 0 not run"
    assert first.commit == "abc"
    assert first.changed() == []
    assert [name.split("::")[-1] for name in first.failed] == ["test_fails"]
    assert "assert 0" in log.read_text()


def test_a_record_names_cupy_and_the_nvrtc_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a second one, which torch may bring."""
    compiler = toolchain.Nvrtc("nvidia-cuda-nvrtc-cu12", "12.9.86", "0", Path("libnvrtc.so.12"))
    other = toolchain.Nvrtc("nvidia-cuda-nvrtc", "13.0.88", "0", Path("libnvrtc.so.13"))
    monkeypatch.setattr(toolchain, "installed_nvrtc", lambda: (compiler, other))
    versions = record.versions()
    assert versions["nvrtc"] == "12.9.86"
    assert versions.keys() >= toolchain.installed_cupy().keys() != set()


def test_some_files_are_no_record_of_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        record.main(["tests/gpu/test_calls.py"])
    assert "--out says where to write it" in capsys.readouterr().err


def test_every_file_of_tests_has_a_family() -> None:
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    listed = [name for family in FAMILIES.values() for name in family]
    assert sorted(listed) == sorted(files)
    assert family_of("tests/gpu/test_cut_tiles.py::test_parts[a]") == "backward"


# --- the kernels that are compiled ahead ----------------------------------------------------------------------------


def test_kernels_compiled_ahead_are_those_that_tests_compile() -> None:
    """Each module that compiles in the user's cache says what; two of them are planned here, as their tests do."""
    compiling = {
        path.stem
        for path in prebuilt.FOLDER.glob("*.py")
        if any(
            word in path.read_text() for word in ("compile_kernels(", "compiled_kernels(", " Kernels(", "build(spec)")
        )
    }
    # test_outside registers a schedule of its own; the others have caches of their own, or read what others compiled
    others = {
        "test_outside",
        "test_model_spec",
        "test_waves",
        "prebuilt",
        "generated",
        "sanitized_gradients",
        "random_masks",
    }
    assert compiling - others <= set(prebuilt.modules())
    appended = prebuilt.planned("test_append", None)
    assert len({key for key, _ in appended}) == len(appended) > 3


def test_parts_that_tests_wait_for_are_compiled() -> None:
    parts = {".".join(filter(None, part)) for module in prebuilt.modules() for part in prebuilt.parts_of(module)}
    assert {part for parts in PARTS.values() for part in parts} <= parts
    assert set(prebuilt.FIRST) <= parts


@pytest.mark.exhaustive
def test_batches_hold_each_name_once() -> None:
    kernels = [kernel for _, kernel in prebuilt.planned("test_serving_loop", None)]
    parts = prebuilt.batches([*kernels, *kernels[:3]])
    assert [len(part) for part in parts] == [len(kernels), 3]


# --- records ---------------------------------------------------------------------------------------------------------


def made(**fields: object) -> Record:
    given = {
        "card": "NVIDIA H100 80GB HBM3", "driver": "580.1", "date": "2026-01-31", "commit": None,
        "sources": records.source_hashes(), "versions": {"torch": "2.11.0"}, "seconds": 500.0,
        "families": {"forward": {"passed": 1200, "not run": 3}, "backward": {"passed": 10, "failed": 1}},
    }  # fmt: skip
    return Record(**{**given, **fields})  # type: ignore[arg-type]


@few("part", records.SOURCES, always=1)
def test_a_change_of_any_source_is_seen(part: str, tmp_path: Path) -> None:
    """Every kind of file counts: changed, added, renamed, in a subfolder; what Python compiles is none, nor are
    templates of packages."""
    source = resources.templates_dir() if part == "templates" else ROOT / part
    copied = tmp_path / "copied"
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
    before = records.folder_hash(copied)
    assert before == records.source_hashes()[part]
    shutil.rmtree(copied / "package", ignore_errors=True)
    assert records.folder_hash(copied) == before
    kinds = {path.suffix: path for path in sorted(copied.rglob("*")) if path.is_file()}
    for path in kinds.values():
        text = path.read_bytes()
        path.write_bytes(text + b" ")
        assert records.folder_hash(copied) != before, path
        path.write_bytes(text)
        renamed = path.rename(path.with_name(f"other{path.suffix}"))
        assert records.folder_hash(copied) != before, path
        renamed.rename(path)
    (copied / "__pycache__").mkdir()
    (copied / "__pycache__" / "a.pyc").write_bytes(b"1")
    assert records.folder_hash(copied) == before
    (copied / "more").mkdir()
    (copied / "more" / "a.cuh").write_text("")
    assert records.folder_hash(copied) != before


def test_a_record_names_the_parts_that_changed() -> None:
    assert made().changed() == []
    hashes = records.source_hashes() | {"templates": "0", "attngen/plan": "1"}
    assert made(sources=hashes).changed() == ["templates", "attngen/plan"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"records": [{"card": 1}]}', "\0"])
def test_a_file_that_holds_no_records_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"record\.json holds no records of GPU runs"):
        records.records(path)
    assert records.records(tmp_path / "none.json") == []


@pytest.mark.exhaustive
def test_an_installed_wheel_has_the_records_and_the_same_hashes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    program = (
        "from attngen import resources; from attngen.inspect import record; import json; "
        "print(json.dumps([str(resources.record_file()), record.source_hashes(), len(record.records())]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [
        str(tmp_path / "site/attngen/_data/tests/gpu/record.json"), records.source_hashes(), len(records.records()),
    ]  # fmt: skip


def test_the_docs_quote_the_records() -> None:
    assert record.quote() == record.DOCS.read_text(), "python -m tests.gpu.record --docs quotes them"


def test_a_quote_has_every_count(tmp_path: Path) -> None:
    path = tmp_path / "limits.md"
    path.write_text("before\n<!-- records -->\nold\n<!-- end of records -->\nafter\n")
    text = record.quote(path, [made()])
    assert "| NVIDIA H100 80GB HBM3 | 2026-01-31 | with changes | 1,210 | 1 | 0 | 3 | 580.1 | 2.11.0 |" in text
    assert "| forward | 1,200 of 1,203 |" in text
    assert "old" not in text
    path.write_text(text)
    assert record.quote(path, [made()]) == text


def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *rows: Record) -> list[dict[str, str]]:
    path = tmp_path / "record.json"
    for row in rows:
        records.write(path, row)
    monkeypatch.setattr(resources, "record_file", lambda: path)
    from attngen.commands import doctor as module

    for name in ("_installed", "_build", "_run"):
        monkeypatch.setattr(module, name, list)
    done = CliRunner().invoke(cli.group, ["doctor", "--json"])
    return [row for row in json.loads(done.output)["findings"] if row["part"] == "tested"]


@pytest.mark.exhaustive
def test_doctor_says_what_was_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (nothing,) = doctor(monkeypatch, tmp_path)
    assert nothing["text"] == "no run of the whole GPU test suite is recorded"
    well = made(card="NVIDIA H200", families={"forward": {"passed": 7}})
    older = made(sources=records.source_hashes() | {"attngen/plan": "0"})
    changed, same = doctor(monkeypatch, tmp_path, well, older)
    assert (same["name"], same["state"]) == ("NVIDIA H200", "ok")
    ran = "tests/gpu on 2026-01-31 with changes"
    assert same["text"] == f"{ran}: 7 passed, 0 failed, 0 refused, 0 not run; these sources"
    assert changed["state"] == "missing"
    assert changed["text"] == f"{ran}: 1210 passed, 1 failed, 0 refused, 3 not run; changed since: attngen/plan"


def known_of(fault: str, mended: str = "") -> known.KnownFailure:
    return known.KnownFailure("NVIDIA H200", ("tests/gpu/test_some.py::test_one",), fault, "it is so", mended)


@few(
    ("rows", "state", "title", "text"),
    [
        ([known_of(known.TEST)], "ok", "fault of the test, 2 tests", "it is so"),
        ([known_of(known.COMPILER)], "ok", "fault of the compiler, 2 tests", "it is so"),
        ([known_of(known.KERNEL)], "broken", "fault of a kernel, 2 tests", "it is so"),
        ([known_of(known.HOST)], "broken", "fault of code on the host, 2 tests", "it is so"),
        (
            [known_of(known.KERNEL, "a CPU test")], "missing", "fault of a kernel, 2 tests",
            "it is so; mended since: a CPU test",
        ),
        (
            [], "broken", "unknown cause, 2 tests",
            "count it as a fault of a kernel until the cause is known",
        ),
    ], always=range(0, 999, 3))  # fmt: skip
def test_doctor_tells_known_failures_from_others(
    rows: list[known.KnownFailure], state: str, title: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The state of a card follows: it is well where no kernel that calls run is at fault."""
    monkeypatch.setattr(known, "KNOWN", rows)
    names = [f"tests/gpu/test_some.py::test_one[{number}]" for number in (1, 2)]
    families = {"forward": {"passed": 7, "failed": 1, "refused": 1}}
    run = made(card="NVIDIA H200", families=families, failed=names[:1], refused=names[1:])
    card, cause = doctor(monkeypatch, tmp_path, run)
    assert card["state"] == ("ok" if state == "ok" else "missing")
    assert (cause["name"], cause["state"]) == (f"NVIDIA H200, {title}", state)
    assert cause["text"] == f"{text} (tests/gpu/test_some.py::test_one (2 times))"


def test_each_known_failure_still_is_one() -> None:
    """A row must go when its tests pass, or when no record is of its card."""
    by_card = {row.card: row for row in records.records()}
    for row in known.KNOWN:
        names = row.names(by_card[row.card])
        assert names, f"no test of {row.tests} fails in the record of {row.card}: drop the row"
        assert all(any(name.startswith(test) for name in names) for test in row.tests), row
        assert row.fault in (known.TEST, known.COMPILER, known.KERNEL, known.HOST)


def test_a_failure_of_another_card_is_not_known() -> None:
    (row, *_) = known.KNOWN
    (cause,) = known.explained(made(card="another", failed=[f"{row.tests[0]}"]))
    assert cause.fault == known.UNKNOWN


def test_a_record_with_nothing_failed_has_no_causes() -> None:
    assert known.causes_table([made()]) == "No test failed.\n"


def test_doctor_names_the_commit_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (row,) = doctor(monkeypatch, tmp_path, made(commit="0ed1462e"))
    assert row["text"].startswith("tests/gpu on 2026-01-31 at commit 0ed1462e: ")
