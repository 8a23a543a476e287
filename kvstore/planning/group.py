"""A group of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that run one after another behind one shared prefix."""

    prefix_tokens: int
    """Leading tokens that all members share; 0 for a prompt that shares nothing."""
    stored_tokens: int
    """Leading tokens of the prefix that the store held when the plan was made."""
    shared_before: int
    """Leading tokens that the first member shares with the prompt before it in the plan's order."""
    members: tuple[int, ...]
    """Indices of the prompts in the batch, in the order to run them."""
    computed: tuple[int, ...]
    """Tokens that each member computes, run in the plan's order."""
    stored: tuple[int, ...]
    """Leading tokens of each member that the store held when the plan was made."""

    @property
    def tokens_to_compute(self) -> int:
        """Tokens that all members compute."""
        return sum(self.computed)
