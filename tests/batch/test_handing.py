"""Handing out groups: in order, within memory, and each until it is done or has failed too often."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.batch import Group, GroupStates

ATTEMPTS = 3


def group(prefix: int) -> Group:
    return Group(prefix_tokens=prefix, stored_tokens=0, members=(0,), computed=(1,), stored=(0,))


def handing(*prefixes: int, memory: int = 100) -> GroupStates:
    return GroupStates([group(prefix) for prefix in prefixes], memory, ATTEMPTS)


def test_groups_go_out_in_order_and_a_returned_one_first() -> None:
    given_out = handing(5, 5, 5)
    assert [given_out.take(), given_out.take()] == [0, 1]
    given_out.give_back(0)
    assert given_out.ahead(5) == [0, 2]
    assert [given_out.take(), given_out.take(), given_out.take()] == [0, 2, None]
    for index in (2, 0, 1):
        assert not given_out.is_over
        given_out.done(index)
    assert given_out.is_over and not given_out.failed


def test_a_group_that_is_given_back_too_often_has_failed() -> None:
    given_out = handing(1, 1)
    for _ in range(ATTEMPTS):
        assert given_out.take() == 0
        given_out.give_back(0)
    assert given_out.failed == [0]
    assert given_out.take() == 1
    given_out.done(1)
    assert given_out.is_over


class HandingMachine(RuleBasedStateMachine):
    """Consumers that take, finish and die in any order: no group is lost, none runs twice at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [10, 20, 60, 5, 150, 0, 30]
        self.handing = handing(*self.sizes, memory=100)
        self.taken: set[int] = set()
        self.ended: set[int] = set()
        self.attempts = [0] * len(self.sizes)

    @rule()
    def take(self) -> None:
        index = self.handing.take()
        if index is not None:
            assert index not in self.taken | self.ended
            self.taken.add(index)
            self.attempts[index] += 1

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), dies=st.booleans())
    def leave(self, data: st.DataObject, dies: bool) -> None:
        index = data.draw(st.sampled_from(sorted(self.taken)))
        self.taken.remove(index)
        if dies:
            self.handing.give_back(index)
        else:
            self.handing.done(index)
        if not dies or self.attempts[index] == ATTEMPTS:
            self.ended.add(index)

    @invariant()
    def memory_holds_what_is_taken(self) -> None:
        assert len(self.taken) <= 1 or sum(self.sizes[index] for index in self.taken) <= 100
        assert self.handing.is_over == (len(self.ended) == len(self.sizes))
        assert not self.taken & set(self.handing.ahead(9))

    def teardown(self) -> None:
        while not self.handing.is_over:
            while (index := self.handing.take()) is not None:
                self.taken.add(index)
            for index in self.taken:
                self.handing.done(index)
            self.taken.clear()


TestHandingMachine = HandingMachine.TestCase
