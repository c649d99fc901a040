/* Vectors of float32 in the width of the instruction set that the file is compiled for: 16 lanes with AVX-512, 8 with
 * AVX2, 4 with NEON. `vf` takes the operators + - * / of C. Loads and stores need no alignment.
 * vf_..._first(.., n) touches the first n lanes alone, 0 <= n <= VF_LANES; a load sets the others to 0. */
#ifndef INGOT_SIMD_H
#define INGOT_SIMD_H
#include "scalar_math.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define VF_LANES 16
#define VF_REGISTERS 32
typedef __m512 vf;
INGOT_INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INGOT_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INGOT_INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INGOT_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INGOT_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INGOT_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INGOT_INLINE float vf_hsum(vf x) { return _mm512_reduce_add_ps(x); }
INGOT_INLINE float vf_hmax(vf x) { return _mm512_reduce_max_ps(x); }
INGOT_INLINE __mmask16 vf_first(int n) { return (__mmask16)_bzhi_u32(0xffffu, (unsigned)n); }
INGOT_INLINE vf vf_load_first(const float *p, int n) { return _mm512_maskz_loadu_ps(vf_first(n), p); }
INGOT_INLINE void vf_store_first(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, vf_first(n), x); }
INGOT_INLINE vf vf_keep_first(vf x, int n, float other) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(other), vf_first(n), x);
}
INGOT_INLINE vf vf_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INGOT_INLINE vf vf_load_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INGOT_INLINE void vf_store_bf16(uint16_t *p, vf x) {
    __m512i u = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i bits = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    bits = _mm512_mask_or_epi32(bits, nan, _mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(bits));
}
INGOT_INLINE vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INGOT_INLINE void vf_store_f16(uint16_t *p, vf x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* Lanes of a and b in turn: a0 b0 a1 b1 .. of the lower and of the upper half. */
INGOT_INLINE vf vf_interleave_low(vf a, vf b) {
    return _mm512_permutex2var_ps(a, _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), b);
}
INGOT_INLINE vf vf_interleave_high(vf a, vf b) {
    __m512i from = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(a, from, b);
}
/* out[0 .. 3] = the sums over the lanes of a, b, c, d */
INGOT_INLINE void vf_hsum4(float *out, vf a, vf b, vf c, vf d) {
    vf ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    vf cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
    vf abcd = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)))
            + _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
/* 2^n x for integral n; shifted = n + INGOT_ROUND holds the same n as an integer. */
INGOT_INLINE vf vf_scale_pow2(vf x, vf n, vf shifted) { (void)shifted; return _mm512_scalef_ps(x, n); }

#ifdef __AVX512BF16__
/* Pairs: a vf whose lanes hold two bfloat16 each, the first one in the lower half. Subnormal numbers count as 0. */
#define VF_PAIRS 1
/* c + a b, in each lane the sum of two products; float32, whose order and rounding are the processor's own. */
INGOT_INLINE vf vf_dot_pairs(vf a, vf b, vf c) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
/* Elements 0 .. 15 and 16 .. 31, rounded to nearest even: lane i holds elements 2 i and 2 i + 1. */
INGOT_INLINE vf vf_to_pairs(vf low, vf high) {
    return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
}
/* As vf_to_pairs, but cut off instead of rounded. */
INGOT_INLINE vf vf_cut_to_pairs(vf low, vf high) {
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(_mm512_castps_si512(low), upper, _mm512_castps_si512(high)));
}
/* Lane i becomes the pair of the first's and the second's lane i, cut off. */
INGOT_INLINE vf vf_cut_lanes_to_pairs(vf first, vf second) {
    const __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
    return _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaau, lower, _mm512_castps_si512(second)));
}
/* The first n of 32 elements, 0 <= n <= 32, the others 0. */
INGOT_INLINE vf vf_load_pairs_first(const uint16_t *p, int n) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(_bzhi_u32(0xffffffffu, (unsigned)n), p));
}
/* Of 32 elements each of a and b: lane i holds a[i] and b[i]; of the second function a[16 + i] and b[16 + i]. */
INGOT_INLINE vf vf_interleave_elements_low(vf a, vf b) {
    const __m512i from = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                          37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(_mm512_castps_si512(a), from, _mm512_castps_si512(b)));
}
INGOT_INLINE vf vf_interleave_elements_high(vf a, vf b) {
    const __m512i from = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54,
                                          22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(_mm512_castps_si512(a), from, _mm512_castps_si512(b)));
}
/* x 2^n, n being the integer in the lower bits of `shifted` (n + INGOT_ROUND), for a result that is a normal number; if
 * its exponent would be 0, a subnormal one. */
