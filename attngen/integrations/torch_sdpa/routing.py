"""Routing torch's ``scaled_dot_product_attention`` to attngen, with torch's own semantics, where a kernel fits.

    with attngen.integrations.sdpa() as routed:
        model(x)
    print(routed.report())

Inside the block the name ``torch.nn.functional.scaled_dot_product_attention`` is a function that decides call by call.
If another library has replaced torch's function before, calls still go through that, and its calls of torch's own are
routed.
It routes only in the thread that entered the block, and in the threads that run a backward pass meanwhile, since they
recompute checkpointed forward passes.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from attngen.errors import CallError
from attngen.integrations.shared import choice
from attngen.integrations.shared.choice import VariantCandidate, attend, has_backward, reason_against, with_dropout
from attngen.integrations.torch_sdpa.checks import (
    PLAIN,
    autocast,
    candidate_for,
    disagreement,
    is_causal_bias,
    odd_option,
    of_causal_bias,
    option_against,
    shapes_of,
    unusual,
)
from attngen.runtime.autograd.training import asks_for_determinism
from attngen.runtime.cache import RecentCache
from attngen.runtime.registry.binding import check_backend
from attngen.runtime.registry.lookup import registry

SPEC = "sdpa"

_TORCHS: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention

#: Calls that ``explain=True`` keeps; older ones are dropped.
KEPT_CALLS = 10_000

#: Decisions for calls of one form: all that a decision depends on → why torch serves them, or empty.
_VERDICTS: RecentCache[str] = RecentCache(2048)


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """One call inside the block: its shapes, and the variant that served it or the reason why torch did."""

    shapes: str
    variant: str | None
    reason: str | None

    def __str__(self) -> str:
        return f"{self.shapes}: {self.variant}" if self.variant else f"{self.shapes}: torch, since {self.reason}"


class Routing:
    """The calls inside one ``sdpa`` block. Counts are exact if one thread at a time uses it."""

    def __init__(self, backend: str | None, explain: bool) -> None:
        self.backend = backend
        self.variants: Counter[str] = Counter()  # of the calls that attngen served
        self.reasons: Counter[str] = Counter()  # of the calls that torch served
        self.calls: deque[RoutedCall] | None = deque(maxlen=KEPT_CALLS) if explain else None
        self.others: Counter[str] = Counter()  # of the calls that another library's function served, by its name
        self.notes: list[str] = []  # on who else replaced torch's function

    @property
    def routed(self) -> int:
        """Number of calls that ran on attngen."""
        return self.variants.total()

    @property
    def fell_back(self) -> int:
        """Number of calls that ran on torch."""
        return self.reasons.total()

    def report(self) -> str:
        """Count the calls of each variant, the reasons of those that fell back, and calls of other replacements of
        torch's function; with ``explain``, list each call too."""
        served = ", ".join(f"{name} {count}" for name, count in self.variants.most_common())
        lines = [f"{self.routed} calls on attngen" + (f": {served}" if served else "")]
        lines.append(f"{self.fell_back} calls on torch" + (":" if self.reasons else ""))
        lines += [f"  {count} since {_indented(reason)}" for reason, count in self.reasons.most_common()]
        lines += [f"{count} calls on {name}, which did not call torch's" for name, count in self.others.most_common()]
        lines += self.notes
        lines += [f"{number}. {_indented(str(call))}" for number, call in enumerate(self.calls or (), 1)]
        return "\n".join(lines)

    def __call__(self, original: Callable[..., Tensor], query: Any, key: Any, value: Any, *options: Any) -> Tensor:
        """Serve one call. ``options``: attn_mask, dropout_p, is_causal, scale, enable_gqa."""
        attn_mask, dropout_p, is_causal, scale, enable_gqa = options
        attended = self._attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        name, result = attended if isinstance(attended, tuple) else (None, attended)
        if name is None:
            self.reasons[result] += 1
        else:
            self.variants[name] += 1
        if self.calls is not None:
            self.calls.append(RoutedCall(shapes_of(query, key, value, attn_mask), name, None if name else result))
        if name is not None:
            return result
        return _by_torch(original, query, key, value, *options)

    def _attend(
        self, q: Any, k: Any, v: Any, mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
    ) -> tuple[str, Tensor] | str:
        """Return the variant and its result, or the reason why torch has to serve the call."""
        causal = "causal_top_left" if is_causal else None
        if type(mask) not in PLAIN and is_causal_bias(mask):
            causal, reason = of_causal_bias(mask, q, k, is_causal)
            if reason is not None:
                return reason
            mask = None
        reason = unusual(q, k, v, mask) or odd_option(dropout_p, is_causal, scale, enable_gqa)
        if reason is not None:
            return reason
        if torch.is_autocast_enabled(q.device.type):
            q, k, v, mask = (autocast(tensor) for tensor in (q, k, v, mask))
        learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        facts = (
            self.backend, dropout_p, causal, scale, enable_gqa, learns, registry.generation,
            learns and asks_for_determinism(),
            q.dtype, q.shape, q.stride(), q.device, q.data_ptr() & 15,
            k.dtype, k.shape, k.stride(), k.device, k.data_ptr() & 15,
            v.dtype, v.shape, v.stride(), v.device, v.data_ptr() & 15,
            None if mask is None else (
                mask.dtype, mask.shape, mask.stride(), mask.device, mask.data_ptr() & 15, mask.requires_grad,
                torch.is_grad_enabled(),
            ),
        )  # fmt: skip
        verdict = _VERDICTS.get(facts)
        if verdict and registry.refresh_if_built():
            verdict = None  # a kernel built since may take the call
        if verdict is None:
            verdict = self._verdict(q, k, v, mask, dropout_p, causal, scale, enable_gqa, learns) or ""
            _VERDICTS.put(facts, verdict)
        if verdict:
            return verdict
        three = q.dim() == 3  # batch × heads, or one head: (N, L, E)
        if three:
            q, k, v = (tensor.unsqueeze(1) for tensor in (q, k, v))
        candidate = candidate_for(q, k, mask, causal, three)
        assert isinstance(candidate, VariantCandidate)
        (candidate,) = with_dropout((candidate,), dropout_p)
        try:
            out = attend(
                (candidate,), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spec=SPEC, softmax_scale=scale,
                backend=self.backend,
            )  # fmt: skip
        except CallError as error:  # among them NoKernelError
            _VERDICTS.put(facts, str(error))
            return str(error)
        out = out.transpose(1, 2)
        return candidate.variant, out.squeeze(1) if three else out

    def _verdict(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: Any, causal: str | None, scale: Any,
        enable_gqa: Any, learns: bool,
    ) -> str | None:  # fmt: skip
        """The reason why torch has to serve calls of this form, or None if a kernel may."""
        if not choice.on_gpu(q) and self.backend != "reference":
            return f"q is on {q.device.type}, and kernels run on GPUs"
        reason = disagreement(q, k, v, mask, enable_gqa) or option_against(dropout_p, causal, mask, scale)
        if reason is not None:
            return reason
        three = q.dim() == 3
        parts = [tensor.unsqueeze(1) if three else tensor for tensor in (q, k, v)]
        candidate = candidate_for(parts[0], parts[1], mask, causal, three)
        if isinstance(candidate, str):
            return candidate
        (candidate,) = with_dropout((candidate,), dropout_p)
        if self.backend != "reference":
            if mask is not None and mask.requires_grad and torch.is_grad_enabled():
                return "the mask asks for a gradient"
            ordered = asks_for_determinism() == 2
            if learns and not has_backward(candidate.variant, q, v, ordered=ordered):
                order = " with a fixed order of sums" if ordered else ""
                return f"no backward kernel of {candidate.variant}{order} is built, and a gradient may be asked for"
            if dropout_p:  # known before any number is drawn, so that torch draws as it would without the block
                rows = [tensor.transpose(1, 2) for tensor in parts]
                return reason_against(candidate, *rows, spec=SPEC, softmax_scale=scale, backend=self.backend)
        return None


