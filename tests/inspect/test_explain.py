"""``attngen explain``: numbers that agree with brute force, formulas, values of scalars, and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from click.testing import CliRunner

from attngen import cli
from attngen.errors import CallError
from attngen.inspect.cases import Case
from attngen.inspect.efficiency import efficiency, scalars_of
from attngen.inspect.of_spec import explain_spec
from attngen.inspect.values import arguments_of
from attngen.inspect.visits import visits
from attngen.lang.eager import evaluate
from attngen.plan import Plan, plan
from attngen.schema import expand, load_spec_text, preset_names
from tests.sampling import few, sampled

HOPPER = "specs/hopper_triton.yaml"


def planned(variant: str, more: str = "") -> Plan:
    text = (
        f"schema: 1\npackage: t\narch: [sm90a]\nkernels:\n  - variant: {variant}\n    head_dim: 64\n"
        f"    tile: {{m: 32, n: 16}}\n    backend: triton\n{more}"
    )
    (kernel,) = expand(load_spec_text(text))
    return plan(kernel)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.group, ["explain", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@sampled(always=7, seqlen=[192, 201, 7], name=preset_names())
def test_every_visible_tile_is_visited(name: str, seqlen: int) -> None:
    kernel_plan = planned(name)
    case = Case("square", (seqlen,), (seqlen,), heads=1, kv_heads=1)
    scalars = scalars_of(
        kernel_plan.variant, {"window": 40, "chunk": 50, "sinks": 3, "width": 16, "radius": 2, "dilation": 3}
    )
    arguments = arguments_of(kernel_plan.variant, case, "dense", torch.Generator().manual_seed(1), given=scalars)
    counted = visits(kernel_plan, seqlen, arguments)
    q = torch.arange(seqlen)[:, None]
    kv = torch.arange(seqlen)[None, :]
    names = {**arguments, "b": 0, "h": 0, "hk": 0, "q": q, "q_pos": q, "kv": kv, "seqlen_q": seqlen, "seqlen_k": seqlen}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    visible = evaluate(kernel_plan.variant.mask, names, tensors).broadcast_to(seqlen, seqlen)
    assert counted.visible_pairs == int(visible.sum())
    seen = sum(bool(visible[i : i + 32, j : j + 16].any()) for i in range(0, seqlen, 32) for j in range(0, seqlen, 16))
    whole = sum(
        bool(visible[i : i + 32, j : j + 16].all()) for i in range(0, seqlen, 32) for j in range(0, seqlen - 15, 16)
    )
    assert counted.full + counted.partial >= seen
    assert counted.full <= whole
    if name not in ("dilated", "neighbourhood_2d", "allowed"):
        # Bands are exact for these: only a ragged last tile may be visited in vain.
        assert counted.full + counted.partial <= seen + -(-seqlen // 32)
    assert 0 < counted.efficiency <= 1


def test_efficiency_by_hand() -> None:
    (results,) = efficiency(planned("causal"), [64], {})
    # Query tile 0 sees keys 0 to 31: two tiles, none of them whole; tile 1 sees four, of which two whole.
    assert (results.visible_pairs, results.full, results.partial) == (64 * 65 // 2, 2, 4)
    assert results.efficiency == pytest.approx(2080 / (6 * 32 * 16))


def test_scalars_are_given_or_have_a_default_or_are_assumed() -> None:
    variant = planned("sink_window").variant
    assert scalars_of(variant, {"window": 9}) == {"sinks": 256, "window": 9}
    limited = replace(variant, scalars=(replace(variant.scalars[0], max=7), replace(variant.scalars[1], default=5)))
    assert scalars_of(limited, {}) == {"sinks": 7, "window": 5}


def test_one_kernel_is_told_in_full() -> None:
    code, output, _ = run(HOPPER, "bf16_d128_sliding_window_m", "--scalar", "window=100", "--seqlen", 1000, "--full")
    assert code == 0
    for text in (
        "0 <= q_pos - kv and q_pos - kv < window",
        "window int32, at least 1",
        "q_pos_hi + 1",
        "stages x (K ",
        "B of 232448 B",
        "descriptor: q_desc, k_desc, v_desc",
        "tile efficiency with window=100",
        "seqlen   1000",
    ):
        assert text in output, text


@few(
    ("fields", "wanted"),
    [
        ("backend: cuda, head_dim: 64", "measured on NVIDIA H200, 2026-11-21"),
        ("backend: cuda, head_dim: 64, tile: {n: 64}", "the spec's own; what it leaves open: "),
        ("head_dim: 64, passes: backward, backward: {backend: cuda}", "measured on NVIDIA"),
    ],
)
def test_where_a_tile_comes_from_is_said(fields: str, wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(f"schema: 1\narch: sm90a\nkernels:\n  - {{variant: causal, {fields}}}\n")
    code, output, _ = run(str(path), "--full")
    assert code == 0
    (line,) = (line for line in output.splitlines() if line.split()[:1] == ["chosen"])
    assert wanted in line


WINDOW = "schema: 1\narch: sm90a\nkernels:\n  - {variant: sliding_window, head_dim: 128, tile: {m: 192, n: 64}}\n"


@pytest.fixture
def window_spec(tmp_path: Path) -> Path:
    path = tmp_path / "window.yaml"
    path.write_text(WINDOW)
    return path


@pytest.mark.exhaustive
def test_one_kernel_is_told_in_a_few_lines(window_spec: Path) -> None:
    code, output, _ = run(window_spec)
    assert code == 0
    assert len(output.splitlines()) <= 17
    for text in (
        "sliding_window: 0 <= q_pos - kv and q_pos - kv < window",
        "192 queries x 64 keys",
        "some query sees",
        "assumed window=256, on which the shares depend; --scalar NAME=VALUE gives others",
        "predicted: one sequence of 16 query heads to 4, window=256 assumed",
        "--full prints the whole plan",
    ):
        assert text in output, text


def test_a_predicted_time_knows_the_window(window_spec: Path) -> None:
    def foreseen(*window: str) -> list[float]:
        code, output, _ = run(window_spec, "--json", "--seqlen", 2048, *window)
        assert code == 0
        return [row["microseconds"] for row in json.loads(output)["kernels"][0]["predicted"]]

    ((assumed,), (same,), (wide,), (all_keys,)) = (
        foreseen(), foreseen("--scalar", "window=256"), foreseen("--scalar", "window=1024"),
        foreseen("--scalar", "window=2048"),
    )  # fmt: skip
    assert assumed == same < wide < all_keys
    code, output, _ = run(window_spec, "--seqlen", 2048, "--scalar", "window=1024")
    assert code == 0
    assert "predicted: one sequence of 16 query heads to 4, window=1024\n" in output


HEADS = """\
schema: 1
arch: sm90a
variants:
  half: {mask: "q_pos >= kv and (h < heads // 2 or q_pos - kv < 8)"}
  packed: {mask: "kv < length[b]", tensors: {length: {dtype: int32, shape: [b]}}}
