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
