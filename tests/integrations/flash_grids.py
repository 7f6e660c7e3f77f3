"""The grids of flash-attention's own test file for version 3 (hopper/test_flash_attn.py), drawn and run.

Each family has the axes over which that file loops, the loops inside of its tests among them, and the same limits: the
error may be at most a multiple of that of plain torch in the dtype of the call. Every call goes through
``attngen.integrations.flash_attn_3`` alone.

Head dims 59 and 111 are left out, which flash-attention refuses, and so is its check of operator schemas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations import flash_attn_3

#: What sums of the same float32 products in another order differ by. With one key, gradients are exactly 0 in plain
#: torch, and the rounding of some hundred queries in a kernel.
NOISE = 5e-5

#: Heads of q in all families that are compared with a reference.
HEADS = 6

FP8 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8, "fp32": torch.float32}

_LENGTHS = {
    "forward": (
        (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
        (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
        (4096, 4096), (4224, 4224),
    ),
    "varlen": (
        (1, 1), (1, 3), (2, 1), (511, 1), (3, 513), (64, 128), (128, 128), (256, 256), (113, 203), (128, 217),
        (113, 211), (108, 256), (256, 512), (307, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024),
        (1024, 1023), (1024, 1024), (2048, 2048), (4096, 4096),
    ),
    "cache": (
        (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (128, 128), (256, 512),
        (2048, 3577),
    ),
    "repeated": (
        (1, 239), (239, 1), (3, 799), (799, 3), (1024, 128), (97, 97), (128, 128), (200, 200), (256, 256), (257, 257),
        (384, 384), (512, 512), (768, 768), (1024, 1024), (2048, 2048),
    ),
}  # fmt: skip

_FLAGS = (False, True)
_DENSE = {
    "head_dim": (64, 96, 128, 192, 256), "causal": _FLAGS, "local": _FLAGS, "softcap": (0.0, 15.0), "qv": _FLAGS,
    "kv_heads": (6, 2, 1), "dtype": ("bf16", "fp16", "fp8"),
}  # fmt: skip

#: Axes of the cases that the file collects, by family.
GRIDS: dict[str, dict[str, Sequence[Any]]] = {
    "forward": {"lengths": _LENGTHS["forward"], **_DENSE},
    "varlen": {"lengths": _LENGTHS["varlen"], "unused": _FLAGS, **_DENSE},
    "cache": {
        "lengths": _LENGTHS["cache"], "packed": _FLAGS, "indexed": _FLAGS, "leftpad": _FLAGS,
        "page_size": (None, 1, 4, 128), "rotary": (0.0, 0.5, 1.0), "interleaved": _FLAGS, "new_as_queries": _FLAGS,
        "mask": ("full", "causal", "local"), "new_keys": _FLAGS, "kv_heads": (6, 1, 3), "dtype": ("bf16", "fp8"),
    },
    "combine": {
        "num_splits": (1, 2, 3, 5, 17, 32, 55, 97, 133), "seqlen": (1, 2, 3, 32, 64, 256, 113, 108, 640, 1024),
        "head_dim": (64, 96, 128, 192, 256, 512), "dtype": ("fp32", "fp16", "bf16"),
    },
    "repeated": {
        "lengths": _LENGTHS["repeated"], "head_dim": (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256),
        "causal": _FLAGS,
    },
    "few_queries": {"causal": _FLAGS},
    "one_prompt": {"dtype": ("bf16",)},
}  # fmt: skip

#: Axes of the loops inside of a case; ``wide`` picks the head dim of v.
INNER: dict[str, dict[str, Sequence[Any]]] = {
    "forward": {"wide": (0, 1, 2), "chunked": _FLAGS, "pack_gqa": _FLAGS, "num_splits": (1, 3)},
    "varlen": {"wide": (0, 1, 2), "chunked": _FLAGS, "pack_gqa": _FLAGS, "num_splits": (1, 3, 0)},
    "cache": {"chunked": _FLAGS, "num_splits": (1, 3, 0), "metadata": _FLAGS},
}

#: Shares of a sample; each case of the families that are not here is in every sample.
_SHARES = {"forward": 0.27, "varlen": 0.29, "cache": 0.4, "combine": 0.03, "repeated": 0.01}


@dataclass(frozen=True)
class Case:
    """A point of a family's grid; ``seed`` gives its tensors."""

    family: str
    seed: int
    values: Mapping[str, Any]

    def __getitem__(self, axis: str) -> Any:
        return self.values[axis]

    def get(self, axis: str, default: Any = None) -> Any:
        """Value along an axis, or the default for a family that has no such axis."""
        return self.values.get(axis, default)

    def kind(self) -> tuple[Any, ...]:
        """Key of the kernels that the case runs, more or less: cases of one kind share them."""
        dense = self.family == "cache" and not (self["packed"] or self["indexed"] or self["page_size"])
        layout = f"cache {dense and self['num_splits'] != 1}" if self.family == "cache" else self.family
        axes = ("dtype", "head_dim", "wide", "causal", "local", "softcap", "mask", "chunked", "leftpad", "qv")
        return (layout, *(str(self.get(axis)) for axis in axes))

    def __str__(self) -> str:
        return f"{self.family} seed={self.seed} " + " ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True)
