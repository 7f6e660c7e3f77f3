"""The only table of exceptions decided by hand: costly machine code that is accepted, and kernels that a schedule
leaves to another although it supports them. Each row says who, how much, why, and where it was measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evidence:
    """Source of figures: a page of the docs, and the words in it that give them."""

    page: str
    figures: str


@dataclass(frozen=True, slots=True)
class Spills:
    """Bytes per thread that some launches may spill. ``measured`` is None where no page has figures."""

    who: str
    bytes: int
    reason: str
    measured: Evidence | None


@dataclass(frozen=True, slots=True)
class Serialized:
    """Kernels whose matrix products ptxas may serialize, where they have this ``trait``."""

    who: str
    trait: str
    reason: str
    measured: Evidence | None


@dataclass(frozen=True, slots=True)
class LeftToOthers:
    """A refusal for lack of registers: head dims greater than ``beyond``, with all of these ``traits``."""

    who: str
    beyond: int
    traits: frozenset[str]
    says: str
    measured: Evidence | None

    def meets(self, head_dim: int, traits: Collection[str]) -> bool:
        """Whether a kernel of that head dim and these traits is refused."""
        return head_dim > self.beyond and self.traits.issubset(traits)


@dataclass(frozen=True, slots=True)
class Slower:
    """The cost of leaving a kernel to ``who``."""

    who: str
    says: str
    measured: Evidence


#: Spills that are accepted. A few values are stored before the loops and read after them. Ping-pong consumers of a
#: backward were faster with these spills than consumers without ping-pong (softcap at head dim 128 on an H200).
SPILLS = Spills("all launches", 32, "stored before the loops and read after them", None)
PINGPONG_SPILLS = Spills(
    "CUDA backward kernels with ping-pong consumers",
    72,
    "faster with ping-pong and these spills than without ping-pong",
    Evidence("docs/notebook/hopper_backward.md", "551 at d 128"),
)
MMA_SPILLS = Spills(
    "forward kernels by mma.sync",
    64,
    "faster with 64 keys and these spills than with 32 keys and none",
    Evidence("docs/notebook/mma.md", "64 keys and 16 B of spills 1.061"),
)
MMA_BACKWARD_SPILLS = Spills(
    "backward kernels by mma.sync",
    128,
    "dK and dV take half of the registers of a thread; twice the keys for each load of Q and dO outweigh these spills",
    Evidence("docs/notebook/mma.md", "256: 248 with 128 B (0.92)"),
)
#: Such a loader has 24 registers a thread, and spills up to 108 bytes (docs/notebook/softmax_and_masks.md).
MAPPED_BIAS_SPILLS = Spills(
    "CUDA backward kernels with ping-pong consumers whose loader reads a tile map and brings tiles of biases",
    112,
    "spilled by the loader, which mostly waits",
    None,
)
#: The warp that reads dS has the few registers of a producer, and waits for consumers most of the time.
READER_SPILLS = Spills(
    "CUDA backward kernels with a warp that reads dS", 128, "spilled by a warp that mostly waits", None
)
CACHE_SPILLS = Spills(
    "split-KV forward kernels of caches in 8 bits", 160, "stored before the loops and read after them", None
)

TANGENT_SPILLS = Spills(
    "Triton kernels of forward-mode derivatives",
    256,
    "faster with 64 keys and these spills than with 32 keys and none",
    Evidence("docs/notebook/triton_jvp.md", "4.24 against 4.84"),
)

MLA_SPILLS = Spills(
    "kernels whose values are the head of their keys", 2048, "stored before the loop over keys and read after it", None
)

WIDE_SPILLS = Spills(
    "kernels of head dims beyond 256", 3072, "stored before the loop over keys and read after it", None
)

WIDE_BACKWARD_SPILLS = Spills(
    "Triton backward kernels of head dims beyond 256", 1024, "a gradient takes half of the registers of a thread", None
)

#: If all CUDA plans of a backward are refused for spills, the one that spills least is still taken up to this limit:
#: a step loads the spilled values once or twice, and Triton runs the products at half the speed.
LAST_SPILLS = Spills(
    "CUDA backward kernels whose only alternative is another backend",
    328,
    "spilled values of a step are few",
    Evidence("docs/notebook/building.md", "1.30 to 4.76 times as fast as Triton"),
)

#: Advice in messages about a backward that needs too many registers in CUDA.
TRITON_BACKWARD = Slower(
    "Triton backward kernels",
    "a backward in CUDA was 1.4 to 1.9 times as fast at head dim 128",
    Evidence("docs/notebook/building.md", "1.4 to 1.9 times slower"),
)

#: Products that ptxas serializes. Its warning about these kernels (C7510) is no reason to refuse them, since no other
#: kernel computes them.
SERIALIZED = (
    Serialized("Triton backward kernels", "own_gradients", "atomic additions stand in the loop of the products", None),
    Serialized("Triton backward kernels", "constant_logits", "nothing reads S, whose product is dropped", None),
    *(
        Serialized(f"Triton {direction} kernels", "parts", "each product of parts waits for the one before it", None)
        for direction in ("forward", "backward", "jvp")
    ),
)

SPLIT_SPILLS = Spills(
    "Triton kernels that multiply float32 in parts",
    8192,
    "six products for each load and store hide them",
    Evidence("docs/notebook/triton_forward.md", "1,284 B of spills"),
)

#: Beyond this head dim a backward in CUDA has too few registers to multiply all columns of dQ of a block at once. Not
#: measured: follows from registers.
ALL_OF_DQ = 192
_WIDE = f"head dims beyond {ALL_OF_DQ} leave no registers in cuda for"
_VARYING = "whose derivative differs from pair to pair, or from head to head,"
_BOTH_READ = "beside a mask and a score that both read tensors by position"
_BACKWARD = "CUDA backward kernels"

#: Determined by compiling, not by benchmarks, so that no page has figures.
LEFT_TO_OTHERS = (
    LeftToOthers(
        _BACKWARD, 0, frozenset({"varying_derivative", "dropout"}), f"scores {_VARYING} have no dropout in cuda", None
    ),
    LeftToOthers(
        _BACKWARD, ALL_OF_DQ, frozenset({"both_read", "ordered"}), f"{_WIDE} a fixed order {_BOTH_READ}", None
    ),
    LeftToOthers(_BACKWARD, ALL_OF_DQ, frozenset({"both_read", "dropout"}), f"{_WIDE} dropout {_BOTH_READ}", None),
)


def left_to_others(who: str, head_dim: int, traits: Collection[str]) -> Iterator[LeftToOthers]:
    """Yield the rows that apply to a kernel of ``who``."""
    return (row for row in LEFT_TO_OTHERS if row.who == who and row.meets(head_dim, traits))


def may_wait(who: str, traits: Collection[str]) -> bool:
    """Whether ptxas may serialize the products of a kernel of ``who`` with these traits."""
    return any(row.who == who and row.trait in traits for row in SERIALIZED)
