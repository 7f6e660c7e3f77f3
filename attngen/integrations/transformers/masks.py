"""The mask that a model of transformers makes for attngen, and which configurations may have it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from attngen.errors import CallError, NoKernelError
from attngen.integrations.transformers.block_lists import serve
from attngen.integrations.transformers.mask_structure import StructuredMask, structure_of, tree_structure
from attngen.integrations.transformers.tree_mask import TreeMask

#: The attribute of a causal mask made in a trace that holds how many keys of a static cache count, (batch,) int32.
USED = "_attngen_used"


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask of a forward pass, (batch, 1, queries, keys): as a structure, if it has a known one.

    ``attention_mask`` (batch, keys so far) is False at padding. Its values are read once, as transformers itself does
    for SDPA; while a graph is traced or captured nothing is read, and the mask is a tensor of bools. That of a causal
    step against a static cache, without ``attention_mask``, has its structure as an attribute. A step that ``generate``
    compiles takes a mask that was made outside of it, as a structure. A model that knows no masks but eager's gets
    these, numbers that are added. Raises CallError for a model that computes its attention itself: it would add the
    bools to its scores. For an ``attention_mask`` of a pack of prefix trees raises CallError beside a cache, and
    NoKernelError for a model that cannot take a tree.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask, prepare_padding_mask, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    function = causal_mask_function if mask_function is None else mask_function
    use_vmap = bool(kwargs.get("use_vmap"))

    def build() -> Tensor:
        tensor = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        assert tensor is not None
        return tensor

    config: type = type(kwargs.get("config"))
    serve(config)
    if isinstance(attention_mask, TreeMask):
        whole = (batch_size, q_length, q_offset, kv_offset) == (1, kv_length, 0, 0)
        return _mask_of_tree(attention_mask, config, None if use_vmap else function, whole=whole)
    if takes_masks_of_eager(config):
        options = {"use_vmap": use_vmap, "device": device, **({"dtype": kwargs["dtype"]} if "dtype" in kwargs else {})}
        numbers: Tensor = eager_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, **options
        )
        return numbers
    if is_tracing(attention_mask) or detect_fake_mode() is not None:
        plain = function is causal_mask_function and attention_mask is None and kv_offset == 0
        skips = plain and kwargs.get("allow_is_causal_skip", True)
        if skips and isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length:
            return None
        tensor = build()
        if plain and isinstance(q_offset, Tensor):  # a step against a static cache: its bools need not be read
            used = (q_offset + q_length).to(device=device, dtype=torch.int32)
            setattr(tensor, USED, used.reshape(1).expand(batch_size).contiguous())
        return tensor
    own = with_attention_of_its_own(config)
    if own is not None:
        raise CallError(f"{own} computes its attention itself, so that attn_implementation must be 'eager'")
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    structure = None
    if not use_vmap:
        structure = structure_of(
            function, padding, batch=batch_size, queries=q_length, keys=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, device=device,
        )  # fmt: skip
    if structure is None:
        return build()
    return StructuredMask.of(structure, (batch_size, 1, q_length, kv_length), device, build)


def _mask_of_tree(tree: TreeMask, config: type, function: Callable[..., Any] | None, *, whole: bool) -> StructuredMask:
    """The mask of a pack of prefix trees in a kind of layers, by the mask function of that kind, if it is known.

    ``whole``: whether queries and keys are the tokens of one pack.
    """
    if not whole:
        raise CallError("a pack of prefix trees is one forward pass without a cache, and the whole batch")
    reason = against_trees(config)
    if reason is not None:
        raise NoKernelError(f"{config.__name__}: {reason}; run the sequences of the pack one by one")
    structure = None if function is None else tree_structure(function, tree.subtree_end, tree.position)
    if structure is None or takes_masks_of_eager(config):
        raise NoKernelError(
            f"{config.__name__}: a prefix tree is served in layers that are causal, with a sliding window or without; "
            "this model has a layer with another mask; run the sequences of the pack one by one"
        )
    tree.taken.add(config)
    count = tree.shape[1]
    return StructuredMask.of(structure, (1, 1, count, count), tree.device, lambda: tree.dense(structure.left))


@cache
def against_trees(config: type) -> str | None:
    """The reason why a config's model cannot run a prefix tree, or None if none is known."""
    if with_attention_of_its_own(config) is not None:
        return "the model computes its attention itself"
    models = _models_of(config)
    if ".models.blt." in config.__module__:
        return "the model groups the bytes of the row in patches"
    if any(getattr(model, "_is_stateful", False) for model in models):
        return "the model has layers that carry a state from token to token, which branches would share"
    if any("position_ids" not in inspect.signature(model.forward).parameters for model in models):
        return "the model counts positions along the row, since it takes no position_ids"
    if any(map(_positions_of_roberta, models)):
        return "the model counts positions from its padding token, and not from 0"
    return None