class Outcome:
    """Result of a case: ``right``, ``wrong`` or ``refused``, and why."""

    verdict: str
    reason: str = ""


def collected(family: str) -> int:
    """Number of cases that the file collects for a family."""
    return math.prod(len(values) for values in GRIDS[family].values())


def draw(count: int, seed: int = 0, *, longest: int = 2**30) -> list[Case]:
    """Draw about ``count`` distinct cases that the file does not skip, with no length beyond ``longest``."""
    chance = Random(seed)
    cases: list[Case] = []
    for family, axes in GRIDS.items():
        axes = {**axes, **INNER.get(family, {})}
        if family not in _SHARES:
            if longest >= 8192:
                name, values = next(iter(axes.items()))
                cases += [Case(family, chance.randrange(2**31), {name: value}) for value in values]
            continue
        seen: set[str] = set()
        wanted = max(round(count * _SHARES[family]), 1)
        for _ in range(1000 * wanted):  # small lengths may leave fewer cases than that
            if len(seen) == wanted:
                break
            values = {name: chance.choice(options) for name, options in axes.items()}
            if _runs(family, values, longest) and repr(values) not in seen:
                seen.add(repr(values))
                cases.append(Case(family, chance.randrange(2**31), values))
    return cases


def _runs(family: str, at: Mapping[str, Any], longest: int) -> bool:
    """Whether the file runs a combination, rather than skip it or leave the round of a loop out."""
    rows, keys = at.get("lengths", (1, 1))
    if max(rows, keys, at.get("seqlen", 1)) > longest:
        return False
    if family in ("forward", "varlen"):
        if at["qv"] and (at["head_dim"] != 64 or at["dtype"] == "fp8"):
            return False
        if at["wide"] >= len(_value_dims(at)) or (at["qv"] and at["chunked"] and at["wide"] > 1):
            return False
        return not (family == "varlen" and at["chunked"] and rows > keys)
    if family == "cache":
        if at["page_size"] is not None and keys % at["page_size"]:
            return False
        if at["rotary"] and not at["new_keys"]:
            return False
        return not (at["chunked"] and at["mask"] == "full")
    return not at.get("head_dim", 8) % 8


def _value_dims(at: Mapping[str, Any]) -> tuple[int, ...]:
    """Head dims of v that the file runs beside a head dim of q and k."""
    dim: int = at["head_dim"]
    if at["qv"]:
        return 256, 512
    if at["dtype"] == "fp8":
        return (dim,)
    return (128, dim) if dim == 192 else (256, 512, dim) if dim == 64 else (dim,)


