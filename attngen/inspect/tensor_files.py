"""The user's own tensors for ``attngen explain``: read from files, and checked against what the variant declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attngen.dtypes import dtype as dtype_row
from attngen.errors import CallError, LoadError
from attngen.lang.variant import Tensor

_ALLOWED = "allowed: a .pt file with one tensor (torch.save), or a .npy file (numpy.save)"


def read_tensor(declared: Tensor, path: Path) -> torch.Tensor:
    """Return the tensor of a file, on the CPU, with the elements that the variant declares.

    Raises CallError for a file that cannot be read, and for a tensor whose rank, extents, dtype, order or range is not
    the declared one.
    """
    tensor = _read(declared.name, path)
    label = f"--tensor {declared.name}={path}"
    shape = f"[{', '.join(map(str, declared.shape))}]"
    if tensor.dim() != len(declared.shape):
        raise CallError(f"{label} has shape {list(tensor.shape)}; allowed: {shape}")
    for extent, length in zip(declared.shape, tensor.shape, strict=True):
        if isinstance(extent, int) and extent != length:
            raise CallError(f"{label} has shape {list(tensor.shape)}; allowed: {shape}")
    wanted = getattr(torch, dtype_row(declared.dtype).torch)
    if tensor.dtype != wanted:
        raise CallError(f"{label} has dtype {tensor.dtype}; allowed: {wanted}")
    _require_facts(declared, tensor, label)
    return tensor


def _read(name: str, path: Path) -> torch.Tensor:
    label = f"--tensor {name}={path}"
    if path.suffix not in (".npy", ".pt", ".pth"):
        raise CallError(f"{label}: found '{path.suffix}'; {_ALLOWED}")
    if path.is_fifo():
        raise CallError(f"{label} is a pipe; {_ALLOWED}")
    try:
        if path.suffix == ".npy":
            import numpy

            tensor: Any = torch.from_numpy(numpy.load(path, mmap_mode="c", allow_pickle=False))
        else:
            tensor = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise LoadError(f"{label}: reading .npy needs numpy, which is not installed; write it by torch.save") from None
    except OSError as error:
        raise CallError(f"{label} cannot be read: {error.strerror or 'no such file'}; {_ALLOWED}") from None
    except Exception:  # what comes of a file that was damaged, or is of something else, depends on its bytes
        raise CallError(f"{label} holds no tensor that can be read; {_ALLOWED}") from None
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise CallError(f"{label} holds no single dense tensor; {_ALLOWED}")
    return tensor


def _require_facts(declared: Tensor, tensor: torch.Tensor, label: str) -> None:
    if tensor.numel() == 0:
        return
    least, most = declared.range or (None, None)
    if isinstance(least, int | float) and bool((tensor < least).any()):
        raise CallError(f"{label} holds {tensor.min().item()}, below the declared minimum {least}")
    if isinstance(most, int | float) and bool((tensor > most).any()):
        raise CallError(f"{label} holds {tensor.max().item()}, above the declared maximum {most}")
    if declared.monotone is not None:
        axis = declared.monotone.axis
        if bool(
            (tensor.narrow(axis, 1, tensor.shape[axis] - 1) < tensor.narrow(axis, 0, tensor.shape[axis] - 1)).any()
        ):
            raise CallError(f"{label} decreases along axis {axis}, where it is declared {declared.monotone.order}")
