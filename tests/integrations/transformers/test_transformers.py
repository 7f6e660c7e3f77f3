"""``attn_implementation="attngen"``: logits, gradients and cached decoding of ten families against ``eager``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.masking_utils import create_causal_mask, create_masks_for_generate, create_sliding_window_causal_mask

import attngen.integrations.transformers as attngen_transformers
from attngen.errors import CallError, NoKernelError
from attngen.integrations.transformers import implementation
from attngen.integrations.transformers import masks as transformers_masks
from attngen.integrations.transformers.mask_structure import StructuredMask
from attngen.integrations.transformers.versions import cache_name
from tests.integrations.transformers import families
from tests.integrations.transformers.families import (
    GENERATORS,
    MAKERS,
    PADDINGS,
    WINDOW,
    batch,
    gradients,
    logits,
)
from tests.integrations.transformers.sweep_checks import spread
from tests.integrations.transformers.tiny_configs import tiny
from tests.sampling import few, sampled

#: Of the largest magnitude. Eager and the reference both compute in float32, in another order of additions.
TOLERANCE = 2e-5


@cache
def model(family: str, implementation: str = "attngen") -> Any:
    return families.make(family, head_dim=8, implementation=implementation)


def eager(family: str) -> Any:
    return model(family, "eager")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The variants that served the calls of a test."""
    names: list[str] = []
    attend = implementation.attend

    def noting(candidates: Any, *arguments: Any, **options: Any) -> Any:
        names.append(candidates[0].variant)
        return attend(candidates, *arguments, **options)

    monkeypatch.setattr(implementation, "attend", noting)
    return names


def near(actual: Tensor, wanted: Tensor) -> None:
    actual, wanted = actual.detach(), wanted.detach()
    limit = TOLERANCE * float(wanted.abs().max())
    assert float((actual - wanted).abs().max()) <= limit
    assert limit > 0


#: The variants that a forward pass uses, without padding and with it.
EXPECTED = {
    "llama": ({"causal"}, {"span"}),
    "mistral": ({"sliding_window"}, {"span"}),
    "gemma2": ({"softcap", "softcap_window"}, {"span_softcap"}),
    "gemma3": ({"causal", "sliding_window"}, {"span"}),
    "qwen3": ({"causal"}, {"span"}),
    "gpt_oss": ({"causal_sink", "sliding_window_sink"}, {"span_sink"}),
    "llama4": ({"causal", "chunked"}, {"span", "span_chunked"}),
    "modernbert": ({"full", "span"}, {"span"}),
    "whisper": ({"causal", "full"}, {"full", "span"}),
    "t5": ({"span_bias_fp32"}, {"span_bias_fp32"}),
}


@sampled(always=5, padding=[*PADDINGS], family=[*MAKERS])
def test_logits_and_gradients(family: str, padding: str, served: list[str]) -> None:
    given = batch(family, padding)
    wanted = logits(eager(family), given)
    wanted_gradients = gradients(eager(family), wanted)
    assert not served
    actual = logits(model(family), given)
    found_gradients = gradients(model(family), actual)
    near(actual, wanted)
    assert set(served) == EXPECTED[family][padding != "none"]
    assert found_gradients.keys() == wanted_gradients.keys()
    for name, wanted_gradient in wanted_gradients.items():
        # A gradient that is 0 but for rounding, such as that of a key's bias, is compared with the others.
        limit = TOLERANCE * max(1.0, float(wanted_gradient.abs().max()))
        assert float((found_gradients[name] - wanted_gradient).abs().max()) <= limit, name


@sampled(always=2, padding=["none", "left"], family=[*GENERATORS])
def test_cached_decoding(family: str, padding: str) -> None:
    given = batch(family, padding)
    tokens, actual = families.generate(model(family), given)
    wanted_tokens, wanted = families.generate(eager(family), given)
    assert torch.equal(tokens, wanted_tokens)
    near(actual, wanted)


@sampled(always=1, padding=["none", "left"], family=["llama", "qwen3", "gemma2", "gemma3", "mistral", "gpt_oss"])
def test_decoding_against_a_static_cache(family: str, padding: str) -> None:
    given = batch(family, padding)
    tokens, actual = families.generate(model(family), given, cache_implementation="static")
    wanted_tokens, wanted = families.generate(eager(family), given, cache_implementation="static")
    assert torch.equal(tokens, wanted_tokens)
    near(actual, wanted)


# --- packed sequences ---------------------------------------------------------------------------------------

