"""A process that interprets Triton: it lives as long as a test session, and runs functions of ``remote``."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from attngen.store.worker import write_request
from tests import forked

ROOT = Path(__file__).parents[2]


class Interpreter:
    """Calls functions of ``tests.interpreter.remote`` in a process of its own, where Triton interprets."""

    def __init__(self) -> None:
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from attngen.store.worker import main; main()"
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = forked.popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def call(self, function: str, *arguments: Any) -> Any:
        """Call ``remote.function(*arguments)`` in the process; attngen's errors are raised here too."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        write_request(self._process.stdin, (f"tests.interpreter.remote:{function}", arguments))
        ok, value, _, _ = pickle.load(self._process.stdout)
        if not ok:
            raise value
        return value

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
