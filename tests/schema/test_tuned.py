"""Files of measured choices: which kernels they are for, what they change, and what is wrong with a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attngen import resources
from attngen.errors import SpecError
from attngen.plan import plan
from attngen.plan.candidates import candidates
from attngen.plan.catalogue import schedules
from attngen.schema import KernelSpec, expand, load_spec, load_spec_text
from attngen.schema.tuned import fields_of, identity, load_tuned, tuned_text
from tests.sampling import few

SPEC = """
schema: 1
arch: [sm90a]
variants:
  near: {mask: "0 <= q_pos - kv and q_pos - kv < width", scalars: {width: {type: int32, min: 1}}}
kernels:
  - {variant: [causal, near], head_dim: [64, 128], passes: [forward, backward]}
  - {variant: causal, head_dim: 64, layout: varlen}
  - {variant: causal, head_dim: 96, backend: triton, passes: [forward, backward]}
"""


def kernels(text: str = SPEC, file: str = "mine.yaml") -> tuple[KernelSpec, ...]:
    return expand(load_spec_text(text, file))


def written(tmp_path: Path, *rows: dict[str, object]) -> Path:
    path = tmp_path / "card.tuned.yaml"
    path.write_text(tuned_text("NVIDIA H200", {"nvidia-cuda-nvrtc": "13.0.88"}, rows))
    return path


def row(kernel: KernelSpec, choice: dict[str, object], **more: object) -> dict[str, object]:
    return {"kernel": "a kernel", "of": identity(kernel), "speedup": 1.1, **choice, **more}


def test_a_kernel_is_the_same_whoever_asks_for_it() -> None:
    mine = kernels()
    assert len({identity(kernel) for kernel in mine}) == len(mine)
    others = kernels(SPEC.replace("near", "mine").replace("q_pos - kv < width", "(q_pos - kv) < width"), "other.yaml")
    assert [identity(kernel) for kernel in mine] == [identity(kernel) for kernel in others]
    changed = kernels(SPEC.replace("< width", "<= width"))
    differ = [a.variant.name for a, b in zip(mine, changed, strict=True) if identity(a) != identity(b)]
    assert set(differ) == {"near"}


@few("index", range(11), always=range(0, 999, 4))
def test_choices_come_back_from_the_file(tmp_path: Path, index: int) -> None:
    """Every candidate, written and read, plans the same kernel."""
    kernel = kernels()[index]
    tried = list(candidates(kernel))
    assert tried[0][1].name == plan(kernel).name
    for other, planned in [tried[0], *tried[1 :: max(len(tried) // 6, 1)]]:
        tuned = load_tuned(written(tmp_path, row(kernel, fields_of(other))))
        applied = tuned.applied(kernel)
        assert applied is not None
        assert plan(applied).name == planned.name
        assert tuned.speedup(kernel) == 1.1
    assert (tuned.name, tuned.gpu) == ("card.tuned.yaml", "NVIDIA H200")


def test_choices_of_a_spec_go_before_tuned_ones(tmp_path: Path) -> None:
    kernel = kernels()[0]
    tuned = load_tuned(written(tmp_path, row(kernel, {"tile": {"n": 64}})))
    assert tuned.applied(replace(kernel, tile_n=96)) is None
    assert tuned.applied(replace(kernel, dtype="fp16")) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 1\n", "no file of choices, which is a mapping that starts with 'tuned: 1'"),
        ("tuned: 2\ngpu: x\nversions: {}\n", "tuned"),
        ("tuned: 1\nversions: {}\n", "gpu: missing"),
        ("tuned: 1\ngpu: x\nversions: {}\nchoices: [{kernel: a, of: zz, speedup: 1.0}]\n", "choices[0].of"),
        (
            "tuned: 1\ngpu: x\nversions: {}\nchoices:\n"
            "- {kernel: a, of: 0123456789abcdef, speedup: 1.0, tiles: {n: 64}}\n",
            "unknown field; did you mean 'tile'?",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as raised:
        load_tuned(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_two_choices_for_one_kernel_are_refused(tmp_path: Path) -> None:
    one = row(kernels()[0], {"tile": {"n": 64}})
    with pytest.raises(SpecError, match="has two choices"):
        load_tuned(written(tmp_path, one, one))
    with pytest.raises(SpecError, match="cannot read"):
        load_tuned(tmp_path / "none.yaml")


@pytest.mark.parametrize(("name", "field"), [("hopper_backward", "schedule"), ("hopper_times", "times")])
def test_a_table_is_no_file_of_single_kernels(name: str, field: str) -> None:
    with pytest.raises(SpecError, match=f"{field}: a table that every build reads"):
        load_tuned(resources.tuned_file(name))


TABLES = {schedule.name for direction in ("forward", "backward") for schedule in schedules(direction)} | {
    "hopper_times"
}
SEARCHED = [path for path in sorted(resources.tuned_dir().glob("*.yaml")) if path.stem not in TABLES]


@pytest.mark.parametrize("path", SEARCHED, ids=lambda path: path.stem)
def test_shipped_choices_are_for_kernels_of_hopper(path: Path) -> None:
    shipped = load_tuned(resources.tuned_file(path.stem))
    asked = [kernel for kernel in expand(load_spec(resources.specs_dir() / "hopper.yaml")) if not kernel.fixes_choices]
    chosen = {identity(kernel): shipped.applied(kernel) for kernel in asked}
    assert shipped.choices
    assert shipped.choices.keys() <= chosen.keys()
    for of in shipped.choices:
        assert plan(chosen[of]).name != plan(next(kernel for kernel in asked if identity(kernel) == of)).name