def _positions_of_roberta(model: Any) -> bool:
    """Whether a part of a model makes positions from the tokens that are not padding, which begin after its number."""
    known = vars(sys.modules[model.__module__]).values()
    return any(hasattr(each, "create_position_ids_from_input_ids") for each in known if isinstance(each, type))


@torch.compiler.assume_constant_result  # dynamo cannot trace the look into transformers' mapping
def takes_masks_of_eager(config: type) -> bool:
    """Whether the layers of a config's model take an implementation of attention, but know no masks except eager's.

    Such a class declares that it supports neither SDPA, nor flash-attn, nor FlexAttention. DeepSeek-V4's layers append
    columns to the mask of a forward pass, as numbers that are added.
    """
    return _declares_eager_masks(config)


@cache
def _declares_eager_masks(config: type) -> bool:
    says = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    models = _models_of(config)
    return bool(models) and all(
        getattr(model, "_supports_attention_backend", False) and not any(getattr(model, name, False) for name in says)
        for model in models
    )


@cache
def with_attention_of_its_own(config: type) -> str | None:
    """Return the name of a config's model if it ignores ``attn_implementation``; None if it does not, or is unknown."""
    models = _models_of(config)
    says = ("_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn")
    if not models or any(getattr(model, name, True) for model in models for name in says):
        return None
    listed = [model for model in models if hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS")]
    if listed and not any(map(_softmax_of_its_own, listed)):
        return None
    name: str = models[-1].__name__
    return name


def _softmax_of_its_own(model: Any) -> bool:
    """Whether a part of a model takes the mask and computes its own softmax, while others look up their attention."""
    from transformers import PreTrainedModel

    known: Mapping[str, Any] = vars(sys.modules[model.__module__])
    parts: list[Any] = [model]
    for part in parts:  # grows
        named = [known.get(name) for name in _names(part.__init__)]
        classes = [each for one in named for each in (one.values() if isinstance(one, dict) else [one])]
        for each in classes:
            if not isinstance(each, type) or not issubclass(each, torch.nn.Module) or each in parts:
                continue
            of_another = (
                issubclass(each, PreTrainedModel) and getattr(each, "config_class", None) is not model.config_class
            )
            parts += [] if of_another else [each]
    forwards = [inspect.unwrap(part.forward) for part in parts]
    return any("softmax" in _names(each) and "attention_mask" in each.__code__.co_varnames for each in forwards)


def _names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names that a function looks up, also in what it defines."""
    codes = [getattr(inspect.unwrap(function), "__code__", None)]
    for code in codes:  # grows
        codes += [each for each in getattr(code, "co_consts", ()) if hasattr(each, "co_names")]
    return frozenset(name for code in codes if code is not None for name in code.co_names)


def _models_of(config: type) -> list[Any]:
    """The base model of a config, or all models of its package that are loaded, if no mapping has it."""
    from transformers import MODEL_MAPPING

    mapped = MODEL_MAPPING.get(config, None)
    first = mapped[0] if isinstance(mapped, tuple) else mapped
    return _loaded_models(config) if first is None else [first]


def _loaded_models(config: type) -> list[Any]:
    """Return the models of a config's own package that are made from it; some parts of models are in no mapping."""
    from transformers import PreTrainedModel

    package = config.__module__.rpartition(".")[0]
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(f"{package}.modeling_")]
    return [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, PreTrainedModel)
        and getattr(each, "config_class", None) is config
    ]
