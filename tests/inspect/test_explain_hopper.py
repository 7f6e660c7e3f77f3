"""``attngen explain`` of CUDA kernels: floors by hand, memory and barriers as the kernel has them, JSON, text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attngen import cli
from attngen.families.hopper_forward.explain import HopperExplanation
from attngen.inspect.of_spec import explain_spec
from attngen.inspect.pipes import barriers
from attngen.inspect.visits import visits
from attngen.lang.eager import evaluate
from attngen.parts.explained.base import explanation_of
from attngen.parts.floors import MEMORY_PER_CLOCK, RATES, floor
from attngen.plan import Plan, plan
from attngen.render import render
from attngen.schema import expand, load_spec_text
from tests.sampling import few

CUDA, TRITON = "fwd_sm90a_wgmma", "fwd_sm90a_tma"
HEAD = "schema: 1\npackage: t\narch: [sm90a]\nkernels:\n"


def spec_text(variant: str = "causal", head_dim: object = 128, more: str = "", backend: str = "cuda") -> str:
    return f"{HEAD}  - variant: {variant}\n    head_dim: {head_dim}\n    backend: {backend}\n{more}"


def planned(variant: str = "causal", head_dim: object = 128, more: str = "") -> Plan:
    (kernel,) = expand(load_spec_text(spec_text(variant, head_dim, more)))
    return plan(kernel)


def explained(*arguments: Any) -> HopperExplanation:
    actual = explanation_of(planned(*arguments))
    assert isinstance(actual, HopperExplanation)
    return actual


def tile(n: int, consumers: int = 2) -> str:
    return f"    tile: {{m: {64 * consumers}, n: {n}}}\n"


def output(path: Path, *arguments: object) -> str:
    result = CliRunner().invoke(cli.group, ["explain", str(path), *map(str, arguments), "--full"])
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture
def both(tmp_path: Path) -> Path:
    path = tmp_path / "both.yaml"
    path.write_text(spec_text(head_dim=[64, 128], backend="[cuda, triton]"))
    return path


# head_dim, keys, consumers; QK, PV, exponentials, reads of shared memory in clocks of a consumer; what binds
BY_HAND = [
    # QK: 4 x m64n128k16 of 64 clk. PV: 8 x m64n64k16 of 32. (64 x 64 + 2 x 128 x 64) x 2 B at 128 B.
    (64, 128, 3, 256, 256, 512, 320, ("products", "exponentials")),
    # QK: 8 x 64. PV: 8 x 64.
    (128, 128, 2, 512, 512, 512, 640, ("products",)),
    # QK: 16 x m64n64k16 of 32. PV: 4 x m64n256k16 of 128.
    (256, 64, 2, 512, 512, 256, 768, ("products",)),
    # MLA. QK: 12 x m64n96k16 of 48. PV: 6 x m64n128k16 of 64. (64 x 192 + 96 x (192 + 128)) x 2 B at 128 B.
    ("{qk: 192, v: 128}", 96, 2, 576, 384, 384, 672, ("products",)),
    # 80 columns are computed as 96: QK 6 x 64, PV 8 x 48.
    (80, 128, 2, 384, 384, 512, 480, ("products",)),
    # 32 columns: QK 2 x 64, PV 8 x 16.
    (32, 128, 3, 128, 128, 512, 160, ("exponentials",)),
]


@pytest.mark.parametrize(("head_dim", "keys", "consumers", "qk", "pv", "exp", "shared", "binding"), BY_HAND)
def test_floors_by_hand(
    head_dim: object, keys: int, consumers: int, qk: int, pv: int, exp: int, shared: int, binding: tuple[str, ...]
) -> None:
    actual = floor(planned("causal", head_dim, tile(keys, consumers)))
    assert (actual.qk.clocks, actual.pv.clocks) == (qk, pv)
    assert actual.parts == {"products": qk + pv, "exponentials": exp, "shared memory": shared}
    assert actual.binding == binding
    assert actual.clocks == max(qk + pv, exp, shared)
    assert actual.block == consumers * actual.clocks


def test_memory_by_hand() -> None:
    # 4.8 TB/s over 132 multiprocessors at 1.98 GHz
    assert float(MEMORY_PER_CLOCK) == pytest.approx(18.365, abs=1e-3)
    actual = floor(planned("causal", 128, tile(128)))
    assert actual.loaded == 2 * 128 * 128 * 2
    assert actual.uncached == 3569  # 65536 / 18.365
    assert actual.cached_share == pytest.approx(1 - 2048 / 3568.5, abs=1e-3)
    assert actual.tile == 2 * 128 * 128 * 2
    assert actual.call(steps=20, tiles=1) == 20 * 1024
    assert actual.call(steps=2, tiles=1) == 3569  # Q and O take longer
    assert actual.seconds(steps=20, tiles=1) == pytest.approx(20 * 1024 / 132 / 1.98e9)
    assert floor(planned("causal", 80)).loaded == 2 * 96 * 80 * 2  # padding is not in memory


def test_a_consumer_that_skips_takes_the_steps_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(spec_text("causal", 64, "    tile: {m: 192, n: 64}\n"))
    (explained,) = explain_spec(path, seqlens=[384])
    assert explained.plan.structure.skips
    (counted,) = explained.visits
    assert explained.schedule.heads[0].steps == counted.steps == 1 + 2 + 3 + 4 + 5 + 6
    assert counted.full + counted.partial == 3 + 6  # of the block
    assert counted.skipped == 3 * (3 + 6) - counted.steps
    assert counted.efficiency == pytest.approx((384 * 385 / 2) / (21 * 64 * 64))
    assert "27 steps of consumers, of which they skip 6; 85.9 % of the pairs" in output(
        path, explained.plan.name, "--seqlen", 384
    )


def multiplied(visible: torch.Tensor, rows: int, keys: int, stages: int) -> torch.Tensor:
    """Pairs that the consumers multiply, pair by pair, as the kernel's text says."""
    actual = torch.zeros_like(visible)
    for start in range(0, len(visible), rows):
        block = visible[start : start + rows]
        tiles = [k for k in range(0, visible.shape[1], keys) if block[:, k : k + keys].any()]
        for first in range(start, min(start + rows, len(visible)), 64):
            own = visible[first : first + 64]
            left, held, held_for = len(tiles), False, 0
            for key in reversed(tiles):
                blind = own.any() and not own[:, key : key + keys].any()
                if blind and (held_for < stages - 1 if held else left > 1):
                    held_for += held
                else:
                    actual[first : first + 64, key : key + keys] = True
                    held, held_for = True, 0
                left -= 1
    return actual


