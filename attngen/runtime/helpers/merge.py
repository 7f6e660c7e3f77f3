"""Merging results over two parts of the keys by one launch, in the place of the first result."""

from __future__ import annotations

from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.formats import MERGE, MERGE_VARIANT
from attngen.runtime.arguments.keys import PLAIN
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.device.driver import Driver
from attngen.runtime.helpers.launches import Grid, HelperLaunches, Operands
from attngen.runtime.helpers.operands import MOST
from attngen.runtime.helpers.path import first_that_takes, kernels_of
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import registry

#: Tensors of a launch, in the order of their addresses.
_TENSORS = ("out", "lse", "more", "more_lse", "sinks")

#: The launches of each form of a call; False where no kernel takes it.
_PREPARED: RecentCache[HelperLaunches | bool] = RecentCache(512)


def merge_into_first(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, sinks: Tensor | None = None) -> bool:
    """Merge results on a GPU into the first of them; False, and nothing is done, where no kernel takes them.

    ``out`` (1, rows, heads, head_dim) and ``lse`` (1, heads, rows) are new and contiguous, and so are ``more`` and
    ``more_lse``, over other keys. Outputs of rows without keys are finite. ``sinks`` (heads,) are in neither result; of
    the merged one they are in the output, but not in the log-sum-exp.
    """
    if sinks is not None and not _reads(sinks, lse):
        return False
    _, heads, rows = lse.shape
    key = registry.generation, out.get_device(), out.dtype, rows, heads, out.shape[3]
    launches = _PREPARED[key]
    if launches is None:
        launches = _prepare(out, lse, drivers.current())
        _PREPARED.put(key, launches)
    if not isinstance(launches, HelperLaunches):
        return False
    launches((
        out.data_ptr(), lse.data_ptr(), more.data_ptr(), more_lse.data_ptr(), 0 if sinks is None else sinks.data_ptr()
    ))  # fmt: skip
    return True


def _reads(sinks: Tensor, lse: Tensor) -> bool:
    """Whether kernels read such sinks."""
    alike = sinks.dtype == lse.dtype and sinks.get_device() == lse.get_device() and sinks.numel() == lse.shape[1]
    return alike and type(sinks) in PLAIN and sinks.is_contiguous() and not sinks.is_neg()


def _prepare(out: Tensor, lse: Tensor, driver: Driver) -> HelperLaunches | bool:
    device = out.get_device()
    chosen = first_that_takes(
        kernels_of(MERGE, MERGE_VARIANT, out.dtype), device, driver,
        lambda kernel: prepare_on(kernel, out, lse, driver), "no package has a kernel that merges results",
    )  # fmt: skip
    return chosen if isinstance(chosen, HelperLaunches) else False


def prepare_on(kernel: Kernel, out: Tensor, lse: Tensor, driver: Driver) -> HelperLaunches | str:
    """The launch on one kernel for results like these, or the reason against it."""
    _, heads, rows = lse.shape
    bytes_of_row = out.shape[3] * out.element_size()
    if not lse.numel():
        return "there is no row"
    if bytes_of_row % CHUNK_BYTES:
        return f"a row has {bytes_of_row} B, which is not a multiple of {CHUNK_BYTES}"
    if rows * heads > MOST:
        return "more rows than 32 bits count"
    (launch,) = kernel.launches
    sizes = {"rows": rows, "heads": heads, "vectors": bytes_of_row // CHUNK_BYTES}
    grid = Grid(launch.entry, -(-rows * heads // launch.tile_m))
    return HelperLaunches(kernel, Operands(_TENSORS, sizes, {}), [grid], driver, out.get_device())
