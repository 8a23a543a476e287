"""Arguments of the control service as callers give them, whatever their type, checked before anything is sent.

Separate from the messages: what is wrong here is said by its argument's name, which a message does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from kvstore.brief import brief
from kvstore.checks import FLOAT_MAX, is_unicode, is_whole, number
from kvstore.errors import InvalidRequest
from kvstore.namespace import Namespace
from kvstore.planning.prompts import checked_prompts
from kvstore.tickets import Ticket
from kvstore.tokens import Tokens, token_array
from kvstore.wire.messages import pack_tokens

DURATION_S_MAX = 1e9
CHUNKS_MAX = (1 << 32) - 1


class HasNamespace(Protocol):
    """A Cache. The control service uses only its namespace."""

    @property
    def namespace(self) -> Namespace:
        """The namespace that the call is about."""


def checked_seconds(name: str, seconds: float) -> float:
    """Returns a number of seconds, 0 or more. Raises InvalidRequest for anything else."""
    found = number(seconds)
    if found is None or not 0 <= found <= DURATION_S_MAX:
        raise InvalidRequest(f"{name}={brief(seconds)}: expected a number of seconds, 0 to {DURATION_S_MAX:g}")
    return float(found)


def namespace_of(cache: HasNamespace) -> Namespace:
    """Returns the namespace of a cache. Raises InvalidRequest for anything else."""
    namespace = getattr(cache, "namespace", None)
    if not isinstance(namespace, Namespace):
        raise InvalidRequest(f"cache={brief(cache)}: expected a cache, such as store.namespace(...) returns")
    return namespace


def checked_chunks_max(chunks_max: int) -> int:
    """Returns the limit on the chunks of an answer, as a message has room for it. Raises InvalidRequest."""
    if not is_whole(chunks_max) or chunks_max < 0:
        raise InvalidRequest(f"chunks_max={brief(chunks_max)}: expected a whole number of chunks, or 0 for all")
    return min(int(chunks_max), CHUNKS_MAX)


def packed_prompts(prompts: Iterable[Tokens]) -> list[bytes]:
    """Returns several prompts, packed. Raises InvalidRequest, naming the prompt, for one that is no tokens."""
    packed = []
    for at, tokens in enumerate(checked_prompts(prompts)):
        try:
            packed.append(pack_tokens(token_array(tokens)))
        except InvalidRequest as cause:
            raise InvalidRequest(f"prompts[{at}]={brief(tokens)}: {cause}") from cause
    return packed


def checked_changes(changes: Mapping[str, object]) -> dict[str, str]:
    """Returns new values of limits as text, by name. Raises InvalidRequest for what is no text and no number."""
    if not isinstance(changes, Mapping):
        raise InvalidRequest(
            f'changes={brief(changes)}: expected a mapping of limits, such as {{"calls_max": 100}}; limits() lists them'
        )
    return {_checked_name(name): _value_text(name, value) for name, value in changes.items()}


def checked_worker(worker: str | None) -> str | None:
    """Returns the address of a worker, or None. Raises InvalidRequest for anything else."""
    if worker is not None and not isinstance(worker, str):
        raise InvalidRequest(f"worker={brief(worker)}: expected an address that workers() lists, or None")
    return worker


def checked_ticket(ticket: Ticket) -> Ticket:
    """Returns a ticket. Raises InvalidRequest for anything else, such as its id."""
    if not isinstance(ticket, Ticket):
        raise InvalidRequest(
            f"ticket={brief(ticket)}: expected a ticket, such as tickets() lists; of an id, ticket(id).last"
        )
    return ticket


def checked_ticket_id(ticket_id: str) -> str:
    """Returns the id of a ticket. Raises InvalidRequest for anything else."""
    if not isinstance(ticket_id, str):
        raise InvalidRequest(f"ticket_id={brief(ticket_id)}: expected the text that ControlTicket.id is")
    return ticket_id


def check_heard(heard: object) -> None:
    """Raises InvalidRequest for what cannot be called with a ticket."""
    if not callable(heard):
        raise InvalidRequest(f"heard={brief(heard)}: expected a function of a ticket")


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not is_unicode(name):
        raise InvalidRequest(f"changes of {brief(name)}: expected the name of a limit; limits() lists them")
    return name


def _value_text(name: str, value: object) -> str:
    if isinstance(value, str) and is_unicode(value):
        return value
    found = number(value)
    if found is None or (isinstance(found, int) and abs(found) > FLOAT_MAX):
        raise InvalidRequest(f"changes[{brief(name)}]={brief(value)}: expected a number, or text")
    return str(found)
