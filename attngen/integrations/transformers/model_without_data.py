"""Running a model whose tensors have shapes but no data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class _WithoutData(TorchDispatchMode):
    """Lets tensors with data, such as the sizes of images, be used with those without, whose values count as 1."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype == torch.bool or 1  # the mask of a batch without padding holds ones
        devices = {leaf.device.type for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
        if len(devices) > 1:
            given = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), given)
        return func(*given[0], **given[1])


@contextmanager
def without_data() -> Iterator[None]:
    """Let a model run on torch's ``meta`` device, where a search in a tensor finds every element."""
    from torch.fx.experimental import _config

    with torch.no_grad(), _config.patch(meta_nonzero_assume_all_nonzero=True), _WithoutData():
        yield
