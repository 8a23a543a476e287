/* Included before everything else in the library of a mutant (building.py): the check named KV_BLIND always holds, and bytes
 * KV_BLIND_FIRST to KV_BLIND_STOP - 1 of a header are never compared. */
#ifndef KVSTORE_BLIND_H
#define KVSTORE_BLIND_H

#define _GNU_SOURCE
#include <string.h>

#define KV_CHECK(name, holds) ((holds) || !__builtin_strcmp(#name, KV_BLIND))
#define KV_SAME(found, wanted, size) kv_same_but((found), (wanted), (size))

static inline int kv_same_but(const void *found, const void *wanted, size_t size) {
    const unsigned char *one = found, *other = wanted;
    for (size_t at = 0; at < size; at++)
        if (one[at] != other[at] && !(at >= KV_BLIND_FIRST && at < KV_BLIND_STOP)) return 0;
    return 1;
}

#endif
