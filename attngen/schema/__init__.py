"""Specs, the YAML files that name the kernels to build: loading, checks, presets, expansion into kernels."""

from attngen.schema.expand import expand, spec_hash
from attngen.schema.export import json_schema
from attngen.schema.helper_kernels import appends, block_maskers, mergers, quantizers, selectors, wideners
from attngen.schema.kernel_spec import KernelSpec
from attngen.schema.loading import Spec, declare_variant, doubts_of_fields
from attngen.schema.presets import preset, preset_names
from attngen.schema.reading import load_spec, load_spec_text

__all__ = [
    "KernelSpec",
    "Spec",
    "appends",
    "block_maskers",
    "declare_variant",
    "doubts_of_fields",
    "expand",
    "json_schema",
    "load_spec",
    "load_spec_text",
    "mergers",
    "preset",
    "preset_names",
    "quantizers",
    "selectors",
    "spec_hash",
    "wideners",
]
