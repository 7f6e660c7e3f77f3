"""The variants that integrations ask for, by name: those of ``specs/integrations/`` and the presets."""

from __future__ import annotations

from attngen import resources
from attngen.runtime.registry.presets import DROPOUT, is_shipped, variant

__all__ = ["DROPOUT", "FILE", "is_shipped", "variant"]

FILE = resources.variants_file()
