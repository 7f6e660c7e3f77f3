"""The JSON Schema of a spec file, for editors: completion, and a mark under a misspelt field."""

from __future__ import annotations

from typing import Any

from attngen.schema.models import SpecModel


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a spec; what it refuses, ``load_spec`` refuses as well."""
    schema: dict[str, Any] = _close(SpecModel.model_json_schema(by_alias=True))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "attngen spec"}


def _close(schema: Any) -> Any:
    """Refuse keys that match no pattern of names, which pydantic leaves open, and drop its generated titles."""
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _close(item) for key, item in schema.items() if not (key == "title" and isinstance(item, str))}
    return closed | {"additionalProperties": False} if "patternProperties" in closed else closed