def _indented(text: str) -> str:
    return text.replace("\n", "\n     ")


# --- installing ---------------------------------------------------------------------------------------------

_current: ContextVar[tuple[Routing, ...]] = ContextVar("attngen_sdpa", default=())  # the innermost block last
_open: list[Routing] = []  # of all threads, in the order in which they were entered
_lock = threading.Lock()
_installed: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None  # torch's function, and attngen's
_aside = 0  # calls for whose duration torch's function is put back

#: The function that each of attngen's has replaced.
_REPLACED: WeakKeyDictionary[Callable[..., Tensor], Callable[..., Tensor]] = WeakKeyDictionary()


class sdpa:  # noqa: N801
    """Route ``torch.nn.functional.scaled_dot_product_attention`` to attngen inside a ``with`` block.

    A call that no kernel takes falls back to torch, with the same result as without the block. ``backend`` is that of
    ``attngen.attention``; ``'reference'`` routes calls on any device to the eager reference, and tensors on the CPU
    fall back otherwise. The block's value is a ``Routing``: its ``report()`` says how many calls each variant served,
    and why others fell back; with ``explain``, call by call. Blocks nest, the innermost decides; torch's function is
    put back when the last one ends, also by an exception. Calls inside ``torch.compile`` are torch's own.

    A function that another library has put in place of torch's keeps its place: calls go through it, and those that it
    makes of torch's are routed. Raises CallError for an unknown ``backend``, and inside torch's ``context_parallel``,
    whose calls torch alone can serve.
    """

    def __init__(self, *, backend: str | None = None, explain: bool = False) -> None:
        check_backend(backend)
        self._backend, self._explain = backend, explain
        self._entered: list[Routing] = []

    def __enter__(self) -> Routing:
        routing = Routing(self._backend, self._explain)
        with _lock:
            if not _open:
                _install()
            assert _installed is not None
            if _installed[0] is not _TORCHS:
                routing.notes.append(
                    f"scaled_dot_product_attention was {_name(_installed[0])} when the block began: calls go through "
                    "it, and those that it makes of torch's function are routed"
                )
            _open.append(routing)
        self._entered.append(routing)
        _current.set((*_current.get(), routing))
        return routing

    def __exit__(self, *error: object) -> None:
        routing = self._entered.pop()
        _current.set(tuple(other for other in _current.get() if other is not routing))
        with _lock:
            _open[:] = [other for other in _open if other is not routing]
            if not _aside and F.scaled_dot_product_attention is _TORCHS:
                routing.notes.append("torch's function was put back inside the block: later calls were not routed")
            if not _open:
                _uninstall()


