/* The addresses of chains of chunks: BLAKE2b with 16 bytes of output, keyed with the namespace's digest.
 *
 * Its advantages over Python's BLAKE2b: it computes the state after the key's block once and not for each chunk,
 * allocates nothing, and needs no GIL. */
#include <string.h>

#include "blake2b.h"
#include "native.h"

/* The state after the block of the key, which all chunks of a namespace begin with. */
static void key(uint64_t keyed[8], const uint8_t *digest) {
    static const char person[16] = "kvstore.chunk.1";
    uint8_t block[BLOCK_BYTES] = {0};
    uint64_t personal[2];
    memcpy(keyed, kv_blake2b_start, 8 * sizeof *keyed);
    memcpy(personal, person, sizeof personal);
    keyed[0] ^= 0x01010000 | KV_DIGEST_BYTES << 8 | KV_ADDRESS_BYTES;
    keyed[6] ^= personal[0];
    keyed[7] ^= personal[1];
    memcpy(block, digest, KV_DIGEST_BYTES);
    kv_blake2b(keyed, block, BLOCK_BYTES, 0);
}

static void chain(const uint64_t keyed[8], const uint8_t *parent, const uint8_t *packed, uint64_t chunk_bytes,
                  uint64_t count, uint8_t *addresses) {
    uint8_t block[BLOCK_BYTES];
    if (kv_blake2b_linked && chunk_bytes <= LINKED_BYTES_MAX) {
        kv_blake2b_linked(keyed, parent, packed, chunk_bytes, count, addresses);
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint64_t h[8], total = BLOCK_BYTES, left = chunk_bytes, filled = KV_ADDRESS_BYTES;
        memcpy(h, keyed, sizeof h);
        memcpy(block, parent, KV_ADDRESS_BYTES);
        /* The parent and the first tokens share a block; later blocks are hashed in place. */
        while (left > BLOCK_BYTES - filled) {
            if (filled) memcpy(block + filled, packed, BLOCK_BYTES - filled);
            total += BLOCK_BYTES;
            kv_blake2b(h, filled ? block : packed, total, 0);
            packed += BLOCK_BYTES - filled;
            left -= BLOCK_BYTES - filled;
            filled = 0;
        }
        memcpy(block + filled, packed, left);
        memset(block + filled + left, 0, BLOCK_BYTES - filled - left);
        kv_blake2b(h, block, total + filled + left, LAST);
        packed += left;
        memcpy(addresses, h, KV_ADDRESS_BYTES);
        parent = addresses;
        addresses += KV_ADDRESS_BYTES;
    }
}

/* Computes the addresses of several prompts, one after the other at `packed`, of `counts` chunks of `chunk_bytes` each;
 * `parent` is the parent of each prompt's first chunk. */
KV_PUBLIC void kv_addresses(const uint8_t *digest, const uint8_t *parent, const uint8_t *packed, uint64_t chunk_bytes,
                            const uint64_t *counts, uint64_t prompts, uint8_t *addresses) {
    uint64_t keyed[8];
    key(keyed, digest);
    for (uint64_t i = 0; i < prompts; i++) {
        chain(keyed, parent, packed, chunk_bytes, counts[i], addresses);
        packed += counts[i] * chunk_bytes;
        addresses += counts[i] * KV_ADDRESS_BYTES;
    }
}
