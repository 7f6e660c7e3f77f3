"""The math stands beside the code: each product of a kernel is said in a comment at most a few lines above it."""

from __future__ import annotations

import re

from attngen.render import render
from tests.plan.specs import planned
from tests.sampling import sampled

#: Lines from the comment to the call: those of the loop around it.
NEAR = 12
CALL = re.compile(r"(Product<[^;]*::(template )?(ss|rs)<|\bmultiply<\w+>\(|\btl\.dot\()")
MATH = re.compile(r"(//|#) (S|O|dP|dV|dK|dQ)(\^T)? \+?= ")
OWN = "variants:\n  own: {score: 's * exp(0.0 - s)'}\n"


def unsaid(text: str) -> list[str]:
    """Return the lines of a source that multiply, and have no product in a comment near above them."""
    lines = text.splitlines()
    return [
        f"{number}: {line.strip()}"
        for number, line in enumerate(lines)
        if CALL.search(line) and not any(MATH.search(near) for near in lines[max(0, number - NEAR) : number + 1])
    ]


@sampled(
    variant=["causal", "softcap", "packed_documents", "own"],
    direction=["forward", "backward"],
    backend=["cuda", "triton"],
    head_dim=[64, 128, 192],
)
def test_products_are_said_in_comments(direction: str, backend: str, variant: str, head_dim: int) -> None:
    backward = {"passes": "backward", "backward": f"{{backend: {backend}}}"}
    asked = backward if direction == "backward" else {"backend": backend}
    plan = planned(variant, head_dim=head_dim, declared=OWN, **asked)
    text = render(plan).text
    assert CALL.search(text)
    assert unsaid(text) == []


def test_products_of_other_loops_are_said_in_comments() -> None:
    text = render(planned(backend="cuda", split_kv="true", head_dim=128)).text
    assert CALL.search(text)
    assert unsaid(text) == []


def test_a_product_without_its_comment_is_noticed() -> None:
    text = render(planned(backend="cuda", head_dim=128)).text
    assert unsaid(text.replace("// O += P V", "// the product"))
