/* XXH3-64 with seed 0, after its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
 *
 * Own code because python-xxhash keeps the GIL below 100 KB and is built for SSE2, and because a section larger than
 * the cache has to be hashed while it arrives. The long form runs on AVX-512, AVX2 or plain C, chosen when the library
 * is loaded. */
#include "native.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "only for little-endian machines: kvstore falls back to Python elsewhere"
#endif

enum { STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES, SECRET = 192, SHORT_MAX = 240 };

static const uint64_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
static const uint64_t P64_1 = 0x9E3779B185EBCA87ULL, P64_2 = 0xC2B2AE3D27D4EB4FULL, P64_3 = 0x165667B19E3779F9ULL,
                      P64_4 = 0x85EBCA77C2B2AE63ULL, P64_5 = 0x27D4EB2F165667C5ULL;

static const uint8_t secret[SECRET] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint32_t read32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t rotated(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

static inline uint64_t folded(uint64_t one, uint64_t other) {
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t hash) {
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9ULL;
    return hash ^ hash >> 32;
}

static inline uint64_t avalanche_xxh64(uint64_t hash) {
    hash ^= hash >> 33;
    hash *= P64_2;
    hash ^= hash >> 29;
    hash *= P64_3;
    return hash ^ hash >> 32;
}

static inline uint64_t mixed(const uint8_t *bytes, const uint8_t *key) {
    return folded(read64(bytes) ^ read64(key), read64(bytes + 8) ^ read64(key + 8));
}

static uint64_t hash_to_16(const uint8_t *bytes, uint64_t size) {
    if (size > 8) {
        uint64_t low = read64(bytes) ^ read64(secret + 24) ^ read64(secret + 32);
        uint64_t high = read64(bytes + size - 8) ^ read64(secret + 40) ^ read64(secret + 48);
        return avalanche(size + __builtin_bswap64(low) + high + folded(low, high));
    }
    if (size >= 4) {
        uint64_t keyed = read32(bytes + size - 4) + ((uint64_t)read32(bytes) << 32);
        keyed ^= read64(secret + 8) ^ read64(secret + 16);
        keyed ^= rotated(keyed, 49) ^ rotated(keyed, 24);
        keyed *= 0x9FB21C651E98DF25ULL;
        keyed ^= (keyed >> 35) + size;
        keyed *= 0x9FB21C651E98DF25ULL;
        return keyed ^ keyed >> 28;
    }
    if (size) {
        uint32_t all = (uint32_t)bytes[0] << 16 | (uint32_t)bytes[size >> 1] << 24 | bytes[size - 1] | (uint32_t)size << 8;
        return avalanche_xxh64(all ^ (uint64_t)(read32(secret) ^ read32(secret + 4)));
    }
    return avalanche_xxh64(read64(secret + 56) ^ read64(secret + 64));
}

static uint64_t hash_to_240(const uint8_t *bytes, uint64_t size) {
    uint64_t sum = size * P64_1;
    if (size <= 128) {
        for (int at = (int)((size - 1) / 32); at >= 0; at--) {
            sum += mixed(bytes + 16 * at, secret + 32 * at);
            sum += mixed(bytes + size - 16 * (at + 1), secret + 32 * at + 16);
        }
        return avalanche(sum);
    }
    for (uint64_t at = 0; at < 8; at++) sum += mixed(bytes + 16 * at, secret + 16 * at);
    sum = avalanche(sum);
    for (uint64_t at = 8; at < size / 16; at++) sum += mixed(bytes + 16 * at, secret + 16 * (at - 8) + 3);
    sum += mixed(bytes + size - 16, secret + 136 - 17);
    return avalanche(sum);
}

static inline void stripe_plain(uint64_t *lanes, const uint8_t *bytes, const uint8_t *key) {
    for (int at = 0; at < 8; at++) {
        uint64_t value = read64(bytes + 8 * at), keyed = value ^ read64(key + 8 * at);
        lanes[at ^ 1] += value;
        lanes[at] += (uint64_t)(uint32_t)keyed * (keyed >> 32);
    }
}

static void blocks_plain(uint64_t *lanes, const uint8_t *bytes, uint64_t count) {
    for (; count; count--, bytes += BLOCK) {
        for (int stripe = 0; stripe < STRIPES; stripe++) stripe_plain(lanes, bytes + STRIPE * stripe, secret + 8 * stripe);
        for (int at = 0; at < 8; at++) {
            uint64_t lane = lanes[at];
            lanes[at] = (lane ^ lane >> 47 ^ read64(secret + SECRET - STRIPE + 8 * at)) * P32_1;
        }
    }
}

#if defined(__x86_64__)
#ifndef AHEAD
#define AHEAD 1024 /* for mapped files; it costs nothing if the bytes are in the cache */
#endif
#define PREFETCH(at) _mm_prefetch((const char *)(at) + AHEAD, _MM_HINT_T0)

__attribute__((target("avx512f"))) static void blocks_avx512(uint64_t *lanes, const uint8_t *bytes, uint64_t count) {
    __m512i sum = _mm512_loadu_si512(lanes);
    const __m512i prime = _mm512_set1_epi64((long long)P32_1);
    const __m512i last = _mm512_loadu_si512(secret + SECRET - STRIPE);
    for (; count; count--, bytes += BLOCK) {
        /* Swap the lanes of the values once for all stripes, not in each: the order of additions does not matter. */
        __m512i values = _mm512_setzero_si512();
#pragma GCC unroll 16
        for (int stripe = 0; stripe < STRIPES; stripe++) {
            __m512i value = _mm512_loadu_si512(bytes + STRIPE * stripe);
            __m512i keyed = _mm512_xor_si512(value, _mm512_loadu_si512(secret + 8 * stripe));
            PREFETCH(bytes + STRIPE * stripe);
            values = _mm512_add_epi64(values, value);
            sum = _mm512_add_epi64(sum, _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32)));
        }
        sum = _mm512_add_epi64(sum, _mm512_shuffle_epi32(values, (_MM_PERM_ENUM)0x4E));
        sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), last);
        __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime);
        sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), _mm512_slli_epi64(high, 32));
    }
    _mm512_storeu_si512(lanes, sum);
}

