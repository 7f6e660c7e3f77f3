"""Context parallelism: one sequence on several GPUs, for any mask, over ``torch.distributed``.

May import ``lang``, ``runtime`` and ``variants``. Needs torch and numpy, and what making a variant needs.
"""

from importlib.util import find_spec

if find_spec("numpy") is None:
    raise ImportError("attngen.parallel needs numpy, which is not installed: pip install 'numpy>=1.26'")

from attngen.parallel.cost import Cost
from attngen.parallel.decoding import decode
from attngen.parallel.explanation import Explanation
from attngen.parallel.making import plan
from attngen.parallel.plans import Plan
from attngen.parallel.simulation import Links, Simulated, simulate

__all__ = ["Cost", "Explanation", "Links", "Plan", "Simulated", "decode", "plan", "simulate"]
