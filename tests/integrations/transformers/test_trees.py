"""Packs of prefix trees in models of transformers: against the sequences one by one, and who refuses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

import attngen.integrations.transformers as attngen_transformers
from attngen import trees
from attngen.errors import AttngenError, CallError, NoKernelError
from attngen.integrations.transformers import implementation
from attngen.integrations.transformers.tree_mask import TreeMask
from attngen.integrations.transformers.versions import cache_name, cache_of
from tests.integrations.transformers import families
from tests.integrations.transformers.tiny_configs import tiny
from tests.sampling import few

PROMPTS = [[3, 4, 5, 6, 7, 8], [3, 4, 9]]
ANSWERS = [[[10, 11, 12, 13, 14, 15, 16], [10, 11, 12, 18], [20]], [[21, 22, 23], [21, 22, 23], []]]
WHOLE = [(prompt, answer) for prompt, group in zip(PROMPTS, ANSWERS, strict=True) for answer in group]

#: Family → the variants that serve it.
SERVED = {
    "llama": {"prefix_tree"},
    "mistral": {"span_tree"},
    "gemma2": {"span_tree_softcap"},
    "gemma3": {"span_tree", "prefix_tree"},
    "qwen3": {"prefix_tree"},
    "gpt_oss": {"span_tree", "prefix_tree"},
}


def model_of(family: str) -> Any:
    """A model of two layers with random weights and groups of query heads: in float64, if its experts take that."""
    return families.make(
        family, head_dim=8, implementation="attngen", dtype=torch.float32 if family == "gpt_oss" else torch.float64,
        all_experts=True,
    )  # fmt: skip


def one_by_one(model: Any) -> list[Tensor]:
    """Log-probabilities of the tokens of each answer, from a forward pass of its own."""
    values = []
    for prompt, answer in WHOLE:
        logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0].log_softmax(-1)
        own = torch.tensor(answer, dtype=torch.int64)
        values.append(logits[len(prompt) - 1 : -1].gather(1, own[:, None])[:, 0])
    return values


def gradients(model: Any, log_probs: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of a sum of all tokens with other weights for each."""
    model.zero_grad()
    sum(((i + 1.5) * one.cos()).sum() for i, one in enumerate(log_probs)).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@few("family", [*SERVED], always=3)
def test_log_probs_and_gradients_are_those_of_sequences_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served: set[str] = set()
    attend = implementation.attend

    def noting(candidates: Any, *arguments: Any, **options: Any) -> Any:
        served.add(candidates[0].variant)
        return attend(candidates, *arguments, **options)

    monkeypatch.setattr(implementation, "attend", noting)
    model = model_of(family)
    packed = trees.pack_answers(PROMPTS, ANSWERS)
    log_probs = packed.log_probs(model(**packed.inputs(), logits_to_keep=packed.rows).logits)
    assert served == SERVED[family]
    expected = one_by_one(model)
    limit = 5e-6  # norms of transformers compute in float32
    for one, other in zip(log_probs, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=limit, check_dtype=False)
    own, wanted = gradients(model, log_probs), gradients(model, expected)
    assert own.keys() == wanted.keys()
    largest = max(float(one.abs().max()) for one in wanted.values())
    for name, gradient in wanted.items():
        assert float((own[name] - gradient).abs().max()) <= limit * largest, name


def test_windows_hide_keys_of_a_branch() -> None:
    packed = trees.pack([[1, 2, 3, 4], [1, 2, 5]])
    mask = packed.inputs()["attention_mask"]
    visible = mask.dense(1)[0, 0]
    assert packed.ids.tolist() == [[1, 2, 3, 4, 5]]
    assert visible.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 1, 0, 0, 1],
    ]
    assert mask.dense(-1)[0, 0, 4].tolist() == [True, True, False, False, True]


def test_checkpointed_layers_recompute_the_same_tree() -> None:
    model = model_of("llama")
    packed = trees.pack_answers(PROMPTS, ANSWERS)
    wanted = gradients(model, packed.log_probs(model(**packed.inputs()).logits))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    own = gradients(model, packed.log_probs(model(**packed.inputs()).logits))
    assert all(torch.equal(own[name], one) for name, one in wanted.items())


