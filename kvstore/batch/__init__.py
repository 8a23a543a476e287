"""Offline batches: their plan by shared prefixes, and its runs, by public calls of a cache alone. PLANNING.md has the
algorithm and its bounds. ``file`` reads batch files and ``upload`` sends them to a server.
"""

from kvstore.batch.plan import Plan, make_plan
from kvstore.batch.prompts import Group, PromptSet
from kvstore.batch.run import GroupStates, LeasedGroup, Run, Storage, TokenStorage

__all__ = [
    "Group",
    "GroupStates",
    "LeasedGroup",
    "Plan",
    "PromptSet",
    "Run",
    "Storage",
    "TokenStorage",
    "make_plan",
]
