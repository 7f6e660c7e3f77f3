"""Whatever a function reads may change between calls: masks that are made again, and calls, notice it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

from attngen.integrations.flex import attention as ours
from attngen.integrations.flex import meaning as meanings
from attngen.integrations.flex.identity import FunctionInputs, Watch

SIZE = 24
settings = ModuleType("settings_of_a_test")
REACH = 3


def seen(function: Callable[..., Any]) -> int:
    return int(ours.create_block_mask(function, None, None, SIZE, SIZE, "cpu").visible().sum())


def within(reach: int) -> int:
    places = torch.arange(SIZE)
    return int(((places[:, None] - places).abs() <= reach).sum())


class Config:
    reach = 3


@dataclasses.dataclass
class Fields:
    reach: int = 3


class Slots:
    __slots__ = ("reach",)

    def __init__(self) -> None:
        self.reach = 3


class Computed:
    def __init__(self) -> None:
        self.twice = 6

    @property
    def reach(self) -> int:
        return self.twice // 2


class Helped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reach = 3
        self.scale = torch.nn.Parameter(torch.ones(SIZE))

    def limit(self) -> int:
        return self.reach

    def mask(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv).abs() <= self.limit()

    def score(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s * self.scale[kv]


def _read_by(holder: Any) -> Callable[..., Any]:
    return lambda b, h, q, kv: (q - kv).abs() <= holder.reach


def _by_global(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() <= REACH


def _by_module(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() <= settings.reach


def _by_key(values: Any) -> Callable[..., Any]:
    return lambda b, h, q, kv: (q - kv).abs() <= values[0]


def _by_default(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, reach: int = 3) -> Tensor:
    return (q - kv).abs() <= reach


def _by_keyword(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, reach: int = 3) -> Tensor:
    return (q - kv).abs() <= reach


def _cells() -> tuple[Callable[..., Any], Callable[[], None]]:
    reach = 3

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv).abs() <= reach

    def change() -> None:
        nonlocal reach
        reach = 5

    return mask, change


def _attribute(holder: Any, name: str = "reach") -> Callable[[], None]:
    return lambda: setattr(holder, name, 10 if name == "twice" else 5)


def _cases() -> dict[str, tuple[Callable[..., Any], Callable[[], Any]]]:
    fields, slots, computed, helped = Fields(), Slots(), Computed(), Helped()
    place, values, named, tensor = SimpleNamespace(reach=3), [3], {0: 3}, torch.tensor(3)
    row = torch.full((SIZE,), 3)
    settings.reach = 3
    given = partial(lambda b, h, q, kv, reach: (q - kv).abs() <= reach, reach=3)
    of_torch = theirs.and_masks(_read_by(place), lambda b, h, q, kv: q >= q)
    return {
        "cell": _cells(),
        "global": (_by_global, lambda: globals().__setitem__("REACH", 5)),
        "module": (_by_module, _attribute(settings)),
        "class": (_read_by(Config), _attribute(Config)),
        "class of an object": (_read_by(Config()), _attribute(Config)),
        "dataclass": (_read_by(fields), _attribute(fields)),
        "slots": (_read_by(slots), _attribute(slots)),
        "property": (_read_by(computed), _attribute(computed, "twice")),
        "method": (helped.mask, _attribute(helped)),
        "list": (_by_key(values), lambda: values.__setitem__(0, 5)),
        "dict": (_by_key(named), lambda: named.__setitem__(0, 5)),
        "number in a tensor": (lambda b, h, q, kv: (q - kv).abs() <= tensor, lambda: tensor.fill_(5)),
        "element": (lambda b, h, q, kv: (q - kv).abs() <= row[0], lambda: row.fill_(5)),
        "computed element": (lambda b, h, q, kv: (q - kv).abs() <= row.max(), lambda: row.fill_(5)),
        "list of a tensor": (lambda b, h, q, kv: (q - kv).abs() <= row.tolist()[0], lambda: row.fill_(5)),
        "default": (_by_default, lambda: setattr(_by_default, "__defaults__", (5,))),
        "keyword": (_by_keyword, lambda: _by_keyword.__kwdefaults__.__setitem__("reach", 5)),  # type: ignore[index]
        "partial": (given, lambda: given.keywords.__setitem__("reach", 5)),
        "torch's and_masks": (of_torch, _attribute(place)),
    }


@pytest.mark.parametrize("name", _cases())
def test_a_change_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By making a mask again, and by a call with the mask that was made before."""
    for holder, attribute in ((Config, "reach"), (_by_default, "__defaults__")):
        monkeypatch.setattr(holder, attribute, getattr(holder, attribute))
    monkeypatch.setitem(globals(), "REACH", 3)
    monkeypatch.setattr(_by_keyword, "__kwdefaults__", {"reach": 3})
    function, change = _cases()[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, SIZE, 8) for _ in range(3))
    mask = ours.create_block_mask(function, None, None, SIZE, SIZE, "cpu")
    first = ours.flex_attention(q, k, v, None, mask)
    assert torch.equal(ours.flex_attention(q, k, v, None, mask), first)
    assert seen(function) == within(3)
    change()
    assert seen(function) == within(5)
    places = torch.arange(SIZE)
    allowed = (places[:, None] - places).abs() <= 5
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    torch.testing.assert_close(ours.flex_attention(q, k, v, None, mask), wanted, atol=1e-5, rtol=1e-5)


def test_arguments_that_are_swapped() -> None:
    def between(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, low: int, high: int) -> Tensor:
        return (q - kv >= low) & (q - kv <= high)

    assert seen(partial(between, low=1, high=2)) != seen(partial(between, high=1, low=2))


