"""The programs that ``bench.host`` runs in fresh processes; each prints one JSON object.

    python host_programs.py cold PACKAGE | peer NAME | calls PACKAGE ROUNDS

The file is copied beside the installed package PACKAGE and run there; it imports nothing of attngen.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

clock = time.perf_counter

#: Modules that an installed package must not need.
BLOCKED = (
    "attngen", "triton", "cupy", "cupy_backends", "jinja2", "pydantic", "yaml", "click", "rich", "platformdirs",
)  # fmt: skip
SHAPE = (1, 128, 8, 128)  # batch, seqlen, heads, head_dim
SETS, PASSES = 64, 10  # sets of tensors, and how often one figure goes through all of them

Call = Callable[[Any], Any]


def block(*names: str) -> None:
    """Make modules impossible to import."""
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]


def first_calls(call: Callable[[], Any]) -> dict[str, float]:
    """Time a first call, the wait for it, and the next call."""
    import torch

    torch.cuda.synchronize()
    start = clock()
    call()
    first = clock() - start
    torch.cuda.synchronize()
    waited = clock() - start
    start = clock()
    call()
    return {
        "first call ms": 1e3 * first,
        "first call waited for ms": 1e3 * waited,
        "second call us": 1e6 * (clock() - start),
    }


def qkv() -> list[Any]:
    """Random q, k and v on the GPU."""
    import torch

    return [torch.randn(SHAPE, device="cuda", dtype=torch.float32).bfloat16() for _ in range(3)]


def started() -> dict[str, float]:
    """Import torch and start CUDA; return the seconds of each."""
    start = clock()
    import torch

    imported = clock() - start
    start = clock()
    torch.zeros(1, device="cuda", dtype=torch.float32)
    torch.cuda.synchronize()
    return {"import torch s": imported, "start of CUDA s": clock() - start}


def cold(package: str) -> dict[str, float]:
    """Time the import of a package beyond torch, and its first call, with no compiler that could be imported."""
    block(*BLOCKED)
    start_times = started()
    start = clock()
    module = import_module(package)
    imported = clock() - start
    q, k, v = qkv()
    call = partial(module.attention, q, k, v, variant="causal")
    return {"import ms": 1e3 * imported, **start_times, **first_calls(call)}


def peer(name: str) -> dict[str, float]:
    """Time the import of another library beyond torch, and its first call."""
    start_times = started()
    start = clock()
    call = PEERS[name]()
    imported = clock() - start
    tensors = prepared(name, qkv())
    return {"import ms": 1e3 * imported, **start_times, **first_calls(lambda: call(tensors))}


def sdpa() -> Call:
    """torch's own attention."""
    from torch.nn.functional import scaled_dot_product_attention

    return lambda s: scaled_dot_product_attention(s[0], s[1], s[2], is_causal=True)


def flex() -> Call:
    """FlexAttention, compiled, with a block mask that is made once."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, SHAPE[1], SHAPE[1], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda s: compiled(s[0], s[1], s[2], block_mask=mask)


def fa3() -> Call:
    """FlashAttention-3."""
    try:
        attend = import_module("fa3_fwd_interface").flash_attn_func
    except ImportError:
        attend = import_module("flash_attn_interface").flash_attn_func
    return lambda s: attend(s[0], s[1], s[2], causal=True)


PEERS: dict[str, Callable[[], Call]] = {"SDPA": sdpa, "FlashAttention-3": fa3, "FlexAttention": flex}

#: Backends of SDPA that are measured besides the one that it picks, by torch's names.
BACKENDS = {"SDPA, cuDNN": "CUDNN_ATTENTION", "SDPA, flash": "FLASH_ATTENTION"}


def within(name: str) -> AbstractContextManager[Any]:
    """The context that a contender's calls need."""
    if name not in BACKENDS:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, BACKENDS[name]))


def prepared(name: str, tensors: Sequence[Any]) -> list[Any]:
    """Tensors in the order of axes that a library takes, contiguous."""
    heads_first = name in ("SDPA", "FlexAttention", *BACKENDS)
    return [t.transpose(1, 2).contiguous() for t in tensors] if heads_first else list(tensors)


