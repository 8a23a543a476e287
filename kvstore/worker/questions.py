"""Answers for routers that ask a worker: how long a prefix it can read, and how much of that its memory has.

The access rules are those of the worker's calls. The port is plain HTTP, so a worker with TLS answers its host alone.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from kvstore import tracing
from kvstore.address import chunk_count
from kvstore.errors import InvalidRequest, PermissionDenied
from kvstore.namespace import Namespace
from kvstore.node.member import Member
from kvstore.security.access import Presented
from kvstore.security.guard import Guard
from kvstore.security.tls import is_loopback
from kvstore.tokens import TokenArray
from kvstore.wire.questions import Question, answer_document
from kvstore.wire.web import Caller

METHOD = "Match"
"""The call that a question is: it asks for the same."""
STORAGE, MEMORY = "STORAGE", "CPU"
"""Media as routers know them."""
AGAIN_S = 1.0
NAMES_S = 60.0
"""The root's namespaces are read again after so long; for a name that is not known, after ``AGAIN_S``."""


class Questions:
    """Answers questions about one member's store. Thread-safe."""

    def __init__(self, member: Member, guard: Guard, instance: str, *, for_host_alone: bool) -> None:
        """``instance`` is the worker's name in answers."""
        self._member = member
        self._guard = guard
        self._instance = instance
        self._for_host_alone = for_host_alone
        self._lock = threading.Condition()  # guards names
        self._names: dict[tuple[str, str], list[Namespace]] = {}
        self._named_s = float("-inf")

    def identify(self, caller: Caller) -> None:
        """Raises KVStoreError for a caller who may ask nothing, whatever the question is."""
        self._guard.identify(METHOD, self._presented(caller), caller.address, tracing.request_id())

    def answer(self, question: Question, caller: Caller) -> dict[str, Any]:
        """Answers one question. Raises KVStoreError if it makes no sense, or the caller may not ask it."""
        visit = self._guard.admit(METHOD, self._presented(caller), caller.address, tracing.request_id())
        outcome = "failed"
        try:
            visit.allow(question.tenant, question.model)
            found = self._answer(question)
            outcome = "OK"
        finally:
            visit.end(outcome)
        return found

    def _presented(self, caller: Caller) -> Presented:
        """Returns what a caller presents. Raises PermissionDenied for one who may not send that over plain HTTP."""
        if self._for_host_alone and not is_loopback(f"{caller.address}:0"):
            raise PermissionDenied("questions are plain HTTP: ask from this worker's host, or through a proxy with TLS")
        return Presented(token=caller.token, account=caller.account)

    def _answer(self, question: Question) -> dict[str, Any]:
        if question.tokens is None:
            raise InvalidRequest("a worker knows no hashes of events: give token_ids, or ask kvstore events")
        best = (0, 0, 0)
        for namespace in self._named(question):
            blocks, in_memory = self._leading(namespace, question.tokens)
            best = max(best, (blocks, in_memory, namespace.layout.chunk_tokens), key=lambda each: each[0] * each[2])
        blocks, in_memory, size = best
        return answer_document(question, size, blocks, self._instance, {MEMORY: in_memory, STORAGE: blocks})

    def _leading(self, namespace: Namespace, tokens: TokenArray) -> tuple[int, int]:
        """Returns how many leading chunks can be read, and how many of them memory has."""
        node = self._member.node
        if node.memory is not None and node.gc_view.is_calm:
            in_memory = node.memory.leading_of(namespace, tokens)
            if in_memory == chunk_count(namespace, tokens):
                return in_memory, in_memory
        chain = node.chains.of(namespace, tokens)
        blocks = node.match(chain, node.limits.match_deadline_s, counts=False)
        if node.memory is None or not blocks:
            return blocks, 0
        return blocks, min(blocks, node.memory.leading(chain))

    def _named(self, question: Question) -> list[Namespace]:
        """Returns the namespaces of that name and tenant. Raises the root's errors."""
        wanted = (question.tenant, question.model)
        with self._lock:
            names, age_s = self._names, time.monotonic() - self._named_s
        if age_s >= (NAMES_S if wanted in names else AGAIN_S):
            names = {}
            for namespace in self._member.node.namespaces():
                names.setdefault((namespace.tenant, namespace.name), []).append(namespace)
            with self._lock:
                self._names, self._named_s = names, time.monotonic()
        return names.get(wanted, [])
