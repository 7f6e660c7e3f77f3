"""Times of tiles, and the kernels of the shipped spec that calls take by them."""

from __future__ import annotations

import pytest

from attngen import resources
from attngen.build.pipeline import plans
from attngen.lab.bench.small.inputs import call_of
from attngen.lab.bench.small.shapes import Shape
from attngen.lab.verify.interpreter import kernel_of
from attngen.plan.times import MERGE, is_measured, row_time, times_of
from attngen.runtime.geometry.prediction import Card
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.order import preferred
from attngen.schema import load_spec
from attngen.schema.measured_times import measured_times
from tests.plan.specs import kernel_spec, planned
from tests.sampling import few

MULTIPROCESSORS = 132
TIMES = measured_times()


def test_measured_tiles_keep_their_times() -> None:
    for row in TIMES.times:
        assert times_of(*row.sizes, 2) == (TIMES.launch_ns, row.work_tile_ns, row.step_ns)
        assert is_measured(*row.sizes, 2)
        assert not is_measured(*row.sizes, 1)
        shared = times_of(*row.sizes, 2, shared=True)
        assert shared == (TIMES.launch_ns, row.work_tile_ns + MERGE, row.step_ns)


def test_other_tiles_are_scaled_from_the_nearest_one() -> None:
    of_two = {row.columns: row for row in TIMES.times if row.sizes[:2] == (2, 128)}
    rivals = [row for row in TIMES.times if (row.warps.consumer, row.columns) == (2, 128)]
    near = min(rivals, key=lambda row: row.tile.n)
    twice_the_columns = round(near.step_ns * 2 * 64 / near.tile.n, 1)
    assert times_of(2, 64, 256, 2) == (TIMES.launch_ns, near.work_tile_ns, twice_the_columns)
    assert times_of(2, 128, 96, 2)[2] == pytest.approx(0.75 * of_two[128].step_ns, rel=1e-3)
    assert times_of(2, 64, 64, 2)[2] == pytest.approx(0.5 * of_two[64].step_ns, rel=1e-3)
    assert times_of(2, 128, 128, 1)[2] < of_two[128].step_ns
    assert not is_measured(2, 64, 256, 2)


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    shipped = (plan for _, plan in plans(load_spec(resources.specs_dir() / "hopper.yaml")))
    return [kernel_of(plan) for plan in shipped if plan.layout == "dense" and plan.dtype_name == "bf16"]


@few(
    ("shape", "fastest"),
    [
        (Shape("full", 128, 1, 16, 16, 256, 256), "m64n128s2c1"),
        (Shape("full", 128, 1, 16, 16, 1024, 1024), "m128n128s2c2"),  # 128 tiles: one wave
        (Shape("full", 128, 1, 16, 16, 777, 777), "m128n112s2c2"),  # seven steps of either, and these are shorter
        (Shape("full", 128, 1, 16, 16, 1000, 1000), "m128n112s2c2"),
        (Shape("full", 128, 1, 16, 16, 560, 560), "m128n112s2c2"),
        (Shape("full", 128, 1, 16, 16, 1536, 1536), "m192n80s2c3"),  # 128 tiles of 192 rows: one wave
        (Shape("full", 128, 1, 16, 16, 2048, 2048), "m128n128s2c2"),  # two waves of either tile
        (Shape("full", 128, 1, 8, 1, 4096, 4096), "m128n128s2c2"),
        (Shape("full", 128, 1, 16, 16, 128, 8192), "m128n128s3c2_shared"),  # 16 tiles, and 8 blocks for each
        (Shape("causal", 64, 1, 32, 8, 128, 8192), "m128n128s4c2_shared"),
        (Shape("causal", 128, 1, 8, 1, 256, 4096), "m128n128s3c2_shared"),
        (Shape("full", 128, 1, 32, 8, 512, 8192), "m128n128s2c2"),  # 128 tiles, which fill the card
        (Shape("full", 128, 1, 8, 1, 1024, 1024), "m64n128s2c1"),  # eight steps, of which half cost what a merge does
        (Shape("full", 128, 16, 16, 16, 1024, 1024), "m128n128s2c2"),  # 16 waves of short tiles
        (Shape("full", 128, 4, 16, 16, 4096, 4096), "m192n80s2c3"),
        (Shape("causal", 128, 1, 16, 16, 256, 256), "m64n128s2c1"),
        (Shape("causal", 128, 1, 16, 16, 2048, 2048), "m128n128s2c2"),
        (Shape("causal", 128, 4, 16, 16, 4096, 4096), "m128n128s2c2"),  # 192 rows lose two steps where tiles are short
        (Shape("causal", 128, 1, 16, 16, 16384, 16384), "m192n80s2c3"),
        (Shape("sliding_window", 128, 1, 32, 8, 16384, 16384), "m192n64s2c3_pack"),
        (Shape("sliding_window", 128, 1, 32, 8, 8192, 8192), "m192n64s2c3_pack"),
        (Shape("sliding_window", 128, 1, 16, 16, 16384, 16384), "m128n128s2c2"),
        (Shape("sliding_window", 128, 1, 8, 8, 2048, 2048), "m128n128s2c2"),
        (Shape("sliding_window", 64, 1, 8, 8, 2048, 2048), "m128n128s2c2"),  # 128 tiles: one wave
        (Shape("sliding_window", 64, 1, 64, 16, 16384, 16384), "m192n64s2c3_pack"),
        (Shape("sliding_window", 64, 1, 64, 64, 16384, 16384), "m192n128s2c3"),
        (Shape("full", 64, 1, 32, 32, 256, 256), "m64n128s2c1"),
        (Shape("full", 64, 1, 32, 32, 1024, 1024), "m128n128s2c2"),
        (Shape("full", 64, 1, 32, 32, 4096, 4096), "m192n128s2c3"),
        (Shape("causal", 64, 1, 32, 32, 1024, 1024), "m128n128s2c2"),
    ],
    ids=lambda value: getattr(value, "name", None),
    always=range(0, 999, 3),
)
def test_calls_take_the_kernel_that_was_fastest(kernels: list[Kernel], shape: Shape, fastest: str) -> None:
    own = [kernel for kernel in kernels if kernel.variant_name == shape.variant]
    call = call_of(shape, own[0].variant)
    assert preferred(own, call, Card(MULTIPROCESSORS))[0].name.endswith(fastest)


