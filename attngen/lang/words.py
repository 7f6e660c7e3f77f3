"""Words of PyTorch, FlexAttention and C that programs write in masks and scores, and what the language says instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection

from attngen.errors import suggest

_Q = "'q', or 'q_pos', which counts so that the last query is at the last key"

#: Names that stand for an index, a length or a constant elsewhere, in lower case → what to write.
_NAMES: dict[str, str] = {
    **dict.fromkeys(("q_idx", "q_index", "qi", "q_i", "query_idx", "query", "row", "i"), _Q),
    **dict.fromkeys(
        ("kv_idx", "kv_index", "kv_i", "k_idx", "key_idx", "kv_pos", "k_pos", "k", "key", "col", "j"), "'kv'"
    ),
    **dict.fromkeys(("batch", "batch_idx", "b_idx", "bidx"), "'b'"),
    **dict.fromkeys(("head", "head_idx", "h_idx", "hidx", "q_head"), "'h'"),
    **dict.fromkeys(("kv_head", "head_kv", "h_kv", "hkv", "kv_h"), "'hk'"),
    **dict.fromkeys(("num_heads", "n_heads", "nheads", "nhead", "num_q_heads", "n_head"), "'heads'"),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads", "num_heads_kv", "num_key_value_heads"), "'kv_heads'"),
    **dict.fromkeys(("q_len", "qlen", "len_q", "seq_len_q", "seq_q", "seqlenq", "lq"), "'seqlen_q'"),
    **dict.fromkeys(
        ("kv_len", "k_len", "klen", "len_k", "len_kv", "seq_len_k", "seq_len_kv", "seqlen_kv", "seq_k", "seq_kv",
         "seqlenk", "lk"), "'seqlen_k'"),
    **dict.fromkeys(("seqlen", "seq_len", "seq_length", "length"), "'seqlen_q' or 'seqlen_k'"),
    **dict.fromkeys(("score", "logit", "logits", "qk", "scores"), "'s', which is the scaled logit"),
    "infinity": "'inf'", "infty": "'inf'", "pi": "3.141592653589793", "true": "'True'", "false": "'False'",
}  # fmt: skip

#: Functions of torch, numpy, math and Triton → what to write; those that have the same name here are not listed.
_FUNCTIONS: dict[str, str] = {
    "where": "'x if condition else y'", "select": "'x if condition else y'", "cond": "'x if condition else y'",
    **dict.fromkeys(("minimum", "fmin"), "'min'"),
    **dict.fromkeys(("maximum", "fmax"), "'max'"),
    **dict.fromkeys(("clip", "clamp_min", "clamp_max"), "'clamp(x, low, high)', 'min' or 'max'"),
    **dict.fromkeys(("fabs", "absolute"), "'abs'"),
    **dict.fromkeys(("pow", "power", "float_power", "square"), "'x ** y'"),
    **dict.fromkeys(("logical_and", "all", "and_masks"), "'x and y'"),
    **dict.fromkeys(("logical_or", "any", "or_masks"), "'x or y'"),
    **dict.fromkeys(("logical_not", "invert"), "'not x'"),
    "logical_xor": "'x != y'",
    "bitwise_and": "'x & y'", "bitwise_or": "'x | y'", "bitwise_xor": "'x ^ y'", "bitwise_not": "'~x'",
    **dict.fromkeys(("remainder", "fmod", "mod"), "'x % y'"),
    **dict.fromkeys(("floor_divide", "div_floor"), "'x // y'"),
    **dict.fromkeys(("div", "divide", "true_divide"), "'x / y'"),
    **dict.fromkeys(("eq", "equal"), "'x == y'"),
    **dict.fromkeys(("ne", "not_equal"), "'x != y'"),
    **dict.fromkeys(("lt", "less"), "'x < y'"),
    **dict.fromkeys(("le", "less_equal"), "'x <= y'"),
    **dict.fromkeys(("gt", "greater"), "'x > y'"),
    **dict.fromkeys(("ge", "greater_equal"), "'x >= y'"),
    **dict.fromkeys(("rint", "nearbyint"), "'round'"),
    "fix": "'trunc'", "sgn": "'sign'", "arctan": "'atan'", "arctan2": "'atan2'",
    "relu": "'max(x, 0.0)'", "softplus": "'log1p(exp(x))'", "logsigmoid": "'-log1p(exp(-x))'",
    "gelu": "'0.5 * x * (1 + erf(0.70710678 * x))'", "hypot": "'sqrt(x * x + y * y)'", "log10": "'0.30103 * log2(x)'",
    **dict.fromkeys(("cdiv", "ceil_div"), "'(x + y - 1) // y'"),
}  # fmt: skip

#: Tokens of other languages, and the text to write instead.
_TOKENS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"&&"), "'and'"),
    (re.compile(r"\|\|"), "'or'"),
    (re.compile(r"!(?!=)"), "'not'"),
    (re.compile(r"=>"), "'>='"),
    (re.compile(r"=<"), "'<='"),
    (re.compile(r"<>"), "'!='"),
    (re.compile(r"\?"), "'x if condition else y'"),
)
#: Searched only in a text that does not parse.
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(AND|And)\b"), "'and'"),
    (re.compile(r"\b(OR|Or)\b"), "'or'"),
    (re.compile(r"\b(NOT|Not)\b"), "'not'"),
    (re.compile(r"\b(return|def)\b"), "the expression alone"),
    (re.compile(r"(?<![<>=!:])=(?!=)"), "'==' to compare"),
)

#: Extents by other names, without '_' and in lower case.
_EXTENTS: dict[str, str] = {
    **dict.fromkeys(("batch", "batchsize", "bs", "bsz", "nbatch", "numbatches"), "b"),
    **dict.fromkeys(("head", "heads", "numheads", "nheads", "nhead", "qheads", "hq", "numqheads"), "h"),
    **dict.fromkeys(("kvhead", "kvheads", "headkv", "headskv", "numkvheads", "nkvheads", "hkv", "kvh"), "hk"),
    **dict.fromkeys(("seqq", "seqlenq", "qlen", "lenq", "qseqlen", "qlength", "lengthq"), "seqlen_q"),
    **dict.fromkeys(
        ("seqk", "seqkv", "seqlenk", "seqlenkv", "klen", "kvlen", "lenk", "lenkv", "kseqlen", "kvseqlen", "klength",
         "kvlength", "lengthk"), "seqlen_k"),
    **dict.fromkeys(("totalqueries", "totalq"), "total_q"),
    **dict.fromkeys(("totalkeys", "totalk", "totalkv"), "total_k"),
}  # fmt: skip


def name_hint(name: str, known: Collection[str], declared: Collection[str]) -> str:
    """Hint for an unknown name: the text to write instead, or the nearest known name; empty if nothing is near."""
    if near := suggest(name, declared, cutoff=0.8):
        return near
    if written := _NAMES.get(name.lower()):
        if written.startswith("'s'") and "s" not in known:
            return "; a mask cannot read the logit"
        return f"; write {written}"
    return suggest(name, known)


def function_hint(name: str, known: Collection[str]) -> str:
    """Hint for an unknown function, named with or without its module."""
    short = name.rpartition(".")[2]
    if "." in name and short in known:
        return f"; write '{short}'"
    written = _FUNCTIONS.get(short)
    return f"; write {written}" if written else suggest(short, known)


def attribute_hint(node: ast.Attribute, functions: Collection[str]) -> str:
    """Hint for ``torch.inf`` or ``x.shape``; empty if nothing is known."""
    if node.attr in functions:
        return f"; write '{node.attr}(x)'"
    if node.attr in ("inf", "pi"):
        return f"; write {'inf' if node.attr == 'inf' else _NAMES['pi']}"
    return ""


def foreign_token(text: str, *, broken: bool) -> tuple[str, int, int] | None:
    """The first token of another language: what is wrong with it, and its columns.

    Words are looked for in a ``broken`` text only, where none can be a name that is meant.
    """
    matches = [
        (match, written)
        for pattern, written in (*_TOKENS, *(_WORDS if broken else ()))
        if (match := pattern.search(text))
    ]
    if not matches:
        return None
    match, written = min(matches, key=lambda one: one[0].start())
    return f"'{match[0]}' is not part of the language; write {written}", match.start(), match.end()


def extent_meant(name: str, known: Collection[str]) -> str | None:
    """The known extent that a new one is probably a misspelling of, or None."""
    meant = _EXTENTS.get(name.replace("_", "").lower())
    if meant is not None:
        return meant
    near = suggest(name, known, cutoff=0.8)
    return near.split("'")[1] if near else None
