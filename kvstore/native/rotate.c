/* Rotates keys to their positions (RoPE), in place (kvstore/segments/SEGMENTS.md, S12).
 *
 * The arithmetic is float32 without fused products, and each element is rounded once: so the result is the same as that
 * of numpy (kvstore/segments/rotation.py) and of engines that rotate in float32. Compiled with -ffp-contract=off for that
 * reason. (Of NaN only that it is one: its other bits may differ.) */
#include <string.h>

#include "native.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { BFLOAT16 = 0, FLOAT16 = 1, FLOAT32 = 2 };

#define INLINE static inline __attribute__((always_inline))

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float bfloat16_up(uint16_t from) { return from_bits((uint32_t)from << 16); }

INLINE uint16_t bfloat16_down(float value) {
    uint32_t bits = to_bits(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

INLINE float float16_up(uint16_t from) {
    uint32_t sign = (uint32_t)(from & 0x8000) << 16, rest = (uint32_t)(from & 0x7fff) << 13;
    if (rest >= 0x0f800000) return from_bits(sign | 0x70000000 | rest); /* infinite, or no number */
    return from_bits(sign | to_bits(from_bits(rest) * 0x1p112f));
}

INLINE uint16_t float16_down(float value) {
    uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    /* Below the smallest normal number, adding 0.5 leaves the rounded bits of the small one at the end. */
    if (rest < 0x38800000) return (uint16_t)(sign | (to_bits(from_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

INLINE float float32_up(float from) { return from; }
INLINE float float32_down(float value) { return value; }

/* Rotates `pairs` pairs of one head; element i of the first is at low[i * step], of the second at high[i * step]. */
#define TURN(name, type, up, down)                                                                                      \
    INLINE void name(type *restrict low, type *restrict high, const float *restrict cosines,                           \
                     const float *restrict sines, int64_t pairs, int64_t step) {                                       \
        for (int64_t i = 0; i < pairs; i++) {                                                                           \
            float a = up(low[i * step]), b = up(high[i * step]);                                                        \
            low[i * step] = down(a * cosines[i] - b * sines[i]);                                                        \
            high[i * step] = down(b * cosines[i] + a * sines[i]);                                                       \
        }                                                                                                               \
    }

TURN(turn_bfloat16, uint16_t, bfloat16_up, bfloat16_down)
TURN(turn_float16, uint16_t, float16_up, float16_down)
TURN(turn_float32, float, float32_up, float32_down)

/* A core's own prefetchers bring keys too late: asked for this far ahead they come at the speed of memory (1.8 times for
 * bfloat16, 1.3 for float32). Behind a plane's end nothing is read: to ask for an address does no harm. */
enum { LINE_BYTES = 64, AHEAD_BYTES = 4096 };

INLINE void ask_ahead(const void *head, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE_BYTES) __builtin_prefetch((const char *)head + AHEAD_BYTES + at, 1);
}

/* All heads of `count` rows at `plane`; row r has the tables at r * pairs. */
#define ROWS(turn, type)                                                                                                \
    do {                                                                                                                \
        type *head = (type *)plane;                                                                                     \
        for (int64_t row = 0; row < count; row++, cosines += pairs, sines += pairs)                                     \
            for (int64_t at = 0; at < heads; at++, head += head_dim) {                                                  \
                ask_ahead(head, head_dim * (int64_t)sizeof *head);                                                      \
                if (interleaved)                                                                                        \
                    turn(head, head + 1, cosines, sines, pairs, 2);                                                     \
                else                                                                                                    \
                    turn(head, head + pairs, cosines, sines, pairs, 1);                                                 \
            }                                                                                                           \
    } while (0)

#define PARAMETERS                                                                                                      \
    uint8_t *plane, const float *cosines, const float *sines, int64_t count, int64_t heads, int64_t head_dim,          \
        int64_t pairs, int type, int interleaved

INLINE void rows_of(PARAMETERS) {
    if (type == BFLOAT16)
        ROWS(turn_bfloat16, uint16_t);
    else if (type == FLOAT16)
        ROWS(turn_float16, uint16_t);
    else
        ROWS(turn_float32, float);
}

static void rows_plain(PARAMETERS) {
    rows_of(plane, cosines, sines, count, heads, head_dim, pairs, type, interleaved);
}

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx2,f16c"), always_inline)) static inline

/* As bfloat16_down, of numbers alone: the result is in the upper half of each lane, and the lower one has no meaning. */
WIDE __m256i bfloat16_upper8(__m256 value) {
    __m256i bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

WIDE __m256 load8(const uint16_t *from, int type) {
    __m128i bits = _mm_loadu_si128((const __m128i *)from);
    return type == FLOAT16 ? _mm256_cvtph_ps(bits) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

WIDE void store8(uint16_t *to, __m256 value, int type) {
    __m256i bits = type == FLOAT16 ? _mm256_setzero_si256() : _mm256_srli_epi32(bfloat16_upper8(value), 16);
    __m128i packed = type == FLOAT16 ? _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)
                                     : _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128((__m128i *)to, packed);
}

/* Rotates the pairs of one head, eight at a time, with both elements of a type of 16 bits. Two neighbours in
 * bfloat16 fill a lane, and each is the upper half of a float32. For neighbours in float16, two vectors of four pairs
 * are sorted into one of the first and one of the second elements: 0 1 4 5 2 3 6 7, as the tables then are. */
WIDE void turn_wide(uint16_t *low, uint16_t *high, const float *cosines, const float *sines, int64_t pairs, int64_t step,
                    int type) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    int64_t i = 0;
    for (; i + 8 <= pairs; i += 8) {
        __m256 cosine = _mm256_loadu_ps(cosines + i), sine = _mm256_loadu_ps(sines + i), a, b;
        if (step == 1) {
            a = load8(low + i, type);
            b = load8(high + i, type);
        } else if (type == BFLOAT16) {
            __m256i lanes = _mm256_loadu_si256((const __m256i *)(low + 2 * i));
            a = _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 16));
            b = _mm256_castsi256_ps(_mm256_and_si256(lanes, upper));
        } else {
            __m256 first = load8(low + 2 * i, type), second = load8(low + 2 * i + 8, type);
            a = _mm256_shuffle_ps(first, second, 0x88);
            b = _mm256_shuffle_ps(first, second, 0xdd);
            cosine = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(cosine), 0xd8));
            sine = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sine), 0xd8));
        }
        __m256 turned = _mm256_sub_ps(_mm256_mul_ps(a, cosine), _mm256_mul_ps(b, sine));
        __m256 other = _mm256_add_ps(_mm256_mul_ps(b, cosine), _mm256_mul_ps(a, sine));
        if (type == BFLOAT16 && _mm256_movemask_ps(_mm256_cmp_ps(turned, other, _CMP_UNORD_Q))) {
            turn_bfloat16(low + i * step, high + i * step, cosines + i, sines + i, 8, step);
        } else if (step == 1) {
            store8(low + i, turned, type);
            store8(high + i, other, type);
        } else if (type == BFLOAT16) {
            __m256i first = _mm256_srli_epi32(bfloat16_upper8(turned), 16), second = bfloat16_upper8(other);
            _mm256_storeu_si256((__m256i *)(low + 2 * i), _mm256_or_si256(first, _mm256_and_si256(second, upper)));
        } else {
            store8(low + 2 * i, _mm256_unpacklo_ps(turned, other), type);
            store8(low + 2 * i + 8, _mm256_unpackhi_ps(turned, other), type);
        }
    }
    if (type == FLOAT16)
        turn_float16(low + i * step, high + i * step, cosines + i, sines + i, pairs - i, step);
    else
        turn_bfloat16(low + i * step, high + i * step, cosines + i, sines + i, pairs - i, step);
}

