"""The memory tier, rule by rule: its chunks are right, bounded, kept while in use, and dropped when damaged."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore.codec.image import make_images
from kvstore.core.address import block_address
from kvstore.core.buffers import BufferLoan
from kvstore.core.clock import RandomIds
from kvstore.core.namespace import Namespace
from kvstore.format.keyset import BlockKeys
from kvstore.native import is_available
from kvstore.native import library as native
from kvstore.tiers.memory import Slots
from tests.kit.memory_tiers import SPACE, UNIT, Case, chain_of, empty, make
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import LARGE, TINY


@pytest.fixture
def case() -> Iterator[Case]:
    """Room for eight chunks."""
    opened = Case(8)
    yield opened
    opened.tier.close()


def test_i2_room_of_what_was_dropped_is_not_given_away_while_it_is_referred_to(case: Case) -> None:
    chain, others = chain_of(1, 1), chain_of(2, 8)
    case.fill(chain, 0, 1)
    with case.tier.refer(chain, 0, 1) as slots:
        empty(case.tier, SPACE)
        assert case.tier.leading(chain) == 0
        assert case.fill(others, 0, 8) == 7 and case.count("full") == 1
        assert case.read(chain, slots, 0, 1) == [True]
    assert case.fill(others, 7, 1) == 1


def test_a2_closing_takes_nothing_from_those_who_read_or_fill(case: Case) -> None:
    chain = chain_of(1, 3)
    case.fill(chain, 0, 2)
    slots, slot = case.tier.refer(chain, 0, 2), case.tier.claim(chain, 2)
    payload = case.tier.view(slots, 1)
    assert slot is not None and payload is not None
    expected = bytes(payload)
    case.tier.close()
    case.tier.close()
    make(chain, [2], [slot])
    case.tier.ready([slot])
    assert case.read(chain, slots, 0, 2) == [True, True] and case.tier.verified(slots) == 2
    slots.release()
    assert bytes(payload) == expected
    assert case.tier.leading(chain) == 0 and case.get(chain) == [False] * 3
    assert case.tier.claim(chain, 0) is None and not case.tier.lease(slots)
    assert case.stat("referenced_bytes") == 0


def test_release_never_waits_and_is_not_lost(case: Case) -> None:
    """A finalizer may run while its own thread holds the lock."""
    chain = chain_of(1, 2)
    case.fill(chain, 0, 2)
    slots = case.tier.refer(chain, 0, 2)
    case.tier.lease(slots)
    with case.tier._lock:
        slots.release()
    assert case.stat("referenced_bytes") == case.stat("leased_bytes") == 0


def test_victims_are_kept_until_they_are_elsewhere_and_go_unless_somebody_needs_them(case: Case) -> None:
    chain = chain_of(1, 8)
    case.fill(chain, 0, 8)
    with case.tier.victims(2 * UNIT) as victims:
        assert [entry.address for entry in victims.referred] == list(chain.addresses[:4:-1])
        assert bytes(victims.present_images()[0][40:56]) == chain.addresses[7]
        assert case.fill(chain_of(2, 1), 0, 1) == 0
        with case.tier.refer(chain, 6, 1):
            case.tier.evict(victims.referred)
        assert case.tier.free_bytes < UNIT
    assert case.tier.leading(chain) == 7 and case.count("evicted") == 1
    assert UNIT <= case.tier.free_bytes < 2 * UNIT
    with case.tier.victims(1 << 40) as victims:
        assert len(victims.referred) == 7
        with case.tier.refer(chain, 2, 1):
            case.tier.evict(victims.referred)
    assert case.tier.leading(chain) == 3


def test_blocks_of_other_sizes_than_asked_for_are_not_there(case: Case) -> None:
    keys = [b"k" * 16, b"l" * 32]

    def keyed(*sizes: int) -> BlockKeys:
        return BlockKeys(SPACE, keys, [block_address(SPACE, key) for key in keys], sizes)

    blocks = [np.full(size, 7 + size % 5, np.uint8) for size in (3000, 9000)]
    slots = [case.tier.claim(keyed(3000, 9000), index) for index in range(2)]
    there = [slot for slot in slots if slot is not None]
    make_images(keyed(3000, 9000), [0, 1], lambda at: [blocks[at].data], [slot.memory for slot in there], RandomIds())
    case.tier.ready(there)
    out = [np.zeros(size, np.uint8) for size in (3000, 9000)]
    with case.tier.refer(keyed(3000, 9000), 0, 2) as both:
        assert case.tier.read(both, 0, 2, lambda at: [out[at].data], BufferLoan()).all()
        payload = case.tier.view(both, 1)
        assert payload is not None and np.array_equal(np.frombuffer(payload, np.uint8), blocks[1])
    assert all(map(np.array_equal, out, blocks))
    with case.tier.refer(keyed(3000, 9001), 0, 2) as one:
        assert [entry is not None for entry in one.entries] == [True, False]
    assert case.tier.leading(keyed(1, 1)) == 2 and case.count("damaged") == 0


@pytest.mark.parametrize(
    "is_native",
    [
        pytest.param(True, id="native", marks=pytest.mark.skipif(not is_available(), reason="no native library")),
        pytest.param(False, id="python"),
    ],
)
def test_many_threads_fill_read_damage_and_evict(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte is ever wrong, nothing leaks, the bound is kept (I1, I2, A1, E2, R3)."""
    if not is_native:
        monkeypatch.setattr(native, "library", native.PurePython)
    case = Case(40)
    spaces = [Namespace.of(f"m{number}", TINY) for number in range(3)]
    chains = [chain_of(number, 12, spaces[number % 3]) for number in range(6)]
    began_s = time.monotonic()
    outcomes = [0, 0]

    def all_happened() -> bool:
        return min(outcomes) > 0 and case.count("evicted") > 0 and case.count("damaged") > 0

    def goes_on() -> bool:
        passed_s = time.monotonic() - began_s
        return passed_s < 1.0 or (passed_s < PATIENCE_S and not all_happened())

    def act(seed: int) -> None:
        generator = np.random.default_rng(seed)
        while goes_on():
            chain = chains[int(generator.integers(len(chains)))]
            first = int(generator.integers(len(chain)))
            choice = int(generator.integers(12))
            if choice < 5:
                count = int(generator.integers(1, 8))
                case.fill(chain, first, min(count, len(chain) - first), dirty=choice == 0)
            elif choice < 10:
                with case.tier.refer(chain, first, len(chain) - first) as slots:
                    case.tier.lease(slots)
                    for right in case.read(chain, slots, first, len(chain)):
                        outcomes[right] += 1
                    case.tier.clean(slots.referred)
            elif choice == 10:
                with case.tier.refer(chain, first, 1) as slots:
                    for entry in slots.referred:
                        case.arena.memory[entry.offset + 4100] ^= 1
                        case.tier.verified(slots)
            elif seed == 1:
                empty(case.tier, *spaces)
            else:
                with case.tier.victims(3 * UNIT) as victims:
                    case.tier.evict(victims.referred)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(act, range(4)))
    assert all_happened()
    empty(case.tier, *spaces)
    assert case.stat("held_bytes") == case.stat("referenced_bytes") == case.stat("leased_bytes") == 0
    assert case.stat("chunks") == 0 and case.tier.free_bytes == case.tier.size_bytes
    case.tier.close()


def test_a_tier_that_is_forgotten_gives_its_memory_back() -> None:
    before = resident_bytes()
    case = Case(4000)
    chain = chain_of(1, 50, Namespace.of("m", LARGE))
    claimed = [case.tier.claim(chain, index) for index in range(50)]
    filled = [slot for slot in claimed if slot is not None]
    for slot in filled:
        slot.memory[:] = bytes(len(slot.memory))
    case.tier.ready(filled)
    slots: Slots | None = case.tier.refer(chain, 0, 1)
    assert resident_bytes() - before > 25 << 20
    case.tier.close()
    del case, claimed, filled, slot
    gc.collect()
    assert resident_bytes() - before > 25 << 20, "somebody may still read in it"
    slots = None
    gc.collect()
    assert resident_bytes() - before < 5 << 20 and slots is None


def resident_bytes() -> int:
    """Pages of shared memory in this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssShmem"))
