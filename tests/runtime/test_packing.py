"""Offsets in a parameter block, and what is refused rather than guessed."""

from __future__ import annotations

import pytest

from attngen.errors import LoadError
from attngen.manifest import Argument
from attngen.runtime.kernels.packing import lay_out


def _row(kind: str, type_: str = "i32") -> Argument:
    return Argument("x", kind, type_)


def test_natural_alignment_and_descriptors_at_64() -> None:
    layout = lay_out(
        [
            _row("pointer", "*bf16"),  # 0
            _row("size"),  # 8
            _row("stride", "i64"),  # 16, after 4 bytes of padding
            _row("scalar", "i1"),  # 24
            _row("scale", "fp32"),  # 28
            _row("descriptor", "tensordesc"),  # 64
            _row("descriptor_shape"),  # 192
            _row("descriptor_stride", "i64"),  # 200
            _row("scratch", "*i8"),  # 208
        ]
    )
    assert [p.offset for p in layout.parameters] == [0, 8, 16, 24, 28, 64, 192, 200, 208]
    assert layout.size == 216
    assert layout.sizes == (8, 4, 8, 1, 4, 128, 4, 8, 8)


def test_nothing_pads_the_end() -> None:
    assert lay_out([_row("pointer"), _row("size")]).size == 12


def test_an_unknown_kind_or_type_is_refused() -> None:
    with pytest.raises(LoadError, match="kind 'texture' is not known"):
        lay_out([_row("texture")])
    with pytest.raises(LoadError, match="type 'i24' is none of"):
        lay_out([_row("size", "i24")])


def test_too_many_parameters_are_refused() -> None:
    with pytest.raises(LoadError, match="32768 B; a kernel takes at most 32764 B"):
        lay_out([_row("stride", "i64")] * 4096)
