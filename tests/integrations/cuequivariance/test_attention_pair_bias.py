"""cuEquivariance's attention with a pair bias: both argument lists against float64 written by hand, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.cuequivariance import attention_pair_bias, pair_bias
from attngen.integrations.cuequivariance import triangle as triangles
from tests.integrations.oracles import gated_pair_bias, normalized
from tests.sampling import few

SEQUENCES, SAMPLES, HEADS, TOKENS, DIM, SINGLE, PAIRS = 2, 3, 4, 9, 6, 20, 10

#: The argument lists of cuEquivariance 0.13 and 0.10, with what is not needed.
SINCE_0_11 = (
    "single_repr pair_repr mask num_heads w_ln_a b_ln_a w_proj_q b_proj_q w_proj_k w_proj_v w_proj_g w_proj_o "
    "w_proj_z=None b_proj_o=None b_proj_z=None w_ln_z=None b_ln_z=None inf=1000000.0 eps=1e-05 attn_scale=None "
    "return_z_proj=False is_cached_z_proj=False * b_proj_k=None b_proj_v=None w_ln_q=None b_ln_q=None w_ln_k=None "
    "b_ln_k=None b_proj_g=None norm_kind='layer_norm'"
)
UP_TO_0_10 = (
    "s q k v z mask num_heads w_proj_z w_proj_g w_proj_o w_ln_z=None b_ln_z=None b_proj_z=None b_proj_g=None "
    "b_proj_o=None inf=1000000.0 eps=1e-05 attn_scale=None return_z_proj=True is_cached_z_proj=False"
)


def masked(rows: int, keys: int) -> Tensor:
    mask = torch.rand(rows, keys) < 0.6
    mask[:, 0] = True
    return mask


def of_heads(queries: int = TOKENS, keys: int = 13, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of the list with q, k and v."""
    torch.manual_seed(queries + keys)
    entries, wide = SEQUENCES * SAMPLES, HEADS * DIM
    shapes = {
        "s": (entries, queries, SINGLE), "q": (entries, HEADS, queries, DIM), "k": (entries, HEADS, keys, DIM),
        "v": (entries, HEADS, keys, DIM), "z": (SEQUENCES, queries, keys, PAIRS), "w_proj_z": (HEADS, PAIRS),
        "w_proj_g": (wide, SINGLE), "w_proj_o": (SINGLE, wide), "w_ln_z": (PAIRS,), "b_ln_z": (PAIRS,),
        "b_proj_z": (HEADS,), "b_proj_g": (wide,), "b_proj_o": (SINGLE,),
    }  # fmt: skip
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()} | {"num_heads": HEADS}


def of_singles(dtype: torch.dtype = torch.float64, **left_out: None) -> dict[str, Any]:
    """Arguments of the list with a single representation; names that are given are left out."""
    torch.manual_seed(3)
    wide = HEADS * DIM
    shapes = {
        "single_repr": (SEQUENCES * SAMPLES, TOKENS, SINGLE), "pair_repr": (SEQUENCES, TOKENS, TOKENS, PAIRS),
        "w_ln_a": (SINGLE,), "b_ln_a": (SINGLE,), "w_proj_z": (HEADS, PAIRS), "b_proj_z": (HEADS,),
        "w_ln_z": (PAIRS,), "b_ln_z": (PAIRS,), "w_proj_o": (SINGLE, wide), "b_proj_o": (SINGLE,),
        **{f"w_proj_{x}": (wide, SINGLE) for x in "qkvg"}, **{f"b_proj_{x}": (wide,) for x in "qkvg"},
        **{f"{part}_ln_{x}": (wide,) for part in "wb" for x in "qk"},
    }  # fmt: skip
    given = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return {**given, **left_out, "num_heads": HEADS}


def wanted(
    s: Tensor, q: Tensor, k: Tensor, v: Tensor, z: Tensor, mask: Tensor | None, x: dict[str, Any], *, centered: bool
) -> tuple[Tensor, Tensor]:
    """The output and the bias; the parameters are those of the call."""
    pairs = normalized(z, x.get("w_ln_z"), x.get("b_ln_z"), 1e-5, centered=centered)
    bias = pairs @ x["w_proj_z"].mT
    bias = (bias if x.get("b_proj_z") is None else bias + x["b_proj_z"]).movedim(-1, 1)
    gate, output = (x["w_proj_g"], x.get("b_proj_g")), (x["w_proj_o"], x.get("b_proj_o"))
    return gated_pair_bias(s, (q, k, v), bias, mask, gate, output, x.get("attn_scale")), bias


