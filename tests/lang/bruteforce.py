"""Evaluate masks and emitted bounds element by element, and write random masks: the judge of the tile analysis."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from attngen.errors import SpecError
from attngen.lang.bands import Bands, bands, classify
from attngen.lang.check import compile_variant
from attngen.lang.facts import KV_START, Q_START, Facts
from attngen.lang.ir import OPERATORS, Const, Expr, Load, Op, Search, Type, Var, walk
from attngen.lang.printing import canonical
from attngen.lang.segments import Segments, segments
from attngen.lang.simplify import FOLD, result_type
from attngen.lang.statistics import Statistic, separated
from attngen.lang.variant import Monotone, Scalar, Tensor

Env = Mapping[str, float]
Arrays = Mapping[str, np.ndarray]

INT32 = range(-(2**31), 2**31)
INT64 = range(-(2**63), 2**63)


class UnguardedError(Exception):
    """The mask reads outside a tensor where nothing guards it: it has no meaning, so nothing is checked."""


def evaluate(expr: Expr, env: Env, arrays: Arrays) -> float:
    """Evaluate as emitted scalar code does: all operands, loads outside the extent give 0, int32 must not overflow."""
    match expr:
        case Const(value=value):
            return value
        case Var(name=name):
            return env[name]
        case Load(tensor=name, indices=indices):
            place = tuple(int(evaluate(i, env, arrays)) for i in indices)
            inside = all(0 <= i < n for i, n in zip(place, arrays[name].shape, strict=True))
            return arrays[name][place].item() if inside else 0
        case Search():
            return _search(expr, env, arrays)
    value = _apply(expr, [evaluate(a, env, arrays) for a in expr.args])
    if expr.type is Type.INT:
        assert value in (INT64 if expr.wide else INT32), f"overflow in {expr}"
    return value


def _apply(expr: Op, args: list[float]) -> float:
    if expr.op in ("floordiv", "mod") and args[1] == 0:
        return 0  # only where a guard drops it
    if expr.type is Type.FLOAT:
        with np.errstate(all="ignore"):
            return np.float32(FOLD[expr.op](*(np.float32(a) for a in args))).item()
    return FOLD[expr.op](*args)


def _search(expr: Search, env: Env, arrays: Arrays) -> int:
    array = arrays[expr.tensor]
    others = [int(evaluate(i, env, arrays)) for i in expr.indices]
    length, value = int(evaluate(expr.length, env, arrays)), evaluate(expr.value, env, arrays)
    assert 0 <= length <= array.shape[expr.axis], "a search beyond the tensor"
    for axis, index in enumerate(others):
        if axis != expr.axis and not 0 <= index < array.shape[axis]:
            return 0
    others[expr.axis] = slice(0, length)
    return int(np.searchsorted(array[tuple(others)], value, side="right" if expr.strict else "left"))


# --- the meaning of a mask: arrays over (h, q, kv), with guards ---------------------------------------------


def mask_of(mask: Expr, env: Env, arrays: Arrays, heads: int) -> np.ndarray:
    """Return the mask as a bool array (heads, seqlen_q, seqlen_k); raises UnguardedError."""
    h, q, kv = np.meshgrid(np.arange(heads), np.arange(env["seqlen_q"]), np.arange(env["seqlen_k"]), indexing="ij")
    grid = {**env, "h": h, "q": q, "kv": kv, "q_pos": q + env["seqlen_k"] - env["seqlen_q"]}
    grid |= {"q_global": q + env[Q_START.name], "kv_global": kv + env[KV_START.name]}
    with np.errstate(all="ignore"):
        value, valid = _meaning(mask, grid, arrays)
    if not np.all(valid):
        raise UnguardedError
    return np.broadcast_to(value, h.shape).astype(bool)


_ROUNDED = {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.rint}
_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    **{op: rule for op, rule in FOLD.items() if op not in ("min", "max", "to_float", "to_int", *_ROUNDED)},
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
    "eq": np.equal,
    "ne": np.not_equal,
    "min": np.minimum,
    "max": np.maximum,
    "select": np.where,
    **_ROUNDED,
    "to_float": np.float32,
    "to_int": np.vectorize(FOLD["to_int"], otypes=[np.int64]),
}


def _meaning(expr: Expr, grid: Mapping[str, np.ndarray], arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Return value and whether it is defined; ``and``, ``or`` and ``select`` drop what they do not need."""
    match expr:
        case Const(value=value, type=type):
            return np.asarray(np.float32(value) if type is Type.FLOAT else value), np.asarray(True)
        case Var(name=name, type=type):
            return np.asarray(grid[name], np.float32 if type is Type.FLOAT else None), np.asarray(True)
        case Load(tensor=name, indices=indices):
            parts = [_meaning(i, grid, arrays) for i in indices]
            valid = np.asarray(True)
            for (value, defined), extent in zip(parts, arrays[name].shape, strict=True):
                valid = valid & defined & (value >= 0) & (value < extent)
            place = tuple(np.where(valid, value, 0).astype(np.int64) for value, _ in parts)
            return arrays[name][place], valid
    assert isinstance(expr, Op)
    parts = [_meaning(a, grid, arrays) for a in expr.args]
    values, defined = [p[0] for p in parts], [p[1] for p in parts]
    if expr.op in ("and", "or"):
        needed = values[0] if expr.op == "and" else np.logical_not(values[0])
        valid = defined[0] & (~needed.astype(bool) | defined[1])
    elif expr.op == "select":
        valid = defined[0] & np.where(values[0], defined[1], defined[2])
    else:
        valid = np.logical_and.reduce(np.broadcast_arrays(*defined))
    if expr.op in ("floordiv", "mod"):
        valid = valid & (values[1] != 0)
        values[1] = np.where(values[1] == 0, 1, values[1])
    value = np.asarray(_NUMPY[expr.op](*values))
    return value.astype(np.float32) if expr.type is Type.FLOAT else value, valid


