"""attngen as an attention backend of diffusers: ``register()``, then ``set_attention_backend("attngen")``.

Calls are served as inside an ``attngen.integrations.sdpa`` block: also with masks given as tensors, and by torch where
no kernel takes them, or where torch compiles. diffusers names its backends by the members of an enumeration, which has
no function that adds one; ``register`` adds a member to the class.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attngen.errors import NoKernelError
from attngen.integrations.torch_sdpa.routing import Routing

#: Releases whose contract the tests check.
RELEASES = ("0.42.1",)

#: Name of the backend.
NAME = "attngen"

#: The calls of the backend: ``served.report()`` counts them, with the reasons of those that torch served.
served = Routing(None, explain=False)


def register() -> None:
    """Add the backend to diffusers' registry; again is the same as once. NoKernelError without diffusers."""
    try:
        from diffusers.models import attention_dispatch as dispatch
    except ImportError as error:
        raise NoKernelError(f"diffusers cannot be imported: {error}") from None
    names = dispatch.AttentionBackendName
    if NAME.upper() not in names.__members__:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_map_[member._name_] = names._value2member_map_[NAME] = member
        names._member_names_.append(member._name_)
    checks = [dispatch._check_device, dispatch._check_shape]
    dispatch._AttentionBackendRegistry.register(names(NAME), constraints=checks)(attention)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Attention of (batch, tokens, heads, head_dim), as diffusers' ``native`` backend has it. ValueError for
    ``return_lse`` and for context parallelism, which it does not have either."""
    if return_lse or _parallel_config is not None:
        raise ValueError(f"the backend '{NAME}' has neither return_lse nor context parallelism")
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    torchs = F.scaled_dot_product_attention
    if torch.compiler.is_compiling():
        out = torchs(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    else:
        out = served(torchs, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out.transpose(1, 2)
