"""Appending to caches: against a loop over tokens, with rotations against complex numbers; bad places; programs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from tests.runtime.pages import starts_of
from tests.runtime.support import FakeDriver
from tests.sampling import few, sampled

LENGTHS = (5, 0, 16, 3)  # of four sequences before
PAGE_SIZE, PAGES, HEADS, DIM, DIM_V = 4, 24, 2, 16, 8


def turned(x: Tensor, cos: Tensor, sin: Tensor, position: int, *, interleaved: bool) -> Tensor:
    """Return (heads, head_dim) rotated: pairs are complex numbers, multiplied by one of length 1."""
    half = cos.shape[1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    pairs = torch.complex(x[:, first].double(), x[:, second].double())
    pairs = pairs * torch.complex(cos[position].double(), sin[position].double())
    rotated = x.double().clone()
    rotated[:, first], rotated[:, second] = pairs.real, pairs.imag
    return rotated.to(x.dtype)


def table_of(chance: random.Random) -> Tensor:
    order = chance.sample(range(PAGES), PAGES)
    return torch.tensor([[order.pop() for _ in range(6)] for _ in LENGTHS], dtype=torch.int32)


def angles(half: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    turns = torch.outer(torch.arange(64.0), 1.0 / 10 ** (torch.arange(half) / max(half, 1)))
    return turns.cos().to(dtype), turns.sin().to(dtype)


@sampled(
    rotation=[(0, False, None), (8, False, None), (8, True, None), (3, False, (9, 0, 2, 30)), (5, True, (9, 0, 2, 30))],
    where=["pages", "slots", "dense", "index"],
    page_layout=["NHD", "HND"],
    news=[(1, 1, 1, 1), (3, 3, 3, 3), (5, 0, 1, 7)],
)
def test_new_tokens_stand_where_they_belong(
    rotation: tuple[int, bool, tuple[int, ...] | None], where: str, page_layout: str, news: tuple[int, ...]
) -> None:
    """Every number of the cache is checked, so that nothing else was written."""
    half, interleaved, offsets = rotation
    torch.manual_seed(2)
    chance = random.Random(1)
    packed = len(set(news)) > 1
    tokens = sum(news)
    k, v, q = (torch.randn(tokens, h, d) for h, d in ((HEADS, DIM), (HEADS, DIM_V), (6, DIM)))
    table = table_of(chance)
    shape = (PAGES, PAGE_SIZE) if where in ("pages", "slots") else (6, 23)
    caches = [torch.randn(*shape, HEADS, width) for width in (DIM, DIM_V)]
    index = torch.tensor([4, 0, 5, 2], dtype=torch.int32)
    slots = torch.tensor(chance.sample(range(PAGES * PAGE_SIZE), tokens))
    slots[0] = -1
    cos, sin = angles(half)
    wanted, wanted_q = [c.clone() for c in caches], q.clone()
    starts = starts_of(news)
    for b, new in enumerate(news):
        for j in range(new):
            token, position = int(starts[b]) + j, LENGTHS[b] + j
            place = {
                "pages": (int(table[b, position // PAGE_SIZE]), position % PAGE_SIZE),
                "slots": divmod(int(slots[token]), PAGE_SIZE),
                "dense": (b, position),
                "index": (int(index[b]), position),
            }[where]
            at = (offsets or LENGTHS)[b] + j
            wanted_q[token] = turned(q[token], cos, sin, at, interleaved=interleaved)
            if where == "slots" and slots[token] < 0:
                continue
            wanted[0][place] = turned(k[token], cos, sin, at, interleaved=interleaved)
            wanted[1][place] = v[token]
    given: dict[str, Any] = {
        "pages": {"page_table": table},
        "slots": {"slots": slots.int() if half else slots},
        "dense": {},
        "index": {"batch_index": index},
    }[where]
    if packed:
        given["cu_seqlens"] = starts
    else:
        k, v, q = (t.unflatten(0, (4, -1)) for t in (k, v, q))
        given = {n: t.unflatten(0, (4, -1)) if n == "slots" else t for n, t in given.items()}
    if half:
        given |= {"q": q, "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    if offsets:
        given["rotary_offsets"] = torch.tensor(offsets, dtype=torch.int32)
    theirs = [c.transpose(1, 2).contiguous() if page_layout == "HND" else c for c in caches]
    before = torch.tensor(LENGTHS, dtype=torch.int32)
    rotated = attngen.append_kv(k, v, *theirs, before, page_layout=page_layout, **given)
    for cache, whole in zip(theirs, wanted, strict=True):
        torch.testing.assert_close(cache.transpose(1, 2) if page_layout == "HND" else cache, whole)
    assert before.tolist() == list(LENGTHS)
    if half:
        assert rotated is not None
        torch.testing.assert_close(rotated.reshape(wanted_q.shape), wanted_q)
    else:
        assert rotated is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rotations_are_computed_in_float32(dtype: torch.dtype) -> None:
    """Rounded once: as the exact product, rounded."""
    torch.manual_seed(0)
    k, cos_sin = (
        torch.randn(8, 2, 1, DIM).to(dtype),
        angles(DIM // 2, dtype if dtype == torch.float64 else torch.float32),
    )
    cache = torch.zeros(8, 40, 1, DIM, dtype=dtype)
    attngen.append_kv(
        k, k, cache, cache.clone(), torch.arange(8, dtype=torch.int32), rotary_cos=cos_sin[0], rotary_sin=cos_sin[1]
    )
    for b in range(8):
        for j in range(2):
            exact = turned(k[b, j].double(), *cos_sin, b + j, interleaved=False)
            torch.testing.assert_close(cache[b, b + j].double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_rotated_queries_go_where_the_caller_says() -> None:
    k, q = torch.randn(2, 1, 1, DIM), torch.randn(2, 1, 3, DIM)
    cos, sin = angles(4)

    def append(**more: Any) -> Any:
        caches = [torch.zeros(2, 9, 1, DIM) for _ in range(2)]
        used = torch.tensor([1, 5], dtype=torch.int32)
        return attngen.append_kv(k, k, *caches, used, rotary_cos=cos, rotary_sin=sin, **more)

    wanted = append(q=q)
    assert wanted is not q
    memory = torch.zeros(2, 1, 5, DIM)[:, :, 1:4]
    assert append(q=q, q_out=memory) is memory
    assert torch.equal(memory, wanted)
    kept = q.clone()
    assert append(q=q, q_out=q) is q
    assert torch.equal(q, wanted)
    assert not torch.equal(q, kept)


def test_appended_tokens_are_seen() -> None:
    """Token by token, as a decode loop does it, gives what one causal call over all tokens gives."""
    torch.manual_seed(6)
    from tests.runtime.support import variant

    causal = variant()
    steps, cos_sin = 11, angles(8)
    q, k, v = (torch.randn(2, steps, h, DIM) for h in (4, HEADS, HEADS))
    table = torch.tensor([[3, 0, 9], [7, 5, 1]], dtype=torch.int32)
    pages = [torch.full((10, PAGE_SIZE, HEADS, DIM), torch.nan) for _ in range(2)]
    lengths = torch.zeros(2, dtype=torch.int32)
    outs = []
    for t in range(steps):
        here = slice(t, t + 1)
        turned_q = attngen.append_kv(
            k[:, here], v[:, here], *pages, lengths, page_table=table, q=q[:, here], rotary_cos=cos_sin[0],
            rotary_sin=cos_sin[1],
        )  # fmt: skip
        assert turned_q is not None
        lengths += 1
        outs.append(attngen.attention_paged(turned_q, *pages, table, lengths, variant=causal))
    whole = [torch.zeros(2, steps, HEADS, DIM) for _ in range(2)]
    whole_q = attngen.append_kv(
        k, v, *whole, torch.zeros(2, dtype=torch.int32), q=q, rotary_cos=cos_sin[0], rotary_sin=cos_sin[1]
    )
    assert whole_q is not None
    torch.testing.assert_close(torch.cat(outs, dim=1), attngen.attention(whole_q, *whole, variant=causal))


def test_rows_behind_the_last_sequence_are_not_written() -> None:
    k, cache = torch.ones(5, 1, DIM), torch.zeros(2, 8, 1, DIM)
    attngen.append_kv(k, k, cache, cache.clone(), torch.zeros(2, dtype=torch.int32), cu_seqlens=starts_of([1, 2]))
    assert cache.sum(dim=(1, 2, 3)).tolist() == [DIM, 2 * DIM]


@pytest.mark.parametrize("shape", [(0, 3, 1, DIM), (3, 0, 1, DIM)])
def test_nothing_to_append(shape: tuple[int, ...]) -> None:
    k, cache = torch.ones(shape), torch.zeros(4, 8, 1, DIM)
    cos, sin = angles(8)
    used = torch.zeros(shape[0], dtype=torch.int32)
    rotated = attngen.append_kv(k, k, cache, cache.clone(), used, q=k, rotary_cos=cos, rotary_sin=sin)
    assert rotated is not None
    assert rotated.shape == shape
    assert (cache == 0).all()


# --- places that are none ------------------------------------------------------------------------------------


def misplaced(where: str) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """Return a call whose second sequence has no place, and what is said."""
    k, cache = torch.ones(2, 2, 1, DIM), torch.zeros(6, 4, 1, DIM)
    used = torch.tensor([1, 3], dtype=torch.int32)
    table = torch.tensor([[2, 9], [4, 9]], dtype=torch.int32)
    return {
        "page": ((k, k, cache, cache.clone(), used), {"page_table": table}, "token 1 of sequence 1 has no .* page 9,"),
        "table": (
            (k, k, cache, cache.clone(), used), {"page_table": table[:, :1]},
            "token 1 of sequence 1 has no place: .*; a row of page_table holds 4 keys",
        ),
        "dense": ((k, k, cache, cache.clone(), used), {}, "token 1 of sequence 1 has no place: row 4 of 1, where"),
        "index": (
            (k, k, cache, cache.clone(), used - 1), {"batch_index": torch.tensor([0, 6], dtype=torch.int32)},
            "token 0 of sequence 1 has no place: row 2 of 6, where the cache has 6 times 4 rows",
        ),
        "slot": (
            (k, k, cache, cache.clone()), {"slots": torch.tensor([[5, 6], [23, 24]])},
            "token 1 of sequence 1 has no place",
        ),
        "negative": ((k, k, cache, cache.clone(), used - 3), {}, "token 0 of sequence 0 has no place: row -2 of 0"),
    }[where]  # fmt: skip


@pytest.mark.parametrize("where", ["page", "table", "dense", "index", "slot", "negative"])
def test_a_place_outside_is_an_error_on_the_cpu(where: str) -> None:
    given, more, message = misplaced(where)
    with pytest.raises(CallError, match=message):
        attngen.append_kv(*given, **more)
    assert (given[2] == 0).all(), "nothing is written before the check"


@pytest.mark.parametrize("where", ["page", "table", "dense", "index", "slot", "negative"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_place_outside_is_not_written_where_nothing_is_read_back(
    where: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tokens are written, and nothing else is, as on a GPU; if all are lost, nothing at all."""
    from attngen.runtime.operations.append import in_torch as append_torch

    given, more, _ = misplaced(where)
    wanted = given[2].clone()
    tokens = {
        "page": [(2, 1), (2, 2), (4, 3)], "table": [(2, 1), (2, 2), (4, 3)], "dense": [(0, 1), (0, 2), (1, 3)],
        "index": [(0, 0), (0, 1)], "slot": [(1, 1), (1, 2), (5, 3)], "negative": [(1, 0), (1, 1)],
    }[where]  # fmt: skip
    if lost:
        given = (*given[:4], torch.full((2,), -9, dtype=torch.int32)) if len(given) > 4 else given
        more = {**more, "slots": torch.full((2, 2), 10**6)} if where == "slot" else more
        tokens = []
    for place in tokens:
        wanted[place] = 1
    monkeypatch.setattr(append_torch, "check_contents", lambda *given: None)
    attngen.append_kv(*given, **more)
    assert torch.equal(given[2], wanted)
    assert torch.equal(given[3], wanted)