# --- random masks -------------------------------------------------------------------------------------------

SCALARS = (
    Scalar("window", "int32", min=1),
    Scalar("shift", "int32"),
    Scalar("step", "int32", min=1, max=2**20),
    Scalar("back", "int32", min=-(2**20), max=-1),
    Scalar("big", "int64"),
    Scalar("flag", "bool"),
    Scalar("gain", "fp32"),
)
TENSORS = (
    Tensor("doc", "int32", ("b", "seqlen_k"), Monotone(1)),
    Tensor("token", "int64", ("n",), Monotone(0)),
    Tensor("length", "int32", ("b",)),
    Tensor("reach", "int32", ("h",), range=(0, 9)),
    Tensor("pad", "bool", ("b", "seqlen_k")),
    Tensor("row", "bool", ("seqlen_q",)),
    Tensor("sparse", "bool", ("seqlen_q", "seqlen_k")),
    Tensor("bias", "fp32", ("seqlen_k",)),
)
FACTS = Facts.declared(SCALARS, TENSORS)

#: Scalars of a spec with random masks: these read the extent of a tensor by its name, which a spec declares.
DECLARED_SCALARS = (*SCALARS, Scalar("n", "int32", min=1, max=1000))

_TYPES = {"int32": Type.INT, "int64": Type.INT, "bool": Type.BOOL, "fp32": Type.FLOAT}
_DECLARED = {d.name: _TYPES[d.dtype] for d in (*SCALARS, *TENSORS)}


def op(name: str, *args: Expr) -> Op:
    """Return an operator without any simplification."""
    return Op(name, args, result_type(name, args))


def var(name: str) -> Var:
    return Var(name, _DECLARED.get(name, Type.INT))


def const(value: bool | int | float) -> Const:
    return Const(value, {bool: Type.BOOL, int: Type.INT, float: Type.FLOAT}[type(value)])


def load(tensor: str, *indices: Expr) -> Load:
    return Load(tensor, indices, _DECLARED[tensor])


