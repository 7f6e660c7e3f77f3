"""Differences between the releases of transformers that attngen serves, 5.17 to 5.24. Nothing else asks for a version.

=====  =============================================================================================================
since  what changed
=====  =============================================================================================================
5.18   continuous batching keeps keys and values of all layers in one tensor, with an allocator for each kind of layer;
       ``generate`` calls ``contiguous()`` of the masks that it makes (``mask_structure.StructuredMask``)
5.19   continuous batching takes ``sdpa``, ``paged|eager``, and names with "flash" in them, for which it makes no dense
       mask; ``max_length_q`` and ``max_length_k`` are what ``max_seqlen_q`` and ``max_seqlen_k`` were
5.23   in a mask of packed sequences, positions count from the start of each (``mask_structure``)
5.24   caches are arguments and results of the name ``cache``, which was ``past_key_values``; a layer updates the cache
       of continuous batching before it calls its attention, which did that itself
=====  =============================================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as once
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

FULL, SLIDING = "full_attention", "sliding_attention"

_PAGED, _FLASH = "paged|attngen", "flash|attngen"


@once
def _version() -> tuple[int, int]:
    import transformers

    major, minor = transformers.__version__.split(".")[:2]
    return int(major), int(minor)


# --- caches ---------------------------------------------------------------------------------------------------


def cache_name(forward: Callable[..., Any]) -> str:
    """The name of the cache argument of a function of transformers: ``cache``, or ``past_key_values`` before 5.24."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def cache_of(outputs: Any) -> Any:
    """Return the cache that a model returns with its outputs, or None."""
    cache = getattr(outputs, "cache", None)
    return getattr(outputs, "past_key_values", None) if cache is None and _version() < (5, 24) else cache


# --- continuous batching --------------------------------------------------------------------------------------


def paged_name() -> str:
    """Return the implementation of attention that reads keys from pages, by a name that continuous batching takes."""
    return _PAGED if _version() < (5, 19) else _FLASH


def interface(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention over pages as it is registered: where all layers share a tensor, a trace would copy that."""
    return attention if _version() < (5, 18) else torch.compiler.disable(attention)


def set_paged(model: Any) -> None:
    """Choose the implementation over pages for a model that runs on attngen. Calling it again changes nothing."""
    from transformers import PreTrainedModel

    if _version() < (5, 19):
        model.set_attn_implementation(_PAGED)
        return
    # set_attn_implementation would look for a package or a kernel on the hub for a name with "flash" in it
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation = _FLASH
    if _version() >= (5, 24) and model not in _HOOKED:
        model.register_forward_pre_hook(_leave_the_update, with_kwargs=True)
        _HOOKED.add(model)


#: The models whose attention updates the cache of continuous batching itself.
_HOOKED: WeakSet[torch.nn.Module] = WeakSet()


def _leave_the_update(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let the attention of each layer update the cache; before that is called, the cache would gather all keys."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    cache = kwargs.get("cache")
    if model.config._attn_implementation != _FLASH or not isinstance(cache, PagedAttentionCache):
        return None
    return args, {**kwargs, "cache": _not_updated()(cache), _CACHE: cache}


#: The argument by which a model hands a cache on to the attention of its layers, as it does with indices and lengths.
_CACHE = "attngen_cache"


@once
def _not_updated() -> Any:
    """Return the kind of cache that layers do not update before they call their attention."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    class NotUpdated(PagedAttentionCache):  # type: ignore[misc, unused-ignore]
        def __init__(self, cache: Any) -> None:
            self.__dict__.update(cache.__dict__)

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: Mapping[str, Any]
        ) -> tuple[Tensor, Tensor]:
            return key_states, value_states

    return NotUpdated


def cache_given(options: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of an attention over pages, or None."""
    return options.get("cache" if _version() < (5, 24) else _CACHE)


@dataclass(frozen=True, slots=True)
class KeptKeys:
    """The part of a cache of continuous batching for a layer: all keys in pages, or those of a window.

    ``group`` is the place of its indices. ``pages``: keys and values (pages, page_size, kv_heads, head_dim); None for
    a layer with a window.
    """

    kind: str
    group: int
    window: int | None
    pages: tuple[Tensor, Tensor] | None


def kept(cache: Any, layer: int) -> KeptKeys:
    """The part of a ``PagedAttentionCache`` for a layer."""
    if _version() >= (5, 18):
        allocator = cache.layer_to_allocator[layer]
        window = getattr(allocator, "sliding_window", None)
        if window is not None:
            return KeptKeys(SLIDING, allocator.index, window, None)
        return KeptKeys(FULL, allocator.index, None, allocator.get_cache_for_block_table(layer))
    group, place = cache.layer_index_to_group_indices[layer]
    window = cache.sliding_windows[layer]
    if window != 1:
        return KeptKeys(SLIDING, group, window, None)
    k, v = (each[place] for each in (cache.key_cache, cache.value_cache))
    size = cache.block_size
    return KeptKeys(FULL, group, None, (k.view(-1, size, *k.shape[1:]), v.view(-1, size, *v.shape[1:])))


def longest(options: Mapping[str, Any], kind: str) -> tuple[int, int]:
    """Numbers of queries and keys of the longest sequence of a batch, in a kind of layers."""
    name = "max_seqlen" if _version() < (5, 19) else "max_length"
    return options[f"{name}_q"], of_kind(options[f"{name}_k"], kind)


def of_kind(value: Any, kind: str) -> Any:
    """The value for a kind of layers, where kinds have values of their own."""
    return value[kind] if isinstance(value, Mapping) else value


def gathered(
    cache: Any, layer: int, key: Tensor, value: Tensor, read_index: Sequence[Tensor], write_index: Sequence[Tensor],
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write new keys and values (1, kv_heads, new, head_dim) of a layer; return those that it sees, of all sequences.

    These are (1, kv_heads, total, head_dim). ``options`` are the other arguments of the attention.
    """
    given = {"key_states": key, "value_states": value, "layer_idx": layer}
    indices = {"read_index": read_index, "write_index": write_index}
    if _version() >= (5, 19):
        k, v = cache.update(**given, kwargs={**options, **indices})
        return k, v
    k, v = cache.update(**given, **indices)
    return k.transpose(0, 1)[None], v.transpose(0, 1)[None]
