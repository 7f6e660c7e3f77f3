"""Batch entries that share biases: whether a work tile may have the rows of several, and how many share."""

from __future__ import annotations

from attngen.dtypes import QUANTIZED_DTYPES
from attngen.families.hopper_forward.softmax import softmax_of, takes_row_max
from attngen.lang.biases import biases, is_of_pair
from attngen.lang.folding import LOG2E, PRODUCT, SOFTMAX_SCALE, fold_variant
from attngen.lang.ir import Expr, Load, Op, Var, names, rewrite, walk
from attngen.lang.literals import fold_literals
from attngen.lang.simplify import TRUE
from attngen.lang.variant import Variant
from attngen.plan.traits import key_values
from attngen.schema.kernel_spec import KernelSpec, Roles

#: What the loader may read, beside scalars, for a value of a key of a batch entry.
_OF_KEY = frozenset({"b", "h", "hk", "kv"})
#: What a logit may read for a pair, beside scalars.
_OF_PAIR = frozenset({PRODUCT.name, SOFTMAX_SCALE.name, LOG2E.name})


def sharing_scalar(variant: Variant, room: int) -> str | None:
    """The scalar that says how many batch entries in a row have the biases of ``b // scalar``; None if they do not
    share all biases that come as tiles in that ``room``."""
    of_entries = [index for load in biases(variant, room) for index in load.indices[:-2] if "b" in names(index)]
    scalars: set[str] = set()
    for index in of_entries:
        match index:
            case Op(op="floordiv", args=(Var("b"), Var(name=name))) if variant.ranges[name][0] >= 1:
                scalars.add(name)
            case _:
                return None
    return scalars.pop() if len(scalars) == 1 else None


def may_share_entries(spec: KernelSpec, room: int, exponents: tuple[int, int] | None) -> bool:
    """Whether a work tile may have rows of several batch entries, for which consumers read each tile of biases once.

    A pair then depends on its entry by the product and by values of its key alone: every row sees all keys.
    """
    variant, roles = spec.variant, spec.roles or Roles()
    plain = spec.layout == "dense" and not (spec.pack_gqa or spec.split_tiles or spec.dtype in QUANTIZED_DTYPES)
    plain = plain and spec.epilogue != "direct" and roles.overlap is not False
    if not plain or variant.mask != TRUE or variant.dropout or variant.sink is not None:
        return False
    if variant.max_logits or sharing_scalar(variant, room) is None:
        return False
    if softmax_of(spec, exponents)[0] != "first_max" or takes_row_max(spec):
        return False
    return _depends_on_keys_alone(variant, room, fast_math=spec.fast_math)


def _depends_on_keys_alone(variant: Variant, room: int, *, fast_math: bool) -> bool:
    """Whether a logit is made of the product, tiles of biases, values that the loader brings for each key, and
    scalars."""
    scalars = {scalar.name for scalar in variant.arguments}
    of_key = key_values(variant, fast_math=fast_math)
    if any(names(value) - _OF_KEY - scalars for value in of_key.score):
        return False
    tiled = frozenset(biases(variant, room))
    folded = fold_variant(variant, fast_math=fast_math, by_position=True, by_tile=True)

    def known(node: Expr) -> Expr | None:
        return PRODUCT if node in of_key.score or (is_of_pair(node) and node in tiled) else None

    left = [rewrite(rewrite(each, fold_literals), known) for each in (folded.value, folded.multiplier)]
    reads = any(isinstance(node, Load) for each in left for node in walk(each))
    return not reads and all(names(each) <= _OF_PAIR | scalars for each in left)
