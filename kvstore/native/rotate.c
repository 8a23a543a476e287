/* Rotates keys to their positions (RoPE), in place (kvstore/segments/SEGMENTS.md, S12).
 *
 * The arithmetic is float32 without fused products, and each element is rounded once: so the result is the same as that
 * of numpy (kvstore/segments/rotation.py) and of engines that rotate in float32. Compiled for AVX2 without FMA for that
 * reason. */
#include <string.h>

#include "native.h"
#if defined(__x86_64__)
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

/* All heads of `count` rows at `plane`; row r has the tables at r * pairs. */
#define ROWS(turn, type)                                                                                                \
    do {                                                                                                                \
        type *head = (type *)plane;                                                                                     \
        for (int64_t row = 0; row < count; row++, cosines += pairs, sines += pairs)                                     \
            for (int64_t at = 0; at < heads; at++, head += head_dim) {                                                  \
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
/* The halves of a head in float16, with the processor's own conversion. */
__attribute__((target("avx2,f16c"))) static inline void turn_float16_f16c(uint16_t *low, uint16_t *high, const float *cosines,
                                                                          const float *sines, int64_t pairs, int64_t step) {
    int64_t i = 0;
    for (; step == 1 && i + 8 <= pairs; i += 8) {
        __m256 a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(low + i)));
        __m256 b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(high + i)));
        __m256 cosine = _mm256_loadu_ps(cosines + i), sine = _mm256_loadu_ps(sines + i);
        __m256 first = _mm256_sub_ps(_mm256_mul_ps(a, cosine), _mm256_mul_ps(b, sine));
        __m256 second = _mm256_add_ps(_mm256_mul_ps(b, cosine), _mm256_mul_ps(a, sine));
        _mm_storeu_si128((__m128i *)(low + i), _mm256_cvtps_ph(first, _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128((__m128i *)(high + i), _mm256_cvtps_ph(second, _MM_FROUND_TO_NEAREST_INT));
    }
    turn_float16(low + i * step, high + i * step, cosines + i, sines + i, pairs - i, step);
}

__attribute__((target("avx2,f16c"))) static void rows_avx2(PARAMETERS) {
    if (type == FLOAT16)
        ROWS(turn_float16_f16c, uint16_t);
    else
        rows_of(plane, cosines, sines, count, heads, head_dim, pairs, type, interleaved);
}
#endif

/* Rotates the keys in each of the planes, whose addresses are given: `count` rows of `heads` heads. `cosines` and `sines`
 * have `pairs` values for each row. `type` is 0 for bfloat16, 1 for float16, 2 for float32. */
KV_PUBLIC void kv_rotate(const uint64_t *planes, int64_t plane_count, const float *cosines, const float *sines,
                         int64_t count, int64_t heads, int64_t head_dim, int64_t pairs, int type, int interleaved) {
    void (*rows)(PARAMETERS) = rows_plain;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) rows = rows_avx2;
#endif
    for (int64_t at = 0; at < plane_count; at++)
        rows((uint8_t *)(uintptr_t)planes[at], cosines, sines, count, heads, head_dim, pairs, type, interleaved);
}
