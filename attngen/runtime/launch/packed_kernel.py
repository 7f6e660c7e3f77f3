"""One kernel of a launch: the parameters that stay the same between calls, and the places of those that do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from attngen.errors import LoadError
from attngen.lang.divisors import division, divisors
from attngen.manifest import Argument
from attngen.runtime.arguments.checked import Call
from attngen.runtime.device.interface import Driver, Handle
from attngen.runtime.device.tensormap import TensorMap, of_own_tensor
from attngen.runtime.geometry.heads_in_l2 import group_of
from attngen.runtime.geometry.sizes import Geometry
from attngen.runtime.kernels.module import Entry
from attngen.runtime.kernels.packing import Packer, lay_out

if TYPE_CHECKING:
    from attngen.runtime.arguments.scalars import Number

#: Manifest type → the view of a frame that writes it, and the bytes of one element.
_WRITERS = {"i1": ("int8", 1), "i8": ("int8", 1), "i32": ("int32", 4), "i64": ("int64", 8), "fp32": ("float32", 4)}

#: Sizes that calls of one kind share, whatever their lengths: see ``arguments.kinds``.
_OF_KIND = frozenset({
    "heads", "kv_heads", "group", "group_bits", "group_reciprocal", "head_dim_qk", "head_dim_v", "page_size",
    "page_size_reciprocal", "num_pages", "box_rows", "asked_splits", "asked_split_size", "least_queries",
    "most_queries",
})  # fmt: skip


class ScalarDivision:
    """A divisor of a kernel, computed from the scalars of a call in order of declaration."""

    __slots__ = ("_divisor", "_names")

    def __init__(self, call: Call, parameter: Argument) -> None:
        """Raises LoadError if the variant does not divide by what the parameter is of."""
        known = {divisor.text: divisor for divisor in divisors(call.variant)}
        if parameter.of not in known:
            raise LoadError(f"parameter '{parameter.name}': the variant does not divide by '{parameter.of}'")
        self._divisor = known[parameter.of]
        self._names = [rule.name for rule in call.rules]

    def __call__(self, scalars: Sequence[Number]) -> tuple[int, int, int]:
        return division(self._divisor.value(dict(zip(self._names, scalars, strict=True))))


class PackedKernel:
    """One kernel on one device for calls of one kind: parameters that stay the same, and the places of the others."""

    __slots__ = (
        "_entry", "_pack", "addresses", "constants", "descriptors", "divisors", "of_sizes", "offsets", "scalars",
        "scales", "size_of_numbers",
    )  # fmt: skip

    def __init__(
        self, entry: Entry, geometry: Geometry, position: Mapping[str, int], driver: Driver, device: int
    ) -> None:
        """Compute the numbers that do not change between calls; the cubin is loaded here. Raises LoadError.

        ``position`` is where each address stands in the list that a launch takes.
        """
        scalar_position = {rule.name: i for i, rule in enumerate(geometry.call.rules)}
        self._entry = entry
        #: Index of each parameter that is an address or a descriptor, and the position of the address; the size that
        #: tells the rows of a descriptor, if calls of the kind differ in these.
        self.addresses: list[tuple[int, int]] = []
        self.descriptors: list[tuple[int, TensorMap, int, str]] = []
        self.scales: list[int] = []
        self.scalars: list[tuple[str, int, int, int]] = []
        self.divisors: list[tuple[int, ScalarDivision]] = []
        follow: list[tuple[int, Argument]] = []
        for index, parameter in enumerate(entry.layout.parameters):
            match parameter.kind:
                case "pointer":
                    if parameter.of is None or parameter.of not in position:
                        raise LoadError(f"parameter '{parameter.name}': no tensor is called '{parameter.of}'")
                    self.addresses.append((index, position[parameter.of]))
                case "descriptor":
                    self.descriptors.append((index, *_descriptor(parameter, geometry, driver, device, position)))
                case "scale":
                    self.scales.append(parameter.offset)
                case "scalar":
                    writer, size = _WRITERS[parameter.type]
                    name = parameter.of or parameter.name
                    if name not in scalar_position:
                        raise LoadError(f"parameter '{parameter.name}': the variant has no scalar '{name}'")
                    self.scalars.append((writer, size, parameter.offset, scalar_position[name]))
                case "divisor":
                    self.divisors.append((parameter.offset, ScalarDivision(geometry.call, parameter)))
                case _ if _follows_sizes(parameter):
                    follow.append((index, parameter))
        self.offsets = entry.layout.offsets
        #: The block of parameters with all numbers; those that follow from sizes lie elsewhere.
        self.constants = entry.packer([geometry.number(parameter) for parameter in entry.packer.numbers])
        follow.sort(key=lambda one: -one[1].size)
        of_sizes = lay_out(replace(parameter, offset=-1) for _, parameter in follow)
        #: Index of each parameter that follows from sizes, and its offset among these.
        self.of_sizes = list(zip((index for index, _ in follow), of_sizes.offsets, strict=True))
        self._pack = Packer(of_sizes)
        self.size_of_numbers = self._pack.size
        self.function(geometry, driver, device)

    def function(self, geometry: Geometry, driver: Driver, device: int) -> tuple[Handle, int, int, int, int]:
        """Driver arguments of a launch, up to its parameters."""
        return self._entry.launch_on(driver, device, geometry.blocks(driver, device), geometry.cluster)

    def numbers(self, geometry: Geometry) -> bytes:
        """The numbers that follow from the sizes of a call of the kind; LoadError for one that does not fit its
        type."""
        return self._pack([geometry.number(parameter) for parameter in self._pack.numbers])

    def packer_of(self, names: Sequence[str]) -> Callable[[Sequence[int]], bytes] | None:
        """Packer of ``numbers`` from sizes of these names, in their order; None if others are needed."""
        pack = self._pack
        wanted = [f"{'' if one.kind == 'size' else f'{one.kind} of '}{one.of or one.name}" for one in pack.numbers]
        if len(wanted) < 2 or not set(names).issuperset(wanted):
            return None
        read = itemgetter(*map(names.index, wanted))
        return lambda sizes: pack(read(sizes))


def _follows_sizes(parameter: Argument) -> bool:
    """Whether a number differs between calls of one kind."""
    match parameter.kind:
        case "size":
            return (parameter.of or parameter.name) not in _OF_KIND
        case "stride":
            return parameter.of in ("page_table", "tile_map")
        case kind:
            return kind == "descriptor_shape"


def _descriptor(
    parameter: Argument, geometry: Geometry, driver: Driver, device: int, position: Mapping[str, int]
) -> tuple[TensorMap, int, str]:
    """Descriptor of a tensor, the position of its address, and the size that tells its rows, if that may differ."""
    of = parameter.of
    if parameter.tensor is not None and parameter.tensor in geometry.call.tensors:
        own = geometry.call.tensors[parameter.tensor]
        element = next(one.dtype for one in geometry.call.variant.tensors if one.name == parameter.tensor)
        shape, strides = of_own_tensor(own.shape, own.stride())
        return (
            TensorMap(driver, device, element, shape, strides, parameter.box, parameter.swizzle),
            position[str(of)],
            "",
        )
    if of not in geometry.views:
        raise LoadError(f"parameter '{parameter.name}': '{of}' cannot have a descriptor")
    described = geometry.views[of]
    tensor_map = TensorMap(
        driver, device, geometry.launch.dtype_of(of).name, described.shape, described.strides, parameter.box,
        parameter.swizzle, parameter.window, group_of(geometry.call) if parameter.packed else None,
        in_pages=parameter.paged, transposed=parameter.transposed,
    )  # fmt: skip
    ragged = geometry.call.ragged and not parameter.paged
    return tensor_map, position[of], ("total_k" if of in ("k", "v") else "total_q") if ragged else ""
