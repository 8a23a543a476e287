/* The addresses of chains of chunks: BLAKE2b (RFC 7693) with 16 bytes of output, keyed with the namespace's digest.
 *
 * Its advantages over Python's BLAKE2b: it computes the state after the key's block once and not for each chunk,
 * allocates nothing, and needs no GIL. A block is hashed in plain C, and with AVX-512 where that is faster.
 *
 * The blocks of one chain cannot be hashed in parallel, because they follow each other, so only the time of one block
 * counts. The vector code mixes all four columns together, and one permutation chooses eight of the sixteen words. It
 * takes 0.7 of the time of plain C on an Intel Xeon, 0.98 on an AMD Zen 4, and 0.88 there for small chunks (linked). On
 * an AMD Zen 5, whose core the four columns of plain C keep busy, vectors that gathered the words took twice as long;
 * the present vector code has not been measured there. */
#include "native.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define BLOCK_BYTES 128
#define LAST UINT64_MAX
#define LINKED_BYTES_MAX (BLOCK_BYTES - KV_ADDRESS_BYTES)

/* The initial state of a hash, before its parameters. */
static const uint64_t initial_state[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

/* The words of a block in the order of each round: first those of the columns, two each, then those of the diagonals.
 */
#define ROUNDS \
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) \
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3) \
    ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4) \
    ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8) \
    ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13) \
    ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9) \
    ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11) \
    ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10) \
    ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5) \
    ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0) \
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) \
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)

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

static void plain(uint64_t h[8], const uint8_t *block, uint64_t total, uint64_t last) {
    uint64_t m[16];
    memcpy(m, block, BLOCK_BYTES);
    uint64_t v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
    const uint64_t *start = initial_state;
    uint64_t v8 = start[0], v9 = start[1], v10 = start[2], v11 = start[3];
    uint64_t v12 = start[4] ^ total, v13 = start[5], v14 = start[6] ^ last, v15 = start[7];
    ROUNDS
    h[0] ^= v0 ^ v8;
    h[1] ^= v1 ^ v9;
    h[2] ^= v2 ^ v10;
    h[3] ^= v3 ^ v11;
    h[4] ^= v4 ^ v12;
    h[5] ^= v5 ^ v13;
    h[6] ^= v6 ^ v14;
    h[7] ^= v7 ^ v15;
}
#undef ROUND

#if defined(__x86_64__)
/* Mixes four columns, or diagonals, in parallel: the words s0, s2, s4, s6 come first, s1, s3, s5, s7 second. */
#define MIX_ALL(s0, s1, s2, s3, s4, s5, s6, s7)                                                                     \
    words = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(s0, s2, s4, s6, s1, s3, s5, s7), high);                \
    a = _mm256_add_epi64(_mm256_add_epi64(a, _mm512_castsi512_si256(words)), b);                                    \
    d = _mm256_ror_epi64(_mm256_xor_si256(d, a), 32);                                                               \
    c = _mm256_add_epi64(c, d);                                                                                     \
    b = _mm256_ror_epi64(_mm256_xor_si256(b, c), 24);                                                               \
    a = _mm256_add_epi64(_mm256_add_epi64(a, _mm512_extracti64x4_epi64(words, 1)), b);                              \
    d = _mm256_ror_epi64(_mm256_xor_si256(d, a), 16);                                                               \
    c = _mm256_add_epi64(c, d);                                                                                     \
    b = _mm256_ror_epi64(_mm256_xor_si256(b, c), 63);
/* Turns three of the rows so that diagonals stand in columns, or back. Row b stays, because the next step waits longest
 * for it. So the diagonal that begins with v3 is the first. */
#define TURN(by_a, by_c)                          \
    a = _mm256_permute4x64_epi64(a, by_a);        \
    c = _mm256_permute4x64_epi64(c, by_c);        \
    d = _mm256_permute4x64_epi64(d, 0x4e);
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15) \
    MIX_ALL(s0, s1, s2, s3, s4, s5, s6, s7)                                         \
    TURN(0x93, 0x39)                                                                \
    MIX_ALL(s14, s15, s8, s9, s10, s11, s12, s13)                                   \
    TURN(0x39, 0x93)

__attribute__((target("avx512f,avx512vl"))) static void vectors(uint64_t h[8], const uint8_t *block, uint64_t total,
                                                                uint64_t last) {
    const __m512i low = _mm512_loadu_si512(block), high = _mm512_loadu_si512(block + 64);
    const __m256i *state = (const __m256i *)h, *start = (const __m256i *)initial_state;
    const __m256i first = _mm256_loadu_si256(state), second = _mm256_loadu_si256(state + 1);
    __m512i words;
    __m256i a = first, b = second, c = _mm256_loadu_si256(start), d = _mm256_loadu_si256(start + 1);
    d = _mm256_xor_si256(d, _mm256_setr_epi64x((long long)total, 0, (long long)last, 0));
    ROUNDS
    _mm256_storeu_si256((__m256i *)h, _mm256_xor_si256(first, _mm256_xor_si256(a, c)));
    _mm256_storeu_si256((__m256i *)h + 1, _mm256_xor_si256(second, _mm256_xor_si256(b, d)));
}

/* Hashes chunks that fit into one block with their parent's address. The address stays in a register: to store it, and
 * to load it again together with tokens, takes a tenth of the time. */