__attribute__((target("avx2"))) static void blocks_avx2(uint64_t *lanes, const uint8_t *bytes, uint64_t count) {
    __m256i sums[2] = {_mm256_loadu_si256((const __m256i *)lanes), _mm256_loadu_si256((const __m256i *)(lanes + 4))};
    const __m256i prime = _mm256_set1_epi64x((long long)P32_1);
    for (; count; count--, bytes += BLOCK) {
        __m256i values[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for (int stripe = 0; stripe < STRIPES; stripe++) {
            PREFETCH(bytes + STRIPE * stripe);
            for (int half = 0; half < 2; half++) {
                __m256i value = _mm256_loadu_si256((const __m256i *)(bytes + STRIPE * stripe + 32 * half));
                __m256i key = _mm256_loadu_si256((const __m256i *)(secret + 8 * stripe + 32 * half));
                __m256i keyed = _mm256_xor_si256(value, key);
                values[half] = _mm256_add_epi64(values[half], value);
                sums[half] = _mm256_add_epi64(sums[half], _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
            }
        }
        for (int half = 0; half < 2; half++)
            sums[half] = _mm256_add_epi64(sums[half], _mm256_shuffle_epi32(values[half], 0x4E));
        for (int half = 0; half < 2; half++) {
            __m256i key = _mm256_loadu_si256((const __m256i *)(secret + SECRET - STRIPE + 32 * half));
            __m256i sum = _mm256_xor_si256(_mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47)), key);
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
            sums[half] = _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(high, 32));
        }
    }
    _mm256_storeu_si256((__m256i *)lanes, sums[0]);
    _mm256_storeu_si256((__m256i *)(lanes + 4), sums[1]);
}
#endif

static void (*hash_blocks)(uint64_t *, const uint8_t *, uint64_t) = blocks_plain;

/* Chooses the widest form that this processor has, up to `widest`: 0 plain, 1 AVX2, 2 AVX-512. Returns the form in use.
 */
KV_PUBLIC int kv_use_width(int widest) {
    hash_blocks = blocks_plain;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (widest >= 2 && __builtin_cpu_supports("avx512f")) return hash_blocks = blocks_avx512, 2;
    if (widest >= 1 && __builtin_cpu_supports("avx2")) return hash_blocks = blocks_avx2, 1;
#endif
    (void)widest;
    return 0;
}

__attribute__((constructor)) static void choose(void) { kv_use_width(2); }

KV_PUBLIC void kv_hash_begin(kv_hash *hash) {
    const uint64_t lanes[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(hash->lanes, lanes, sizeof lanes);
    hash->blocks_done = 0;
}

/* Absorbs the whole blocks of what has arrived of `size` bytes; the last block is left to the end. */
KV_PUBLIC void kv_hash_absorb(kv_hash *hash, const uint8_t *bytes, uint64_t size, uint64_t arrived) {
    uint64_t ready = arrived / BLOCK, most = size ? (size - 1) / BLOCK : 0;
    if (ready > most) ready = most;
    if (size <= SHORT_MAX || ready <= hash->blocks_done) return;
    hash_blocks(hash->lanes, bytes + hash->blocks_done * BLOCK, ready - hash->blocks_done);
    hash->blocks_done = ready;
}

KV_PUBLIC uint64_t kv_hash_end(kv_hash *hash, const uint8_t *bytes, uint64_t size) {
    if (size <= 16) return hash_to_16(bytes, size);
    if (size <= SHORT_MAX) return hash_to_240(bytes, size);
    kv_hash_absorb(hash, bytes, size, size);
    uint64_t *lanes = hash->lanes, done = hash->blocks_done * BLOCK;
    for (uint64_t stripe = 0; stripe < (size - 1 - done) / STRIPE; stripe++)
        stripe_plain(lanes, bytes + done + STRIPE * stripe, secret + 8 * stripe);
    stripe_plain(lanes, bytes + size - STRIPE, secret + SECRET - STRIPE - 7);
    uint64_t sum = size * P64_1;
    for (int pair = 0; pair < 4; pair++)
        sum += folded(lanes[2 * pair] ^ read64(secret + 11 + 16 * pair), lanes[2 * pair + 1] ^ read64(secret + 19 + 16 * pair));
    return avalanche(sum);
}

KV_PUBLIC uint64_t kv_checksum(const uint8_t *bytes, uint64_t size) {
    kv_hash hash;
    kv_hash_begin(&hash);
    return kv_hash_end(&hash, bytes, size);
}

KV_PUBLIC int kv_abi(void) { return KV_ABI; }
