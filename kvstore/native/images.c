/* Images: chunk files in memory, made of sections, copied back into them, or only verified (kvstore/tiers/MEMORY.md).
 *
 * One pass over memory: each block of the hash is copied, then hashed while it is in the nearest cache. The copy comes
 * first: room that was given to another chunk never gets the old bytes back, so bytes that are right when they are
 * hashed were right when they were copied. Writes go past the caches, where they would only evict others
 * (docs/performance-notes.md). */
#include "copying.h"
#include "native.h"

#include <stdlib.h>
#include <string.h>

enum { STEP = 1024 };
#ifndef IMAGE_AHEAD
#define IMAGE_AHEAD (8 << 10) /* across sections and pages, where the processor's own prefetching stops */
#endif

/* Prefetches the bytes after `from` into the cache. */
static inline void ahead(const uint8_t *from, uint64_t size) {
    for (uint64_t line = 0; line < size; line += KV_LINE) __builtin_prefetch(from + line + IMAGE_AHEAD);
}

/* Returns the hash of one section at `from`, copied to `to` unless that is NULL. */
static uint64_t pass(uint8_t *to, const uint8_t *from, uint64_t size) {
    kv_hash hash;
    kv_hash_begin(&hash);
    for (uint64_t done = 0;;) {
        uint64_t length = size - done < STEP ? size - done : STEP;
        ahead(from + done, length);
        if (to) kv_copy(to + done, from + done, length);
        done += length;
        if (done == size) return kv_hash_end(&hash, from, size);
        kv_hash_absorb(&hash, from, size, done);
    }
}

static void make_one(const kv_run *run, const kv_chunk *chunk, uint8_t *image) {
    uint8_t *payload = image + chunk->header_bytes;
    kv_header_begin(run, chunk, image);
    uint64_t *table = (uint64_t *)kv_table(chunk, image);
    for (uint32_t section = 0; section < chunk->section_count; section++)
        table[section] = pass(payload + section * chunk->section_bytes, kv_section(chunk, section), chunk->section_bytes);
    kv_header_end(chunk, image);
}

/* Copies the image's header into `header` once, and judges the copy. Two looks at the image could see two headers: the
 * room may be given to another chunk in between, so the first look could see the wanted header and the second a whole
 * one. */
static int is_right(const kv_run *run, const kv_chunk *chunk, const uint8_t *image, uint8_t *header, int taken) {
    memcpy(header, image, chunk->header_bytes);
    if (!KV_CHECK(image_header, kv_header_fits(run, chunk, header))) return 0;
    const uint8_t *payload = image + chunk->header_bytes;
    const uint64_t *table = kv_table(chunk, header);
    for (uint32_t section = 0; section < chunk->section_count; section++) {
        uint8_t *to = taken ? kv_section(chunk, section) : NULL;
        if (!KV_CHECK(image_sum, pass(to, payload + section * chunk->section_bytes, chunk->section_bytes) == table[section]))
            return 0;
    }
    return 1;
}

static void check_all(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images, int taken) {
    uint8_t *header = malloc(kv_largest_header(chunks, count));
    for (int64_t at = 0; at < count; at++) {
        const uint8_t *image = (const uint8_t *)(uintptr_t)images[at];
        int right = header && image && is_right(run, &chunks[at], image, header, taken);
        chunks[at].status = right ? KV_DONE : KV_OTHER;
    }
    free(header);
}

/* Copies `many` sections from `first` on out of an image whose header was found right before. */
int kv_take_part(const kv_chunk *chunk, const uint8_t *image, const uint64_t *table, uint32_t first, uint32_t many) {
    for (uint32_t section = 0; section < many; section++) {
        const uint8_t *from = image + chunk->header_bytes + (first + section) * chunk->section_bytes;
        if (!KV_CHECK(image_part_sum, pass(kv_section(chunk, section), from, chunk->section_bytes) == table[first + section]))
            return KV_OTHER;
    }
    return KV_DONE;
}

/* Verifies the header of each image, for kv_read_parts: sets KV_DONE, and its checksums in `tables`. */
KV_PUBLIC void kv_images_tables(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images, uint64_t *tables) {
    uint8_t *header = malloc(kv_largest_header(chunks, count));
    for (kv_chunk *chunk = chunks; chunk < chunks + count; tables += chunk->section_count, images++, chunk++) {
        chunk->status = KV_OTHER;
        if (!header || !*images) continue;
        memcpy(header, (const uint8_t *)(uintptr_t)*images, chunk->header_bytes);
        if (!KV_CHECK(image_table_header, kv_header_fits(run, chunk, header))) continue;
        memcpy(tables, kv_table(chunk, header), chunk->section_count * sizeof *tables);
        chunk->status = KV_DONE;
    }
    free(header);
}

/* Copies `size` bytes of each of `count` rows, from `start` on. */
KV_PUBLIC void kv_copy_rows(const uint64_t *to, const uint64_t *from, int64_t count, uint64_t start, uint64_t size) {
    for (int64_t at = 0; at < count; at++) {
        const uint8_t *source = (const uint8_t *)(uintptr_t)from[at] + start;
        uint8_t *target = (uint8_t *)(uintptr_t)to[at] + start;
        for (uint64_t done = 0, length; done < size; done += length) {
            length = size - done < STEP ? size - done : STEP;
            ahead(source + done, length);
            kv_copy(target + done, source + done, length);
        }
    }
    kv_copied();
}

/* In these three functions `images` has the address of each chunk's image, which has the chunk's size and begins at a
 * multiple of 8; a chunk whose address is 0 gets KV_OTHER. Makes each image from its sections: KV_DONE. */
KV_PUBLIC void kv_images_make(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images) {
    for (int64_t at = 0; at < count; at++) {
        if (images[at]) make_one(run, &chunks[at], (uint8_t *)(uintptr_t)images[at]);
        chunks[at].status = images[at] ? KV_DONE : KV_OTHER;
    }
    kv_copied();
}

/* Copies each image into its sections: KV_DONE if it is whole and the wanted chunk. */
KV_PUBLIC void kv_images_take(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images) {
    check_all(run, chunks, count, images, 1);
    kv_copied();
}

/* Verifies as kv_images_take does, without copying. */
KV_PUBLIC void kv_images_verify(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images) {
    check_all(run, chunks, count, images, 0);
}
