"""Tables of docs/which_kernel.md, from what the planner takes and what schedules declare that they serve.

``python -m tests.docs.which_kernel`` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

from attngen.arch import ARCHES
from attngen.cards import KINDS
from attngen.lang.listed import LISTS
from attngen.plan import plan
from attngen.plan.catalogue import schedules
from attngen.plan.schedule import Schedule
from attngen.plan.served import _fields_of, _shown
from tests.docs.blocks import ROOT
from tests.plan.specs import kernel_spec
from tests.test_cards import kernels

PAGE = ROOT / "docs" / "which_kernel.md"

#: Passes of a spec, whose schedules have a table of conditions each.
PASSES = ("forward", "backward", "jvp", "index_scores", "block_scores")

#: Pages below docs/schedules, by schedule.
PAGES = {
    "hopper_forward": "hopper_forward", "hopper_fp8": "hopper_forward", "hopper_decode": "hopper_decode",
    "hopper_wide": "hopper_wide", "hopper_mla": "latent_attention", "hopper_indexed": "keys_by_index",
    "mma_forward": "mma", "mma_decode": "mma", "mma_indexed": "keys_by_index",
    "hopper_backward": "hopper_backward", "hopper_blocks": "hopper_backward",
    "hopper_cluster": "hopper_backward_wide", "mla_backward": "latent_attention", "indexed_backward": "keys_by_index",
    "mma_indexed_backward": "keys_by_index", "mma_backward": "mma", "triton_backward": "triton_backward",
    "triton_jvp": "triton_jvp", "index_scores": "index_scores", "block_scores": "index_scores",
}  # fmt: skip

#: Fields of ``KernelSpec`` that share a name in specs.
LABELS = {"num_warps": "warps: 4", "roles": "warps: {…}", "grouped_v": "transposed_v: groups"}

#: An entry whose mask is constant on blocks of 64.
BLOCKS = kernel_spec("blocks", declared="variants:\n  blocks: {blocks: 64}\n")

#: Changes of an entry for which schedules exist, in words. A schedule needs the first one that suits it.
NEEDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, ""),
    ({"dtype": "fp8_e4m3"}, "8 bits"),
    ({"head_dim_qk": 256, "head_dim_v": 256}, "head dims beyond 128"),
    ({"head_dim_qk": 512, "head_dim_v": 512}, "head dims beyond 256"),
    ({"variant": BLOCKS.variant}, "masks that are constant on blocks of 64"),
)

#: Most values of a field that a cell lists; of more it lists those that are missing.
MOST_VALUES = 8


def page(text: str) -> str:
    """The text of the page with the tables in their places."""
    for name, rows in tables():
        head, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- end of {name} -->\n")
        if not end:
            raise SystemExit(f"{PAGE} has no lines '<!-- {name} -->' and '<!-- end of {name} -->'")
        text = "".join((head, mark, "\n", *(f"| {' | '.join(row)} |\n" for row in rows), "\n", end, tail))
    return text


def tables() -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the name of each table and its rows."""
    yield "choices", _table(("kernels", "an entry with", *ARCHES), _choices())
    yield "schedules", _table(("schedule", "pass", "backend", "arches", "layouts", "for entries with"), _schedules())
    for name in PASSES:
        header = ("field", "the error says", "of", "allowed", "any value is taken by")
        yield f"conditions of {name}", _table(header, _conditions(schedules(name)))


def _table(header: Iterable[str], rows: Iterable[list[str]]) -> list[list[str]]:
    names = list(header)
    return [names, ["---"] * len(names), *rows]


def _choices() -> Iterator[list[str]]:
    """Yield the schedules that the planner takes for each kind of kernel, arch by arch."""
    for name, kind in KINDS.items():
        cells = []
        for arch in ARCHES:
            asked = kernels(name, arch) if arch in kind.arches else ()
            cells.append(_code(dict.fromkeys(plan(kernel).schedule for kernel in asked)))
        yield [name, f"`{kind.fields}`", *cells]


def _schedules() -> Iterator[list[str]]:
    """Yield a row for each schedule, in the order in which the planner asks them."""
    for row in (row for name in PASSES for row in schedules(name)):
        arches = [name for name, arch in ARCHES.items() if row.supports(arch)]
        link = f"[`{row.name}`](schedules/{PAGES[row.name]}.md)" if row.name in PAGES else f"`{row.name}`"
        cells = [row.direction, row.backend, ", ".join(arches), ", ".join(row.layouts)]
        yield [link, *cells, ", ".join(_needs(row, arches)) or "–"]


def _needs(row: Schedule, arches: Sequence[str]) -> list[str]:
    """Fields of an entry for which the planner asks this schedule."""
    (entry,) = kernels("forward", arches[0])
    changes, words = next((changes, words) for changes, words in NEEDS if row.suits(replace(entry, **changes)))
    needs = {"`v: key`": row.v_of_key, "`keys`": row.listed_keys, words: bool(words)}
    if not any(needs.values()):  # the others split keys whether an entry says so or not
        needs["`split_kv: true`"] = row.split_kv
    needs["`loads: pointer` on sm90a"] = "sm90a" in arches and not row.suits(replace(entry, arch="sm90a", **changes))
    return [words for words, given in needs.items() if given]


def _conditions(rows: Sequence[Schedule]) -> Iterator[list[str]]:
    """Yield a row for each condition of a field: what its error says, whose it is, and what to write instead."""
    (entry,) = kernels("forward", "sm90a")
    for field, label, _, default in _fields_of(entry):
        served = {row.name: row.serves.get(field) for row in rows}
        free = [name for name, values in served.items() if values is not None and values.allowed is None]
        conditions: dict[tuple[str, str], list[str]] = {}
        for name, values in served.items():
            if values is not None and values.allowed is not None:
                conditions.setdefault((values.why, _allowed(field, values.allowed)), []).append(name)
        lacking = [name for name, values in served.items() if values is None]
        if lacking and (free or conditions):
            conditions["does not serve it", _allowed(field, (default,))] = lacking
        for (why, allowed), names in conditions.items():
            yield [f"`{LABELS.get(field, label)}`", why, _names(names, rows), allowed, _names(free, rows)]


def _allowed(field: str, values: Sequence[Any]) -> str:
    """Values of a field that a schedule takes, as a spec writes them."""
    if len(values) > MOST_VALUES and field == "keys":
        return f"all but {_code(name for name in LISTS if name not in values)}"
    given = [each for each in values if each is not None and not (is_dataclass(each) and each == type(each)())]
    return _code(_shown(field, each) for each in given) if given else "left out"


def _names(names: Sequence[str], rows: Sequence[Schedule]) -> str:
    return "all" if len(names) == len(rows) > 1 else _code(names)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
