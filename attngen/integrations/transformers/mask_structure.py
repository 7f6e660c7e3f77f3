"""The structure of a mask of Hugging Face's transformers: windows, chunks, padding, packed sequences.

A model builds its masks from the functions of ``transformers.masking_utils``. Those are recognised by their names and
closures, in all releases that ``transformers_versions`` lists, so that a mask becomes a few numbers for each sequence
instead of a tensor of every pair. An unknown function makes the whole mask unknown; it is then built as the tensor that
SDPA would get.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from attngen.integrations.shared.choice import NO_LIMIT

_HOME = "transformers.masking_utils"

#: A function at positions that count from the start of each document. The documents are told apart by the same
#: positions, which grow by one in each: windows and causality are what they are along the row.
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"


@dataclass(frozen=True, slots=True)
class MaskStructure:
    """The keys that a query sees. Positions count from the first key given, and the last query is at the last key.

    ``left`` and ``right``: how many keys before and after its own position, −1 without limit. ``start`` and ``stop``
    (batch,) int32: the range of keys that are not padding; None if none is padding. ``chunk`` and ``origin`` (batch,):
    queries see their own chunk of that many keys, counted from the origin. ``doc`` (batch, keys) int32: the number of
    each token's document, or of its chunk of a document with ``chunks_in_doc``. ``used`` (batch,) int32: how many keys
    count, if a cache has room for more. ``subtree_end`` and ``position`` (batch, keys) int32: a prefix tree, as in the
    variant ``span_tree``; ``left`` is then a number of positions.
    """

    left: int = NO_LIMIT
    right: int = NO_LIMIT
    chunk: int | None = None
    origin: Tensor | None = None
    start: Tensor | None = None
    stop: Tensor | None = None
    doc: Tensor | None = None
    used: Tensor | None = None
    chunks_in_doc: bool = False
    subtree_end: Tensor | None = None
    position: Tensor | None = None

    @property
    def positional(self) -> bool:
        """Whether the mask depends on a query's position."""
        return self.left >= 0 or self.right >= 0 or self.chunk is not None or self.doc is not None


class StructuredMask(torch.Tensor):
    """A boolean mask (batch, 1, queries, keys) that is known by its structure and takes no memory.

    It has the shape, dtype and device of the tensor that it stands for; any computation on it builds that tensor.
    """

    structure: MaskStructure
    _build: Callable[[], Tensor]
    _built: Tensor | None

    @staticmethod
    def of(
        structure: MaskStructure, shape: tuple[int, ...], device: Any, build: Callable[[], Tensor]
    ) -> StructuredMask:
        """Return a mask of this structure; ``build`` returns the same as a tensor."""
        nothing = torch.empty_strided(shape, (0,) * len(shape), dtype=torch.bool, device=device)
        mask = torch.Tensor._make_subclass(StructuredMask, nothing)
        mask.structure, mask._build, mask._built = structure, build, None
        return mask

    def dense(self) -> Tensor:
        """Return the mask as a tensor of bools, which is kept."""
        if self._built is None:
            self._built = self._build().expand(self.shape)
        return self._built

    def _contiguous(self) -> StructuredMask:
        """The same mask, which becomes a contiguous tensor once that is needed."""
        return StructuredMask.of(self.structure, tuple(self.shape), self.device, lambda: self.dense().contiguous())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer for shape, dtype and the like; build the tensor for everything else."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in ABOUT_FORM:
                return func(*args, **kwargs)
            if func is torch.Tensor.contiguous and len(args) == 1 and not kwargs:
                return args[0]._contiguous()
            args, kwargs = tree_map_only(StructuredMask, StructuredMask.dense, (args, kwargs))
            return func(*args, **kwargs)


#: Attributes that need no values: shape, dtype and the like, and a trace's notes about its inputs.
ABOUT_FORM = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout", "is_nested", "is_meta", "is_leaf",
        "is_sparse", "is_sparse_csr", "is_mkldnn", "is_quantized", "is_cpu", "grad", "grad_fn", "_base", "is_mps",
        "is_xla", "is_xpu", "is_mtia", "is_vulkan", "is_ipu", "is_maia", "names", "_grad", "retains_grad", "output_nr",
    )
    if hasattr(torch.Tensor, name)
} | {
    getattr(torch.Tensor, name)
    for name in (
        "dim", "size", "is_floating_point", "is_complex", "__len__", "_is_view", "stride", "storage_offset", "is_conj",
        "is_neg", "is_inference", "untyped_storage", "_typed_storage", "element_size", "nelement", "numel", "is_signed",
        "is_contiguous", "get_device", "data_ptr", "_is_zerotensor", "has_names",
    )
    if hasattr(torch.Tensor, name)
} | {torch._is_functional_tensor, torch.is_inference, torch.is_neg, torch.is_conj}  # fmt: skip


