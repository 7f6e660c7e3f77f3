"""``attn_implementation="attngen"`` for the models of Hugging Face's transformers.

    import attngen.integrations.transformers as attngen_transformers

    attngen_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attngen")

``register`` adds two functions to transformers: one that computes attention, and one that makes the masks of a forward
pass. Masks are kept as their structure (``mask_structure``), so that windows, chunks and padding bound the loops of a
kernel. An unknown mask becomes a tensor of bools, whose empty tiles kernels skip by a tile map.

``use_pages`` chooses kernels that read keys from pages, for continuous batching. ``transformers_versions`` says which
releases of transformers are served, and what differs between them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from attngen.errors import CallError, NoKernelError
from attngen.integrations import transformers_paged, transformers_versions
from attngen.integrations.choice import NO_LIMIT, Candidate, Packing, attend, with_dropout
from attngen.integrations.gradients import join_sinks
from attngen.integrations.mask_structure import Structure, StructuredMask, structure_of

NAME = "attngen"
SPEC = "transformers"

_BIAS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp32"}

#: The attribute of a causal mask made in a trace that holds how many keys of a static cache count, (batch,) int32.
_USED = "_attngen_used"

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def register() -> None:
    """Register ``attn_implementation="attngen"`` with transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    paged = partial(transformers_paged.paged_attention, attention)
    AttentionInterface.register(NAME, attention)
    AttentionInterface.register(transformers_versions.paged_name(), transformers_versions.interface(paged))
    AttentionMaskInterface.register(NAME, mask)


def use_pages(model: Any) -> None:
    """Have the continuous batching of a model (``generate_batch`` and the like) read keys from pages.

    ``model.set_attn_implementation("attngen")`` goes back, and serves a plain forward. Raises CallError for a model
    that computes its attention itself.
    """
    register()
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise CallError(f"{type(model).__name__} computes its attention itself, and takes no attn_implementation")
    transformers_versions.set_paged(model)


# --- attention ----------------------------------------------------------------------------------------------


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention of query (b, h, sq, d) over key and value (b, hk, sk, d) as (b, sq, h, d), and no weights.

    ``dropout`` is the rate at which probabilities are dropped while the module trains; without a kernel for that, an
    eager call warns why and runs on the reference. ``kwargs`` are those of ``asked``, which says what they mean. Raises
    NoKernelError for other calls that no built kernel takes, and CallError where a caller collects the weights
    (``output_attentions=True``), which no kernel forms.
    """
    if kwargs.get("output_attentions") or _collects_weights():
        raise CallError(
            "output_attentions=True needs the attention weights, which no kernel stores; "
            "model.set_attn_implementation('eager') computes them"
        )
    call = asked(module, query, key, value, attention_mask, dropout, **kwargs)
    out: Tensor = attend(
        call.candidates, call.q, call.k, call.v, spec=SPEC, packing=call.packing, softmax_scale=scaling,
        seqused_k=call.used, or_reference=module.training and dropout > 0,
    )  # fmt: skip
    return (out if call.packing is None else out.unsqueeze(0)), None


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of a model as attngen takes it: q, k and v (b, s, h, d), or (total, h, d) with ``packing``.

    Each of the candidates computes it. ``used`` (b,) int32 are the keys that count, where a cache has room for more.
    """

    candidates: Sequence[Candidate]
    q: Tensor
    k: Tensor
    v: Tensor
    packing: Packing | None
    used: Tensor | None


