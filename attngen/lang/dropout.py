"""Dropout of probabilities: what a variant with dropout takes at the call, and its random numbers.

A pair of query and key keeps its probability if its 16-bit random number is at least ``threshold``, the rate in units
of 2^-16; kept probabilities are divided by the probability of keeping. The numbers are those of Philox-4x32-10 (Salmon,
Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"), and depend on seed, offset, batch, head,
query and key alone, so that kernels of any tile agree. Philox's key is the seed; the four words of its counter are

1. ``4 * (kv // 16) + kv % 8 // 2``,
2. ``8 * (q // 16) + q % 8``,
3. ``b * heads + h``,
4. the lower 32 bits of the offset,

and its result is four words. A pair uses word ``2 * (q // 8 % 2) + kv // 8 % 2``, the lower half if kv is even, else
the upper. The eight halves are those of the eight pairs that one lane holds of a 16 x 16 block of an accumulator.

Where a tensor says where rows lie (``lang.runs``), q is the position that it holds, so that calls of parts of the rows
of a sequence drop what one call drops. Runs have to begin at multiples of 16 for that.
"""

from __future__ import annotations

from attngen.lang.variant import Scalar, Tensor

#: Largest float32 below 1.
MAX_RATE = 1.0 - 2.0**-24

#: The dropout rate of a call, and the seed and offset of its random numbers.
DROPOUT_P = Scalar("dropout_p", "fp32", min=0.0, max=MAX_RATE)
RNG_STATE = Tensor("rng_state", "int64", (2,))

#: Number of values of a random number of 16 bits; thresholds count in units of 1 / UNITS.
UNITS = 2**16

#: Constants of a round (Salmon et al. 2011): multipliers of the words, and increments of the key.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
