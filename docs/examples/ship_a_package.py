"""From a mask to a wheel, and from the wheel to a call: what docs/packaging.md describes, from end to end.

    python docs/examples/ship_a_package.py

Needs attngen[build] and torch. Without a GPU the call runs the eager reference; the kernel is compiled all the same.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SPEC = """
schema: 1
package: my_masks
arch: [{arch}]
variants:
  even_window:
    mask: "0 <= q_pos - kv and q_pos - kv < window and kv % 2 == 0"
    scalars: {{window: {{type: int32, min: 1}}}}
kernels:
  - {{variant: even_window, head_dim: 64, dtype: bf16}}
"""

# What a user of the package writes. It imports no attngen, and runs where there is none.
PROGRAM = """
import torch
import my_masks

device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v = (torch.randn(1, 512, 8, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
out = my_masks.attention(q, k, v, variant="even_window", window=64)

position = torch.arange(512, device=device)
distance = position[:, None] - position[None, :]
visible = (distance >= 0) & (distance < 64) & (position[None, :] % 2 == 0)
heads_first = (tensor.transpose(1, 2).double() for tensor in (q, k, v))
exact = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=visible).transpose(1, 2)
error = (out.double() - exact).abs().max().item()
assert error < 2e-2, error

print(my_masks.variants())
print(my_masks.explain(q, k, v, variant="even_window", window=64))
print("as plain attention computes it")
"""


def architecture() -> str:
    """Architecture to compile for: the GPU that is here, or Hopper."""
    if not torch.cuda.is_available():
        return "sm90a"
    from attngen.arch import arch_of

    major, minor = torch.cuda.get_device_capability()
    arch = arch_of(10 * major + minor)
    assert arch is not None, f"no kernels can be built for sm{major}{minor}"
    return arch.name


def main() -> None:
    """Package a spec, install the wheel into a folder of its own, and call it from another process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "my_masks.yaml").write_text(SPEC.format(arch=architecture()))

        python = [sys.executable, "-m"]
        command = [*python, "attngen", "package", "my_masks.yaml", "-o", "dist", "--max-size", "1 MB"]
        subprocess.run(command, check=True, cwd=folder)
        (wheel,) = (folder / "dist").glob("*.whl")

        command = [*python, "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", "site", str(wheel)]
        subprocess.run(command, check=True, cwd=folder)

        subprocess.run([sys.executable, "-c", PROGRAM], check=True, cwd=folder / "site")


if __name__ == "__main__":
    main()
