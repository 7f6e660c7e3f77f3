"""Plans of context parallelism: which tokens each rank holds, what it gets from others, and the calls that follow."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attngen.errors import CallError, suggest
from attngen.lang.dropout import RNG_STATE
from attngen.lang.printing import canonical
from attngen.lang.runs import TILE
from attngen.lang.variant import Variant
from attngen.parallel import local as names
from attngen.parallel.agreement import agree
from attngen.parallel.call_checks import axis_of_tokens, form_of, signature_of
from attngen.parallel.called import called
from attngen.parallel.calls import ParallelCall, attend, plans_by_number
from attngen.parallel.cost import Cost
from attngen.parallel.exchange import exchange
from attngen.parallel.explanation import Explanation, VariantSummary
from attngen.parallel.groups import GroupReference
from attngen.parallel.heads import HeadParallelAttention, of_own_heads
from attngen.parallel.layers import PlanLayer
from attngen.parallel.local import Local, Positions, local_variant, own_values
from attngen.parallel.overlap import cut
from attngen.parallel.rank_attention import RankAttention, by_positions, by_segments
from attngen.parallel.routes import Needs, Route
from attngen.parallel.segments import RowSegments
from attngen.parallel.sharding import Sharding
from attngen.parallel.stages import CallOptions
from attngen.parallel.values import Cutter, passed, read_by_mask
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments.checked import lse_dtype_of
from attngen.runtime.operations.attention.entry import attention
from attngen.runtime.registry.binding import find
from attngen.variants import PythonVariant

_numbers = count()

#: The keys of a call are kept for the backward if a rank gets at most so many times its own rows; more are sent again,
#: since they take memory, but for those of the first group of heads. Not measured.
_KEPT = 1.5


@dataclass(frozen=True, eq=False)
class Plan:
    """Placement of a sequence's tokens on the ranks of a group, and the traffic of attention between them.

    Made by ``attngen.parallel.plan``. A plan of a number of ranks has neither ``rank`` nor ``group``: its methods take
    ``rank=``, and it has no ``attention``.
    """

    seqlen: int
    ranks: int
    rank: int | None
    group_reference: GroupReference | None
    tile: int
    chunks: int
    cost: Cost
    layers: tuple[PlanLayer, ...]
    sharding: Sharding
    cu_seqlens: tuple[int, ...] | None
    make: Callable[[Plan, str | Variant, Mapping[str, Any]], Plan]  # a plan of another variant for the same tokens
    #: By which compiled programs name the plan: a text is a constant of a trace.
    number: str = field(default_factory=lambda: str(next(_numbers)))
    _agreed: set[tuple[Any, ...]] = field(default_factory=set)
    _checked: set[tuple[Any, ...]] = field(default_factory=set)  # what calls were like that were found right
    _rows_on: dict[Any, Tensor] = field(default_factory=dict)
    _routes_of_all: dict[int, Route] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plans_by_number[self.number] = self

    def __repr__(self) -> str:
        variants = ", ".join(layer.name for layer in self.layers)
        return f"<attngen.parallel plan: {variants}, {self.seqlen} tokens on {self.ranks} ranks>"

    # --- where tokens lie -----------------------------------------------------------------------------------

    def tokens(self, rank: int | None = None) -> int:
        """Number of tokens that a rank holds, by default this one."""
        return int(self.sharding.counts[self._rank(rank)])

    def rows(self, rank: int | None = None, *, device: torch.device | str | None = None) -> Tensor:
        """Place of each token of a rank in the whole tensor, ascending: int64."""
        key = (self._rank(rank), torch.device(device or "cpu"))
        if key not in self._rows_on:
            self._rows_on[key] = torch.from_numpy(self.sharding.positions(key[0])).to(key[1])
        return self._rows_on[key]

    def positions(self, rank: int | None = None, *, device: torch.device | str | None = None) -> Tensor:
        """Position of each token of a rank in its sequence or document, as rotary embeddings take them: int64."""
        rows = self.rows(rank)
        if self.cu_seqlens is not None:
            offsets = torch.tensor(self.cu_seqlens, device="cpu")
            rows = rows - offsets[torch.searchsorted(offsets, rows, right=True) - 1]
        return rows.to(device or "cpu")

    def shard(self, x: Tensor, dim: int | None = None, *, rank: int | None = None) -> Tensor:
        """The tokens of a whole tensor that a rank holds; they lie along axis 1, of packed sequences along axis 0,
        unless ``dim`` is given."""
        dim = self._dim(dim, x, "shard", self.seqlen, f"{self.seqlen} tokens")
        return x.index_select(dim, self.rows(rank, device=x.device))

    def unshard(self, x: Tensor, dim: int | None = None) -> Tensor:
        """The whole tensor, on every rank, of which each rank passes the tokens that it holds.

        All ranks of the group call it. Differentiable: the gradients of all ranks are added up.
        """
        rank = self._in_group()
        dim = self._dim(dim, x, "unshard", self.tokens(), f"the {self.tokens()} tokens of rank {rank}")
        return self._arrived(self._route_of_all(rank), x, dim)

    def also(self, variant: str | Variant, **values: Any) -> Plan:
        """A plan of another variant for the same tokens on the same ranks, whose work is as it comes.

        ``values`` are its scalars and whole tensors, all that its mask reads. Plans are kept. Raises CallError.
        """
        return self.make(self, variant, values)

    @staticmethod
    def fixes(variant: str | Variant, package: str | None = None) -> tuple[str, ...]:
        """The values that a plan of a variant gets, not its calls: those that the mask reads."""
        return read_by_mask(find(variant, package).variant)

    # --- attention ------------------------------------------------------------------------------------------

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        variant: str | Variant | None = None,
        softmax_scale: float | None = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
        layout: str = "bshd",
        backend: str | None = None,
        package: str | None = None,
        deterministic: bool = False,
        **values: Any,
    ) -> Any:
        """Attention of this rank's rows to the keys of all ranks; q, k and v hold the tokens that ``shard`` gives.

        Shapes and results are those of ``attngen.attention`` for the tokens of this rank. Packed sequences have the
        shapes of ``attngen.attention_varlen``: q (tokens, heads, head_dim), and a log-sum-exp of (heads, tokens).
        ``variant`` says which one, if the plan has several. ``values`` are the scalars and tensors of the variant that
        the plan did not get; a tensor with something for each token holds all tokens, or those of this rank.
        With ``return_max_logits``, eager, the largest logit of each head over the tokens of all ranks comes last,
        (heads,).

        All ranks of the group make the call, and run its backward, in the same order. The first call compares plans
        and arguments, and fails on all ranks if they differ or one is wrong; under ``attngen.debug()`` every call does.
        Raises CallError, and what ``attngen.attention`` raises.
        """
        largest = None
        if return_max_logits:
            if torch.compiler.is_compiling():
                raise CallError("largest logits of all ranks are for eager calls; leave out return_max_logits")
            heads = q.shape[1 if layout == "bhsd" else -2]
            largest = torch.full((heads,), -math.inf, dtype=lse_dtype_of(q.dtype), device=q.device)
        options = CallOptions(softmax_scale, backend, package, deterministic, largest)
        packed = self.cu_seqlens is not None
        traced = torch.compiler.is_compiling()
        if not traced:
            self._in_group()
            layer = self.layer(variant)
            self._compare(layer, q, k, v, layout, values)
        if packed:
            q, k, v = (tensor.unsqueeze(0) for tensor in (q, k, v))
        elif layout == "bhsd":
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if traced:
            from attngen.parallel import operators  # what it imports of torch brings a compiler

            out, lse = operators.traced(self.number, variant, options, q, k, v, values)
            lse = lse if return_lse else None
        elif self._wire is None:
            out, lse = self._alone(layer, q, k, v, values, options, return_lse=return_lse)
        else:
            call, tensors = self._call(layer, values, options)
            out, lse = attend(call, q, k, v, tensors, return_lse=return_lse)
            if largest is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._wire)
        if packed:
            out, lse = out.squeeze(0), None if lse is None else lse.squeeze(0)
        elif layout == "bhsd":
            out = out.transpose(1, 2)
        results = (out, *(each for each in (lse, largest) if each is not None))
        return results if len(results) > 1 else out

    def called(self, variant: str | Variant | None = None) -> PythonVariant | str | Variant:
        """The variant that each rank calls over its rows and keys: what to build kernels of."""
        return self._called(self.layer(variant))

    def explain(self) -> Explanation:
        """Work and bytes of each rank, beside the least of both."""
        variants = tuple(
            VariantSummary(
                layer.name,
                layer.layers,
                layer.method,
                tuple(map(round, self._tiles(layer))),
                tuple(map(round, self._received(layer))),
                tuple(map(int, layer.seen.received)),
            )
            for layer in self.layers
        )
        tokens = tuple(map(int, self.sharding.counts))
        return Explanation(self.seqlen, self.tile, self.chunks, tokens, self.cost.token_bytes(), self.seconds, variants)

    def _tiles(self, layer: PlanLayer) -> np.ndarray:
        """Tiles of all heads that each rank visits, in tiles of one head."""
        if layer.method == "heads":
            return np.full(self.ranks, layer.visits.tiles.sum() / self.ranks)
        return np.bincount(self.sharding.owner, weights=layer.visits.tiles, minlength=self.ranks)

    def _received(self, layer: PlanLayer) -> np.ndarray:
        """Rows of K and V that each rank receives, or by heads as many bytes."""
        if layer.method == "heads":
            return self.cost.rows_of_heads(self.sharding.counts, self.ranks)
        return layer.sent.received

    @cached_property
    def seconds(self) -> float:
        """Predicted seconds of attention in all layers, forward."""
        each = (
            layer.layers * (self.cost.of_tiles(self._tiles(layer).max(), self.tile)
                            + self.cost.of_tokens(self._received(layer).max()))
            for layer in self.layers
        )  # fmt: skip
        return float(sum(each))

    @cached_property
    def digest(self) -> str:
        """Hash that two plans share only if they send the same rows and call the same variants."""
        digest = hashlib.sha256()
        digest.update(repr((self.seqlen, self.ranks, self.tile, self.cu_seqlens)).encode())
        digest.update(self.sharding.owner.astype("<i8").tobytes())
        digest.update(self.sharding.bounds.astype("<i8").tobytes())
        for layer in self.layers:
            text = [
                canonical(e) for e in (layer.variant.mask, layer.variant.score, layer.variant.sink) if e is not None
            ]
            digest.update(repr((layer.name, layer.method, layer.sent.keys, text)).encode())
            digest.update(np.packbits(layer.sent.tiles).tobytes())
            digest.update(repr({n: v for n, v in layer.values.items() if not isinstance(v, Tensor)}).encode())
        return digest.hexdigest()[:16]

    def _call(
        self, layer: PlanLayer, values: Mapping[str, Any], options: CallOptions
    ) -> tuple[ParallelCall, list[Tensor]]:
        """A call, and its tensors of the variant: those that were passed, or have a gradient."""
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        tensors |= {
            name: value
            for name, value in layer.values.items()
            if name not in tensors and isinstance(value, Tensor) and value.requires_grad
        }
        numbers = {name: value for name, value in values.items() if name not in tensors}
        return ParallelCall(self, layer, options, numbers, tuple(tensors)), list(tensors.values())

    def _alone(
        self, layer: PlanLayer, q: Tensor, k: Tensor, v: Tensor, values: Mapping[str, Any], options: CallOptions, *,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The call of a single rank, whose largest logits the options take."""
        arguments = self.arguments(layer, q, values)
        *given, largest = options
        named: dict[str, Any] = dict(zip(CallOptions._fields, given, strict=False))
        result: Any = attention(
            q, k, v, variant=self._called(layer), return_lse=return_lse, return_max_logits=largest is not None,
            **named, **arguments,
        )  # fmt: skip
        if largest is not None:
            *result, own = result
            largest.copy_(own)
        else:
            result = result if return_lse else (result,)
        return result[0], result[1] if return_lse else None

    def rank_attention(self, layer: PlanLayer) -> RankAttention | HeadParallelAttention:
        """Calls and exchanges of this rank for a layer."""
        if "rank_attention" not in layer.kept:
            rank = self._in_group()
            exchanges = bool(layer.sent.received.any())
            by_heads = layer.overlap == "heads"
            keeps = by_heads or int(layer.sent.received.max()) * self.ranks <= _KEPT * self.seqlen
            if layer.method == "heads":
                layer.kept["rank_attention"] = HeadParallelAttention(
                    self._reference(), self._route_of_all(rank), layer.source, self.cu_seqlens
                )
            elif layer.in_segments:
                segments = self._segments(layer, rank)
                stages = None
                if layer.overlap == "rows":
                    stages = cut(segments, layer.visits, self.sharding, positions=layer.positions)
                layer.kept["rank_attention"] = by_segments(
                    layer.sent, rank, self._reference(), layer.source, layer.stated, segments, stages,
                    positions=layer.positions, by_heads=by_heads,
                    forward_groups=layer.forward_groups, exchanges=exchanges, keeps=keeps,
                )  # fmt: skip
            else:
                layer.kept["rank_attention"] = by_positions(
                    layer.sent, rank, self._reference(), self._called(layer), self._local(layer).variant,
                    by_heads=by_heads, forward_groups=layer.forward_groups, exchanges=exchanges, keeps=keeps,
                )  # fmt: skip
        return layer.kept["rank_attention"]

    def _segments(self, layer: PlanLayer, rank: int) -> RowSegments:
        """The segments of a rank's rows."""
        bounds, owner = self.sharding.bounds, self.sharding.owner
        breaks = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1, [len(owner)]])
        mine = owner[breaks[:-1]] == rank
        runs = bounds[np.stack([breaks[:-1][mine], breaks[1:][mine]], axis=1)]
        offsets = self.cu_seqlens if self.cu_seqlens is not None else (0, self.seqlen)
        return RowSegments.of(runs, layer.visits.first, self.sharding, offsets, positions=layer.positions)

    # --- inside ---------------------------------------------------------------------------------------------

    @property
    def group(self) -> Any:
        """The process group; None for a number of ranks. Raises CallError if it is destroyed."""
        return None if self.group_reference is None else self.group_reference()

    def _reference(self) -> GroupReference:
        assert self.group_reference is not None, "the plan has a rank"
        return self.group_reference

    @property
    def _wire(self) -> Any:
        return self.group if self.ranks > 1 else None

    @cached_property
    def _whole(self) -> Needs:
        """All tokens on every rank."""
        return Needs.of_all(self.sharding)

    @cached_property
    def _row_kind(self) -> Positions:
        if self.ranks == 1:
            return "all"
        owner = self.sharding.owner
        first = np.concatenate([[True], owner[1:] != owner[:-1]])
        runs = int(np.bincount(owner[first]).max())
        if runs > 2 and self.tile % TILE == 0 and self.sharding.begins is None:
            return "tiles"
        return "run" if runs == 1 else "runs" if runs == 2 else "table"

    def _rank(self, rank: int | None) -> int:
        if rank is None:
            if self.rank is None:
                raise CallError(f"this plan has no group; allowed: rank=0 to {self.ranks - 1}")
            return self.rank
        if type(rank) is not int or not 0 <= rank < self.ranks:
            raise CallError(f"rank must be 0 to {self.ranks - 1}, got {rank!r}")
        return rank

    def _in_group(self) -> int:
        if self.rank is None:
            raise CallError(
                "this plan was made for a number of ranks, which cannot exchange anything; allowed: a plan for a "
                "DeviceMesh or a process group"
            )
        return self.rank

    def _dim(self, dim: int | None, x: Tensor, what: str, length: int, allowed: str) -> int:
        dim = dim if dim is not None else 1 if self.cu_seqlens is None else 0
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != length:
            raise CallError(f"{what}: x has shape {tuple(x.shape)}; allowed along axis {dim}: {allowed}")
        return dim % x.dim()

    def layer(self, variant: str | Variant | None) -> PlanLayer:
        """The layer of a variant, which may be left out if there is one. Raises CallError."""
        if variant is None:
            if len(self.layers) == 1:
                return self.layers[0]
        else:
            for layer in self.layers:
                if variant in (layer.source, layer.name) or variant == layer.variant:
                    return layer
        named = ", ".join(layer.name for layer in self.layers)
        got = (
            f"got {variant!s}{suggest(str(variant), [layer.name for layer in self.layers])}" if variant else "got none"
        )
        raise CallError(f"variant must be one of the plan's, {got}; allowed: {named}")

    def _route(self, layer: PlanLayer, rank: int) -> Route:
        if ("route", rank) not in layer.kept:
            layer.kept["route", rank] = layer.sent.route(rank)
        return layer.kept["route", rank]

    def _route_of_all(self, rank: int) -> Route:
        """The route that brings all tokens."""
        if rank not in self._routes_of_all:
            self._routes_of_all[rank] = self._whole.route(rank)
        return self._routes_of_all[rank]

    def _cutter(self, rank: int, route: Route, device: torch.device, keys: Tensor | None = None) -> Cutter:
        """Cutter of tensors to the rows of a rank, and to the keys that a route brings."""
        keys = torch.empty(0, dtype=torch.int64, device="cpu") if keys is None else keys
        return Cutter(
            self.seqlen, self.rows(rank, device=device), keys.to(device),
            lambda x, axis: x if self.sharding.one_holds_all else self._arrived(route, x, axis),
            lambda x, axis: self._arrived(self._route_of_all(rank), x, axis),
        )  # fmt: skip

    def _local(self, layer: PlanLayer) -> Local:
        if "local" not in layer.kept:
            rows: Positions = "tiles" if layer.variant.dropout and self.ranks > 1 else self._row_kind
            layer.kept["local"] = local_variant(layer.variant, rows, layer.sent.keys)
        return layer.kept["local"]

    def _called(self, layer: PlanLayer) -> PythonVariant | str | Variant:
        alone = self.ranks == 1
        if (alone and self.cu_seqlens is None) or (not alone and (layer.method == "heads" or layer.in_segments)):
            return layer.source
        if "called" not in layer.kept:
            layer.kept["called"] = called(self._local(layer).variant)
        return layer.kept["called"]

    def _arrived(self, route: Route, x: Tensor, dim: int) -> Tensor:
        """The rows that a route brings, of a tensor that has its own along an axis."""
        rows = x.movedim(dim, 0)
        (arrived,) = exchange(route, self._wire, rows.reshape(len(rows), 1, math.prod(rows.shape[1:])))
        return arrived.reshape(len(arrived), *rows.shape[1:]).movedim(0, dim)  # a rank may have no row

    def arguments(
        self, layer: PlanLayer, q: Tensor, values: Mapping[str, Any], *, rank: int | None = None
    ) -> dict[str, Any]:
        """The scalars and tensors of a rank's call; those that the plan got are cut once."""
        given, rank = {**layer.values, **values}, self._rank(rank)
        if layer.method == "heads" and self._wire is not None:
            own = {name: given[name] for name in layer.own if name in given}
            cuts = local_variant(layer.variant, "all", "all").cuts
            tensors = self._cutter(rank, self._route_of_all(rank), q.device).values(
                {name: cut for name, cut in cuts.items() if cut.of in own}, own, layer.name
            )
            own = of_own_heads(layer.stated, {**own, **tensors}, rank, self.ranks)
            return {name: x.to(q.device) if isinstance(x, Tensor) else x for name, x in own.items()}
        if layer.in_segments or self._called(layer) is layer.source:
            own = {name: given[name] for name in layer.own if name in given}
            return {name: x.to(q.device) if isinstance(x, Tensor) else x for name, x in own.items()}
        local, route = self._local(layer), self._route(layer, rank)
        key = (rank, q.device)
        if key not in layer.kept:
            rows, keys = self.rows(rank), torch.from_numpy(layer.sent.key_positions(rank))
            cutter = self._cutter(rank, route, q.device, keys)
            breaks = (rows.diff() != 1).nonzero()
            split = int(breaks[0]) + 1 if len(breaks) else len(rows)
            here = {
                names.ROW_BEGIN: int(rows[0]) if len(rows) else 0, names.ROW_POSITION: rows.to(q.device, torch.int32),
                names.ROW_SPLIT: split, names.ROW_BEGIN_2: int(rows[split]) - split if split < len(rows) else 0,
                names.KEY_BEGIN: route.begin, names.KEY_POSITION: keys.to(q.device, torch.int32),
                names.TOKENS: self.seqlen,
            }  # fmt: skip
            fixed = {
                name: value.to(q.device)
                for name, value in layer.values.items()
                if isinstance(value, Tensor) and not value.requires_grad
            }
            cuts = {name: cut for name, cut in local.cuts.items() if cut.of in fixed}
            layer.kept[key] = cutter, own_values(layer.variant, here), cutter.values(cuts, fixed, layer.name)
        cutter, own, tensors = layer.kept[key]
        (total,) = own_values(layer.variant, {names.TOTAL: q.shape[0] * self.seqlen}).items()
        own = dict([*own.items(), total])
        wanted = set(passed(local.variant))
        cuts = {name: cut for name, cut in local.cuts.items() if name not in tensors}
        scalars = {name: value for name, value in given.items() if name in {s.name for s in layer.variant.arguments}}
        state = {name: value.to(q.device) for name, value in given.items() if name == RNG_STATE.name}
        arguments = {**scalars, **tensors, **cutter.values(cuts, given, layer.name), **own, **state}
        return {name: value for name, value in arguments.items() if name in wanted}

    def check(self, layer: PlanLayer, q: Tensor, k: Tensor, v: Tensor, values: Mapping[str, Any]) -> None:
        """Compare a compiled program's call, (batch, tokens, heads, head_dim), with those of other ranks."""
        packed = self.cu_seqlens is not None
        q, k, v = (x.squeeze(0) if packed else x for x in (q, k, v))
        self._compare(layer, q, k, v, "bshd", values)

    # --- checks ---------------------------------------------------------------------------------------------

    def _compare(self, layer: PlanLayer, q: Any, k: Any, v: Any, layout: Any, values: Mapping[str, Any]) -> None:
        """Raise CallError for a wrong call, on the first call on all ranks."""
        key = (layer.name, layout, *(form_of(x) for x in (q, k, v)), *((n, form_of(x)) for n, x in values.items()))
        try:
            if key in self._checked and not debugging.active():
                return
        except TypeError:  # a value that cannot be hashed
            key = ()
        self._compare_all(layer, q, k, v, layout, values)
        if key:
            self._checked.add(key)

    def _compare_all(self, layer: PlanLayer, q: Any, k: Any, v: Any, layout: Any, values: Mapping[str, Any]) -> None:
        problem: str | None = None
        signature: tuple[Any, ...] = ()
        try:
            axis = axis_of_tokens(self, layer, q, k, v, layout, values)
            signature = (layer.name, layout, *signature_of(self, layer, (q, k, v), axis, values))
        except CallError as error:
            problem = str(error)
        if problem is not None and (self._wire is None or (self._agreed and not debugging.active())):
            raise CallError(problem)
        if self._wire is None or (signature in self._agreed and not debugging.active()):
            return
        agree(self.group, (self.digest, repr(signature)), problem)
        self._agreed.add(signature)
