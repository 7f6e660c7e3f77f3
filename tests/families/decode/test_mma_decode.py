"""Plans of the split-KV forward for cards without wgmma: memory of its blocks, pipes, and what is refused."""

from __future__ import annotations

import pytest

from attngen.arch import ARCHES
from attngen.dtypes import HEAD_DIMS
from attngen.errors import PlanError
from attngen.families.decode.pipes import LOADERS, decode_pipes_of
from attngen.families.decode.schedule import HopperDecode
from attngen.plan import Plan, plan
from attngen.render import render
from attngen.schema import expand, load_spec_text
from tests.sampling import sampled

CARDS = ("sm80", "sm86", "sm89", "sm120a")


def planned(entry: str = "variant: causal", arch: str = "sm80", layout: str = "paged", head_dim: object = 128) -> Plan:
    text = (
        f"schema: 1\narch: {arch}\nkernels:\n  - {{split_kv: true, layout: {layout}, head_dim: {head_dim}, {entry}}}\n"
    )
    (kernel,) = (one for one in expand(load_spec_text(text)) if one.split_kv)
    return plan(kernel)


@sampled(always=9, arch=[*CARDS], head_dim=[*HEAD_DIMS, "{qk: 192, v: 128}"])
def test_blocks_fit_the_card(arch: str, head_dim: object) -> None:
    for layout in ("dense", "varlen", "paged"):
        made = planned(arch=arch, head_dim=head_dim, layout=layout)
        own = made.structure
        assert isinstance(own, HopperDecode)
        assert (made.schedule, made.loads, own.cluster) == ("mma_decode", "pointer", 1)
        assert own.shared_bytes <= ARCHES[arch].shared_memory
        assert made.stages >= max(LOADERS, 2 * own.consumers)
        (launch,) = made.launches
        assert launch.pdl == ARCHES[arch].pdl
        assert not [argument for argument in launch.arguments if argument.kind == "descriptor"]


def test_each_lane_of_a_loader_arrives() -> None:
    (ring,) = decode_pipes_of(planned()).rings
    assert ring.full is not None
    assert (ring.full.arrivals, ring.full.bytes) == (32, False)


def test_caches_of_8_bits() -> None:
    for arch in ("sm89", "sm120a"):
        assert planned("variant: causal, kv_dtype: fp8_e4m3", arch).operands.k.name == "fp8_e4m3"
    for entry, arch, head_dim, message in (
        ("kv_dtype: fp8_e4m3", "sm86", 128, "kv_dtype: .*sm86 does not convert numbers of 8 bits"),
        ("kv_dtype: fp8_e4m3", "sm89", 72, "head_dim: .*multiples of 16"),
        ("kv_dtype: fp8_e4m3, descale: page", "sm89", 128, "descale: .*a scale of each head"),
        ("dtype: fp32", "sm80", 128, "dtype: .*found fp32"),
        ("loads: descriptor", "sm80", 128, "loads: .*load by cp.async"),
        ("alignment: element", "sm80", 128, "alignment: .*copies 16 bytes"),
        ("tile_map: always", "sm80", 128, "tile_map: .*classify tiles themselves"),
    ):
        with pytest.raises(PlanError, match=message):
            planned(f"variant: causal, {entry}, backend: cuda", arch, head_dim=head_dim)


def test_hopper_takes_it_if_asked_for() -> None:
    made = planned("variant: causal, loads: pointer", "sm90a")
    assert (made.schedule, made.num_warps) == ("mma_decode", 8 + LOADERS)
    assert planned(arch="sm90a").schedule == "hopper_decode"


@pytest.mark.parametrize("arch", ["sm80", "sm120a"])
def test_the_text_has_no_instruction_that_the_card_lacks(arch: str) -> None:
    text = render(planned(arch=arch)).text
    assert "cluster.cuh" not in text
    assert "tma.cuh" not in text
    assert ("wait_dependencies" in text) == (arch == "sm120a")
    assert "arrive_when_copied(full);" in text
