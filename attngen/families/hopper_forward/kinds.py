"""The kinds of softmax of the Hopper forward: a row for each template of ``hopper_forward/softmax``."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.dtypes import PROBABILITY_DTYPE
from attngen.families.hopper_forward.structure import HopperForward
from attngen.plan.model import Plan

#: Dtypes of P.
_HALF, _EIGHT_BITS = ("bf16", "fp16"), (PROBABILITY_DTYPE,)
_ALL = (*_HALF, *_EIGHT_BITS)


@dataclass(frozen=True, slots=True)
class SoftmaxKind:
    """A kind of softmax: what plans and ``attngen explain`` know of it beside its template.

    ``softmax`` is the value of a spec's field, or weights that are no softmax; ``form`` what the plan makes of it where
    the score permits: relative, capped or powers, or where a work tile has several batch entries. ``file`` is its
    template in ``hopper_forward/softmax``, ``logits`` the file of its ``finish_logits`` in ``hopper_forward/logits``.
    ``label`` stands in names of kernels.
    ``explanation`` says how P of a step is made, ``first_tile`` what makes that of the first tile. ``dtypes`` are those
    of P, and ``header`` has its own functions, if it has any. ``exponentials`` counts operations of the MUFU for an
    element of P. With ``cuts``, query tiles may be cut into parts, whose results are merged. ``has_lse``: rows have a
    log-sum-exp, and blocks may share their keys; without it a kernel has no such argument.
    """

    softmax: str
    form: str
    file: str
    explanation: str
    label: str = ""
    logits: str = "branches"
    first_tile: str = "maximum and exponentials make"
    dtypes: tuple[str, ...] = _HALF
    header: str = ""
    exponentials: int = 1
    cuts: bool = True
    has_lse: bool = True

    def explain(self, forward: HopperForward) -> str:
        """Text of how P of a step is made."""
        below = forward.recompute_below.rstrip("f")
        return self.explanation.format(
            above=forward.recompute_above,
            growth=forward.recompute_growth.rstrip("f"),
            raised=f"{float(forward.raise_above.rstrip('f')):g}",
            fixed_max=forward.fixed_max.rstrip("f"),
            degree=len(forward.terms) - 1,
            few=f" that left a lane a sum below {below}" if below else "",
        )


_OLD_MAX = (
    "P(j) from the old row max; recomputed from a new one if a lane's sum exceeds {above} or grows {growth} times"
)
_FEW = "; from a new maximum after a partial first tile{few}"
_CAPPED = "; in tiles without a mask tanh is a polynomial of the products while no argument is large"
_RELATIVE = "; logits are relative to the row max, which a term of the score subtracts"
_TRACKED = "; lanes keep the largest P of their keys besides"
_ENTRIES = "; one vote for the rows of all batch entries"
_LAZY = "maximum; O is rescaled only if it has grown by 2^{raised}; exponentials make P(j)"
_CONSTANT = "exponentials make P(j) from a constant, {fixed_max}, in place of row maxima: the score is bounded"
_SIGMOID = "P(j) is the sigmoid of each logit, whatever others are"
_NO_MAX = "exponentials make"
_POWERS = "; in tiles without a mask P(j) is a polynomial of degree {degree}"

#: The template of each has these macros: ``constants``; ``declare`` and ``offset``, the state of two rows, and what
#: logits are relative to; ``first`` and ``step``, P of the first tile and of others; ``normalize``, the factors of O in
#: the end; with a log-sum-exp ``lse``, ``state`` and ``merge``: itself, what partial results hold, what normalizes
#: their sum; and in kinds of ``HopperForward.bounds_tiles`` ``bound``, the least logits of a tile.
KINDS = (
    SoftmaxKind("first_max", "", "first_max", _OLD_MAX),
    SoftmaxKind("first_max", "", "first_max_8_bits", _OLD_MAX + _FEW, dtypes=_EIGHT_BITS),
    SoftmaxKind("first_max", "relative", "first_max_relative", _OLD_MAX + _RELATIVE),
    SoftmaxKind("first_max", "relative", "first_max_relative_8_bits", _OLD_MAX + _RELATIVE + _FEW, dtypes=_EIGHT_BITS),
    SoftmaxKind("first_max", "capped", "first_max_capped", _OLD_MAX + _CAPPED, logits="capped"),
    SoftmaxKind(
        "first_max", "capped", "first_max_capped_8_bits", _OLD_MAX + _CAPPED + _FEW, "", "capped", dtypes=_EIGHT_BITS
    ),
    SoftmaxKind(
        "first_max", "entries", "first_max_entries", _OLD_MAX + _ENTRIES, logits="branches_entries", cuts=False
    ),
    SoftmaxKind("first_max", "tracked", "first_max_tracked", _OLD_MAX + _TRACKED, header="largest_p"),
    SoftmaxKind("lazy", "", "lazy", _LAZY, "lazy", dtypes=_ALL),
    SoftmaxKind("exact_max", "", "exact_max", "maximum, O rescaled, exponentials make P(j)", "exactmax", dtypes=_ALL),
    SoftmaxKind("bounded", "", "bounded", _CONSTANT, "bounded", "fused", _NO_MAX, cuts=False),
    SoftmaxKind("bounded", "capped", "bounded_capped", _CONSTANT + _CAPPED, "bounded", "capped", _NO_MAX, cuts=False),
    SoftmaxKind("bounded", "powers", "bounded_powers", _CONSTANT + _POWERS, "bounded", "powers", _NO_MAX, cuts=False),
    SoftmaxKind(
        "sigmoid",
        "",
        "sigmoid",
        _SIGMOID,
        first_tile="sigmoids make",
        header="sigmoid",
        exponentials=2,
        cuts=False,
        has_lse=False,
    ),
)

#: Values of a spec's ``softmax``, and of a variant's ``weights``.
SOFTMAXES = tuple(dict.fromkeys(kind.softmax for kind in KINDS if kind.has_lse))
WEIGHTS = ("softmax", *(kind.softmax for kind in KINDS if not kind.has_lse))


def kind_of(softmax: str, form: str, p: str) -> SoftmaxKind:
    """The kind of a value of ``softmax`` in one of its forms, with P in the dtype ``p``."""
    return next(kind for kind in KINDS if (kind.softmax, kind.form) == (softmax, form) and p in kind.dtypes)


def form_of(
    *, terms: tuple[float, ...], capped: bool, relative: bool, entries: int, softmax: str, max_logits: bool
) -> str:
    """The form of a softmax, by fields of ``HopperForward``, and whether the largest logits are a result."""
    if max_logits:
        return "tracked" if softmax == "first_max" else ""
    if entries > 1:
        return "entries"
    return "capped" if capped else "powers" if terms else "relative" if relative else ""


def kind_of_structure(forward: HopperForward, p: str, *, max_logits: bool) -> SoftmaxKind:
    """The kind of softmax of a structure, with P in the dtype ``p``; with ``max_logits`` they are a result."""
    form = form_of(
        terms=forward.terms, capped=forward.capped, relative=forward.relative, entries=forward.entries,
        softmax=forward.softmax, max_logits=max_logits,
    )  # fmt: skip
    return kind_of(forward.softmax, form, p)


def kind_of_plan(plan: Plan) -> SoftmaxKind:
    """The kind of softmax of a Hopper forward."""
    assert isinstance(plan.structure, HopperForward)
    return kind_of_structure(plan.structure, plan.operands.p.name, max_logits=plan.variant.max_logits)
