"""The module beside torch's own: names, signatures, and masks by their lists of blocks."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

from attngen.errors import CallError
from attngen.integrations.flex import attention as ours
from tests.integrations.flex.flex_mods import causal_mask
from tests.sampling import few, sampled

LENGTH, DIM = 300, 16
DOC = torch.arange(LENGTH) // 70


def _documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (DOC[q] == DOC[kv])


def _by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() <= 20 + 100 * h + 30 * b


def _nothing(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv < 0 * q


MASKS: dict[str, tuple[Any, ...]] = {
    "causal": (causal_mask, None, None, LENGTH, LENGTH),
    "window": (lambda b, h, q, kv: (q >= kv) & (q - kv < 50), 1, 1, LENGTH, LENGTH),
    "documents": (_documents, 2, None, LENGTH, LENGTH),
    "by head": (_by_head, 2, 3, 260, LENGTH),
    "every third": (lambda b, h, q, kv: (q - kv) % 3 == 0, None, None, 64, 512),
    "all": (ours.noop_mask, None, None, 256, 256),
    "nothing": (_nothing, None, None, 130, 100),
}
BLOCKS = (128, 64, (32, 128))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return out, and logits with −inf where nothing is seen."""
    logits = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))
    return torch.softmax(logits, -1).nan_to_num(0.0) @ v, logits


def qkv(queries: int, keys: int, batch: int = 2, heads: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, DIM) for length in (queries, keys, keys))
    return q, k, v


# --- names and signatures -----------------------------------------------------------------------------------


def _parameters(function: Any) -> list[tuple[Any, ...]]:
    given = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in given if one.name != "fallback"]


def test_every_public_name_of_torch_is_here() -> None:
    for name in theirs.__all__:
        assert name in ours.__all__, name
        if inspect.isfunction(getattr(theirs, name)):
            ours_of, torch_of = (_parameters(getattr(module, name)) for module in (ours, theirs))
            assert ours_of[: len(torch_of)] == torch_of, name
    assert ours._mask_mod_signature is theirs._mask_mod_signature
    assert ours._DEFAULT_SPARSE_BLOCK_SIZE == theirs._DEFAULT_SPARSE_BLOCK_SIZE
    with pytest.raises(AttributeError, match=r"attngen\.integrations\.flex_attention.* has no attribute 'nonsense'"):
        _ = ours.nonsense


def test_every_attribute_of_a_mask_is_here() -> None:
    mask, other = (module.create_block_mask(causal_mask, 1, 1, 256, 256, "cpu") for module in (ours, theirs))
    assert isinstance(mask, theirs.BlockMask)
    assert _parameters(ours.BlockMask) == _parameters(theirs.BlockMask)
    for name in dir(other):
        value = getattr(mask, name)
        if not name.startswith("__") and inspect.isroutine(value):
            assert _parameters(value) == _parameters(getattr(other, name)), name
    with pytest.raises(AttributeError, match="'BlockMask' object has no attribute 'nonsense'"):
        _ = mask.nonsense


# --- lists of blocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_lists_are_those_of_torch(name: str) -> None:
    for size, separate in itertools.product(BLOCKS, (True, False)):
        given = (*MASKS[name], "cpu", size, False)
        options = {} if separate else {"separate_full_blocks": False}
        if options and "separate_full_blocks" not in inspect.signature(theirs.create_block_mask).parameters:
            continue
        mask, other = (module.create_block_mask(*given, **options) for module in (ours, theirs))
        assert mask.shape == other.shape
        assert mask.numel() == other.numel()
        assert mask.sparsity() == other.sparsity()
        assert mask.to_string() == other.to_string()
        assert mask.to_string(grid_size=(2, 3), limit=2) == other.to_string(grid_size=(2, 3), limit=2)
        assert str(mask) == str(other)
        assert same(mask.to_dense(), other.to_dense())
        for flatten in (True, False):
            for one, wanted in zip(mask.as_tuple(flatten), other.as_tuple(flatten), strict=True):
                assert same(one, wanted)
        leaves, wanted = (each._flatten()[0] for each in (mask, other))
        assert all(same(one, other) for one, other in zip(leaves, wanted, strict=True))


def test_lists_are_not_computed_for_a_call() -> None:
    mask = ours.create_block_mask(causal_mask, None, None, LENGTH, LENGTH, "cpu")
    ours.flex_attention(*qkv(LENGTH, LENGTH), block_mask=mask)
    assert (mask.shape, mask.numel(), mask.BLOCK_SIZE) == ((1, 1, LENGTH, LENGTH), LENGTH**2, (128, 128))
    assert "q >= kv" in repr(mask)
    assert "kv_num_blocks" not in vars(mask)
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 3]]]  # the last block of queries is cut


