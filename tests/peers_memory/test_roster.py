"""P3: which of several peers is asked, and how one that failed is left alone and taken back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from kvstore.peers.limits import PeerLimits
from kvstore.peers.selection import Peer, PeerSelector
from tests.kit.etcd import eventually
from tests.kit.fake_meta import FakeClock
from tests.kit.peer_channel import chain_of, honest, speaking
from tests.kit.ports import free_port

A, B, C = "10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7"
MIB = 1 << 20


class Ground:
    """A roster with time and chance of a test's own."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.limits = PeerLimits(aside_s_min=1.0, aside_s_max=5.0)
        self.roster = PeerSelector(self.limits, self.clock, Random(1))

    def ask(self, covered: dict[str, int], without: set[str] | None = None) -> Peer | None:
        """Chooses, and is done at once."""
        peer = self.roster.choose(covered, without or set())
        if peer is not None:
            self.roster.leave(peer)
        return peer

    def measured(self, address: str, s_per_mib: float) -> None:
        peer = self.ask({address: 1})
        assert peer is not None
        for _ in range(30):
            self.roster.praise(peer, MIB, s_per_mib)

    def shares(self, covered: dict[str, int], times: int = 1000) -> Counter[str]:
        return Counter(peer.address for _ in range(times) if (peer := self.ask(covered)))


@pytest.fixture
def ground() -> Iterator[Ground]:
    made = Ground()
    yield made
    made.roster.close()


def test_a_slow_one_gets_less_but_not_nothing(ground: Ground) -> None:
    """Or nobody would notice that it is fast again."""
    ground.measured(A, 0.001)
    ground.measured(B, 0.01)
    shares = ground.shares({A: 1, B: 1})
    assert 20 < shares[B] < 200
    ground.measured(B, 0.001)
    assert ground.shares({A: 1, B: 1})[B] > 400


def test_who_has_most_is_asked_before_who_has_little(ground: Ground) -> None:
    shares = ground.shares({A: 10, B: 6, C: 5})
    assert set(shares) == {A, B}


def test_who_failed_is_left_alone_longer_each_time(ground: Ground) -> None:
    address = f"127.0.0.1:{free_port()}"  # nobody answers there
    assert ground.ask({address: 1}) is not None
    for expected_s in (1, 2, 4, 5, 5):
        ground.roster.blame(address, "as a test says")
        assert ground.shares({address: 1, A: 1}, 50) == {A: 50}
        assert ground.ask({address: 1}) is None
        until_s = ground.roster._peers[address].until_s
        assert until_s is not None
        assert until_s - ground.clock.monotonic_s() == expected_s


def test_one_that_does_not_answer_stays_aside(ground: Ground) -> None:
    address = f"127.0.0.1:{free_port()}"
    ground.ask({address: 1})
    ground.roster.blame(address, "as a test says")
    ground.roster.look_after([address])
    assert ground.roster._peers[address].probe is None, "not before its time"
    ground.clock.advance(1.5)
    ground.roster.look_after([address])
    eventually(ground.roster._peers[address].probe.done)
    ground.roster.look_after([address])
    assert ground.roster.aside == {address}


def test_one_that_answers_again_is_taken_back_and_chosen_with_care(ground: Ground) -> None:
    with speaking(honest(chain_of(1))) as speaker:
        ground.measured(A, 0.001)
        ground.measured(speaker.address, 0.001)
        for _ in range(3):
            ground.roster.blame(speaker.address, "as a test says")
        ground.clock.advance(5)
        ground.roster.look_after([A, speaker.address])
        eventually(ground.roster._peers[speaker.address].probe.done)
        ground.roster.look_after([A, speaker.address])
        assert ground.roster.aside == frozenset()
        assert 0 < ground.shares({A: 1, speaker.address: 1})[speaker.address] < 250


def test_who_is_not_listed_any_more_is_let_go_of_once_idle(ground: Ground) -> None:
    peer = ground.roster.choose({A: 1}, set())
    assert peer is not None
    ground.roster.look_after([])
    assert set(ground.roster._peers) == {A}, "it is being read from"
    ground.roster.leave(peer)
    ground.roster.look_after([])
    assert not ground.roster._peers
