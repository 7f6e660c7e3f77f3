"""FlexAttention's functions on attngen beside torch's own, on the CPU in float32; gradients beside dense autograd."""

from __future__ import annotations

import gc
import inspect
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention import flex_attention as theirs

from attngen.errors import CallError
from attngen.integrations.flex import attention as ours
from attngen.integrations.flex import meaning as meanings
from attngen.lang.biases import asked_by
from attngen.lang.ir import Expr, Load, Type, Var, walk
from tests.integrations.flex.flex_mods import BATCH, HEADS, LENGTH, MODS, causal_mask
from tests.sampling import few

DIM = 8


def qkv(kv_heads: int = HEADS, seed: int = 0) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return tuple(torch.randn(BATCH, heads, LENGTH, DIM, requires_grad=True) for heads in (HEADS, kv_heads, kv_heads))


def dense(q: Tensor, k: Tensor, v: Tensor, mask_mod: Any, score_mod: Any) -> tuple[Tensor, Tensor]:
    """Return out and lse with all logits as one tensor, by torch's own expansion of the functions over indices."""
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    b, h, m, n = (torch.arange(size, device=q.device) for size in shape)
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    if score_mod is not None:
        with TransformGetItemToIndex():
            s = theirs._vmap_for_bhqkv(score_mod, prefix=(0,))(s, b, h, m, n)
    if mask_mod is not None:
        s = s.masked_fill(~theirs.create_mask(mask_mod, *shape, device=str(q.device)), float("-inf"))
    lse = s.logsumexp(-1)
    return torch.softmax(s, -1).nan_to_num(0.0).to(v.dtype) @ v, lse


@few("name", MODS, always=[*range(0, 90, 8), [*MODS].index("temperature_by_head")])
def test_functions_mean_what_torch_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # the same without compiling each
    mask_mod, score_mod = MODS[name]("cpu")
    q, k, v = qkv()
    mask = None if mask_mod is None else ours.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu")
    out, lse = ours.flex_attention(q, k, v, score_mod, mask, return_lse=True)
    with torch.no_grad():
        blocks = None
        if mask_mod is not None:
            blocks = theirs.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu")
        given = [t.detach() for t in (q, k, v)]
        wanted, wanted_lse = theirs.flex_attention(*given, score_mod, blocks, return_lse=True)
    assert torch.allclose(out, wanted, atol=2e-5, rtol=1e-4)
    assert torch.allclose(lse, wanted_lse, atol=2e-5, rtol=1e-4)


@few("name", MODS, always=[*range(0, 90, 10), [*MODS].index("dilated_by_head")])
def test_gradients_are_those_of_dense_attention(name: str) -> None:
    mask_mod, score_mod = MODS[name]("cpu")
    q, k, v = qkv()
    mask = None if mask_mod is None else ours.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu")
    learned = [t for t in ours.meaning(mask_mod, score_mod, torch.device("cpu")).tensors().values() if t.requires_grad]
    out = ours.flex_attention(q, k, v, score_mod, mask)
    wanted, _ = dense(q, k, v, mask_mod, score_mod)
    towards = torch.randn_like(out)
    gradients = torch.autograd.grad(out, [q, k, v, *learned], towards)
    for one, other in zip(gradients, torch.autograd.grad(wanted, [q, k, v, *learned], towards), strict=True):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-3)


def test_there_are_enough_functions() -> None:
    assert len(MODS) >= 60


def test_masks_of_documents_have_bands() -> None:
    mask_mod, _ = MODS["causal_document"]("cpu")
    actual = ours.meaning(mask_mod, None, torch.device("cpu"))
    (declared,) = actual.variant.fields["tensors"].values()
    assert declared["monotone"] == {"axis": 0}
    mask_mod, _ = MODS["unordered_groups"]("cpu")
    (declared,) = ours.meaning(mask_mod, None, torch.device("cpu")).variant.fields["tensors"].values()
    assert "monotone" not in declared


