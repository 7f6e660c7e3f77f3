"""The libraries that kernels are measured against, each behind the same small interface.

None is needed: one that is not installed, or does not support a case, says so. Each gets its tensors in the order of
axes that it documents, and all that it lets a program prepare is prepared outside of the timed region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module, metadata
from typing import Any, Protocol

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lab.bench.cases import BenchCase
from attngen.lab.bench.intervals import MOST, endpoints
from attngen.lab.bench.timing import Contender
from attngen.lab.bench.workloads import Flags, Terms, Workload

#: The distribution of cuDNN's frontend, and why its flexible attention does not take a mask.
CUDNN = "nvidia-cudnn-frontend"
TOO_MANY_INTERVALS = f"queries see more than {MOST} intervals of keys"


@dataclass(frozen=True)
class Tensors:
    """One set of inputs, (batch, seqlen, heads, head_dim); leaves of autograd if they require a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def bshd(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return self.q, self.k, self.v

    @cached_property
    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as (batch, heads, seqlen, head_dim), contiguous; leaves of their own."""
        q, k, v = (
            tensor.detach().transpose(1, 2).contiguous().requires_grad_(tensor.requires_grad) for tensor in self.bshd
        )
        return q, k, v


class Peer(Protocol):
    """A library beside attngen."""

    @property
    def name(self) -> str:
        """The name of its column."""

    def missing(self) -> str | None:
        """Reason why it cannot be used here at all, or None. Imports nothing."""

    def refuses(self, case: BenchCase, terms: Terms) -> str | None:
        """Reason why it does not support a case, as far as is known beforehand, or None."""

    def enter(self, work: Workload, terms: Terms, inputs: Sequence[Tensors]) -> Contender:
        """Its forward calls, with the tensors that a backward pass differentiates them by.

        This and the first call raise whatever the library raises for a case that it does not support.
        """


def peers() -> tuple[Peer, ...]:
    """All peers in the order of their columns."""
    return (
        Sdpa("SDPA flash", "FLASH_ATTENTION"),
        Sdpa("SDPA cuDNN", "CUDNN_ATTENTION"),
        FlexAttention(),
        FlashAttention3(),
        FlashAttention4(),
        CudnnFrontend(),
        CudnnFlex(),
    )


def named(every: Sequence[Peer], parts: Sequence[str]) -> tuple[Peer, ...]:
    """The peers whose names contain one of ``parts``, in any case; all if none is given.

    Raises CallError for a part that is in no name.
    """
    for part in parts:
        if not any(part.lower() in peer.name.lower() for peer in every):
            raise CallError(f"no library has '{part}' in its name: {', '.join(peer.name for peer in every)}")
    return tuple(peer for peer in every if not parts or any(part.lower() in peer.name.lower() for part in parts))


def reason_against(peer: Peer, case: BenchCase, terms: Terms | None) -> str | None:
    """Reason why a peer is not measured in a case, or None."""
    missing = peer.missing()
    if missing is not None:
        return missing
    if terms is None:
        return f"{case.variant} is not implemented for it"
    return peer.refuses(case, terms)


@dataclass(frozen=True)
class Sdpa:
    """``torch.nn.functional.scaled_dot_product_attention`` on one of its backends."""

    name: str
    backend: str  # of torch.nn.attention.SDPBackend

    def missing(self) -> str | None:
        """See ``Peer``."""
        if self.backend == "CUDNN_ATTENTION":
            built = torch.backends.cudnn.is_available()
        else:
            built = torch.backends.cuda.is_flash_attention_available()
        return None if built else "this build of torch lacks it"

    def refuses(self, case: BenchCase, terms: Terms) -> str | None:
        """See ``Peer``."""
        if terms.flags not in (Flags(), Flags(causal=True)) or terms.sinks is not None:
            return "knows full and causal attention only"
        return _dtypes(case, "bf16", "fp16")

    def enter(self, work: Workload, terms: Terms, inputs: Sequence[Tensors]) -> Contender:
        """See ``Peer``."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        assert terms.flags is not None
        attend = partial(
            torch.nn.functional.scaled_dot_product_attention,
            is_causal=terms.flags.causal,
            enable_gqa=work.case.heads != work.case.kv_heads,
        )
        calls = [partial(attend, *one.heads_first) for one in inputs]
        session = partial(sdpa_kernel, getattr(SDPBackend, self.backend))
        return Contender(self.name, calls, session, _from_heads_first, [one.heads_first for one in inputs])


class FlexAttention:
    """``flex_attention``, compiled; its block mask is made beforehand."""

    name = "FlexAttention"

    def missing(self) -> str | None:
        """See ``Peer``."""
        return None

    def refuses(self, case: BenchCase, terms: Terms) -> str | None:
        """See ``Peer``."""
        return "has no sinks" if terms.sinks is not None else None

    def enter(self, work: Workload, terms: Terms, inputs: Sequence[Tensors]) -> Contender:
        """See ``Peer``."""
        from torch._functorch import config as functorch_config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        case, block_mask = work.case, None
        if terms.mask_mod is not None:
            batch = case.batch if terms.per_sequence else None
            device = inputs[0].q.device
            block_mask = create_block_mask(terms.mask_mod, batch, None, case.seqlen, case.seqlen, device=device)
        torch._dynamo.reset()  # each case compiles again, so none counts towards the limit of recompilations
        attend = partial(
            torch.compile(flex_attention, dynamic=False),
            score_mod=terms.score_mod,
            block_mask=block_mask,
            enable_gqa=case.heads != case.kv_heads,
        )
        leaves = [one.heads_first for one in inputs]
        # its graph is differentiated many times, so the backward pass must not overwrite tensors that are saved for it
        session = partial(functorch_config.patch, donated_buffer=False)
        return Contender(self.name, [partial(attend, *each) for each in leaves], session, _from_heads_first, leaves)


class FlashAttention3:
    """FlashAttention-3 as the ``fa3-fwd`` wheel builds it: without fp16 and without windows."""

    name = "FlashAttention-3"

    def missing(self) -> str | None:
        """See ``Peer``."""
        return lacking("fa3-fwd")

    def refuses(self, case: BenchCase, terms: Terms) -> str | None:
        """See ``Peer``."""
        if terms.flags is None:
            return "takes no custom mask or score"
        if terms.flags.window is not None:
            return "fa3-fwd is built without windows"
        if case.direction == "backward":
            return "fa3-fwd is built without the backward"
        if terms.sinks is not None:
            return "has no sinks"
        return _dtypes(case, "bf16", "fp8_e4m3")

    def enter(self, work: Workload, terms: Terms, inputs: Sequence[Tensors]) -> Contender:
        """See ``Peer``."""
        assert terms.flags is not None
        attend = import_module("fa3_fwd_interface").flash_attn_func
        return _flash(self.name, attend, inputs, causal=terms.flags.causal, softcap=terms.flags.softcap)


class FlashAttention4:
    """FlashAttention-4, written in CuTe; compiles at the first call."""

    name = "FlashAttention-4"

    def missing(self) -> str | None:
        """See ``Peer``."""
        return lacking("flash-attn-4")

    def refuses(self, case: BenchCase, terms: Terms) -> str | None:
        """See ``Peer``."""
        if terms.flags is None:
            return "takes custom masks and scores as CuTe code only"
        if terms.sinks is not None and case.direction == "backward":
            return "has no backward with sinks"
        return _dtypes(case, "bf16", "fp16")

    def enter(self, work: Workload, terms: Terms, inputs: Sequence[Tensors]) -> Contender:
        """See ``Peer``."""
        flags = terms.flags
        assert flags is not None
        window = (None, None) if flags.window is None else (flags.window - 1, 0)  # keys before and after the query
        attend = import_module("flash_attn.cute").flash_attn_func
        sinks = {} if terms.sinks is None else {"learnable_sink": terms.sinks.bfloat16()}
        return _flash(
            self.name, attend, inputs, causal=flags.causal, softcap=flags.softcap, window_size=window, **sinks
        )  # fmt: skip


class CudnnFrontend:
    """The SDPA of cuDNN's frontend, which has more masks than torch calls cuDNN with."""

    name = "cuDNN frontend"

    def missing(self) -> str | None:
        """See ``Peer``."""
        return lacking(CUDNN)

    def refuses(self, case: BenchCase, terms: Terms) -> str | None:
        """See ``Peer``."""
        if terms.flags is None:
            return "takes no custom mask or score"
        if terms.flags.softcap:
            return "caps no logits"
        if terms.sinks is not None and case.direction == "backward":
            return "has no backward with sinks"
        return _dtypes(case, "bf16", "fp16")

    def enter(self, work: Workload, terms: Terms, inputs: Sequence[Tensors]) -> Contender:
        """See ``Peer``."""
        flags = terms.flags
        assert flags is not None
        attend = partial(
            import_module("cudnn").sdpa_torch,
            is_causal=flags.causal,
            window_left=-1 if flags.window is None else flags.window,  # with the query's own key
            sinks=terms.sinks,
            return_lse=inputs[0].q.requires_grad,  # its backward reads them
        )
        leaves = [one.heads_first for one in inputs]
        calls = [partial(attend, *each) for each in leaves]
        return Contender(self.name, calls, as_bshd=lambda out: _from_heads_first(output_of(out)), leaves=leaves)


class CudnnFlex:
    """The flexible attention of cuDNN's frontend: masks as intervals of keys, whose plan is made beforehand."""

    name = "cuDNN flex"

    def missing(self) -> str | None:
        """See ``Peer``."""
        return lacking(CUDNN)

    def refuses(self, case: BenchCase, terms: Terms) -> str | None:
        """See ``Peer``."""
        if terms.score_mod is not None:
            return "takes no scores"
        if terms.sinks is not None:
            return "has no sinks"
        return _dtypes(case, "bf16", "fp16")

    def enter(self, work: Workload, terms: Terms, inputs: Sequence[Tensors]) -> Contender:
        """See ``Peer``."""
        case, one = work.case, inputs[0]
        ends = endpoints(terms.mask_mod, case.seqlen, one.q.device, batch=case.batch)
        if ends is None:
            raise CallError(TOO_MANY_INTERVALS)
        cudnn = import_module("cudnn")
        plan = cudnn.create_mask_plan(ends, *one.bshd, build_backward=one.q.requires_grad)
        return _flash(self.name, cudnn.flex_attn_func, inputs, mask_plan=plan)


def _flash(name: str, attend: Callable[..., Any], inputs: Sequence[Tensors], **arguments: Any) -> Contender:
    """The calls of a function with the interface of flash_attn_func."""
    leaves = [one.bshd for one in inputs]
    return Contender(name, [partial(attend, *each, **arguments) for each in leaves], as_bshd=output_of, leaves=leaves)


def output_of(result: Any) -> Any:
    """The output of a call that may return more besides it."""
    return result[0] if isinstance(result, tuple | list) else result


def _from_heads_first(out: Tensor) -> Tensor:
    return out.transpose(1, 2)


def _dtypes(case: BenchCase, *known: str) -> str | None:
    return None if case.dtype in known else f"knows {' and '.join(known)} only"


def lacking(*distributions: str) -> str | None:
    """Reason that none of some distributions is installed, or None."""
    for distribution in distributions:
        try:
            metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        return None
    return f"not installed; pip install {' or '.join(distributions)}"
