"""Dropout of probabilities: what a variant that drops takes at the call, and the numbers that decide.

A pair of query and key keeps its probability if its 16-bit random number is at least ``threshold``, the rate in units
of 2^-16; what is kept is divided by the rate of keeping. The numbers are those of Philox-4x32-10 (Salmon, Moraes, Dror
and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"), and depend on seed, offset, batch, head, query and key
alone, so that kernels of any tile agree. The key is the seed; a counter is made of

1. ``4 * (kv // 16) + kv % 8 // 2``,
2. ``8 * (q // 16) + q % 8``,
3. ``b * heads + h``,
4. the lower 32 bits of the offset,

and gives four words, of which a pair has number ``2 * (q // 8 % 2) + kv // 8 % 2``: the lower half where kv is even.
These are the eight pairs that one lane holds of a 16 x 16 block of a product of matrices.
"""

from __future__ import annotations

from attngen.lang.variant import Scalar, Tensor

#: Largest float32 below 1.
MAX_RATE = 1.0 - 2.0**-24

#: The rate of a call, and where its random numbers start: seed and offset.
DROPOUT_P = Scalar("dropout_p", "fp32", min=0.0, max=MAX_RATE)
RNG_STATE = Tensor("rng_state", "int64", (2,))

#: Bits of a random number; thresholds count in units of their range.
UNITS = 2**16

#: Constants of a round (Salmon et al. 2011): what multiplies the words, and what is added to the key.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
