"""Planning of a batch by shared prefixes, and its runs, by public calls of a cache alone. PLANNING.md has the algorithm
and its bounds.

``prompts`` packs a batch, ``trie`` finds what is shared, ``stored`` what a store holds, ``grouping`` the groups,
``ordering`` the order, ``arrival`` what order of arrival would save; ``plan`` puts them together. ``run`` gives the
groups to those who run them, as ``handing`` decides, with ``storage`` as the store. ``packing`` fills the steps of an
engine.
"""

from kvstore.planning.packing import Step, pack
from kvstore.planning.plan import Plan, Rest, make_plan
from kvstore.planning.prompts import Group, Prompts
from kvstore.planning.run import Handing, Run, SharedRun, Taken
from kvstore.planning.storage import KeyStorage, Storage, TokenStorage

__all__ = [
    "Group",
    "Handing",
    "KeyStorage",
    "Plan",
    "Prompts",
    "Rest",
    "Run",
    "SharedRun",
    "Step",
    "Storage",
    "Taken",
    "TokenStorage",
    "make_plan",
    "pack",
]
