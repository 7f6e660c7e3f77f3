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

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations.shared.arguments import contiguous_last
from attngen.integrations.shared.choice import NO_LIMIT, Packing, VariantCandidate, attend, with_dropout
from attngen.integrations.shared.gradients import join_sinks
from attngen.integrations.shared.tensor_masks import BIAS, candidate_of, full_size
from attngen.integrations.transformers import paged as transformers_paged
from attngen.integrations.transformers import versions as transformers_versions
from attngen.integrations.transformers.block_lists import SPEC as SPEC_OF_LISTS
from attngen.integrations.transformers.block_lists import ChosenBlocks, ListedMask, lists_of_heads
from attngen.integrations.transformers.block_lists import is_causal as is_causal_mask
from attngen.integrations.transformers.mask_structure import MaskStructure, StructuredMask
from attngen.integrations.transformers.masks import USED, mask

NAME = "attngen"
SPEC = "transformers"

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
        call.candidates, call.q, call.k, call.v, spec=call.spec, packing=call.packing, softmax_scale=scaling,
        seqused_k=call.used, or_reference=module.training and dropout > 0,
    )  # fmt: skip
    return (out if call.packing is None else out.unsqueeze(0)), None


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of a model as attngen takes it: q, k and v (b, s, h, d), or (total, h, d) with ``packing``.

    Each of the candidates computes it. ``used`` (b,) int32 are the keys that count, where a cache has room for more.
    """

    candidates: Sequence[VariantCandidate]
    q: Tensor
    k: Tensor
    v: Tensor
    packing: Packing | None
    used: Tensor | None
    spec: str = SPEC


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

    ``s_aux`` (h,) are sinks: a logit of each head that takes part in the softmax and has no value; ``sinks`` (b, h,
    sq, 1) has one for each query as well. ``indices`` (b, sq, n) are the keys that each query selects, each of them
    once, and ``block_indices`` (b, heads of an index, sq, n) are blocks of keys, -1 for none. Without a mask the call
    is causal if the module or ``is_causal`` says so, with a key for each query. ``cu_seq_lens_q``, ``cu_seq_lens_k``,
    ``max_length_q`` and ``max_length_k`` pack sequences into one row of the batch. Raises NoKernelError for what no
    variant computes, and CallError for arguments that disagree.
    """
    # the last dimension of convolved keys may not be contiguous
    q, k, v = (contiguous_last(tensor.transpose(1, 2)) for tensor in _same_dtype(query, key, value))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    given = attention_mask
    _covers(module, given, q, k, kwargs, causal=is_causal)
    if indices is not None and indices.shape[-1] < k.shape[1]:  # else each query selects all keys
        if isinstance(given, StructuredMask) and given.structure.subtree_end is not None:
            raise NoKernelError(
                f"{type(module).__name__} selects the keys of each query, among equal scores by their order, which is "
                "another one in a prefix tree; run the sequences of the pack one by one"
            )
        given = _selected(indices, given, k.shape[1], causal=is_causal and q.shape[1] > 1)
    lists = given.lists if isinstance(given, ListedMask) else None
    if block_indices is not None:
        lists = lists_of_heads(module, block_indices, k.shape[2])
    if lists is not None and not lists.whole:
        if softcap is not None or position_bias is not None or s_aux is not None or sinks is not None:
            raise NoKernelError(
                f"{type(module).__name__} selects blocks of keys, beside which no variant has a score or a sink"
            )
        return _over_lists(lists, given, q, k, v, is_causal=is_causal, rate=dropout if module.training else 0.0)
    packing = _packing(q, given, kwargs)
    structure: MaskStructure | None = None
    if packing is not None:
        structure = _packed_structure(given, is_causal, sliding_window, position_bias)
        q, k, v = q[0], k[0], v[0]
    elif given is None:
        structure = MaskStructure(right=0 if is_causal and q.shape[1] > 1 else NO_LIMIT)
    elif isinstance(given, StructuredMask) and given.shape[-1] == k.shape[1]:
        structure = given.structure
    elif hasattr(given, USED) and given.shape[-1] == k.shape[1]:
        structure = MaskStructure(right=0, used=getattr(given, USED))
    candidates = _structured(structure, q, k, packing, softcap, position_bias) if structure is not None else []
    with_sinks: list[VariantCandidate] = []
    if structure is not None and candidates and softcap is None and position_bias is None and s_aux is not None:
        with_sinks = _structured_with_sinks(structure, q, k, packing, s_aux)
    if lists is not None and structure is not None:  # of all keys, where no kernel of the mask is built
        candidates = [*candidates, *lists.candidates(structure)]
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


