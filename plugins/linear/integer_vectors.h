/* Products of 8-bit activations with 8- or 4-bit weights, in the width of vf.
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

#define VI_BYTES (4 * VF_LANES)

#if VF_LANES == 16
typedef __m512i vi;
INGOT_INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INGOT_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INGOT_INLINE void vi_store(void *p, vi a) { _mm512_storeu_si512(p, a); }
INGOT_INLINE vf vi_to_float(vi a) { return _mm512_cvtepi32_ps(a); }
INGOT_INLINE vi vi_low_nibbles(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INGOT_INLINE vi vi_high_nibbles(vi a) { return vi_low_nibbles(_mm512_srli_epi16(a, 4)); }
INGOT_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INGOT_INLINE vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
INGOT_INLINE vi vi_of_bits(vf a) { return _mm512_castps_si512(a); }
INGOT_INLINE vf vf_of_bits(vi a) { return _mm512_castsi512_ps(a); }
INGOT_INLINE vi vi_round(vf a) { return _mm512_cvtps_epi32(a); }
INGOT_INLINE vi vi_magnitude(vf a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)); }
INGOT_INLINE void vi_store_i8(int8_t *p, vi a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }
#elif VF_LANES == 8
typedef __m256i vi;
INGOT_INLINE vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
INGOT_INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INGOT_INLINE void vi_store(void *p, vi a) { _mm256_storeu_si256((__m256i *)p, a); }
INGOT_INLINE vf vi_to_float(vi a) { return _mm256_cvtepi32_ps(a); }
INGOT_INLINE vi vi_low_nibbles(vi a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
INGOT_INLINE vi vi_high_nibbles(vi a) { return vi_low_nibbles(_mm256_srli_epi16(a, 4)); }
INGOT_INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INGOT_INLINE vi vi_max(vi a, vi b) { return _mm256_max_epi32(a, b); }
INGOT_INLINE vi vi_of_bits(vf a) { return _mm256_castps_si256(a); }
INGOT_INLINE vf vf_of_bits(vi a) { return _mm256_castsi256_ps(a); }
INGOT_INLINE vi vi_round(vf a) { return _mm256_cvtps_epi32(a); }
INGOT_INLINE vi vi_magnitude(vf a) { return _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff)); }
INGOT_INLINE void vi_store_i8(int8_t *p, vi a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
#else
typedef int32x4_t vi;
INGOT_INLINE vi vi_set1(int32_t x) { return vdupq_n_s32(x); }
INGOT_INLINE vi vi_load(const void *p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)p)); }
INGOT_INLINE void vi_store(void *p, vi a) { vst1q_u8((uint8_t *)p, vreinterpretq_u8_s32(a)); }
INGOT_INLINE vf vi_to_float(vi a) { return vcvtq_f32_s32(a); }
INGOT_INLINE vi vi_low_nibbles(vi a) {
    return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(a), vdupq_n_u8(15)));
}
INGOT_INLINE vi vi_high_nibbles(vi a) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), 4)); }
INGOT_INLINE vi vi_add(vi a, vi b) { return vaddq_s32(a, b); }
INGOT_INLINE vi vi_max(vi a, vi b) { return vmaxq_s32(a, b); }
INGOT_INLINE vi vi_of_bits(vf a) { return vreinterpretq_s32_f32(a); }
INGOT_INLINE vf vf_of_bits(vi a) { return vreinterpretq_f32_s32(a); }
INGOT_INLINE vi vi_round(vf a) { return vcvtnq_s32_f32(a); }
INGOT_INLINE vi vi_magnitude(vf a) { return vandq_s32(vreinterpretq_s32_f32(a), vdupq_n_s32(0x7fffffff)); }
INGOT_INLINE void vi_store_i8(int8_t *p, vi a) {
    const int16x4_t words = vmovn_s32(a);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    memcpy(p, &bytes, 4);
}
#endif

/* vi_of_bits, vf_of_bits: the same bits as another type. vi_magnitude: those of |a|, which sort like it. vi_round: to the
 * nearest, even where two are. vi_store_i8: the lowest byte of every lane, which holds it. */

