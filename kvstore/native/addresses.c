/* The addresses of a chain of chunks: BLAKE2b with 16 bytes of output, keyed with the namespace's digest (RFC 7693).
 *
 * What it has over calling Python's: the state after the key's block is computed once and not for each chunk, nothing
 * is allocated, and the GIL is free. Plain C, because the four columns of BLAKE2b already keep a core busy: with AVX2
 * or AVX-512 one chain is slower. */
#include <string.h>

#include "native.h"

#define BLOCK_BYTES 128
#define LAST UINT64_MAX

static const uint64_t start[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

#define TURNED(x, bits) ((x) >> (bits) | (x) << (64 - (bits)))
#define MIX(a, b, c, d, x, y)  \
    a += b + (x);              \
    d = TURNED(d ^ a, 32);     \
    c += d;                    \
    b = TURNED(b ^ c, 24);     \
    a += b + (y);              \
    d = TURNED(d ^ a, 16);     \
    c += d;                    \
    b = TURNED(b ^ c, 63);
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15) \
    MIX(v0, v4, v8, v12, m[s0], m[s1])                                              \
    MIX(v1, v5, v9, v13, m[s2], m[s3])                                              \
    MIX(v2, v6, v10, v14, m[s4], m[s5])                                             \
    MIX(v3, v7, v11, v15, m[s6], m[s7])                                             \
    MIX(v0, v5, v10, v15, m[s8], m[s9])                                             \
    MIX(v1, v6, v11, v12, m[s10], m[s11])                                           \
    MIX(v2, v7, v8, v13, m[s12], m[s13])                                            \
    MIX(v3, v4, v9, v14, m[s14], m[s15])

/* One block; `total` is the number of bytes up to its end, `last` is LAST for the last one and 0 for others. */
static void compress(uint64_t h[8], const uint8_t *block, uint64_t total, uint64_t last) {
    uint64_t m[16];
    memcpy(m, block, BLOCK_BYTES);
    uint64_t v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
    uint64_t v8 = start[0], v9 = start[1], v10 = start[2], v11 = start[3];
    uint64_t v12 = start[4] ^ total, v13 = start[5], v14 = start[6] ^ last, v15 = start[7];
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)
    ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4)
    ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8)
    ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13)
    ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9)
    ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11)
    ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10)
    ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5)
    ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0)
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)
    h[0] ^= v0 ^ v8;
    h[1] ^= v1 ^ v9;
    h[2] ^= v2 ^ v10;
    h[3] ^= v3 ^ v11;
    h[4] ^= v4 ^ v12;
    h[5] ^= v5 ^ v13;
    h[6] ^= v6 ^ v14;
    h[7] ^= v7 ^ v15;
}

/* The addresses of `count` chunks of `chunk_bytes` each, one after the other at `packed`; `parent` is that of the
 * first. */
KV_PUBLIC void kv_addresses(const uint8_t *digest, const uint8_t *parent, const uint8_t *packed, uint64_t chunk_bytes,
                            uint64_t count, uint8_t *addresses) {
    static const char person[16] = "kvstore.chunk.1";
    uint8_t block[BLOCK_BYTES] = {0};
    uint64_t keyed[8], personal[2];
    memcpy(keyed, start, sizeof keyed);
    memcpy(personal, person, sizeof personal);
    keyed[0] ^= 0x01010000 | KV_DIGEST_BYTES << 8 | KV_ADDRESS_BYTES;
    keyed[6] ^= personal[0];
    keyed[7] ^= personal[1];
    memcpy(block, digest, KV_DIGEST_BYTES);
    compress(keyed, block, BLOCK_BYTES, 0);

    for (uint64_t i = 0; i < count; i++) {
        uint64_t h[8], total = BLOCK_BYTES, left = chunk_bytes, filled = KV_ADDRESS_BYTES;
        memcpy(h, keyed, sizeof h);
        memcpy(block, parent, KV_ADDRESS_BYTES);
        /* The parent and the first tokens share a block; after it, blocks are taken from where they lie. */
        while (left > BLOCK_BYTES - filled) {
            if (filled) memcpy(block + filled, packed, BLOCK_BYTES - filled);
            total += BLOCK_BYTES;
            compress(h, filled ? block : packed, total, 0);
            packed += BLOCK_BYTES - filled;
            left -= BLOCK_BYTES - filled;
            filled = 0;
        }
        memcpy(block + filled, packed, left);
        memset(block + filled + left, 0, BLOCK_BYTES - filled - left);
        compress(h, block, total + filled + left, LAST);
        packed += left;
        memcpy(addresses, h, KV_ADDRESS_BYTES);
        parent = addresses;
        addresses += KV_ADDRESS_BYTES;
    }
}
