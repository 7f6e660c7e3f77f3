"""Quotations of a spec in messages."""

from __future__ import annotations


def shorten(text: str, length: int = 60) -> str:
    """Return the text, cut to ``length`` characters."""
    return text if len(text) <= length else text[: length - 1] + "…"


def show(value: object) -> str:
    """Write a value of the file as a message quotes it, on one line of plain ASCII."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return shorten(ascii(value))