PACKED = ("llama", "mistral", "gemma2", "gemma3", "qwen3", "gpt_oss", "llama4")


def packed_inputs() -> tuple[dict[str, Any], list[slice]]:
    """Return sequences of 6, 1 and 9 tokens in one row, told apart by their positions alone, and where each lies."""
    lengths = (6, 1, 9)
    torch.manual_seed(11)
    ids = torch.randint(3, families.VOCABULARY, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return {"input_ids": ids, "position_ids": positions}, [
        slice(end - n, end) for n, end in zip(lengths, ends, strict=True)
    ]


@few("family", PACKED, always=range(0, 999, 3))
def test_packed_by_position_ids(family: str, served: list[str]) -> None:
    inputs, _ = packed_inputs()
    wanted = eager(family)(**inputs, use_cache=False).logits
    near(model(family)(**inputs, use_cache=False).logits, wanted)
    # GPT-OSS makes its masks without the positions, also for eager.
    wanted_variants = {
        "gpt_oss": {"causal_sink", "sliding_window_sink"},
        "llama": {"packed_documents"}, "qwen3": {"packed_documents"}, "mistral": {"span_documents"},
        "gemma2": {"span_documents_softcap"}, "llama4": {"packed_documents"},
    }.get(family, {"packed_documents", "span_documents"})  # fmt: skip
    assert set(served) == wanted_variants


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "llama4"])
def test_packed_by_cu_seqlens(family: str) -> None:
    inputs, places = packed_inputs()
    offsets = torch.tensor([0, *(place.stop for place in places)], dtype=torch.int32)
    actual = model(family)(
        **inputs, use_cache=False, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=9, max_length_k=9
    ).logits
    for place in places:
        alone = eager(family)(input_ids=inputs["input_ids"][:, place], use_cache=False).logits
        near(actual[:, place], alone)


def test_cu_seqlens_of_a_batch_are_refused() -> None:
    given, offsets = batch("llama", "none"), torch.tensor([0, 14], dtype=torch.int32)
    packing = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 14, "max_length_k": 14}
    with pytest.raises(CallError, match="packs sequences into one row, but the batch has 3"):
        model("llama")(**given.inputs, **packing, use_cache=False)


# --- masks of other kinds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "variants"),
    [
        ("llama", {"allowed"}),
        ("gemma2", {"allowed_softcap"}),
        ("t5", {"span_bias_fp32"}),  # the bias learns: that of a mask which is added does not
    ],
)
def test_padding_with_gaps(family: str, variants: set[str], served: list[str]) -> None:
    given = batch(family, "none")
    given.inputs["attention_mask"][:, 3] = 0
    given.inputs["attention_mask"][1, 9:11] = 0
    actual, wanted = logits(model(family), given), logits(eager(family), given)
    near(actual, wanted)
    assert set(served) == variants
    found_gradients, wanted_gradients = gradients(model(family), actual), gradients(eager(family), wanted)
    for name, gradient in wanted_gradients.items():
        limit = TOLERANCE * max(1.0, float(gradient.abs().max()))
        assert float((found_gradients[name] - gradient).abs().max()) <= limit, name


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_of_the_user(kind: torch.dtype, by_head: bool, served: list[str]) -> None:
    given = batch("llama", "none")
    n = families.LENGTH
    allowed = torch.rand(3, 4 if by_head else 1, n, n, generator=torch.Generator().manual_seed(3)) < 0.6
    allowed |= torch.eye(n, dtype=torch.bool)
    added = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    given.inputs["attention_mask"] = added
    wanted = logits(eager("llama"), given)
    given.inputs["attention_mask"] = allowed if kind == torch.bool else added
    near(logits(model("llama"), given), wanted)
    assert set(served) == {"bias_fp32" if kind != torch.bool else "allowed_by_head" if by_head else "allowed"}


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_of_the_user_beside_bounded_logits(kind: torch.dtype, by_head: bool, served: list[str]) -> None:
    """Gemma 2, whose every second layer has a window: a 4D mask takes the place of the model's own masks."""
    given, n = batch("gemma2", "none"), families.LENGTH
    allowed = torch.rand(3, 4 if by_head else 1, n, n, generator=torch.Generator().manual_seed(4)) < 0.6
    allowed |= torch.eye(n, dtype=torch.bool)
    added = torch.where(allowed, torch.linspace(-1, 1, n), torch.finfo(torch.float32).min)
    if kind == torch.bool:
        added = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    given.inputs["attention_mask"] = added
    wanted = logits(eager("gemma2"), given)
    wanted_gradients = gradients(eager("gemma2"), wanted)
    given.inputs["attention_mask"] = allowed if kind == torch.bool else added
    actual = logits(model("gemma2"), given)
    near(actual, wanted)
    assert set(served) == {"allowed_softcap" if kind == torch.bool and not by_head else "softcap_bias_fp32"}
    for name, gradient in gradients(model("gemma2"), actual).items():
        limit = TOLERANCE * max(1.0, float(wanted_gradients[name].abs().max()))
        assert float((gradient - wanted_gradients[name]).abs().max()) <= limit, name


