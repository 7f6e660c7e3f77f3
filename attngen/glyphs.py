"""Text for streams whose encoding lacks some of its characters: ASCII takes their place, and printing never fails."""

from __future__ import annotations

import codecs
import sys

#: Shades, which stay different from each other, and the signs of units and of what was left out.
_ASCII = str.maketrans({"·": ".", "░": ":", "▒": "+", "▓": "%", "█": "#", "µ": "u", "…": "...", "–": "-", "−": "-"})


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].translate(_ASCII)
    return lacking.encode("ascii", "backslashreplace").decode("ascii"), error.end


#: Handler of encoding errors, for ``reconfigure`` of a stream.
ERRORS = "attngen.ascii"
codecs.register_error(ERRORS, _replace)


def printable(text: str) -> str:
    """The text as standard output can show it."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # None: a stream of characters
    return text.encode(encoding, ERRORS).decode(encoding)