def test_positions_beyond_the_rotation_are_named() -> None:
    k, cache = torch.ones(2, 2, 1, DIM), torch.zeros(2, 90, 1, DIM)
    cos, sin = angles(8)
    with pytest.raises(CallError, match="token 1 of sequence 1 has position 64, but rotary_cos has 64"):
        attngen.append_kv(
            k, k, cache, cache.clone(), torch.tensor([1, 63], dtype=torch.int32), rotary_cos=cos, rotary_sin=sin
        )


_K, _CACHE, _USED = torch.zeros(2, 3, 2, DIM), torch.zeros(5, 4, 2, DIM), torch.zeros(2, dtype=torch.int32)
_COS = angles(8)[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": _K[0]}, r"k must have 4 dimensions \(batch x seqlen_new x heads x head_dim\)"),
        ({"v": _K[:, :2]}, r"k has shape \(2, 3, 2, 16\), but v has \(2, 2, 2, 16\); both must hold the same tokens"),
        ({"v": _K[:, :, :1], "v_cache": _CACHE[:, :, :1]}, "k has 2 heads, but v has 1"),
        ({"k_cache": _CACHE.half()}, "k has torch.float32 on cpu, but k_cache has torch.float16 on cpu"),
        ({"v_cache": _CACHE.to("meta")}, "but v_cache has torch.float32 on meta"),
        ({"k_cache": _CACHE[..., :8]}, "k has 2 heads of 16 numbers, but k_cache has 2 of 8"),
        ({"page_layout": "HND"}, "k has 2 heads of 16 numbers, but k_cache has 4 of 16"),
        ({"page_layout": "HNB"}, "page_layout must be one of NHD, HND, got 'HNB'; did you mean 'HND'"),
        ({"v_cache": _CACHE[:4]}, "k_cache has 5 pages of 4 rows, but v_cache has 4 of 4"),
        ({"cache_seqlens": None}, "cache_seqlens is needed"),
        ({"cache_seqlens": _USED[:1]}, r"cache_seqlens must have shape \(2,\), got \(1,\)"),
        ({"cache_seqlens": _USED.long()}, "cache_seqlens must be an int32 vector"),
        ({"cu_seqlens": _USED}, r"k must have 3 dimensions \(total_new x heads x head_dim with cu_seqlens\)"),
        ({"page_table": _USED}, r"page_table must be int32 with 2 dimensions, got torch.int32 of shape \(2,\)"),
        ({"page_table": _USED[None]}, "page_table has 1 rows, but there are 2 sequences"),
        ({"slots": _USED[None].float()}, "slots must be int32 or int64 with 2 dimensions, got torch.float32"),
        ({"slots": _USED[None]}, r"slots must have shape \(2, 3\), got \(1, 2\)"),
        ({"slots": [[1]]}, "slots must be a torch.Tensor, got list"),
        ({"slots": _USED[None], "page_table": _USED[None]}, "page_table and slots both say where tokens go"),
        ({"batch_index": _USED, "page_table": _USED[:, None]}, "batch_index is for a dense cache"),
        ({"rotary_cos": _COS}, "rotary_cos and rotary_sin must be passed together"),
        ({"rotary_cos": _COS, "rotary_sin": _COS[:3]}, r"rotary_sin must be a float tensor of shape \(64, 8\)"),
        ({"rotary_cos": _COS.int(), "rotary_sin": _COS.int()}, "rotary_cos must be a float tensor"),
        ({"rotary_cos": angles(9)[0], "rotary_sin": angles(9)[1]}, "rotary_cos turns 18 numbers, but head_dim is 16"),
        ({"rotary_interleaved": 1}, "rotary_interleaved must be True or False, got 1"),
        ({"q": _K}, "q is for rotation; pass rotary_cos and rotary_sin"),
        ({"q_out": _K}, "q_out is for the rotated queries; pass q, too"),
        ({"q": _K[..., :8], "rotary_cos": _COS, "rotary_sin": _COS}, "k has head_dim 16, .*, but q has 8"),
        (
            {"q": _K, "q_out": _K[:1], "rotary_cos": _COS, "rotary_sin": _COS},
            r"q_out must be a torch.float32 tensor of shape \(2, 3, 2, 16\) on cpu, got torch.float32 of shape \(1,",
        ),
        (
            {"cache_seqlens": None, "slots": torch.zeros(2, 3).long(), "rotary_cos": _COS, "rotary_sin": _COS},
            "a rotation needs positions: give cache_seqlens or rotary_offsets",
        ),
        ({"k": _K.clone().requires_grad_()}, "append_kv is not differentiable"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(changed: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"k": _K, "v": _K, "k_cache": _CACHE, "v_cache": _CACHE, "cache_seqlens": _USED}
    with pytest.raises(CallError, match=message):
        attngen.append_kv(**{**call, **changed})
    assert (_CACHE == 0).all()


@pytest.mark.exhaustive
@few("backend", ["eager", "aot_eager"], always=(1,))
def test_a_program_compiles_without_a_graph_break(backend: str) -> None:
    cos, sin = angles(8)

    def program(k: Tensor, v: Tensor, q: Tensor, caches: Any, used: Tensor, table: Tensor) -> Any:
        out = attngen.append_kv(k, v, *caches, used, page_table=table, q=q, q_out=q, rotary_cos=cos, rotary_sin=sin)
        assert out is not None
        return out * 2, used + 1

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=True)
    torch.manual_seed(0)
    table = table_of(random.Random(3))
    for turn, new in enumerate((3, 7, 5)):
        k, v, q = (torch.randn(4, new, h, d) for h, d in ((HEADS, DIM), (HEADS, DIM_V), (6, DIM)))
        results = []
        for run in (compiled, program):
            caches = [torch.zeros(PAGES, PAGE_SIZE, HEADS, width) for width in (DIM, DIM_V)]
            rotated = q.clone()
            with torch._dynamo.config.patch(error_on_recompile=turn > 0):
                outputs = run(k, v, rotated, caches, torch.tensor(LENGTHS, dtype=torch.int32), table)
            results.append((*outputs, *caches, rotated))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def test_debug_reads_what_a_gpu_would_not(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the contents are looked at on the CPU alone."""
    from attngen.runtime.operations.append import in_torch as append_torch

    given, more, message = misplaced("dense")
    read: list[int] = []
    check = append_torch.check_contents
    monkeypatch.setattr(append_torch, "check_contents", lambda *given: read.append(1) or check(*given))
    with attngen.debug(), pytest.raises(CallError, match=message):
        attngen.append_kv(*given, **more)
    assert read
    meta = [t.to("meta") for t in given]
    attngen.append_kv(*meta)
    assert len(read) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_place", [False, True])
def test_the_operator_is_as_it_says(in_place: bool) -> None:
    """Schema, fake kernel, and what it writes, as ``torch.library.opcheck`` tests them."""
    from attngen.runtime.operations.append import operator as append_operator

    k, v, q = (torch.randn(4, 2, h, d) for h, d in ((HEADS, DIM), (HEADS, DIM_V), (6, DIM)))
    caches = [torch.zeros(PAGES, PAGE_SIZE, HEADS, width) for width in (DIM, DIM_V)]
    cos, sin = angles(8)
    given = (
        k, v, *caches, torch.tensor(LENGTHS, dtype=torch.int32), table_of(random.Random(3)), None, None, None, "NHD",
        None if in_place else q, q, cos, sin, False, None,
    )  # fmt: skip
    operator = getattr(getattr(torch.ops, append_operator.defined()), append_operator.NAME)
    torch.library.opcheck(operator.default, given)  # on copies
    assert operator(*given) is None
    assert caches[0].any()


def in_8_bits(**changes: Any) -> dict[str, Any]:
    """Return a call over a cache in 8 bits whose pages have scales."""
    torch.manual_seed(3)
    shape = (PAGES, PAGE_SIZE, HEADS)
    given: dict[str, Any] = {
        "k": torch.randn(4, 2, HEADS, DIM).bfloat16(), "v": torch.randn(4, 2, HEADS, DIM_V).bfloat16(),
        "k_cache": torch.zeros(*shape, DIM).to(torch.float8_e4m3fn),
        "v_cache": torch.zeros(*shape, DIM_V).to(torch.float8_e4m3fn),
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32), "page_table": table_of(random.Random(1)),
        "k_descale": torch.rand(PAGES, HEADS) + 0.1, "v_descale": torch.rand(PAGES, HEADS) + 0.1,
    }  # fmt: skip
    return given | changes


@pytest.mark.parametrize("granularity", ["tensor", "head", "page", "page, named"])
def test_a_cache_in_8_bits_holds_what_quantizing_one_in_16_bits_gives(granularity: str) -> None:
    shape: tuple[int, ...] = {"tensor": (), "head": (4, HEADS), "page": (PAGES, HEADS)}.get(
        granularity, (PAGES, HEADS, 1)
    )
    scales = {name: torch.rand(shape) + 0.1 for name in ("k_descale", "v_descale")}
    cos, sin = angles(8)
    given = in_8_bits(**scales, rotary_cos=cos, rotary_sin=sin)
    attngen.append_kv(**given)
    wide = {name: given[name].bfloat16() * 0 for name in ("k_cache", "v_cache")}
    attngen.append_kv(**{name: x for name, x in (given | wide).items() if "descale" not in name})
    for name in "kv":
        scale = scales[f"{name}_descale"]
        for b, length in enumerate(LENGTHS):
            for position in range(length, length + 2):
                page, row = int(given["page_table"][b, position // PAGE_SIZE]), position % PAGE_SIZE
                own = (
                    scale.reshape(-1, HEADS)[page if "page" in granularity else b]
                    if scale.dim()
                    else scale.expand(HEADS)
                )
                wanted = (wide[f"{name}_cache"][page, row].float() / own[:, None]).clamp(-448, 448)
                assert torch.equal(given[f"{name}_cache"][page, row].float(), wanted.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_descale": None}, r"k_descale is missing: a cache in 8 bits needs a scale"),
        ({"k_descale": torch.ones(4, HEADS)}, r"k_descale must be float32 .* both of pages where one is"),
        ({"v_descale": torch.ones(PAGES, HEADS).double()}, "v_descale must be float32"),
        ({"v_descale": torch.full((PAGES, HEADS), torch.nan)}, "a scale is finite and positive"),
        ({"v_cache": torch.zeros(PAGES, PAGE_SIZE, HEADS, DIM_V)}, "e4m3fn, but v_cache has torch.float32"),
        ({"k_cache": torch.zeros(PAGES, PAGE_SIZE, HEADS, DIM).to(torch.float8_e5m2)}, "k has torch.bfloat16 on cpu"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError, match=message):
        attngen.append_kv(**in_8_bits(**changes))


def test_a_cache_of_16_bits_has_no_scales() -> None:
    wide = {name: in_8_bits()[name].bfloat16() for name in ("k_cache", "v_cache")}
    with pytest.raises(CallError, match="k_descale is for a cache in 8 bits, but k_cache has torch.bfloat16"):
        attngen.append_kv(**in_8_bits(**wide))
