"""What a build remembers of plans whose machine code was not taken, so that the next build does not compile them again.

<root>/refusals/<key>.json, beside the kernels: the key covers the plan, the source and the compiler, which decide it.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from attngen.errors import StoreError
from attngen.files import read_regular
from attngen.store.store import Store

if TYPE_CHECKING:
    from attngen.plan.model import Refused

FOLDER = "refusals"


def read_refusal(store: Store, key: str) -> Refused | None:
    """Return why the kernel of a key was not taken, or None if nothing is known against it."""
    try:
        fields = json.loads(read_regular(store.root / FOLDER / f"{key}.json"))
    except (OSError, ValueError, RecursionError):
        return None
    from attngen.plan.model import Refused

    try:
        slow = fields["slow"]
        return Refused(
            str(fields["name"]),
            str(fields["backend"]),
            str(fields["reason"]),
            None if slow is None else (bool(slow[0]), int(slow[1])),
        )
    except (TypeError, KeyError, ValueError, IndexError, OverflowError):
        return None


def write_refusal(store: Store, key: str, refused: Refused) -> None:
    """Remember why the kernel of a key was not taken; where that cannot be kept, a build takes longer."""
    with contextlib.suppress(StoreError):
        store.write(FOLDER, f"{key}.json", json.dumps(asdict(refused)).encode() + b"\n")
