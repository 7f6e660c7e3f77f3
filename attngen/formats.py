"""The version of attngen and of each file format that it writes and reads: the only place that has these numbers.

A shipped package carries them, so that a runtime that does not understand it can say so.
"""

from __future__ import annotations

#: Version of this release, and of the runtime that packages made by it carry.
VERSION = "0.2.0"

#: Version of the format of specs, their expressions included.
SCHEMA = 1

#: Version of the format of a kernel's manifest.
MANIFEST_FORMAT = 3

#: Version of the format of packages: their folders and ``package.json``.
PACKAGE_FORMAT = 1

#: The direction of kernels that append to caches, and the name of what they compute, which no variant can have.
APPEND, APPEND_VARIANT = "append", "append-kv"

#: The same for kernels that quantize the inputs of attention in 8 bits.
QUANTIZE, QUANTIZE_VARIANT = "quantize", "quantize-qkv"

#: The same for kernels that widen a cache in 8 bits for queries in 16.
WIDEN, WIDEN_VARIANT = "widen", "widen-kv"

#: The same for kernels that select the largest scores of each row.
TOPK, TOPK_VARIANT = "topk", "topk-scores"

#: The direction of kernels that score keys for an index. Their variants are those of attention, whose masks they apply.
INDEX_SCORES = "index_scores"

#: Directions of kernels that are not attention, and the names of what those compute that have no variant.
HELPERS = frozenset({APPEND, QUANTIZE, WIDEN, TOPK, INDEX_SCORES})
HELPER_VARIANTS = frozenset({APPEND_VARIANT, QUANTIZE_VARIANT, WIDEN_VARIANT, TOPK_VARIANT})