def asked(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> Asked:
    """The request of a module, by the arguments that transformers passes on. Computes no attention.

    ``s_aux`` (h,) are sinks: a logit of each head that takes part in the softmax and has no value; ``sinks``
    (b, h, sq, 1) has one for each query as well. ``indices`` (b, sq, n) are the keys that each query selects, each of
    them once. Without a mask the call is causal if the module or ``is_causal`` says so, with a key for each query.
    ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` pack sequences into one row of the
    batch. Raises NoKernelError for what no variant computes, such as ``block_indices``, and CallError for arguments
    that disagree.
    """
    if block_indices is not None and block_indices.shape[-1] * _block_size(module) < key.shape[2]:
        raise NoKernelError(
            f"{type(module).__name__} selects blocks of keys, which no variant does; attn_implementation='sdpa' does"
        )
    q, k, v = (_contiguous_rows(tensor.transpose(1, 2)) for tensor in _same_dtype(query, key, value))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    given = attention_mask
    _covers(module, given, q, k, kwargs, causal=is_causal)
    if indices is not None and indices.shape[-1] < k.shape[1]:  # else each query selects all keys
        given = _selected(indices, given, k.shape[1], causal=is_causal and q.shape[1] > 1)
    packing = _packing(q, given, kwargs)
    structure: Structure | None = None
    if packing is not None:
        structure = _packed_structure(given, is_causal, sliding_window, position_bias)
        q, k, v = q[0], k[0], v[0]
    elif given is None:
        structure = Structure(right=0 if is_causal and q.shape[1] > 1 else NO_LIMIT)
    elif isinstance(given, StructuredMask) and given.shape[-1] == k.shape[1]:
        structure = given.structure
    elif hasattr(given, _USED) and given.shape[-1] == k.shape[1]:
        structure = Structure(right=0, used=getattr(given, _USED))
    candidates = _structured(structure, q, k, packing, softcap, position_bias) if structure is not None else []
    with_sinks: list[Candidate] = []
    if structure is not None and candidates and softcap is None and position_bias is None and s_aux is not None:
        with_sinks = _structured_with_sinks(structure, q, k, packing, s_aux)
    used = structure.used if structure is not None and candidates else None
    if not candidates:
        assert given is not None
        candidates = _tensor_mask(given, q, k, softcap, position_bias)
    if sinks is not None:
        if s_aux is not None:
            raise CallError("a call has sinks of each head (s_aux), or of each query (sinks), not both")
        logits: Tensor | None = sinks.squeeze(-1) if packing is None else sinks[0].squeeze(-1)
    else:
        logits = None if s_aux is None else s_aux[:, None]
    if logits is not None:
        candidates = with_sinks + [replace(each, finish=partial(join_sinks, sinks=logits)) for each in candidates]
    return Asked(with_dropout(candidates, dropout if module.training else 0.0), q, k, v, packing, used)


def _covers(
    module: torch.nn.Module, given: Tensor | None, q: Tensor, k: Tensor, kwargs: Mapping[str, Any], *, causal: bool
) -> None:
    """Raise CallError for keys of which neither the mask nor the queries say who sees them.

    Layers may append keys after the masks of the forward pass were made.
    """
    queries, keys = q.shape[1], k.shape[1]
    name = type(module).__name__
    if given is not None:
        if given.shape[-1] < keys and (given.shape[-1] != 1 or isinstance(given, StructuredMask)):
            raise CallError(
                f"{name} passes {keys} keys, but the attention mask covers {given.shape[-1]}: it does not say which "
                "queries see the others; attn_implementation='eager' serves this model"
            )
    elif causal and 1 < queries != keys and any(kwargs.get(each) is None for each in _PACKED):
        raise CallError(
            f"{name} passes {queries} queries and {keys} keys to causal attention without a mask: it is not known "
            "which keys come after which query; pass the mask, or is_causal=False if every query sees every key"
        )


def _collects_weights() -> bool:
    """Whether the running model will return the weights of attention, which it collects by hooks.

    In a trace only the argument tells: context variables are not read there.
    """
    if torch.compiler.is_compiling():
        return False
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    collected: Mapping[str, Any] = {} if collector is None else collector.get() or {}
    return any(key.endswith("attentions") for key in collected)


def _same_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in one dtype: autocast's, or value's, since rotary embeddings and norms may raise q and k."""
    dtype = value.dtype
    device = "cpu" if value.is_meta else value.device.type  # torch has no autocast of the meta device
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    if query.dtype == key.dtype == value.dtype == dtype:
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _contiguous_rows(tensor: Tensor) -> Tensor:
    """Return a tensor (b, s, h, d) with a contiguous last dimension, as kernels need it; convolved keys may not."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _selected(indices: Tensor, given: Tensor | None, keys: int, *, causal: bool) -> Tensor:
    """Return a mask (b, 1, sq, keys) that also hides the keys that a query has not selected: indices (b, sq, n)."""
    batch, queries = indices.shape[:2]
    chosen = torch.zeros(batch, queries, keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    if given is None:
        return chosen.tril(keys - queries) if causal else chosen
    dense = (given.dense() if isinstance(given, StructuredMask) else given)[..., :keys]
    return dense & chosen if dense.dtype == torch.bool else dense.masked_fill(~chosen, torch.finfo(dense.dtype).min)


def _block_size(module: torch.nn.Module) -> int:
    """Number of keys of the blocks that a module selects; 0 where it does not say."""
    return int(getattr(getattr(module, "indexer", None), "block_size", 0))


def _packing(q: Tensor, given: Tensor | None, kwargs: Mapping[str, Any]) -> Packing | None:
    """Return the packing that the model's caller passed on, or None where the mask itself separates sequences."""
    values = [kwargs.get(name) for name in _PACKED]
    if any(value is None for value in values):
        return None
    if given is not None and not isinstance(given, StructuredMask):
        return None
    if given is not None and (given.structure.chunk is not None or given.structure.chunks_in_doc):
        return None
    if q.shape[0] != 1:
        raise CallError(f"cu_seq_lens_q packs sequences into one row, but the batch has {q.shape[0]}")
    starts_q, starts_k, longest_q, longest_k = values
    assert starts_q is not None
    assert starts_k is not None
    return (starts_q.to(torch.int32), starts_k.to(torch.int32), int(longest_q or 0), int(longest_k or 0))


def _packed_structure(
    given: Tensor | None, is_causal: bool, sliding_window: int | None, bias: Tensor | None
) -> Structure:
    """The keys that a query sees in its own sequence: the sides of the model's mask, or of the module."""
    if bias is not None:
        raise NoKernelError("no variant has both packed sequences and a position bias")
    if isinstance(given, StructuredMask):
        if given.structure.start is not None:
            raise CallError("packed sequences have no padding, but the attention mask hides some keys")
        return Structure(given.structure.left, given.structure.right)
    if sliding_window is None:
        return Structure(right=0 if is_causal else NO_LIMIT)
    if not is_causal:
        raise CallError("packed sequences with a window that is not causal need the mask that their model makes")
    return Structure(sliding_window - 1, 0)


def _structured(
    structure: Structure, q: Tensor, k: Tensor, packing: Packing | None, softcap: float | None, bias: Tensor | None
) -> list[Candidate]:
    """Return the variants that compute a mask of this structure, the most specific first; empty if none does."""
    left, right = structure.left, structure.right
    sides = {"left": left, "right": right}
    cap = {} if softcap is None else {"cap": softcap}
    suffix = "" if softcap is None else "_softcap"
    if structure.chunk is not None:
        return [] if softcap is not None or bias is not None else _chunked(structure, q, k)
    if structure.doc is not None:
        general = Candidate(f"span_documents{suffix}", {**sides, **cap, "doc": structure.doc})
        preset = {(NO_LIMIT, 0): "packed_documents", (NO_LIMIT, NO_LIMIT): "packed_bidirectional"}.get((left, right))
        if bias is not None:
            return []
        return [general] if preset is None or cap else [Candidate(preset, {"doc": structure.doc}), general]
    padding = partial(_padding, structure, q, k, packing)
    if bias is not None:
        if softcap is not None:
            return []
        return [Candidate(f"span_bias_{_BIAS[bias.dtype]}", {**sides, "bias": _bias(bias, q, k)}, padding)]
    general = Candidate(f"span{suffix}", {**sides, **cap}, padding)
    if structure.start is not None:
        return [general]
    window = {"window": left + 1}
    if softcap is not None:
        special = {(NO_LIMIT, 0): Candidate("softcap", cap)}.get((left, right))
        if right == 0 and special is None:
            special = Candidate("softcap_window", {**window, **cap})
    else:
        special = {(NO_LIMIT, 0): Candidate("causal"), (NO_LIMIT, NO_LIMIT): Candidate("full")}.get((left, right))
        if right == 0 and special is None:
            special = Candidate("sliding_window", window)
    return [general] if special is None else [special, general]


def _structured_with_sinks(
    structure: Structure, q: Tensor, k: Tensor, packing: Packing | None, sinks: Tensor
) -> list[Candidate]:
    """Return the variants with sinks that compute a mask of this structure; empty if none does."""
    if structure.chunk is not None or structure.doc is not None:
        return []
    left, right = structure.left, structure.right
    given = {"sinks": sinks.to(torch.float64 if q.dtype == torch.float64 else torch.float32)}
    padding = partial(_padding, structure, q, k, packing)
    general = Candidate("span_sink", {"left": left, "right": right, **given}, padding)
    if structure.start is not None or right != 0:
        return [general]
    if left == NO_LIMIT:
        return [Candidate("causal_sink", given), general]
    return [Candidate("sliding_window_sink", {"window": left + 1, **given}), general]


def _chunked(structure: Structure, q: Tensor, k: Tensor) -> list[Candidate]:
    chunk = {"chunk": structure.chunk}

    def late() -> dict[str, Tensor]:
        padding = _padding(structure, q, k, None)
        return {**padding, "origin": torch.zeros_like(padding["start"]) if origin is None else origin}

    origin = structure.origin
    general = Candidate("span_chunked", chunk, late)
    return [general] if origin is not None else [Candidate("chunked", chunk), general]


def _padding(structure: Structure, q: Tensor, k: Tensor, packing: Packing | None) -> dict[str, Tensor]:
    """Start and end of the keys that are not padding: all keys, unless the structure says otherwise."""
    if structure.start is not None and structure.stop is not None:
        return {"start": structure.start, "stop": structure.stop}
    batch, keys = (q.shape[0], k.shape[1]) if packing is None else (packing[0].shape[0] - 1, packing[3])
    return {
        "start": torch.zeros(batch, dtype=torch.int32, device=q.device),
        "stop": torch.full((batch,), keys, dtype=torch.int32, device=q.device),
    }


def _bias(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return a bias as (b, h, sq, sk), contiguous along the keys."""
    expanded = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return expanded if expanded.stride(-1) == 1 or k.shape[1] == 1 else expanded.contiguous()


def _tensor_mask(
    given: Tensor, q: Tensor, k: Tensor, softcap: float | None, position_bias: Tensor | None
) -> list[Candidate]:
    """Return the variant for a mask that is known as a tensor only: bools that allow, or numbers that are added."""
    dense = given.dense() if isinstance(given, StructuredMask) else given
    dense = dense[..., : k.shape[1]]
    if position_bias is not None:
        if softcap is not None:
            raise NoKernelError("no variant has both softcap and a position bias")
        return _with_position_bias(dense, q, k, position_bias)
    cap = {} if softcap is None else {"cap": softcap}
    if dense.dtype != torch.bool:
        if dense.dtype not in _BIAS:
            raise CallError(f"the attention mask is {dense.dtype}; it must hold bools, or floats that are added")
        prefix = "" if softcap is None else "softcap_"
        return [Candidate(f"{prefix}bias_{_BIAS[dense.dtype]}", {**cap, "bias": _bias(dense, q, k)})]
    suffix = "" if softcap is None else "_softcap"
    if dense.shape[1] != 1:
        if cap:  # the variant that adds serves bools for each head, too
            added = torch.zeros_like(dense, dtype=q.dtype).masked_fill(~dense, -torch.inf)
            return [Candidate(f"softcap_bias_{_BIAS[q.dtype]}", {**cap, "bias": _bias(added, q, k)})]
        return [Candidate("allowed_by_head", {"allowed": _bias(dense, q, k)})]
    allowed = dense.expand(q.shape[0], 1, q.shape[1], k.shape[1])[:, 0]
    if allowed.stride(-1) != 1 and allowed.shape[-1] > 1:
        allowed = allowed.contiguous()
    return [Candidate(f"allowed{suffix}", {"allowed": allowed, **cap})]


def _with_position_bias(dense: Tensor, q: Tensor, k: Tensor, position_bias: Tensor) -> list[Candidate]:
    """Return the variant for a mask and a position bias as one tensor, through which the bias gets its gradient."""
    if dense.dtype == torch.bool:
        bias = torch.where(dense, position_bias, torch.finfo(position_bias.dtype).min)
    else:
        bias = dense + position_bias
    unbounded = {"left": NO_LIMIT, "right": NO_LIMIT}
    padding = partial(_padding, Structure(), q, k, None)
    return [Candidate(f"span_bias_{_BIAS[bias.dtype]}", {**unbounded, "bias": _bias(bias, q, k)}, padding)]


# --- masks --------------------------------------------------------------------------------------------------


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
    bools to its scores.
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
            setattr(tensor, _USED, used.reshape(1).expand(batch_size).contiguous())
        return tensor
    own = _with_attention_of_its_own(config)
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
def _with_attention_of_its_own(config: type) -> str | None:
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