def run(case: Case, device: str) -> Outcome:
    """Run a case on a device, and judge its results."""
    check: Callable[[Case, _Tensors], str | None] = _FAMILIES[case.family]
    try:
        actual = check(case, _Tensors(case.seed, device))
    except (CallError, NoKernelError) as error:
        return Outcome("refused", str(error))
    return Outcome("right") if actual is None else Outcome("wrong", actual)


class _Tensors:
    """Random tensors and numbers of one case."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._chance = Random(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal numbers that ``dtype`` has, in bfloat16 for one of 8 bits."""
        numbers = torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.float32)
        return numbers.to(torch.bfloat16).to(dtype).to(torch.bfloat16) if dtype == FP8 else numbers.to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def number(self, low: int, beyond: int) -> int:
        """An integer from ``low`` to below ``beyond``."""
        return self._chance.randrange(low, beyond)

    def lengths(self, longest: int, batch: int, *, zeros: bool = False) -> list[int]:
        """Lengths at most 20 below the longest; with ``zeros``, every fifth and the last are 0."""
        actual = [self.number(max(0 if zeros else 1, longest - 20), longest + 1) for _ in range(batch)]
        return [0 if zeros and (i % 5 == 0 or i == batch - 1) else n for i, n in enumerate(actual)]

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device, dtype=torch.int32)

    def integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


