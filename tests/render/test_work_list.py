"""The list of work is cut by one rule, which kernels and the host evaluate with the same limits.

What kernels include is compiled by the host's compiler, with the limits of rendered sources, and compared with the
host's rule, whose limits come from manifests.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from attngen.manifest import StructureEntry, WorkLimits
from attngen.plan import Plan
from attngen.records import read, written
from attngen.render import render
from attngen.runtime.geometry.work_list import cut_of, stay_whole
from tests.host_compiler import COMPILER, HOST, compile_host
from tests.plan.specs import planned
from tests.render.headers import headers
from tests.render.test_decode_on_host import on_host
from tests.sampling import few

_LISTED = "variants:\n  listed: {keys: counted_index_of_two_caches}\n"


def plans() -> Iterator[Plan]:
    """Plans of all families that cut a list, with all of their limits."""
    yield planned("causal", backend="cuda", split_kv="true", head_dim=128)
    yield planned("causal", backend="cuda", head_dim=512, layout="paged")
    for kv_dtype in (None, "fp8_mla_656"):
        of_key = {"v": "key", "layout": "paged", "head_dim": "{qk: 576, v: 512}", "kv_dtype": kv_dtype}
        yield planned("causal", backend="cuda", **of_key)
    for head_dim, kv_dtype in (("{qk: 576, v: 512}", None), ("512", "fp8_mla_584")):
        of_key = {"v": "key", "layout": "paged", "head_dim": head_dim, "kv_dtype": kv_dtype}
        yield planned("listed", declared=_LISTED, backend="cuda", **of_key)


@dataclass(frozen=True)
class Family:
    """Lines of a kernel that tell how it cuts its list, and the limits that the host reads from its manifest."""

    limits: WorkLimits
    constants: str
    division: str
    lists_empty: str

    @staticmethod
    def of(plan: Plan) -> Family:
        text = render(plan).text
        (constants,) = re.findall(r"struct Limits \{.*?\n\};", text, re.DOTALL)
        (division,) = re.findall(r"using Division = (\w+);", text)
        chunks = set(re.findall(r"const Chunks<(\w+)> chunks_of", text))  # of all launches
        assert len(chunks) == 1
        return Family(read(StructureEntry, written(plan.structure)), constants, division, *chunks)


@pytest.fixture(scope="module")
def families() -> list[Family]:
    all_families = list(map(Family.of, plans()))
    assert {family.division for family in all_families} == {"Exact", "Quick"}
    return all_families


@dataclass(frozen=True)
class Case:
    """A list: tiles of its items, -1 of one that does not exist; tiles of a split, or 0; workers of the launch."""

    family: int
    split_tiles: int
    most: int
    tiles: tuple[int, ...]

    @staticmethod
    def random(random: Random, family: int, whole_tiles: int) -> Case:
        """Items that are alike more often than not, since rules differ there, and shares about the limits."""
        most = random.choice((random.randint(1, 12), random.randint(1, 132)))
        items = random.randint(1, random.choice((4, most + 1, 3 * most)))
        share = random.choice((random.randint(0, 70), random.randint(0, 600), whole_tiles + random.randint(-1, 1)))
        each = max(share * most // items + random.randint(-1, 1), 0)
        spread = random.choice((0, 0, 0, 2, each // 8, each))
        tiles = tuple(max(each + random.randint(-spread, spread), -1) for _ in range(items))
        if random.random() < 0.2:
            tiles = tuple(random.choice((-1, 0, one)) for one in tiles)
        return Case(family, random.choice((0, 0, 0, 0, random.randint(1, 9))), most, tiles)

    def __str__(self) -> str:
        return " ".join(map(str, (self.family, self.split_tiles, self.most, *self.tiles)))


def cases_of(families: list[Family], each: int) -> list[Case]:
    random = Random(0)
    return [
        Case.random(random, number, family.limits.whole_tiles)
        for number, family in enumerate(families)
        for _ in range(each)
    ]


def built(families: list[Family], folder: Path, *changes: tuple[str, str]) -> Path:
    """A program that cuts lists as kernels do. ``changes``: of the header's text."""
    for name in ("work_list.cuh", "divisor.cuh", "quick_ranges.cuh"):
        text = headers()[name]
        for before, after in changes if name == "work_list.cuh" else ():
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        (folder / name).write_text(on_host(name, text))
    spaces = "".join(f"namespace f{i} {{ {one.constants} }}\n" for i, one in enumerate(families))
    calls = "".join(
        f"if (family == {i}) cut_list<f{i}::Limits, {one.division}, {one.lists_empty}>(tiles, split_tiles, most);\n"
        for i, one in enumerate(families)
    )
    head = "static void cut_list_of(int family, const std::vector<int>& tiles, int split_tiles, int most)"
    (folder / "families.inc").write_text(f"{spaces}{head} {{\n{calls}}}\n")
    program = folder / "program"
    compile_host(HOST / "work_list.cpp", program, folder)
    return program


def difference(program: Path, families: list[Family], cases: list[Case]) -> str:
    """First case in which kernels and host disagree, or where a kernel cuts a list wrongly; '' if there is none."""
    lines = "".join(f"{case}\n" for case in cases)
    done = subprocess.run([program], input=lines, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        return done.stdout.splitlines()[-1] if done.stdout else f"exit status {done.returncode}"
    for case, line in zip(cases, done.stdout.splitlines(), strict=True):
        chunks, items, longest, workers, splits, whole = map(int, line.split())
        limits = families[case.family].limits
        if (of_host := cut_of(limits, chunks, items, longest, case.split_tiles, case.most)) != (workers, splits):
            return f"{of_host} on the host, {(workers, splits)} in the kernel: {case}"
        equal = items == len(case.tiles) and len({*case.tiles}) == 1 and longest > 0 and case.split_tiles == 0
        if equal and stay_whole(limits, items, longest, case.most) != bool(whole):
            return f"{'whole' if whole else 'cut'} items in the kernel only: {case}"
    return ""


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_kernels_and_host_cut_lists_alike(families: list[Family], tmp_path: Path) -> None:
    """And parts cover each tile of each item once, ranges are even, and partial results have slots of their own."""
    cases = cases_of(families, 700)
    assert sum(stay_whole(families[one.family].limits, len(one.tiles), one.tiles[0], one.most) for one in cases) > 170
    assert difference(built(families, tmp_path), families, cases) == ""


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few(
    ("before", "after"),
    [
        ("(Limits::kOneOf - 1) * workers", "(Limits::kOneOf - 2) * workers"),
        ("share <= Limits::kWholeTiles ?", "share < Limits::kWholeTiles ?"),
        ("part.end = tiles.first(number + 1);", "part.end = tiles.first(number) + tiles.quotient;"),
    ],
    ids=["takers", "splits", "parts"],
    always=0,
)
def test_a_kernel_of_another_rule_is_found(families: list[Family], before: str, after: str, tmp_path: Path) -> None:
    assert difference(built(families, tmp_path, (before, after)), families, cases_of(families, 700))


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_a_host_of_other_limits_is_found(families: list[Family], tmp_path: Path) -> None:
    program, cases = built(families, tmp_path), cases_of(families, 1000)
    for name in ("least_tiles", "cut_tiles", "whole_tiles"):
        others = [replace(one, limits=replace(one.limits, **{name: getattr(one.limits, name) + 1})) for one in families]
        assert difference(program, others, cases), name