def test_the_same_code_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Any] = []
    traced = meanings.traced
    monkeypatch.setattr(meanings, "traced", lambda *given: traces.append(given) or traced(*given))
    meanings._TRACED.clear()

    def window(size: int) -> Any:
        return lambda b, h, q, kv: (q >= kv) & (q - kv < size)

    q, k, v = qkv()
    for size in (5, 5, 6, 5):
        ours.flex_attention(q, k, v, None, ours.create_block_mask(window(size), None, None, LENGTH, LENGTH, "cpu"))
    assert len(traces) == 2
    numbers = torch.arange(LENGTH)

    def by_tensor(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return numbers[q] // 5 == numbers[kv] // 5

    first = ours.flex_attention(q, k, v, None, ours.create_block_mask(by_tensor, None, None, LENGTH, LENGTH, "cpu"))
    numbers.fill_(0)  # what the tensor holds is looked at again
    second = ours.flex_attention(q, k, v, None, ours.create_block_mask(by_tensor, None, None, LENGTH, LENGTH, "cpu"))
    assert len(traces) == 3
    assert not torch.equal(first, second)
    for length in (7, 11):  # other tensors of the same shape
        docs = torch.arange(LENGTH) // length
        made = ours.create_block_mask(_documents_of(docs), None, None, LENGTH, LENGTH, "cpu")
        assert torch.equal(made.visible()[0, 0], docs[:, None] == docs)
    assert len(traces) == 4


def _documents_of(docs: Tensor) -> Any:
    return lambda b, h, q, kv: docs[q] == docs[kv]


REACH = 4


def _by_global(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (lambda apart: apart < REACH)((q - kv).abs())


def test_a_global_that_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ours.create_block_mask(_by_global, None, None, 16, 16, "cpu").visible()
    monkeypatch.setitem(globals(), "REACH", 2)
    assert ours.create_block_mask(_by_global, None, None, 16, 16, "cpu").visible().sum() < before.sum()


def test_captured_tensors_are_not_kept_alive() -> None:
    def made() -> tuple[Any, weakref.ref[Tensor]]:
        table = torch.randn(LENGTH)
        return (lambda b, h, q, kv: table[kv] > 0), weakref.ref(table)

    gc.freeze()  # a collection would look at all that lives for longer
    q, k, v = (t.detach() for t in qkv())
    for _ in range(3):  # the next one may lie where the last one lay
        mask_mod, table = made()
        out = ours.flex_attention(q, k, v, None, ours.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu"))
        assert torch.allclose(out, dense(q, k, v, mask_mod, None)[0], atol=2e-5)
        del mask_mod, out
        gc.collect()
        assert table() is None


def test_the_mask_prints_and_counts() -> None:
    mask = ours.create_block_mask(causal_mask, None, None, 256, 256, "cpu")
    other = theirs.create_block_mask(causal_mask, None, None, 256, 256, "cpu")
    assert mask.shape == tuple(other.shape)
    assert mask.sparsity() == pytest.approx(other.sparsity())
    assert torch.equal(mask.to_dense().bool(), other.to_dense().bool())
    assert "q >= kv" in repr(mask)


@pytest.mark.exhaustive
def test_groups_of_heads_and_scale() -> None:
    q, k, v = qkv(kv_heads=2)
    mask = ours.create_block_mask(causal_mask, None, None, LENGTH, LENGTH, "cpu")
    blocks = theirs.create_block_mask(causal_mask, None, None, LENGTH, LENGTH, "cpu")
    with torch.no_grad():
        out, aux = ours.flex_attention(
            q, k, v, None, mask, 0.3, enable_gqa=True, return_aux=theirs.AuxRequest(lse=True)
        )
        given = [t.detach() for t in (q, k, v)]
        wanted, lse = theirs.flex_attention(*given, None, blocks, 0.3, enable_gqa=True, return_lse=True)
    assert torch.allclose(out, wanted, atol=2e-5)
    assert torch.allclose(aux.lse, lse, atol=2e-5)


def _decides(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv if h > 1 else q == kv


def _sorts(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.stack((q, kv)).sort().values[0] == kv


COUNTER = torch.zeros(())


def _counts(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    q = q + 0
    q += 1
    return q >= kv


@pytest.mark.parametrize(
    ("mask_mod", "reason"),
    [
        (_decides, "branches on the value of an index"),
        (_sorts, "has no equivalent in attngen's language"),
        (_counts, "it changes a tensor"),
        (lambda b, h, q, kv: q - kv, "a mask is a condition, but it returns int32"),
        (lambda b, h, q, kv: None, "it returns NoneType"),
        (lambda b, h, q, kv: torch.lgamma(q / 3.0) > kv, "aten.lgamma.default has no equivalent"),
        (lambda b, h, q, kv: q // (kv - 3) > 0, "divisor"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_place(mask_mod: Any, reason: str) -> None:
    with pytest.raises(CallError, match=reason) as caught:
        ours.create_block_mask(mask_mod, None, None, 8, 8, "cpu")
    assert "test_flex_attention.py:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_that_is_refused_has_changed_nothing() -> None:
    counted = torch.zeros(LENGTH)

    def counts(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        counted.add_(1)
        return q >= kv

    with pytest.raises(CallError, match=r"it changes a tensor \(aten.add_.Tensor\)"):
        ours.create_block_mask(counts, None, None, 8, 8, "cpu")
    assert not counted.any()


@pytest.mark.parametrize("shape", [(), (HEADS,)])
def test_a_gradient_that_would_be_lost_is_refused(shape: tuple[int, ...]) -> None:
    gate = torch.ones(shape, requires_grad=True)
    learned = {
        (): lambda s, b, h, q, kv: s * torch.tanh(gate), (HEADS,): lambda s, b, h, q, kv: s * torch.tanh(gate)[h]
    }  # fmt: skip
    with pytest.raises(CallError, match="of a captured tensor that requires a gradient, which would be lost"):
        ours.flex_attention(*qkv(), learned[shape])
    constant = {
        (): lambda s, b, h, q, kv: s * torch.tanh(gate.detach()),
        (HEADS,): lambda s, b, h, q, kv: s * torch.tanh(gate.detach())[h],
    }
    assert ours.flex_attention(*qkv(), constant[shape]).requires_grad


def test_a_row_is_no_number() -> None:
    table = torch.ones(HEADS, LENGTH)
    with pytest.raises(CallError, match=r"returns a tensor of shape|a row of a captured tensor"):
        ours.flex_attention(*qkv(), lambda s, b, h, q, kv: s + table[h])


def test_logic_of_captured_numbers() -> None:
    on = torch.tensor(True)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.logical_and(q >= kv, on)

    assert int(ours.create_block_mask(mask, None, None, 8, 8, "cpu").visible().sum()) == 36


def test_numbers_made_inside_a_function_are_constants() -> None:
    def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv).abs() < torch.tensor(3)

    assert int(ours.create_block_mask(window, None, None, 8, 8, "cpu").visible().sum()) == 34


def test_samples_that_are_0_divide_nothing() -> None:
    """The trace runs on indices that are 0, and on elements of captured tensors that nobody reads."""
    steps = torch.zeros(HEADS, dtype=torch.int32)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q // (kv + 1) + q % (steps[h].abs() + 1) + torch.div(q, kv + 1, rounding_mode="trunc")) >= 0

    def never(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q % steps[h] == 0

    assert ours.create_block_mask(mask, None, None, 8, 8, "cpu").visible().all()
    with pytest.raises(CallError, match="divisor"):
        ours.create_block_mask(never, None, None, 8, 8, "cpu")


def test_divisors_are_computed_from_numbers_of_at_least_1() -> None:
    steps, two = torch.tensor([1, 2, 3, 4], dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q // (steps[h] * two[0])) == (kv // (torch.maximum(steps[h], two[b]) + two[1]))

    def never(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q % (steps[h] * zero[0]) == 0

    zero = torch.zeros(2, dtype=torch.int32)
    made = ours.create_block_mask(mask, None, HEADS, 16, 16, "cpu")
    assert torch.equal(made.visible(), theirs.create_mask(mask, None, HEADS, 16, 16, "cpu"))
    with pytest.raises(CallError, match="divisor"):
        ours.create_block_mask(never, None, HEADS, 16, 16, "cpu")


def test_differences_of_elements_that_are_never_negative_need_no_int64() -> None:
    later = torch.arange(16, dtype=torch.int32) ** 2
    signed = later - 5

    def of(times: Tensor) -> str:
        def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (times[q] - times[kv]).abs() < 9

        made = ours.create_block_mask(mask, None, None, 16, 16, "cpu")
        assert torch.equal(made.visible(), theirs.create_mask(mask, None, None, 16, 16, "cpu"))
        return str(ours.meaning(mask, None, torch.device("cpu")).variant.fields["tensors"])

    assert "'min': 0" in of(later)
    assert "min" not in of(signed)


def test_arithmetic_of_int64_tensors_takes_what_they_hold() -> None:
    """Sums and differences of int64 stay within int64 if int32 holds the numbers, which is looked up."""
    offsets, document = torch.tensor([0, 3, 9]), torch.tensor([0] * 3 + [1] * 6 + [2] * 7)
    places, far = torch.arange(16) - 8, torch.full((16,), 2**62)

    def inside(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - offsets[document[q]] >= kv - offsets[document[kv]]

    def chosen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where(q > 3, places[q], 0) * 2 + document[places[kv]] >= places[kv].abs()

    def later(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return far[q] + 1 >= kv

    def looked_up(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return document[torch.minimum(far[q] - 2**62, kv)] == document[q]

    for mask in (inside, chosen):
        made = ours.create_block_mask(mask, None, None, 16, 16, "cpu")
        assert torch.equal(made.visible(), theirs.create_mask(mask, None, None, 16, 16, "cpu"))
    assert "2147483647" in str(ours.meaning(inside, None, torch.device("cpu")).variant.fields["tensors"]["offsets"])
    for mask in (later, looked_up):
        with pytest.raises(CallError, match="beyond int64; declare narrower ranges of 'far'"):
            ours.create_block_mask(mask, None, None, 16, 16, "cpu")


def test_indices_of_int64_whose_numbers_are_not_known_count_from_the_end() -> None:
    """Nothing is known of what only the score of a compiled program reads: no sum with an index may then overflow."""
    places, table = torch.arange(-8, 8), torch.randn(16)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + table[places[kv]]

    functions = meanings.Functions(None, score, torch.device("cpu"))
    unknown, known = functions.meaning_whatever_they_hold(()).variant, functions.meaning().variant
    assert "(min(places[kv], -1)) + 16 if" in unknown.fields["score"]
    assert (
        asked_by(index_of(unknown))
        == asked_by(index_of(known))
        == (Load("places", (Var("kv", Type.INT),), Type.INT), 16)
    )


def index_of(variant: Any) -> Expr:
    loads = (node for node in walk(variant.value.score) if isinstance(node, Load) and node.tensor == "table")
    return next(loads).indices[0]


def test_rows_by_number_beside_indices() -> None:
    chosen = torch.randint(0, 4, (3, 4), dtype=torch.int32)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (chosen[0, q // 4] == kv // 4) | (chosen[-1, q // 4] == kv // 4) | (chosen[1][q // 4] == kv // 4)

    made = ours.create_block_mask(mask, None, None, 16, 16, "cpu")
    assert torch.equal(made.visible(), theirs.create_mask(mask, None, None, 16, 16, "cpu"))


def test_calls_that_disagree_are_refused() -> None:
    q, k, v = qkv(kv_heads=2)
    with pytest.raises(CallError, match="enable_gqa=True lets them differ"):
        ours.flex_attention(q, k, v)
    mask = ours.create_block_mask(causal_mask, None, None, 8, 8, "cpu")
    with pytest.raises(CallError, match="block_mask is for 8 queries and 8 keys, but the call has 49 and 49"):
        ours.flex_attention(q, k, v, None, mask, enable_gqa=True)
    with pytest.raises(CallError, match="nested tensors are not supported"):
        ours.flex_attention(torch.nested.nested_tensor([torch.randn(4, 5, 8)]), k, v, None, mask)
    with pytest.raises(CallError, match="must be made by create_block_mask or BlockMask of attngen"):
        ours.flex_attention(q, k, v, None, theirs.create_block_mask(causal_mask, None, None, 8, 8, "cpu"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((None, None, None, 8, 8), "mask_mod must be a function of"),
        ((lambda b, h, q, kv: q >= kv, None, None, -1, 8), "Q_LEN must be an integer of at least 0, got -1"),
        ((lambda b, h, q, kv: q >= kv, None, "2", 8, 8), "H must be an integer of at least 0, got '2'"),
        (
            (lambda b, h, q, kv: q >= kv, None, None, 8, 8, "cpu", 0),
            "BLOCK_SIZE must be an integer of at least 1, got 0",
        ),
    ],
)
def test_masks_of_odd_sizes_are_refused(given: tuple[Any, ...], told: str) -> None:
    with pytest.raises(CallError, match=told):
        ours.create_block_mask(*given)


@pytest.mark.exhaustive
def test_the_rest_runs_on_torch_where_the_caller_says_so() -> None:
    q, k, v = (t.detach() for t in qkv())
    mask = ours.create_block_mask(_sorts, None, None, LENGTH, LENGTH, "cpu", fallback=True)
    with pytest.raises(CallError):
        ours.flex_attention(q, k, v, None, mask)
    out = ours.flex_attention(q, k, v, None, mask, fallback=True)
    assert torch.allclose(out, dense(q, k, v, lambda b, h, q, kv: torch.minimum(q, kv) == kv, None)[0], atol=2e-5)


# --- under torch.compile ------------------------------------------------------------------------------------


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", **{"fullgraph": True, **options})


#: A value that a program cannot read, so that its graph breaks: a bound method.
BREAKING = {"method"}
SAMPLE = (
    "causal",
    "causal_document",
    "prefix_by_sequence",
    "nested_closures",
    "alibi_slopes",
    "relative_bias",
    "gated",
)


@few(
    "name",
    [*SAMPLE, *(name for name in MODS if name not in SAMPLE)],
    always=1,
    often=[*range(len(SAMPLE)), *range(len(SAMPLE), 99, 4)],
)
def test_a_program_is_compiled_without_a_graph_break(name: str) -> None:
    mask_mod, score_mod = MODS[name]("cpu")
    q, k, v = qkv()
    mask = None if mask_mod is None else ours.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu")
    learned = [t for t in ours.meaning(mask_mod, score_mod, torch.device("cpu")).tensors().values() if t.requires_grad]

    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = ours.flex_attention(q * 2, k, v, score_mod, mask, return_lse=True)
        return out + 1, lse

    wanted, actual = program(q, k, v), compiled(program, fullgraph=name not in BREAKING)(q, k, v)
    for one, other in zip(actual, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    leaves = [q, k, v, *learned]
    for one, other in zip(*(torch.autograd.grad(t[0].sum(), leaves) for t in (actual, wanted)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.exhaustive
def test_a_program_notices_what_changes() -> None:
    """Numbers that a closure holds, even where torch makes symbols of them; other tensors; masks with other facts."""
    q, k, v = (t.detach() for t in qkv())

    def capped(cap: float, table: Tensor) -> Any:
        return lambda s, b, h, q, kv: cap * torch.tanh((s + table[h, kv - 1]) / cap)

    program = compiled(lambda score: ours.flex_attention(q, k, v, score) * 1)
    tables = [torch.randn(HEADS, LENGTH, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    for cap, table in ((3.0, tables[0]), (4.0, tables[0]), (5.0, tables[1]), (3.0, tables[1])):
        score = capped(cap, table)
        assert torch.allclose(program(score), ours.flex_attention(q, k, v, score), atol=1e-6)

    program = compiled(lambda mask: ours.flex_attention(q, k, v, None, mask) * 1)
    for doc in (torch.arange(LENGTH) // 7, torch.arange(LENGTH) // 9, torch.arange(LENGTH) % 5):
        mask = ours.create_block_mask(
            lambda b, h, q, kv, doc=doc: doc[q] == doc[kv], None, None, LENGTH, LENGTH, "cpu"
        )  # fmt: skip
        assert torch.allclose(program(mask), ours.flex_attention(q, k, v, None, mask), atol=1e-6)


@pytest.mark.exhaustive
def test_masks_of_other_documents_need_no_other_program() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    q, k, v = (t.detach() for t in qkv())

    def mask(doc: Tensor) -> Any:
        return ours.create_block_mask(lambda b, h, q, kv: doc[q] == doc[kv], None, None, LENGTH, LENGTH, "cpu")

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    program = torch.compile(lambda mask: ours.flex_attention(q, k, v, None, mask) * 1, fullgraph=True, backend=counter)
    for length in (7, 9, 20):
        made = mask(torch.arange(LENGTH) // length)
        assert torch.allclose(program(made), ours.flex_attention(q, k, v, None, made), atol=1e-6)
    assert counter.frame_count == 1


class _Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(2 * LENGTH))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = ours.flex_attention(q * 1, k, v, lambda s, b, h, q, kv: s + self.bias[q - kv + LENGTH])
        return out * 2


def test_a_function_made_inside_of_a_program_breaks_its_graph_and_is_right() -> None:
    module, given = _Module(), qkv()
    wanted, actual = module(*given), compiled(module, fullgraph=False)(*given)
    assert torch.allclose(actual, wanted, atol=1e-6)
    for one, other in zip(*(torch.autograd.grad(t.sum(), [module.bias]) for t in (actual, wanted)), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def _inside(kind: str, table: Tensor, scale: float) -> Any:
    """A program that makes a score_mod which captures a tensor, a number, both or nothing."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shifted = table * 2
        mods = {
            "nothing": lambda s, b, h, q, kv: s + 0.1 * (q - kv),
            "a number": lambda s, b, h, q, kv: s * scale,
            "a tensor of the program": lambda s, b, h, q, kv: s + shifted[kv],
            "a tensor of its caller": lambda s, b, h, q, kv: s + table[kv] * scale,
            "a partial function": partial(_biased, shifted),
        }
        out: Tensor = ours.flex_attention(q * 1, k, v, mods[kind]) * 2
        return out

    return program


def _biased(bias: Tensor, s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + bias[kv]


@pytest.mark.exhaustive
@few(
    "kind",
    ["nothing", "a number", "a tensor of the program", "a tensor of its caller", "a partial function"],
    always=(2,),
)
def test_whatever_a_function_made_inside_of_a_program_captures(kind: str) -> None:
    given, table = [t.detach() for t in qkv()], torch.randn(LENGTH)
    program = _inside(kind, table, 0.5)
    actual = compiled(program, fullgraph=False)(*given)
    assert torch.allclose(actual, program(*given), atol=1e-6)


@pytest.mark.exhaustive
def test_a_partial_function_over_a_tensor_breaks_the_graph() -> None:
    given, score_mod = [t.detach() for t in qkv()], partial(_biased, torch.randn(LENGTH))
    out = compiled(lambda *given: ours.flex_attention(*given, score_mod) * 2, fullgraph=False)(*given)
    assert torch.allclose(out, ours.flex_attention(*given, score_mod) * 2, atol=1e-6)


@pytest.mark.exhaustive
def test_what_is_refused_is_refused_in_a_program_too() -> None:
    q, k, v = (t.detach() for t in qkv())
    mask = ours.create_block_mask(causal_mask, None, None, 8, 8, "cpu")
    with pytest.raises(Exception, match="block_mask is for 8 queries and 8 keys"):
        compiled(lambda: ours.flex_attention(q, k, v, None, mask), fullgraph=False)()
    with pytest.raises(CallError, match="branches on the value of an index"):
        compiled(lambda: ours.flex_attention(q, k, v, lambda s, b, h, q, kv: s if h > 1 else s + 1), fullgraph=False)()


# --- what a function does beside computing ------------------------------------------------------------------

CALLS = 0
SEEN: list[Any] = []


def _assigns_a_global(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return q >= kv


def _prints(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    print("called")
    return q >= kv


def _appends(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    SEEN.append(q)
    return q >= kv


def _assigns_around() -> Any:
    count = 0

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return q >= kv

    return mask


class _Counts:
    def __init__(self) -> None:
        self.calls = 0

    def mask(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        self.calls += 1
        return q >= kv


EFFECTS = {
    "assigns the global 'CALLS'": _assigns_a_global,
    "it prints": _prints,
    "changes the list 'SEEN'": _appends,
    "assigns 'count' of the function around it": _assigns_around(),
    "changes an attribute of 'self'": _Counts().mask,
    "it assigns the global 'CALLS', which": ours.and_masks(causal_mask, _assigns_a_global),
}


@pytest.mark.parametrize("reason", EFFECTS)
def test_an_effect_that_would_be_lost_is_refused_and_undone(reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CallError, match=reason) as caught:
        ours.create_block_mask(EFFECTS[reason], None, None, 8, 8, "cpu")
    assert "test_flex_attention.py:" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (CALLS, SEEN, capsys.readouterr().out) == (0, [], "")


def _line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(place for place, line in enumerate(lines) if text in line)


def test_refusals_name_the_line() -> None:
    for function, text in ((_decides, "if h > 1"), (_sorts, "torch.stack"), (_assigns_a_global, "CALLS += 1"),
                           (_prints, "print(")):  # fmt: skip
        with pytest.raises(CallError, match=rf"test_flex_attention\.py:{_line_of(function, text)}\)"):
            ours.create_block_mask(function, None, None, 8, 8, "cpu")


def test_a_captured_tensor_on_another_device_is_named() -> None:
    doc = torch.zeros(8, dtype=torch.int32, device="meta")
    with pytest.raises(CallError, match="the captured tensor 'doc' is on meta, the call on cpu"):
        ours.create_block_mask(lambda b, h, q, kv: doc[q] == doc[kv], None, None, 8, 8, "cpu")
