"""The operations: one row for each folder of ``attngen.runtime.operations``. A new one is a folder and a row here.

``attngen`` and packages get their public names from here, programs of ``torch.export`` their operators, and the
planner, ``attngen explain`` and ``attngen verify`` what they call for a kernel. Places in later layers are text, which
readers import at the first use: ``module:name`` for functions.
"""

# Without ``annotations`` of ``__future__``: NamedTuple compiles annotations that are text, which takes 2 ms of every
# ``import attngen``.

from collections.abc import Mapping
from typing import NamedTuple

#: Directions of kernels that are not attention.
APPEND, BLOCK_MASK, BLOCK_SCORES = "append", "block_mask", "block_scores"
INDEX_SCORES, MERGE = "index_scores", "merge"
QUANTIZE, TOPK, WIDEN = "quantize", "topk", "widen"

#: Directions of kernels that score keys, or blocks of them, for an index: what entries of a spec ask for beside
#: attention.
SCORES = (INDEX_SCORES, BLOCK_SCORES)

#: Direction of attention's kernels that compute outputs and their tangents (forward-mode derivatives).
JVP = "jvp"

#: What such kernels compute, where no variant of a spec says it. No variant can have these names.
APPEND_VARIANT, BLOCK_MASK_VARIANT, MERGE_VARIANT = "append-kv", "block-mask", "merge-parts"
QUANTIZE_VARIANT, TOPK_VARIANT, WIDEN_VARIANT = "quantize-qkv", "topk-scores", "widen-kv"


class Operation(NamedTuple):
    """An operation: its folder, its public names, and its kernels, if it has any."""

    #: The folder's name.
    name: str
    #: Module of the folder → public names in it, of attngen and of packages.
    public: Mapping[str, tuple[str, ...]]
    #: Classes of results, which packages export from the same module; attention's are in other modules.
    results: tuple[str, ...] = ()
    #: Modules of the folder that define operators of no variant, called ``NAMES``, by ``defined``.
    operators: tuple[str, ...] = ()
    #: Directions of its kernels, in specs and manifests.
    directions: tuple[str, ...] = ()
    #: What its kernels compute in place of a variant; empty if they have variants.
    variant: str = ""
    #: Modules of ``attngen.families`` with its schedules; those of attention are in ``attngen.plan.catalogue``.
    schedules: tuple[str, ...] = ()
    #: Function: the specs of its kernels that come with the kernels of a spec's entries.
    specs: str = ""
    #: Function: label and text of each line of ``attngen explain`` for a plan; attention's schedules have their own.
    facts: str = ""
    #: Function: the trial of a kernel, for ``attngen verify``.
    trial: str = ""

    @property
    def folder(self) -> str:
        """The package of its modules, within ``attngen``."""
        return f"runtime.operations.{self.name}"

    @property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """Module, within ``attngen``, → its public names."""
        return {f"{self.folder}.{module}": names for module, names in self.public.items()}


ATTENTION = Operation(
    "attention",
    {
        "entry": ("attention", "attention_paged", "attention_varlen", "define_operators"),
        "introspection": ("explain", "tile_map"),
    },
    operators=("dropout_operator",),
    directions=("forward", "backward", JVP),
    trial="attngen.lab.verify.gpu:try_attention",
)

#: In the order in which packages declare them, and in which their kernels are planned and explained.
OPERATIONS = (
    Operation(
        "append",
        {"call": ("append_kv",)},
        operators=("operator",),
        directions=(APPEND,),
        variant=APPEND_VARIANT,
        schedules=("append.schedule",),
        specs="attngen.schema.helper_kernels:appends",
        facts="attngen.families.append.explain:facts",
        trial="attngen.lab.verify.appended:try_append",
    ),
    Operation(
        "merge",
        {"call": ("merge",)},
        operators=("operator",),
        directions=(MERGE,),
        variant=MERGE_VARIANT,
        schedules=("merge.schedule",),
        specs="attngen.schema.helper_kernels:mergers",
        facts="attngen.families.merge.explain:facts",
        trial="attngen.lab.verify.merged:try_merge",
    ),
    Operation("shared_prefix", {"call": ("shared_prefix",)}, results=("SharedPrefix",)),
    Operation(
        "quantize",
        {"call": ("quantize",)},
        results=("Quantized",),
        operators=("operator",),
        directions=(QUANTIZE,),
        variant=QUANTIZE_VARIANT,
        schedules=("quantize.schedule", "quantize.tiles"),
        specs="attngen.schema.helper_kernels:quantizers",
        facts="attngen.families.quantize.explain:facts",
        trial="attngen.lab.verify.quantized:try_quantize",
    ),
    Operation(
        "widen",
        {},
        directions=(WIDEN,),
        variant=WIDEN_VARIANT,
        schedules=("widen.schedule",),
        specs="attngen.schema.helper_kernels:wideners",
        facts="attngen.families.widen.explain:facts",
        trial="attngen.lab.verify.widened:try_widen",
    ),
    Operation(
        "index_scores",
        {"call": ("block_scores", "index_scores")},
        operators=("operator",),
        directions=SCORES,  # entries of a spec ask for these, and their variants are those of attention
        schedules=("index_scores.schedule", "index_scores.blocks"),
        facts="attngen.families.index_scores.explain:facts",
        trial="attngen.lab.verify.selected:try_index_scores",
    ),
    Operation(
        "topk",
        {"call": ("topk",)},
        operators=("operator",),
        directions=(TOPK,),
        variant=TOPK_VARIANT,
        schedules=("topk.schedule", "topk.warps"),
        specs="attngen.schema.helper_kernels:selectors",
        facts="attngen.families.topk.explain:facts",
        trial="attngen.lab.verify.selected:try_topk",
    ),
    Operation(
        "block_mask",
        {"call": ("block_mask",)},
        operators=("operator",),
        directions=(BLOCK_MASK,),
        variant=BLOCK_MASK_VARIANT,
        schedules=("block_mask.schedule",),
        specs="attngen.schema.helper_kernels:block_maskers",
        facts="attngen.families.block_mask.explain:facts",
        trial="attngen.lab.verify.block_masks:try_block_mask",
    ),
    ATTENTION,
)

_BY_DIRECTION = {direction: operation for operation in OPERATIONS for direction in operation.directions}

#: Directions of kernels that are not attention.
HELPERS = frozenset(_BY_DIRECTION) - {*ATTENTION.directions}

#: Names in the place of a variant.
HELPER_VARIANTS = frozenset(operation.variant for operation in OPERATIONS if operation.variant)


def operation_of(direction: str) -> Operation:
    """The operation whose kernels have a direction. Raises InternalError if none has it."""
    operation = _BY_DIRECTION.get(direction)
    if operation is None:
        from attngen.errors import InternalError  # not with attngen itself

        known = ", ".join(_BY_DIRECTION)
        raise InternalError(f"no row of attngen/operations.py has kernels of direction '{direction}'; known: {known}")
    return operation
