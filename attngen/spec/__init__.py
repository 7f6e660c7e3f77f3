"""Specs: the YAML that names the kernels to build. Loading and checking, presets, and expansion into kernels."""

from attngen.spec.expand import KernelSpec, expand, spec_hash
from attngen.spec.loading import Spec, load_spec, load_spec_text
from attngen.spec.presets import preset, preset_names
from attngen.spec.schema import json_schema

__all__ = [
    "KernelSpec",
    "Spec",
    "expand",
    "json_schema",
    "load_spec",
    "load_spec_text",
    "preset",
    "preset_names",
    "spec_hash",
]
