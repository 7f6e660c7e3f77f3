"""Batches that decode beside prompts: two launches, with the results of one; and calls for which nothing changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.arguments import debug, seen
from attngen.runtime.arguments.given import Given
from attngen.runtime.device import driver as drivers
from attngen.runtime.operations.attention import mixed as mixed_calls
from attngen.runtime.operations.attention import pairs
from attngen.runtime.operations.attention.beside import Division
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.pages import cache, starts_of
from tests.runtime.support import FakeDriver, kernel, kernel_of, main_of, manifest_of, variant, window_variant

FLAGGED = variant("flagged", "q_pos >= kv or flag[b] == 0", tensors=[Declared("flag", "int32", ("b",))])
LENGTHS, ROWS = [40, 7, 9, 33, 21], [1, 1, 0, 12, 3]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(debug, "check_lengths", lambda call: None)  # tensors on the CPU stand for some on a GPU
    kernels = [kernel(one, layout="paged") for one in (variant(), window_variant(), FLAGGED)]
    registry.add(package_of_kernels(kernels, "memory"))


def mixed(**changed: Any) -> dict[str, Any]:
    c = cache(LENGTHS, 16, head_dim=64, dtype=torch.bfloat16)
    return {
        "q": torch.randn(sum(ROWS), 4, 64).bfloat16(), "k_pages": c.k_pages, "v_pages": c.v_pages,
        "page_table": c.page_table, "seqused_k": c.seqused_k, "cu_seqlens_q": starts_of(ROWS),
        "max_seqlen_q": max(ROWS), "num_decodes": 3, "variant": "causal", **changed,
    }  # fmt: skip


def launched(gpu: FakeDriver, given: dict[str, Any]) -> list[tuple[int, int]]:
    """Sequences and the longest queries of each launch of a call, whose results are those of the reference."""
    gpu.launches.clear()
    results = attngen.attention_paged(**given)
    wanted = attngen.attention_paged(**given, backend="reference")
    for ours, reference in zip(*((x if isinstance(x, tuple) else (x,)) for x in (results, wanted)), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-6)
    return [(launch.values["batch"], launch.values["seqlen_q"]) for launch in gpu.launches]


def test_two_launches(gpu: FakeDriver) -> None:
    for _ in range(4):
        assert launched(gpu, mixed()) == [(3, 1), (2, 12)]
    out = torch.full((sum(ROWS), 4, 64), 7.0).bfloat16()
    given = mixed(out=out, variant="window", window=5, softmax_scale=0.3)
    assert launched(gpu, given) == [(3, 1), (2, 12)]
    assert attngen.attention_paged(**given) is out


@pytest.mark.parametrize(
    "changed",
    [
        {"num_decodes": 0}, {"num_decodes": None}, {"return_lse": True}, {"num_splits": 1},
        {"variant": "flagged", "flag": torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)},
    ],
    ids=["no decode", "left out", "lse", "splits", "a tensor of sequences"],
)  # fmt: skip
def test_one_launch(gpu: FakeDriver, changed: dict[str, Any]) -> None:
    assert launched(gpu, mixed(**changed)) == [(5, 12)]


def by_length(**changed: Any) -> dict[str, Any]:
    """A call that does not say which of its sequences decode; those of at most four queries do."""
    rows = changed.pop("rows", [1, 70, 0, 1, 4, 5])
    c = cache([40, 90, 9, 33, 21, 6], 16, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    return {
        "q": torch.randn(sum(rows), 8, 64).bfloat16(), "k_pages": c.k_pages, "v_pages": c.v_pages,
        "page_table": c.page_table, "seqused_k": c.seqused_k, "cu_seqlens_q": starts_of(rows),
        "max_seqlen_q": max(rows), "variant": "causal", **changed,
    }  # fmt: skip


def leaving_out(one: Any, *bounds: str, **fields: Any) -> Any:
    """A kernel that takes a limit of the queries of sequences, and maybe whether it runs beside another launch."""
    manifest = manifest_of(one, layout="paged", **fields)
    main = main_of(manifest)
    main["pdl"] = "beside" in bounds
    main["parameters"] += [{"name": of, "kind": "size", "type": "i32", "of": of, "axis": None} for of in bounds]
    return kernel_of(manifest)


def test_kernels_find_sequences_by_length(gpu: FakeDriver) -> None:
    registry.clear()
    few, many = leaving_out(variant(), "most_queries", split_kv=True), leaving_out(variant(), "least_queries")
    registry.add(package_of_kernels([few, many], "memory"))
    for _ in range(4):
        assert launched(gpu, by_length()) == [(6, 4), (6, 70)]
    assert [launch.values.get("most_queries") for launch in gpu.launches] == [4, None]
    assert [launch.values.get("least_queries") for launch in gpu.launches] == [None, 5]
    out = torch.full((81, 8, 64), 7.0).bfloat16()
    assert attngen.attention_paged(**by_length(out=out)) is out
    for changed in (
        {"return_lse": True}, {"num_splits": 1}, {"max_seqlen_q": 16, "rows": [1, 16, 0, 1, 4, 5]},
        {"rows": [30, 40, 35, 40, 40, 21]},
    ):  # fmt: skip
        assert len(launched(gpu, by_length(**changed))) == 1, changed


@pytest.mark.skipif(seen._TensorGuards is None, reason="torch has no check of tensors")
def test_batches_are_recognized_as_a_whole(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of any sizes launch what the first ones did, without calls of their own; some need a look and get it."""
    registry.clear()
    few = leaving_out(variant(), "most_queries", "beside", split_kv=True)
    registry.add(package_of_kernels([few, leaving_out(variant(), "least_queries", "beside")], "memory"))
    whole: list[Any] = []
    real = mixed_calls.attend_by_length

    def noted(run: Any, few: int, given: Given) -> Any:
        whole.append(given)
        return real(run, few, given)

    monkeypatch.setattr(mixed_calls, "attend_by_length", noted)
    rng = random.Random(3)
    for turn in range(24):
        rows = [rng.choice([0, 1, 1, 3, 4]) for _ in range(rng.randint(2, 5))]
        told = None if turn % 3 else 1
        rows.insert(rng.randrange(1, len(rows)), rng.randint(40, 70))
        rows[0] = min(rows[0], told or 4)
        c = cache([max(n, rng.randint(1, 90)) for n in rows], 16, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
        shared = {"k_pages": torch.randn(40, 16, 2, 64).bfloat16(), "v_pages": torch.randn(40, 16, 2, 64).bfloat16()}
        q = torch.randn(sum(rows), 8, 64).bfloat16()
        given = {
            "q": q, **shared, "page_table": c.page_table % 40, "seqused_k": c.seqused_k, "softmax_scale": 0.1 + turn,
            "cu_seqlens_q": starts_of(rows), "max_seqlen_q": max(rows) + turn % 2, "variant": "causal",
            "num_decodes": told,
            "out": torch.full_like(q, 7.0) if turn % 2 else None,
        }  # fmt: skip
        whole.clear()
        assert [one for one, _ in launched(gpu, given)] == [len(rows)] * 2
        assert bool(whole) is (turn < 4), turn
        if not whole:
            assert [launch.values["beside"] for launch in gpu.launches] == [1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(pairs, "in_graph", lambda stream: True)  # which the default stream, as here, cannot record
        launched(gpu, given)
        assert whole
        assert [launch.values["beside"] for launch in gpu.launches] == [0, 0]
    for change in (
        {"seqused_k": given["seqused_k"][:-1]}, {"cu_seqlens_q": given["cu_seqlens_q"][1:]}, {"out": q[:-1].clone()},
        {"max_seqlen_q": 70.0},
    ):  # fmt: skip
        with pytest.raises(CallError):
            attngen.attention_paged(**given | change)


def test_decodes_at_the_end(gpu: FakeDriver) -> None:
    rows = [12, 3, 1, 1, 0]
    given = mixed(cu_seqlens_q=starts_of(rows), num_decodes=-3)
    for _ in range(3):
        assert launched(gpu, given) == [(3, 1), (2, 12)]
    with attngen.debug(), pytest.raises(CallError, match="num_decodes is -4, but sequence 1 has 3 queries"):
        attngen.attention_paged(**given | {"num_decodes": -4})


def test_vectors_of_another_batch_are_divided_anew(gpu: FakeDriver) -> None:
    given = mixed()
    assert launched(gpu, given) == [(3, 1), (2, 12)]
    given["seqused_k"].copy_(given["seqused_k"].flip(0))  # in place: another batch in the same memory
    given["page_table"].copy_(given["page_table"].flip(0))
    assert launched(gpu, given) == [(3, 1), (2, 12)]
    lengths = given["seqused_k"].clamp(max=7)
    shared = torch.stack([lengths, lengths // 2], dim=1)
    launched(gpu, given | {"seqused_k": shared.flatten()[:5]})
    with pytest.raises(CallError, match="contiguous"):  # at the same address
        attngen.attention_paged(**given | {"seqused_k": shared[:, 0]})


@pytest.mark.parametrize(
    ("decodes", "tokens", "part"),
    [(256, 1024, 0), (128, 2048, 5), (40, 2048, 2), (64, 8192, 2), (16, 4096, 0), (4, 8, 0)],
)
def test_what_decoding_leaves_to_prompts(decodes: int, tokens: int, part: int) -> None:
    class Hopper(FakeDriver):
        def multiprocessors(self, device: int) -> int:
            return 132

        def bandwidth(self, device: int) -> float:
            return 4800.0

    q, k = torch.empty(decodes + tokens, 32, 128, device="meta"), torch.empty(9, 16, 8, 128, device="meta")
    with drivers.use(Hopper()):
        given = Given(q.bfloat16(), k.bfloat16(), k, layout="NHD")
        assert mixed_calls.left_to_prompts(given.q, decodes + tokens, given.k, given.layout, decodes) == (
            132 // part if part else 0
        )


@pytest.mark.parametrize(
    ("decodes", "tokens", "sides"),
    [
        (32, 512, (True, 66, 66)), (128, 512, (True, 528, 66)), (128, 2048, (True, 66, 66)),
        (200, 1100, (True, 264, 66)), (64, 64, (True, 928, 16)), (16, 4096, (False, 66, 132)),
        (40, 2048, (False, 66, 132)), (8, 256, (False, 132, 132)),
    ],
)  # fmt: skip
def test_how_a_device_is_divided(decodes: int, tokens: int, sides: tuple[bool, int, int]) -> None:
    class Hopper(FakeDriver):
        def multiprocessors(self, device: int) -> int:
            return 132

        def bandwidth(self, device: int) -> float:
            return 3350.0

    q, k = torch.empty(9, 32, 128, device="meta").bfloat16(), torch.empty(9, 16, 8, 128, device="meta").bfloat16()
    with drivers.use(Hopper()):
        assert Division(q, k, "NHD").sides(decodes + tokens, decodes) == sides


def test_all_decode(gpu: FakeDriver) -> None:
    rows = [1] * 5
    given = mixed(q=torch.randn(5, 4, 64).bfloat16(), cu_seqlens_q=starts_of(rows), max_seqlen_q=1, num_decodes=5)
    assert launched(gpu, given) == [(5, 1)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_decodes": 6}, "num_decodes is 6, but page_table has 5 rows"),
        ({"num_decodes": -6}, "num_decodes is -6, but page_table has 5 rows"),
        ({"num_decodes": True}, "num_decodes must be a Python integer"),
        ({"cu_seqlens_q": None}, "num_decodes goes with cu_seqlens_q"),
        ({"page_table": None}, "page_table must be a torch.Tensor"),
        ({"max_seqlen_q": None}, "max_seqlen_q is needed"),
        ({"variant": "casual"}, "casual"),
    ],
)
def test_errors(gpu: FakeDriver, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        attngen.attention_paged(**mixed(**changed))


def test_contents_are_checked(gpu: FakeDriver) -> None:
    with attngen.debug(), pytest.raises(CallError, match="num_decodes is 4, but sequence 3 has 12 queries"):
        attngen.attention_paged(**mixed(num_decodes=4))
    with attngen.debug():
        assert launched(gpu, mixed()) == [(5, 12)]
