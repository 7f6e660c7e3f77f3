"""A call of a random mask through the public functions, and what it has to return: brute force over all pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen.inspect.cases import Case
from attngen.lab.verify.inputs import Element, Inputs, make_inputs
from attngen.lang.variant import Variant
from tests.fuzz.dense_attention import Exact, attend
from tests.fuzz.evaluator import Evaluator, names_of_sequence
from tests.fuzz.language import Drawn, fill


@dataclass
class Findings:
    """Results of calls of a mask."""

    problems: list[str] = field(default_factory=list)
    calls: int = 0
    worst: dict[str, float] = field(default_factory=dict)  # error over what is allowed, by result
    shown: list[float] = field(default_factory=list)  # share of visible pairs of each sequence

    def note(self, name: str, value: float) -> None:
        """Keep the larger value of a name."""
        self.worst[name] = max(self.worst.get(name, 0.0), value)


class MaskCall:
    """The inputs of one call of a random mask."""

    def __init__(
        self, made: Drawn, layout: str, case: Case, seed: int, device: str = "cuda", *, tight: bool = False
    ) -> None:
        self.made, self.layout, self.case, self.device = made, layout, case, device
        self.variant: Variant = made.checked
        element = Element(made.dtype, made.head_dim, made.head_dim)
        self.inputs: Inputs = make_inputs(self.variant, case, layout, element, device, seed)
        fill(made, self.inputs.arguments, seed)  # type: ignore[arg-type]
        if tight:
            ends = {name: getattr(self.inputs, name).nan_to_num(nan=0.0).clone() for name in "qkv"}
            self.inputs = replace(self.inputs, **ends)
        self._exact: list[Exact] | None = None
        generator = torch.Generator().manual_seed(seed)
        self.dout = torch.randn(self.inputs.q.shape, generator=generator).to(self.inputs.q.dtype).to(device)

    def packing(self) -> dict[str, Any]:
        """Offsets and longest lengths of packed sequences; nothing in other layouts."""
        packing = self.inputs.packing
        if packing is None:
            return {}
        return {
            "cu_seqlens_q": packing.cu_seqlens_q, "cu_seqlens_k": packing.cu_seqlens_k,
            "max_seqlen_q": packing.max_seqlen_q, "max_seqlen_k": packing.max_seqlen_k,
        }  # fmt: skip

    def run(self, *, backward: bool, **more: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Output, log-sum-exp and gradients of a public call."""
        inputs = self.inputs
        given = [getattr(inputs, name).detach().requires_grad_(backward) for name in "qkv"]
        call: dict[str, Any] = {"variant": self.made.name, "return_lse": True, **inputs.arguments, **more}
        if self.layout == "dense":
            out, lse = attngen.attention(*given, seqused_k=inputs.seqused_k, **call)
        elif self.layout == "varlen":
            out, lse = attngen.attention_varlen(*given, **self.packing(), **call)
        else:
            paging = inputs.paging
            assert paging is not None
            assert inputs.seqused_k is not None
            out, lse = attngen.attention_paged(
                *given, paging.page_table, inputs.seqused_k, cu_seqlens_q=paging.cu_seqlens_q,
                max_seqlen_q=paging.max_seqlen_q, page_layout=inputs.page_layout, **call,
            )  # fmt: skip
        if not backward:
            return out.detach(), lse.detach(), {}
        gradients = torch.autograd.grad(out, given, self.dout)
        return out.detach(), lse.detach(), dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    # --- brute force ----------------------------------------------------------------------------------------

    def sequences(self) -> Iterator[tuple[int, slice, slice]]:
        """Number, rows and keys of each sequence among those of all; in a dense call, keys that are used."""
        case = self.case
        row = key = 0
        for b, (rows, keys) in enumerate(zip(case.q_lengths, case.k_lengths, strict=True)):
            used = keys if case.used is None else case.used[b]
            yield b, slice(row, row + rows), slice(key, key + used)
            row, key = row + rows, key + keys

    def evaluator(self, b: int, rows: slice, keys: slice, real: torch.dtype, **more: Any) -> Evaluator:
        """The evaluator of all pairs of a sequence."""
        case, given = self.case, self.inputs.arguments
        totals = sum(case.q_lengths), sum(case.k_lengths)
        names = names_of_sequence(
            b, rows.stop - rows.start, keys.stop - keys.start, rows.start, keys.start, case.heads, case.kv_heads,
            totals, self.device,
        )  # fmt: skip
        consts = {scalar.name: scalar.const for scalar in self.variant.scalars if scalar.const is not None}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        names |= consts | {name: value for name, value in given.items() if not isinstance(value, Tensor)} | more
        return Evaluator(names, tensors, self.made.variant.get("let", {}), real)

    def visible(self, b: int, rows: slice, keys: slice) -> Tensor:
        """Pairs of a sequence that the mask shows, (heads, rows, keys)."""
        text = str(self.made.variant["mask"])
        return self.evaluator(b, rows, keys, torch.float32)(text).to(self.device).broadcast_to(self._shape(rows, keys))

    def shown_by_score(self, b: int, rows: slice, keys: slice) -> Tensor:
        """Pairs of a sequence that the score does not hide."""
        shape = self._shape(rows, keys)
        text = self.made.variant.get("score")
        if text is None:
            return torch.ones(shape, dtype=torch.bool, device=self.device)
        zeros = torch.zeros(shape, device=self.device, dtype=torch.float64)
        scores: Tensor = self.evaluator(b, rows, keys, torch.float64, s=zeros)(text).to(self.device).double()
        return (scores > -math.inf).broadcast_to(shape)

    def _shape(self, rows: slice, keys: slice) -> tuple[int, int, int]:
        return self.case.heads, rows.stop - rows.start, keys.stop - keys.start

    def compare(
        self, out: Tensor, lse: Tensor, gradients: Mapping[str, Tensor], findings: Findings, when: str = ""
    ) -> None:
        """Note how far the results of a call are off, sequence by sequence."""
        parts = self.exact()
        of_rows = {name: _flat(one) for name, one in {"out": out, **gradients}.items() if name in ("out", "dq")}
        of_keys = {name: _flat(one) for name, one in gradients.items() if name in ("dk", "dv")}
        flat_lse = lse.transpose(0, 1).flatten(1) if lse.ndim == 3 else lse
        checked = []
        for (b, rows, keys), exact in zip(self.sequences(), parts, strict=True):
            results = {name: one[rows].transpose(0, 1) for name, one in of_rows.items()}
            results |= {name: one[keys].transpose(0, 1) for name, one in of_keys.items()}
            ratios = exact.ratios(results, flat_lse[:, rows])
            results["lse"] = flat_lse[:, rows]
            checked += [(b, exact, name, ratio, results[name]) for name, ratio in ratios.items() if ratio.numel()]
        worst = torch.stack([ratio.max() for *_, ratio, _ in checked]).tolist() if checked else []
        for value, (b, exact, name, ratio, given) in zip(worst, checked, strict=True):
            findings.note(name, value)
            if value > 1:
                said = exact.describe(name, ratio, given)
                findings.problems.append(f"{when}sequence {b} of {self.case}: {said}; scalars {self.scalars()}")
        findings.shown += [round(one, 3) for one in torch.stack([part.shown for part in parts]).tolist()]
        findings.calls += 1

    def exact(self) -> list[Exact]:
        """Attention of each sequence in float64, computed once."""
        if self._exact is None:
            inputs = self.inputs if self.inputs.packed is None else self.inputs.packed
            text = self.made.variant.get("score")
            self._exact = []
            for b, rows, keys in self.sequences():

                def score(s: Tensor, at: tuple[int, slice, slice] = (b, rows, keys)) -> Tensor:
                    return self.evaluator(*at, torch.float64, s=s)(str(text)).to(self.device).double()

                q, dout = _flat(inputs.q)[rows], _flat(self.dout)[rows]
                k, v = _flat(inputs.k)[keys], _flat(inputs.v)[keys]
                self._exact.append(attend(q, k, v, dout, self.visible(b, rows, keys), None if text is None else score))
        return self._exact

    def scalars(self) -> dict[str, Any]:
        """The scalars of the call."""
        return {name: value for name, value in self.inputs.arguments.items() if not isinstance(value, Tensor)}


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1) if tensor.ndim == 4 else tensor


def by_tiles(visible: Tensor, m: int, n: int) -> tuple[Tensor, Tensor]:
    """Whether some pair of each tile is visible, and whether each is; pairs beyond the end do not count."""
    heads, rows, keys = visible.shape
    shape = (heads, -(-rows // m), m, -(-keys // n), n)

    def padded(value: bool) -> Tensor:
        room = visible.new_full((heads, shape[1] * m, shape[3] * n), value)
        room[:, :rows, :keys] = visible
        return room.view(shape)

    return padded(False).any(4).any(2), padded(True).all(4).all(2)