__attribute__((target("avx512f,avx512vl,avx512bw"))) static void linked(const uint64_t keyed[8], const uint8_t *parent,
                                                                       const uint8_t *packed, uint64_t chunk_bytes,
                                                                       uint64_t count, uint8_t *addresses) {
    const __m256i *state = (const __m256i *)keyed, *start = (const __m256i *)initial_state;
    const __m256i first = _mm256_loadu_si256(state), second = _mm256_loadu_si256(state + 1);
    const __m256i third = _mm256_loadu_si256(start);
    const long long total = (long long)(BLOCK_BYTES + KV_ADDRESS_BYTES + chunk_bytes);
    const __m256i fourth =
        _mm256_xor_si256(_mm256_loadu_si256(start + 1), _mm256_setr_epi64x(total, 0, (long long)LAST, 0));
    const uint64_t low_bytes = chunk_bytes < 64 - KV_ADDRESS_BYTES ? chunk_bytes : 64 - KV_ADDRESS_BYTES;
    const __mmask64 in_low = ((1ULL << low_bytes) - 1) << KV_ADDRESS_BYTES;
    const uint64_t high_bytes = chunk_bytes - low_bytes;
    const __mmask64 in_high = high_bytes == 64 ? UINT64_MAX : (1ULL << high_bytes) - 1;
    __m128i address = _mm_loadu_si128((const __m128i *)parent);
    for (uint64_t i = 0; i < count; i++) {
        const __m512i tokens = _mm512_maskz_loadu_epi8(in_low, packed - KV_ADDRESS_BYTES);
        const __m512i low = _mm512_or_si512(tokens, _mm512_inserti32x4(_mm512_setzero_si512(), address, 0));
        const __m512i high = _mm512_maskz_loadu_epi8(in_high, packed + low_bytes);
        __m512i words;
        __m256i a = first, b = second, c = third, d = fourth;
        ROUNDS
        address = _mm_xor_si128(_mm256_castsi256_si128(first), _mm256_castsi256_si128(_mm256_xor_si256(a, c)));
        _mm_storeu_si128((__m128i *)addresses, address);
        addresses += KV_ADDRESS_BYTES;
        packed += chunk_bytes;
    }
}
#endif

/* Absorbs one block; `total` is the number of bytes up to its end, `last` is LAST for the last one and 0 for others. */
static void (*blake2b)(uint64_t h[8], const uint8_t *block, uint64_t total, uint64_t last) = plain;
/* Computes the addresses of `count` chunks of `chunk_bytes`, at most LINKED_BYTES_MAX, one after the other at `packed`.
 * A chunk and its parent's address are one block; `keyed` has absorbed one block. NULL where it would not be faster. */
static void (*blake2b_linked)(const uint64_t keyed[8], const uint8_t *parent, const uint8_t *packed,
                                 uint64_t chunk_bytes, uint64_t count, uint8_t *addresses);

#if defined(__x86_64__)
static int is_zen4(void) {
    unsigned a, b, c, d;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    return (a >> 8 & 15) + (a >> 20 & 255) == 0x19; /* a Zen 3 has no AVX-512 */
}
#endif

/* Chooses whether to use vectors from now on: -1 if they are faster, 1 if the processor has them, 0 never. Returns the
 * choice. */
KV_PUBLIC int kv_use_vectors(int wanted) {
    blake2b = plain, blake2b_linked = NULL;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (wanted < 0) wanted = __builtin_cpu_is("intel") || is_zen4();
    if (wanted && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw"))
        blake2b = vectors, blake2b_linked = linked;
#endif
    (void)wanted;
    return blake2b != plain;
}

__attribute__((constructor)) static void choose(void) { kv_use_vectors(-1); }

/* The state after the block of the key, which all chunks of a namespace begin with. */
static void key(uint64_t keyed[8], const uint8_t *digest) {
    static const char person[16] = "kvstore.chunk.1";
    uint8_t block[BLOCK_BYTES] = {0};
    uint64_t personal[2];
    memcpy(keyed, initial_state, 8 * sizeof *keyed);
    memcpy(personal, person, sizeof personal);
    keyed[0] ^= 0x01010000 | KV_DIGEST_BYTES << 8 | KV_ADDRESS_BYTES;
    keyed[6] ^= personal[0];
    keyed[7] ^= personal[1];
    memcpy(block, digest, KV_DIGEST_BYTES);
    blake2b(keyed, block, BLOCK_BYTES, 0);
}

/* Computes the addresses of `count` chunks of `chunk_bytes`, one after the other at `packed`; `parent` is the parent of the
 * first. */
KV_PUBLIC void kv_addresses(const uint8_t *digest, const uint8_t *parent, const uint8_t *packed, uint64_t chunk_bytes,
                            uint64_t count, uint8_t *addresses) {
    uint64_t keyed[8];
    uint8_t block[BLOCK_BYTES];
    key(keyed, digest);
    if (blake2b_linked && chunk_bytes <= LINKED_BYTES_MAX) {
        blake2b_linked(keyed, parent, packed, chunk_bytes, count, addresses);
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
            blake2b(h, filled ? block : packed, total, 0);
            packed += BLOCK_BYTES - filled;
            left -= BLOCK_BYTES - filled;
            filled = 0;
        }
        memcpy(block + filled, packed, left);
        memset(block + filled + left, 0, BLOCK_BYTES - filled - left);
        blake2b(h, block, total + filled + left, LAST);
        packed += left;
        memcpy(addresses, h, KV_ADDRESS_BYTES);
        parent = addresses;
        addresses += KV_ADDRESS_BYTES;
    }
}
