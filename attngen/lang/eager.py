"""Expressions in eager torch: the reference that generated code is measured against, in any float type.

Integers are int64 here, so nothing overflows. Gradients are those of kernels (``eager_gradients``): what is not chosen
contributes neither a value nor a gradient, whatever NaN or infinity it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attngen.errors import CallError
from attngen.lang.ir import Const, Expr, Load, Op, Search, Type, Var, walk

if TYPE_CHECKING:
    import torch

#: A condition and whether it holds; a node is evaluated under a chain of them.
_Guards = tuple[tuple[Expr, bool], ...]

#: The least and the greatest element of tensors, by name.
Limits = Mapping[str, tuple[float, float]]


def evaluate(
    expr: Expr,
    env: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | None = None,
    float_dtype: torch.dtype | None = None,
    guard: torch.Tensor | None = None,
    *,
    checked: bool = True,
    limits: Limits | None = None,
) -> torch.Tensor:
    """Return the value of an expression, broadcast over the values of ``env``.

    ``env`` maps every variable to a number or a tensor (index grids, ``s``), ``tensors`` every declared tensor.
    ``float_dtype`` (default float32) is the type of all float arithmetic. ``guard`` says where the value is wanted
    at all, for instance the mask under which a score is read.

    Raises IndexError, naming the tensor, for an index out of extent where the value is wanted; it is 0 elsewhere.
    Raises CallError for an element beyond its tensor's ``limits`` where it is wanted, since kernels trust these.
    Unless ``checked``, an element out of extent is 0 as in kernels, no limit is looked at, and nothing waits for a GPU.
    Autograd flows to ``s``, to scalars and to float tensors.
    """
    import torch

    loaded, dtype = tensors or {}, float_dtype or torch.float32
    if isinstance(expr, Op) and torch.is_grad_enabled() and _learns(expr, env, loaded):
        from attngen.lang.eager_gradients import Differentiable

        def value(expr: Expr, env: Any, tensors: Any, guard: Any) -> torch.Tensor:
            return _Evaluation(env, tensors, dtype, guard, checked, limits).value(expr, ())

        def unchecked(expr: Expr, env: Any, tensors: Any, guard: Any) -> torch.Tensor:
            return evaluate(expr, env, tensors, dtype, guard, checked=False)

        return Differentiable.apply(expr, env, loaded, guard, value, unchecked)
    return _Evaluation(env, loaded, dtype, guard, checked, limits).value(expr, ())


def _learns(expr: Expr, env: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether an expression reads a float that requires a gradient."""
    if expr.type is not Type.FLOAT:
        return False
    leaves = [
        env[node.name] if isinstance(node, Var) else tensors[node.tensor]
        for node in walk(expr)
        if isinstance(node, Var | Load) and node.type is Type.FLOAT
    ]
    return any(getattr(leaf, "requires_grad", False) for leaf in leaves)


class _Evaluation:
    """One run: values are kept per node and per chain of conditions, where these matter."""

    def __init__(
        self,
        env: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        float_dtype: torch.dtype,
        guard: torch.Tensor | None,
        checked: bool,
        limits: Limits | None = None,
    ) -> None:
        import torch

        self.torch = torch
        self.checked = checked
        self.limits = limits or {}
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
                return value.to(self.device, self.types[type])
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
            number = tensor.to(self.types[node.type])
            if self.checked and node.tensor in self.limits:
                self._require_limits(node.tensor, (), number, torch.ones_like(number, dtype=torch.bool), guards)
            return number
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
        if self.checked and node.tensor in self.limits:
            self._require_limits(node.tensor, indices, value, inside, guards)
        return torch.where(inside, value, torch.zeros_like(value))

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

    def _require_limits(
        self,
        name: str,
        indices: Sequence[torch.Tensor],
        value: torch.Tensor,
        inside: torch.Tensor,
        guards: _Guards,
    ) -> None:
        """Raise CallError for the first element that is wanted and lies beyond the limits of its tensor."""
        low, high = self.limits[name]
        wanted = self._wanted(guards)
        read = inside if wanted is None else inside & wanted
        bad = read & ~((value >= low) & (value <= high))  # so that NaN is beyond any
        if bool(bad.any()):
            place = [index.expand(bad.shape)[bad][0].item() for index in indices]
            raise CallError(beyond(name, place, value.expand(bad.shape)[bad][0].item(), low, high))

    def _wanted(self, guards: _Guards) -> torch.Tensor | None:
        """Mask of the places where a value under these conditions is wanted; None is everywhere."""
        wanted = self.guard
        for i, (condition, holds) in enumerate(guards):
            chosen = self.value(condition, guards[:i])
            chosen = chosen if holds else ~chosen
            wanted = chosen if wanted is None else wanted & chosen
        return wanted

    def _guarded(self, node: Expr) -> bool:
        """Whether conditions matter below a node: an index is checked where its element is wanted."""
        if not self.checked:
            return False
        sensitive = self._sensitive.get(node)
        if sensitive is None:
            sensitive = self._sensitive[node] = any(isinstance(n, Load) for n in walk(node))
        return sensitive


def beyond(name: str, place: Sequence[int], value: float, low: float, high: float) -> str:
    """Sentence about an element of a tensor that its declared range does not hold."""
    return f"tensor '{name}' holds {value} at {list(place)}, outside its declared range {low} .. {high}"


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