@pytest.mark.parametrize("index", [0, 1, -1, slice(1, 3), torch.tensor([1]), torch.tensor([2, 0])])
def test_indexing_selects_what_torch_selects(index: Any) -> None:
    mask, other = (module.create_block_mask(_by_head, 2, 3, LENGTH, LENGTH, "cpu") for module in (ours, theirs))
    for place in ((slice(None), slice(None), index), (slice(0, 1),), (slice(None), slice(1, 3), index)):
        actual, wanted = mask[place], other[place]
        assert isinstance(actual, ours.BlockMask)
        assert actual.shape == wanted.shape
        for one, expected in zip(actual.as_tuple()[:-1], wanted.as_tuple()[:-1], strict=True):
            assert same(one, expected)


@pytest.mark.parametrize("batched", [False, True])
def test_a_decoding_loop(batched: bool) -> None:
    """The rows of a prompt's attention, one at a time: masks that are indexed, offset and given their lengths."""
    q, k, v = qkv(LENGTH, LENGTH)
    of_heads = _by_head if batched else _documents
    base = ours.create_block_mask(of_heads, *((2, 3) if batched else (1, 1)), LENGTH, LENGTH, "cpu", 64)
    whole = ours.flex_attention(q, k, v, block_mask=base)

    def offset_by(mask_mod: Any, offset: Tensor) -> Any:
        return lambda b, h, q, kv: mask_mod(b, h, q + offset, kv)

    for position in (0, 63, 64, 131, LENGTH - 1):
        place = torch.tensor([position])
        mask = base[:, :, place // base.BLOCK_SIZE[0]]
        mask.mask_mod = offset_by(base.mask_mod, place[0])
        mask.seq_lengths = (1, LENGTH)
        out = ours.flex_attention(q[:, :, position : position + 1], k, v, block_mask=mask)
        assert torch.allclose(out[:, :, 0], whole[:, :, position], atol=1e-5)
        direct = ours.create_block_mask(offset_by(of_heads, place[0]), None, None, 1, LENGTH, "cpu")
        out = ours.flex_attention(q[:, :, position : position + 1], k, v, block_mask=direct)
        assert torch.allclose(out[:, :, 0], whole[:, :, position], atol=1e-5)


@pytest.mark.parametrize("name", ["causal", "window", "documents", "by head"])
def test_cropping(name: str) -> None:
    mask = ours.create_block_mask(*MASKS[name], "cpu", 64)
    for lengths in ((256, 256), (200, 130), (64, 65)):
        actual = mask._adjust(*lengths)
        blocks = tuple(-(-length // 64) for length in lengths)
        assert actual.seq_lengths == lengths
        assert torch.equal(actual.visible(), mask.visible()[..., : lengths[0], : lengths[1]])
        assert torch.equal(actual.to_dense(), mask.to_dense()[..., : blocks[0], : blocks[1]])
        listed = ours.BlockMask.from_kv_blocks(*_lists(mask), BLOCK_SIZE=64, mask_mod=mask.mask_mod,
                                               seq_lengths=mask.seq_lengths)._adjust(*lengths)  # fmt: skip
        assert torch.equal(listed.visible().expand_as(actual.visible()), actual.visible())
    with pytest.raises(
        CallError, match=rf"is for {MASKS[name][3]} queries and 300 keys, got 400 and 300; create_block"
    ):
        mask._adjust(400, 300)


def test_cropping_agrees_with_torch_on_causal_masks() -> None:
    mask, other = (module.create_block_mask(causal_mask, 1, 1, 512, 512, "cpu") for module in (ours, theirs))
    actual, wanted = mask._adjust(384, 200), other._adjust(384, 200)
    assert actual.shape == wanted.shape
    assert same(actual.to_dense(), wanted.to_dense())


def _lists(mask: Any) -> tuple[Tensor, ...]:
    return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices


def _random_lists(batch: int, heads: int, rows: int, columns: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return 0, 1 or 2 for blocks that are absent, partial or full, and their lists, in a random order."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randint(3, (batch, heads, rows, columns), generator=generator)
    lists = []
    for state in (1, 2):
        counts = torch.zeros(batch, heads, rows, dtype=torch.int32)
        indices = torch.full((batch, heads, rows, columns), 10**6, dtype=torch.int32)  # undefined beyond the counts
        for place in itertools.product(range(batch), range(heads), range(rows)):
            listed = (states[place] == state).nonzero()[:, 0]
            listed = listed[torch.randperm(len(listed), generator=generator)]
            counts[place] = len(listed)
            indices[place][: len(listed)] = listed.int()
        lists += [counts, indices]
    return states, tuple(lists)


@few(("batch", "heads"), [(1, 1), (2, 1), (1, 3), (2, 3)], always=range(0, 999, 2))
@pytest.mark.parametrize("full", [False, True])
def test_lists_that_were_given_decide(batch: int, heads: int, full: bool) -> None:
    states, lists = _random_lists(batch, heads, 5, 4)
    mask = ours.BlockMask.from_kv_blocks(
        *(lists if full else lists[:2]), BLOCK_SIZE=(64, 80), mask_mod=causal_mask, seq_lengths=(300, 310)
    )
    rows, columns = torch.arange(300)[:, None], torch.arange(310)
    state = states[:, :, rows // 64, columns // 80]
    visible = (state == 1) & (rows >= columns)
    visible = visible | (state == 2) if full else visible
    assert torch.equal(mask.visible(), visible)
    given = [one.requires_grad_() for one in qkv(300, 310)]
    result, (wanted, _) = ours.flex_attention(*given, block_mask=mask), dense(*given, visible)
    assert torch.allclose(result, wanted, atol=1e-5)
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), given) for out in (result, wanted)), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_a_mask_mod_that_is_replaced_counts_in_partial_blocks() -> None:
    """As in torch's kernels: a created mask keeps its lists when its mask_mod is replaced."""
    given = qkv(LENGTH, LENGTH, 1, 1)
    mask = ours.create_block_mask(causal_mask, 1, 1, LENGTH, LENGTH, "cpu", 64)
    before = ours.flex_attention(*given, block_mask=mask)
    mask.mask_mod = lambda b, h, q, kv: (q - kv) % 2 == 0
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    below, diagonal = rows // 64 > columns // 64, rows // 64 == columns // 64
    last = rows // 64 == LENGTH // 64  # which is cut, and therefore not full
    odd = (rows - columns) % 2 == 0
    visible = (below & ~last) | (((below & last) | diagonal) & odd)
    assert torch.equal(mask.visible()[0, 0], visible)
    out = ours.flex_attention(*given, block_mask=mask)
    assert not torch.allclose(out, before)
    assert torch.allclose(out, dense(*given, visible)[0], atol=1e-5)
    mask.mask_mod = causal_mask
    assert torch.equal(ours.flex_attention(*given, block_mask=mask), before)


@pytest.mark.exhaustive
def test_torch_takes_the_masks() -> None:
    given = qkv(LENGTH, LENGTH, 1, 1)
    mask = ours.create_block_mask(_documents, 1, 1, LENGTH, LENGTH, "cpu", 64)
    with torch.no_grad():
        out, wanted = theirs.flex_attention(*given, block_mask=mask), ours.flex_attention(*given, block_mask=mask)
    assert torch.allclose(out, wanted, atol=1e-5)


def test_lists_that_change_in_place_are_seen() -> None:
    given = qkv(128, 128, 1, 1)
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    mask = ours.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64)
    first = ours.flex_attention(*given, block_mask=mask)
    assert torch.allclose(first, dense(*given, torch.arange(128).expand(128, 128) < 64)[0], atol=1e-5)
    indices[..., 0] = 1
    second = ours.flex_attention(*given, block_mask=mask)
    assert torch.allclose(second, dense(*given, torch.arange(128).expand(128, 128) >= 64)[0], atol=1e-5)


def test_masks_move_and_are_copied() -> None:
    made = ours.create_block_mask(causal_mask, None, None, LENGTH, LENGTH, "cpu")
    listed = ours.BlockMask.from_kv_blocks(*_lists(made), mask_mod=causal_mask, seq_lengths=(LENGTH, LENGTH))
    for mask in (made, listed):
        for other in (mask.to("cpu"), copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
            assert type(other) is ours.BlockMask
            assert torch.equal(other.visible(), mask.visible())
            assert torch.equal(other.to_dense(), mask.to_dense())
    assert made.to("meta").kv_num_blocks.device.type == "meta"
    assert listed.to("meta").kv_indices.device.type == "meta"


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (lambda base: base[:, :, :1], "was indexed has no mask_mod"),
        (lambda base: _with(base[:, :, 0], base.mask_mod), "is for .*, but the call has 128 and 128"),
        (lambda base: _of_lists(2, 1), "has lists for 2 sequences, but query has 1; allowed: as many, or 1"),
        (lambda base: _of_lists(1, 3), "has lists for 3 heads, but query has 1"),
        (lambda base: ours.BlockMask.from_kv_blocks(*(one[0] for one in _random_lists(1, 1, 2, 2)[1]), BLOCK_SIZE=64),
         r"kv_indices of shape \(1, 2, 2\); allowed: \(B, H, rows, blocks\)"),
        (lambda base: _with(_of_lists(1, 1)[:, :, :1], base.mask_mod, (128, 128)), "has lists for 1 blocks of 64"),
        (lambda base: theirs.create_block_mask(causal_mask, 1, 1, 128, 128, "cpu"), "must be made by create_block"),
    ],
)  # fmt: skip
def test_masks_that_do_not_fit_are_refused(mask: Any, reason: str) -> None:
    base = ours.create_block_mask(causal_mask, 1, 1, 256, 256, "cpu")
    with pytest.raises(CallError, match=reason):
        ours.flex_attention(*qkv(128, 128, 1, 1), block_mask=mask(base))


