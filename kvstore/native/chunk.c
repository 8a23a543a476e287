/* Chunk files as bytes: names, headers, and the verification of sections while they arrive (kvstore/format/FORMAT.md).
 */
#include "copying.h"
#include "native.h"

#include <stdio.h>
#include <string.h>

enum { MAGIC = 0, VERSION_AT = 8, HEADER_BYTES_AT = 16, ADDRESS_AT = 40, INCARNATION_AT = 104, SUM_BYTES = 8 };

static const uint8_t magic[8] = {0x93, 'K', 'V', 'C', 'H', 'N', 'K', '\n'};

static void put(uint8_t *at, const void *value, size_t size) { memcpy(at, value, size); }

uint8_t *kv_section(const kv_chunk *chunk, uint32_t section) {
    uint64_t at = chunk->offset + (chunk->bases ? chunk->bases[section] : section * chunk->section_bytes);
    return (uint8_t *)(uintptr_t)at;
}

uint64_t kv_padded(uint64_t size) { return (size + 7) / 8 * 8; }

/* Writes what a block's writer says of its descent behind the table, if the header has room for it. */
static void put_descent(const kv_chunk *chunk, uint8_t *header) {
    uint32_t size;
    uint64_t at = KV_FIXED_BYTES + kv_padded(chunk->identity_bytes) + 8ull * chunk->section_count;
    memcpy(&size, chunk->descent, sizeof size);
    if (at + sizeof size + size <= chunk->header_bytes - SUM_BYTES) put(header + at, chunk->descent, sizeof size + size);
}

/* Writes the fixed part, the identity and the descent, without table and checksum; all else is zero. */
void kv_header_begin(const kv_run *run, const kv_chunk *chunk, uint8_t *header) {
    const uint16_t version = 1;
    const uint8_t algorithms[3] = {1, 1, (uint8_t)run->kind};
    memset(header, 0, chunk->header_bytes);
    put(header + MAGIC, magic, sizeof magic);
    put(header + VERSION_AT, &version, sizeof version);
    put(header + 10, algorithms, sizeof algorithms);
    put(header + HEADER_BYTES_AT, &chunk->header_bytes, 4);
    put(header + 20, &chunk->depth, 4);
    put(header + 24, &chunk->identity_bytes, 4);
    put(header + 28, &chunk->section_count, 4);
    put(header + 32, &chunk->section_bytes, 8);
    put(header + ADDRESS_AT, chunk->address, KV_ADDRESS_BYTES);
    put(header + 56, chunk->parent, KV_ADDRESS_BYTES);
    put(header + 72, run->digest, KV_DIGEST_BYTES);
    put(header + INCARNATION_AT, chunk->incarnation, KV_ADDRESS_BYTES);
    put(header + KV_FIXED_BYTES, chunk->identity, chunk->identity_bytes);
    if (chunk->descent) put_descent(chunk, header);
}

/* Returns the bytes of the largest header of these chunks. */
uint32_t kv_largest_header(const kv_chunk *chunks, int64_t count) {
    uint32_t most = 0;
    for (const kv_chunk *chunk = chunks; chunk < chunks + count; chunk++)
        if (chunk->header_bytes > most) most = chunk->header_bytes;
    return most;
}

/* Writes the checksum, once everything before it is there. */
void kv_header_end(const kv_chunk *chunk, uint8_t *header) {
    uint64_t sum = kv_checksum(header, chunk->header_bytes - SUM_BYTES);
    put(header + chunk->header_bytes - SUM_BYTES, &sum, SUM_BYTES);
}

const uint64_t *kv_table(const kv_chunk *chunk, const uint8_t *header) {
    return (const uint64_t *)(header + KV_FIXED_BYTES + kv_padded(chunk->identity_bytes));
}

/* True if a header is exactly the one wanted, and whole. */
int kv_header_fits(const kv_run *run, const kv_chunk *chunk, const uint8_t *header) {
    uint8_t fixed[KV_FIXED_BYTES];
    kv_chunk bare = *chunk;
    bare.header_bytes = KV_FIXED_BYTES;
    bare.identity_bytes = 0;
    bare.descent = NULL;
    kv_header_begin(run, &bare, fixed);
    put(fixed + HEADER_BYTES_AT, &chunk->header_bytes, 4);
    put(fixed + 24, &chunk->identity_bytes, 4);
    uint64_t sum;
    memcpy(&sum, header + chunk->header_bytes - SUM_BYTES, sizeof sum);
    return KV_SAME(header, fixed, INCARNATION_AT) &&
           KV_CHECK(header_identity, !memcmp(header + KV_FIXED_BYTES, chunk->identity, chunk->identity_bytes)) &&
           KV_CHECK(header_sum, sum == kv_checksum(header, chunk->header_bytes - SUM_BYTES));
}

/* Continues to verify when the first `arrived` bytes of the payload are there; false if a section is not right. */
int kv_verify(const kv_chunk *chunk, const uint64_t *table, kv_verified *verified, uint64_t arrived) {
    const uint64_t size = chunk->section_bytes;
    while (verified->section < chunk->section_count) {
        uint64_t start = verified->section * size;
        if (arrived <= start && size) break;
        const uint8_t *bytes = kv_section(chunk, verified->section);
        if (!verified->hash.blocks_done) kv_hash_begin(&verified->hash);
        if (arrived < start + size) {
            kv_hash_absorb(&verified->hash, bytes, size, arrived - start);
            break;
        }
        if (!KV_CHECK(taken_sum, kv_hash_end(&verified->hash, bytes, size) == table[verified->section])) return 0;
        verified->hash.blocks_done = 0;
        verified->section++;
    }
    return 1;
}

/* Takes the next chunks that no other thread took; returns how many from `first` on, 0 if none are left. */
int64_t kv_take_step(const kv_turn *turn, int64_t count, int64_t *first) {
    *first = __atomic_fetch_add(turn->next, turn->step, __ATOMIC_RELAXED);
    int64_t rest = count - *first;
    return rest < 0 ? 0 : rest < turn->step ? rest : turn->step;
}

static char *hex(char *at, const uint8_t *bytes, int count) {
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < count; i++) {
        *at++ = digits[bytes[i] >> 4];
        *at++ = digits[bytes[i] & 15];
    }
    *at = 0;
    return at;
}

/* Both functions write into KV_PATH_MAX bytes; false if the name does not fit. */
int kv_chunk_path(const kv_run *run, const kv_chunk *chunk, char *path) {
    unsigned shard = (unsigned)(chunk->address[0] << 8 | chunk->address[1]) >> (16 - run->shard_bits);
    int size = snprintf(path, KV_PATH_MAX - 64, "%s/chunks/%04x/", run->root, shard);
    if (!KV_CHECK(path_fits, size >= 0 && size < KV_PATH_MAX - 64)) return 0;
    char *at = hex(path + size, chunk->address, KV_ADDRESS_BYTES);
    *at++ = '.';
    hex(at, run->digest, 8);
    return 1;
}

int kv_staged_path(const kv_run *run, const kv_chunk *chunk, char *path) {
    int size = snprintf(path, KV_PATH_MAX, "%s/staging/%s/%llu.part", run->root, run->session,
                        (unsigned long long)chunk->number);
    return size > 0 && size < KV_PATH_MAX;
}

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
