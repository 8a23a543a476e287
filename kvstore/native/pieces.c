#include "pieces.h"
#include "copying.h"

/* Each thread keeps its own piece: else the kernel would have to clear one for each call. */
_Thread_local uint8_t kv_piece[PIECE_BYTES + PIECE_TAIL] __attribute__((aligned(4096)));

uint64_t kv_payload_bytes(const kv_chunk *chunk) { return chunk->section_count * chunk->section_bytes; }

/* Returns the bytes of the piece at offset `at` of the payload: whole sections, or a part of one. */
uint64_t kv_piece_bytes(const kv_chunk *chunk, uint64_t at) {
    uint64_t size = chunk->section_bytes, left = kv_payload_bytes(chunk) - at;
    if (size >= PIECE_BYTES) {
        left = size - at % size;
        return left < PIECE_BYTES + PIECE_TAIL ? left : PIECE_BYTES;
    }
    uint64_t whole = size ? PIECE_BYTES / size * size : 0;
    return left < whole ? left : whole;
}

/* Verifies the piece at offset `at` of the payload, and copies what is right into its sections if it is `taken`. If a
 * section has several pieces, those before the last are copied before all of it is known to be right. Without a `table`
 * it sets the checksums in `sums`. */
int kv_pass(const kv_chunk *chunk, const uint64_t *table, uint64_t *sums, kv_hash *hash, uint64_t at, uint64_t length,
            int taken) {
    uint64_t size = chunk->section_bytes;
    for (uint64_t done = 0, part; done < length; done += part) {
        uint32_t section = (uint32_t)((at + done) / size);
        uint64_t start = (at + done) % size, left = size - start;
        part = left < length - done ? left : length - done;
        const uint8_t *bytes = (const uint8_t *)((uintptr_t)kv_piece + done - start);
        if (!start) kv_hash_begin(hash);
        if (part < left) {
            kv_hash_absorb(hash, bytes, size, start + part);
        } else {
            uint64_t sum = kv_hash_end(hash, bytes, size);
            if (!table)
                sums[section] = sum;
            else if (start ? !KV_CHECK(sum_of_pieces, sum == table[section]) : !KV_CHECK(section_sum, sum == table[section]))
                return 0;
        }
        if (taken) kv_copy(kv_section(chunk, section) + start, kv_piece + done, part);
    }
    return 1;
}

/* Sets where bytes of the payload from `at` up to `stop` lie, as far as `most` vectors reach; returns how many it set. */
int kv_vectors(const kv_chunk *chunk, uint64_t at, uint64_t stop, struct iovec *parts, int most) {
    uint64_t size = chunk->section_bytes;
    int count = 0;
    while (at < stop) {
        uint64_t within = at % size, length = size - within < stop - at ? size - within : stop - at;
        uint8_t *bytes = kv_section(chunk, (uint32_t)(at / size)) + within;
        if (count && (uint8_t *)parts[count - 1].iov_base + parts[count - 1].iov_len == bytes)
            parts[count - 1].iov_len += length;
        else if (count < most)
            parts[count++] = (struct iovec){bytes, length};
        else
            break;
        at += length;
    }
    return count;
}

/* Sums the sections from `at` up to `stop` of the payload; the range begins where the last call's ended. Sets `sums` of
 * the sections that end in it. */
void kv_sum(const kv_chunk *chunk, uint64_t *sums, kv_hash *hash, uint64_t at, uint64_t stop) {
    uint64_t size = chunk->section_bytes;
    while (at < stop) {
        uint32_t section = (uint32_t)(at / size);
        uint64_t within = at % size, left = size - within, length = left < stop - at ? left : stop - at;
        const uint8_t *bytes = kv_section(chunk, section);
        if (!within) kv_hash_begin(hash);
        if (length < left)
            kv_hash_absorb(hash, bytes, size, within + length);
        else
            sums[section] = kv_hash_end(hash, bytes, size);
        at += length;
    }
}
