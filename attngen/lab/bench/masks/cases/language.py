"""Masks of language models: prefixes, block diffusion, answers to one prompt, images in text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.lab.bench.masks.cases.documents import document_ids
from attngen.lab.bench.masks.cases.forms import Forms, Register, Size, bools, ints

case = Register()


@case("prefix LM")
def _(size: Size) -> Forms:
    prefix = size.fraction(4)
    return Forms(lambda b, h, q, kv: (q >= kv) | (kv < prefix), mask="q >= kv or kv < prefix", sizes={"prefix": prefix})


@case("prefix LM of documents")
def _(size: Size) -> Forms:
    """Each document begins with a prompt that it sees whole."""
    doc = document_ids(size, size.fraction(8))
    inner = size.positions() - torch.searchsorted(doc, doc).int()
    prompt = inner < size.fraction(32)
    return Forms(
        lambda b, h, q, kv: (doc[q] == doc[kv]) & ((q >= kv) | prompt[kv]),
        mask="doc[q] == doc[kv] and (q >= kv or prompt[kv])",
        declared={"doc": ints("seqlen_k", monotone={"axis": 0}), "prompt": bools("seqlen_k")},
        tensors={"doc": doc, "prompt": prompt},
    )


@case("block diffusion")
def _(size: Size) -> Forms:
    """BD3-LM in training: n noised tokens, then the same n clean ones, in blocks."""
    n, block = size.seqlen // 2, size.fraction(256, 4)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        cq, ck = q >= n, kv >= n
        bq, bk = torch.where(cq, q - n, q) // block, torch.where(ck, kv - n, kv) // block
        return ((bq == bk) & (cq == ck)) | (ck & ((bq > bk) | (cq & (bq >= bk))))

    return Forms(
        mask_mod,
        mask="blk(q) == blk(kv) and clean(q) == clean(kv) "
             "or clean(kv) and (blk(q) > blk(kv) or clean(q) and blk(q) >= blk(kv))",
        let={"clean(x)": "x >= n", "blk(x)": "((x - n) if x >= n else x) // block"},
        sizes={"n": n, "block": block},
    )  # fmt: skip


@case("multi-item scoring")
def _(size: Size) -> Forms:
    """A prompt, whose item is 0, and candidates that see it and themselves."""
    item = ((size.positions() - size.fraction(4)).clamp(min=-1) // size.fraction(32) + 1).int()
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((item[kv] == 0) | (item[kv] == item[q])),
        mask="q >= kv and (item[kv] == 0 or item[kv] == item[q])",
        declared={"item": ints("seqlen_k", monotone={"axis": 0})},
        tensors={"item": item},
    )


@case("shared prefix")
def _(size: Size) -> Forms:
    """Answers of equal lengths to one prompt, as in GRPO."""
    prefix, answer = size.fraction(4), size.fraction(20)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & ((kv < prefix) | ((q - prefix) // answer == (kv - prefix) // answer))

    return Forms(
        mask_mod,
        mask="q >= kv and (kv < prefix or (q - prefix) // answer == (kv - prefix) // answer)",
        sizes={"prefix": prefix, "answer": answer},
    )


@case("images in text")
def _(size: Size) -> Forms:
    """Gemma 3 and PaliGemma: text is causal, an image sees itself whole."""
    image = _images(size)
    return Forms(
        lambda b, h, q, kv: (q >= kv) | ((image[q] > 0) & (image[q] == image[kv])),
        mask="q >= kv or image[q] > 0 and image[q] == image[kv]",
        declared={"image": ints("seqlen_k")},
        tensors={"image": image},
    )


@case("images in text, local")
def _(size: Size) -> Forms:
    """The same in a layer with a window."""
    image, window = _images(size), size.fraction(16)
    return Forms(
        lambda b, h, q, kv: ((q >= kv) & (q - kv < window)) | ((image[q] > 0) & (image[q] == image[kv])),
        mask="q >= kv and q - kv < window or image[q] > 0 and image[q] == image[kv]",
        sizes={"window": window},
        declared={"image": ints("seqlen_k")},
        tensors={"image": image},
    )


def _images(size: Size) -> Tensor:
    """0 for text, else the number of the image that a token belongs to."""
    part, at = size.positions() // size.fraction(12), size.positions() % size.fraction(12)
    return torch.where(at < size.fraction(32), part + 1, 0).int()


@case("spans that end later")
def _(size: Size) -> Forms:
    """Transfusion: a token sees all before it, and its span to the end."""
    end = torch.maximum(size.positions() + 1, (size.positions() // size.fraction(40) + 1) * size.fraction(40)).int()
    return Forms(
        lambda b, h, q, kv: kv < end[q], mask="kv < end[q]", declared={"end": ints("seqlen_q")}, tensors={"end": end}
    )
