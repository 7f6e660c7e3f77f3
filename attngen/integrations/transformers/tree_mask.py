"""The mask of a prefix tree as a model's ``attention_mask``.

transformers hands a mask of two dimensions on to ``AttentionMaskInterface``, once for each kind of layer, with the
function that limits that kind. So a window of a layer meets the tree without a word from the model. Any other use of
the mask, such as by another implementation of attention, is refused: as padding it would hide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.transformers.mask_structure import ABOUT_FORM

#: Conversions after which a mask is still that of its tree, if its shape is the same.
_CONVERSIONS = {
    getattr(torch.Tensor, name)
    for name in ("to", "cuda", "cpu", "bool", "long", "int", "contiguous", "clone", "detach", "view", "reshape")
}


class TreeMask(torch.Tensor):
    """An ``attention_mask`` (1, n) of a pack of prefix trees; it has a shape, a device and a dtype, but no values.

    ``subtree_end`` and ``position`` (1, n) int32 are as in the variant ``span_tree``. ``taken`` are the configs of the
    models that asked for it.
    """

    subtree_end: Tensor
    position: Tensor
    taken: set[type]

    @staticmethod
    def of(
        subtree_end: Tensor, position: Tensor, dtype: torch.dtype = torch.bool, *, taken: set[type] | None = None
    ) -> TreeMask:
        """Make the mask of a tree, on the device of ``subtree_end``."""
        shape = tuple(subtree_end.shape)
        nothing = torch.empty_strided(shape, (0,) * len(shape), dtype=dtype, device=subtree_end.device)
        mask = torch.Tensor._make_subclass(TreeMask, nothing)
        mask.subtree_end, mask.position = subtree_end, position
        mask.taken = set() if taken is None else taken
        return mask

    def dense(self, left: int) -> Tensor:
        """All pairs as bools (1, 1, n, n): ancestors at most ``left`` positions before a token, or all if negative."""
        place = torch.arange(self.shape[1], device=self.device)
        q, kv = place[:, None], place[None]
        seen = (kv <= q) & (q < self.subtree_end[:, None])
        if left >= 0:
            seen &= self.position[..., None] - self.position[:, None] <= left
        return seen[:, None]

    def __repr__(self, **options: Any) -> str:
        return f"TreeMask({self.shape[1]} tokens, {self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer for form, and convert; raise CallError for all else."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in ABOUT_FORM:
                return func(*args, **kwargs)
            mask = args[0] if args else None
            if func in _CONVERSIONS and isinstance(mask, TreeMask):
                like = func(torch.empty_like(mask.position, dtype=mask.dtype), *args[1:], **kwargs)
                if like.shape == mask.shape:
                    moved = mask.subtree_end.to(like.device), mask.position.to(like.device)
                    return TreeMask.of(*moved, like.dtype, taken=mask.taken)
        name = getattr(func, "__name__", str(func))
        raise CallError(
            f"the model computes {name} of the attention_mask of a pack of prefix trees, which has no values: it takes "
            "attn_implementation='attngen', and no layers that mix tokens in another way than by attention; run the "
            "sequences of the pack one by one with other models"
        )
