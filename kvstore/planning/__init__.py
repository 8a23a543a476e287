"""Planning of a batch by shared prefixes: values in, values out. PLANNING.md has the algorithm and its bounds.

``prompts`` packs a batch, ``trie`` finds what is shared, ``stored`` what a store holds, ``grouping`` the groups,
``ordering`` the order, ``arrival`` what order of arrival would save; ``plan`` puts them together. ``handing`` gives
the groups to those who run them, and ``packing`` fills the steps of an engine.
"""

from kvstore.planning.handing import Handing
from kvstore.planning.packing import Step, pack
from kvstore.planning.plan import Group, Plan, Rest, make_plan
from kvstore.planning.prompts import Prompts
from kvstore.planning.stored import Ask

__all__ = ["Ask", "Group", "Handing", "Plan", "Prompts", "Rest", "Step", "make_plan", "pack"]
