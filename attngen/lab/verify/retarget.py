"""A kernel planned for another GPU, planned again for the one that is here, so that its template can be run."""

from __future__ import annotations

from dataclasses import replace

from attngen.arch import Arch
from attngen.build.pipeline import Prepared
from attngen.errors import PlanError
from attngen.operations import ATTENTION, operation_of
from attngen.plan import plan
from attngen.plan.model import Plan
from attngen.schema.kernel_spec import Backward, Gradient

#: A kernel planned again only to be verified may be slow.
_ALLOW = ("serialized_wgmma", "spill")


def retarget(prepared: Prepared, arch: Arch) -> Prepared:
    """Plan a kernel for ``arch``, with its own tile, stages, warps and loads where these fit there.

    Raises PlanError if no tile fits.
    """
    before = prepared.plan
    free = replace(prepared.spec, arch=arch.name, backend=before.backend, allow=_ALLOW)
    if operation_of(before.direction) is not ATTENTION:
        planned = plan(free)
        return Prepared(prepared.spec, planned)
    free = replace(free, loads=before.loads)
    same = replace(free, tile_m=before.tile_m, tile_n=before.tile_n, stages=before.stages, num_warps=before.num_warps)
    if before.direction == "backward":
        tiles = (
            Backward(_tile(before, before.main), _tile(before, "dq"))
            if before.backend == "triton"
            else Backward(Gradient(before.tile_m, before.tile_n, before.stages))
        )
        same = replace(free, tile_m=None, tile_n=None, stages=None, num_warps=None, backward=tiles)
    try:
        planned = plan(same)
    except PlanError:  # it takes more shared memory than this arch has
        planned = plan(free)
    return Prepared(prepared.spec, planned)


def _tile(before: Plan, name: str) -> Gradient:
    launch = before.launch(name)
    return Gradient(launch.tile_m, launch.tile_n, launch.stages, launch.num_warps)