# --- the reference ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """Keys that the queries of a sequence see, besides its length: what the file's arguments say."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0

    def seen(self, rows: int, keys: int, pad: int, device: str) -> Tensor | None:
        """Pairs (rows, keys) that are seen, the last query aligned with the last key; None for all."""
        left, right = self.window[0], 0 if self.causal else self.window[1]
        if max(left, right) < 0 and not self.chunk and not pad:
            return None
        key = torch.arange(keys, device=device)[None]
        position = torch.arange(rows, device=device)[:, None] + keys - rows
        seen = (key >= pad).expand(rows, keys)
        if left >= 0:
            seen = seen & (key >= position - left)
        if right >= 0:
            seen = seen & (key <= position + right)
        if self.chunk:  # counted from the first key that is not padding
            first = position - (position - pad) % self.chunk
            seen = seen & (key >= first) & (key < first + self.chunk)
        return seen


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, *, softcap: float = 0.0, exact: bool,
    rounded: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one sequence, q (rows, h, d) over k and v (keys, hk, d), in q's dtype.

    All steps are in float32 if ``exact``, else in q's dtype, with the scale on k. Probabilities are ``rounded`` to a
    dtype.
    """
    dtype, scale, group = q.dtype, q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    if exact:
        q, k, v = q.float() * scale, k.float(), v.float()
    else:
        k = k * scale
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k)
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    p = torch.softmax(s, dim=-1).to(v.dtype)
    if seen is not None:
        p = p.masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)
    if rounded is not None:
        p = p.to(rounded).to(p.dtype)
    return torch.einsum("hqk,khd->qhd", p, v).to(dtype)


@dataclass
class _Wanted:
    """Results of sequences, exact and of plain torch, one after the other; with gradients if they are asked for."""

    exact: list[Tensor]
    plain: list[Tensor]
    gradients: tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]

    @classmethod
    def none(cls) -> _Wanted:
        return cls([], [], ([], []))

    def add(
        self, inputs: Sequence[Tensor], scales: Sequence[Tensor | None], seen: Tensor | None, softcap: float,
        rounded: torch.dtype | None, dout: Tensor | None,
    ) -> None:  # fmt: skip
        """Compute one sequence. ``scales`` (hk,) multiply q, k and v."""
        for exact, outs, gradients in (
            (True, self.exact, self.gradients[0]), (False, self.plain, self.gradients[1]),
        ):  # fmt: skip
            leaves = [t.detach().requires_grad_(dout is not None) for t in inputs]
            q, k, v = (_scaled(t, scale, exact) for t, scale in zip(leaves, scales, strict=True))
            out = attention(q, k, v, seen, softcap=softcap, exact=exact, rounded=None if exact else rounded)
            out = out.to(inputs[0].dtype)
            outs.append(out.detach())
            if dout is not None:
                gradients.append(torch.autograd.grad(out, leaves, dout))


def _scaled(t: Tensor, scale: Tensor | None, exact: bool) -> Tensor:
    if scale is None:
        return t.float() if exact else t
    by_head = scale.repeat_interleave(t.shape[1] // scale.shape[0])
    product = t.float() * by_head[None, :, None]
    return product if exact else product.to(t.dtype)


def _beyond(name: str, actual: Tensor, exact: Tensor, plain: Tensor, factor: float, extra: float = 0.0) -> str | None:
    """Say by how much a result is wrong, or None: the limit is ``factor`` times the error of plain torch, and what
    rounding of the exact result costs."""
    if not exact.numel():
        return None
    error = (actual.float() - exact.float()).abs().max().item()
    allowed = (plain.float() - exact.float()).abs().max().item()
    rounding = 2 * (exact + 0.3 - 0.3 - exact).abs().max().item()
    if error <= factor * allowed + rounding + extra:
        return None
    return f"{name} is off by {error:.3g}; plain torch by {allowed:.3g}, rounding {rounding:.3g}"


# --- families -----------------------------------------------------------------------------------------------


def _inputs(case: Case, made: _Tensors, rows: int, keys: int) -> tuple[list[Tensor], Tensor | None]:
    """Return q (rows, h, d), k and v (keys, hk, d), and qv or None."""
    dtype, dim = DTYPES[case["dtype"]], case["head_dim"]
    dim_v = _value_dims(case.values)[case["wide"]]
    wide = torch.bfloat16 if dtype == FP8 else dtype
    q = made.normal(rows, HEADS, dim, dtype=wide)
    if case["softcap"]:
        q = q * (case["softcap"] / 4)  # logits reach the cap
    q = q.to(dtype).to(wide)
    k, v = (made.normal(keys, case["kv_heads"], n, dtype=dtype) for n in (dim, dim_v))
    return [q, k, v], made.normal(rows, HEADS, dim_v, dtype=dtype) if case["qv"] else None


def _descales(case: Case, made: _Tensors, batch: int) -> list[Tensor | None]:
    if case["dtype"] != "fp8":
        return [None] * 3
    return [made.uniform(batch, case["kv_heads"]) * 2 for _ in range(3)]


def _options(case: Case, descales: Sequence[Tensor | None]) -> dict[str, Any]:
    names = ("q_descale", "k_descale", "v_descale")
    return {
        "causal": case["causal"], "softcap": case["softcap"], "pack_gqa": case["pack_gqa"],
        "num_splits": case["num_splits"], **dict(zip(names, descales, strict=True)),
    }  # fmt: skip


def _differentiates(case: Case) -> bool:
    """Whether the file looks at gradients."""
    wide = _value_dims(case.values)[case["wide"]] > 256
    return case["dtype"] != "fp8" and not (case["qv"] or case["chunked"] or wide)


def _forward(case: Case, made: _Tensors) -> str | None:
    rows, keys = case["lengths"]
    batch = 9 if keys <= 2048 else 2
    flat, qv = _inputs(case, made, batch * rows, batch * keys)
    dense = [t.unflatten(0, (batch, -1)) for t in flat]
    window = (made.number(0, keys), made.number(0, keys)) if case["local"] else (-1, -1)
    chunk = made.number(1, 2 * keys) if case["chunked"] else 0
    descales = _descales(case, made, batch)
    dtype = DTYPES[case["dtype"]]
    leaves = [t.to(dtype).requires_grad_(dtype != FP8) for t in dense]
    out = flash_attn_3.flash_attn_func(
        *leaves, qv=None if qv is None else qv.unflatten(0, (batch, -1)), window_size=list(window),
        attention_chunk=chunk, **_options(case, descales),
    )  # fmt: skip
    dout = made.normal(*out.shape, dtype=out.dtype) if _differentiates(case) else None
    grads = torch.autograd.grad(out, leaves, dout) if dout is not None else None
    wanted = _Wanted.none()
    seen = Mask(case["causal"], window, chunk).seen(rows, keys, 0, made.device)
    for b in range(batch):
        scales = [None if scale is None else scale[b] for scale in descales]
        wanted.add(
            [t[b] for t in dense], scales, seen, case["softcap"], FP8 if dtype == FP8 else None,
            None if dout is None else dout[b],
        )  # fmt: skip
    gradients = None if grads is None else [list(t) for t in grads]
    return _judge(case, list(out.detach()), gradients, wanted)


def _judge(case: Case, outs: list[Tensor], gradients: list[list[Tensor]] | None, wanted: _Wanted) -> str | None:
    factor, extra = (3, 3e-4) if case["softcap"] else (2, NOISE)
    wrong = _beyond("out", torch.cat(outs), torch.cat(wanted.exact), torch.cat(wanted.plain), factor)
    if gradients is not None:
        for place, name in enumerate(("dq", "dk", "dv")):
            exact, plain = (torch.cat([each[place] for each in side]) for side in wanted.gradients)
            wrong = wrong or _beyond(name, torch.cat(gradients[place]), exact, plain, factor, extra)
    return wrong


def _varlen(case: Case, made: _Tensors) -> str | None:
    longest = case["lengths"]
    batch = 9 if longest[0] <= 2048 else 2
    used = made.lengths(longest[0], batch), made.lengths(longest[1], batch, zeros=True)
    whole = used
    if case["unused"]:
        others = made.lengths(longest[0], batch), made.lengths(longest[1], batch)
        whole = tuple([max(pair) for pair in zip(*both, strict=True)] for both in zip(used, others, strict=True))
        used = tuple([min(pair) for pair in zip(*both, strict=True)] for both in zip(used, others, strict=True))
    starts = [[0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in whole]
    packed, qv = _inputs(case, made, starts[0][-1], starts[1][-1])
    window = (made.number(0, longest[1]), made.number(0, longest[1])) if case["local"] else (-1, -1)
    chunk = made.number(1, 2 * longest[1]) if case["chunked"] else 0
    descales = _descales(case, made, batch)
    dtype = DTYPES[case["dtype"]]
    leaves = [t.to(dtype).requires_grad_(dtype != FP8) for t in packed]
    out = flash_attn_3.flash_attn_varlen_func(
        *leaves, *(made.integers(s) for s in starts), *(max(lengths) for lengths in whole),
        seqused_q=made.integers(used[0]), seqused_k=made.integers(used[1]), qv=qv, attention_chunk=chunk,
        window_size=torch.tensor(window) if case["local"] else window, **_options(case, descales),
    )  # fmt: skip
    dout = made.normal(*out.shape, dtype=out.dtype) if _differentiates(case) else None
    grads = torch.autograd.grad(out, leaves, dout) if dout is not None else None
    wanted, mask = _Wanted.none(), Mask(case["causal"], window, chunk)
    places = [
        [slice(first, first + n) for first, n in zip(s, lengths, strict=False)]
        for s, lengths in zip(starts, used, strict=True)
    ]
    for b in range(batch):
        rows, keys = places[0][b], places[1][b]
        inputs = [packed[0][rows], packed[1][keys], packed[2][keys]]
        scales = [None if scale is None else scale[b] for scale in descales]
        seen = mask.seen(used[0][b], used[1][b], 0, made.device)
        wanted.add(
            inputs, scales, seen, case["softcap"], FP8 if dtype == FP8 else None, None if dout is None else dout[rows]
        )
    gradients = None
    if grads is not None:
        gradients = [[t[part] for part in places[min(place, 1)]] for place, t in enumerate(grads)]
    return _judge(case, [out.detach()[part] for part in places[0]], gradients, wanted)


@torch.no_grad()
def _cache(case: Case, made: _Tensors) -> str | None:
    rows, capacity = case["lengths"]
    batch, dim, dtype = 5, 128, DTYPES[case["dtype"]]
    entries = 2 * batch if case["indexed"] else batch
    causal, local = case["mask"] == "causal", case["mask"] == "local"
    window = (made.number(0, capacity), made.number(0, capacity)) if local else (-1, -1)
    chunk = made.number(1, 2 * capacity) if case["chunked"] else 0
    half = int(case["rotary"] * dim) // 16 * 8
    queries = made.lengths(rows, batch) if case["packed"] else [rows] * batch
    longest_new = rows if case["new_as_queries"] else made.number(1, rows + 1)
    news = [0] * batch
    if case["new_keys"]:
        news = made.lengths(longest_new, batch) if case["packed"] else [longest_new] * batch
    room = capacity - (rows if half and case["mask"] != "full" else longest_new)
    before = [made.number(0, room + 1) if case["new_keys"] else made.number(1, capacity + 1) for _ in range(batch)]
    pads = [made.number(0, n) if case["leftpad"] and n else 0 for n in before]
    index = made.order(entries)[:batch] if case["indexed"] else None
    q = made.normal(sum(queries), HEADS, dim, dtype=dtype)
    k, v = (made.normal(sum(news), case["kv_heads"], dim, dtype=dtype) for _ in "kv")
    if case["page_size"] is None:
        table, shape = None, (entries, capacity)
    else:
        shape = (3 * capacity // case["page_size"] * entries, case["page_size"])
        table = made.order(shape[0]).view(entries, -1)
    caches = [made.normal(*shape, case["kv_heads"], dim, dtype=dtype) for _ in "kv"]
    cos = sin = None
    if half:
        angles = made.uniform(capacity if table is None else shape[0] * shape[1], half) * (2 * math.pi)
        cos, sin = (f(angles).to(torch.bfloat16).to(dtype).to(torch.bfloat16) for f in (torch.cos, torch.sin))

    def logical(cache: Tensor, b: int) -> Tensor:
        """Keys of a sequence in their order, a copy."""
        entry = b if index is None else int(index[b])
        rows = cache.view(torch.uint8) if cache.dtype == FP8 else cache  # torch moves bytes, but not numbers of 8 bits
        rows = (rows[entry] if table is None else rows[table[entry]].flatten(0, 1))[:capacity].clone()
        return rows.view(cache.dtype)

    wanted, mask, kept = _Wanted.none(), Mask(causal, window, chunk), []
    row = new = 0
    for b in range(batch):
        own, ours, theirs = q[row : row + queries[b]], k[new : new + news[b]], v[new : new + news[b]]
        row, new, length = row + queries[b], new + news[b], before[b] + news[b]
        if cos is not None and sin is not None:
            offset = torch.arange(queries[b], device=made.device) * (case["mask"] != "full")
            own = _rotated(own, cos, sin, before[b] + offset, case["interleaved"])
            ours = _rotated(ours, cos, sin, before[b] + torch.arange(news[b], device=made.device), case["interleaved"])
        keys, values = logical(caches[0], b), logical(caches[1], b)
        keys[before[b] : length], values[before[b] : length] = ours, theirs
        kept.append((keys, values))
        seen = mask.seen(queries[b], length, pads[b], made.device)
        wanted.add([own, keys[:length], values[:length]], [None] * 3, seen, 0.0, FP8 if dtype == FP8 else None, None)

    real = [t.to(dtype) for t in caches]
    lengths = made.integers(before)
    given: dict[str, Any] = {
        "cache_seqlens": lengths, "cache_batch_idx": index, "page_table": table, "rotary_seqlens": lengths,
        "cache_leftpad": made.integers(pads) if case["leftpad"] else None,
        "rotary_cos": None if cos is None else cos.to(dtype), "rotary_sin": None if sin is None else sin.to(dtype),
        "rotary_interleaved": case["interleaved"], "causal": causal, "attention_chunk": chunk,
        "window_size": torch.tensor(window) if local else window, "num_splits": case["num_splits"],
    }  # fmt: skip
    q = q.to(dtype)
    if case["packed"]:
        given |= {"cu_seqlens_q": made.integers([0, *torch.tensor(queries).cumsum(0)]), "max_seqlen_q": max(queries)}
    else:
        q = q.unflatten(0, (batch, -1))
    if case["new_keys"]:
        given |= {"k": k.to(dtype), "v": v.to(dtype)}
        if case["packed"]:
            given["cu_seqlens_k_new"] = made.integers([0, *torch.tensor(news).cumsum(0)])
        else:
            given |= {name: given[name].unflatten(0, (batch, -1)) for name in "kv"}
    if case["metadata"]:
        given["scheduler_metadata"] = flash_attn_3.get_scheduler_metadata(
            batch, max(queries), capacity if table is None else table.shape[1] * shape[1], HEADS, case["kv_heads"],
            dim, lengths, dtype, headdim_v=dim, cu_seqlens_q=given.get("cu_seqlens_q"),
            cu_seqlens_k_new=given.get("cu_seqlens_k_new"), cache_leftpad=given["cache_leftpad"],
            max_seqlen_k_new=longest_new, page_size=case["page_size"], causal=causal,
            window_size=given["window_size"], attention_chunk=chunk, num_splits=case["num_splits"],
        )  # fmt: skip
    for _ in range(1 + case["metadata"]):  # metadata are used again
        given_caches = [t.clone() for t in real]
        out, _, *_ = flash_attn_3.flash_attn_with_kvcache(q, *given_caches, **given, return_softmax_lse=True)
        wrong = _judge_cache(case, out if case["packed"] else out.flatten(0, 1), wanted, dtype)
        for b, (keys, values) in enumerate(kept if case["new_keys"] else ()):
            wrong = wrong or _judge_rows(case, [logical(t, b).float() for t in given_caches], keys, values, dtype)
        if wrong is not None:
            return wrong
    return None


def _judge_cache(case: Case, out: Tensor, wanted: _Wanted, dtype: torch.dtype) -> str | None:
    exact, plain = (torch.cat(side).float() for side in (wanted.exact, wanted.plain))
    error, allowed = (out.float() - exact).abs(), (plain - exact).abs()
    factor, factor_of_mean = (4, 3) if dtype == FP8 else (2, 1.5)
    if not error.max() <= factor * allowed.max() + 1e-5:
        return f"out is off by {error.max().item():.3g}; plain torch by {allowed.max().item():.3g}"
    if not error.mean() <= factor_of_mean * allowed.mean():
        return f"out is off by {error.mean().item():.3g} in the mean; plain torch by {allowed.mean().item():.3g}"
    return None


def _judge_rows(case: Case, actual: list[Tensor], keys: Tensor, values: Tensor, dtype: torch.dtype) -> str | None:
    """Compare what a cache holds after the call."""
    keys, values = (t.to(dtype).float() for t in (keys, values))
    near = 1e-3 if dtype == FP8 else 0.0
    if not torch.allclose(actual[1], values, rtol=near, atol=near):
        return "the cache of v holds something else"
    near = 0.0 if not case["rotary"] else 1e-1 if dtype == FP8 else 1e-3
    return None if torch.allclose(actual[0], keys, rtol=near, atol=near) else "the cache of k holds something else"


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first numbers of (rows, heads, head_dim) in float32, each row by that of its position."""
    half = cos.shape[1]
    cos, sin = (t[positions].float()[:, None] for t in (cos, sin))
    first, second = slice(half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    actual = x.float()
    a, b = actual[..., first].clone(), actual[..., second].clone()
    actual[..., first], actual[..., second] = a * cos - b * sin, a * sin + b * cos
    return actual.to(x.dtype)


@torch.no_grad()
def _combine(case: Case, made: _Tensors) -> str | None:
    splits, batch, heads = case["num_splits"], 5, 16
    dtype = DTYPES[case["dtype"]]
    shape = (2 * splits, batch, heads, case["seqlen"], case["head_dim"])
    outs = made.normal(*shape, dtype=torch.float32).transpose(2, 3)[:splits]  # neither is contiguous
    lses = made.normal(splits, batch, 2 * heads, case["seqlen"], dtype=torch.float32).transpose(-1, -2)[..., :heads]
    lses[splits // 2 :, : batch // 3] = -math.inf
    out, lse = flash_attn_3.flash_attn_combine(outs, lses, out_dtype=dtype)
    wanted_lse = torch.logsumexp(lses, dim=0)
    weight = torch.exp(lses - wanted_lse).nan_to_num(0.0, 0.0, 0.0)
    exact = (weight[..., None] * outs).sum(0)
    rounded = exact.to(dtype)
    if out.dtype != dtype or not torch.allclose(lse, wanted_lse, atol=1e-5, rtol=1e-5):
        return "the log-sum-exp is another one"
    error, allowed = ((t.float() - exact).abs().max().item() for t in (out, rounded))
    if error <= 2 * allowed or torch.allclose(out, rounded, atol=1e-5, rtol=1e-5):
        return None
    return f"out is off by {error:.3g}; rounding by {allowed:.3g}"


def _repeated(case: Case, made: _Tensors) -> str | None:
    """The same bits on every run, of dq up to the order of its sums."""
    rows, keys = case["lengths"]
    batch = 60 if made.device != "cpu" else 2
    q, k, v = (made.normal(batch, n, 4, case["head_dim"]).requires_grad_() for n in (rows, keys, keys))
    first: tuple[Tensor, ...] | None = None
    dout = made.normal(batch, rows, 4, case["head_dim"])
    for _ in range(20 if made.device != "cpu" else 2):
        out = flash_attn_3.flash_attn_func(q, k, v, causal=case["causal"])
        gradients = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
        first = first or gradients
        dq = first[1]
        near = 2 * (dq + 0.3 - 0.3 - dq).abs().max().item()
        for name, one, other in zip(("out", "dq", "dk", "dv"), gradients, first, strict=True):
            same = torch.allclose(one, other, atol=near) if name == "dq" else torch.equal(one, other)
            if not same:
                return f"{name} differs between two runs"
    return None


def _few_queries(case: Case, made: _Tensors) -> str | None:
    q = made.normal(2, 64, 16, 128)
    k, v = (made.normal(2, 8192, 4, 128) for _ in "kv")
    outs = [flash_attn_3.flash_attn_func(q, k, v, causal=case["causal"]) for _ in range(100)]
    wanted, seen = _Wanted.none(), Mask(case["causal"]).seen(64, 8192, 0, made.device)
    for b in range(2):
        wanted.add([q[b], k[b], v[b]], [None] * 3, seen, 0.0, None, None)
    if any(not torch.equal(out, outs[0]) for out in outs):
        return "out differs between two runs"
    return _beyond("out", torch.cat(list(outs[0])), torch.cat(wanted.exact), torch.cat(wanted.plain), 2)


def _one_prompt(case: Case, made: _Tensors) -> str | None:
    """A prompt among decoding sequences, with keys shared among blocks and without."""
    rows, keys = [512 if i == 40 else 1 for i in range(64)], 512
    q = made.normal(sum(rows), HEADS, 128)
    k, v = (made.normal(64 * keys, 2, 128) for _ in "kv")
    starts = made.integers([0, *torch.tensor(rows).cumsum(0)]), made.integers([keys * i for i in range(65)])
    outs = [flash_attn_3.flash_attn_varlen_func(q, k, v, *starts, 512, keys, num_splits=n) for n in (1, 4)]
    error = (outs[0] - outs[1]).abs().max().item()
    return None if error <= 2e-3 else f"splits differ by {error:.3g}"


_FAMILIES = {
    "forward": _forward, "varlen": _varlen, "cache": _cache, "combine": _combine, "repeated": _repeated,
    "few_queries": _few_queries, "one_prompt": _one_prompt,
}  # fmt: skip
