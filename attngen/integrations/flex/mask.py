"""FlexAttention's ``BlockMask`` for attngen: torch's class, whose lists of blocks are computed when they are read.

A mask of ``create_block_mask`` is its function alone, so that attngen's kernels get loop bounds from the expression.
A mask whose lists were given, cropped or indexed means what it means to torch: full blocks are seen, pairs of partial
blocks are seen where ``mask_mod`` says so, and nothing else is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch

from attngen.errors import AttngenError, CallError
from attngen.integrations.flex.identity import state_of
from attngen.integrations.flex.meaning import Functions, meaning

Mod = Callable[..., Any]

#: The tensors of a mask, in this torch, and those that say which blocks a call visits.
_TENSORS = frozenset(
    name for name in of_torch.BlockMask.__annotations__ if name not in ("seq_lengths", "BLOCK_SIZE", "mask_mod")
)
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_MEANS = _TENSORS | {"seq_lengths", "BLOCK_SIZE", "mask_mod"}


_NO_MASK_MOD = (
    "a BlockMask that was indexed has no mask_mod, since the positions of its queries changed: set one, such as "
    "mask.mask_mod = lambda b, h, q, kv: base.mask_mod(b, h, q + offset, kv)"
)


def _indexed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Stand for the mask_mod that the caller of an indexed mask has yet to set."""
    raise CallError(_NO_MASK_MOD)


_UNSET = getattr(of_torch, "_sliced_mask_mod_error", _indexed)

#: Masks whose meaning no call has asked for yet; and whether compiled programs take masks, which ask at once.
UNASKED: WeakSet[BlockMask] = WeakSet()
PROGRAMS = [False]


def _check_sizes(**sizes: tuple[Any, ...]) -> None:
    """Raise CallError unless all are integers: blocks at least 1, the others at least 0; B and H may be None."""
    for name, given in sizes.items():
        least = 1 if name == "BLOCK_SIZE" else 0
        for size in given:
            if isinstance(size, torch.SymInt) or (size is None and name in ("B", "H")):
                continue
            try:
                fits = operator.index(size) >= least
            except TypeError:
                fits = False
            if not fits:
                raise CallError(f"{name} must be an integer of at least {least}, got {size!r}")


