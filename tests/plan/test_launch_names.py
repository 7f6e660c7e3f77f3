"""A launch of a backward is called by what it computes: the gradients that it multiplies for are in its name."""

from __future__ import annotations

import pytest

from tests.plan.specs import planned

#: Name → what its products give. dQ may go to the dQ accumulator, which another launch, or the same, then rounds.
GRADIENTS = {
    "dkdv": {"dk", "dv"},
    "dq": {"dq"},
    "dqkv": {"dq", "dk", "dv"},
    "postprocess": set(),
    "preprocess": set(),
}
ACCUMULATOR = "dq_sum"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("variant", ["causal", "softcap", "allowed"])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_gradients_that_a_launch_computes_are_in_its_name(backend: str, variant: str, head_dim: int) -> None:
    backward = planned(variant, head_dim=head_dim, passes="backward", backward=f"{{backend: {backend}}}")
    computed: set[str] = set()
    for launch in backward.launches:
        kernel = launch.name.removeprefix("classify_")
        assert kernel in GRADIENTS
        assert launch.symbol == f"{backward.name}_{launch.name}"
        if kernel != launch.name:
            assert backward.has_launch(kernel)  # the map is that kernel's
            continue
        given = {argument.of for argument in launch.arguments if argument.kind != "stride"}
        written = given & {"dq", "dk", "dv"} | ({"dq"} if ACCUMULATOR in given else set())
        if "k" in given:  # it multiplies
            assert written == GRADIENTS[launch.name]
            computed |= written
        else:
            assert GRADIENTS[launch.name] == set()
    assert computed == {"dq", "dk", "dv"}


@pytest.mark.parametrize(("head_dim", "last"), [(128, "dqkv"), (256, "postprocess")])
def test_a_launch_that_only_rounds_dq_has_a_name_of_its_own(head_dim: int, last: str) -> None:
    backward = planned("causal", head_dim=head_dim, passes="backward", backward="{backend: cuda}")
    assert backward.launches[-1].name == last
    names = {argument.of for argument in backward.launches[-1].arguments}
    assert {"dq", ACCUMULATOR} <= names
    assert ("k" in names) == (last == "dqkv")