def structure_of(
    mask_function: Callable[..., Any],
    padding: Tensor | None,
    *,
    batch: int,
    queries: int,
    keys: int,
    q_offset: int | Tensor,
    kv_offset: int,
    device: torch.device | str,
) -> MaskStructure | None:
    """Return the structure of a mask, or None where it has none that is known.

    ``padding`` (batch, keys) is False at padding. The offsets are the positions of the first query and the first key,
    as ``AttentionMaskInterface`` gets them. The values of ``padding`` are read, once for each mask.
    """
    sides = _sides(mask_function)
    if sides is None:
        return None
    left, right, chunk, left_padding, doc, places = sides
    structure = MaskStructure(left, right, chunk)
    used: Tensor | None = None
    if structure.positional or doc is not None:
        counted = q_offset + queries - kv_offset  # keys up to the last query: the variants align there
        if isinstance(counted, Tensor) or counted != keys:
            if right != 0 or not (isinstance(counted, Tensor) or 0 < counted < keys):
                return None
            used = torch.as_tensor(counted, dtype=torch.int32, device=device).reshape(1).expand(batch).contiguous()
    if doc is not None:
        if padding is not None or tuple(doc.shape) != (batch, keys) or queries != keys:
            return None
        if chunk is not None:
            if places is None:
                places = torch.arange(keys, device=doc.device)
            assert left_padding is not None
            doc = _chunks_of_documents(doc, (places - left_padding[:, None]) // chunk)
        return MaskStructure(left, right, doc=doc.to(torch.int32).contiguous(), chunks_in_doc=chunk is not None)
    start = stop = None
    if padding is not None:
        bounds = _bounds(padding, used)
        if bounds is None:
            return None
        start, stop = bounds
    origin = None
    if chunk is not None:
        assert left_padding is not None
        if start is not None or kv_offset:
            origin = (left_padding - kv_offset).to(torch.int32).expand(batch).contiguous()
    return MaskStructure(left, right, chunk, origin, start, stop, used=used)


def tree_structure(mask_function: Callable[..., Any], subtree_end: Tensor, position: Tensor) -> MaskStructure | None:
    """The structure of a causal mask of a prefix tree; None for a mask of another kind, or one that is not known."""
    sides = _sides(mask_function)
    if sides is None or sides.right != 0 or sides.chunk is not None or sides.doc is not None:
        return None
    return MaskStructure(sides.left, 0, subtree_end=subtree_end, position=position)


def _chunks_of_documents(doc: Tensor, chunk: Tensor) -> Tensor:
    """Return numbers of the chunks of each document, from those of its tokens' document and chunk, (batch, keys) each.

    Both are equal in one stretch of tokens only, since documents follow each other, as do the chunks of each.
    """
    new = (doc.diff(dim=1) != 0) | (chunk.diff(dim=1) != 0)
    return torch.nn.functional.pad(new.cumsum(1), (1, 0))


def _bounds(padding: Tensor, used: Tensor | None) -> tuple[Tensor | None, Tensor | None] | None:
    """Start and end of the keys that are not padding: (None, None) without padding, None if with gaps."""
    keys = padding.shape[1]
    real = padding.to(torch.int32)
    count = real.sum(dim=1, dtype=torch.int32)
    start = real.argmax(dim=1).to(torch.int32)
    stop = torch.where(count > 0, keys - real.flip(1).argmax(dim=1).to(torch.int32), 0)
    needed = keys if used is None else used
    gaps, padded = torch.stack([(stop - start != count).any(), ((start > 0) | (stop < needed)).any()]).tolist()
    if gaps:
        return None
    return (start, stop) if padded else (None, None)


class _Sides(NamedTuple):
    """Sides of a mask by its functions: as in ``MaskStructure``, but ``left_padding`` is that before the first chunk,
    and ``places`` are positions in documents, None where they count along the whole row."""

    left: int
    right: int
    chunk: int | None
    left_padding: Tensor | None
    doc: Tensor | None
    places: Tensor | None


def _sides(mask_function: Callable[..., Any]) -> _Sides | None:
    """The sides of a mask by its functions, or None where one is not known."""
    left, right = NO_LIMIT, NO_LIMIT
    chunk: int | None = None
    left_padding: Tensor | None = None
    doc: Tensor | None = None
    places: Tensor | None = None
    parts = _parts(mask_function)
    if parts is None:
        return None
    for name, closed in parts:
        if name == "causal_mask_function":
            right = 0
        elif name == "sliding_window_overlay.<locals>.inner_mask":
            left = _tighter(left, closed["sliding_window"] - 1)
        elif name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            left, right = (_tighter(side, closed["sliding_window"]) for side in (left, right))
        elif name == "chunked_overlay.<locals>.inner_mask" and chunk is None:
            chunk, left_padding = closed["chunk_size"], closed["left_padding"]
        elif name == "packed_sequence_mask_function.<locals>.inner_mask" and doc is None:
            doc = closed["packed_sequence_mask"]
        elif name == _REMAPPED and places is None:
            places = closed["position_ids"]
        elif name != "bidirectional_mask_function":
            return None
    if places is not None and doc is None:
        return None
    if left < NO_LIMIT or (chunk is not None and (left, right) != (NO_LIMIT, 0)):
        return None
    return _Sides(left, right, chunk, left_padding, doc, places)


def _tighter(one: int, other: int) -> int:
    return other if one == NO_LIMIT else min(one, other)


def _parts(mask_function: Callable[..., Any]) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Return name and closed-over values of each function that a mask is the intersection of, or None."""
    code = getattr(mask_function, "__code__", None)
    if code is None or getattr(mask_function, "__module__", None) != _HOME:
        return None
    cells = getattr(mask_function, "__closure__", None) or ()
    closed = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    name = mask_function.__qualname__
    if name == _REMAPPED:
        inner = _parts(closed["mask_function"])
        return None if inner is None else [*inner, (name, closed)]
    if name != "and_masks.<locals>.and_mask":
        return [(name, closed)]
    parts = []
    for part in closed["mask_functions"]:
        own_parts = _parts(part)
        if own_parts is None:
            return None
        parts += own_parts
    return parts