kernels:
  - {variant: [half, packed], head_dim: 64}
"""


def test_heads_that_differ_are_added_up_or_chosen(tmp_path: Path) -> None:
    path = tmp_path / "heads.yaml"
    path.write_text(HEADS)

    def pairs(h: int | None) -> int:
        (explained,) = explain_spec(path, "_half_", seqlens=[100], h=h)
        return explained.visits[0].visible_pairs

    every = 100 * 101 // 2
    near = sum(min(q + 1, 8) for q in range(100))
    assert (pairs(0), pairs(7), pairs(8), pairs(15)) == (every, every, near, near)
    assert pairs(None) == 8 * every + 8 * near
    code, output, _ = run(path, "_half_", "--seqlen", 100)
    assert code == 0
    assert "tile efficiency, all 16 heads (4 KV heads) of one sequence" in output
    assert "head 12 of 16 (4 KV heads)" in run(path, "_half_", "--seqlen", 100, "--head", 12)[1]
    assert "--head must be 0 to 15, got 16" in run(path, "_half_", "--head", 16)[2]


def test_sequences_that_differ_are_added_up_or_chosen(tmp_path: Path) -> None:
    path = tmp_path / "heads.yaml"
    path.write_text(HEADS)
    torch.save(torch.tensor([10, 90], dtype=torch.int32), tmp_path / "length.pt")
    given = ("_packed_", "--seqlen", 100, "--tensor", f"length={tmp_path / 'length.pt'}", "--json")

    def pairs(*more: object) -> int:
        code, output, errors = run(path, *given, *more)
        assert code == 0, errors
        return json.loads(output)["kernels"][0]["efficiency"][0]["visible_pairs"]

    assert (pairs("--batch", 0), pairs("--batch", 1), pairs()) == (1000, 9000, 10000)
    assert "--batch must be 0 to 1, got 2" in run(path, *given, "--batch", 2)[2]


def test_shared_memory_adds_up() -> None:
    for explained in explain_spec(HOPPER, "d192x128", seqlens=[64]):
        numbers = explained.to_dict()["shared_memory"]
        assert numbers["total"] == numbers["q"] + numbers["stages"] * (numbers["k"] + numbers["v"])
        assert numbers["total"] <= numbers["limit"]
        assert dict(explained.facts())["head_dim"] == "192 = 128 + 64 for q and k, 128 for v"


@pytest.mark.exhaustive
def test_all_kernels_are_a_table() -> None:
    code, output, _ = run(HOPPER, "--seqlen", 128)
    assert code == 0
    assert output.count("fwd_sm90a") == len(explain_spec(HOPPER, seqlens=[64]))
    assert "attngen explain SPEC KERNEL" in output


def test_json_holds_plan_bands_and_efficiency() -> None:
    code, output, _ = run(HOPPER, "d64_sink_window", "--json", "--seqlen", 256)
    assert code == 0
    (kernel,) = json.loads(output)["kernels"]
    assert kernel["plan"]["variant"]["name"] == "sink_window"
    assert len(kernel["bands"]["visible"]) == 2
    assert kernel["bands"]["exact"]
    assert kernel["efficiency"][0]["seqlen"] == 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_kernel"], "has no kernel 'no_such_kernel'"),
        (["d64_sliding", "--set", "windw=3"], "did you mean 'window'?"),
        (["d64_sliding", "--set", "window=0"], "window int32, at least 1: 0 is outside"),
        (["d64_sliding", "--set", "window=x"], "scalar 'window' is int32, which 'x' is not"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    code, _, errors = run(HOPPER, *arguments)
    assert code == cli.EXIT_USAGE
    assert message in errors


def test_a_value_without_a_name_is_a_usage_error() -> None:
    assert run(HOPPER, "--set", "window")[0] == cli.EXIT_USAGE


def test_values_are_read_by_type() -> None:
    text = (
        'schema: 1\npackage: t\narch: [sm90a]\nvariants:\n  own:\n    mask: "loud or kv < n"\n    score: "s * gain"\n'
        "    scalars: {loud: {type: bool}, n: {type: int64}, gain: {type: float32}}\n"
        "kernels:\n  - variant: own\n    head_dim: 64\n"
    )
    with TemporaryDirectory() as folder:
        path = Path(folder, "own.yaml")
        path.write_text(text)
        (explained,) = explain_spec(path, seqlens=[64], given={"loud": "false", "n": "10", "gain": "0.5"})
        assert dict(explained.scalars) == {"loud": False, "n": 10, "gain": 0.5}
        with pytest.raises(CallError):
            explain_spec(path, seqlens=[64], given={"loud": "maybe"})


def test_listed_keys_have_no_tiles(tmp_path: Path) -> None:
    """The lists of a call decide which keys are visited, so that nothing is counted."""
    spec = tmp_path / "listed.yaml"
    spec.write_text(
        "schema: 1\narch: [sm90a]\nvariants:\n  listed: {keys: index}\n"
        "kernels:\n  - {variant: listed, head_dim: {qk: 576, v: 512}, v: key}\n"
    )
    (explanation,) = explain_spec(spec)
    code, text, _ = run(spec, explanation.plan.name)
    assert (code, explanation.visits) == (0, ())
    assert "goes through the keys that the call lists for each query, 64 at a time" in text
    assert "tile efficiency: a call lists the keys of each query" in text
