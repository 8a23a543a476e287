/* BLAKE2b (RFC 7693), as far as the addresses of chunks need it. */
#ifndef KVSTORE_BLAKE2B_H
#define KVSTORE_BLAKE2B_H

#include <stdint.h>

#define BLOCK_BYTES 128
#define LAST UINT64_MAX

/* The initial state of a hash, before its parameters. */
extern const uint64_t kv_blake2b_start[8];

/* Absorbs one block; `total` is the number of bytes up to its end, `last` is LAST for the last one and 0 for others. */
extern void (*kv_blake2b)(uint64_t h[8], const uint8_t *block, uint64_t total, uint64_t last);

#endif
