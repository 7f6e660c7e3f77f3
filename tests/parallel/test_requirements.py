"""Missing requirements of plans beside torch are named."""

from __future__ import annotations

import subprocess
import sys


def test_a_missing_numpy_is_named() -> None:
    program = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'numpy' else f(n, *a)"
    )
    lines = [program, "import attngen", "attngen.parallel"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "attngen.parallel needs numpy, which is not installed: pip install 'numpy>=1.26'" in done.stderr
