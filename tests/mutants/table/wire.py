"""Mutants of input from connections: frames, checksums, grants, arenas, answers of workers and of peers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import edit, replace, skip

WIRE = "worker/test_wire.py::test_"
HOSTILE = "bulk/test_hostile.py::test_"
BLOCKS = "bulk/test_blocks_hostile.py::test_"
MEMORY = "bulk/test_memory_hostile.py::test_"
BOUNDS = "bulk/test_bounds.py::test_"
LAYERS = "bulk/test_layers.py::test_"
GIVEN = "bulk/test_layers_given.py::test_"
CALLS = "bulk/test_calls.py::test_"
SEALS = "worker/test_seals.py::test_"
PEERS = "peers_memory/test_fetch.py::test_"
SUMS = "bulk/test_sums.py::test_"
ROOMS = "bulk/test_rooms.py::test_"

COUNTING = [
    mutant(
        "look-up-forgotten",
        "counts: a request counts once, though its calls go to different workers",
        replace("kvstore.client.lookups:LookUps.take", lambda *_: False),
        "worker/test_hit_ratio.py::test_a_request_counts_once_where_its_calls_go_to_different_workers",
    ),
    mutant(
        "looked-up-counts-again",
        "counts: a read that says that a look-up counted it does not count",
        edit(
            "kvstore.node.counters:Counters.add_request",
            "if reads and (waiting or looked_up):",
            "if reads and waiting:",
        ),
        "worker/test_hit_ratio.py::test_a_request_counts_once_where_its_calls_go_to_different_workers",
    ),
]

PARTS = [
    mutant(
        "parts-one-frame",
        "wire: checksum of a part in one message",
        edit(
            "kvstore.wire.frames:Incoming._completed",
            "if self._partial is None and checksum(piece) == expected:",
            "if self._partial is None:",
        ),
        f"{WIRE}a_flipped_bit_is_never_taken",
    ),
    mutant(
        "parts-many-frames",
        "wire: checksum of a part in several messages",
        edit("kvstore.wire.frames:Incoming._completed", "if checksum(part) != expected:", "if False:"),
        f"{WIRE}a_flipped_bit_is_never_taken",
    ),
    mutant(
        "parts-bytes-behind",
        "wire: bytes behind the last part",
        edit(
            "kvstore.wire.frames:Incoming.feed",
            "if self.complete == len(self._sizes):\n                raise",
            "if self.complete == len(self._sizes):\n                return\n                raise",
        ),
        f"{WIRE}bytes_behind_the_last_part",
    ),
    mutant(
        "parts-more-checksums",
        "wire: as many checksums as parts",
        edit("kvstore.wire.frames:Incoming.feed", "if used != len(sums):", "if False:"),
        f"{WIRE}another_number_of_checksums",
    ),
    mutant(
        "frame-seal",
        "wire: seal of a message of a stream",
        edit("kvstore.wire.frames:decode_frame", 'if sealed and sealed != seal(bytes(start or b"")):', "if False:"),
        f"{SEALS}a_request_is_what_was_sent_or_refused_whichever_bit_flips",
        f"{SEALS}which_blocks_are_hits_cannot_change_on_the_way",
    ),
    mutant(
        "frame-size",
        "limits: bytes of a message",
        edit("kvstore.wire.frames:decode_frame", "if size > MESSAGE_BYTES_MAX:", "if False:"),
        f"{WIRE}a_message_over_the_limit",
    ),
    mutant(
        "frame-field-length",
        "wire: a field is no longer than its message",
        edit("kvstore.wire.frames:decode_frame", "if size > end - at:", "if False:"),
        f"{WIRE}a_message_that_was_cut_is_a_wrong_request",
    ),
    mutant(
        "message-seal",
        "wire: seal of a request",
        replace("kvstore.wire.messages:is_whole", lambda message: None),
        f"{SEALS}a_request_is_what_was_sent_or_refused_whichever_bit_flips",
    ),
]

PUTTING = [
    mutant(
        "bulk-put-first-plane",
        "wire: checksum of every plane of a run",
        edit(
            "kvstore.worker.bulk.cargo:Cargo._planes",
            "sums != plane_sums(planes, first, count):",
            "sums[0] != plane_sums(planes, first, count)[0]:",
        ),
        f"{SUMS}i1_a_run_with_a_bit_turned_in_any_plane_is_not_stored",
    ),
    mutant(
        "bulk-put-unverified",
        "wire: checksums of a run of chunks",
        edit("kvstore.worker.bulk.cargo:Cargo._planes", "if sums and", "if False and"),
        f"{HOSTILE}bytes_that_do_not_match_their_checksums_are_refused[tcp]",
    ),
    mutant(
        "bulk-room-unverified",
        "wire: checksums of a run that comes straight into memory",
        edit("kvstore.wire.bulk.runs:receive_sections", "== found.tobytes()", "!= b''"),
        f"{ROOMS}i1_a_run_with_a_bit_turned_is_not_taken[0-True]",
    ),
    mutant(
        "bulk-room-kept",
        "wire: room for a run that does not come is given back",
        skip("kvstore.node.write:Write.give_up"),
        f"{ROOMS}room_for_a_client_that_goes_away_is_given_back[True]",
    ),
    mutant(
        "bulk-room-claimed-long",
        "wire: a put behind is in memory as far as it came",
        edit("kvstore.worker.bulk.putting:BulkPuts._all", "run.room is not None", "False"),
        f"{ROOMS}a_put_behind_is_in_memory_as_far_as_it_came",
    ),
    mutant(
        "bulk-room-behind-a-sweep",
        "wire: what lies behind a chunk that a sweep takes is left out",
        edit("kvstore.node.write:Write.room", " or run.stop > len(self._there)", ""),
        f"{ROOMS}what_lies_behind_a_chunk_that_a_sweep_takes_is_left_out[2-behind]",
    ),
    mutant(
        "bulk-gets-hold-nothing",
        "W6: what is queued to be written waits while a client's bytes move",
        edit(
            "kvstore.worker.bulk.serving:BulkRequests.serve", "self._counting_idle(), moving", "self._counting_idle()"
        ),
        "bulk/test_yielding.py::test_w6_what_is_queued_waits_until_the_call_ends[get]",
    ),
    mutant(
        "behind-held-though-awaited",
        "W6: nothing waits that somebody waits for",
        edit("kvstore.node.write_behind:WriteBehind._begins_s", " or self._awaited", ""),
        "tiers/test_writing.py::test_w6_nothing_waits_that_somebody_waits_for[posix]",
    ),
    mutant(
        "behind-held-by-gets-as-by-puts",
        "W6: a get holds less of the queue than a put",
        edit("kvstore.worker.bulk.serving:BulkRequests.serve", "LEAVING_SHARE if is_get else ", ""),
        "bulk/test_yielding.py::test_w6_a_get_holds_less_than_a_put[get]",
    ),
    mutant(
        "bulk-blocks-first-block",
        "wire: checksum of every block of a run",
        edit(
            "kvstore.worker.bulk.cargo:Cargo._blocks",
            "sums != block_sums(buffers):",
            "sums[0] != block_sums(buffers)[0]:",
        ),
        f"{SUMS}i1_blocks_with_a_bit_turned_in_any_are_not_stored",
    ),
    mutant(
        "bulk-blocks-unverified",
        "wire: checksums of a run of blocks",
        edit("kvstore.worker.bulk.cargo:Cargo._blocks", "if sums and", "if False and"),
        f"{BLOCKS}bytes_that_do_not_match_their_checksums_are_not_stored",
    ),
    mutant(
        "bulk-run-anywhere",
        "wire: runs come in order, in their bounds",
        edit(
            "kvstore.worker.bulk.arriving:Arriving.runs",
            "if start != index or not 1 <= count <= stop - index:",
            "if False:",
        ),
        f"{SUMS}runs_come_in_order_and_in_their_bounds",
    ),
    mutant(
        "bulk-run-length",
        "wire: a run has the length that it says",
        edit(
            "kvstore.worker.bulk.arriving:Arriving.runs",
            "if head.length != SPAN_BYTES + size_bytes + table.size or (count > 1 and size_bytes > cargo.run_bytes):",
            "if False:",
        ),
        f"{SUMS}a_run_has_the_length_that_it_says",
    ),
]

ARENAS = [
    mutant(
        "arena-size",
        "limits: bytes of an arena",
        edit(
            "kvstore.worker.bulk.connection:Connection.adopt_arena",
            "if not 0 < size_bytes <= arena_bytes_max:",
            "if False:",
        ),
        f"{BOUNDS}memory_for_runs_is_that_of_the_largest_whatever_the_first_is",
        f"{HOSTILE}an_arena_that_could_kill_the_worker_is_refused",
        f"{SUMS}an_arena_over_the_limit_is_refused",
    ),
    mutant(
        "arena-unsealed",
        "wire: an arena cannot shrink",
        edit(
            "kvstore.worker.bulk.connection:Connection.adopt_arena",
            "if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < size_bytes:",
            "if os.fstat(fd).st_size < size_bytes:",
        ),
        f"{HOSTILE}an_arena_that_could_kill_the_worker_is_refused",
    ),
    mutant(
        "arena-huge-pages",
        "wire: an arena is of ordinary pages",
        edit(
            "kvstore.worker.bulk.connection:Connection.adopt_arena",
            "if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:",
            "if False:",
        ),
        f"{BOUNDS}an_arena_of_huge_pages_is_refused",
    ),
    mutant(
        "arena-placed-outside",
        "wire: bytes lie in the arena",
        edit("kvstore.worker.bulk.connection:Connection.placed", "if end > len(self._arena):", "if False:"),
        f"{HOSTILE}chunks_placed_outside_the_arena_are_refused",
        f"{BLOCKS}blocks_placed_outside_the_arena_are_refused",
    ),
]

FRAMES = [
    mutant(
        "head-magic",
        "wire: a head is one of ours",
        edit("kvstore.wire.bulk.frames:decode_head", "if magic != MAGIC or", "if"),
        f"{SUMS}a_head_of_another_protocol_is_refused",
    ),
    mutant(
        "head-length",
        "limits: length of a frame",
        edit("kvstore.wire.bulk.frames:decode_head", "if kind not in BULKY and length > most:", "if False:"),
        f"{HOSTILE}a_head_is_checked_before_its_length_is_believed",
    ),
    mutant(
        "request-timeout",
        "deadlines: a request has a timeout",
        edit("kvstore.wire.bulk.frames:decode_request", "if not timeout_s > 0:", "if False:"),
        f"{HOSTILE}a_frame_that_makes_no_sense_ends_the_connection",
        f"{SUMS}a_request_without_a_timeout_is_refused",
    ),
    mutant(
        "files-unasked",
        "wire: no more files than a frame may bring",
        edit(
            "kvstore.wire.bulk.channel:Channel._take_in",
            "if is_cut or len(self._files) > self._files_max:",
            "if False:",
        ),
        f"{SUMS}a_frame_brings_no_more_files_than_it_may",
    ),
    mutant(
        "grant-proof",
        "access: a grant is proven",
        replace("kvstore.wire.bulk.grants:Grant.is_hello", lambda self, nonce, proof: True),
        f"{HOSTILE}whoever_proves_no_grant_is_cut_off",
        f"{HOSTILE}a_wrong_proof_uses_the_grant_up",
    ),
]

GETTING = [
    mutant(
        "fill-unverified",
        "wire: checksums of a received file",
        edit(
            "kvstore.client.bulk.receiving:fill_verified",
            "if tuple(map(checksum, sections[verified:whole])) != sums[verified:whole]:",
            "if False:",
        ),
        f"{SUMS}i1_a_file_with_a_bit_turned_is_not_received",
    ),
    mutant(
        "fill-any-header",
        "wire: header of a received file",
        edit(
            "kvstore.client.bulk.receiving:fill_verified",
            "    sums, size = decode_as(raw, expected).checksums, expected.section_bytes",
            "    from kvstore.format.header import decode\n\n"
            "    sums, size = decode(raw).checksums, expected.section_bytes",
        ),
        f"{SUMS}i1_another_chunks_file_is_not_received",
    ),
    mutant(
        "layer-unverified",
        "wire: checksums of a layer",
        replace(
            "kvstore.wire.bulk.runs:receive_planes",
            lambda channel, planes: channel.receive_into(planes) or bool(channel.receive(8 * len(planes))),
        ),
        f"{LAYERS}i1_bytes_that_change_on_the_way_are_never_a_layer",
        "native/test_sockets.py::test_planes_are_received_with_their_sums[False]",
    ),
    mutant(
        "layer-of-another-request",
        "wire: a layer belongs to its request",
        edit("kvstore.client.bulk.layers:receive_layers", "if head.request != number:", "if False:"),
        f"{LAYERS}a_layer_of_another_request_is_not_taken",
    ),
    mutant(
        "given-layers-unverified",
        "wire: layers of given chunks are verified",
        edit(
            "kvstore.client.bulk.layers_given:GivenLayers.read",
            "return all(reading.wait(deadline))",
            "return bool(reading.wait(deadline))",
        ),
        f"{GIVEN}i1_a_damaged_image_is_never_a_layer_and_the_root_has_the_chunk",
        f"{GIVEN}a_damaged_file_ends_the_layers_where_it_is_and_is_set_aside",
    ),
    mutant(
        "given-layers-written-late",
        "wire: nobody writes into layers that were left",
        skip("kvstore.client.bulk.layers_given:GivenLayers.withdraw"),
        f"{GIVEN}layers_on_a_root_that_hangs_are_left_at_once_and_write_nothing_afterwards",
    ),
    mutant(
        "given-layers-without-hold",
        "PROTOCOL H: no layers after the hold has ended",
        edit("kvstore.client.remote_hold:RemoteHold.layers", "self.check()  #", "pass  #"),
        f"{GIVEN}a_hold_that_is_released_in_the_middle_gives_no_more_layers",
    ),
    mutant(
        "calls-take-every-connection",
        "wire: half of the connections are left to bytes",
        edit("kvstore.client.bulk.links:Links._take_at_hand", "> (self._links_max - 1) // 2", "> self._links_max"),
        f"{CALLS}calls_leave_half_of_the_connections_to_bytes",
    ),
    mutant(
        "view-unverified",
        "wire: a view is verified",
        edit(
            "kvstore.node.reading:verified",
            "right[part] = verify_images(wanted, indexes[part], images[part])",
            "right[part] = True",
        ),
        "bulk/test_memory.py::test_a_damaged_image_is_never_used",
    ),
    mutant(
        "slots-outside",
        "wire: slots lie in the worker's memory",
        edit("kvstore.node.images:ImagesIn.__init__", "raise InvalidRequest(", "str("),
        f"{MEMORY}slots_outside_the_memory_are_not_looked_at",
    ),
]

PEERING = [
    mutant(
        "peer-wrong-stays",
        "peers: one whose chunks prove wrong is left alone",
        skip("kvstore.peers.peers:Peers.damaged"),
        f"{PEERS}a_peer_whose_chunks_prove_wrong_is_left_alone",
    ),
    mutant(
        "peer-any-image",
        "peers: images of what was asked for",
        edit(
            "kvstore.peers.asking:_received",
            "or decode_index(channel.receive(INDEX_BYTES)) != index",
            "or decode_index(channel.receive(INDEX_BYTES)) < 0",
        ),
        f"{PEERS}a_lying_peer_is_a_miss_and_is_left_alone",
    ),
    mutant(
        "digest-lies",
        "peers: a digest that lies is refused",
        edit("kvstore.peers.digest:decode", "if len(planes) != 4 * count:", "if False:"),
        "peers_memory/test_digest.py::test_a_lying_digest_is_refused",
    ),
]

MUTANTS: list[Mutant] = [*COUNTING, *PARTS, *PUTTING, *ARENAS, *FRAMES, *GETTING, *PEERING]
