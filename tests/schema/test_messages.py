"""Messages of specs that are wrong in one place: they speak of the file, in attngen's words."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from attngen.errors import SpecError
from attngen.schema import expand, load_spec_text, models
from tests.sampling import few
from tests.schema.test_fuzz import RAW

WRONG: list[Any] = [
    "x", "", "x" * 500, 7, -1, 2**70, 1.5, float("inf"), float("nan"), True, [], {}, [1, 2], {"a": 1}, [[1]], [{}],
]  # fmt: skip

#: A mapping in which a field of each model stands, by the path of the mapping.
PLACES: dict[type[models.Model], tuple[str | int, ...]] = {
    models.SpecModel: (),
    models.VariantModel: ("variants", "m"),
    models.ScalarModel: ("variants", "m", "scalars", "x"),
    models.TensorModel: ("variants", "m", "tensors", "t"),
    models.MonotoneModel: ("variants", "m", "tensors", "t", "monotone"),
    models.RangeModel: ("variants", "m", "tensors", "t", "range"),
    models.KernelModel: ("kernels", 0),
    models.HeadDimModel: ("kernels", 0, "head_dim"),
    models.TileModel: ("kernels", 0, "tile"),
    models.PipelineModel: ("kernels", 0, "pipeline"),
    models.WarpsModel: ("kernels", 0, "warps"),
    models.RegistersModel: ("kernels", 0, "warps", "registers"),
    models.BackwardModel: ("kernels", 0, "backward"),
    models.GradientModel: ("kernels", 0, "backward", "dq"),
    models.KeysGradientModel: ("kernels", 0, "backward", "dkdv"),
}


def spec() -> dict[str, Any]:
    tensor = {"dtype": "int32", "shape": ["seqlen_k"], "monotone": {"axis": 0}, "range": {"min": 0}}
    variant = {"mask": "kv < x and t[kv] > 0", "scalars": {"x": {"type": "int32"}}, "tensors": {"t": tensor}}
    kernel = {
        "variant": "m", "head_dim": {"qk": 64, "v": 64}, "tile": {"m": 64}, "pipeline": {"stages": 2},
        "warps": {"registers": {"producer": 24}}, "passes": ["forward", "backward"],
        "backward": {"dq": {"stages": 2}, "dkdv": {"q_stages": 2}},
    }  # fmt: skip
    return {"schema": 1, "package": "p", "arch": ["sm90a"], "variants": {"m": variant}, "kernels": [kernel]}


def changed(path: tuple[str | int, ...], name: str, value: Any) -> str:
    whole = spec()
    place: Any = whole
    for step in path:
        place = place[step]
    place[name] = value
    return yaml.safe_dump(whole, sort_keys=False)


FIELDS = [
    pytest.param(path, field.alias or name, id=f"{model.__name__}.{field.alias or name}")
    for model, path in PLACES.items()
    for name, field in model.model_fields.items()
]


@few(("path", "name"), FIELDS, always=range(0, 84, 12))
def test_errors_are_said_in_words(path: tuple[str | int, ...], name: str) -> None:
    for value in WRONG:
        try:
            expand(load_spec_text(changed(path, name, value), "wrong.yaml"))
        except SpecError as error:
            message = str(error)
        else:
            continue
        assert not RAW.search(message), message
        assert message.startswith("wrong.yaml:"), message


@few(("path", "name"), FIELDS, always=range(0, 999, 3))
def test_a_field_that_is_left_empty_is_refused(path: tuple[str | int, ...], name: str) -> None:
    """An empty ``mask:`` would let every query see every key without a word."""
    with pytest.raises(SpecError, match="empty|missing|found nothing") as caught:
        load_spec_text(changed(path, name, None), "wrong.yaml")
    assert name in str(caught.value)
    assert ("'mask: true'" in str(caught.value)) == (name == "mask")


@pytest.mark.parametrize(
    ("dtype", "told"),
    [
        ("{q: bf16, k: fp8_e4m3, v: fp8_e4m3}", "here 'dtype: bf16', 'kv_dtype: fp8_e4m3'"),
        ("{q: fp8_e4m3, out: fp16}", "here 'dtype: fp8_e4m3', 'out_dtype: fp16'"),
        ("[fp16, {v: fp8_e4m3}]", "here 'dtype: bf16', 'kv_dtype: fp8_e4m3'"),
        ("{q: bf16, k: fp8_e4m3, v: bf16}", "found k of 'fp8_e4m3' and v of 'bf16'; k and v have one dtype"),
        ("{q: bf16, oot: fp16}", "found a mapping with 'oot'; did you mean 'out'"),
    ],
)
def test_a_mapping_of_dtypes_is_told_which_fields_say_the_same(dtype: str, told: str) -> None:
    text = (
        f"schema: 1\npackage: p\narch: [sm90a]\nkernels:\n  - variant: causal\n    dtype: {dtype}\n    head_dim: 64\n"
    )
    with pytest.raises(SpecError) as raised:
        load_spec_text(text)
    assert told in str(raised.value)
    assert ":6: kernels[0].dtype" in str(raised.value)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("scalars: {w: 3}", r"scalars\.w: found 3; allowed: a mapping, such as {type: int32}"),
        ("tensors: {d: int32}", r"tensors\.d: found 'int32'; allowed: a mapping, such as {dtype: int32, shape: \[h\]}"),
    ],
)
def test_declarations_that_are_no_mapping_get_an_example(declared: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_spec_text(f"schema: 1\nvariants: {{a: {{mask: true, {declared}}}}}")
