"""Planning of a batch by shared prefixes, and its runs, by public calls of a cache alone. PLANNING.md has the algorithm
and its bounds.
"""

from kvstore.planning.plan import Plan, Rest, make_plan
from kvstore.planning.prompts import Group, PromptSet
from kvstore.planning.run import GroupStates, LeasedGroup, Run, SharedRun
from kvstore.planning.storage import KeyStorage, Storage, TokenStorage

__all__ = [
    "Group",
    "GroupStates",
    "KeyStorage",
    "LeasedGroup",
    "Plan",
    "PromptSet",
    "Rest",
    "Run",
    "SharedRun",
    "Storage",
    "TokenStorage",
    "make_plan",
]
