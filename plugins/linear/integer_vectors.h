/* Products of 8-bit activations with 8- or 4-bit weights, 32 channels of K at a time, in the width of vf.
 *
 * A packed matrix holds, for every 4 channels of K, 64 bytes: 16 output channels x 4 channels of K (with 4-bit weights
 * a byte holds two such channels of K, see panel.h). That is one register of AVX-512, two of AVX2, four of NEON, and
 * the operand that vpdpbusd, vpmaddubsw and sdot expect: so one layout serves all.
 *
 * vi is a vector of int32, one an output channel; its bytes are four channels of K. All results are exact: activations
 * and 8-bit weights lie in [-127, 127]. */
#ifndef INGOT_INTEGER_VECTORS_H
#define INGOT_INTEGER_VECTORS_H
#include "../cpu/simd.h"

/* Registers of weights that 32 channels of K take. */
#define VI_BLOCK 8
#define VI_BYTES (4 * VF_LANES)

INGOT_INLINE int32_t ingot_load_i32(const void *p) { int32_t v; memcpy(&v, p, 4); return v; }

#if VF_LANES == 16
typedef __m512i vi;
INGOT_INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INGOT_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INGOT_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INGOT_INLINE vf vi_to_float(vi a) { return _mm512_cvtepi32_ps(a); }
INGOT_INLINE vi vi_low_nibbles(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INGOT_INLINE vi vi_high_nibbles(vi a) { return vi_low_nibbles(_mm512_srli_epi16(a, 4)); }
#elif VF_LANES == 8
typedef __m256i vi;
INGOT_INLINE vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
INGOT_INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INGOT_INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INGOT_INLINE vf vi_to_float(vi a) { return _mm256_cvtepi32_ps(a); }
INGOT_INLINE vi vi_low_nibbles(vi a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
INGOT_INLINE vi vi_high_nibbles(vi a) { return vi_low_nibbles(_mm256_srli_epi16(a, 4)); }
#else
typedef int32x4_t vi;
INGOT_INLINE vi vi_set1(int32_t x) { return vdupq_n_s32(x); }
INGOT_INLINE vi vi_load(const void *p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)p)); }
INGOT_INLINE vi vi_add(vi a, vi b) { return vaddq_s32(a, b); }
INGOT_INLINE vf vi_to_float(vi a) { return vcvtq_f32_s32(a); }
INGOT_INLINE vi vi_low_nibbles(vi a) {
    return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(a), vdupq_n_u8(15)));
}
INGOT_INLINE vi vi_high_nibbles(vi a) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), 4)); }
#endif

/* ---- one step: 4 channels of K of every output channel. vi_prepare_i8 brings stored 8-bit weights to the form that
 * vi_dot_i8 takes; vi_start_i8 gives the accumulator's start. Only vpdpbusd needs either: it takes one operand
 * unsigned, so the weights become w + 128, and the start takes the surplus away, offset = -128 * (sum of activations).
 */
#if defined(__AVX512VNNI__)
INGOT_INLINE vi vi_prepare_i8(vi w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
INGOT_INLINE vi vi_start_i8(const int32_t *offset) { return _mm512_set1_epi32(*offset); }
INGOT_INLINE vi vi_block_i8(vi sum, const vi *w, const int8_t *x) {
    for (int j = 0; j < VI_BLOCK; j++)
        sum = _mm512_dpbusd_epi32(sum, w[j], _mm512_set1_epi32(ingot_load_i32(x + 4 * j)));
    return sum;
}
INGOT_INLINE vi vi_block_u4(const vi *w, const int8_t *x) { return vi_block_i8(vi_set1(0), w, x); }

#elif VF_LANES == 16
INGOT_INLINE vi vi_prepare_i8(vi w) { return w; }
INGOT_INLINE vi vi_start_i8(const int32_t *offset) { (void)offset; return _mm512_setzero_si512(); }
/* |w| * (sign of w times x): two products of at most 127^2 fit 16 bits. */
INGOT_INLINE vi vi_block_i8(vi sum, const vi *w, const int8_t *x) {
    for (int j = 0; j < VI_BLOCK; j++) {
        vi four = _mm512_set1_epi32(ingot_load_i32(x + 4 * j));
        vi turned = _mm512_mask_sub_epi8(four, _mm512_movepi8_mask(w[j]), _mm512_setzero_si512(), four);
        vi pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w[j]), turned);
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
    return sum;
}
/* Sixteen products of at most 15 * 127 fit 16 bits: 32 channels are summed there before they are widened. */
INGOT_INLINE vi vi_block_u4(const vi *w, const int8_t *x) {
    vi pairs = _mm512_maddubs_epi16(w[0], _mm512_set1_epi32(ingot_load_i32(x)));
    for (int j = 1; j < VI_BLOCK; j++)
        pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(w[j], _mm512_set1_epi32(ingot_load_i32(x + 4 * j))));
    return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}

#elif VF_LANES == 8
INGOT_INLINE vi vi_prepare_i8(vi w) { return w; }
INGOT_INLINE vi vi_start_i8(const int32_t *offset) { (void)offset; return _mm256_setzero_si256(); }
INGOT_INLINE vi vi_block_i8(vi sum, const vi *w, const int8_t *x) {
    for (int j = 0; j < VI_BLOCK; j++) {
        vi turned = _mm256_sign_epi8(_mm256_set1_epi32(ingot_load_i32(x + 4 * j)), w[j]);
        vi pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j]), turned);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return sum;
}
INGOT_INLINE vi vi_block_u4(const vi *w, const int8_t *x) {
    vi pairs = _mm256_maddubs_epi16(w[0], _mm256_set1_epi32(ingot_load_i32(x)));
    for (int j = 1; j < VI_BLOCK; j++)
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[j], _mm256_set1_epi32(ingot_load_i32(x + 4 * j))));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

#else
INGOT_INLINE vi vi_prepare_i8(vi w) { return w; }
INGOT_INLINE vi vi_start_i8(const int32_t *offset) { (void)offset; return vdupq_n_s32(0); }
#define INGOT_SDOT(j, x, lane) sum = vdotq_laneq_s32(sum, vreinterpretq_s8_s32(w[j]), x, lane)
INGOT_INLINE vi vi_block_i8(vi sum, const vi *w, const int8_t *x) {
    int8x16_t low = vld1q_s8(x), high = vld1q_s8(x + 16);
    INGOT_SDOT(0, low, 0); INGOT_SDOT(1, low, 1); INGOT_SDOT(2, low, 2); INGOT_SDOT(3, low, 3);
    INGOT_SDOT(4, high, 0); INGOT_SDOT(5, high, 1); INGOT_SDOT(6, high, 2); INGOT_SDOT(7, high, 3);
    return sum;
}
#undef INGOT_SDOT
INGOT_INLINE vi vi_block_u4(const vi *w, const int8_t *x) { return vi_block_i8(vdupq_n_s32(0), w, x); }
#endif

#endif