def _over_lists(
    lists: ChosenBlocks, given: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, rate: float
) -> Asked:
    """The request of a module whose queries see the keys of listed blocks, of those that its mask shows."""
    structure: MaskStructure | None = None
    if given is None:
        structure = MaskStructure(right=0) if is_causal or q.shape[1] == 1 else None
    elif isinstance(given, StructuredMask) and given.shape[-1] == k.shape[1]:
        structure = given.structure
    elif hasattr(given, USED) and given.shape[-1] == k.shape[1]:
        structure = MaskStructure(right=0, used=getattr(given, USED))
    candidates = lists.candidates(structure) if structure is not None and is_causal_mask(structure) else []
    used = structure.used if structure is not None and candidates else None
    if not candidates:
        shown = lists.dense(k.shape[1], q.shape[2])
        if given is not None:
            dense = (given.dense() if isinstance(given, StructuredMask) else given)[..., : k.shape[1]]
            lowest = torch.finfo(dense.dtype).min if dense.dtype != torch.bool else 0.0
            shown = dense & shown if dense.dtype == torch.bool else dense.masked_fill(~shown, lowest)
        elif is_causal:
            shown = shown.tril(k.shape[1] - q.shape[1])
        return Asked(with_dropout([candidate_of(shown, _shape(q, k))], rate), q, k, v, None, None)
    return Asked(with_dropout(candidates, rate), q, k, v, None, used, SPEC_OF_LISTS)


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


def _selected(indices: Tensor, given: Tensor | None, keys: int, *, causal: bool) -> Tensor:
    """Return a mask (b, 1, sq, keys) that also hides the keys that a query has not selected: indices (b, sq, n)."""
    batch, queries = indices.shape[:2]
    chosen = torch.zeros(batch, queries, keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    if given is None:
        return chosen.tril(keys - queries) if causal else chosen
    dense = (given.dense() if isinstance(given, StructuredMask) else given)[..., :keys]
    return dense & chosen if dense.dtype == torch.bool else dense.masked_fill(~chosen, torch.finfo(dense.dtype).min)


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
) -> MaskStructure:
    """The keys that a query sees in its own sequence: the sides of the model's mask, or of the module."""
    if bias is not None:
        raise NoKernelError("no variant has both packed sequences and a position bias")
    if isinstance(given, StructuredMask):
        if given.structure.start is not None:
            raise CallError("packed sequences have no padding, but the attention mask hides some keys")
        return MaskStructure(given.structure.left, given.structure.right)
    if sliding_window is None:
        return MaskStructure(right=0 if is_causal else NO_LIMIT)
    if not is_causal:
        raise CallError("packed sequences with a window that is not causal need the mask that their model makes")
    return MaskStructure(sliding_window - 1, 0)


def _structured(
    structure: MaskStructure, q: Tensor, k: Tensor, packing: Packing | None, softcap: float | None, bias: Tensor | None
) -> list[VariantCandidate]:
    """Return the variants that compute a mask of this structure, the most specific first; empty if none does."""
    left, right = structure.left, structure.right
    sides = {"left": left, "right": right}
    cap = {} if softcap is None else {"cap": softcap}
    suffix = "" if softcap is None else "_softcap"
    if structure.chunk is not None:
        return [] if softcap is not None or bias is not None else _chunked(structure, q, k)
    if structure.subtree_end is not None:
        if bias is not None:
            raise NoKernelError("a position bias counts along the row, and not along the branches of a prefix tree")
        tree = {"subtree_end": structure.subtree_end}
        general = VariantCandidate(f"span_tree{suffix}", {"left": left, **cap, **tree, "position": structure.position})
        return [general] if left >= 0 or cap else [VariantCandidate("prefix_tree", tree), general]
    if structure.doc is not None:
        general = VariantCandidate(f"span_documents{suffix}", {**sides, **cap, "doc": structure.doc})
        preset = {(NO_LIMIT, 0): "packed_documents", (NO_LIMIT, NO_LIMIT): "packed_bidirectional"}.get((left, right))
        if bias is not None:
            return []
        return [general] if preset is None or cap else [VariantCandidate(preset, {"doc": structure.doc}), general]
    padding = partial(_padding, structure, q, k, packing)
    if bias is not None:
        if softcap is not None:
            return []
        return [
            VariantCandidate(f"span_bias_{BIAS[bias.dtype]}", {**sides, "bias": full_size(bias, _shape(q, k))}, padding)
        ]
    general = VariantCandidate(f"span{suffix}", {**sides, **cap}, padding)
    if structure.start is not None:
        return [general]
    window = {"window": left + 1}
    if softcap is not None:
        special = {(NO_LIMIT, 0): VariantCandidate("softcap", cap)}.get((left, right))
        if right == 0 and special is None:
            special = VariantCandidate("softcap_window", {**window, **cap})
    else:
        special = {(NO_LIMIT, 0): VariantCandidate("causal"), (NO_LIMIT, NO_LIMIT): VariantCandidate("full")}.get(
            (left, right)
        )
        if right == 0 and special is None:
            special = VariantCandidate("sliding_window", window)
    return [general] if special is None else [special, general]