def test_a_mask_function_that_is_not_known_becomes_a_tensor() -> None:
    def mask(or_mask: Any) -> Tensor:
        config = model("llama").config
        return create_causal_mask(config, torch.zeros(2, 7, 4), None, None, or_mask_function=or_mask)

    actual = mask(lambda b, h, q, kv: kv == 5)
    assert type(actual) is Tensor
    wanted = torch.ones(7, 7, dtype=torch.bool).tril()
    wanted[:, 5] = True
    assert torch.equal(actual, wanted.expand(2, 1, 7, 7))
    assert isinstance(mask(None), StructuredMask)


def test_a_mask_of_integers_is_refused() -> None:
    ones = torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(CallError, match="the attention mask is torch.int64; it must hold bools, or floats"):
        model("llama")(input_ids=ones, attention_mask=ones.expand(1, 1, 5, 5))


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    """It adds the mask to its scores, which a mask of bools would spoil in silence."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    attngen_transformers.register()
    config = transformers.MPNetConfig(**sizes, num_attention_heads=2, attn_implementation="attngen")
    with pytest.raises(CallError, match="MPNetModel computes its attention itself, .* must be 'eager'"):
        transformers.MPNetModel(config)(input_ids=torch.ones(1, 5, dtype=torch.int64))


def test_a_model_of_which_one_part_looks_its_attention_up_and_another_does_not_is_refused() -> None:
    """GIT's image encoder takes an implementation; its text layers add the mask to scores of their own."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    attngen_transformers.register()
    git = transformers.GitModel(transformers.GitConfig(vision_config=vision, **sizes, num_attention_heads=2)).eval()
    given = {"input_ids": torch.ones(1, 5, dtype=torch.int64), "pixel_values": torch.randn(1, 3, 8, 8)}
    git.set_attn_implementation("attngen")
    with pytest.raises(CallError, match="GitModel computes its attention itself, .* must be 'eager'"):
        git(**given)


@pytest.mark.parametrize("config", ["BigBirdPegasusConfig", "Gemma4AudioConfig", "InformerConfig"])
def test_others_of_the_kind(config: str) -> None:
    assert transformers_masks.with_attention_of_its_own(getattr(transformers, config)) is not None


@pytest.mark.parametrize("config", ["AlignConfig", "BridgeTowerConfig", "ClapTextConfig", "LlamaConfig", "T5Config"])
def test_models_that_look_up_all_of_it_are_served(config: str) -> None:
    assert transformers_masks.with_attention_of_its_own(getattr(transformers, config)) is None