def test_a_name_that_hides_one_of_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    function = eval("lambda b, h, q, kv: q - kv < max(2, 4)", globals())
    watch = Watch(function)
    before = seen(function)
    monkeypatch.setitem(globals(), "max", min)
    assert not watch.holds()
    assert seen(function) < before


def test_a_parameter_whose_numbers_are_replaced() -> None:
    helped = Helped()
    watch = Watch(helped.score)
    assert watch.complete
    assert watch.holds()
    helped.half()  # replaces what the parameter holds, and counts no change
    assert not watch.holds()


def test_what_cannot_be_found_is_said() -> None:
    def dynamic(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv < getattr(settings, "re" + "ach")

    assert not FunctionInputs(dynamic).complete
    assert not FunctionInputs(_read_by(Computed())).complete
    assert not FunctionInputs(_by_key(iter([1]))).complete
    assert FunctionInputs(_read_by(Fields())).complete
    settings.reach = 3
    before = seen(dynamic)
    settings.reach = 5
    assert seen(dynamic) > before


def test_tensors_of_inference_mode_are_looked_at_again() -> None:
    with torch.inference_mode():
        doc = torch.arange(SIZE) // 5

        def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return doc[q] == doc[kv]

        assert "monotone" in meanings.meaning(mask, None, torch.device("cpu")).variant.fields["tensors"]["doc"]
        doc.copy_(torch.arange(SIZE).flip(0) % 3)
        assert "monotone" not in meanings.meaning(mask, None, torch.device("cpu")).variant.fields["tensors"]["doc"]
        assert seen(mask) == int((doc[:, None] == doc).sum())


def test_a_tensor_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.integrations.flex import facts as flex_facts

    looked: list[Tensor] = []
    init = flex_facts.Look.__init__
    monkeypatch.setattr(flex_facts.Look, "__init__", lambda self, tensor: looked.append(tensor) or init(self, tensor))
    doc = torch.arange(SIZE) // 5
    bias = torch.randn(SIZE)
    q, k, v = (torch.randn(1, 1, SIZE, 8) for _ in range(3))
    for _ in range(2):
        mask = ours.create_block_mask(lambda b, h, q, kv: doc[q] == doc[kv], None, None, SIZE, SIZE, "cpu")
        ours.flex_attention(q, k, v, None, mask)
        ours.flex_attention(q, k, v, lambda s, b, h, q, kv: s + bias[doc[kv]], mask)
    assert len(looked) == 1


def test_functions_of_this_package_are_read_like_any_other() -> None:
    from attngen.lab.bench.flex import functions

    keys = [[FunctionInputs(mask_mod).key for mask_mod, _ in functions("cpu").values()] for _ in range(2)]
    assert keys[0] == keys[1]


is_enabled = torch.is_grad_enabled  # under another name
MODES: dict[str, tuple[Callable[[], bool], Callable[[], Any]]] = {
    "grad": (lambda: torch.is_grad_enabled(), torch.no_grad),
    "grad by another name": (lambda: is_enabled(), torch.no_grad),
    "inference": (lambda: not torch.is_inference_mode_enabled(), torch.inference_mode),
    "autocast": (lambda: not torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu", torch.bfloat16)),
    "default device": (lambda: torch.get_default_device().type == "cpu", lambda: torch.device("meta")),
}


@pytest.mark.parametrize("name", MODES)
def test_state_of_torch_is_that_of_the_call(name: str) -> None:
    """A mask and a score that read it, called in turn with and without a mode."""
    reads, mode = MODES[name]
    q = torch.randn(1, 1, SIZE, 16)
    places, logits = torch.arange(SIZE), (q @ q.mT / 4).squeeze()

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j if reads() else i <= j

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + j if reads() else s - j

    mask = ours.create_block_mask(mask_mod, None, None, SIZE, SIZE, "cpu")
    lower = (logits + places).masked_fill(places[:, None] < places, -torch.inf).softmax(-1) @ q
    upper = (logits - places).masked_fill(places[:, None] > places, -torch.inf).softmax(-1) @ q
    for _ in range(2):
        torch.testing.assert_close(ours.flex_attention(q, q, q, score_mod, mask), lower)
        with mode():
            inside = ours.flex_attention(q, q, q, score_mod, mask)
        rounded = inside.dtype == torch.bfloat16  # as autocast has it
        torch.testing.assert_close(inside.float(), upper, **({"atol": 5e-2, "rtol": 0.0} if rounded else {}))


def test_a_score_that_reads_the_grad_mode_has_its_gradient() -> None:
    q, weight = torch.randn(1, 1, SIZE, 16), torch.randn(SIZE, requires_grad=True)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + weight[j] * (2.0 if torch.is_grad_enabled() else 1.0)

    (gradient,) = torch.autograd.grad(ours.flex_attention(q, q, q, score_mod).square().sum(), weight)
    wanted = ((q @ q.mT / 4 + 2.0 * weight).softmax(-1) @ q).square().sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, weight)[0])


@pytest.mark.parametrize("mode", ["default dtype", "autocast"])
def test_modes_that_decide_dtypes_are_watched(mode: str) -> None:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + j / 3

    before, key, watch = torch.get_default_dtype(), FunctionInputs(score_mod).key, Watch(score_mod)
    assert watch.holds()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            if mode == "default dtype":
                torch.set_default_dtype(torch.float64)
            assert not watch.holds()
            assert FunctionInputs(score_mod).key != key
            assert Watch(score_mod).holds()
    finally:
        torch.set_default_dtype(before)
    assert watch.holds()


def test_nothing_random() -> None:
    with pytest.raises(Exception, match="returns random numbers"):
        seen(lambda b, h, q, kv: torch.rand(()) + q > kv)
