/* Copies past the caches, for bytes that their reader does not need soon, or not on this core. The copy neither fetches
 * what it overwrites nor evicts other bytes from the cache (docs/performance-notes.md). */
#ifndef KVSTORE_COPYING_H
#define KVSTORE_COPYING_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum { KV_LINE = 64 };

static inline void kv_copy(uint8_t *to, const uint8_t *from, uint64_t size) {
#if defined(__x86_64__)
    uint64_t head = -(uintptr_t)to % sizeof(__m128i); /* streaming stores begin at a multiple of 16 */
    if (head && head <= size) {
        memcpy(to, from, head);
        size -= head;
        to += head;
        from += head;
    }
    for (; size >= KV_LINE; size -= KV_LINE, to += KV_LINE, from += KV_LINE) {
        const __m128i *line = (const __m128i *)from;
        __m128i one = _mm_loadu_si128(line), two = _mm_loadu_si128(line + 1);
        __m128i three = _mm_loadu_si128(line + 2), four = _mm_loadu_si128(line + 3);
        _mm_stream_si128((__m128i *)to, one);
        _mm_stream_si128((__m128i *)to + 1, two);
        _mm_stream_si128((__m128i *)to + 2, three);
        _mm_stream_si128((__m128i *)to + 3, four);
    }
#endif
    memcpy(to, from, size);
}

/* Fence: no other thread may hear of the copy before this. */
static inline void kv_copied(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

#endif
