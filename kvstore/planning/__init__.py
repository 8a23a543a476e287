"""Planning of a batch by shared prefixes, and its runs, by public calls of a cache alone. PLANNING.md has the algorithm
and its bounds.
"""

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
    "Storage",
    "Taken",
    "TokenStorage",
    "make_plan",
]
