"""The preset variants: ``specs/presets/NAME.yaml`` is a spec that declares the one variant NAME."""

from __future__ import annotations

from functools import cache, lru_cache

from attngen import resources
from attngen.errors import SpecError, suggest, together
from attngen.lang.variant import Variant
from attngen.schema.loading import DeclaredVariant, read_spec


@lru_cache(maxsize=1)
def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(sorted(path.stem for path in (resources.specs_dir() / "presets").glob("*.yaml")))


@cache
def declared_preset(name: str) -> DeclaredVariant:
    """Return a preset with its declaration; SpecError if there is none of that name."""
    if name not in preset_names():
        known = preset_names()
        raise SpecError(f"there is no preset '{name}'{suggest(name, known)}; presets: {', '.join(known)}")
    path = resources.specs_dir() / "presets" / f"{name}.yaml"
    draft = read_spec(path)
    if draft.errors:
        raise together(draft.errors)
    spec = draft.spec
    if tuple(spec.variants) != (name,):
        raise SpecError(f"{path}: a preset declares the one variant of its name; found: {', '.join(spec.variants)}")
    return spec.variants[name]


def preset(name: str) -> Variant:
    """Return a preset variant; SpecError if there is none of that name."""
    return declared_preset(name).variant