class _Created(NamedTuple):
    """The arguments of ``create_block_mask``, which give the lists, and the lengths to which these are cropped."""

    mask_mod: Mod
    batch: int | None
    heads: int | None
    lengths: tuple[int, int]
    device: torch.device
    block_size: tuple[int, int]
    options: dict[str, Any]
    crops: tuple[tuple[int, int], ...] = ()

    def lists(self) -> Any:
        """Torch's mask of these arguments."""
        made = of_torch.create_block_mask(
            _of_tensors(self.mask_mod), self.batch, self.heads, *self.lengths, device=str(self.device),
            BLOCK_SIZE=self.block_size, **self.options,
        )  # fmt: skip
        for lengths in self.crops:
            made = _cropped(made, lengths)
        return made

    def reach(self, lengths: tuple[int, int]) -> bool:
        """Whether the lists have blocks for all pairs of these lengths."""
        ends = [self.lengths, *self.crops][-1]
        sizes = zip(lengths, ends, self.block_size, strict=True)
        return all(new <= -(-old // block) * block for new, old, block in sizes)


class BlockMask(of_torch.BlockMask):
    """A mask of queries and keys for ``flex_attention``, with the methods and attributes of torch's.

    ``create_block_mask`` and ``from_kv_blocks`` make one. Reading a list of blocks, such as ``kv_num_blocks``, or
    indexing a mask evaluates its function for all pairs, once. Calls do not need the lists.
    """

    #: The arguments that it was made of; None if its lists were given.
    _created: _Created | None = None
    #: The function of a mask with lists, and the state of the lists that it was made of.
    _composed: tuple[Mod, tuple[Any, ...]] | None = None
    #: Its meaning at the last call.
    last: Any = None
    #: For compiled programs: the name of the variant, and its tensors by name.
    handle: str | None = None
    tensors: dict[str, Tensor] = {}  # noqa: RUF012, never changed in place
    double_tensors: dict[str, Tensor] = {}  # noqa: RUF012, those of a call in float64

    @classmethod
    def create(
        cls, mask_mod: Mod, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int,
        device: torch.device, block_size: int | tuple[int, int], options: dict[str, Any], *, fallback: bool,
    ) -> BlockMask:  # fmt: skip
        """Make the mask of a function, without lists. ``options`` go to torch, for its lists. Raises CallError."""
        if not callable(mask_mod):
            raise CallError(f"mask_mod must be a function of (b, h, q_idx, kv_idx), got {mask_mod!r}")
        blocks = (block_size, block_size) if isinstance(block_size, int) else (block_size[0], block_size[1])
        _check_sizes(B=(batch,), H=(heads,), Q_LEN=(seqlen_q,), KV_LEN=(seqlen_k,), BLOCK_SIZE=blocks)
        if not fallback:
            Functions(mask_mod, None, device).check()
        created = _Created(mask_mod, batch, heads, (seqlen_q, seqlen_k), device, blocks, options)
        return cls._of(created, ask=not fallback)

    @classmethod
    def _of(cls, created: _Created, *, ask: bool) -> BlockMask:
        made = cls.__new__(cls)
        made.__dict__.update(
            _created=created, mask_mod=created.mask_mod, seq_lengths=[created.lengths, *created.crops][-1],
            BLOCK_SIZE=created.block_size,
        )  # fmt: skip
        if ask and PROGRAMS[0]:
            made.ask()
        elif ask:
            UNASKED.add(made)
        return made

    @classmethod
    def _adopted(cls, mask: Any) -> BlockMask:
        """Make a mask of the lists of torch's."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(mask))
        return made

    def ask(self) -> None:
        """Find the meaning for compiled programs, for which it may have to wait for the GPU.

        Where there is none, the graph of a program breaks, and the call says why.
        """
        try:
            traced = meaning(self.function, None, self.device)
        except AttngenError:
            return
        self.__dict__.update(
            handle=traced.handle, tensors=traced.tensors(), double_tensors=traced.tensors(torch.float64)
        )

    # --- lists -----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        created = self.__dict__.get("_created")
        if created is None or name not in _TENSORS:
            raise AttributeError(f"'BlockMask' object has no attribute '{name}'")
        lists = created.lists()
        self.__dict__.update({each: getattr(lists, each) for each in _TENSORS})
        return self.__dict__[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _TENSORS and self._created is not None:
            self.kv_num_blocks  # noqa: B018, the others are computed first
            object.__setattr__(self, "_created", None)
        object.__setattr__(self, name, value)
        if name in _MEANS:
            for each in ("last", "handle", "_composed"):
                object.__setattr__(self, each, None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name in _MEANS or name == "_created"}

    @property
    def listed(self) -> bool:
        """Whether its lists decide what is seen: they were given, or its function or lengths were replaced."""
        created = self._created
        return created is None or self.mask_mod is not created.mask_mod or not created.reach(tuple(self.seq_lengths))

    @property
    def function(self) -> Mod:
        """The function of (b, h, q_idx, kv_idx) that is true for the pairs that are seen. Raises CallError."""
        if not self.listed:
            mask_mod: Mod = self.mask_mod
            return mask_mod
        state = self._state()
        if self._composed is None or self._composed[1] != state:
            object.__setattr__(self, "_composed", (self._compose(), state))
        return self._composed[0]  # type: ignore[index]

    def is_known(self) -> bool:
        """Whether ``last`` holds: the lists that it was made of have not changed."""
        return self._composed is None or self._composed[1] == self._state()

    def _state(self) -> tuple[Any, ...]:
        lists = [getattr(self, name) for name in _LISTS]
        return tuple(None if one is None else (id(one), state_of(one)) for one in lists)

    def check_lists(self) -> None:
        """Raise CallError for a mask_mod that was not set, and for lists of other than four dimensions."""
        if self.mask_mod is _UNSET:
            raise CallError(_NO_MASK_MOD)
        if self.kv_indices.dim() != 4:
            raise CallError(
                f"block_mask has kv_indices of shape {tuple(self.kv_indices.shape)}; allowed: (B, H, rows, blocks), "
                "where B and H may be 1. Slices and tensors of one dimension keep all four when a mask is indexed"
            )

    def _compose(self) -> Mod:
        self.check_lists()
        if not self._reaches(self.seq_lengths):
            raise CallError(
                f"block_mask has lists for {self.kv_indices.shape[-2]} blocks of {self.BLOCK_SIZE[0]} queries, but "
                f"seq_lengths {tuple(self.seq_lengths)}; set mask.seq_lengths to the lengths of the call"
            )
        columns = -(-self.seq_lengths[1] // self.BLOCK_SIZE[1])
        partial = _lookup(_dense(self.kv_num_blocks, self.kv_indices, columns), *self.BLOCK_SIZE)
        if self.full_kv_num_blocks is None:
            return _partial_alone(partial, self.mask_mod)
        full = _lookup(_dense(self.full_kv_num_blocks, self.full_kv_indices, columns), *self.BLOCK_SIZE)
        return _partial_or_full(partial, full, self.mask_mod)

    def _reaches(self, lengths: tuple[int, int]) -> bool:
        """Whether there are blocks for all queries of these lengths, and, of a mask without lists, all keys."""
        if self._created is not None and not self.listed:
            return self._created.reach(lengths)
        return lengths[0] <= self.kv_indices.shape[-2] * self.BLOCK_SIZE[0]

    # --- torch's, where attngen's differ ------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of its lists."""
        device: torch.device = self.kv_indices.device if self._created is None else self._created.device
        return device

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, heads, queries, keys)."""
        created = self._created
        if created is None:
            return (*self.kv_indices.shape[:-2], *self.seq_lengths)
        return (created.batch or 1, created.heads or 1, *self.seq_lengths)

    def __getitem__(self, index: Any) -> BlockMask:
        """Select from the lists: sequences, heads and rows of blocks of queries.

        As in torch, the result has no mask_mod: its caller sets one that knows the positions of its queries.
        """
        made = self._adopted(self.plain()[index])
        made.mask_mod = _UNSET
        return made

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """Crop to the first queries and keys. Raises CallError for lengths that the lists do not reach."""
        lengths = new_q_len, new_kv_len
        blocks = -(-self.seq_lengths[1] // self.BLOCK_SIZE[1])
        if not self._reaches(lengths) or new_kv_len > blocks * self.BLOCK_SIZE[1]:
            raise CallError(
                f"_adjust crops a mask, and this one is for {self.seq_lengths[0]} queries and {self.seq_lengths[1]} "
                f"keys, got {new_q_len} and {new_kv_len}; create_block_mask(mask.mask_mod, …) makes a longer one"
            )
        if self._created is not None and not self.listed:
            return self._of(self._created._replace(crops=(*self._created.crops, lengths)), ask=True)
        made: BlockMask = _cropped(self, lengths)
        return made

    def to(self, device: torch.device | str) -> BlockMask:
        """Move the lists to a device. As in torch, tensors that ``mask_mod`` captures stay where they are."""
        where = torch.device(device)
        if self._created is not None and not self.listed:
            return self._of(self._created._replace(device=where), ask=self.device == where)
        made = self._adopted(self.plain().to(where))
        made.mask_mod = self.mask_mod
        return made

    def __repr__(self) -> str:
        if self.listed:
            return str(super().__repr__())
        traced = meaning(self.mask_mod, None, self.device)
        return f"BlockMask(shape={self.shape}, mask={traced.variant.fields.get('mask', True)!r})"

    def visible(self) -> Tensor:
        """Bools of ``shape``: the keys that each query sees."""
        traced = meaning(self.function, None, self.device)
        return traced.variant.mask(self.shape, **traced.tensors())

    def plain(self) -> Any:
        """Torch's own mask, with the same lists and function."""
        self.kv_num_blocks  # noqa: B018, computes all lists
        made = of_torch.BlockMask.__new__(of_torch.BlockMask)
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name in _MEANS})
        return made


