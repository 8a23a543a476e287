"""Mutants of Python's verification of images in memory and on local disks, and of encoded files."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import edit, replace, several, skip

IMAGES = "node/test_images.py::test_"
CODEC = "encodings/test_codec.py::test_"
ENCODED = "encodings/test_node.py::test_"
DISK = "disk/test_disk_tier.py::test_"
TIERS = "tiers/test_reading.py::test_"
PAST = "tiers/test_read_image.py::test_"


MEMORY = [
    mutant(
        "behind-lost-at-exit",
        "MEMORY W3: a program that ends",
        edit("kvstore.client.dropping:_flush_all", "behind.close(time.monotonic() - began_s)", "pass"),
        "client/test_dropped.py::test_w3_what_was_put_behind_is_on_the_root_when_a_program_ends",
    ),
    mutant(
        "image-header",
        "MEMORY I1: header of an image",
        edit(
            "kvstore.node.images:_header_of",
            "return decode_as(bytes(image[: expected.header_bytes]), expected)",
            "from kvstore.format.header import decode\n        return decode(bytes(image[: expected.header_bytes]))",
        ),
        f"{IMAGES}i1_another_chunks_image_is_not_taken[python]",
    ),
    mutant(
        "image-size",
        "MEMORY I1: size of an image",
        edit("kvstore.node.images:_header_of", "if len(image) != expected.file_bytes:", "if False:"),
        f"{IMAGES}i1_what_is_wrong_is_not_taken[python]",
    ),
    mutant(
        "image-taken-unverified",
        "MEMORY I1: sections of an image",
        edit("kvstore.node.images:_take_one", "return _sums(targets) == header.checksums", "return True"),
        f"{IMAGES}i1_what_is_wrong_is_not_taken[python]",
    ),
    mutant(
        "image-said-right",
        "MEMORY I1: an image is verified",
        edit("kvstore.node.images:verify_images", "and _sums(_cut(images[at], header)) == header.checksums", ""),
        f"{IMAGES}i1_what_is_wrong_is_not_taken[python]",
    ),
    mutant(
        "image-part-unverified",
        "MEMORY I1: some sections of an image",
        edit(
            "kvstore.node.images:copy_sections",
            "_sums(targets) == header.checksums[first : first + len(targets)]",
            "True",
        ),
        f"{IMAGES}sections_of_one_image[python]",
    ),
    mutant(
        "image-size-not-looked-at",
        "MEMORY I1: native code looks at images of the right size alone",
        edit(
            "kvstore.node.images:_Batch.__init__",
            "np.where(self.sizes_fit, addresses_of(images), 0)",
            "addresses_of(images)",
        ),
        f"{IMAGES}i1_what_is_wrong_is_not_taken[native]",
    ),
    mutant(
        "images-outside-the-memory",
        "MEMORY A1: images lie in the arena",
        edit("kvstore.node.images:ImagesIn.__init__", "raise InvalidRequest(", "str("),
        f"{IMAGES}a1_images_out_of_the_memory_are_refused",
    ),
    mutant(
        "memory-view-unverified",
        "MEMORY I1: views of memory",
        edit(
            "kvstore.node.memory_tier:MemoryTier._which_right",
            "right = verify_images(slots.wanted, indexes, images_of(slots.memory, entries))",
            "right = np.ones(len(indexes), np.bool_)",
        ),
        f"{TIERS}i1_damage_by_any_way_of_reading",
        f"{TIERS}i1_damage_of_the_root_is_counted_once_and_not_as_damage_of_memory",
    ),
    mutant(
        "memory-damage-stays",
        "MEMORY I1: a wrong image is dropped",
        skip("kvstore.node.memory_tier:MemoryTier._damaged"),
        f"{TIERS}i1_damage_by_any_way_of_reading[posix-get]",
    ),
    mutant(
        "past-memory-unverified",
        "MEMORY I1: an image from memory for a move",
        edit(
            "kvstore.node.tiered_reads:TieredReads.read_image",
            "                image[:] = slots.image(index)\n                if verify_images(wanted, [index], [image]).all():",
            "                image[:] = slots.image(index)\n                if True:",
        ),
        f"{PAST}i1_an_image_that_is_wrong_in_memory_comes_from_the_root",
    ),
    mutant(
        "past-disk-unverified",
        "MEMORY I1: an image from the disk for a move",
        edit(
            "kvstore.node.tiered_reads:TieredReads.read_image",
            "deadline)[0]:\n                if verify_images(wanted, [index], [image]).all():",
            "deadline)[0]:\n                if True:",
        ),
        f"{PAST}i1_an_image_that_is_wrong_on_the_disk_comes_from_the_root",
    ),
    mutant(
        "past-root-unverified",
        "MEMORY I1: an image from the root for a move",
        edit(
            "kvstore.node.tiered_reads:TieredReads.read_image",
            "and bool(verify_images(wanted, [index], [image]).all())",
            "",
        ),
        f"{PAST}i1_an_image_that_is_wrong_on_the_root_is_a_miss",
    ),
    mutant(
        "write-behind-publishes-what-went-wrong",
        "MEMORY I1: what is staged from memory is verified before it gets a name",
        edit(
            "kvstore.node.publish:Publication.__init__",
            "self._still_right = still_right",
            "self._still_right = vouched",
        ),
        "tiers/test_writing.py::test_i1_what_goes_wrong_between_verifying_and_staging_gets_no_name",
    ),
    mutant(
        "full-root-does-not-wait-for-lanes",
        "on a full root the chunks in front win over those behind",
        edit(
            "kvstore.node.publish:Publication.make_room",
            "self._changed.wait_for(lambda: not self._turns, ROOM_S)",
            "pass",
        ),
        "peers/test_processes.py::test_put_on_a_full_disk_keeps_space_for_its_first_chunk",
    ),
    mutant(
        "put-run-given-back-too-soon",
        "a run's memory is the caller's again when its bytes are on the root",
        edit(
            "kvstore.node.root_write:RootWrite.add",
            "self._pending.append((self._begin(source, first, count), release))",
            "self._pending.append((self._begin(source, first, count), lambda: None)); release()",
        ),
        "node/test_write.py::test_a_run_keeps_its_memory_until_it_is_on_the_root_and_gives_it_back_in_order",
    ),
    mutant(
        "put-runs-without-limit",
        "a put has at most so many runs on their way to the root as the other end keeps memory for",
        edit("kvstore.node.root_write:RootWrite.add", ">= RUNS_MAX", ">= RUNS_MAX + 1"),
        "node/test_write.py::test_a_run_keeps_its_memory_until_it_is_on_the_root_and_gives_it_back_in_order",
    ),
    mutant(
        "put-empty-run-given-back-too-soon",
        "runs are given back in order",
        edit("kvstore.node.write:Write.add", "if self._root is None:", "if self._root is None or not new.size:"),
        "node/test_write.py::test_a_run_of_which_all_is_there_waits_for_its_turn",
    ),
    mutant(
        "put-behind-fails-with-the-root",
        "MEMORY W1: a put behind says what memory took, whatever the root does",
        edit("kvstore.node.write:Write.add", "if self.mode is not WriteMode.BEHIND:", "if True:"),
        "node/test_write.py::test_w1_what_the_root_refuses_of_a_put_behind_takes_nothing_from_what_memory_took",
    ),
    mutant(
        "parents-swept-while-children-are-written",
        "MEMORY W2: parents that a sweep took during the write are written again",
        edit("kvstore.node.puts:Puts.publish", "self.view.sweeps != sweeps", "False"),
        "tiers/test_collecting.py::test_w2_parents_that_a_whole_sweep_takes_while_their_children_are_written",
    ),
    mutant(
        "found-chunks-swept-while-others-are-written",
        "MEMORY W2: what a write found and a sweep took during it is written again",
        edit("kvstore.node.puts:Puts.publish", "chain.leading(present))", "chain.leading(job.first)) and present"),
        "tiers/test_collecting.py::test_w2_a_chunk_of_the_write_that_was_found_and_a_whole_sweep_takes",
    ),
]


DISKS = [
    mutant(
        "disk-adds-any-header",
        "MEMORY D1: an image whose header is wrong is not written",
        edit(
            "kvstore.node.disk_tier:_header_of",
            "if header.address != place.address or header.file_bytes != len(image):",
            "if False:",
        ),
        f"{DISK}an_image_whose_header_is_wrong_is_not_written",
    ),
    mutant(
        "disk-damage-stays",
        "MEMORY I1: a damaged file of the disk is removed",
        skip("kvstore.node.disk_tier:DiskTier.damaged"),
        f"{TIERS}i1_a_damaged_file_of_the_disk_is_removed_and_read_from_the_root[posix-get]",
    ),
    mutant(
        "disk-short-file-is-whole",
        "MEMORY I1: a short file of the disk is a miss",
        several(
            edit("kvstore.node.disk_tier:DiskTier._read", "if reader.stat.size_bytes == len(image)", "if True"),
            edit(
                "kvstore.node.disk_tier:DiskTier._read",
                "if plain.read([image], 0, Borrowed()) != len(image):",
                "if plain.read([image], 0, Borrowed()) < 0:",
            ),
        ),
        "disk/test_disk_trouble.py::test_a_missing_or_short_file_is_a_miss_and_forgotten",
    ),
    mutant(
        "disk-takes-any-folder",
        "MEMORY D2: a folder that holds something else is refused",
        edit(
            "kvstore.node.disk_folder:DiskFolder._is_marked",
            "if entry.name not in _OURS_BEFORE_FORMAT and entry.name != places.FORMAT:",
            "if False:",
        ),
        "disk/test_disk_start.py::test_a_folder_that_holds_something_else_is_refused",
    ),
]


ENCODINGS = [
    mutant(
        "encoded-header-checksum",
        "FORMAT 4.5: header checksum",
        edit("kvstore.format.encoded:decode_encoded", "!= checksum(view[: size - _SUM.size])", "is None"),
        f"{CODEC}any_flipped_bit_is_found",
    ),
    mutant(
        "encoded-identity",
        "FORMAT 4.5: the chunk that was asked for, without its key",
        edit("kvstore.encodings.codec:decode_header", "if names != (", "if False and names != ("),
        f"{CODEC}the_header_of_another_chunk_is_not_taken_whatever_its_key",
    ),
    mutant(
        "encoded-stored-checksum",
        "FORMAT 4.5: checksum of what is stored",
        edit(
            "kvstore.encodings.codec:Decoding.section",
            "if checksum(stored) != self.header.stored[index].checksum:",
            "if False:",
        ),
        f"{CODEC}what_is_stored_is_known_to_be_damaged_without_its_key",
    ),
    mutant(
        "seal-tag",
        "FORMAT 4.5: tags",
        several(
            edit("kvstore.encodings.sealing:Seal", '("_cipher", "_fixed")', '("_cipher", "_fixed", "_key")'),
            edit("kvstore.encodings.sealing:Seal", "self._fixed = fixed", "self._fixed, self._key = fixed, key"),
            edit(
                "kvstore.encodings.sealing:Seal",
                'return self._cipher.decrypt(part.to_bytes(12, "little"), sealed, self._fixed)',
                "from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes\n"
                '            counter = part.to_bytes(12, "little") + (2).to_bytes(4, "big")\n'
                "            opened = Cipher(algorithms.AES(self._key), modes.CTR(counter)).decryptor()\n"
                "            return opened.update(bytes(sealed)[:-16])",
            ),
        ),
        f"{CODEC}a_bit_turned_in_the_tag_of_any_section_is_found",
    ),
    mutant(
        "seal-place",
        "FORMAT 4.5: a part is tied to its place",
        several(
            edit("kvstore.encodings.sealing:Seal.close", 'part.to_bytes(12, "little")', "bytes(12)"),
            edit("kvstore.encodings.sealing:Seal.open", 'part.to_bytes(12, "little")', "bytes(12)"),
        ),
        f"{CODEC}a_section_moved_to_another_place_is_found",
    ),
    mutant(
        "seal-file",
        "FORMAT 4.5: a part is tied to its file",
        several(
            edit("kvstore.encodings.sealing:Seal.close", "plain, self._fixed", "plain, b''"),
            edit("kvstore.encodings.sealing:Seal.open", "sealed, self._fixed", "sealed, b''"),
        ),
        f"{CODEC}what_somebody_changes_who_has_no_key_is_found",
        f"{CODEC}a_file_under_another_name_or_namespace_is_found",
    ),
    mutant(
        "frame-size-believed",
        "FORMAT 4.5: what is decompressed has the section's size",
        edit(
            "kvstore.encodings.squeezing:_decompressed",
            "if zstandard.frame_content_size(stored) != size_bytes:",
            "if False:",
        ),
        f"{CODEC}a_frame_that_claims_more_than_a_section_takes_no_memory",
    ),
    mutant(
        "missing-key-is-damage",
        "FORMAT 4.5: a key that is not there is no damage",
        edit(
            "kvstore.node.encoded:Encodings._key_for",
            "raise NotDecodable(NodeCount.MISS_KEY)",
            "raise Damaged(Damage.SEAL)",
        ),
        f"{ENCODED}a_key_that_is_not_known_is_a_miss_and_nothing_is_set_aside",
    ),
    mutant(
        "encrypted-files-are-mapped",
        "FORMAT 4.5: files of an encrypted tenant are nobody else's",
        replace("kvstore.node.encoded:Encodings.encrypts", lambda self, tenant: False),
        f"{ENCODED}files_of_an_encrypted_tenant_are_never_mapped",
        f"{ENCODED}an_encrypted_tenant_reads_all_and_its_files_show_nothing",
    ),
    mutant(
        "disk-writes-plain-text",
        "FORMAT 4.5: the local disk has no plain text",
        replace("kvstore.node.encoded:Encodings.pieces_of_image", lambda self, header, image: [image]),
        f"{ENCODED}the_local_disk_has_no_plain_text_and_gives_it_back_after_a_restart",
    ),
]


MUTANTS: list[Mutant] = [*MEMORY, *DISKS, *ENCODINGS]
