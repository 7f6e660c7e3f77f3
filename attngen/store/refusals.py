"""Plans whose machine code a build refused, so that the next build does not compile them again.

They are kept beside the kernels, in <root>/refusals/<key>.json: the key covers all that decides, the plan, the source
and the compiler.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from attngen.errors import StoreError
from attngen.files import read_regular
from attngen.records import MisfitError, read
from attngen.store.store import Store

if TYPE_CHECKING:
    from attngen.plan.model import Refused

FOLDER = "refusals"


def read_refusal(store: Store, key: str) -> Refused | None:
    """Reason why the kernel of a key was refused, or None if it was not."""
    try:
        fields = json.loads(read_regular(store.root / FOLDER / f"{key}.json"))
    except (OSError, ValueError, RecursionError):
        return None
    from attngen.plan.model import Refused

    try:
        return read(Refused, fields)
    except MisfitError:
        return None


def write_refusal(store: Store, key: str, refused: Refused) -> None:
    """Remember why the kernel of a key was refused; if that cannot be written, later builds only take longer."""
    with contextlib.suppress(StoreError):
        store.write(FOLDER, f"{key}.json", json.dumps(asdict(refused)).encode() + b"\n")
