/* Scalar functions of float32, written so that a compiler vectorises loops over them: no branch, no table, no call.
 *
 * NaN and infinities behave as IEEE 754 says. Not to be compiled with -fassociative-math (part of -ffast-math): the
 * rounding to an integer by adding 1.5 * 2^23 and the error-free reductions would be simplified away.
 * Polynomials are minimax fits (weighted least squares, reweighted until the error is level) on the stated interval. */
#ifndef INGOT_SCALAR_MATH_H
#define INGOT_SCALAR_MATH_H
#include <stdint.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "compile without -ffast-math: NaN, infinity and exact range reduction are relied on"
#endif

#define INGOT_INLINE static inline __attribute__((always_inline, unused))

INGOT_INLINE uint32_t ingot_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INGOT_INLINE float ingot_from_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INGOT_INLINE uint64_t ingot_bits64(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
INGOT_INLINE double ingot_from_bits64(uint64_t u) { double x; memcpy(&x, &u, 8); return x; }

/* 2^n for -126 <= n <= 127; n is carried as two's complement. */
INGOT_INLINE float ingot_pow2i(uint32_t n) { return ingot_from_bits((n + 127u) << 23); }

#define INGOT_LOG2E 1.44269504088896341f
#define INGOT_LN2_HIGH 0x1.62e4p-1f           /* 15 bits: its product with an exponent is exact */
#define INGOT_LN2_LOW 0x1.7f7d1cp-20f
#define INGOT_ROUND 0x1.8p23f                 /* adding it rounds to an integer, found in the low bits */
/* (e^r - 1 - r) / r^2 on |r| <= ln2 / 2, error of e^r 3.3e-9 */
#define INGOT_EXP_C0 4.999999404e-01f
#define INGOT_EXP_C1 1.666651517e-01f
#define INGOT_EXP_C2 4.166845605e-02f
#define INGOT_EXP_C3 8.369418792e-03f
#define INGOT_EXP_C4 1.381314243e-03f
#define INGOT_EXP_MAX 89.0f                   /* above: infinity */
#define INGOT_EXP_MIN -104.0f                 /* below: zero */

/* e^r - 1 for |r| <= ln2 / 2 */
INGOT_INLINE float ingot_expm1_reduced(float r) {
    float p = INGOT_EXP_C4;
    p = __builtin_fmaf(p, r, INGOT_EXP_C3);
    p = __builtin_fmaf(p, r, INGOT_EXP_C2);
    p = __builtin_fmaf(p, r, INGOT_EXP_C1);
    p = __builtin_fmaf(p, r, INGOT_EXP_C0);
    return __builtin_fmaf(p, r * r, r);
}

/* e^x; at most 1 unit in the last place off, subnormal results included. */
INGOT_INLINE float ingot_expf(float x) {
    x = x > INGOT_EXP_MAX ? INGOT_EXP_MAX : x;
    x = x < INGOT_EXP_MIN ? INGOT_EXP_MIN : x;
    float shifted = __builtin_fmaf(x, INGOT_LOG2E, INGOT_ROUND);
    float n = shifted - INGOT_ROUND;
    float r = __builtin_fmaf(n, -INGOT_LN2_HIGH, x);
    r = __builtin_fmaf(n, -INGOT_LN2_LOW, r);
    int32_t exponent = (int32_t)(ingot_bits(shifted) - ingot_bits(INGOT_ROUND));
    int32_t half = exponent >> 1;             /* two factors, as 2^-150 and 2^128 are no normal numbers */
    float result = 1.0f + ingot_expm1_reduced(r);
    return result * ingot_pow2i((uint32_t)half) * ingot_pow2i((uint32_t)(exponent - half));
}

/* e^x - 1, with small relative error near 0 too. */
INGOT_INLINE float ingot_expm1f(float x) {
    float y = x > INGOT_EXP_MAX ? INGOT_EXP_MAX : x;
    y = y < -20.0f ? -20.0f : y;
    float shifted = __builtin_fmaf(y, INGOT_LOG2E, INGOT_ROUND);
    float n = shifted - INGOT_ROUND;
    float r = __builtin_fmaf(n, -INGOT_LN2_HIGH, y);
    r = __builtin_fmaf(n, -INGOT_LN2_LOW, r);
    /* half the scale, doubled at the end: 2^128 is no float32 */
    float scale = ingot_pow2i(ingot_bits(shifted) - ingot_bits(INGOT_ROUND) - 1u);
    float result = 2.0f * __builtin_fmaf(scale, ingot_expm1_reduced(r), scale - 0.5f);
    return x == 0.0f ? x : result;
}

INGOT_INLINE float ingot_tanhf(float x) {
    float t = ingot_expm1f(-2.0f * __builtin_fabsf(x));
    return __builtin_copysignf(t / (t + 2.0f), x);
}

INGOT_INLINE float ingot_sigmoidf(float x) { return 1.0f / (1.0f + ingot_expf(-x)); }
INGOT_INLINE float ingot_siluf(float x) { return x / (1.0f + ingot_expf(-x)); }

/* erf = 1 - exp(-x q(x)) with q = -log(erfc(x)) / x fitted on [0, 4], error of erf 4e-10; erf(4) rounds to 1. */
INGOT_INLINE float ingot_erff(float x) {
    float a = __builtin_fabsf(x);
    a = a > 4.0f ? 4.0f : a;
    float q = 1.193314574e-06f;
    q = __builtin_fmaf(q, a, -2.135475006e-05f);
    q = __builtin_fmaf(q, a, 1.674815721e-04f);
    q = __builtin_fmaf(q, a, -7.406871882e-04f);
    q = __builtin_fmaf(q, a, 1.799355261e-03f);
    q = __builtin_fmaf(q, a, -2.530619677e-04f);
    q = __builtin_fmaf(q, a, -1.911769435e-02f);
    q = __builtin_fmaf(q, a, 1.027712747e-01f);
    q = __builtin_fmaf(q, a, 6.366198063e-01f);
    q = __builtin_fmaf(q, a, 1.128379226e+00f);
    return __builtin_copysignf(-ingot_expm1f(-a * q), x);
}

/* x (1 + erf(x / sqrt 2)) / 2 */
INGOT_INLINE float ingot_geluf(float x) {
    return 0.5f * x * (1.0f + ingot_erff(x * 0.707106781186547524f));
}

/* x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3) */
INGOT_INLINE float ingot_gelu_tanhf(float x) {
    float u = 1.59576912160573071f * __builtin_fmaf(0.044715f * x * x, x, x);
    return x / (1.0f + ingot_expf(-u));
}

/* Natural logarithm; log(0) = -inf, log of a negative number is NaN, subnormals are taken. */
INGOT_INLINE float ingot_logf(float x) {
    int small = x < 0x1p-126f;
    float y = small ? x * 0x1p23f : x;
    uint32_t u = ingot_bits(y);
    int32_t exponent = (int32_t)(u - 0x3f3504f3u) >> 23;       /* mantissa in [sqrt 1/2, sqrt 2) */
    float m = ingot_from_bits(u - ((uint32_t)exponent << 23));
    float e = (float)exponent - (small ? 23.0f : 0.0f);
    float f = m - 1.0f, f2 = f * f;
    float p = 6.746601313e-02f;                 /* (log(1 + f) - f + f^2 / 2) / f^3, error of the logarithm 8e-10 */
    p = __builtin_fmaf(p, f, -1.167564094e-01f);
    p = __builtin_fmaf(p, f, 1.188817471e-01f);
    p = __builtin_fmaf(p, f, -1.240559146e-01f);
    p = __builtin_fmaf(p, f, 1.421955079e-01f);
    p = __builtin_fmaf(p, f, -1.666799635e-01f);
    p = __builtin_fmaf(p, f, 2.000211924e-01f);
    p = __builtin_fmaf(p, f, -2.500000894e-01f);
    p = __builtin_fmaf(p, f, 3.333331347e-01f);
    float low = __builtin_fmaf(e, INGOT_LN2_LOW, p * f * f2);
    low = __builtin_fmaf(f2, -0.5f, low) + f;
    float result = __builtin_fmaf(e, INGOT_LN2_HIGH, low);
    result = x == __builtin_inff() ? x : result;
    result = x == 0.0f ? -__builtin_inff() : result;
    return x >= 0.0f ? result : __builtin_nanf("");
}

/* log(1 + x), with small relative error near 0 too. */
INGOT_INLINE float ingot_log1pf(float x) {
    float u = 1.0f + x;
    float lost = x - (u - 1.0f);                /* what rounding 1 + x lost; exact enough as u >= 0 */
    float result = ingot_logf(u) + lost / u;
    result = u == __builtin_inff() || u == 0.0f ? ingot_logf(u) : result;
    return u == 1.0f ? x : result;
}

/* log(1 + e^x) */
INGOT_INLINE float ingot_softplusf(float x) {
    return (x > 0.0f ? x : 0.0f) + ingot_log1pf(ingot_expf(-__builtin_fabsf(x)));
}

/* sin(x + quadrant pi / 2). The argument is reduced in double with pi / 2 to 106 bits: good to 1e-7 absolute for
 * every |x| < 2^40. */
INGOT_INLINE float ingot_sin_quadrant(float x, uint64_t quadrant) {
    double shifted = __builtin_fma((double)x, 0x1.45f306dc9c883p-1, 0x1.8p52);
    double n = shifted - 0x1.8p52;
    double reduced = __builtin_fma(n, -0x1.921fb54442d18p+0, (double)x);
    reduced = __builtin_fma(n, -0x1.1a62633145c07p-54, reduced);
    float r = (float)reduced, z = r * r;
    uint32_t q = (uint32_t)(ingot_bits64(shifted) + quadrant);
    float s = -1.951665472e-04f;                /* (sin(r) / r - 1) / r^2 on |r| <= pi / 4, error of the sine 4e-9 */
    s = __builtin_fmaf(s, z, 8.332173340e-03f);
    s = __builtin_fmaf(s, z, -1.666665524e-01f);
    s = __builtin_fmaf(s * z, r, r);
    float c = 2.443772792e-05f;                 /* (cos(r) - 1 + r^2 / 2) / r^4, error of the cosine 1e-10 */
    c = __builtin_fmaf(c, z, -1.388736186e-03f);
    c = __builtin_fmaf(c, z, 4.166664556e-02f);
    c = __builtin_fmaf(c * z, z, __builtin_fmaf(z, -0.5f, 1.0f));
    float value = q & 1u ? c : s;
    return ingot_from_bits(ingot_bits(value) ^ (q & 2u) << 30);
}

INGOT_INLINE float ingot_sinf(float x) { return ingot_sin_quadrant(x, 0); }
INGOT_INLINE float ingot_cosf(float x) { return ingot_sin_quadrant(x, 1); }

/* x^y as C's powf: through log2 and exp2 in double, 1e-10 relative before the last rounding. */
INGOT_INLINE float ingot_powf(float x, float y) {
    uint64_t u = ingot_bits64((double)__builtin_fabsf(x));
    uint64_t biased = (u - 0x3fe6a09e667f3bcdu) >> 52;          /* exponent, mantissa in [sqrt 1/2, sqrt 2) */
    double m = ingot_from_bits64(u - (biased << 52));
    double e = ingot_from_bits64(((biased + 2048u) & 4095u) | 0x4330000000000000u) - (0x1p52 + 2048.0);
    double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = 1.0 / 13.0;                      /* atanh(s) = s + s^3 / 3 + ..., |s| < 0.172 */
    p = __builtin_fma(p, z, 1.0 / 11.0);
    p = __builtin_fma(p, z, 1.0 / 9.0);
    p = __builtin_fma(p, z, 1.0 / 7.0);
    p = __builtin_fma(p, z, 1.0 / 5.0);
    p = __builtin_fma(p, z, 1.0 / 3.0);
    p = __builtin_fma(p, z, 1.0);
    double t = (double)y * __builtin_fma(s * p, 2.88539008177792681, e);
    t = t > 200.0 ? 200.0 : t;
    t = t < -200.0 ? -200.0 : t;
    double shifted = t + 0x1.8p52;
    double r = (t - (shifted - 0x1.8p52)) * 0.693147180559945309;
    double exp = 1.0 / 362880.0;                /* e^r by its series, |r| <= ln2 / 2 */
    exp = __builtin_fma(exp, r, 1.0 / 40320.0);
    exp = __builtin_fma(exp, r, 1.0 / 5040.0);
    exp = __builtin_fma(exp, r, 1.0 / 720.0);
    exp = __builtin_fma(exp, r, 1.0 / 120.0);
    exp = __builtin_fma(exp, r, 1.0 / 24.0);
    exp = __builtin_fma(exp, r, 1.0 / 6.0);
    exp = __builtin_fma(exp, r, 0.5);
    exp = __builtin_fma(exp, r, 1.0);
    exp = __builtin_fma(exp, r, 1.0);
    float result = (float)(exp * ingot_from_bits64((ingot_bits64(shifted) + 1023u) << 52));
    float inf = __builtin_inff(), a = __builtin_fabsf(x), b = __builtin_fabsf(y);
    float grown = y > 0.0f ? inf : 0.0f;        /* inf^y; 0^y is the other way round */
    result = a == inf ? grown : result;
    result = a == 0.0f ? (y > 0.0f ? 0.0f : inf) : result;
    float limit = (a > 1.0f) == (y > 0.0f) ? inf : 0.0f;
    result = b == inf ? (a == 1.0f ? 1.0f : limit) : result;
    int integral = __builtin_truncf(y) == y;
    float half = 0.5f * y;
    int odd = integral && __builtin_truncf(half) != half;
    float sign = ingot_from_bits(odd ? ingot_bits(x) & 0x80000000u : 0u);
    result = ingot_from_bits(ingot_bits(result) | ingot_bits(sign));
    result = x < 0.0f && a != inf && !integral ? __builtin_nanf("") : result;
    result = x != x || y != y ? __builtin_nanf("") : result;
    return y == 0.0f || x == 1.0f ? 1.0f : result;
}

/* bfloat16 is the upper half of a float32; rounding is to nearest even, NaN stays a quiet NaN. */
INGOT_INLINE float ingot_from_bf16(uint16_t h) { return ingot_from_bits((uint32_t)h << 16); }

INGOT_INLINE uint16_t ingot_to_bf16(float x) {
    uint32_t u = ingot_bits(x);
    uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    uint32_t quiet = u >> 16 | 0x40u;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

INGOT_INLINE float ingot_from_f16(uint16_t h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
INGOT_INLINE uint16_t ingot_to_f16(float x) { _Float16 y = (_Float16)x; uint16_t h; memcpy(&h, &y, 2); return h; }

#endif