def _structured_with_sinks(
    structure: MaskStructure, q: Tensor, k: Tensor, packing: Packing | None, sinks: Tensor
) -> list[VariantCandidate]:
    """Return the variants with sinks that compute a mask of this structure; empty if none does."""
    if structure.chunk is not None or structure.doc is not None or structure.subtree_end is not None:
        return []
    left, right = structure.left, structure.right
    given = {"sinks": sinks.to(torch.float64 if q.dtype == torch.float64 else torch.float32)}
    padding = partial(_padding, structure, q, k, packing)
    general = VariantCandidate("span_sink", {"left": left, "right": right, **given}, padding)
    if structure.start is not None or right != 0:
        return [general]
    if left == NO_LIMIT:
        return [VariantCandidate("causal_sink", given), general]
    return [VariantCandidate("sliding_window_sink", {"window": left + 1, **given}), general]


def _chunked(structure: MaskStructure, q: Tensor, k: Tensor) -> list[VariantCandidate]:
    chunk = {"chunk": structure.chunk}

    def late() -> dict[str, Tensor]:
        padding = _padding(structure, q, k, None)
        return {**padding, "origin": torch.zeros_like(padding["start"]) if origin is None else origin}

    origin = structure.origin
    general = VariantCandidate("span_chunked", chunk, late)
    return [general] if origin is not None else [VariantCandidate("chunked", chunk), general]


def _padding(structure: MaskStructure, q: Tensor, k: Tensor, packing: Packing | None) -> dict[str, Tensor]:
    """Start and end of the keys that are not padding: all keys, unless the structure says otherwise."""
    if structure.start is not None and structure.stop is not None:
        return {"start": structure.start, "stop": structure.stop}
    batch, keys = (q.shape[0], k.shape[1]) if packing is None else (packing[0].shape[0] - 1, packing[3])
    return {
        "start": torch.zeros(batch, dtype=torch.int32, device=q.device),
        "stop": torch.full((batch,), keys, dtype=torch.int32, device=q.device),
    }


def _shape(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Shape of a mask of all pairs: (b, h, sq, sk)."""
    return q.shape[0], q.shape[2], q.shape[1], k.shape[1]


def _tensor_mask(
    given: Tensor, q: Tensor, k: Tensor, softcap: float | None, position_bias: Tensor | None
) -> list[VariantCandidate]:
    """Return the variant for a mask that is known as a tensor only: bools that allow, or numbers that are added."""
    dense = given.dense() if isinstance(given, StructuredMask) else given
    dense = dense[..., : k.shape[1]]
    if position_bias is not None:
        if softcap is not None:
            raise NoKernelError("no variant has both softcap and a position bias")
        return _with_position_bias(dense, q, k, position_bias)
    if dense.dtype not in (torch.bool, *BIAS):
        raise CallError(f"the attention mask is {dense.dtype}; it must hold bools, or floats that are added")
    if dense.dtype == torch.bool and dense.shape[1] != 1 and softcap is not None:
        # the variant that adds serves bools for each head, too
        dense = torch.zeros_like(dense, dtype=q.dtype).masked_fill(~dense, -torch.inf)
    return [candidate_of(dense, _shape(q, k), cap=softcap)]


def _with_position_bias(dense: Tensor, q: Tensor, k: Tensor, position_bias: Tensor) -> list[VariantCandidate]:
    """Return the variant for a mask and a position bias as one tensor, through which the bias gets its gradient."""
    if dense.dtype == torch.bool:
        bias = torch.where(dense, position_bias, torch.finfo(position_bias.dtype).min)
    else:
        bias = dense + position_bias
    unbounded = {"left": NO_LIMIT, "right": NO_LIMIT}
    padding = partial(_padding, MaskStructure(), q, k, None)
    return [
        VariantCandidate(f"span_bias_{BIAS[bias.dtype]}", {**unbounded, "bias": full_size(bias, _shape(q, k))}, padding)
    ]


# --- masks --------------------------------------------------------------------------------------------------
