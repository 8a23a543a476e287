"""Questions in tokens about blocks that engines hash: never more than is told, whatever happens to the blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.events import inventory
from kvstore.events.columns import NO_ROW, Spellings
from kvstore.events.http import Answers
from kvstore.keyset import ChunkKeys
from kvstore.wire.query import Question
from tests.events.engines import SIZE, Prompt, prompt_of, put_blocks
from tests.events.test_speaker import Publishing
from tests.kit.clusters import SPACE, Cluster, put
from tests.kit.events import Ticking
from tests.kit.patience import eventually


class Asking:
    """A publisher, and how many leading blocks of a prompt it answers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.publishing = Publishing(cluster, Ticking())
        self.answers = Answers(self.publishing.truth, "pod", "STORAGE")

    def blocks(self, prompt: Prompt, more: int = 0) -> int:
        self.publishing.catch_up()
        tokens = [token for each in prompt.descents for token in each.tokens] + [7] * more
        question = Question(SPACE.name, SPACE.tenant, np.array(tokens, np.uint32), None)
        found: int = self.answers.answer(question)["blocks"]
        by_hashes = self.answers.answer(replace(question, tokens=None, hashes=prompt.hashes))["blocks"]
        assert found <= by_hashes
        return found

    def remove(self, prompt: Prompt, at: int) -> None:
        self.cluster.root.remove(self.cluster.name(prompt.addresses[at]))


@pytest.fixture
def asking(clustered: Cluster) -> Asking:
    return Asking(clustered)


def test_tokens_find_the_blocks_of_an_engine_up_to_the_first_that_is_not_told(asking: Asking) -> None:
    node, prompts = asking.cluster.node(), [prompt_of(seed, 30) for seed in range(3)]
    for each in prompts:
        put_blocks(node, each)
    assert [asking.blocks(each, SIZE + 1) for each in prompts] == [30, 30, 30]
    assert asking.blocks(prompt_of(9, 30)) == 0
    for at in (29, 17, 1, 0):
        asking.remove(prompts[1], at)
        assert asking.blocks(prompts[1]) == at
    node.node.forget()
    put_blocks(node, prompts[1])
    assert [asking.blocks(each) for each in prompts] == [30, 30, 30]


def test_chunks_and_blocks_of_one_prompt_both_answer(asking: Asking) -> None:
    node, prompt = asking.cluster.node(), prompt_of(1, 5)
    tokens = np.array([token for each in prompt.descents for token in each.tokens], np.uint32)
    put_blocks(node, prompt, range(2))
    assert asking.blocks(prompt) == 2
    chain = ChunkKeys.of(SPACE, tokens[: 4 * SIZE])
    put(node, chain)
    asking.publishing.catch_up()
    assert asking.answers.answer(Question(SPACE.name, SPACE.tenant, tokens, None))["blocks"] == 4


def test_what_tokens_alone_do_not_lead_to_is_not_found_by_them(asking: Asking) -> None:
    node, adapted, mixed = asking.cluster.node(), prompt_of(1, 3, "sql"), prompt_of(2, 4)
    put_blocks(node, adapted.saying(0, extra=b'{"lora_name": "sql"}'))
    put_blocks(node, mixed.saying(1, extra=b'{"extra_keys": ["an image"]}'))
    assert asking.blocks(adapted) == 0
    assert asking.blocks(mixed) == 1, "and none behind it"


def test_a_block_that_comes_again_with_other_tokens_answers_to_those_alone(asking: Asking) -> None:
    node, prompt = asking.cluster.node(), prompt_of(1, 1)
    other = prompt.saying(0, tokens=[9] * SIZE)
    put_blocks(node, prompt)
    assert (asking.blocks(prompt), asking.blocks(other)) == (1, 0)
    asking.remove(prompt, 0)
    assert asking.blocks(prompt) == 0
    node.node.forget()
    put_blocks(node, other)
    assert (asking.blocks(prompt), asking.blocks(other)) == (0, 1)


def spelled(spellings: Spellings, row: int, first_token: int) -> npt.NDArray[np.uint64]:
    """Spells a first block, and returns the first 8 bytes of its spelling."""
    tokens = np.arange(first_token, first_token + SIZE, dtype=np.uint32)
    rows = np.array([row], np.int32)
    spellings.spell(rows, np.array([NO_ROW], np.int32), tokens.reshape(1, SIZE), [True])
    return np.frombuffer(ChunkKeys.of(SPACE, tokens).addresses[0], ">u8")[:1].astype(np.uint64)


def test_blocks_are_spelled_some_at_a_time_and_meanwhile_too_little_is_answered(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "SPELLED_MAX", 1)
    node, before, prompt = asking.cluster.node(), [prompt_of(seed, 1) for seed in range(10, 50)], prompt_of(1, 10)
    other = prompt.saying(0, tokens=[9] * SIZE)
    for each in before:
        put_blocks(node, each)
    asking.publishing.catch_up()
    put_blocks(node, prompt)
    seen = [asking.blocks(prompt)]
    while seen[-1] < 10:
        asking.publishing.speaker.step()
        seen.append(asking.blocks(prompt))
    assert seen[0] < 10 and seen == sorted(seen)
    for each in [*before, prompt]:
        asking.remove(each, 0)
    assert asking.blocks(prompt) == 0
    node.node.forget()
    for each in before:
        put_blocks(node, each)
    put_blocks(node, other, range(1))
    assert asking.blocks(prompt) == 0, "its first block is told again, with other tokens, and not spelled yet"
    eventually(lambda: asking.blocks(other) == 10)
    assert asking.blocks(prompt) == 0