WIDE void turn_wide_bfloat16(uint16_t *low, uint16_t *high, const float *cosines, const float *sines, int64_t pairs,
                             int64_t step) {
    turn_wide(low, high, cosines, sines, pairs, step, BFLOAT16);
}

WIDE void turn_wide_float16(uint16_t *low, uint16_t *high, const float *cosines, const float *sines, int64_t pairs,
                            int64_t step) {
    turn_wide(low, high, cosines, sines, pairs, step, FLOAT16);
}

__attribute__((target("avx2,f16c"))) static void rows_avx2(PARAMETERS) {
    if (type == BFLOAT16)
        ROWS(turn_wide_bfloat16, uint16_t);
    else if (type == FLOAT16)
        ROWS(turn_wide_float16, uint16_t);
    else
        ROWS(turn_float32, float);
}

#define WIDER __attribute__((target("avx2,f16c,avx512f,avx512bw"), always_inline)) static inline

WIDER __m512i bfloat16_upper16(__m512 value) {
    __m512i bits = _mm512_castps_si512(value), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}

WIDER __m512 load16(const uint16_t *from) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

WIDER void store16(uint16_t *to, __m512 value) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bfloat16_upper16(value), 16)));
}

/* As turn_wide, of bfloat16 alone, sixteen pairs at a time: rounding it takes so many instructions that eights do not
 * keep up with the memory. */
