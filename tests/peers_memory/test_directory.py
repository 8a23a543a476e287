"""The directory against a plain dictionary; and which of the peers' reports it is made from."""

from __future__ import annotations

from random import Random

from kvstore.core.address import Address
from kvstore.meta.keys import SessionId
from kvstore.meta.workers import AddressTold, DigestTold
from kvstore.peers.reports import STEP_FIRST, Directory, PeerReports, encode
from tests.kit.peer_reports import addresses_of, shard_of, sorted_prints

A, B, OWN = "10.0.0.1:7", "10.0.0.2:7", "10.0.0.9:7"


def session(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def tell(told: PeerReports, number: int, addresses: list[Address]) -> None:
    """All that a session holds, shard by shard."""
    for shard in range(64):
        prints = sorted_prints([each for each in addresses if shard_of(each) == shard])
        told.hear(DigestTold(session(number), shard, encode(prints) or None))


def told_of(held: dict[str, list[Address]]) -> PeerReports:
    told = PeerReports(OWN, 1 << 20)
    for number, (address, addresses) in enumerate(held.items()):
        told.hear(AddressTold(session(number), address, number))
        tell(told, number, addresses)
    return told


def test_lookups_agree_with_a_dictionary() -> None:
    """R1, R4: chunks reported at peers that are not set aside, from any chunk on."""
    for seed in range(20):
        random = Random(seed)
        chunks = addresses_of(random.choice([5, STEP_FIRST, 300]), seed)
        names = [f"10.0.1.{n}:7" for n in range(random.randint(1, 6))]
        held = {name: random.sample(chunks, random.randint(0, len(chunks))) for name in names}
        if random.random() < 0.5:
            held[names[0]] = chunks[: random.randint(0, len(chunks))]
        for name in names:
            held[name] = held[name] + addresses_of(50, random.randrange(1000, 10_000))
        directory = told_of(held).directory()
        sets = {name: set(addresses) for name, addresses in held.items()}
        for aside in ([], [names[0]], names, ["10.9.9.9:7"]):
            for first in {0, 1, random.randrange(len(chunks)), len(chunks)}:
                expected = 0
                for chunk in chunks[first:]:
                    if not any(chunk in sets[name] for name in names if name not in aside):
                        break
                    expected += 1
                assert directory.leading(chunks, first, aside) == expected
        for first in (0, random.randrange(len(chunks))):
            counts = {}
            for name in names:
                count = next(
                    (n for n, each in enumerate(chunks[first:]) if each not in sets[name]), len(chunks) - first
                )
                if count:
                    counts[name] = count
            assert directory.coverage(chunks[first:]) == counts


def test_a_directory_does_not_change_under_a_lookup() -> None:
    """P1: whole immutable structures are replaced."""
    chunks = addresses_of(10)
    told = told_of({A: chunks})
    before = told.directory()
    entries = before.entries.copy()
    tell(told, 0, [])
    after = told.directory()
    assert (before.leading(chunks, 0), after.leading(chunks, 0)) == (10, 0)
    assert (before.entries == entries).all()


def test_a_restarted_worker_speaks_for_its_address() -> None:
    """The old session's digests are still there until its lease ends, and its memory is gone."""
    old, new = addresses_of(4, 1), addresses_of(4, 2)
    told = told_of({A: old})
    assert told.directory().leading(old, 0) == 4
    told.hear(AddressTold(session(7), A, 7))
    tell(told, 7, new)
    directory = told.directory()
    assert (directory.leading(old, 0), directory.leading(new, 0)) == (0, 4)
    told.hear(AddressTold(session(7), None, 0))
    assert told.directory().leading(old, 0) == 4, "the last that is left"


def test_who_leaves_is_forgotten_and_numbers_are_used_again() -> None:
    told = PeerReports(OWN, 1 << 20)
    chunks = addresses_of(8)
    for number in range(200):
        told.hear(AddressTold(session(number), f"10.0.0.1:{number + 1}", number))
        tell(told, number, chunks)
        assert told.directory().coverage(chunks) == {f"10.0.0.1:{number + 1}": 8}
        told.hear(AddressTold(session(number), None, 0))
        for shard in range(64):
            told.hear(DigestTold(session(number), shard, None))
    directory = told.directory()
    assert (len(directory.entries), directory.addresses) == (0, {})


def test_what_is_remembered_is_bounded_and_shared_equally() -> None:
    held = {A: addresses_of(5000, 1), B: addresses_of(5000, 2)}
    told = told_of(held)
    assert len(told.directory().entries) == 10_000
    bounded = PeerReports(OWN, 6400)
    for number, (address, addresses) in enumerate(held.items()):
        bounded.hear(AddressTold(session(number), address, number))
        tell(bounded, number, addresses)
    directory: Directory = bounded.directory()
    by_peer = [int((directory.entries & 0xFFFF == number).sum()) for number in directory.addresses]
    assert sum(by_peer) <= 6400
    assert min(by_peer) > 2800