@dataclass
class Masks:
    """Writes random masks, most of which mean something."""

    random: random.Random
    _names: tuple[str, ...] = ("q", "kv", "q_pos", "q_pos", "kv", "kv")

    def mask(self, depth: int) -> Expr:
        """A mask that a spec may have: no integer of it can leave int64."""
        while True:
            mask = self.boolean(depth)
            try:
                compile_variant("random", canonical(mask), None, DECLARED_SCALARS, TENSORS)
            except SpecError as error:
                if "beyond int64" not in error.message:
                    raise
                continue
            return mask

    def boolean(self, depth: int) -> Expr:
        r = self.random
        if depth <= 0:
            return self._condition()
        match r.randrange(12):
            case 0 | 1 | 2:
                return op("and", self.boolean(depth - 1), self.boolean(depth - 1))
            case 3 | 4:
                return op("or", self.boolean(depth - 1), self.boolean(depth - 1))
            case 5:
                return op("not", self.boolean(depth - 1))
            case 6:
                return op(r.choice(["xor", "eq", "ne"]), self.boolean(depth - 1), self.boolean(depth - 1))
            case 7:
                return op("select", *(self.boolean(depth - 1) for _ in range(3)))
            case 8:
                index = self.number(1)
                guard = op("and", op("le", const(0), index), op("lt", index, var("n")))
                return op("and", guard, op(self._order(), load("token", index), self.number(1)))
        return self._condition()

    def _order(self) -> str:
        return self.random.choice(["lt", "le", "gt", "ge", "lt", "le", "gt", "ge", "eq", "ne"])

    def _condition(self) -> Expr:
        r = self.random
        match r.randrange(14):
            case 0:
                return var("flag")
            case 1:
                return r.choice([load("pad", var("b"), var("kv")), load("row", var("q")), const(r.random() < 0.5)])
            case 2:
                return op(self._order(), self.real(1), self.real(1))
            case 3:
                a, b = (load("doc", var("b"), var(r.choice(["kv", "q_pos", "kv"]))) for _ in range(2))
                return op("and", op("ge", var("q_pos"), r.choice([var("kv"), const(0)])), op(self._order(), a, b))
        return op(self._order(), self.number(2), self.number(2))

    def real(self, depth: int) -> Expr:
        r = self.random
        match r.randrange(8) if depth else r.randrange(4):
            case 0:
                return var("gain")
            case 1:
                return load("bias", var("kv"))
            case 2:
                return const(r.choice([0.0, -1.5, 4.0, math.inf]))
            case 3:
                return op("to_float", self.number(1))
            case 4:
                return op(r.choice(["neg", "abs", "floor", "trunc", "round"]), self.real(depth - 1))
            case 5:
                return op("select", self._condition() if depth > 1 else var("flag"), *(self.real(0) for _ in "ab"))
        return op(r.choice(["min", "max", "add", "mul"]), self.real(depth - 1), self.real(depth - 1))

    def number(self, depth: int) -> Expr:
        r = self.random
        if depth <= 0:
            return self._leaf()
        match r.randrange(16):
            case 0 | 1 | 2:
                return op("sub", self.number(depth - 1), self.number(depth - 1))
            case 3 | 4:
                return op("add", self.number(depth - 1), self.number(depth - 1))
            case 5:
                factor = r.choice([const(r.choice([-3, -1, 2, 3])), self._divisor()])
                return op("mul", self.number(depth - 1), factor)
            case 6 | 7:
                return op("floordiv", self.number(depth - 1), self._divisor())
            case 8:
                return op("mod", self.number(depth - 1), self._divisor())
            case 9:
                return op(r.choice(["abs", "neg", "invert"]), self.number(depth - 1))
            case 10:
                return op(r.choice(["min", "max"]), self.number(depth - 1), self.number(depth - 1))
            case 11:
                return op("select", self.boolean(0), self.number(depth - 1), self.number(depth - 1))
            case 12:
                bits = r.choice([("rshift", 2), ("lshift", 1), ("bitand", 7), ("bitor", 5), ("bitxor", 3)])
                return op(bits[0], self.number(depth - 1), const(bits[1]))
            case 13:
                return r.choice([
                    op("to_int", self._condition()), op("mul", *(self._leaf(),) * 2), op("to_int", self.real(depth)),
                ])  # fmt: skip
        return self._leaf()

    def _divisor(self) -> Expr:
        r = self.random
        return r.choice([const(r.choice([1, 2, 3, 4, 8, -2])), var("step"), var("back"), op("add", var("q"), const(1))])

    def _leaf(self) -> Expr:
        r = self.random
        match r.randrange(12):
            case 0 | 1:
                return const(r.randrange(-4, 12))
            case 2:
                return var(r.choice(["window", "shift", "step", "big"]))
            case 3:
                return var(r.choice(["b", "h", "seqlen_q", "seqlen_k", "q_global", "kv_global"]))
            case 4:
                return r.choice([load("length", var("b")), load("reach", var("h"))])
        return var(r.choice(self._names))


