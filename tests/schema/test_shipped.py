"""The specs that ship: they load, expand into what they promise, satisfy their JSON Schema, and raise no warning."""

from __future__ import annotations

import pytest

from attngen import resources
from attngen.errors import SpecError
from attngen.schema import expand, load_spec, preset, preset_names
from attngen.schema.lint import lint
from tests.sampling import few

SPECS = sorted(resources.specs_dir().rglob("*.yaml"))
PROMISED = {
    "full", "causal", "causal_top_left", "sliding_window", "prefix_lm", "alibi", "softcap", "packed_documents",
    "sink_window", "chunked", "dilated", "softcap_window", "causal_packed", "packed_bidirectional", "relative_bias",
    "neighbourhood_2d", "allowed", "causal_sink", "sliding_window_sink", "triangle",
    "prefix_tree",
}  # fmt: skip


@few("path", SPECS, ids=lambda path: path.stem, always=range(0, 999, 4))
def test_loads_and_expands(path):
    spec = load_spec(path)
    kernels = expand(spec)
    assert kernels
    assert lint(spec, kernels) == []
    assert spec.name == path.relative_to(resources.root()).as_posix()


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("hopper", 55, 100),
        ("hopper_triton", 45, 60),
        ("hopper_all", 456, 456),
        ("ampere", 24, 48),
        ("ada", 8, 24),
        ("blackwell_consumer", 8, 24),
        ("blackwell", 8, 24),
        ("portable", 8, 32),
        ("ladder", 8, 8),
        ("training", 50, 100),
        ("serving", 60, 135),
    ],
)
def test_sizes(name, least, most):
    assert least <= len(expand(load_spec(resources.specs_dir() / f"{name}.yaml"))) <= most


@pytest.mark.parametrize("name", ["hopper", "hopper_triton", "hopper_all"])
def test_hopper_has_every_preset(name):
    kernels = expand(load_spec(resources.specs_dir() / f"{name}.yaml"))
    # those of drop-ins are in the drop-ins' specs
    assert {kernel.variant.name for kernel in kernels} == set(preset_names()) - {"prefix_tree", "triangle"}
    assert {kernel.arch for kernel in kernels} == {"sm90a"}


def test_hopper_has_the_same_kernels_in_both_languages():
    asked = []
    for name, backend in (("hopper", "cuda"), ("hopper_triton", "triton")):
        kernels = expand(load_spec(resources.specs_dir() / f"{name}.yaml"))
        assert {kernel.backend for kernel in kernels} == {backend}
        asked.append({(k.variant.name, k.head_dim_qk, k.head_dim_v, k.dtype, k.layout) for k in kernels})
    assert asked[0] == asked[1]


def test_presets():
    assert set(preset_names()) == PROMISED
    for name in preset_names():
        assert preset(name).name == name
    with pytest.raises(SpecError, match="there is no preset 'casual'; did you mean 'causal'"):
        preset("casual")
