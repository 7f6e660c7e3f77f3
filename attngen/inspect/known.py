"""Known failures of recorded GPU tests: which tests, whose fault it is, and why.

``attngen doctor`` and docs/limits.md name each failure of a record by this table. To add one, append a row to
``KNOWN``. A row whose tests no longer fail in the record of its card must go: a test says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attngen.inspect.record import Record

#: Whose fault a failure is. A kernel that the compiler gets wrong is refused, so that no call runs it.
TEST, COMPILER, KERNEL, HOST, UNKNOWN = "the test", "the compiler", "a kernel", "code on the host", "unknown"


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """Tests of one card's record that failed, or whose kernel was refused, for one reason.

    ``tests`` are beginnings of names: of one test, of all parameters of a function, or of a whole file. ``mended`` says
    what was changed after the record; it is empty where nothing was.
    """

    card: str
    tests: tuple[str, ...]
    fault: str
    reason: str
    mended: str = ""

    def names(self, record: Record) -> list[str]:
        """The tests of the record that this row explains."""
        failing = (*record.failed, *record.refused) if record.card == self.card else ()
        return [name for name in failing if name.startswith(self.tests)]


H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"

_GRADIENTS = "tests/gpu/test_backward.py::test_"

_OVERWRITTEN = (
    "ptxas overwrites a register that a running wgmma still reads; attngen finds that in the machine code and refuses "
    "the kernel, and the test fixes the tile, so that no other one is tried"
)

KNOWN = (
    KnownFailure(
        H100, ("tests/gpu/test_quantize.py::",), TEST,
        "it read the name of a kernel that calls no longer keep, and looked at no result",
        "all of test_quantize.py passes on the commit after (12783880, H100)",
    ),
    KnownFailure(
        H100, (
            f"{_GRADIENTS}gradients_keep_the_contract[backward learned-bf16-d64-dense-wgmma]",
            f"{_GRADIENTS}the_same_bits_whatever_memory_held[backward learned-bf16-d64-dense-wgmma]",
            "tests/gpu/test_backward_stress.py::",
        ), KERNEL,
        "a backward with gradients of a clamped table beside those of other tensors did not compile: a variable was "
        "declared twice",
        "a CPU test compiles it, and the tests pass on the commit after (12783880, H100)",
    ),
    *(
        KnownFailure(
            card, ("tests/gpu/test_fuzzed.py::test_fuzzed_specs_keep_the_contract[fuzzed_69]",), COMPILER, _OVERWRITTEN
        )
        for card in (H100, H200)
    ),
    KnownFailure(
        H200, ("tests/gpu/test_engines.py::test_a_graph_serves_another_batch[5]",), HOST,
        "vLLM's backend with ATTNGEN_SHARED_PREFIX: a graph kept the prefix that a run of the same metadata before its "
        "capture had found",
        "a capture finds it again, in the graph; not run on a card since",
    ),
    KnownFailure(
        H200, ("tests/gpu/test_fp8.py::test_a_call_finds_the_kernel_of_its_dtypes[q_dtype0-kv_dtype0-None]",), TEST,
        "one of 307,200 random outputs differed by 0.0625, 0.06 being allowed",
        "the test allows what probabilities in 8 bits may err; not run on a card since",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Explained:
    """Failing tests of a record with one cause."""

    tests: tuple[str, ...]
    fault: str
    reason: str
    mended: str = ""

    @property
    def harmless(self) -> bool:
        """Whether the kernels that calls run are not at fault, in the sources of the record too."""
        return self.fault in (TEST, COMPILER)

    @property
    def title(self) -> str:
        """The class of the cause, and of how many tests."""
        tests = "1 test" if len(self.tests) == 1 else f"{len(self.tests)} tests"
        return f"{'unknown cause' if self.fault == UNKNOWN else f'fault of {self.fault}'}, {tests}"

    @property
    def text(self) -> str:
        """The reason, what was mended, and the names of the tests."""
        mended = f"; mended since: {self.mended}" if self.mended else ""
        return f"{self.reason}{mended} ({named(self.tests)})"


def explained(record: Record) -> list[Explained]:
    """Group the failed and refused tests of a record by cause; those of no row come last, with the fault unknown."""
    left = dict.fromkeys((*record.failed, *record.refused))
    groups = []
    for row in KNOWN:
        if names := [name for name in row.names(record) if name in left]:
            groups.append(Explained(tuple(names), row.fault, row.reason, row.mended))
            for name in names:
                del left[name]
    if left:
        groups.append(Explained(tuple(left), UNKNOWN, "count it as a fault of a kernel until the cause is known"))
    return groups


def causes_table(records: Iterable[Record]) -> str:
    """The causes of all failures of some records, as a table of docs/limits.md."""
    said = "Why tests failed or were refused; `attngen doctor` names each of them:\n\n"
    lines = ["| card | failed or refused | fault of | why | mended since |", "| --- | --- | --- | --- | --- |"]
    for row in records:
        lines += [
            f"| {row.card} | {len(cause.tests)} | {cause.fault} | {cause.reason} | {cause.mended or '–'} |"
            for cause in explained(row)
        ]
    return said + "\n".join(lines) + "\n" if len(lines) > 2 else "No test failed.\n"


def named(tests: Sequence[str]) -> str:
    """The names of tests, those of one function with several parameters as one."""
    counts = Counter(name.partition("[")[0] for name in tests)
    single = {name.partition("[")[0]: name for name in tests}
    return ", ".join(f"{name} ({count} times)" if count > 1 else single[name] for name, count in counts.items())
