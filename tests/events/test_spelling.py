"""Questions in tokens about blocks that engines hash: never more than is told, whatever happens to the blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore.events.query import Answers, Question
from tests.events.engines import SIZE, Prompt, prompt_of, put_blocks
from tests.events.test_speaker import Publishing
from tests.kit.clusters import SPACE, Cluster
from tests.kit.events import Ticking


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
