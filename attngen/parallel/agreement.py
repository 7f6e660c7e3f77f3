"""Ranks compare their plans and calls before they exchange anything, so that all of them fail together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from attngen.errors import CallError


def agree(group: Any, mine: tuple[str, str], problem: str | None) -> None:
    """Compare a plan and a call, each as a text, with those of all ranks of a group.

    ``problem`` is what is wrong with the call on this rank alone. Raises the same CallError on every rank.
    """
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (*mine, problem), group=group)
    problems = [f"rank {rank}: {each[2]}" for rank, each in enumerate(answers) if each[2] is not None]
    if problems:
        raise CallError("\n".join(problems))
    for place, what, allowed in (
        (0, "plan", "one plan, made from the same variant, lengths and values on every rank"),
        (1, "call", "the same shapes but for the rows, dtype and arguments on every rank"),
    ):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(answers):
            ranks.setdefault(each[place], []).append(rank)
        if len(ranks) > 1:
            groups = "; ".join(f"ranks {', '.join(map(str, some))} have {text}" for text, some in ranks.items())
            raise CallError(f"ranks disagree about the {what}: {groups}; allowed: {allowed}")
