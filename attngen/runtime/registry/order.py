"""In which order kernels are tried for a call: by rank, then by predicted time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import groupby
from math import inf

from attngen.runtime.arguments.checked import ATTENTION_DTYPES as ATTENTION_NAMES
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.paging import FEW_ROWS
from attngen.runtime.device.interface import Driver
from attngen.runtime.geometry.heads_in_l2 import group_of, prompts_of
from attngen.runtime.geometry.prediction import Card, at_work, predict
from attngen.runtime.kernels.module import Kernel

#: As ``FEW_ROWS``, where sequences times KV heads are fewer than the busy units, about half of a Hopper card: the rows
#: of a warpgroup (docs/notebook/hopper_decode.md, "The schedule, second form").
SPLIT_ROWS, BUSY_UNITS = 64, 64

#: Stands for the card where kernels are ordered without a call.
ONE_BLOCK = Card(1)

#: Rows of the smallest tile of queries, which is as full for any fewer.
_TILE_ROWS = 64

#: Sequences times KV heads from which on more of them only take more turns. Not measured.
_MANY_UNITS = 1024


def card_of(driver: Driver, device: int) -> Card:
    """Figures of a device that predictions need."""
    return Card(driver.multiprocessors(device), driver.name(device), driver.bandwidth(device))


def preferred(kernels: Sequence[Kernel], call: Call | None = None, card: Card = ONE_BLOCK) -> list[Kernel]:
    """Return the candidates in the order in which they are tried; equals keep the order of the registry.

    Forward kernels whose plans have measured times are ordered by what the call should take on the card.
    """
    return list(in_order(kernels, call, card))


def in_order(kernels: Sequence[Kernel], call: Call | None, card: Card) -> Iterator[Kernel]:
    """Yield the candidates as ``preferred`` lists them; times are predicted where they decide, when that is asked."""
    for alike in _by_rank(kernels, call is not None and splits_keys(call)):
        fit = alike if call is None else [kernel for kernel in alike if against_form(kernel, call) is None]
        yield from _by_time(alike, fit, _typical(call), card)


def _by_rank(kernels: Sequence[Kernel], splits: bool) -> list[list[Kernel]]:
    """Candidates in groups of equal rank, the best group first. ``splits``: blocks should share the call's keys."""

    def rank(kernel: Kernel) -> tuple[bool, bool, bool, bool, bool, int, bool]:
        # Whether keys are shared as the call wants it, the closest architecture first and PTX last, then the
        # hand-written schedules, then TMA
        by_hand = kernel.backend == "cuda"
        return (
            kernel.split_kv != splits,
            kernel.arch.portable,
            not kernel.arch.specific,
            not by_hand,
            kernel.loads != "descriptor",
            -kernel.arch.capability,
            by_hand and not kernel.main.persistent and kernel.main.shares == 1,
        )

    return [list(alike) for _, alike in groupby(sorted(kernels, key=rank), rank)]


def first_choices(kernels: Sequence[Kernel], splits: bool) -> Sequence[Kernel]:
    """The kernels of the best rank, among which predicted times decide; all of them must take the kind of call."""
    return _by_rank(kernels, splits)[0]


def fastest(kernels: Sequence[Kernel], call: Call, card: Card, sizes: tuple[int, int, int]) -> Kernel:
    """The one of the ``first_choices`` that is predicted to be the fastest for calls of typical sizes; ``call``: one of
    their kind."""
    return _by_time(kernels, kernels, _of_sizes(call, sizes), card)[0]


def _typical(call: Call | None) -> Call | None:
    """A ragged call with its typical sizes; any other call as it is."""
    return _of_sizes(call, typical_sizes(call)) if call is not None and call.ragged else call


def _by_time(kernels: Sequence[Kernel], fit: Sequence[Kernel], call: Call | None, card: Card) -> Sequence[Kernel]:
    """Candidates of one rank, the fastest by prediction first. ``fit``: those that take calls of this form; ``call``:
    of typical sizes, if it is ragged."""
    if len(kernels) == 1:
        return kernels
    rivals = [kernel for kernel in fit if kernel.times]
    times: dict[Kernel, float] = {}
    if len(rivals) > 1:
        times = {kernel: _time(kernel, call, card) for kernel in rivals}

    def rank(kernel: Kernel) -> tuple[float, int, bool, bool]:
        # The time, then what was measured to be faster on this card; sums in a fixed order, which take longer, last.
        return (
            times.get(kernel, inf if kernel.times and kernel not in rivals else 0.0),
            0 if card.name in kernel.times_on else 2 if kernel.tuned else 1,
            kernel.pack_gqa,
            kernel.ordered,
        )

    return sorted(kernels, key=rank)


