"""Parts that most calls on the CPU do without, each imported at its first use, and bound here from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngen.runtime.autograd import transforms
    from attngen.runtime.autograd.training import differentiate
    from attngen.runtime.launch.tile_map import require_map
    from attngen.runtime.operations.attention import kernel_call, largest, mixed, quantized

__all__ = ["differentiate", "kernel_call", "largest", "mixed", "quantized", "require_map", "transforms"]


def __getattr__(name: str) -> Any:
    global differentiate, kernel_call, largest, mixed, quantized, require_map, transforms
    if name == "kernel_call":
        from attngen.runtime.operations.attention import kernel_call
    elif name == "largest":
        from attngen.runtime.operations.attention import largest
    elif name == "mixed":
        from attngen.runtime.operations.attention import mixed
    elif name == "quantized":
        from attngen.runtime.operations.attention import quantized
    elif name == "transforms":
        from attngen.runtime.autograd import transforms
    elif name == "differentiate":
        from attngen.runtime.autograd.training import differentiate
    elif name == "require_map":
        from attngen.runtime.launch.tile_map import require_map
    else:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return globals()[name]