def _of_tensors(mask_mod: Mod) -> Mod:
    """The same function for torch's ``vmap``, which takes no Python bool."""

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible: Tensor | bool = mask_mod(b, h, q_idx, kv_idx)
        return q_idx.new_full((), visible, dtype=torch.bool) if isinstance(visible, bool) else visible

    return seen


def _dense(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Bools (..., rows, columns): the blocks that are listed."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    places = torch.where(listed, indices, columns).clamp(max=columns).long()
    dense = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return dense.scatter_(-1, places, True)[..., :columns]


def _cropped(mask: Any, lengths: tuple[int, int]) -> Any:
    """A mask of the same class with the blocks of the first queries and keys."""
    if getattr(mask, "dq_write_order", None) is not None:
        return of_torch.BlockMask._adjust(mask, *lengths)  # which computes it again
    rows, columns = (-(-length // block) for length, block in zip(lengths, mask.BLOCK_SIZE, strict=True))
    lists: list[Tensor | None] = []
    for kind in ("kv", "full_kv"):
        counts, indices = getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices")
        if counts is None:
            lists += [None, None]
        else:
            dense = _dense(counts, indices, columns)[..., :rows, :].int()
            order = torch.argsort(dense, dim=-1, descending=True, stable=True)
            lists += [dense.sum(-1, dtype=torch.int32), order.int()]
    options = {} if mask.q_indices is not None else {"compute_q_blocks": False}
    return type(mask).from_kv_blocks(
        *lists, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod, seq_lengths=lengths, **options
    )


def _lookup(grid: Tensor, rows: int, columns: int) -> Mod:
    """A function of (b, h, q_idx, kv_idx): whether the grid (B, H, rows, columns), of bools, has their block."""
    by_batch, by_head = grid.shape[0] > 1, grid.shape[1] > 1
    grid = grid if by_head else grid[:, 0]
    grid = grid if by_batch else grid[0]

    def listed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place: tuple[Tensor, ...] = (q_idx // rows, kv_idx // columns)
        place = (h, *place) if by_head else place
        return grid[(b, *place) if by_batch else place]

    return listed


def _partial_alone(partial: Mod, mask_mod: Mod) -> Mod:
    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible: Tensor = partial(b, h, q_idx, kv_idx) & mask_mod(b, h, q_idx, kv_idx)
        return visible

    return seen


def _partial_or_full(partial: Mod, full: Mod, mask_mod: Mod) -> Mod:
    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible: Tensor = partial(b, h, q_idx, kv_idx) & mask_mod(b, h, q_idx, kv_idx)
        return visible | full(b, h, q_idx, kv_idx)

    return seen
