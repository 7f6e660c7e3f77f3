"""Which attngen this is, and which forms of files it writes and reads: the only place that counts them.

A package that was shipped carries these numbers, so that a runtime that does not understand it can say so.
"""

from __future__ import annotations

#: Version of this release, and of the runtime that packages made by it carry.
VERSION = "0.1.0"

#: Form of a spec, its expressions included.
SCHEMA = 1

#: Form of the manifest of a kernel.
MANIFEST_FORMAT = 2

#: Form of a package: its folders and its ``package.json``.
PACKAGE_FORMAT = 1

#: The direction of kernels that write into caches, and the name of what they compute, which no variant can have.
APPEND, APPEND_VARIANT = "append", "append-kv"

#: The same of kernels that quantize what attention in 8 bits reads.
QUANTIZE, QUANTIZE_VARIANT = "quantize", "quantize-qkv"

#: Directions of kernels that are no attention, and the names of what they compute.
HELPERS = frozenset({APPEND, QUANTIZE})
HELPER_VARIANTS = frozenset({APPEND_VARIANT, QUANTIZE_VARIANT})