@few("stages", [2, 3])
@pytest.mark.parametrize(
    ("variant", "keys", "scalars"),
    [
        ("causal", 64, {}),
        ("sliding_window", 64, {"window": 100}),
        ("sliding_window", 16, {"window": 40}),
        ("sink_window", 32, {"window": 70, "sinks": 5}),
        ("chunked", 48, {"chunk": 130}),
    ],
)
def test_pairs_of_consumers_that_skip_are_those_of_brute_force(
    variant: str, keys: int, scalars: dict[str, int], stages: int
) -> None:
    kernel_plan = planned(variant, 64, f"    tile: {{m: 192, n: {keys}}}\n    pipeline: {{stages: {stages}}}\n")
    assert kernel_plan.structure.skips
    seqlen = 960  # whole consumers and tiles of keys, so that steps are pairs; five work tiles
    counted = visits(kernel_plan, seqlen, scalars)
    q, kv = torch.arange(seqlen)[:, None], torch.arange(seqlen)[None, :]
    names = {**scalars, "q": q, "q_pos": q, "kv": kv, "seqlen_q": seqlen, "seqlen_k": seqlen}
    visible = evaluate(kernel_plan.variant.mask, names, {}).broadcast_to(seqlen, seqlen)
    pairs = multiplied(visible, 192, keys, stages)
    assert pairs[visible].all()
    assert counted.steps * 64 * keys == int(pairs.sum())
    assert counted.skipped > 0
    assert counted.efficiency == pytest.approx(int(visible.sum()) / int(pairs.sum()))


def test_a_consumer_behind_the_end_multiplies_what_its_block_loads() -> None:
    kernel_plan = planned("causal", 64, "    tile: {m: 192, n: 64}\n")
    counted = visits(kernel_plan, 200, {})  # the second work tile has 8 rows, of one consumer
    first, second = 1 + 2 + 3, 3 * 4
    assert (counted.steps, counted.skipped) == (first + second, 3)