def _with(mask: Any, mask_mod: Any, lengths: tuple[int, int] | None = None) -> Any:
    mask.mask_mod = mask_mod
    mask.seq_lengths = lengths or mask.seq_lengths
    return mask


def _of_lists(batch: int, heads: int) -> Any:
    return ours.BlockMask.from_kv_blocks(*_random_lists(batch, heads, 2, 2)[1], BLOCK_SIZE=64)


def test_packed_sequences_are_another_call() -> None:
    with pytest.raises(CallError, match=r"nested tensors .* attngen\.attention_varlen"):
        ours.create_nested_block_mask(causal_mask, 1, 1, torch.zeros(2, 3))


# --- what a call returns beside its output ------------------------------------------------------------------------


def _softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 5.0 * torch.tanh(score / 5.0)


@sampled(always=1, score_mod=[None, _softcap], grouped=[False, True])
def test_largest_logits(score_mod: Any, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.runtime.reference import eager as reference

    monkeypatch.setitem(reference.CHUNK_ELEMENTS, "cpu", 7 * 3 * LENGTH)  # several chunks, the last one shorter
    q, k, v = (one.requires_grad_() for one in qkv(LENGTH, LENGTH))
    k, v = (k[:, :1], v[:, :1]) if grouped else (k, v)
    mask = ours.create_block_mask(lambda b, h, q, kv: (q > kv) & (q - kv < 40), None, None, LENGTH, LENGTH, "cpu")
    logits = dense(q, k, v, torch.ones((), dtype=torch.bool))[1]
    logits = _softcap(logits, q, q, q, q) if score_mod is not None else logits
    logits = logits.masked_fill(~mask.visible(), float("-inf"))
    for lse, largest in itertools.product((False, True), repeat=2):
        request = ours.AuxRequest(lse=lse, max_scores=largest)
        out, aux = ours.flex_attention(q, k, v, score_mod, mask, enable_gqa=grouped, return_aux=request)
        assert out.requires_grad
        assert (aux.lse is None, aux.max_scores is None) == (not lse, not largest)
        if lse:
            assert torch.allclose(aux.lse, logits.logsumexp(-1), atol=1e-5)
        if largest:
            assert not aux.max_scores.requires_grad
            assert torch.allclose(aux.max_scores, logits.amax(-1), atol=1e-5)
            assert aux.max_scores[..., 0].isneginf().all()


def test_requests_that_make_no_sense_are_refused() -> None:
    given = qkv(8, 8)
    with pytest.raises(CallError, match="return_lse and return_aux cannot both be given"):
        ours.flex_attention(*given, return_lse=True, return_aux=ours.AuxRequest())
    with pytest.raises(CallError, match="return_aux must be an AuxRequest"):
        ours.flex_attention(*given, return_aux=True)  # type: ignore[arg-type]


# --- in compiled programs ------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@few("case", ["lists", "indexed inside", "replaced inside", "largest logits"], always=(1,))
def test_a_program_with_lists_breaks_its_graph_and_is_right(case: str) -> None:
    q, k, v = qkv(128, 256, 1, 1)
    base = ours.create_block_mask(causal_mask, 1, 1, 256, 256, "cpu", 64)
    listed = ours.BlockMask.from_kv_blocks(
        *(one[:, :, :2] for one in _lists(base)), BLOCK_SIZE=64, mask_mod=causal_mask, seq_lengths=(128, 256)
    )

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        request, mask = ours.AuxRequest(max_scores=case == "largest logits"), listed
        if case == "indexed inside":
            mask = base[:, :, :2]
            mask.mask_mod = base.mask_mod
            mask.seq_lengths = (128, 256)
        elif case == "replaced inside":
            mask = base._adjust(128, 256)
            mask.mask_mod = lambda b, h, q, kv: q >= kv
        out, aux = ours.flex_attention(q * 2, k, v, block_mask=mask, return_aux=request)
        return out + 1 if aux.max_scores is None else out + 1 + aux.max_scores[..., None]

    torch._dynamo.reset()
    actual = torch.compile(program, backend="aot_eager")(q, k, v)
    wanted, logits = dense(q * 2, k, v, torch.arange(128)[:, None] >= torch.arange(256))
    wanted = wanted + 1 + logits.amax(-1, keepdim=True) if case == "largest logits" else wanted + 1
    assert torch.allclose(actual, wanted, atol=1e-5)