def test_a_text_decoder_with_attention_of_its_own_is_refused() -> None:
    """No mapping of transformers has TrOCR's decoder."""
    sizes = {"vocab_size": 50, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    attngen_transformers.register()
    config = transformers.TrOCRConfig(**sizes, attn_implementation="attngen")
    with pytest.raises(CallError, match="TrOCRForCausalLM computes its attention itself, .* must be 'eager'"):
        transformers.TrOCRForCausalLM(config)(input_ids=torch.ones(1, 5, dtype=torch.int64))


# --- what layers of single models pass on ---------------------------------------------------------------------


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5


def layer_call(mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    out, _ = attngen_transformers.attention(torch.nn.Module(), q, k, v, mask, **given)
    return out.transpose(1, 2)


def layer_inputs(queries: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    return q, k, v


@pytest.mark.parametrize("with_bias", [False, True])
def test_sinks_of_each_query(with_bias: bool) -> None:
    """Inkling 2."""
    q, k, v = layer_inputs()
    bias, sinks = torch.randn(2, 4, 7, 7) if with_bias else None, torch.randn(2, 4, 7, 1, requires_grad=True)
    scores = scores_of(q, k).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
    weights = torch.cat([scores if bias is None else scores + bias, sinks], dim=-1).softmax(-1)[..., :-1]
    wanted = weights @ v.repeat_interleave(2, 1)
    mask = create_causal_mask(model("llama").config, torch.zeros(2, 7, 4), None, None)
    actual = layer_call(mask, q, k, v, position_bias=bias, sinks=sinks)
    near(actual, wanted)
    (wanted_gradient,) = torch.autograd.grad(wanted.square().sum(), sinks)
    near(torch.autograd.grad(actual.square().sum(), sinks)[0], wanted_gradient)


@pytest.mark.parametrize("kind", ["structure", "bool", "float", "none"])
@pytest.mark.parametrize("queries", [7, 1])
def test_keys_that_each_query_selects(kind: str, queries: int, served: list[str]) -> None:
    """DeepSeek V3.2 and its like give other implementations than eager and sdpa the indices instead of a mask."""
    q, k, v = layer_inputs(queries)
    seen = torch.ones(7, 7, dtype=torch.bool).tril()[-queries:]
    ranks = torch.rand(2, queries, 7).masked_fill(~seen, -torch.inf)
    indices = ranks.topk(3, dim=-1).indices.to(torch.int32)
    chosen = torch.zeros(2, queries, 7, dtype=torch.bool).scatter(-1, indices.long(), True) & seen
    wanted = scores_of(q, k).masked_fill(~chosen[:, None], -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    mask: Tensor | None = seen.expand(2, 1, queries, 7)
    if kind == "float":
        assert mask is not None
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    elif kind == "none":
        mask = None
    elif kind == "structure" and queries == 7:
        mask = create_causal_mask(model("llama").config, torch.zeros(2, 7, 4), None, None)
        assert isinstance(mask, StructuredMask)
    near(layer_call(mask, q, k, v, indices=indices), wanted)
    assert served == ["bias_fp32" if kind == "float" else "allowed"]


def test_a_query_that_selects_all_keys_needs_no_mask(served: list[str]) -> None:
    q, k, v = layer_inputs()
    everything = torch.arange(7).expand(2, 7, 7)
    assert torch.equal(layer_call(None, q, k, v, indices=everything), layer_call(None, q, k, v))
    assert served == ["causal", "causal"]


def test_blocks_of_keys_of_a_size_that_no_module_says_are_refused() -> None:
    q, k, v = layer_inputs()
    with pytest.raises(NoKernelError, match="of a size that it does not say"):
        layer_call(None, q, k, v, block_indices=torch.zeros(2, 1, 7, 1, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["structure", "bool", "float"])
def test_more_keys_than_the_mask_covers_are_refused(kind: str) -> None:
    """A layer that appends keys after the mask was made, and says nothing of who sees them."""
    q, k, v = layer_inputs()
    mask = create_causal_mask(model("llama").config, torch.zeros(2, 7, 4), None, None)
    if kind != "structure":
        mask = mask & True
    if kind == "float":
        mask = torch.where(mask, 0.0, -torch.inf)
    longer = [torch.cat([each, each[:, :, :2]], 2) for each in (k, v)]
    with pytest.raises(CallError, match="passes 9 keys, but the attention mask covers 7: .*'eager' serves"):
        layer_call(mask, q, *longer)


def test_a_causal_call_without_a_mask_has_a_key_for_each_query() -> None:
    q, k, v = layer_inputs()
    with pytest.raises(CallError, match="passes 4 queries and 7 keys to causal attention without a mask"):
        layer_call(None, q[:, :, :4], k, v)
    assert layer_call(None, q[:, :, :1], k, v).shape == (2, 4, 1, 8)
    wanted = scores_of(q[:, :, :4], k).softmax(-1) @ v.repeat_interleave(2, 1)
    near(layer_call(None, q[:, :, :4], k, v, is_causal=False), wanted)


@few("tokens", [3, 26])
def test_compressed_keys(tokens: int) -> None:
    """DeepSeek-V4's layers append keys, and columns of numbers to the mask; with no whole block there are none."""
    config = tiny(transformers.DeepseekV4Config)
    models = []
    for name in ("eager", "attngen"):
        config._attn_implementation = name
        torch.manual_seed(0)
        models.append(transformers.DeepseekV4ForCausalLM(config).eval())
        spread(models[-1])
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(3, 90, (2, tokens))
    real = torch.ones_like(ids)
    real[1, :2] = 0
    for mask in (None, real):
        wanted, actual = (each(input_ids=ids, attention_mask=mask).logits for each in models)
        near(actual, wanted)


@pytest.mark.parametrize(
    ("name", "takes"), [("DeepseekV4", True), ("HYV4", True), ("Llama", False), ("GptOss", False), ("Gemma2", False)]
)
def test_who_gets_masks_of_numbers(name: str, takes: bool) -> None:
    config = getattr(transformers, f"{name}Config")
    getattr(transformers, f"{name}ForCausalLM")
    assert transformers_masks.takes_masks_of_eager(config) == takes


def test_keys_whose_last_dimension_is_not_contiguous() -> None:
    """Inkling's come from a convolution."""
    q, k, v = layer_inputs()
    strided = k.mT.contiguous().mT
    assert strided.stride(-1) != 1
    assert torch.equal(layer_call(None, q, strided, v), layer_call(None, q, k, v))


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_models_without_data_have_logits_of_their_shape(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        ids = torch.ones(2, 9, dtype=torch.int64)
        empty = transformers.LlamaForCausalLM(model("llama").config)
        actual = empty(input_ids=ids).logits
    assert actual.shape == (2, 9, empty.config.vocab_size)


@few("family", ["llama", "gemma2", "whisper", "t5"], always=range(0, 999, 4))
def test_weights_of_attention_are_refused(family: str) -> None:
    """Hooks would collect none, and the model would return an empty tuple."""
    given = batch(family, "none")
    with pytest.raises(CallError, match="output_attentions=True needs the attention weights, which no kernel stores"):
        model(family)(**given.inputs, output_attentions=True)
    with pytest.raises(ValueError, match="Please set it to 'eager' instead"):
        model(family).config.output_attentions = True
    assert len(eager(family)(**given.inputs, output_hidden_states=True).logits) == len(given.counts)
    near(model(family)(**given.inputs, output_hidden_states=True).logits[given.counts], logits(eager(family), given))


def test_an_implementation_that_is_set_later() -> None:
    """transformers before 5.20 passes over submodels whose configuration is of the same class: T5's two are set."""
    given = batch("t5", "left")
    changed = families.make("t5", head_dim=8, implementation="eager")
    wanted = logits(changed, given)
    changed.set_attn_implementation("attngen")
    changed.encoder.set_attn_implementation("attngen")
    changed.decoder.set_attn_implementation("attngen")
    assert {one.config._attn_implementation for one in (changed, changed.encoder, changed.decoder)} == {"attngen"}
    near(logits(changed, given), wanted)
    with pytest.raises(CallError, match="output_attentions"):  # it is attngen that serves the layers
        changed(**given.inputs, output_attentions=True)


def test_a_structured_mask_is_the_tensor_that_it_stands_for() -> None:
    config, real = model("mistral").config, torch.ones(2, 9, dtype=torch.long)
    real[1, :3] = 0
    actual = create_sliding_window_causal_mask(config, torch.zeros(2, 9, 4), real, None)
    assert isinstance(actual, StructuredMask)
    with torch._C.DisableTorchFunctionSubclass():
        assert actual.untyped_storage().nbytes() == 1
    assert actual.shape == (2, 1, 9, 9)
    assert actual.dtype == torch.bool
    q, kv = torch.arange(9)[:, None], torch.arange(9)[None]
    wanted = ((kv <= q) & (kv > q - WINDOW) & real.bool()[:, None, None, :]).expand(2, 1, 9, 9)
    for taken in (actual & True, actual.clone(), actual[:], actual.to("cpu", copy=True)):
        assert type(taken) is Tensor
        assert torch.equal(taken, wanted)
    assert torch.equal(actual[:, :, 4:, :5], wanted[:, :, 4:, :5])
    kept = actual.contiguous()  # which generate calls: a mask that was not read needs no tensor
    assert isinstance(kept, StructuredMask)
    assert kept.structure == actual.structure
    assert kept.dense().is_contiguous()
    assert torch.equal(kept.dense(), wanted)


# --- training, compiling, refusing --------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    given = batch("gpt_oss", "left")
    wanted = gradients(eager("gpt_oss"), logits(eager("gpt_oss"), given))
    trained = families.make("gpt_oss", head_dim=8, implementation="attngen").train()
    trained.gradient_checkpointing_enable({"use_reentrant": reentrant})
    trained.enable_input_require_grads()
    actual = gradients(trained, logits(trained, given))
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((actual[name] - gradient).abs().max()) <= TOLERANCE * max(1.0, float(gradient.abs().max())), name


def test_autocast_reaches_the_kernel_in_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings leave q and k in float32 where v is in autocast's dtype."""
    seen = set()
    attend = implementation.attend

    def noting(candidates: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        seen.add((q.dtype, k.dtype, v.dtype))
        return attend(candidates, q, k, v, **options)

    monkeypatch.setattr(implementation, "attend", noting)
    given = batch("llama", "none")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        actual, wanted = logits(model("llama"), given), logits(eager("llama"), given)
    assert seen == {(torch.bfloat16,) * 3}
    assert float((actual - wanted).abs().max()) <= 0.1 * float(wanted.abs().max())


@pytest.mark.exhaustive
@sampled(always=1, family=["gpt_oss", "llama"], padding=["none", "left"])
def test_compiles_without_a_graph_break(family: str, padding: str) -> None:
    given = batch(family, padding)
    if padding == "none":
        del given.inputs["attention_mask"]
    wanted = logits(eager(family), given, use_cache=False)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model(family), fullgraph=True, backend="eager")
        actual = compiled(**given.inputs, use_cache=False).logits[given.counts]
    near(actual, wanted)


@pytest.mark.exhaustive
def test_lengths_and_batches_that_change_are_compiled_once() -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model("llama"), fullgraph=True, backend="eager", dynamic=True)
        for turn, (rows, length) in enumerate(((7, 12), (3, 30), (9, 5))):
            ids = torch.randint(3, families.VOCABULARY, (rows, length))
            with torch._dynamo.config.patch(error_on_recompile=turn > 0):
                actual = compiled(input_ids=ids, use_cache=False).logits
            near(actual, eager("llama")(input_ids=ids, use_cache=False).logits)


#: One mask for all layers; one for each kind; sinks.
@pytest.mark.exhaustive
@sampled(every=2, family=["gpt_oss", "gemma3", "llama"], padding=["none", "left"])
def test_a_compiled_step_against_a_static_cache(family: str, padding: str) -> None:
    """On a GPU ``generate`` compiles the step that decodes, and makes its masks outside of it."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    given = batch(family, padding)
    _, wanted = families.generate(eager(family), given, cache_implementation="static")
    torch._dynamo.reset()
    compiled = families.make(family, head_dim=8, implementation="attngen")
    _, actual = families.generate(compiled, given, cache_implementation="static", compile_config=config)
    assert graphs
    if family == "llama":
        assert len(graphs) == 1  # whatever the cache holds
    operators = {str(node.target) for graph in graphs for node in graph.graph.nodes if "attngen" in str(node.target)}
    assert operators
    assert not any("allowed" in name for name in operators)  # no mask is read pair by pair
    near(actual, wanted)


@pytest.mark.exhaustive
@few("masks", ["none", "made outside"], always=(1,))
def test_a_step_of_ones_own_against_a_static_cache_reads_no_mask(masks: str) -> None:
    """A loop of one's own compiles the whole forward pass: without padding, or with masks that are made before it."""
    ids = torch.randint(3, families.VOCABULARY, (2, 9))
    padding = torch.ones(2, 9, dtype=torch.long)
    padding[0, :3] = 0
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def generated(module: Any, step: Any) -> Tensor:
        cache, actual = transformers.StaticCache(module.config, max_cache_len=24), []
        named = {cache_name(module.forward): cache}
        for start, stop in ((0, 5), (5, 6), (6, 7), (7, 9)):
            mask: Any = None
            if masks != "none":
                embeds = torch.empty(2, stop - start, module.config.hidden_size)
                given = {"config": module.config, "inputs_embeds": embeds, "attention_mask": padding[:, :stop]}
                mask = create_masks_for_generate(**given, **named, position_ids=None)
            run = module if start == 0 else step
            actual.append(run(input_ids=ids[:, start:stop], attention_mask=mask, **named).logits)
        return torch.cat(actual, 1)

    torch._dynamo.reset()
    with torch.no_grad():
        wanted = generated(eager("llama"), eager("llama"))
        actual = generated(model("llama"), torch.compile(model("llama"), fullgraph=True, backend=backend))
    operators = {str(node.target) for graph in graphs for node in graph.graph.nodes if "attngen" in str(node.target)}
    assert operators
    assert not any("allowed" in name for name in operators)
    real = padding.bool() if masks != "none" else torch.ones_like(ids, dtype=torch.bool)
    near(actual[real], wanted[real])