INGOT_INLINE vf vf_shift_exponent(vf x, vf shifted) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x),
                                                _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}
#endif

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define VF_LANES 8
#define VF_REGISTERS 16
typedef __m256 vf;
INGOT_INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
INGOT_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
INGOT_INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INGOT_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INGOT_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INGOT_INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INGOT_INLINE float vf_hsum(vf x) {
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
INGOT_INLINE float vf_hmax(vf x) {
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
INGOT_INLINE __m256i vf_first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INGOT_INLINE vf vf_load_first(const float *p, int n) { return _mm256_maskload_ps(p, vf_first(n)); }
INGOT_INLINE void vf_store_first(float *p, vf x, int n) { _mm256_maskstore_ps(p, vf_first(n), x); }
INGOT_INLINE vf vf_keep_first(vf x, int n, float other) {
    return _mm256_blendv_ps(_mm256_set1_ps(other), x, _mm256_castsi256_ps(vf_first(n)));
}
INGOT_INLINE vf vf_load_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INGOT_INLINE vf vf_load_i8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INGOT_INLINE void vf_store_bf16(uint16_t *p, vf x) {
    __m256i u = _mm256_castps_si256(x), high = _mm256_srli_epi32(u, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i bits = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    bits = _mm256_blendv_epi8(bits, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}
INGOT_INLINE vf vf_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INGOT_INLINE void vf_store_f16(uint16_t *p, vf x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INGOT_INLINE vf vf_interleave_low(vf a, vf b) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
}
INGOT_INLINE vf vf_interleave_high(vf a, vf b) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
}
INGOT_INLINE void vf_hsum4(float *out, vf a, vf b, vf c, vf d) {
    vf ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
    vf cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
    vf abcd = _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd)))
            + _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}
INGOT_INLINE vf vf_scale_pow2(vf x, vf n, vf shifted) {
    (void)n;
    __m256i e = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(_mm256_set1_ps(INGOT_ROUND)));
    __m256i half = _mm256_srai_epi32(e, 1), bias = _mm256_set1_epi32(127);
    __m256i low = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    __m256i high = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(e, half), bias), 23);
    return x * _mm256_castsi256_ps(low) * _mm256_castsi256_ps(high);
}

