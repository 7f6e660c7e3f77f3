"""``attngen.debug``: checked calls, and a look at the logits and errors of one call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from attngen.runtime.arguments.debug import debug as checking

if TYPE_CHECKING:
    import torch

    from attngen.inspect.comparison import Comparison
    from attngen.inspect.scores import Chosen, Scores
    from attngen.lang.variant import Variant


class Debug:
    """``with attngen.debug():`` checks the tensors of calls; ``scores`` and ``compare`` inspect one call."""

    def __call__(self) -> AbstractContextManager[None]:
        """Check the contents of every call inside: cu_seqlens, seqused_k, declared ranges and monotone axes.

        A fact that does not hold raises CallError before anything is launched. It waits for the GPU.
        """
        return checking()

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, variant: str | Variant = "full",
        rows: Chosen = None, heads: Chosen = None, b: int = 0, dtype: torch.dtype | None = None, **options: Any,
    ) -> Scores:  # fmt: skip
        """Return logits, mask and probabilities of some rows and heads of sequence ``b``: (heads, rows, keys) each.

        Takes the arguments of ``attention``, ``attention_varlen`` or ``attention_paged``, by name after q, k and v.
        ``logits`` are those after the score expression. ``rows`` and ``heads`` are a number, a slice, several, or all
        if left out; negative ones count from the end. Only what was chosen is computed, by the reference in ``dtype``:
        float64, unless it says float32. The result has ``plot``. Raises CallError.
        """
        import torch

        from attngen.inspect.scores import scores

        return scores(
            q, k, v, variant=variant, rows=rows, heads=heads, b=b, dtype=dtype or torch.float64, **options
        )  # fmt: skip

    def compare(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, variant: str | Variant = "full",
        rows: Chosen = None, heads: Chosen = None, b: Chosen = None, gradients: bool = False,
        dout: torch.Tensor | None = None, **options: Any,
    ) -> Comparison:  # fmt: skip
        """Run a call, and say where it differs from the reference in float64: by head, row and tile.

        Takes the arguments of a call as ``scores`` does, and compares out and log-sum-exp of all sequences ``b``, heads
        and rows, or of those that are chosen; of a call with very many logits, a sample of its rows. With ``gradients``
        those of q, k, v and of tensors with ``grad: true`` are compared, too, for ``dout`` or for a random one. Without
        a GPU the reference in the dtype of q is compared, and the result says so. The result prints, and has ``plot``.
        Waits for the GPU. Raises what the call raises.
        """
        from attngen.inspect.comparison import compare

        return compare(
            q, k, v, variant=variant, rows=rows, heads=heads, b=b, gradients=gradients, dout=dout, **options
        )  # fmt: skip

    def __repr__(self) -> str:
        return "<attngen.debug>"


debug = Debug()