@dataclass
class World:
    """Lengths, scalars and tensors of one call."""

    env: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    heads: int = 3

    @classmethod
    def random(cls, r: random.Random) -> World:
        q, k = r.randrange(14), r.randrange(20)
        small, huge = r.randrange(-3, 15), [-(2**31), 2**31 - 1, 2**30]
        env: dict[str, float] = {
            "b": r.randrange(2),
            "seqlen_q": q,
            "seqlen_k": k,
            Q_START.name: r.choice([0, 7]),
            KV_START.name: r.choice([0, 5]),
            "heads": cls.heads,
            "n": r.randrange(1, 25),
            "window": max(1, r.choice([small, small, *huge])),
            "shift": r.choice([small, small, small, *huge]),
            "step": r.choice([1, 2, 3, 4, 5, 8, 2**20]),
            "back": r.choice([-1, -2, -5, -(2**20)]),
            "big": r.choice([small, small, -(2**63), 2**63 - 1, 2**40]),
            "flag": r.random() < 0.5,
            "gain": r.choice([math.nan, math.inf, -math.inf, 0.5, 3.0, -2.0]),
        }
        n = np.random.default_rng(r.randrange(2**31))
        room = r.choice([0, 0, 3])  # the tensor may be longer than the sequence
        reals = n.choice(np.array([math.nan, math.inf, -math.inf, 0.0, 4.0, -1.5], np.float32), k + room)
        arrays = {
            "doc": np.sort(n.integers(-2, 4, (2, k + room)), axis=1),
            "token": np.sort(n.choice([-(2**63), -3, 0, 1, 2, 5, 9, 2**63 - 1], int(env["n"]))),
            "length": n.integers(-2, k + 2, 2),
            "reach": n.integers(0, 10, cls.heads),
            "pad": n.integers(0, 2, (2, k + room)).astype(bool),
            "row": n.integers(0, 2, q).astype(bool),
            "sparse": n.integers(0, 2, (q, k)).astype(bool),
            "bias": reals,
        }
        return cls(env, arrays)

    def boxes(self, name: str, length: str, r: random.Random) -> Iterator[tuple[int, int]]:
        """Yield the tiles of one random size, and one tile from anywhere."""
        extent, size = int(self.env[length]), r.choice([1, 2, 3, 4, 7, 16])
        for lo in range(0, extent, size):
            yield lo, min(lo + size, extent) - 1
        if extent:
            yield tuple(sorted(r.randrange(extent) for _ in "ab"))

    def corners(self, q: tuple[int, int] | None = None, kv: tuple[int, int] | None = None, h: int | None = None) -> Env:
        """Return the symbols of a box; all heads where ``h`` is None."""
        env = dict(self.env)
        if q is not None:
            shift = self.env["seqlen_k"] - self.env["seqlen_q"]
            env |= {"q_lo": q[0], "q_hi": q[1], "q_pos_lo": q[0] + shift, "q_pos_hi": q[1] + shift}
        if kv is not None:
            env |= {"kv_lo": kv[0], "kv_hi": kv[1]}
        return env | ({"h_lo": 0, "h_hi": self.heads - 1} if h is None else {"h": h})


# --- what must hold -----------------------------------------------------------------------------------------


def check_classify(mask: Expr, world: World, r: random.Random, facts: Facts = FACTS) -> tuple[int, int]:
    """Check every tile of a random tiling; return how many were found empty and full."""
    truth = mask_of(mask, world.env, world.arrays, world.heads)
    counts = [0, 0]
    for heads in ("single", "packed"):
        may, must = classify(mask, facts, heads)
        check_types(may, must)
        kvs = list(world.boxes("kv", "seqlen_k", r))
        for q, kv in itertools.product(world.boxes("q", "seqlen_q", r), kvs):
            for h in range(world.heads) if heads == "single" else [None]:
                env = world.corners(q, kv, h)
                tile = truth[slice(None) if h is None else h, ..., q[0] : q[1] + 1, kv[0] : kv[1] + 1]
                if not evaluate(may, env, world.arrays):
                    counts[0] += 1
                    assert not tile.any(), "a wrong empty"
                if evaluate(must, env, world.arrays):
                    counts[1] += 1
                    assert tile.all(), "a wrong full"
    return counts[0], counts[1]


def check_statistics(mask: Expr, world: World, r: random.Random, facts: Facts = FACTS) -> tuple[int, int]:
    """Check every tile of a random tiling by statistics of its queries and keys; return how many were empty, full."""
    truth = mask_of(mask, world.env, world.arrays, world.heads)
    parts = separated(mask, facts)
    may, must = classify(parts.mask, facts, statistics=parts.statistics)
    check_types(may, must)
    counts = [0, 0]
    kvs = list(world.boxes("kv", "seqlen_k", r))
    for q, kv in itertools.product(world.boxes("q", "seqlen_q", r), kvs):
        for h in range(world.heads):
            env = {**world.corners(q, kv, h)}
            for each in parts.statistics:
                first, last = q if each.axis == "q" else kv
                env |= known_of(each, env, world, range(first, last + 1))
            tile = truth[h, q[0] : q[1] + 1, kv[0] : kv[1] + 1]
            if not evaluate(may, env, world.arrays):
                counts[0] += 1
                assert not tile.any(), "a wrong empty"
            if evaluate(must, env, world.arrays):
                counts[1] += 1
                assert tile.all(), "a wrong full"
    return counts[0], counts[1]


