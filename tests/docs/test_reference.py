"""docs/spec.md and docs/language.md against the models and the language that they describe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from attngen.errors import PlanError
from attngen.lang.ir import INDEX_NAMES, OPERATORS, Type
from attngen.lang.parser import CONSTANTS, FUNCTIONS
from attngen.lang.promotion import SPELLING
from attngen.plan import plan
from attngen.schema import expand, load_spec_text, models
from tests.docs.blocks import LANGUAGE, SPEC, code, tables

#: The models in the order of their tables in docs/spec.md.
MODELS = [
    models.SpecModel, models.VariantModel, models.ScalarModel, models.TensorModel, models.MonotoneModel,
    models.RangeModel, models.KernelModel, models.HeadDimModel, models.TileModel, models.PipelineModel,
    models.WarpsModel, models.RegistersModel, models.BackwardModel, models.GradientModel,
    models.KeysGradientModel,
]  # fmt: skip
TABLES = list(tables(SPEC, "field", "type", "default", "meaning", "example"))
ROWS = [(model, row) for model, rows in zip(MODELS, TABLES, strict=True) for row in rows]


def fields_of(model: type[models.Model]) -> dict[str, Any]:
    """Fields of a model, beside those that it has of another one with a table."""
    of_others = models.GradientModel.model_fields if model is models.KeysGradientModel else {}
    return {field.alias or name: field for name, field in model.model_fields.items() if name not in of_others}


def test_every_field_has_its_row() -> None:
    for model, rows in zip(MODELS, TABLES, strict=True):
        assert [code(row[0]) for row in rows] == list(fields_of(model)), model


def label(value: Any) -> str:
    return f"{value.__name__}" if isinstance(value, type) else value[0].strip("`")


def test_defaults_and_choices() -> None:
    for model, (name, kind, default, meaning, _) in ROWS:
        field = fields_of(model)[code(name)]
        assert default == written(field), f"docs/spec.md: default of {model.__name__}.{name}"
        schema = model.model_json_schema(by_alias=True)["properties"][code(name)]
        for choice in choices(schema):
            assert by_scheme(choice) in kind + meaning, f"docs/spec.md: {model.__name__}.{name} does not name {choice}"


def by_scheme(choice: Any) -> str:
    """A choice as the table writes it: the sizes of blocks and the prefix ``counted_`` stand there once."""
    text = re.sub(r"blocks_of_\d+$", "blocks_of_64", str(choice))
    return f"`{text if text.endswith('two_caches') else text.removeprefix('counted_')}`"


def written(field: Any) -> str:
    """Return a default as the table writes it; a tuple of one value is written as the value."""
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, tuple) and len(value) == 1:
        (value,) = value
    if value is None or value == () or value == {}:
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def choices(schema: Any) -> Iterator[Any]:
    """Yield every literal that a field's schema allows; references to other models have tables of their own."""
    if isinstance(schema, dict):
        yield from schema.get("enum", [])
        if "const" in schema:
            yield schema["const"]
        for value in schema.values():
            yield from choices(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from choices(value)


# --- examples -----------------------------------------------------------------------------------------------

KERNEL = {"variant": "causal", "head_dim": 64}


def spec_with(model: type[models.Model], given: dict[str, Any]) -> dict[str, Any]:
    """Return a whole spec in which ``given`` stands in a mapping of the model."""
    scalar: dict[str, Any] = {"type": "int32"}
    tensor: dict[str, Any] = {"dtype": "int32", "shape": ["b", "seqlen_k"]}
    variant: dict[str, Any] = {"scalars": {"example": scalar}, "tensors": {"sample": tensor}}
    kernel: dict[str, Any] = dict(KERNEL)
    spec: dict[str, Any] = {"schema": 1, "arch": ["sm90a"], "variants": {"example": variant}, "kernels": [kernel]}
    places = {
        "SpecModel": spec, "VariantModel": variant, "ScalarModel": scalar, "TensorModel": tensor, "KernelModel": kernel,
    }  # fmt: skip
    inner = {
        "MonotoneModel": (tensor, "monotone", {"axis": 0}), "RangeModel": (tensor, "range", {}),
        "HeadDimModel": (kernel, "head_dim", {"qk": 64, "v": 64}), "TileModel": (kernel, "tile", {}),
        "PipelineModel": (kernel, "pipeline", {}), "WarpsModel": (kernel, "warps", {}),
    }  # fmt: skip
    if model is models.RegistersModel:
        kernel["warps"] = {"registers": given}
    elif model in (models.BackwardModel, models.GradientModel, models.KeysGradientModel):
        kernel["passes"] = ["forward", "backward"]
        places_of = {models.GradientModel: {"dq": given}, models.KeysGradientModel: {"dkdv": given}}
        kernel["backward"] = places_of.get(model, given)
    elif model.__name__ in inner:
        parent, key, base = inner[model.__name__]
        parent[key] = base | given
    else:
        if model is models.TensorModel and given.get("grad"):
            tensor["dtype"] = "float32"
        if model is models.KernelModel and "backward" in given:
            kernel["passes"] = "backward"
        places[model.__name__].update(given)
    return spec


@pytest.mark.parametrize(("model", "row"), ROWS, ids=label)
def test_examples(model: type[models.Model], row: list[str], tmp_path: Path) -> None:
    given = yaml.safe_load(code(row[4]))
    assert code(row[0]) in given
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks/mine.yaml").write_text('schema: 1\nvariants: {mine: {mask: "q >= kv"}}\n')
    expand(load_spec_text(yaml.safe_dump(spec_with(model, given)), str(tmp_path / "example.yaml")))


REFUSED = [row[0] for rows in tables(SPEC, "entry", "reason") for row in rows]


@pytest.mark.parametrize("entry", REFUSED)
def test_entries_that_the_plan_refuses(entry: str) -> None:
    given = yaml.safe_load(code(entry))
    spec = spec_with(models.KernelModel, given | ({"passes": "backward"} if "backward" in given else {}))
    kernels = expand(load_spec_text(yaml.safe_dump(spec)))
    with pytest.raises(PlanError):
        for kernel in kernels:
            plan(kernel)


# --- the language -------------------------------------------------------------------------------------------

OPERATOR_ROWS = [row for rows in tables(LANGUAGE, "written", "arguments", "result", "meaning", "op") for row in rows]


def test_every_operator_has_its_row() -> None:
    for op, operator in OPERATORS.items():
        rows = [row for row in OPERATOR_ROWS if row[4] == f"`{op}`"]
        assert len(rows) == 1, f"docs/language.md: {len(rows)} rows for {op}"
        assert SPELLING.get(op, op) in code(rows[0][0])
        result = {Type.BOOL: "condition", Type.INT: "integer", Type.FLOAT: "float"}.get(operator.result)
        assert result in (None, rows[0][2]), op


def test_every_function_is_shown() -> None:
    shown = {code(row[0]).partition("(")[0] for row in OPERATOR_ROWS if "(" in row[0]}
    assert shown == set(FUNCTIONS)


def test_every_name_is_explained() -> None:
    (rows,) = tables(LANGUAGE, "name", "type", "meaning")
    names = [name.strip(" `") for row in rows for name in row[0].split(",")]
    assert names == [*INDEX_NAMES, "s", *CONSTANTS, "True", "False"]


ITERATIONS = [(code(row[0]), row) for rows in tables(LANGUAGE, "mask", "iteration") for row in rows]


@pytest.mark.parametrize(("mask", "row"), ITERATIONS, ids=[mask for mask, _ in ITERATIONS])
def test_iterations_of_masks_are_those_of_the_table(mask: str, row: list[str]) -> None:
    document = {"dtype": "int32", "shape": ["b", "seqlen_k"]}
    variant = {
        "mask": mask,
        "scalars": {name: {"type": "int32", "min": 1} for name in ("chunk", "radius", "sinks", "stride")},
        "tensors": {
            "window": {"dtype": "int32", "shape": ["h"]},
            "slope": {"dtype": "float32", "shape": ["h"]},
            "doc": document | {"monotone": {"axis": 1}},
            "first": {"dtype": "int32", "shape": ["seqlen_q"]},
            "id": document,
            "allowed": {"dtype": "bool", "shape": ["b", "seqlen_q", "seqlen_k"]},
        },
    }
    spec = {
        "schema": 1,
        "arch": "sm90a",
        "variants": {"example": variant},
        "kernels": [KERNEL | {"variant": "example"}],
    }
    (kernel,) = expand(load_spec_text(yaml.safe_dump(spec)))
    assert plan(kernel).iteration == code(row[1])


def test_spills_that_are_allowed() -> None:
    from attngen.plan.allowances import PINGPONG_SPILLS, SPILLS

    text = SPEC.read_text()
    assert (
        f"more than {SPILLS.bytes} bytes of spilled registers per thread, or {PINGPONG_SPILLS.bytes} in a backward"
        in text
    )