def host_time(name: str, before: Call, call: Call, sets: Sequence[Any]) -> float:
    """Microseconds of the host for a call, over the sets in turn; ``before``, which runs first, does not count.

    The GPU has finished before each pass, and a pass is short enough for its launches to be queued: the host waits for
    nothing.
    """
    import torch

    took = 0.0
    with within(name):
        for _ in range(PASSES):
            arguments = [before(one) for one in sets]
            torch.cuda.synchronize()
            start = clock()
            for one in arguments:
                call(one)
            took += clock() - start
            del one, arguments
    torch.cuda.synchronize()
    return 1e6 * took / (PASSES * len(sets))


def steps(call: Call) -> dict[str, tuple[bool, Call, Call]]:
    """The timed cases: whether tensors require gradients, the function that runs before the clock, the one timed."""
    import torch

    def differentiable(s: Sequence[Any]) -> tuple[Any, Sequence[Any], Any]:
        out = call(s)
        return out, s, torch.randn_like(out)

    def differentiate(step: tuple[Any, Sequence[Any], Any]) -> Any:
        out, inputs, dout = step
        return torch.autograd.grad(out, inputs, dout)

    def both(step: tuple[Sequence[Any], Any]) -> Any:
        inputs, dout = step
        return torch.autograd.grad(call(inputs), inputs, dout)

    def with_gradient(s: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        return s, torch.randn_like(s[0])

    return {
        "forward": (False, _same, call),
        "forward that learns": (True, _same, call),
        "backward": (True, differentiable, differentiate),
        "forward and backward": (True, with_gradient, both),
    }


def _same(one: Any) -> Any:
    return one


def contenders_here(package: str) -> tuple[dict[str, Call], dict[str, str]]:
    """The contenders that run on this machine, and the reasons against others."""
    module = import_module(package)
    contenders: dict[str, Call] = {"attngen": lambda s: module.attention(s[0], s[1], s[2], variant="causal")}
    missing = {}
    makers = {**PEERS, **dict.fromkeys(BACKENDS, PEERS["SDPA"])}
    for name, make in makers.items():
        try:
            call = make()
            with within(name):
                call(prepared(name, qkv()))
            contenders[name] = call
        except Exception as error:  # whatever a library raises that is not installed or does not run here
            missing[name] = _first_line(error)
    return contenders, missing


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def calls(package: str, rounds: int) -> dict[str, Any]:
    """Host time of a call of each library, taken in turns in one process, forward and backward.

    Each case goes over changing tensors; the forward also over the same ones again.
    """
    import torch

    block("attngen")
    contenders, missing = contenders_here(package)
    sets = [qkv() for _ in range(SETS)]
    results: dict[str, Any] = {}
    for case, chosen in (*((case, sets) for case in steps(_same)), ("forward, the same tensors", sets[:1] * SETS)):
        timers = {}
        for name, call in contenders.items():
            learns, before, timed = steps(call)[case.partition(",")[0]]
            own = _own(name, chosen, learns=learns)
            timer = partial(host_time, name, before, timed, own)
            try:
                for _ in range(3):
                    timer()
            except Exception as error:
                missing[f"{name}, {case}"] = _first_line(error)
                continue
            timers[name] = timer
        times = {name: [] for name in timers}  # type: dict[str, list[float]]
        for _ in range(rounds):
            for name, run in timers.items():
                times[name].append(run())
        results[case] = {
            name: {
                "us": median(own),
                "times SDPA's": median(a / b for a, b in zip(own, times["SDPA"], strict=True)),
            }
            for name, own in times.items()
        }
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": sys.version.split()[0]}
    return {**device, "SDPA picks": picked(), "host time": results, "not measured": missing}


def _own(name: str, sets: Sequence[Sequence[Any]], *, learns: bool) -> list[Any]:
    """The sets as a library takes them; a set that is listed twice stays one."""
    made: dict[int, Any] = {}
    for one in sets:
        if id(one) not in made:
            made[id(one)] = [t.detach().requires_grad_(learns) for t in prepared(name, one)]
    return [made[id(one)] for one in sets]


def picked() -> str:
    """The backend that SDPA picks, by torch's name."""
    import torch
    from torch.nn.attention import SDPBackend

    q, k, v = (t.requires_grad_() for t in prepared("SDPA", qkv()))
    return str(SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name)


if __name__ == "__main__":
    program, name, *rest = sys.argv[1:]
    figures = {"cold": cold, "peer": peer}[program](name) if program != "calls" else calls(name, int(rest[0]))
    print(json.dumps(figures))
