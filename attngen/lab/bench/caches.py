"""Empty caches for first calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from attngen.store.temporary import TemporaryFolder


@contextmanager
def fresh_caches() -> Iterator[dict[str, str]]:
    """Give attngen and torch's compiler empty caches; yields the variables of the environment that name these."""
    with TemporaryFolder() as folder:
        variables = {
            "ATTNGEN_CACHE": f"{folder}/attngen", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }  # fmt: skip
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield variables
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