def test_rates_have_sources() -> None:
    assert {rate.value for rate in RATES} >= {4096, 16, 128, 132, 4_800_000_000_000}
    assert all(rate.source and rate.unit for rate in RATES)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_head_takes_what_its_visits_take(tmp_path: Path, head_dim: int) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(spec_text("full", head_dim, tile(64)))
    (explained,) = explain_spec(path, seqlens=[512])
    assert explained.schedule.floor is not None
    (head,) = explained.schedule.heads
    assert head.steps == 8 * 8  # of 64 rows x 64 keys
    assert head.clocks == max(64 * explained.schedule.floor.clocks, 4 * explained.schedule.floor.tile_memory)
    assert head.tflops == pytest.approx(4 * head_dim * 512**2 / head.us / 1e6)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_registers_add_up(head_dim: int) -> None:
    actual = explained("causal", head_dim)
    r = actual.registers
    assert r.s + r.p + r.o + r.others == r.consumer
    assert (r.s, r.p) == (actual.plan.tile_n // 2, actual.plan.tile_n // 4)
    assert r.o == actual.plan.columns_v[0].width // 2
    assert r.used == 128 * (r.producer + actual.structure.consumers * r.consumer) <= r.pool <= 65536


CHOICES = [
    ("causal", 128, ""),
    ("causal", 256, ""),
    ("sliding_window", 64, ""),
    ("sliding_window", 128, "    tile: {m: 192, n: 64}\n"),  # skips
    ("dilated", 128, ""),
    ("allowed", 128, ""),
    ("full", 128, "    warps: {consumer: 1}\n    persistent: false\n"),
    ("causal", 128, "    warps: {schedule: cooperative, overlap: false}\n    softmax: lazy\n"),
    ("causal", 64, "    softmax: exact_max\n    layout: varlen\n"),
    ("causal", 128, "    epilogue: direct\n    order: natural\n"),
    ("causal", 128, "    dtype: fp8_e4m3\n"),
    ("sliding_window", 256, "    dtype: fp8_e4m3\n    descale: 128\n"),
    ("causal", 64, "    warps: {overlap: false}\n    epilogue: direct\n    order: natural\n"),
]

BACKWARDS = [
    ("causal", 128, "    passes: backward\n"),
    ("causal", 64, "    passes: backward\n    deterministic: true\n"),
    ("causal", 256, "    passes: backward\n"),
    ("allowed", 192, "    passes: backward\n    deterministic: true\n"),
]


@few(("variant", "head_dim", "more"), CHOICES + BACKWARDS, always=(0, 4, len(CHOICES)))
def test_rings_and_barriers_are_those_of_the_kernel(tmp_path: Path, variant: str, head_dim: int, more: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(spec_text(variant, head_dim, more, "{backend: cuda}" if "backward" in more else "cuda"))
    if "backward" in more:
        path.write_text(path.read_text().replace("    backend:", "    backward:"))
    (explained,) = explain_spec(path, seqlens=[256])
    pipes = explained.schedule.pipes
    assert pipes is not None
    text = render(explained.plan).text
    arrivals = {
        name: (int(count), int(each))
        for name, count, each in re.findall(r"init_barriers\((?:here \+ )?k(\w+), (\d+), (\d+)\);", text)
    }
    listed = list(barriers(pipes))
    told = {
        barrier.name.title().replace("_", ""): (barrier.count, barrier.arrivals)
        for barrier in listed
        if not barrier.named
    }
    assert told == arrivals
    numbers = {
        name.lower(): int(n) for name, n in re.findall(r"^  k(\w+) = (\d+),  // \d+ of them", text, re.MULTILINE)
    }
    assert {barrier.name for barrier in listed if barrier.named} == set(numbers)
    assert ("pingpong" in {barrier.name for barrier in listed if barrier.named}) == ("Named::kPingpong" in text)
    printed = output(path, explained.plan.name, "--seqlen", 256)
    for ring in pipes.rings:
        assert re.search(
            rf"{ring.name} +{ring.stages} x .*{re.escape(ring.writers)} -> {re.escape(ring.readers)}", printed
        )
    for barrier in listed:
        assert re.search(
            rf"{barrier.name} +{barrier.count} x {barrier.arrivals} .*{re.escape(barrier.guards)}", printed
        )
    (kernel,) = json.loads(output(path, explained.plan.name, "--json", "--seqlen", 256))["kernels"]
    assert [one["name"] for one in kernel["pipes"]["rings"]] == [ring.name for ring in pipes.rings]
    assert [one["name"] for one in kernel["pipes"]["barriers"]] == [barrier.name for barrier in listed]


@few(("variant", "head_dim", "more"), CHOICES + BACKWARDS, always=range(0, 999, 4))
def test_registers_of_roles_are_those_of_the_kernel(variant: str, head_dim: int, more: str) -> None:
    """Registers that a warpgroup gives up or takes are those that its role declares; ``setmaxnreg`` is of whole
    warpgroups."""
    choice = (
        spec_text(variant, head_dim, more).replace("backend:", "backward: {backend:") if "backward" in more else None
    )
    text = choice.replace("cuda\n", "cuda}\n", 1) if choice else spec_text(variant, head_dim, more)
    (kernel,) = expand(load_spec_text(text))
    kernel_plan = plan(kernel)
    source = render(kernel_plan).text
    constants = {name: int(value) for name, value in re.findall(r"k(\w+)Registers = (\d+)", source)}
    declared = {role.registers for role in kernel_plan.structure.warp_roles}
    if len(kernel_plan.structure.warp_roles) == 1:
        assert constants == {}  # nobody gives up or takes any
    else:
        assert set(constants.values()) == declared
        used = set(re.findall(r"(?:shrink|grow)_registers<k(\w+)Registers>", source))
        assert used == set(constants)


@few(("variant", "head_dim", "more"), CHOICES, always=range(0, 999, 3))
def test_text_tells_regions_roles_and_order(tmp_path: Path, variant: str, head_dim: int, more: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(spec_text(variant, head_dim, more))
    (explained,) = explain_spec(path, seqlens=[256])
    text = output(path, explained.plan.name, "--seqlen", 256)
    hopper = explained.schedule
    assert isinstance(hopper, HopperExplanation)
    assert hopper.floor is not None
    for region in hopper.structure.shared:
        assert re.search(rf"{region.offset} +{region.bytes}  {region.name} ", text), region
    assert f"{hopper.structure.shared_bytes} B of 232448 B" in text
    assert f"{hopper.structure.consumers} consumer" in text
    assert "producer: warp" in text
    assert ("staged: O goes through shared memory" in text) == hopper.structure.staged
    assert ("longest first" in text) == hopper.structure.longest_first
    assert ("ping-pong" in text) == hopper.structure.pingpong
    assert ("no overlap" in text) != hopper.structure.overlap
    assert ("wait for S(j), PV(j-1)" in text) != hopper.structure.overlap
    assert ("take the turn" in text) == hopper.structure.pingpong
    assert ("grid           persistent" in text) == hopper.structure.persistent
    assert ("a consumer skips tiles" in text) == hopper.structure.skips
    assert f"S {hopper.registers.s} + P {hopper.registers.p} + O {hopper.registers.o}" in text
    assert f"bound by       {hopper.floor.clocks:5d} {hopper.floor.block:6d}" in text
    assert all(rate.source in text for rate in RATES)
    assert "{" not in text


def test_json_has_the_same_numbers(both: Path) -> None:
    kernels = json.loads(output(both, "d128", "--json", "--seqlen", 512))["kernels"]
    assert [("hopper" in kernel, kernel["plan"]["backend"]) for kernel in kernels] == [
        (True, "cuda"),
        (False, "triton"),
    ]
    kernel = kernels[0]
    memory, hopper = kernel["shared_memory"], kernel["hopper"]
    last = memory["regions"][-1]
    assert memory["total"] == last["offset"] + last["bytes"] <= memory["limit"]
    for region, following in zip(memory["regions"], memory["regions"][1:], strict=False):
        assert region["offset"] + region["bytes"] == following["offset"]
        assert region["holds"]
    assert set(hopper) == {"roles", "registers", "loop", "floor"}
    assert set(kernel["pipes"]) == {"rings", "barriers", "roles"}
    assert hopper["roles"]["consumers"] == 2
    assert hopper["roles"]["scheduler_warp"] == 8
    assert hopper["floor"]["consumer"] == {
        "products": 1024, "exponentials": 512, "shared memory": 640, "step": 1024
    }  # fmt: skip
    assert hopper["floor"]["block"]["step"] == 2048
    assert hopper["floor"]["bound_by"] == ["products"]
    assert hopper["floor"]["heads"][0]["steps"] == 2 * 10
    assert set(hopper["loop"]) == {"order", "first tile", "step j", "softmax", "masks", "skips", "boundary", "epilogue"}
    assert "regions" not in kernels[1]["shared_memory"]


def test_both_backends_share_a_table(both: Path) -> None:
    text = output(both, "--seqlen", 256)
    assert (text.count(CUDA), text.count(TRITON)) == (2, 2)
    assert "bound by" in text
    one = output(both, TRITON, "--seqlen", 256)
    for word in ("floor", "roles", "barriers", "CUDA", "persistent"):
        assert word not in one


def test_shared_memory_of_the_table_is_all_of_it(both: Path) -> None:
    for explained in explain_spec(both, CUDA, seqlens=[128]):
        assert explained.plan.structure is not None
        assert explained.shared_bytes == explained.plan.structure.shared_bytes > explained.memory.total
