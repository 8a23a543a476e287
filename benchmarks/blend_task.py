"""Synthetic prompts of several documents, in which a document says what only an earlier one explains.

A prompt is BOS, documents (SEP, then statements in any order), and questions (ASK, then pairs of key and value). Every
statement is one token: ``define(alias, value)``; ``literal(key, value)``; ``refer(key, alias)``, whose alias is defined
within the document or in an earlier one (``CROSS``); ``link(alias, other)``, an alias for one of an earlier document,
and references to it (``FAR``: two hops); and fillers. The answer to a key is its value, behind aliases where it has
some. Made for blending: KV of a document computed alone cannot know what a ``CROSS`` or ``FAR`` reference means.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

VALUES, ALIASES, KEYS, FILLERS = 10, 16, 32, 32
DEFINE = VALUES  # + alias * VALUES + value
LITERAL = DEFINE + ALIASES * VALUES  # + key * VALUES + value
REFER = LITERAL + KEYS * VALUES  # + key * ALIASES + alias
QUESTION = REFER + KEYS * ALIASES  # + key
FILLER = QUESTION + KEYS
BOS, SEP, ASK = range(FILLER + FILLERS, FILLER + FILLERS + 3)
LINK = ASK + 1  # + alias * ALIASES + other
VOCABULARY = LINK + ALIASES * ALIASES


class Kind(enum.Enum):
    """The kinds of statements; those from CROSS on are asked about."""

    DEFINE = "define"
    LINK = "link"
    FILLER = "filler"
    CROSS = "cross"
    FAR = "far"
    WITHIN = "within"
    LITERAL = "literal"


ASKED = (Kind.CROSS, Kind.FAR, Kind.WITHIN, Kind.LITERAL)


@dataclass(frozen=True, slots=True)
class Shape:
    """How many statements of each kind a document has. The first one has fillers for what needs an earlier one."""

    documents: int = 4
    define: int = 4
    cross: int = 3
    within: int = 2
    literal: int = 3
    filler: int = 12
    link: int = 0
    far: int = 0
    questions: int = 12

    @property
    def document_tokens(self) -> int:
        """Tokens of a document, its SEP included."""
        return 1 + self.define + self.cross + self.within + self.literal + self.filler + self.link + self.far


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. ``kinds`` are those of its questions; ``meanings`` the values behind references, by index."""

    documents: list[list[int]]
    questions: list[int]
    kinds: list[Kind]
    meanings: dict[int, int]

    @property
    def ids(self) -> list[int]:
        """All tokens, BOS first."""
        return [BOS, *(token for document in self.documents for token in document), *self.questions]

    @property
    def starts(self) -> list[int]:
        """The index of each document's first token."""
        return [1 + sum(map(len, self.documents[:at])) for at in range(len(self.documents))]

    @property
    def asked_at(self) -> list[int]:
        """The index of each question's key, where the model says the answer."""
        end = 1 + sum(map(len, self.documents))
        return list(range(end + 1, end + len(self.questions), 2))

    @property
    def answers(self) -> list[int]:
        """The value of each question."""
        return self.questions[2::2]


@dataclass(slots=True)
class _Writer:
    """Writes a prompt's documents one after another."""

    chance: random.Random
    aliases: deque[int]
    keys: deque[int]
    earlier: list[tuple[int, int]] = field(default_factory=list)
    """Aliases and values that documents before this one defined."""
    told: list[tuple[int, int, Kind]] = field(default_factory=list)
    """Key, value and kind of all statements that can be asked about."""
    meanings: dict[int, int] = field(default_factory=dict)

    def document(self, kinds: Sequence[Kind], start: int) -> list[int]:
        """Returns the tokens of a document at index ``start`` with statements of these kinds, in order."""
        tokens, own, linked = [SEP], list[tuple[int, int]](), list[tuple[int, int]]()
        sources = {Kind.CROSS: self.earlier, Kind.FAR: linked, Kind.WITHIN: own}
        for kind in kinds:
            at, value = start + len(tokens), self.chance.randrange(VALUES)
            if kind is Kind.DEFINE:
                own.append((self.aliases.popleft(), value))
                token = DEFINE + own[-1][0] * VALUES + value
            elif kind is Kind.LINK:
                alias, self.meanings[at] = self.chance.choice(self.earlier)
                linked.append((self.aliases.popleft(), self.meanings[at]))
                token = LINK + linked[-1][0] * ALIASES + alias
            elif kind is Kind.FILLER:
                token = FILLER + self.chance.randrange(FILLERS)
            else:
                key = self.keys.popleft()
                token = LITERAL + key * VALUES + value
                if kind is not Kind.LITERAL:
                    alias, value = self.chance.choice(sources[kind])
                    token, self.meanings[at] = REFER + key * ALIASES + alias, value
                self.told.append((key, value, kind))
            tokens.append(token)
        self.earlier += own
        return tokens


def sample(chance: random.Random, shape: Shape) -> Prompt:
    """Returns a prompt; the same state of ``chance`` gives the same one."""
    aliases, keys = list(range(ALIASES)), list(range(KEYS))
    chance.shuffle(aliases)
    chance.shuffle(keys)
    writer = _Writer(chance, deque(aliases), deque(keys))
    documents = [
        writer.document(_ordered(chance, shape, number > 0), 1 + number * shape.document_tokens)
        for number in range(shape.documents)
    ]
    picked = _picked(chance, writer.told, shape.questions)
    questions = [ASK, *(token for key, value, _ in picked for token in (QUESTION + key, value))]
    return Prompt(documents, questions, [kind for _, _, kind in picked], writer.meanings)


def _ordered(chance: random.Random, shape: Shape, has_earlier: bool) -> list[Kind]:
    """Returns the kinds of a document's statements; what others of the document refer to stands before them."""
    needing = [Kind.CROSS] * shape.cross + [Kind.LINK] * shape.link + [Kind.FAR] * shape.far
    kinds = [Kind.DEFINE] * shape.define + [Kind.WITHIN] * shape.within + [Kind.LITERAL] * shape.literal
    kinds += [Kind.FILLER] * shape.filler + (needing if has_earlier else [Kind.FILLER] * len(needing))
    chance.shuffle(kinds)
    for source, user in ((Kind.DEFINE, Kind.WITHIN), (Kind.LINK, Kind.FAR)):
        if user in kinds and (first := kinds.index(source)) > (early := kinds.index(user)):
            kinds[early], kinds[first] = source, user
    return kinds


def _picked(chance: random.Random, told: list[tuple[int, int, Kind]], count: int) -> list[tuple[int, int, Kind]]:
    """Returns statements to ask about: of each kind in turn."""
    chance.shuffle(told)
    by = [[each for each in told if each[2] is kind] for kind in ASKED]
    turns = [each for row in range(len(told)) for group in by for each in group[row : row + 1]]
    picked = turns[:count]
    chance.shuffle(picked)
    return picked