def typical_sizes(call: Call) -> tuple[int, int, int]:
    """Sequences of a ragged call, which is not empty, and queries and keys of each, rounded up: keys and sequences to
    powers of two, keys in pages to powers of four, and queries, which decide how full tiles are, to tiles of rows.

    They decide between kernels for all calls that are about alike: lengths of ragged calls never repeat, and the host
    does not know those of each sequence anyway.
    """
    call = at_work(call)
    batch, kv_heads, seqlen_k, total_q = call.batch, max(call.kv_heads, 1), call.seqlen_k, call.total_q
    if call.least_queries:  # the others probably have one query each
        batch = prompts_of(total_q, batch, call.seqlen_q)
        total_q -= call.batch - batch
    group = call.heads // kv_heads
    seqlen_q = min(-(-total_q // batch), call.seqlen_q)
    if call.page_size:
        bits = (seqlen_k - 1).bit_length()
        bits += bits % 2
    else:
        bits = (min(-(-call.total_k // batch), seqlen_k) - 1).bit_length()
    many, tiles = -(-_MANY_UNITS // kv_heads), -(-seqlen_q * group // _TILE_ROWS)
    if tiles > 3:
        tiles = rounded(tiles, 2)
    queries = -(-tiles * _TILE_ROWS // group)
    return 1 << ((many if batch > many else batch) - 1).bit_length(), queries, 1 << bits


def rounded(number: int, digits: int) -> int:
    """The next number of at most so many significant binary digits."""
    zeros = max(number.bit_length() - digits, 0)
    return -(-number >> zeros) << zeros


def _of_sizes(call: Call, sizes: tuple[int, int, int]) -> Call:
    """The same ragged call with other sequences, and queries and keys of each."""
    own = copy(call)
    own.batch, own.seqlen_q, own.seqlen_k = batch, seqlen_q, seqlen_k = sizes
    own.least_queries = 0
    own.total_q, own.total_k = batch * seqlen_q, seqlen_k if call.page_size else batch * seqlen_k
    return own


def splits_keys(call: Call) -> bool:
    """Whether a call should run on a kernel whose blocks share the keys of a sequence, if there is one.

    A call that names ``split_size`` or more than one split asks for it, and with ``num_splits=1`` for the other kind.
    Else it depends on the rows that all query heads of a KV head have together, ``seqlen_q`` times the ratio of heads:
    up to ``FEW_ROWS`` memory binds, and up to ``SPLIT_ROWS`` the blocks of an ordinary kernel, one for each sequence
    and KV head, are too few to read K and V fast, unless there are ``BUSY_UNITS``. With more rows the products take
    longer than the loads. Lengths of keys are not looked at: only the device knows them, where the kernel finds how
    many splits are worth it.
    """
    if call.split_size or call.num_splits:
        return call.num_splits != 1
    rows = call.seqlen_q * group_of(call)
    return rows <= FEW_ROWS or (rows <= SPLIT_ROWS and call.batch * call.kv_heads < BUSY_UNITS)


def _time(kernel: Kernel, call: Call | None, card: Card) -> float:
    """Predicted time of a call; without one, a pair of a row and a key."""
    predicted = predict(kernel, call, card) if call is not None else None
    return predicted.nanoseconds if predicted else kernel.times[-1] / (kernel.tile_m * kernel.tile_n)


def against_form(kernel: Kernel, call: Call) -> str | None:
    """First mismatch between kernel and call, or None."""
    for label, built, asked in (
        ("layout", kernel.layout, call.layout),
        ("dtype", kernel.dtype, call.dtype),
        ("dtype of k and v", kernel.dtype_of("k").name, call.kv_dtype),
        ("dtype of the output", kernel.dtype_of("out").name, ATTENTION_NAMES.get(call.out_dtype, call.dtype)),
        ("head_dim of q and k", kernel.head_dim_qk, call.head_dim_qk),
        ("head_dim of v", kernel.head_dim_v, call.head_dim_v),
    ):
        if built != asked:
            return f"{label} is {built}, the call has {asked}"
    if kernel.transposed_v and call.seqused_k is not None:
        return "it takes no seqused_k: its copies of V cannot leave out keys"
    if kernel.grouped_v != call.v.in_groups:
        return f"it takes v {'' if kernel.grouped_v else 'not '}in groups of keys"
    if not kernel.grouped_v and kernel.transposed_v != call.v.keys_side_by_side and kernel.direction == "forward":
        return f"it takes v with contiguous {'keys' if kernel.transposed_v else 'columns'}"
    return None