/* The same four bytes in every lane. */
INGOT_INLINE vi vi_repeat(const uint8_t *four) { int32_t v; memcpy(&v, four, 4); return vi_set1(v); }

/* Lane i of the result: the sum (or the maximum) over the lanes of rows[i]. */
#define VI_REDUCE(name, operation) \
    INGOT_INLINE vi name(vi rows[VF_LANES]) { \
        INGOT_UNROLL for (int half = VF_LANES / 2; half; half /= 2) \
            INGOT_UNROLL for (int i = 0; i < half; i++) { \
                const vf a = vf_of_bits(rows[i]), b = vf_of_bits(rows[i + half]); \
                rows[i] = operation(vi_of_bits(vf_interleave_low(a, b)), vi_of_bits(vf_interleave_high(a, b))); \
            } \
        return rows[0]; \
    }
VI_REDUCE(vi_sums, vi_add)
VI_REDUCE(vi_maxima, vi_max)

/* One step takes 4 channels of K of every output channel: sum + dot(w, x), with x the same four activations in every
 * lane. 8-bit weights come through vi_prepare_i8, which adds VI_SHIFT_I8, and their sums begin with vi_start_i8. Sums
 * over up to 32 channels of 4-bit weights begin with 0 and end with vi_end_u4. */
#if defined(__AVX512VNNI__)
/* vpdpbusd takes one operand unsigned: 8-bit weights become w + 128, and the start takes the surplus away,
 * offset = -128 * (sum of the activations). */
#define VI_SHIFT_I8 128
INGOT_INLINE vi vi_prepare_i8(vi w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
INGOT_INLINE vi vi_start_i8(const int32_t *offset) { return _mm512_set1_epi32(*offset); }
INGOT_INLINE vi vi_step_i8(vi sum, vi w, vi x) { return _mm512_dpbusd_epi32(sum, w, x); }
INGOT_INLINE vi vi_step_u4(vi sum, vi w, vi x) { return _mm512_dpbusd_epi32(sum, w, x); }
INGOT_INLINE vi vi_end_u4(vi sum) { return sum; }

#elif VF_LANES >= 8
#define VI_SHIFT_I8 0
/* vpmaddubsw adds two products to 16 bits, which must hold them. 8-bit weights: |w| times x with the sign of w, at most
 * 2 * 127^2. 4-bit weights: at most 2 * 15 * 127, so that eight such pairs are summed before they are widened. */
INGOT_INLINE vi vi_prepare_i8(vi w) { return w; }
INGOT_INLINE vi vi_start_i8(const int32_t *offset) { (void)offset; return vi_set1(0); }
#if VF_LANES == 16
INGOT_INLINE vi vi_step_i8(vi sum, vi w, vi x) {
    const vi turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    const vi pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
INGOT_INLINE vi vi_step_u4(vi sum, vi w, vi x) { return _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, x)); }
INGOT_INLINE vi vi_end_u4(vi sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
#else
INGOT_INLINE vi vi_step_i8(vi sum, vi w, vi x) {
    const vi pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INGOT_INLINE vi vi_step_u4(vi sum, vi w, vi x) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x)); }
INGOT_INLINE vi vi_end_u4(vi sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif

#else
#define VI_SHIFT_I8 0
INGOT_INLINE vi vi_prepare_i8(vi w) { return w; }
INGOT_INLINE vi vi_start_i8(const int32_t *offset) { (void)offset; return vi_set1(0); }
INGOT_INLINE vi vi_step_i8(vi sum, vi w, vi x) {
    return vdotq_s32(sum, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
}
INGOT_INLINE vi vi_step_u4(vi sum, vi w, vi x) { return vi_step_i8(sum, w, x); }
INGOT_INLINE vi vi_end_u4(vi sum) { return sum; }
#endif

#endif
