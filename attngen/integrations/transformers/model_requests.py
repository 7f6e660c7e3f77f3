"""The kernels that a model of Hugging Face's transformers needs, learned by running it without weights.

The model of a configuration is made on torch's ``meta`` device, where tensors have shapes but no data, and runs as it
does with ``attn_implementation="attngen"``: a whole prompt, a step against a cache, a step of training. Each call of
attention is read by ``transformers.asked``, as in a model with weights, so that there is no second description of what
a family of models does. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attngen.errors import SpecError
from attngen.integrations.flash_attn.cache import CachedCall, candidates_over_cache
from attngen.integrations.transformers import implementation as attngen_transformers
from attngen.integrations.transformers import paged as transformers_paged
from attngen.integrations.transformers.block_lists import ListedMask, serve
from attngen.integrations.transformers.mask_structure import StructuredMask, structure_of
from attngen.integrations.transformers.masks import takes_masks_of_eager
from attngen.integrations.transformers.model_config import (
    MODEL_DTYPES,
    made,
    offline,
    quiet,
    sentence,
    without_interface,
)
from attngen.integrations.transformers.model_inputs import BATCH, TOKENS, inputs_of, of_images, step_of
from attngen.integrations.transformers.model_without_data import without_data
from attngen.integrations.transformers.versions import FULL, SLIDING, cache_of
from attngen.runtime.arguments.checked import ATTENTION_DTYPES

#: The implementation of attention that records calls and computes nothing.
_NAME = "attngen_requests"
_PAGED_LAYERS = {FULL, SLIDING}


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Calls of one form. ``variants`` are those that compute them, the most specific first; any of them serves."""

    variants: tuple[str, ...]
    head_dim_qk: int
    head_dim_v: int
    dtype: str
    layout: str


@dataclass(slots=True)
class Use:
    """The layers that make the calls of a request, by their names in the model, and when they do.

    ``learns``: in training. ``steps``: also for the next token against a cache. ``grouped``: several query heads share
    a KV head.
    """

    layers: dict[str, None] = field(default_factory=dict)
    occasions: dict[str, None] = field(default_factory=dict)
    learns: bool = False
    steps: bool = False
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class Asking:
    """All that a model asks for. ``layers`` are those that ask; ``gaps`` are sentences about what is not known."""

    requests: Mapping[ModelRequest, Use]
    layers: tuple[str, ...]
    gaps: tuple[str, ...]


def requests_of(config: Any, dtype: str, *, training: bool, serving: bool) -> Asking:
    """The requests of the model of a configuration in a dtype: ``bf16``, ``fp16`` or ``fp32``.

    ``training`` adds what its steps ask for, and ``serving`` what continuous batching (``use_pages``) does.
    Raises SpecError if the model asks for nothing, or cannot be run without weights.
    """
    _register()
    with quiet(), offline():
        model = made(config, MODEL_DTYPES[dtype], _NAME)
        notes = _Notes(model, serving)
        with notes.taken(), without_data():
            gaps = _run_all(model, notes, training)
    if not notes.requests:
        raise SpecError(f"--model: {gaps[0]}" if gaps else without_interface(model))
    return Asking(notes.requests, tuple(notes.layers), (*gaps, *(notes.unserved if serving else ())))


# --- running it -----------------------------------------------------------------------------------------------


def _run_all(model: Any, notes: _Notes, training: bool) -> list[str]:
    """Run a model, and those of its parts that did not run within it; return what could not be run, and why."""
    gaps: list[str] = []
    todo = [("", model)]
    while todo:
        name, part = todo.pop(0)
        alone, failed = _run(part, notes, training)
        inner = [each for each in _parts(part, name) if not notes.knows(each[0])]
        if alone is not None and not list(_parts(part, name)):  # else its parts are run by themselves
            failed.insert(0, alone)
        failure = f"{name or type(model).__name__} cannot be run without weights, and what it asks for is not known"
        gaps += [f"{failure}: {reason}" for reason in failed]
        todo += inner
    return gaps


