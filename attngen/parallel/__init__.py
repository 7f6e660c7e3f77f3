"""Context parallelism: one sequence on several GPUs, for any mask, over ``torch.distributed``.

May import ``lang``, ``runtime`` and ``variants``. Needs torch and numpy, and what making a variant needs.
"""

from attngen.parallel.cost import Cost
from attngen.parallel.decoding import decode
from attngen.parallel.explanation import Explanation
from attngen.parallel.making import plan
from attngen.parallel.plans import Plan
from attngen.parallel.simulation import Links, Simulated, simulate

__all__ = ["Cost", "Explanation", "Links", "Plan", "Simulated", "decode", "plan", "simulate"]
