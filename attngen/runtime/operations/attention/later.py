"""What the first calls on the CPU do without: each name is imported at its first use, and bound here from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


def __getattr__(name: str) -> Any:
    global differentiate, kernel_call, mixed, quantized, require_map
    if name == "kernel_call":
        from attngen.runtime.operations.attention import kernel_call
    elif name == "mixed":
        from attngen.runtime.operations.attention import mixed
    elif name == "quantized":
        from attngen.runtime.operations.attention import quantized
    elif name == "differentiate":
        from attngen.runtime.autograd.training import differentiate
    elif name == "require_map":
        from attngen.runtime.launch.tile_map import require_map
    else:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return globals()[name]