@pytest.mark.exhaustive
def test_a_compiled_model_takes_masks_that_were_made_before() -> None:
    """Without ``fullgraph`` the masks are made between two graphs."""
    model = model_of("llama")
    packed = trees.pack_answers(PROMPTS, ANSWERS)
    inputs = packed.inputs()
    wanted = model(**inputs).logits
    embedded = model.get_input_embeddings()(packed.ids)
    masks = create_masks_for_generate(
        config=model.config, inputs_embeds=embedded, attention_mask=inputs["attention_mask"],
        position_ids=packed.positions, **{cache_name(create_masks_for_generate): None},
    )  # fmt: skip
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**{**inputs, "attention_mask": masks}).logits, wanted)


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation_name", ["eager", "sdpa"])
def test_another_implementation_is_refused(implementation_name: str) -> None:
    model = model_of("llama")
    model.set_attn_implementation(implementation_name)
    with pytest.raises(CallError, match="takes attn_implementation='attngen'"):
        model(**trees.pack([[1, 2], [1, 3]]).inputs())


@few(
    ("name", "message"),
    [
        ("JambaForCausalLM", "carry a state"),
        ("BartForCausalLM", "takes no position_ids"),
        ("CamembertForCausalLM", "from its padding token"),
        ("Lfm2ForCausalLM", "mix tokens in another way"),
        ("Llama4ForCausalLM", "attention_mask of a pack"),
        ("DeepseekV32ForCausalLM", "selects the keys"),
        ("BltForCausalLM", "in patches"),
        ("XGLMForCausalLM", "computes its attention itself"),
    ],
    always=2,
)
def test_models_that_cannot_take_a_tree_are_refused(name: str, message: str) -> None:
    attngen_transformers.register()
    config = tiny(getattr(transformers, name).config_class)
    config._attn_implementation = "attngen"
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    with pytest.raises(AttngenError, match=message):
        model(**trees.pack_answers(PROMPTS, ANSWERS).inputs())


def test_a_model_that_ignores_the_mask_is_noticed() -> None:
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2))
    packed = trees.pack([[1, 2], [1, 3]])
    logits = model.eval()(**packed.inputs()).logits
    with pytest.raises(CallError, match="did not ask for the attention_mask"):
        packed.log_probs(logits)


def test_a_cache_is_refused() -> None:
    model = model_of("llama")
    inputs = trees.pack([[1, 2, 3], [1, 3]]).inputs()
    used = cache_of(model(input_ids=torch.tensor([[4, 5]]), use_cache=True))
    with pytest.raises(CallError, match="without a cache"):
        model(**{**inputs, "use_cache": True, cache_name(model.forward): used})


def test_a_chunked_mask_is_refused() -> None:
    from transformers.masking_utils import chunked_causal_mask_function

    from attngen.integrations.transformers.masks import mask

    tree = trees.pack([[1, 2], [1, 3]]).inputs()["attention_mask"]
    chunks = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(NoKernelError, match="this model has a layer with another mask"):
        mask(1, 3, 3, mask_function=chunks, attention_mask=tree, config=transformers.LlamaConfig())


def test_a_mask_moves_and_has_a_form_but_no_values() -> None:
    mask = trees.pack([[1, 2], [1, 3]]).inputs()["attention_mask"]
    assert isinstance(mask, TreeMask)
    assert (mask.shape, mask.dtype, mask.ndim) == ((1, 3), torch.bool, 2)
    moved = mask.to("meta", torch.int64)
    assert isinstance(moved, TreeMask)
    assert (moved.device.type, moved.subtree_end.device.type, moved.dtype) == ("meta", "meta", torch.int64)
    assert isinstance(mask.view(1, -1), TreeMask)
    assert repr(mask) == "TreeMask(3 tokens, cpu)"
    for use in (lambda: mask.sum(), lambda: mask[:, :2], lambda: mask.view(3), lambda: mask & mask):
        with pytest.raises(CallError, match="which has no values"):
            use()


# --- all classes --------------------------------------------------------------------------------------------


def causal_classes() -> list[str]:
    """Names of all classes of causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return sorted({name for each in names for name in ([each] if isinstance(each, str) else each)})


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize("name", causal_classes())
def test_every_causal_class_is_right_or_refused(name: str) -> None:
    attngen_transformers.register()
    try:
        config = tiny(getattr(transformers, name).config_class)
        config._attn_implementation = "attngen"
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
        torch.manual_seed(0)
        model = getattr(transformers, name)(config).eval()
    except Exception as error:  # whatever a class lacks where no tiny configuration of it is known
        pytest.skip(f"not made: {error}")
    packed = trees.pack_answers(PROMPTS, ANSWERS)
    with torch.no_grad():
        try:
            log_probs = packed.log_probs(model(**packed.inputs()).logits)
        except (AttngenError, KeyError, TypeError, ValueError) as error:
            pytest.skip(f"refused: {error}")
        errors = [float((a - b).abs().max()) for a, b in zip(log_probs, one_by_one(model), strict=True) if len(a)]
    assert max(errors) < 1e-4