#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define VF_LANES 4
#define VF_REGISTERS 32
typedef float32x4_t vf;
INGOT_INLINE vf vf_set1(float x) { return vdupq_n_f32(x); }
INGOT_INLINE vf vf_load(const float *p) { return vld1q_f32(p); }
INGOT_INLINE void vf_store(float *p, vf x) { vst1q_f32(p, x); }
INGOT_INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INGOT_INLINE vf vf_max(vf a, vf b) { return vmaxq_f32(a, b); }
INGOT_INLINE vf vf_min(vf a, vf b) { return vminq_f32(a, b); }
INGOT_INLINE float vf_hsum(vf x) { return vaddvq_f32(x); }
INGOT_INLINE float vf_hmax(vf x) { return vmaxvq_f32(x); }
INGOT_INLINE uint32x4_t vf_first(int n) {
    static const int32_t lanes[4] = {0, 1, 2, 3};
    return vcltq_s32(vld1q_s32(lanes), vdupq_n_s32(n));
}
INGOT_INLINE vf vf_load_first(const float *p, int n) {
    float lanes[4] = {0};
    memcpy(lanes, p, sizeof(float) * (size_t)(n > 4 ? 4 : n > 0 ? n : 0));
    return vld1q_f32(lanes);
}
INGOT_INLINE void vf_store_first(float *p, vf x, int n) {
    float lanes[4];
    vst1q_f32(lanes, x);
    memcpy(p, lanes, sizeof(float) * (size_t)(n > 4 ? 4 : n > 0 ? n : 0));
}
INGOT_INLINE vf vf_keep_first(vf x, int n, float other) { return vbslq_f32(vf_first(n), x, vdupq_n_f32(other)); }
INGOT_INLINE vf vf_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
INGOT_INLINE vf vf_load_i8(const int8_t *p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))))));
}
INGOT_INLINE void vf_store_bf16(uint16_t *p, vf x) {
    uint32x4_t u = vreinterpretq_u32_f32(x), high = vshrq_n_u32(u, 16);
    uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
    uint32x4_t bits = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    bits = vbslq_u32(vceqq_f32(x, x), bits, vorrq_u32(high, vdupq_n_u32(0x40)));
    vst1_u16(p, vmovn_u32(bits));
}
INGOT_INLINE vf vf_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INGOT_INLINE void vf_store_f16(uint16_t *p, vf x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
INGOT_INLINE vf vf_interleave_low(vf a, vf b) { return vzip1q_f32(a, b); }
INGOT_INLINE vf vf_interleave_high(vf a, vf b) { return vzip2q_f32(a, b); }
INGOT_INLINE void vf_hsum4(float *out, vf a, vf b, vf c, vf d) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
INGOT_INLINE vf vf_scale_pow2(vf x, vf n, vf shifted) {
    (void)n;
    int32x4_t e = vsubq_s32(vreinterpretq_s32_f32(shifted), vreinterpretq_s32_f32(vdupq_n_f32(INGOT_ROUND)));
    int32x4_t half = vshrq_n_s32(e, 1), bias = vdupq_n_s32(127);
    int32x4_t low = vshlq_n_s32(vaddq_s32(half, bias), 23);
    int32x4_t high = vshlq_n_s32(vaddq_s32(vsubq_s32(e, half), bias), 23);
    return x * vreinterpretq_f32_s32(low) * vreinterpretq_f32_s32(high);
}

#else
#error "needs AVX-512 (F, BW, VL, DQ), AVX2 with FMA and F16C, or NEON"
#endif

INGOT_INLINE vf vf_zero(void) { return vf_set1(0.0f); }

/* Loops whose bounds are constants after inlining, and whose arrays are to live in registers. */
#ifdef __clang__
#define INGOT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define INGOT_UNROLL _Pragma("GCC unroll 32")
#endif

/* Lane j of row i becomes lane i of row j: log2(VF_LANES) rounds in which row i meets row i + VF_LANES / 2. */
INGOT_INLINE void vf_transpose(vf rows[VF_LANES]) {
    vf other[VF_LANES];
    INGOT_UNROLL
    for (int round = 1; round < VF_LANES; round *= 2) {
        INGOT_UNROLL
        for (int i = 0; i < VF_LANES / 2; i++) {
            other[2 * i] = vf_interleave_low(rows[i], rows[i + VF_LANES / 2]);
            other[2 * i + 1] = vf_interleave_high(rows[i], rows[i + VF_LANES / 2]);
        }
        INGOT_UNROLL
        for (int i = 0; i < VF_LANES; i++) rows[i] = other[i];
    }
}

/* e^x of every lane, as ingot_expf: infinities, subnormal results and NaN included. */
INGOT_INLINE vf vf_exp(vf x) {
    /* min and max return their second operand when one is NaN, on x86; NEON's propagate NaN */
    x = vf_max(vf_set1(INGOT_EXP_MIN), vf_min(vf_set1(INGOT_EXP_MAX), x));
    vf shifted = vf_fma(x, vf_set1(INGOT_LOG2E), vf_set1(INGOT_ROUND));
    vf n = shifted - vf_set1(INGOT_ROUND);
    vf r = vf_fma(n, vf_set1(-INGOT_LN2_HIGH), x);
    r = vf_fma(n, vf_set1(-INGOT_LN2_LOW), r);
    vf p = vf_fma(vf_set1(INGOT_EXP_C4), r, vf_set1(INGOT_EXP_C3));
    p = vf_fma(p, r, vf_set1(INGOT_EXP_C2));
    p = vf_fma(p, r, vf_set1(INGOT_EXP_C1));
    p = vf_fma(p, r, vf_set1(INGOT_EXP_C0));
    p = vf_fma(p, r * r, r) + vf_set1(1.0f);
    return vf_scale_pow2(p, n, shifted);
}

#endif