def _parts(model: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Return the models inside a model, with their names, without those inside these."""
    from transformers import PreTrainedModel

    for child_name, child in model.named_children():
        inner = f"{name}.{child_name}" if name else child_name
        if isinstance(child, PreTrainedModel):
            yield inner, child
        else:
            yield from _parts(child, inner)


def _run(model: Any, notes: _Notes, training: bool) -> tuple[str | None, list[str]]:
    """Run a model as it is used: a prompt, a step against the cache, tokens of images, training.

    Return why a prompt cannot be run, or None, and why the others cannot.
    """
    given = inputs_of(model)
    if isinstance(given, str):
        return given, []
    model.eval()
    try:
        outputs = model(**given)
    except Exception as error:  # anything that a model raises on tensors without data
        return sentence(error), []
    failed: list[str] = []

    def also(what: str, inputs: Callable[[], Mapping[str, Any]]) -> None:
        try:
            model(**inputs())
        except Exception as error:  # as above
            failed.append(f"{what}: {sentence(error)}")

    cache, images = cache_of(outputs), of_images(model)
    if cache is not None:
        with notes.on("", steps=True):
            also("a step against its cache", lambda: step_of(model, given, outputs, cache))
    if images:
        with notes.on("prompts with images"):
            also("a prompt with images", lambda: {**given, **images})
    if training:
        model.train()
        with notes.on("training", learns=True):
            also("training", lambda: {**given, **images})
        model.eval()
    return None, failed


# --- recording calls ------------------------------------------------------------------------------------------


class _Notes:
    """Requests of layers while their model runs."""

    def __init__(self, model: Any, serving: bool) -> None:
        self.requests: dict[ModelRequest, Use] = {}
        self.layers: dict[str, None] = {}
        self._occasion, self._learns, self._steps = "", False, False
        self._names = {module: name for name, module in model.named_modules()}
        self._kept, self.unserved = _kept_layers(model) if serving else ((), [])

    def knows(self, part: str) -> bool:
        """Whether a layer of a part of the model asked for something."""
        return any(layer == part or layer.startswith(f"{part}.") for layer in self.layers)

    @contextmanager
    def on(self, occasion: str, *, learns: bool = False, steps: bool = False) -> Iterator[None]:
        """Record the occasion on which calls are made."""
        before = self._occasion, self._learns, self._steps
        self._occasion, self._learns, self._steps = occasion, self._learns or learns, self._steps or steps
        yield
        self._occasion, self._learns, self._steps = before

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Record the calls of models that run inside it."""
        token = _TAKEN.set(self)
        try:
            yield
        finally:
            _TAKEN.reset(token)

    def attention(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Record what a call asks for, without padding and with it, and return a result of its shape."""
        call = partial(attngen_transformers.asked, module, query, key, value)
        self._note(module, call(attention_mask, dropout, **kwargs))
        listed = attention_mask if isinstance(attention_mask, ListedMask) else None
        padded = getattr(attention_mask if listed is None else listed.mask, "padded", None)
        if padded is not None:
            if listed is not None:
                lists = replace(listed.lists, start=padded.structure.start)
                padded = ListedMask.choosing(padded, lists)
            with self.on("padded batches" if padded.structure.chunk is None else "padding, caches that dropped keys"):
                self._note(module, call(padded, dropout, **kwargs))
        if self._kept and self._steps:
            with self.on("continuous batching"):
                self._serve(module, query, key, value, **kwargs)
        heads, rows = query.shape[1:3]
        return query.new_empty(query.shape[0], rows, heads, value.shape[-1]), None

    def _note(self, module: torch.nn.Module, call: attngen_transformers.Asked, layout: str | None = None) -> None:
        names = tuple(dict.fromkeys(candidate.variant for candidate in call.candidates))
        layout = layout or ("dense" if call.packing is None else "varlen")
        dtype = ATTENTION_DTYPES.get(call.q.dtype, str(call.q.dtype))
        request = ModelRequest(names, call.q.shape[-1], call.v.shape[-1], dtype, layout)
        use = self.requests.setdefault(request, Use())
        name = self._names.get(module, type(module).__name__)
        use.layers[name] = self.layers[name] = None
        use.occasions[self._occasion] = None
        use.learns |= self._learns
        use.steps |= self._steps and layout != "varlen"
        use.grouped |= call.q.shape[-2] > call.k.shape[-2]

    def _serve(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None,
        sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
    ) -> None:  # fmt: skip
        """Record what a layer asks for in continuous batching: pages, or packed sequences if it has a window."""
        place = getattr(module, "layer_idx", None)
        if place is None or place >= len(self._kept):
            return
        starts = torch.empty(BATCH + 1, dtype=torch.int32, device="meta")
        kept = self._kept[place]
        if kept is not None:
            self._note(module, attngen_transformers.asked(
                module, query[:1], key[:1], value[:1], None, is_causal=True, sliding_window=kept, softcap=softcap,
                s_aux=s_aux, cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=TOKENS, max_length_k=TOKENS,
            ))  # fmt: skip
            return
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        fields = transformers_paged.seen(sliding_window, softcap, s_aux)
        candidates = candidates_over_cache(CachedCall(q=q[0], k_cache=k, v_cache=v, **fields), BATCH)
        self._note(module, attngen_transformers.Asked(candidates, q[0], k, v, None, None), "paged")


_TAKEN: ContextVar[_Notes] = ContextVar("attngen_notes")


def _register() -> None:
    """Register the implementation that records calls with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, lambda *call, **options: _TAKEN.get().attention(*call, **options))
    AttentionMaskInterface.register(_NAME, _mask)


def _kept_layers(model: Any) -> tuple[tuple[int | None, ...], list[str]]:
    """Return, for each layer of a decoder, the window that continuous batching keeps, None where it keeps all keys.

    Empty for a model that transformers does not serve like that, with a sentence if its layers are the reason.
    """
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or not hasattr(config, "num_hidden_layers"):
        return (), []
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    if layers is None:
        layers = [FULL if window is None else SLIDING] * config.num_hidden_layers
    others = sorted(set(layers) - _PAGED_LAYERS)
    if others:
        return (), [
            f"--serving: transformers has no continuous batching of layers of '{others[0]}': no kernel for pages"
        ]
    return tuple(window if layer == SLIDING else None for layer in layers), []


def _mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None, device: Any = "meta",
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Return the mask of a batch without padding; its attribute ``padded`` is the one with, if there may be any."""
    from transformers.masking_utils import causal_mask_function

    shape = (batch_size, 1, q_length, kv_length)
    config: type = type(kwargs.get("config"))
    serve(config)
    if takes_masks_of_eager(config):
        return torch.empty(shape, dtype=kwargs.get("dtype", torch.float32), device="meta")
    build = partial(torch.empty, shape, dtype=torch.bool, device="meta")
    structure = None
    if not kwargs.get("use_vmap"):
        structure = structure_of(
            causal_mask_function if mask_function is None else mask_function, None, batch=batch_size, queries=q_length,
            keys=kv_length, q_offset=q_offset, kv_offset=kv_offset, device="meta",
        )  # fmt: skip
    if structure is None:
        return build()
    mask = StructuredMask.of(structure, shape, "meta", build)
    if attention_mask is not None or structure.chunk is not None:  # a cache that drops keys starts within a chunk
        bound = torch.empty(batch_size, dtype=torch.int32, device="meta")
        padded = replace(structure, start=bound, stop=bound, origin=None if structure.chunk is None else bound)
        mask.padded = StructuredMask.of(padded, shape, "meta", build)
    return mask
