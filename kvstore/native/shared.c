/* Memory that threads or processes share: the table of chunks that a node remembers as present (kvstore/engine/chunk_store.py has
 * its rules), and the numbers of a host (kvstore/host/tables.py).
 *
 * The table is called with the GIL and its lock, for many chunks per call: a tenth of a microsecond a chunk. */
#include "native.h"

#include <string.h>

enum { WAYS = 8, AHEAD = 16 };

static uint64_t print_of(const kv_chunk *chunk) {
    uint64_t print;
    memcpy(&print, chunk->address, sizeof print);
    return print;
}

/* Returns the entry of a print, or -1. */
static int64_t find(const kv_known *known, uint64_t print) {
    uint64_t start = (print & known->mask) * WAYS;
    for (uint64_t entry = start; entry < start + WAYS; entry++)
        if (known->prints[entry] == print) return (int64_t)entry;
    return -1;
}

static void add(const kv_known *known, uint64_t print, uint32_t mark) {
    int64_t entry = find(known, print);
    if (entry < 0) {
        entry = (int64_t)((print & known->mask) * WAYS);
        for (int64_t other = entry + 1, stop = entry + WAYS; other < stop; other++)
            if (known->marks[other] < known->marks[entry]) entry = other;
    } else if (known->marks[entry] & 1 && known->marks[entry] >= mark) {
        return; /* renewed, in this quantum or a later one */
    }
    known->prints[entry] = print;
    /* Write the mark after the print, because readers read marks first. */
    __atomic_store_n(&known->marks[entry], mark, __ATOMIC_RELEASE);
}

/* Adds those of the chunks at `count` places (NULL: of the first `count`) that have this status, with `mark`, and its lowest bit set if the mtime is
 * `renewed_ns` or later; with known NULL it only counts them. Returns how many there are, and in `payload` the bytes of
 * their sections. */
KV_PUBLIC int64_t kv_known_add(const kv_known *known, const kv_chunk *chunks, const int32_t *places, int64_t count,
                               int32_t status, uint32_t mark, int64_t renewed_ns, uint64_t *payload) {
    int64_t found = 0;
    *payload = 0;
    for (int64_t at = 0; at < count; at++) {
        const kv_chunk *chunk = chunks + (places ? places[at] : at);
        if (chunk->status != status) continue;
        if (known) add(known, print_of(chunk), mark | (chunk->mtime_ns >= renewed_ns));
        *payload += chunk->section_count * chunk->section_bytes;
        found++;
    }
    return found;
}

/* Sets found[i] to whether the table has a mark of at least `least` with all of `bits` for the i-th of `count` addresses of
 * 16 bytes. Takes no lock. The rows of a large table are in no cache, so those of later addresses are asked for ahead. */
KV_PUBLIC void kv_known_have(const kv_known *known, const uint8_t *addresses, int64_t count, uint32_t least, uint32_t bits,
                             uint8_t *found) {
    for (int64_t at = 0; at < count; at++) {
        uint64_t print, later;
        if (at + AHEAD < count) {
            memcpy(&later, addresses + 16 * (at + AHEAD), sizeof later);
            __builtin_prefetch(known->marks + (later & known->mask) * WAYS);
            __builtin_prefetch(known->prints + (later & known->mask) * WAYS);
        }
        memcpy(&print, addresses + 16 * at, sizeof print);
        uint64_t start = (print & known->mask) * WAYS;
        int fits = 0;
        for (uint64_t entry = start; entry < start + WAYS; entry++) {
            /* Read marks before prints, because writers set prints before marks: else an address whose entry another one is
             * taking over just now would be found with the other's mark. */
            uint32_t mark = __atomic_load_n(&known->marks[entry], __ATOMIC_ACQUIRE);
            fits |= mark >= least && (mark & bits) == bits && known->prints[entry] == print;
        }
        found[at] = (uint8_t)fits;
    }
}

/* Forgets those that have this status, of the same chunks. */
KV_PUBLIC void kv_known_forget(const kv_known *known, const kv_chunk *chunks, const int32_t *places, int64_t count,
                               int32_t status) {
    for (int64_t at = 0; at < count; at++) {
        const kv_chunk *chunk = chunks + (places ? places[at] : at);
        int64_t entry = chunk->status == status ? find(known, print_of(chunk)) : -1;
        if (entry >= 0) known->marks[entry] = 0;
    }
}

/* Adds to a number, and orders the loads and stores before it and those after it, for all processes; returns the sum.
 * `file` is for Python, which locks it. */
KV_PUBLIC int64_t kv_shared_add(int file, int64_t *number, int64_t delta) {
    (void)file;
    int64_t sum = __atomic_add_fetch(number, delta, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return sum;
}
