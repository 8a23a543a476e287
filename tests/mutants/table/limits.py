"""Mutants of limits and deadlines: everything is bounded, and every wait ends."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import Planter, edit, skip

WIRE = "worker/test_wire.py::test_"
TOKENS = "format/test_addresses.py::test_"
META = "meta/test_meta_conformance.py::test_"
SHARES = "security/test_rules.py::test_"
TICKETS = "control/test_tickets.py::test_"
PINS = "meta/test_pins.py::test_"
INVENTORY = "memory/test_inventory.py::test_"
SESSION = "meta/test_meta_session.py::test_"
LANES = "node/test_lanes.py::test_"
COUNTS = "worker/test_limits.py::test_"


def limit(name: str, rule: str, planter: Planter, *tests: str) -> Mutant:
    """A row of a bound."""
    return mutant(f"limit-{name}", f"limits: {rule}", planter, *tests)


MESSAGES = [
    limit(
        "tokens",
        "tokens of a prompt",
        edit("kvstore.tokens:token_array", "if count > TOKENS_MAX:", "if False:"),
        f"{TOKENS}too_many_tokens_are_refused",
    ),
    limit(
        "tokens-on-the-wire",
        "tokens of a request",
        edit("kvstore.wire.messages:unpack_tokens", "if len(packed) > TOKEN_BYTES * TOKENS_MAX:", "if False:"),
        f"{WIRE}too_many_keys_and_tokens",
    ),
    limit(
        "keys-on-the-wire",
        "keys of a request",
        edit("kvstore.wire.messages:unpack_keys", "if len(keys) > BLOCKS_MAX:", "if False:"),
        f"{WIRE}too_many_keys_and_tokens",
    ),
    limit(
        "key-length",
        "bytes of a key",
        edit(
            "kvstore.wire.messages:unpack_keys",
            "not BLOCK_KEY_BYTES_MIN <= size <= BLOCK_KEY_BYTES_MAX or len(key) != size",
            "len(key) != size",
        ),
        f"{WIRE}keys_that_are_none",
    ),
    limit(
        "block-size",
        "bytes of a block",
        edit("kvstore.wire.messages:unpack_sizes", "if not 1 <= size <= BLOCK_BYTES_MAX:", "if False:"),
        f"{WIRE}sizes_that_are_none",
    ),
    limit(
        "layout-twice",
        "an attribute is there once",
        edit("kvstore.wire.messages:namespace_of", "if len(attributes) != len(message.attributes):", "if False:"),
        f"{WIRE}messages_that_are_no_namespace",
    ),
    limit(
        "meta-operations",
        "operations of a transaction",
        edit(
            "kvstore.meta.limits:check_request",
            "if len(compares) > OPERATIONS_MAX or len(operations) > OPERATIONS_MAX:",
            "if False:",
        ),
        f"{META}requests_over_a_limit_are_invalid",
    ),
    limit(
        "meta-key-twice",
        "a transaction writes a key once",
        edit("kvstore.meta.limits:check_request", "if len(set(keys)) != len(keys):", "if False:"),
        f"{META}requests_over_a_limit_are_invalid",
    ),
    limit(
        "meta-bytes",
        "bytes of a transaction",
        edit("kvstore.meta.limits:check_request", "if size > REQUEST_BYTES_MAX:", "if False:"),
        f"{META}requests_over_a_limit_are_invalid",
    ),
    limit(
        "node-relations",
        "limits of a node agree",
        edit("kvstore.node.limits:Limits.__post_init__", "if self.hold_max_s < self.read_deadline_s:", "if False:"),
        "client/test_input.py::test_limits_that_contradict_each_other_are_refused",
    ),
    limit(
        "grace-over-lag",
        "a sweep outlasts the node that delays it",
        edit("kvstore_gc.safety:Timings.__post_init__", "if self.grace_max_s <= self.announce_lag_max_s:", "if False:"),
        f"{COUNTS}timings_of_a_collector_agree",
    ),
]

COUNTED = [
    limit(
        "calls",
        "calls of a worker at once",
        edit("kvstore.worker.admission:Gate.passing", "if self._inside >= self.calls_max:", "if False:"),
        f"{COUNTS}no_more_calls_at_once_than_allowed",
    ),
    limit(
        "draining",
        "a worker that drains takes no calls",
        edit("kvstore.worker.admission:Gate.passing", "if self._draining:", "if False:"),
        f"{COUNTS}a_closed_worker_takes_no_calls",
    ),
    limit(
        "bytes-in-flight",
        "bytes in flight",
        edit(
            "kvstore.worker.admission:BytesInFlight.reserved",
            "if self.count and self.count + count > self.bytes_max:",
            "if False:",
        ),
        f"{COUNTS}no_more_bytes_in_flight_than_allowed",
    ),
    limit(
        "bytes-of-a-tenant",
        "a tenant's share of the bytes in flight",
        edit(
            "kvstore.worker.admission:BytesInFlight.reserved",
            "if self._by_tenant[tenant] and self._by_tenant[tenant] + count > most:",
            "if False:",
        ),
        f"{SHARES}one_tenant_leaves_half_of_the_memory_to_others",
    ),
    limit(
        "client-holds",
        "holds of clients",
        edit(
            "kvstore.worker.holds:ClientHolds.add",
            "len(self._live) < self.holds_max and self._tokens + size <= self.tokens_max",
            "True",
        ),
        f"{COUNTS}no_more_holds_than_allowed",
    ),
    limit(
        "holds-of-a-tenant",
        "a tenant's share of the holds",
        edit(
            "kvstore.worker.holds:ClientHolds.add",
            "fits = fits and not (self._tells_tenants and self._is_over_half(_tenant_of(hold), size))",
            "pass",
        ),
        f"{SHARES}one_tenant_leaves_half_of_the_holds_to_others",
    ),
    limit(
        "client-hold-time",
        "a client's hold ends in time",
        edit(
            "kvstore.worker.holds:ClientHolds.find",
            "if hold is None or not self._renew(hold):",
            "if hold is None:",
        ),
        f"{COUNTS}a_hold_past_its_time_is_not_found",
    ),
    limit(
        "node-holds",
        "holds of a node",
        edit("kvstore.node.holds:Holds.take", "                raise Overloaded(", "                str("),
        f"{COUNTS}a_node_has_no_more_holds_than_allowed",
    ),
    limit(
        "dropped-store",
        "threads of a store that is dropped",
        edit("kvstore.client.dropping:_end_apart", "target=end,", "target=str,"),
        "client/test_dropped.py::test_a_dropped_store_warns_and_its_threads_end",
    ),
    limit(
        "changed",
        "limits that change reach every part of a node",
        skip("kvstore.node.node:Node.adjust"),
        "client/test_moves.py::test_too_many_at_once_are_refused_and_those_that_were_cancelled_make_room",
    ),
    limit(
        "tickets",
        "tickets that are not done",
        edit(
            "kvstore.worker.control.book:Book.add",
            'raise Overloaded(f"{self._tickets_max}',
            'str(f"{self._tickets_max}',
        ),
        f"{TICKETS}the_oldest_that_ended_is_forgotten_for_a_new_one_and_none_that_goes_on",
    ),
    limit(
        "tickets-of-a-tenant",
        "a tenant's share of the tickets",
        edit("kvstore.worker.control.book:Book.add", 'raise Overloaded(f"{most} tickets', 'str(f"{most} tickets'),
        f"{TICKETS}one_tenant_leaves_half_of_the_places_to_others",
    ),
    limit(
        "pins-of-an-owner",
        "pins of an owner",
        skip("kvstore.meta.pins:Pins._check_quota"),
        f"{PINS}an_owner_over_its_quota_is_refused_and_others_are_not",
    ),
    limit(
        "buffers-that-overlap",
        "memory of a block",
        skip("kvstore.client.blocks:_check_apart"),
        "client/test_input.py::test_blocks_are_read_into_separate_memory",
    ),
    limit(
        "full-sign",
        "puts on a full root",
        skip("kvstore.node.view:View.check_room"),
        "node/test_view.py::test_the_full_sign_sheds_puts_while_it_is_up",
    ),
]

EVICTING = [
    mutant(
        "memory-evicts-what-is-needed",
        "MEMORY E2: what is referred to, pinned or dirty stays",
        edit("kvstore.memory.inventory:Inventory._is_evictable", "not entry.references\n", "True\n"),
        f"{INVENTORY}e2_what_is_referenced_pinned_or_dirty_stays",
    ),
    mutant(
        "memory-second-writer-wins",
        "MEMORY E4: the first writer wins",
        edit("kvstore.memory.inventory:Inventory.claim", "if self._tree.find(place.address) is not None:", "if False:"),
        f"{INVENTORY}e4_the_first_writer_wins",
    ),
    mutant(
        "memory-room-given-too-early",
        "MEMORY I2: room that is referred to is nobody else's",
        edit("kvstore.memory.inventory:Inventory.drop", "if not entry.references:", "if True:"),
        f"{INVENTORY}i2_room_is_given_back_only_when_nobody_refers_to_it",
    ),
]

DEADLINES = [
    mutant(
        "deadline-keepalive",
        "deadlines: a keepalive ends with its session",
        edit("kvstore.meta.session:Session.beat", "min(self.ttl_s / 3, left_s)", "self.ttl_s / 3"),
        f"{SESSION}a_keepalive_never_waits_past_the_session_s_end",
    ),
    mutant(
        "deadline-shared-work",
        "deadlines: nothing is begun after the deadline",
        edit("kvstore.node.lanes:Batch.help", "if deadline.left_s() <= 0:", "if False:"),
        f"{LANES}whoever_shares_begins_nothing_after_the_deadline_and_raises_what_the_work_raises",
    ),
    mutant(
        "deadline-disk",
        "deadlines: nothing is read from the disk after the deadline",
        edit("kvstore.node.disk_tier:DiskTier.fetch", "or deadline.passed", ""),
        "disk/test_disk_tier.py::test_past_the_deadline_nothing_is_read",
    ),
    mutant(
        "deadline-answer-revives",
        "PROTOCOL V2: an answer after the end does not revive",
        edit("kvstore.meta.session:Session.beat", "if self.alive:", "if True:"),
        f"{SESSION}v2_an_answer_that_comes_after_the_end_does_not_revive",
    ),
]

MUTANTS: list[Mutant] = [*MESSAGES, *COUNTED, *EVICTING, *DEADLINES]
