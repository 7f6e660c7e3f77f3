"""``torch.set_default_device`` and ``torch.set_default_dtype`` change no result: every call here runs with the default
device 'meta', where a tensor of torch's choice would have no numbers, and with other default dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import attngen
from attngen import parallel
from attngen.integrations import block_sparse_attn, cudnn, cuequivariance, fastvideo, sdpa
from attngen.integrations.flash_attn import bert_padding
from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.integrations.flash_attn import v3 as flash_attn_3
from attngen.integrations.flash_attn import v4 as flash_attn_4
from attngen.integrations.flash_mla import functions as flash_mla
from attngen.integrations.flex.attention import AuxRequest, create_block_mask, flex_attention
from attngen.integrations.natten import functions as natten
from attngen.integrations.sageattention import functions as sageattention
from tests.sampling import few, sampled

Q, K, V = (torch.randn(2, n, h, 16) for n, h in ((9, 4), (12, 2), (12, 2)))
HEADS_FIRST = [x.transpose(1, 2) for x in (Q, K, V)]
LONG, ROW, PAGES = torch.randn(2, 8, 4, 64), torch.randn(2, 1, 4, 64), torch.randn(6, 16, 2, 64)
STARTS_Q, STARTS_K = torch.tensor([0, 4, 9]).int(), torch.tensor([0, 5, 12]).int()
TABLE, LENGTHS, USED = torch.tensor([[0, 1], [2, 3]]).int(), torch.tensor([20, 9]).int(), torch.tensor([12, 7]).int()
SLOPES, STATE, ANGLES = torch.rand(4), torch.tensor([3, 8]), torch.randn(64, 32)
DOC, LOG_SUMS = (torch.arange(12) // 5).int().expand(2, 12), torch.zeros(2, 4, 9)
ALLOWED = torch.rand(9, 12) < 0.5
PADDING = (torch.arange(9) < torch.tensor([[9], [5]])).int()
INDEXED = torch.randn(1, 4, 2, 128), torch.randn(1, 4, 128), torch.randn(1, 4, 2)
LATENTS, LATENT_Q = torch.randn(2, 64, 1, 576), torch.randn(1, 1, 2, 576)
NUMBERS = torch.randn(2, 20)
TRIANGLES, TRIANGLE_BIAS = torch.randn(3, 2, 4, 5, 16), torch.randn(1, 4, 5, 5)
SINGLES, PAIRS, OF_PAIRS, WEIGHTS = (torch.randn(size) for size in ((2, 5, 8), (1, 5, 5, 6), (4, 6), (8, 8)))
VIDEO, TILES = torch.randn(1, 2, 192, 16), torch.tensor([64, 64, 9])
TYPES, STREAMS = torch.tensor([1, -1, 0, 1]).int(), torch.ones(8).int()
LISTS, SIZED = torch.zeros(1, 1, 1, 1).int(), torch.tensor([10]).int()

BIASED = attngen.variant(mask="kv / 3 <= q + 1", score="s + kv / (q + 2) + sqrt(kv) * slope[h]", sink="h / 3",
                         tensors={"slope": {"dtype": "float32", "shape": ["h"], "grad": True}})  # fmt: skip
DROPPING = attngen.variant("q_pos >= kv", dropout=True, name="dropping")
OF_BATCH = {"dtype": "int32", "shape": ["b", "seqlen_k"], "range": {"min": 0}}
DOCUMENTS = attngen.variant("doc[b, q_pos] == doc[b, kv] and q_pos >= kv", name="documents", tensors={"doc": OF_BATCH})
OF_SEQUENCE = attngen.variant("doc[q] == doc[kv]", name="of_sequence",
                              tensors={"doc": {"dtype": "int32", "shape": ["seqlen_k"]}})  # fmt: skip
SIZES = (2, 4, 12, 12)

FLEX = torch.randn(1, 2, 256, 16)
FLEX_DOC, FLEX_BIAS = (torch.arange(256) // 100).int(), torch.randn(256)


def quantized(granularity: Any, **options: Any) -> list[Any]:
    values = attngen.quantize(Q, K, V, granularity=granularity, **options)
    out = attngen.attention(values.q, values.k, values.v, **values.descales)
    return [*(x.float() for x in values[:3]), *values[3:], out]


def gradients(variant: Any, **arguments: Any) -> tuple[Tensor, ...]:
    given = {name: x.clone().requires_grad_() if name == "slope" else x for name, x in arguments.items()}
    leaves = [tensor.clone().requires_grad_() for tensor in (Q, K, V)]
    out = attngen.attention(*leaves, variant=variant, **given)
    return torch.autograd.grad(out.sum(), [*leaves, *(x for name, x in given.items() if name == "slope")])


def appended() -> list[Tensor]:
    k, v = torch.zeros_like(PAGES), torch.zeros_like(PAGES)
    turned = attngen.append_kv(
        PAGES[:2, :1], PAGES[:2, :1], k, v, LENGTHS, page_table=TABLE, q=ROW, rotary_cos=ANGLES, rotary_sin=ANGLES
    )
    return [k, v, turned]


def cached() -> Tensor:
    return flash_attn.flash_attn_with_kvcache(
        ROW, PAGES.clone(), PAGES.clone(), PAGES[:2, :1], PAGES[:2, :1], cache_seqlens=LENGTHS, block_table=TABLE,
        causal=True,
    )  # fmt: skip


def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (FLEX_DOC[q] == FLEX_DOC[kv])


def scored(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + FLEX_BIAS[kv] + kv / (q + 2)


def flex(score: Any = scored, **options: Any) -> Any:
    mask = create_block_mask(documents, None, None, 256, 256, device="cpu")
    return flex_attention(FLEX, FLEX, FLEX, score, mask, **options)


def blocks() -> list[Tensor]:
    mask = create_block_mask(documents, None, None, 256, 256, device="cpu")
    return [mask.kv_num_blocks, mask.kv_indices, mask.to_dense()]


def aux() -> list[Tensor]:
    out, more = flex(return_aux=AuxRequest(lse=True, max_scores=True))
    return [out, more.lse, more.max_scores]


def routed(mask: Tensor | None = None, **options: Any) -> Tensor:
    with sdpa(backend="reference") as calls:
        out = F.scaled_dot_product_attention(*HEADS_FIRST, attn_mask=mask, enable_gqa=True, **options)
    assert calls.routed == 1
    return out


def debugged() -> Tensor:
    with attngen.debug():
        return attngen.attention(LONG[:, :, :, :16], LONG[..., :16], LONG[..., :16], variant=DOCUMENTS, doc=DOC[:, :8])


def of_latents() -> Any:
    return flash_mla.flash_mla_with_kvcache(
        LATENT_Q, LATENTS, TABLE[:1], LENGTHS[:1], 512, *flash_mla.get_mla_metadata(), causal=True
    )


CALLS: dict[str, Callable[[], Any]] = {
    "bshd": lambda: attngen.attention(Q, K, V, variant="causal", return_lse=True),
    "bhsd": lambda: attngen.attention(*HEADS_FIRST, variant="causal", layout="bhsd"),
    "used keys": lambda: attngen.attention(Q, K, V, variant="causal", seqused_k=USED),
    "a score of integers": lambda: attngen.attention(Q, K, V, variant=BIASED, slope=SLOPES, return_lse=True),
    "no keys": lambda: attngen.attention(Q, K[:, :0], V[:, :0], variant=BIASED, slope=SLOPES, return_lse=True),
    "varlen": lambda: attngen.attention_varlen(Q[0], K[0], V[0], STARTS_Q, STARTS_K, 5, 7, variant="causal"),
    "paged": lambda: attngen.attention_paged(ROW, PAGES, PAGES, TABLE, LENGTHS, return_lse=True),
    "splits": lambda: attngen.attention_paged(ROW, PAGES, PAGES, TABLE, LENGTHS, num_splits=2),
    "dropout": lambda: attngen.attention(Q, K, V, variant=DROPPING, dropout_p=0.5, rng_state=STATE),
    "drawn dropout": lambda: attngen.attention(Q, K, V, variant=DROPPING, dropout_p=0.5),
    "gradients": lambda: gradients(BIASED, slope=SLOPES),
    "gradients of dropout": lambda: gradients(DROPPING, dropout_p=0.5, rng_state=STATE),
    "checked": debugged,
    **{f"scales of {g}": (lambda g=g: quantized(g)) for g in ("tensor", "head", 64, "token")},
    "given signs": lambda: quantized("tensor", signs=torch.ones_like(Q[0, 0, 0])),
    "fp8": lambda: attngen.attention(Q.bfloat16(), K.bfloat16(), V.bfloat16(), quantize="fp8"),
    "merge": lambda: attngen.merge([Q, Q], [LOG_SUMS] * 2),
    "index scores": lambda: attngen.index_scores(*INDEXED),
    "topk": lambda: attngen.topk(NUMBERS, 5, lengths=LENGTHS),
    "block mask": lambda: attngen.block_mask(LENGTHS[None, None, None], key_blocks=1000),
    "append": appended,
    "explain": lambda: attngen.explain(Q, K, V, variant="causal"),
    "explain a backward": lambda: attngen.explain(Q, K, V, variant=DOCUMENTS, doc=DOC, direction="backward"),
    "mask": lambda: DOCUMENTS.mask(SIZES, doc=DOC),
    "explain a mask": lambda: DOCUMENTS.explain(SIZES, doc=DOC),
    "plot": lambda: DOCUMENTS.plot(SIZES, doc=DOC),
    "tile map": lambda: attngen.tile_map(Q, K, variant=DOCUMENTS, doc=DOC).variant,
    "scores": lambda: attngen.debug.scores(Q, K, V, variant=BIASED, slope=SLOPES).probabilities,
    "compare": lambda: attngen.debug.compare(Q, K, V, variant=BIASED, slope=SLOPES, gradients=True),
    "FlexAttention": lambda: flex(return_lse=True),
    "a mask of FlexAttention": lambda: flex(None),
    "lists of blocks": blocks,
    "largest scores": aux,
    "sdpa": routed,
    "causal sdpa": lambda: routed(is_causal=True),
    "sdpa with bools": lambda: routed(ALLOWED),
    "sdpa with floats": lambda: routed(FLEX_BIAS[:12].expand(9, 12)),
    "flash_attn": lambda: flash_attn.flash_attn_func(LONG, LONG, LONG, causal=True, alibi_slopes=SLOPES),
    "flash_attn's cache": cached,
    "flash_attn's dropout": lambda: flash_attn.flash_attn_func(LONG, LONG, LONG, 0.3, causal=True),
    "flash_attn_3": lambda: flash_attn_3.flash_attn_func(LONG, LONG, LONG, causal=True, attention_chunk=3),
    "flash_attn_3's sum": lambda: flash_attn_3.flash_attn_combine(torch.stack([Q, Q]), torch.stack([LOG_SUMS] * 2).mT),
    "flash_attn_4": lambda: flash_attn_4.flash_attn_func(LONG, LONG, LONG, causal=True, window_size=(3, 0)),
    "flash_mla": of_latents,
    "triangle attention": lambda: cuequivariance.triangle_attention(
        *TRIANGLES, TRIANGLE_BIAS, ALLOWED[:2, None, None, :5], return_aux=True
    ),
    "lengths of triangle attention": lambda: cuequivariance.triangle_attention(
        *TRIANGLES, TRIANGLE_BIAS, kv_lengths=USED.view(1, 2, 1, 1, 1), return_aux=True
    ),
    "pair bias": lambda: cuequivariance.attention_pair_bias(
        SINGLES, PAIRS, ALLOWED[:1, :5], 4, WEIGHTS[0], None, WEIGHTS, None, *[WEIGHTS] * 4, OF_PAIRS
    ),
    "sageattention": lambda: sageattention.sageattn(*(x.bfloat16() for x in HEADS_FIRST)),
    "natten": lambda: natten.na2d(*(x[:, None] for x in (LONG, LONG, LONG)), (1, 3), dilation=(1, 2)),
    "cudnn": lambda: cudnn.block_sparse_attention_forward(*HEADS_FIRST, LISTS.expand(2, 4, 1, 1), block_sizes=SIZED),
    "fastvideo": lambda: fastvideo.video_sparse_attn(VIDEO, VIDEO, VIDEO, TILES, TILES, 2),
    "block_sparse_attn": lambda: block_sparse_attn.block_sparse_attn_func(
        Q[0], K[0], V[0], STARTS_Q, STARTS_K, TYPES, STREAMS, LISTS.expand(2, 2, 1, 1) == 0, 5, 7, 0.0,
        is_causal=True, exact_streaming=True, return_attn_probs=True,
    ),
    "padding": lambda: bert_padding.unpad_input(Q, PADDING)[:2],
    "plan": lambda: parallel.plan(OF_SEQUENCE, 512, 2, doc=FLEX_DOC.repeat(2)).rows(1),
    "plan of documents": lambda: parallel.plan("causal", 512, 2, cu_seqlens=[0, 200, 512]).positions(1),
    "simulation": lambda: parallel.simulate("causal", 2, tokens=512).forward,
}  # fmt: skip


def results(name: str) -> list[Any]:
    """Tensors of a call, or its text; what is drawn is drawn from the same state."""
    torch.manual_seed(7)
    made = CALLS[name]()
    if isinstance(made, Tensor):
        return [made]
    return list(made) if isinstance(made, Iterable) and not isinstance(made, str) else [str(made)]


def check(actual: list[Any], wanted: list[Any]) -> None:
    for one, same in zip(actual, wanted, strict=True):
        if isinstance(same, Tensor):
            torch.testing.assert_close(one, same, rtol=0, atol=0, equal_nan=True)
        else:
            assert str(one) == str(same)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@few("name", CALLS, always=range(0, 51, 9))
def test_of_another_device(name: str) -> None:
    wanted = results(name)
    with torch.device("meta"):
        actual = results(name)
    check(actual, wanted)


@sampled(always=6, name=[*CALLS], dtype=[torch.float64, torch.bfloat16])
def test_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    wanted = results(name)
    torch.set_default_dtype(dtype)
    check(results(name), wanted)
