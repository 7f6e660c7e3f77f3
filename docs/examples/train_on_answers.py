"""Reinforcement learning on groups of answers (as GRPO), each prompt computed once for all of its answers.

    python docs/examples/train_on_answers.py --steps 20

A tiny Llama answers each prompt several times. Rewards are normalised in the group of a prompt, and the policy gradient
goes through the log-probabilities of the answers. These come from one forward pass over a prefix tree, and each step
compares loss and gradients with those of the sequences one by one. On a GPU the kernels are compiled on the first call;
elsewhere attngen's eager reference runs.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import attngen
import attngen.integrations.transformers as attngen_transformers

PROMPTS, PROMPT, GROUP, ANSWER = 3, 24, 6, 12  # prompts of a step, their tokens, answers to each, most tokens of one
PAD, END, FIRST, VOCABULARY = 0, 1, 2, 32  # FIRST: the first token that means something


def sampled(model: LlamaForCausalLM, prompts: Tensor) -> list[list[Tensor]]:
    """A group of answers to each prompt, up to the token that ends one."""
    tokens = model.generate(
        input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, num_return_sequences=GROUP,
        max_new_tokens=ANSWER, min_new_tokens=2, eos_token_id=END, pad_token_id=PAD,
    )  # fmt: skip
    answers = [answer[answer != PAD] for answer in tokens[:, PROMPT:]]
    return [answers[i : i + GROUP] for i in range(0, len(answers), GROUP)]


def reward(answer: Tensor) -> float:
    """The share of even tokens: something that a policy learns in a few steps."""
    return (answer % 2 == 0).double().mean().item()


def loss_of(log_probs: list[Tensor], sampled_with: list[Tensor], answers: list[list[Tensor]]) -> Tensor:
    """The clipped loss of a policy gradient, with rewards normalised in each group; the mean over tokens."""
    rewards = torch.tensor([[reward(answer) for answer in group] for group in answers])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    total = torch.zeros((), device=log_probs[0].device)
    for own, old, advantage in zip(log_probs, sampled_with, advantages.flatten().tolist(), strict=True):
        ratio = (own - old).exp()
        total = total - torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).sum()
    return total / sum(len(one) for one in log_probs)


def packed_log_probs(model: LlamaForCausalLM, packed: attngen.trees.PackedTrees) -> list[Tensor]:
    """Log-probabilities of all answers, from one forward pass over the trees."""
    return packed.log_probs(model(**packed.inputs(), logits_to_keep=packed.rows).logits)


def log_probs_apart(model: LlamaForCausalLM, prompts: Tensor, answers: list[list[Tensor]]) -> list[Tensor]:
    """The same from a forward pass for each answer."""
    values = []
    for prompt, group in zip(prompts, answers, strict=True):
        for answer in group:
            logits = model(input_ids=torch.cat([prompt, answer])[None], use_cache=False).logits[0, PROMPT - 1 : -1]
            values.append(logits.float().log_softmax(-1).gather(1, answer[:, None])[:, 0])
    return values


def gradients(model: LlamaForCausalLM, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, allowed = (torch.bfloat16, 5e-2) if device == "cuda" else (torch.float32, 1e-3)
    attngen_transformers.register()
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, pad_token_id=PAD, eos_token_id=END, attn_implementation="attngen",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(steps):
        prompts = torch.randint(FIRST, VOCABULARY, (PROMPTS, PROMPT), device=device)
        answers = sampled(model, prompts)
        packed = attngen.trees.pack_answers(prompts, answers)

        log_probs = packed_log_probs(model, packed)
        old = [one.detach() for one in log_probs]  # a step further from the sample, those of its own forward pass
        loss = loss_of(log_probs, old, answers)
        own = gradients(model, loss)

        apart = loss_of(log_probs_apart(model, prompts, answers), old, answers)
        expected = gradients(model, apart)
        norm = torch.stack([one.float().norm() for one in expected]).norm()
        difference = torch.stack([(a - b).float().norm() for a, b in zip(own, expected, strict=True)]).norm()
        error = (difference / norm.clamp(min=1e-6)).item()  # 0 where all answers of each group are alike
        assert error <= allowed, f"gradients differ from those of the sequences apart by {error:.1e}"
        assert abs(loss - apart) <= allowed, (loss, apart)

        for parameter, gradient in zip(model.parameters(), own, strict=True):
            parameter.grad = gradient
        optimizer.step()
        if step % 5 == 0 or step == steps - 1:
            mean = sum(reward(answer) for group in answers for answer in group) / (PROMPTS * GROUP)
            lengths = sum(len(places) for places in packed.places)
            print(
                f"step {step}: reward {mean:.3f}, {packed.ids.shape[1]} tokens in place of {lengths}, "
                f"gradients within {error:.1e}"
            )


if __name__ == "__main__":
    with attngen.jit():
        main()
