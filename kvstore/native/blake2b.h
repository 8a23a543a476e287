/* BLAKE2b (RFC 7693), as far as the addresses of chunks need it. */
#ifndef KVSTORE_BLAKE2B_H
#define KVSTORE_BLAKE2B_H

#include <stdint.h>

#define BLOCK_BYTES 128
#define LAST UINT64_MAX
#define LINKED_BYTES_MAX (BLOCK_BYTES - KV_ADDRESS_BYTES)

/* The initial state of a hash, before its parameters. */
extern const uint64_t kv_blake2b_start[8];

/* Absorbs one block; `total` is the number of bytes up to its end, `last` is LAST for the last one and 0 for others. */
extern void (*kv_blake2b)(uint64_t h[8], const uint8_t *block, uint64_t total, uint64_t last);

/* Computes the addresses of `count` chunks of `chunk_bytes`, at most LINKED_BYTES_MAX, one after the other at `packed`.
 * A chunk and its parent's address are one block; `keyed` has absorbed one block. NULL where it would not be faster. */
extern void (*kv_blake2b_linked)(const uint64_t keyed[8], const uint8_t *parent, const uint8_t *packed,
                                 uint64_t chunk_bytes, uint64_t count, uint8_t *addresses);

#endif