def _install() -> None:
    global _installed
    original = F.scaled_dot_product_attention
    while isinstance(original, FunctionType) and original in _REPLACED:  # a block ended while another patch was over it
        original = _REPLACED[original]
    if original is not _TORCHS:
        _installed = original, _around(original)
    else:
        _installed = original, _in_place_of(original)
    _REPLACED[_installed[1]] = original
    F.scaled_dot_product_attention = _installed[1]


def _module(function: Any) -> str:
    """The module in which a function was written, whatever it wraps."""
    return str(getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None))


def _name(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(code, "co_qualname", None) or getattr(code, "co_name", None)  # Python 3.10 has no qualified names
    return f"{_module(function)}.{name or getattr(function, '__qualname__', type(function).__name__)}"


def _around(other: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Put in place of another library's function: calls go through that, and its calls of torch's are routed.

    Raises CallError for the function of torch's ``context_parallel``.
    """
    if _module(other).startswith("torch.distributed."):
        raise CallError(
            "sdpa() inside torch's context_parallel would route nothing: each rank holds a part of the keys, and torch "
            "alone joins the parts; enter sdpa() outside of context_parallel, or leave it out"
        )

    def scaled_dot_product_attention(*arguments: Any, **options: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return other(*arguments, **options)
        routing = _active() if _is_installed(scaled_dot_product_attention) else None
        if routing is None:
            return other(*arguments, **options)
        with _CallsOfTorch(routing) as calls:
            out = other(*arguments, **options)
        if not calls.any:
            routing.others[_name(other)] += 1
        return out

    return scaled_dot_product_attention


class _CallsOfTorch(TorchFunctionMode):
    """Routes the calls of torch's function that another library's function makes."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self._routing = routing
        self.any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _TORCHS:
            return func(*args, **(kwargs or {}))
        self.any = True
        return self._routing(_TORCHS, *_arguments(*args, **(kwargs or {})))


def _arguments(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False, *,
    scale: Any = None, enable_gqa: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of torch's function in order."""
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa


def _in_place_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Put in place of torch's function, which decides call by call."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if compiling and has_torch_function((query, key, value, attn_mask)):
            return handle_torch_function(
                F.scaled_dot_product_attention, (query, key, value, attn_mask), query, key, value,
                attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        if compiling:
            return original(
                query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        routing = _active() if _is_installed(scaled_dot_product_attention) else None
        return _by_torch(original, *given) if routing is None else routing(original, *given)

    return scaled_dot_product_attention


def _is_installed(own: Callable[..., Tensor]) -> bool:
    """Whether a block is open that put this function there. One that a block left behind, since another patch covered
    it, puts back what it replaced as soon as that patch is gone."""
    if _installed is not None and _installed[1] is own:
        return True
    with _lock:
        if F.scaled_dot_product_attention is own and (_installed is None or _installed[1] is not own):
            F.scaled_dot_product_attention = _REPLACED[own]
    return False


def _by_torch(
    original: Callable[..., Tensor], query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any,
    scale: Any, enable_gqa: Any,
) -> Tensor:  # fmt: skip
    """Call torch's function with the given arguments."""
    options = {
        "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
        "enable_gqa": enable_gqa,
    }  # fmt: skip
    if has_torch_function((query, key, value, attn_mask)) or torch._C._len_torch_function_stack():
        with _torchs_own():
            return original(query, key, value, **options)
    return original(query, key, value, **options)


@contextmanager
def _torchs_own() -> Iterator[None]:
    """Put torch's function back while a tensor subclass or a mode serves a call: these look it up by its name."""
    global _aside
    with _lock:
        _aside += 1
        if _installed is not None and F.scaled_dot_product_attention is _installed[1]:
            F.scaled_dot_product_attention = _installed[0]
    try:
        yield
    finally:
        with _lock:
            _aside -= 1
            if not _aside and _installed is not None and F.scaled_dot_product_attention is _installed[0]:
                F.scaled_dot_product_attention = _installed[1]


def _uninstall() -> None:
    """Put torch's function back, unless another was installed over attngen's, which then keeps calling through it."""
    global _installed
    assert _installed is not None
    original, own = _installed
    if F.scaled_dot_product_attention is own:
        F.scaled_dot_product_attention = original
    _installed = None


def _active() -> Routing | None:
    """Return the routing that decides: of this thread's innermost block or, in a backward pass, of the last one."""
    blocks = _current.get()
    if not blocks and _open and torch._C._current_graph_task_id() != -1:
        try:
            return _open[-1]
        except IndexError:  # the last block has just ended
            return None
    return blocks[-1] if blocks else None
