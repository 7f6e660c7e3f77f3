"""The variants that integrations name are those of the shipped specs."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

from attngen import resources
from attngen.build import integration_variants
from attngen.integrations.shared import catalogue
from attngen.lang.check import with_dropout
from attngen.schema import expand, load_spec, preset_names
from tests.sampling import few

INTEGRATIONS = Path(catalogue.__file__).parents[1]
#: Variants as builds write them.
BUILT = integration_variants.variants()


def test_the_file_is_up_to_date() -> None:
    command = "python -m attngen.build.integration_variants"
    assert catalogue.FILE.read_text() == integration_variants.text(), f"stale: run {command}"


@few("name", sorted(BUILT), always=range(0, 999, 3))
def test_variants_are_equal_to_what_builds_write(name: str) -> None:
    """A variant as a value takes the kernels whose manifest holds an equal one."""
    assert catalogue.variant(name) == BUILT[name]
    assert catalogue.variant(name) is catalogue.variant(name)


@few(
    "path",
    sorted((resources.specs_dir() / "integrations").glob("*.yaml")),
    ids=lambda p: p.stem,
    always=range(0, 999, 3),
)
def test_every_declared_variant_has_kernels(path: Path) -> None:
    spec = load_spec(path)
    assert set(spec.model.variants) <= {kernel.variant.name for kernel in expand(spec)}


def test_every_variant_that_code_names_exists() -> None:
    names = set(json.loads(catalogue.FILE.read_text()))
    assert set(preset_names()) < names
    named = []
    for path in INTEGRATIONS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "VariantCandidate":
                first = node.args[0]
                if isinstance(first, ast.Constant):
                    assert first.value in names, f"{path.name}:{node.lineno}"
                    named.append(first.value)
    assert named


def test_variants_with_dropout_are_siblings_of_those_without() -> None:
    """A call finds them by that, whether a shipped spec declares them or not."""
    declared = [name for name in integration_variants.variants() if name.endswith(catalogue.DROPOUT)]
    assert declared
    for name in declared:
        plain = catalogue.variant(name.removesuffix(catalogue.DROPOUT))
        assert replace(with_dropout(plain), name=name) == catalogue.variant(name)
        assert catalogue.is_shipped(name)
    actual = catalogue.variant("softcap_dropout")
    assert (actual.dropout, actual.name, actual.score) == (True, "softcap_dropout", catalogue.variant("softcap").score)
    assert actual is catalogue.variant("softcap_dropout")
    assert not catalogue.is_shipped("softcap_dropout")
    with pytest.raises(KeyError):
        catalogue.variant("nothing_dropout")
