"""Compiled kernels on disk, under a hash of all their inputs, safe with many processes and crashes.

Importing this package imports only what reading an entry needs: no compiler, no locks, no platform lookup.
"""

from attngen.cache_root import default_root
from attngen.store.key import cache_key
from attngen.store.store import Damage, Store, StoreWarning

__all__ = ["Damage", "Store", "StoreWarning", "cache_key", "default_root"]
