"""A round of chats as it was played: its sizes, its turns, and the figures that follow from them.

Separate from playing it (turns.py), so that the figures can be tested without servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks.streams import Reply
from tests.engines.vllm.engines import BLOCK_TOKENS

SERVERS = 2


@dataclass(frozen=True)
class Sizes:
    """A round. ``held``: the share of its chats that one server's memory holds, beside the system prompt."""

    held: float = 0.5
    chats: int = 8
    chatters: int = 4
    turns: int = 4
    system_tokens: int = 1024
    asked_tokens: int = 128
    answered_tokens: int = 32

    @property
    def own_tokens(self) -> int:
        """Tokens of a chat, without the system prompt."""
        return self.turns * (self.asked_tokens + self.answered_tokens)

    @property
    def longest_tokens(self) -> int:
        """Tokens of a whole chat."""
        return self.system_tokens + self.own_tokens

    @property
    def blocks(self) -> int:
        """Blocks of one server's memory: at least those that all chatters need at once."""
        shared, each = -(-self.system_tokens // BLOCK_TOKENS), -(-self.own_tokens // BLOCK_TOKENS)
        return shared + max(self.chatters, round(self.held * self.chats)) * (each + 1)


QUICK = Sizes(chats=4, chatters=2, turns=3, system_tokens=256, asked_tokens=64, answered_tokens=16)


@dataclass(frozen=True)
class Turn:
    """One request of a chat, and its answer."""

    prompt: list[int]
    reply: Reply


Chat = list[Turn]


@dataclass
class Played:
    """A round of one way. CPU: of both servers, until they have stored what they store."""

    sizes: Sizes
    chats: list[Chat]
    wall_s: float
    cpu_s: float
    loaded_tokens: float

    @property
    def turns(self) -> list[Turn]:
        """All turns."""
        return [turn for chat in self.chats for turn in chat]

    @property
    def first_token_s(self) -> float:
        """The median of the turns after the first."""
        return median(turn.reply.first_token_s for chat in self.chats for turn in chat[1:])

    @property
    def request_cpu_s(self) -> float:
        """CPU seconds of a request."""
        return self.cpu_s / len(self.turns)

    @property
    def requests_per_s(self) -> float:
        """Answers a second, of both servers."""
        return len(self.turns) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens answered a second."""
        return sum(len(turn.reply.tokens) for turn in self.turns) / self.wall_s

    @property
    def asked_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(turn.prompt) for turn in self.turns)

    @property
    def computed(self) -> float:
        """The share of them that the servers computed."""
        return 1 - sum(turn.reply.cached_tokens for turn in self.turns) / self.asked_tokens

    @property
    def loaded(self) -> float:
        """The share of them that came from a store."""
        return self.loaded_tokens / self.asked_tokens

    @property
    def needed(self) -> float:
        """The share of them that servers with one unlimited memory compute if their first requests come at once."""
        computed = 0
        for number, chat in enumerate(self.chats):
            known = self.sizes.system_tokens if number >= SERVERS else 0
            for turn in chat:
                computed += len(turn.prompt) - min(known, len(turn.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                known = len(turn.prompt) + len(turn.reply.tokens) - 1  # the last token's KV was not computed
        return computed / self.asked_tokens