WIDER void turn_wider_bfloat16(uint16_t *low, uint16_t *high, const float *cosines, const float *sines, int64_t pairs,
                               int64_t step) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    int64_t i = 0;
    for (; i + 16 <= pairs; i += 16) {
        __m512 cosine = _mm512_loadu_ps(cosines + i), sine = _mm512_loadu_ps(sines + i), a, b;
        if (step == 1) {
            a = load16(low + i);
            b = load16(high + i);
        } else {
            __m512i lanes = _mm512_loadu_si512(low + 2 * i);
            a = _mm512_castsi512_ps(_mm512_slli_epi32(lanes, 16));
            b = _mm512_castsi512_ps(_mm512_and_si512(lanes, upper));
        }
        __m512 turned = _mm512_sub_ps(_mm512_mul_ps(a, cosine), _mm512_mul_ps(b, sine));
        __m512 other = _mm512_add_ps(_mm512_mul_ps(b, cosine), _mm512_mul_ps(a, sine));
        if (_mm512_cmp_ps_mask(turned, other, _CMP_UNORD_Q)) {
            turn_bfloat16(low + i * step, high + i * step, cosines + i, sines + i, 16, step);
        } else if (step == 1) {
            store16(low + i, turned);
            store16(high + i, other);
        } else {
            __m512i first = _mm512_srli_epi32(bfloat16_upper16(turned), 16), second = bfloat16_upper16(other);
            _mm512_storeu_si512(low + 2 * i, _mm512_mask_blend_epi16(0xaaaaaaaa, first, second));
        }
    }
    turn_wide_bfloat16(low + i * step, high + i * step, cosines + i, sines + i, pairs - i, step);
}

__attribute__((target("avx2,f16c,avx512f,avx512bw"))) static void rows_avx512(PARAMETERS) {
    if (type == BFLOAT16)
        ROWS(turn_wider_bfloat16, uint16_t);
    else
        rows_avx2(plane, cosines, sines, count, heads, head_dim, pairs, type, interleaved);
}
#endif

static void (*rotate_rows)(PARAMETERS) = rows_plain;

/* As kv_use_width, for rotation. */
KV_PUBLIC int kv_use_rotation(int widest) {
    rotate_rows = rows_plain;
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned a, b, c, d; /* older compilers do not know the name "f16c" */
    int has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    int has_avx2 = __builtin_cpu_supports("avx2") && has_f16c;
    int has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    if (widest >= 2 && has_avx2 && has_avx512) return rotate_rows = rows_avx512, 2;
    if (widest >= 1 && has_avx2) return rotate_rows = rows_avx2, 1;
#endif
    (void)widest;
    return 0;
}

__attribute__((constructor)) static void choose(void) { kv_use_rotation(2); }

/* Rotates the keys in each of the planes, whose addresses are given: `count` rows of `heads` heads. `cosines` and `sines`
 * have `pairs` values for each row. `type` is 0 for bfloat16, 1 for float16, 2 for float32. */
KV_PUBLIC void kv_rotate(const uint64_t *planes, int64_t plane_count, const float *cosines, const float *sines,
                         int64_t count, int64_t heads, int64_t head_dim, int64_t pairs, int type, int interleaved) {
    for (int64_t at = 0; at < plane_count; at++)
        rotate_rows((uint8_t *)(uintptr_t)planes[at], cosines, sines, count, heads, head_dim, pairs, type, interleaved);
}
