"""The programs that ``bench_host`` runs in fresh processes; each prints one JSON object.

    python host_programs.py cold PACKAGE | peer NAME | race PACKAGE ROUNDS

The file is copied beside the installed package PACKAGE and run there; it imports nothing of attngen.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

clock = time.perf_counter

#: What an installed package does without.
BLOCKED = (
    "attngen", "triton", "cupy", "cupy_backends", "jinja2", "pydantic", "yaml", "click", "rich", "platformdirs",
)  # fmt: skip
SHAPE = (1, 128, 8, 128)  # batch, seqlen, heads, head_dim
SETS, CALLS = 64, 640

Call = Callable[[Sequence[Any]], Any]


def block(*names: str) -> None:
    """Make modules impossible to import."""
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]


def first_calls(call: Callable[[], Any]) -> dict[str, float]:
    """Return the times of a first call, of waiting for it, and of the next call."""
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
    """Return random q, k and v on the GPU."""
    import torch

    return [torch.randn(SHAPE, device="cuda").bfloat16() for _ in range(3)]


def started() -> dict[str, float]:
    """Import torch and start CUDA, and return how long each takes."""
    start = clock()
    import torch

    imported = clock() - start
    start = clock()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return {"import torch s": imported, "start of CUDA s": clock() - start}


def cold(package: str) -> dict[str, float]:
    """Import of a package beyond torch, and its first call, with no compiler that could be imported."""
    block(*BLOCKED)
    found = started()
    start = clock()
    module = import_module(package)
    imported = clock() - start
    q, k, v = qkv()
    return {"import ms": 1e3 * imported, **found, **first_calls(lambda: module.attention(q, k, v, variant="causal"))}


def peer(name: str) -> dict[str, float]:
    """Import of another library beyond torch, and its first call."""
    found = started()
    start = clock()
    call = PEERS[name]()
    imported = clock() - start
    tensors = prepared(name, qkv())
    return {"import ms": 1e3 * imported, **found, **first_calls(lambda: call(tensors))}


def sdpa() -> Call:
    """Return torch's own attention."""
    from torch.nn.functional import scaled_dot_product_attention

    return lambda s: scaled_dot_product_attention(s[0], s[1], s[2], is_causal=True)


def flex() -> Call:
    """Return FlexAttention, compiled, with a block mask that is made once."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, SHAPE[1], SHAPE[1], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda s: compiled(s[0], s[1], s[2], block_mask=mask)


def fa3() -> Call:
    """Return FlashAttention-3."""
    try:
        attend = import_module("fa3_fwd_interface").flash_attn_func
    except ImportError:
        attend = import_module("flash_attn_interface").flash_attn_func
    return lambda s: attend(s[0], s[1], s[2], causal=True)


PEERS: dict[str, Callable[[], Call]] = {"SDPA": sdpa, "FlashAttention-3": fa3, "FlexAttention": flex}


def prepared(name: str, tensors: Sequence[Any]) -> list[Any]:
    """Return tensors in the order of axes that a library takes, contiguous."""
    heads_first = name in ("SDPA", "FlexAttention")
    return [t.transpose(1, 2).contiguous() for t in tensors] if heads_first else list(tensors)


def host_time(call: Call, sets: Sequence[Sequence[Any]]) -> float:
    """Return microseconds that the host takes for a call, over the sets in turn."""
    import torch

    torch.cuda.synchronize()
    start = clock()
    for i in range(CALLS):
        call(sets[i % len(sets)])
    took = clock() - start
    torch.cuda.synchronize()
    return 1e6 * took / CALLS


def race(package: str, rounds: int) -> dict[str, Any]:
    """Host time of a call of each library by turns, in one process, with tensors that change and the same ones."""
    import torch

    block("attngen")
    module = import_module(package)
    contestants: dict[str, Call] = {"attngen": lambda s: module.attention(s[0], s[1], s[2], variant="causal")}
    missing = {}
    for name, make in PEERS.items():
        try:
            contestants[name] = make()
            contestants[name](prepared(name, qkv()))
        except Exception as error:  # whatever a library raises that is not installed or does not run here
            contestants.pop(name, None)
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    sets = [qkv() for _ in range(SETS)]
    learning = [[t.clone().requires_grad_() for t in one] for one in sets]
    cases = {"64 sets of tensors": sets, "the same tensors": sets[:1], "64 sets that learn": learning}
    results: dict[str, Any] = {}
    for case, given in cases.items():
        racers = {}
        for name, call in contestants.items():
            own = [prepared(name, one) for one in given]
            if case.endswith("learn"):
                own = [[t.detach().requires_grad_() for t in one] for one in own]
            try:
                for _ in range(3):
                    host_time(call, own)
            except Exception as error:
                missing[f"{name}, {case}"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                continue
            racers[name] = partial(host_time, call, own)
        times = {name: [] for name in racers}  # type: dict[str, list[float]]
        for _ in range(rounds):
            for name, run in racers.items():
                times[name].append(run())
        torch.cuda.synchronize()
        results[case] = {
            name: {
                "us": median(found),
                "times SDPA's": median(a / b for a, b in zip(found, times["SDPA"], strict=True)),
            }
            for name, found in times.items()
        }
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": sys.version.split()[0]}
    return {**device, "host time": results, "not in the race": missing}


if __name__ == "__main__":
    program, name, *rest = sys.argv[1:]
    found = {"cold": cold, "peer": peer}[program](name) if program != "race" else race(name, int(rest[0]))
    print(json.dumps(found))
