"""The options by which commands build a part of a spec: ``--arch``, ``--dtype`` and ``--head-dim``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from attngen.build.kernel_filter import KernelFilter


def filtering(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the three options; it gets them as one argument, ``only``."""

    @click.option("--arch", multiple=True, metavar="ARCH", help="Only kernels for this arch; may be repeated.")
    @click.option("--dtype", multiple=True, metavar="DTYPE",
                  help="Only kernels for q of this dtype, such as bf16; may be repeated.")  # fmt: skip
    @click.option("--head-dim", multiple=True, metavar="DIM",
                  help="Only kernels for this head dim, such as 128 or 192/128; may be repeated.")  # fmt: skip
    @functools.wraps(command)
    def run(*args: Any, arch: tuple[str, ...], dtype: tuple[str, ...], head_dim: tuple[str, ...], **given: Any) -> Any:
        return command(*args, only=KernelFilter(arch, dtype, head_dim), **given)

    return run