def near(results: tuple[Any, ...], exact: tuple[Any, ...], inputs: list[Tensor]) -> None:
    """Results and gradients of the first one."""
    for one, other in zip(results, exact, strict=True):
        torch.testing.assert_close(one, other)
    above = torch.randn_like(exact[0])
    own, same = (torch.autograd.grad(out, inputs, above) for out in (results[0], exact[0]))
    for one, other in zip(own, same, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mask", [None, SEQUENCES, SEQUENCES * SAMPLES], ids=str)
def test_heads_against_float64(mask: int | None) -> None:
    given = of_heads()
    inputs = [x.requires_grad_() for x in given.values() if isinstance(x, Tensor)]
    real = None if mask is None else masked(mask, 13)
    given = {**given, "attn_scale": 0.3}
    exact = wanted(*(given[name] for name in "sqkvz"), real, given, centered=True)
    near(attention_pair_bias(**given, mask=real), exact, inputs)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_singles_against_float64(kind: str) -> None:
    centered = kind == "layer_norm"
    given = of_singles() if centered else of_singles(b_ln_a=None, b_ln_q=None, b_ln_k=None, b_ln_z=None)
    inputs = [x.requires_grad_() for x in given.values() if isinstance(x, Tensor)]
    mask = masked(SEQUENCES, TOKENS)
    single = normalized(given["single_repr"], given["w_ln_a"], given["b_ln_a"], 1e-5, centered=centered)
    q, k, v = (single @ given[f"w_proj_{x}"].mT + given[f"b_proj_{x}"] for x in "qkv")
    q, k = (
        normalized(x, given[f"w_ln_{name}"], given[f"b_ln_{name}"], 1e-5, centered=centered)
        for x, name in ((q, "q"), (k, "k"))
    )
    heads = [x.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for x in (q, k, v)]
    exact = wanted(single, *heads, given["pair_repr"], mask, given, centered=centered)
    near(attention_pair_bias(**given, mask=mask, norm_kind=kind, return_z_proj=True), exact, inputs)


def test_what_may_be_left_out() -> None:
    given = of_singles(
        **dict.fromkeys(name for name in of_singles() if name.startswith("b_") or name.endswith(("ln_q", "ln_k"))),
        w_ln_z=None,
    )
    single = normalized(given["single_repr"], given["w_ln_a"], None, 1e-5, centered=True)
    heads = [(single @ given[f"w_proj_{x}"].mT).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for x in "qkv"]
    exact, _ = wanted(single, *heads, given["pair_repr"], None, given, centered=True)
    out, pairs = attention_pair_bias(**given, mask=None)
    torch.testing.assert_close(out, exact)
    assert pairs is None


def test_by_position() -> None:
    heads, mask = of_heads(), masked(SEQUENCES, 13)
    first = [heads[name] for name in "sqkvz"]
    rest = [heads[name] for name in ("w_proj_z", "w_proj_g", "w_proj_o", "w_ln_z", "b_ln_z", "b_proj_z", "b_proj_g")]
    out, pairs = attention_pair_bias(*first, mask, HEADS, *rest, heads["b_proj_o"])
    named = attention_pair_bias(**heads, mask=mask)
    torch.testing.assert_close((out, pairs), named)
    singles = of_singles()
    names = [each.split("=")[0] for each in SINCE_0_11.split(" * ")[0].split()[:12]]
    values = [None if name == "mask" else singles.pop(name) for name in names]
    torch.testing.assert_close(attention_pair_bias(*values, **singles), attention_pair_bias(**of_singles(), mask=None))


def test_argument_lists() -> None:
    """The names, order and defaults of both are cuEquivariance's."""

    def written(function: Callable[..., Any]) -> str:
        text = [str(each).split(":")[0] + str(each.replace(annotation=each.empty))[len(each.name) :]
                for each in signature(function).parameters.values()]  # fmt: skip
        first = next(
            i for i, each in enumerate(signature(function).parameters.values()) if each.kind == each.KEYWORD_ONLY
        )
        return " ".join([*text[:first], "*", *text[first:]])

    assert written(pair_bias._of_singles) == SINCE_0_11
    assert written(pair_bias._of_heads).split(" * ")[0] == UP_TO_0_10


def test_projected_pairs_serve_again() -> None:
    given, mask = of_heads(), masked(SEQUENCES, 13)
    out, pairs = attention_pair_bias(**given, mask=mask)
    again = {**given, "z": pairs, "w_proj_z": None}
    same, returned = attention_pair_bias(**again, mask=mask, is_cached_z_proj=True)
    torch.testing.assert_close(same, out)
    assert returned is pairs


def test_samples_share_one_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias of each sequence, not of each sample, reaches the variant, and contiguous ones as they are."""
    seen: list[dict[str, Any]] = []

    def attend(candidates: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append({**candidates[0].arguments, "q": q})
        return v.new_zeros(*q.shape[:-1], v.shape[-1])

    monkeypatch.setattr(triangles, "attend", attend)
    given = of_heads(keys=16)
    _, pairs = attention_pair_bias(**given, mask=None)
    attention_pair_bias(**{**given, "z": pairs}, mask=None, is_cached_z_proj=True)
    for each in seen:
        assert each["rows"] == SAMPLES
        assert each["bias"].shape == (SEQUENCES, HEADS, TOKENS, 16)
        assert each["bias"].data_ptr() == pairs.data_ptr() or each is seen[0]
        assert each["q"].data_ptr() == given["q"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    """Parameters may be in float32; results are in the dtype of the single representation."""
    given = of_singles()
    exact, bias = attention_pair_bias(**given, mask=None, return_z_proj=True)
    narrow = {name: x.to(dtype if name.endswith("_repr") else torch.float32)
              for name, x in given.items() if isinstance(x, Tensor)}  # fmt: skip
    out, pairs = attention_pair_bias(**narrow, num_heads=HEADS, mask=None, return_z_proj=True)
    assert (out.dtype, pairs.dtype) == (dtype, dtype)
    torch.testing.assert_close(out.double(), exact, atol=0.5 if dtype != torch.float32 else 1e-4, rtol=0.1)
    torch.testing.assert_close(pairs.double(), bias, atol=0.1 if dtype != torch.float32 else 1e-4, rtol=0.1)


def test_autocast() -> None:
    given = of_singles(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, pairs = attention_pair_bias(**given, mask=None, return_z_proj=True)
    assert (out.dtype, pairs.dtype) == (torch.bfloat16, torch.bfloat16)
    exact, _ = attention_pair_bias(**given, mask=None)
    torch.testing.assert_close(out.float(), exact, atol=0.5, rtol=0.1)


def test_a_sequence_without_real_keys_is_the_mean_of_v() -> None:
    given, mask = of_heads(dtype=torch.float32), masked(SEQUENCES, 13)
    mask[1] = False
    out, _ = attention_pair_bias(**given, mask=mask)
    flat = {**given, "v": given["v"].mean(2, keepdim=True).expand_as(given["v"])}
    torch.testing.assert_close(out[SAMPLES:], attention_pair_bias(**flat, mask=mask)[0][SAMPLES:])


@few("dynamic", [True, False], always=0)
def test_in_a_compiled_program(dynamic: bool) -> None:
    given, mask = of_singles(torch.float32), masked(SEQUENCES, TOKENS)
    compiled = torch.compile(attention_pair_bias, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(compiled(**given, mask=mask), attention_pair_bias(**given, mask=mask))


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "axes of q": (lambda x: {"q": x["q"][0]}, "q must have 4 axes"),
    "axes of s": (lambda x: {"s": x["s"][0]}, "s must have 3 axes"),
    "no tensor": (lambda x: {"z": None}, "z must be a torch.Tensor, got NoneType"),
    "heads": (lambda x: {"num_heads": 3}, "q must have num_heads = 3 heads"),
    "samples": (lambda x: {"z": x["z"].repeat(2, 1, 1, 1)}, "must be a multiple of that of the pairs, 4, got 6"),
    "pairs": (lambda x: {"z": x["z"][:, :, 1:]}, r"must give a bias of the shape \(2, 4, 9, 13\), .* \(2, 4, 9, 12\)"),
    "no projection": (lambda x: {"w_proj_z": None}, "w_proj_z is needed unless"),
    "mask of pairs": (lambda x: {"mask": torch.ones(SEQUENCES, TOKENS, 13)}, r"have the shape \(2, 13\) or \(6"),
    "mask that learns": (lambda x: {"mask": torch.ones(SEQUENCES, 13, requires_grad=True)}, "mask has no gradient"),
    "small inf": (lambda x: {"inf": 10.0}, "inf must be at least 1000"),
    "no number": (lambda x: {"inf": float("nan")}, "inf must be at least 1000"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    given = {**of_heads(), "mask": None}
    with pytest.raises(CallError, match=message):
        attention_pair_bias(**{**given, **changed(given)})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norm_kind": "rms_norm"}, "b_ln_a, b_ln_q, b_ln_k and b_ln_z must be None"),
        ({"num_heads": 5}, "w_proj_q must have rows for 5 heads"),
        ({"single_repr": torch.ones(2, 3)}, "single_repr must have 3 axes"),
    ],
    ids=str,
)
def test_refused_singles(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError, match=message):
        attention_pair_bias(**{**of_singles(), "mask": None, **changed})
