"""Expressions in eager torch: the reference that generated code is measured against, in any float type.

Integers are int64 here, so nothing overflows. Differentiable: a branch that is not taken contributes neither a value
nor a gradient, whatever NaN or infinity it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attngen.lang.ir import Const, Expr, Load, Op, Search, Type, Var, walk

if TYPE_CHECKING:
    import torch

#: A condition and whether it holds; a node is evaluated under a chain of them.
_Guards = tuple[tuple[Expr, bool], ...]


def evaluate(
    expr: Expr,
    env: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | None = None,
    float_dtype: torch.dtype | None = None,
    guard: torch.Tensor | None = None,
    *,
    checked: bool = True,
) -> torch.Tensor:
    """Return the value of an expression, broadcast over the values of ``env``.

    ``env`` maps every variable to a number or a tensor (index grids, ``s``), ``tensors`` every declared tensor.
    ``float_dtype`` (default float32) is the type of all float arithmetic. ``guard`` says where the value is wanted
    at all, for instance the mask under which a score is read.

    Raises IndexError, naming the tensor, for an index out of extent where the value is wanted; it is 0 elsewhere.
    Unless ``checked``, it is 0 there too, as in kernels, and nothing waits for a GPU.
    Autograd flows to ``s``, to scalars and to float tensors.
    """
    import torch

    evaluation = _Evaluation(env, tensors or {}, float_dtype or torch.float32, guard, checked)
    with_guard: _Guards = ()
    return evaluation.value(expr, with_guard)


class _Evaluation:
    """One run: values are kept per node and per chain of conditions, where these matter."""

    def __init__(
        self,
        env: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        float_dtype: torch.dtype,
        guard: torch.Tensor | None,
        checked: bool,
    ) -> None:
        import torch

        self.torch = torch
        self.checked = checked
        self.tensors = tensors
        self.types = {Type.BOOL: torch.bool, Type.INT: torch.int64, Type.FLOAT: float_dtype}
        given = [value for value in (*env.values(), *tensors.values()) if isinstance(value, torch.Tensor)]
        # Everything is computed on the device of the index grids; numbers and 0-d CPU tensors are moved there.
        self.device = next((t.device for t in given if t.device.type != "cpu"), torch.device("cpu"))
        self.env = env
        self.guard = guard
        self.operators = _operators()
        self._values: dict[tuple[Expr, _Guards], torch.Tensor] = {}
        self._sensitive: dict[Expr, bool] = {}

    def value(self, node: Expr, guards: _Guards) -> torch.Tensor:
        """Return the value of a node under a chain of conditions."""
        if not self._guarded(node):
            guards = ()
        key = (node, guards)
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = self._compute(node, guards)
        return value

    def _compute(self, node: Expr, guards: _Guards) -> torch.Tensor:
        torch = self.torch
        match node:
            case Const(value=value, type=type):
                return torch.full((), value, dtype=self.types[type], device=self.device)
            case Var(name=name, type=type):
                value = self.env[name]
                if not isinstance(value, torch.Tensor):  # filled on the device: a copy would synchronize
                    return torch.full((), value, dtype=self.types[type], device=self.device)
                return self._gate(value.to(self.device, self.types[type]), guards)
            case Load():
                return self._load(node, guards)
            case Search():
                raise NotImplementedError("searches belong to the band analysis and have no eager form")
            case Op(op="and" | "or" as op, args=(a, b)):
                left = self.value(a, guards)
                right = self.value(b, (*guards, (a, op == "and")))
                return left & right if op == "and" else left | right
            case Op(op="select", args=(condition, a, b)):
                chosen = self.value(condition, guards)
                yes = self.value(a, (*guards, (condition, True)))
                no = self.value(b, (*guards, (condition, False)))
                return torch.where(chosen, yes, no)
            case Op(op=op, args=args):
                clamp = as_clamp(node)
                if clamp is not None and node.type is Type.FLOAT:
                    return torch.clamp(*torch.broadcast_tensors(*(self.value(part, guards) for part in clamp)))
                if op == "to_float":
                    return self.value(args[0], guards).to(self.types[Type.FLOAT])
                if op == "pow" and isinstance(args[1], Const):
                    return torch.pow(self.value(args[0], guards), args[1].value)
                return self.operators[op](*(self.value(arg, guards) for arg in args))
        raise TypeError(f"not an expression: {node!r}")

    def _load(self, node: Load, guards: _Guards) -> torch.Tensor:
        torch = self.torch
        tensor = self.tensors[node.tensor].to(self.device)
        if not node.indices:
            return self._gate(tensor.to(self.types[node.type]), guards)
        indices = torch.broadcast_tensors(*(self.value(index, guards) for index in node.indices))
        inside = torch.ones_like(indices[0], dtype=torch.bool)
        for axis, index in enumerate(indices):
            within = (index >= 0) & (index < tensor.shape[axis])
            if self.checked:
                self._require(node.tensor, axis, index, tensor.shape[axis], within, guards)
            inside = inside & within
        if tensor.numel() == 0:
            return torch.zeros(indices[0].shape, dtype=self.types[node.type], device=self.device)
        safe = tuple(torch.where(inside, index, 0) for index in indices)
        value = tensor[safe].to(self.types[node.type])
        return self._gate(torch.where(inside, value, torch.zeros_like(value)), guards)

    def _require(
        self,
        name: str,
        axis: int,
        index: torch.Tensor,
        extent: int,
        within: torch.Tensor,
        guards: _Guards,
    ) -> None:
        """Raise IndexError for the first index that is wanted and lies outside its axis."""
        wanted = self._wanted(guards)
        bad = ~within if wanted is None else ~within & wanted
        if bool(bad.any()):
            first = index.expand(bad.shape)[bad][0].item()
            raise IndexError(
                f"tensor '{name}': index {first} is out of range for axis {axis} with extent {extent}; "
                f"guard the access (x if condition else y) or clamp the index"
            )

    def _wanted(self, guards: _Guards) -> torch.Tensor | None:
        """Mask of the places where a value under these conditions is wanted; None is everywhere."""
        wanted = self.guard
        for i, (condition, holds) in enumerate(guards):
            chosen = self.value(condition, guards[:i])
            chosen = chosen if holds else ~chosen
            wanted = chosen if wanted is None else wanted & chosen
        return wanted

    def _gate(self, value: torch.Tensor, guards: _Guards) -> torch.Tensor:
        """Block the gradient where the value is not wanted: 0 * inf in a branch not taken would be NaN."""
        if not (value.requires_grad and self.torch.is_grad_enabled()):
            return value
        wanted = self._wanted(guards)
        if wanted is None:
            return value
        shape = self.torch.broadcast_shapes(value.shape, wanted.shape)
        gated = value.expand(shape).clone()
        # autograd passes None where no gradient arrives at all
        torch = self.torch  # the hook must not keep self, which has the tensor: no garbage collector sees that cycle
        gated.register_hook(lambda g: None if g is None else torch.where(wanted, g, 0.0))
        return gated

    def _guarded(self, node: Expr) -> bool:
        """Whether conditions matter below a node: only loads and what carries a gradient depend on them."""
        sensitive = self._sensitive.get(node)
        if sensitive is None:
            sensitive = any(isinstance(n, Load) or (isinstance(n, Var) and n.type is Type.FLOAT) for n in walk(node))
            self._sensitive[node] = sensitive
        return sensitive


def as_clamp(node: Expr) -> tuple[Expr, Expr, Expr] | None:
    """Return (value, low, high) of ``clamp``, which the parser writes as ``min(max(value, low), high)``."""
    match node:
        case Op(op="min", args=(Op(op="max", args=(value, low)), high)):
            return value, low, high
    return None


def _operators() -> dict[str, Callable[..., torch.Tensor]]:
    """Return torch's function for each operator that treats all its arguments alike."""
    import torch

    def divide(rounded: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        # Integer division by zero raises in torch; the check has proven that no divisor that matters is zero.
        return lambda a, b: rounded(a, torch.where(b == 0, 1, b))

    def whole(a: torch.Tensor) -> torch.Tensor:
        if a.is_floating_point():  # saturated to int32, as kernels do
            a = torch.nan_to_num(a, 0.0, 2.0**31, -(2.0**31)).clamp(-(2.0**31), 2.0**31)
            return a.to(torch.int64).clamp(max=2**31 - 1)
        return a.to(torch.int64)

    return {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "neg": torch.neg,
        "truediv": torch.true_divide,
        "floordiv": divide(lambda a, b: torch.div(a, b, rounding_mode="floor")),
        "mod": divide(torch.remainder),
        "pow": torch.pow,
        "bitand": torch.bitwise_and,
        "bitor": torch.bitwise_or,
        "bitxor": torch.bitwise_xor,
        "invert": torch.bitwise_not,
        "lshift": torch.bitwise_left_shift,
        "rshift": torch.bitwise_right_shift,
        "lt": torch.lt,
        "le": torch.le,
        "gt": torch.gt,
        "ge": torch.ge,
        "eq": torch.eq,
        "ne": torch.ne,
        "xor": torch.logical_xor,
        "not": torch.logical_not,
        "min": torch.minimum,
        "max": torch.maximum,
        "abs": torch.abs,
        "floor": torch.floor,
        "ceil": torch.ceil,
        "trunc": torch.trunc,
        "round": torch.round,
        "exp": torch.exp,
        "exp2": torch.exp2,
        "log": torch.log,
        "log2": torch.log2,
        "expm1": torch.expm1,
        "log1p": torch.log1p,
        "erf": torch.erf,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "silu": torch.nn.functional.silu,
        "sqrt": torch.sqrt,
        "rsqrt": torch.rsqrt,
        "sin": torch.sin,
        "cos": torch.cos,
        "tan": torch.tan,
        "atan2": torch.atan2,
        "to_int": whole,
    }
