"""See ``attngen.integrations.diffusers.backend``."""

from attngen.integrations.diffusers.backend import (
    NAME,
    RELEASES,
    attention,
    register,
    served,
)

__all__ = [
    "register",
    "attention",
    "RELEASES",
    "NAME",
    "served",
]