def known_of(each: Statistic, env: Env, world: World, positions: range) -> dict[str, float]:
    """Return the ends and the residues of a statistic over these queries or keys that meet its guard, as a kernel finds
    them: it ignores NaN and says so."""
    shift = env["seqlen_k"] - env["seqlen_q"]
    values = []
    for at in positions:
        own = {"q": at, "q_pos": at + shift, "q_global": at + env[Q_START.name]} if each.axis == "q" else {
            "kv": at, "kv_global": at + env[KV_START.name]}  # fmt: skip
        if evaluate(each.guard, {**env, **own}, world.arrays):
            values.append(evaluate(each.value, {**env, **own}, world.arrays))
    numbers = [value for value in values if value == value] or [float(each.anything)]
    ends = dict(zip((end.name for end in each.ends), (min(numbers), max(numbers)), strict=True))
    residues = sum({1 << int(value) % 32 for value in numbers}) if each.value.type is Type.INT else 0
    residues -= residues >> 31 << 32  # a word of int32
    return {**ends, each.residues.name: residues, each.numbers.name: all(value == value for value in values)}


def check_types(*results: Expr | None) -> None:
    """Check that every operator has the type that its arguments give it."""
    for result in results:
        for node in walk(result) if result is not None else ():
            assert not isinstance(node, Op) or node.type is result_type(node.op, node.args), node


def positions(intervals: tuple, env: Env, arrays: Arrays, extent: int) -> np.ndarray:
    """Positions of an axis that lie in any of the intervals."""
    inside = np.zeros(extent, bool)
    for interval in intervals:
        lo = 0 if interval.lo is None else max(int(evaluate(interval.lo, env, arrays)), 0)
        hi = extent if interval.hi is None else max(int(evaluate(interval.hi, env, arrays)), 0)
        inside[lo:hi] = True
    return inside


def check_bands(mask: Expr, world: World, r: random.Random, facts: Facts = FACTS) -> None:
    """Check bands over both axes, for single and packed heads, and the segments that follow from them."""
    truth = mask_of(mask, world.env, world.arrays, world.heads)
    for over, heads in itertools.product(("kv", "q"), ("single", "packed")):
        intervals = bands(mask, facts, over, heads)
        length = "seqlen_k" if over == "kv" else "seqlen_q"
        other = "q" if over == "kv" else "kv"
        view = truth if over == "kv" else truth.transpose(0, 2, 1)
        tile = r.choice([1, 2, 3, 4, 8])
        cut = segments(intervals, tile, var(length), facts)
        check_types(*(end for part in (cut.full, cut.partial) for ends in part for end in ends))
        for box in world.boxes(other, "seqlen_q" if over == "kv" else "seqlen_k", r):
            for h in range(world.heads) if heads == "single" else [None]:
                env = world.corners(**{other: box}, h=h)
                rows = view[slice(None) if h is None else slice(h, h + 1), box[0] : box[1] + 1]
                extent = int(world.env[length])
                visible = positions(intervals.visible, env, world.arrays, extent)
                full = positions(intervals.full, env, world.arrays, extent)
                assert not (rows.any((0, 1)) & ~visible).any(), f"{over}: a visible position is lost"
                assert not (full & ~rows.all((0, 1))).any(), f"{over}: a wrong full position"
                check_segments(intervals, cut, tile, env, world.arrays, extent)


def check_segments(intervals: Bands, cut: Segments, tile: int, env: Env, arrays: Arrays, extent: int) -> None:
    """Check that the segments cover each visible tile once, and that full tiles are full as far as bands say."""
    visible, full = (positions(i, env, arrays, extent) for i in (intervals.visible, intervals.full))
    tiles = -(-extent // tile)
    visits = np.zeros(tiles, int)
    whole = np.zeros(tiles, bool)
    for kind in ("full", "partial"):
        before = 0
        for ends in getattr(cut, kind):
            lo, hi = (int(evaluate(end, env, arrays)) for end in ends)
            if lo < hi:
                assert before <= lo, "not ascending"
                assert hi <= tiles, "outside the extent"
                before = hi
                visits[lo:hi] += 1
                whole[lo:hi] |= kind == "full"
    for n in range(tiles):
        span = slice(n * tile, min((n + 1) * tile, extent))
        assert visits[n] <= 1, "a tile runs twice"
        assert visits[n] == 1 or not visible[span].any(), "a tile is lost"
        assert not whole[n] or visible[span].all(), "a full tile that is not"
        if len(intervals.visible) == len(intervals.full) == 1 and full[span].all():
            assert whole[n] or span.stop - span.start < tile, "a full tile runs as partial"


assert set(OPERATORS) >= set(FOLD)
