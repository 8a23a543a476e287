"""Rules of the data connection (BULK.md) that neither end may skip."""

from __future__ import annotations

from kvstore.transport.channel import NONCE_BYTES, Grant

NONCE = b"n" * NONCE_BYTES


def test_worker_that_lacks_the_secret_is_not_welcome() -> None:
    grant, other = Grant.fresh(), Grant.fresh()
    assert grant.is_welcome(NONCE, grant.welcome(NONCE))
    assert not grant.is_welcome(NONCE, other.welcome(NONCE))
    assert not grant.is_welcome(NONCE, grant.welcome(bytes(NONCE_BYTES)))


def test_proof_of_one_end_is_none_of_the_other() -> None:
    grant = Grant.fresh()
    proof_of_client = grant.hello(NONCE)[-len(grant.welcome(NONCE)) :]
    assert grant.is_hello(NONCE, proof_of_client)
    assert not grant.is_welcome(NONCE, proof_of_client)
