"""Masks and scores of models and papers, each written for FlexAttention and in attngen's language."""

from __future__ import annotations

from attngen.lab.bench.masks.cases import (
    biases,
    documents,
    images,
    language,
    pairs,
    scores,
    sparse,
    trees,
    video,
    windows,
)
from attngen.lab.bench.masks.cases.forms import MaskCase

_KINDS = (video, images, sparse, documents, language, trees, pairs, biases, scores, windows)


def mask_cases() -> tuple[MaskCase, ...]:
    """All cases, those first whose kernels take longest to compile."""
    return tuple(case for kind in _KINDS for case in kind.case)