_OWN = "variants:\n  own:\n    mask: {mask}\n{more}"


@pytest.mark.parametrize(
    ("mask", "head_dim", "tile"),
    [
        ('"0 <= q_pos - kv and q_pos - kv < 256"', 64, (128, 128)),  # no tile of keys that 192 rows see as a whole
        ('"0 <= q_pos - kv and q_pos - kv < 1024"', 64, (128, 128)),
        ('"0 <= q_pos - kv and q_pos - kv < 4096"', 64, (192, 128)),
        ('"abs(q_pos - kv) < window"', 64, (192, 128)),  # assumed to be a share of the keys
        ('"0 <= q_pos - kv and q_pos - kv < 256"', 128, (128, 128)),
        ('"abs(q_pos - kv) < window"', 128, (128, 128)),
        ('"q_pos >= kv and (kv < 4 or q_pos - kv < 1024)"', 128, (128, 128)),
        ('"abs(q_pos - kv) < window"', 256, (128, 64)),
        ('"q_pos // 512 >= kv // 512"', 64, (192, 128)),
        ('"q_pos // 512 >= kv // 512"', 128, (128, 128)),
        ('"q_pos >= kv and q_pos // 512 == kv // 512"', 64, (128, 128)),  # 192 rows lie in two chunks
    ],
)
def test_windows_take_the_tile_whose_rows_should_take_less_time(
    mask: str, head_dim: int, tile: tuple[int, int]
) -> None:
    more = "    scalars: {window: {type: int32, min: 1}}\n" if "window" in mask else ""
    one = planned("own", declared=_OWN.format(mask=mask, more=more), head_dim=head_dim, backend="cuda")
    assert (one.tile_m, one.tile_n) == tile


def test_time_of_a_row_by_hand() -> None:
    spec = kernel_spec("own", declared=_OWN.format(mask='"0 <= q_pos - kv and q_pos - kv < 1024"', more=""))
    of = {row.sizes: row for row in TIMES.times}
    wide, narrow = of[2, 128, 128], of[3, 64, 128]
    assert row_time(spec, 2, 128, 128) == pytest.approx((wide.work_tile_ns + 9 * wide.step_ns) / 128)
    assert row_time(spec, 3, 64, 128) == pytest.approx((narrow.work_tile_ns + (19 + 2) * narrow.step_ns) / 192)
    ids = "    tensors: {ids: {dtype: int32, shape: [b, seqlen_k], monotone: {axis: 1}}}\n"
    documents = kernel_spec("own", declared=_OWN.format(mask='"ids[b, q_pos] == ids[b, kv]"', more=ids))
    assert row_time(documents, 2, 128, 128) is None
