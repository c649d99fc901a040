/* Rows of activations for the matrices: as 8-bit integers, or as bfloat16.
 *
 * 8-bit integers: x[k] = scale * q[k], |q| <= 127, one scale for every `group` channels.
 *
 * A row, padded to a multiple of 64 bytes:
 *   int8_t q[K32]            K32 = K rounded up to a multiple of 32; the padding is zero
 *   float  scale[blocks]     blocks = K32 / 32, the scale of every 32 channels (repeated where group is larger)
 *   for 4-bit weights:   float   scale * (sum of q)   for every block, which their minima are multiplied with
 *   for 8-bit weights:   int32_t -128 * (sum of q)    for every block: see "linear/integer_vectors.h"
 * For 8-bit weights with one scale a row (group 0), blocks = 1.
 * The arithmetic is the reference's to the bit: maximum, two divisions, one product, round to nearest even.
 *
 * bfloat16, to nearest even: uint16_t x[K], padded with zeros to a multiple of 64 bytes; rows begin at odd multiples of
 * 64 bytes from each other, so that a power of two as K does not put them all into the same places of a cache. */
#ifndef INGOT_QUANTIZE_H
#define INGOT_QUANTIZE_H
#include "../cpu/ingot_kernel.h"
#include "../cpu/scalar_math.h"
#include "../linear/integer_vectors.h"

#define INGOT_BLOCK 32
/* A group whose largest magnitude is below this counts as zero: its scale would be subnormal. */
#define INGOT_SMALLEST_MAXIMUM 0x1p-100f

INGOT_INLINE int ingot_k32(int k) { return (k + INGOT_BLOCK - 1) / INGOT_BLOCK * INGOT_BLOCK; }
INGOT_INLINE int ingot_num_scales(int k, int weight_bits, int group) {
    return weight_bits == 8 && group == 0 ? 1 : ingot_k32(k) / INGOT_BLOCK;
}
INGOT_INLINE int ingot_row_bytes(int k, int weight_bits, int group) {
    return (ingot_k32(k) + 8 * ingot_num_scales(k, weight_bits, group) + 63) / 64 * 64;
}

/* The largest magnitude of x[0 .. n). As integers, magnitudes sort like floats, with infinity and NaN at the top. */
INGOT_INLINE float ingot_max_magnitude(const float *x, int n) {
    uint32_t most = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits = ingot_bits(x[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return ingot_from_bits(most);
}

/* The scale of values up to this magnitude, and what they are multiplied with: 0 if all are to become 0, as they are if
 * there is an infinity or a NaN, which is the scale then. */
INGOT_INLINE float ingot_scale_of(float most, float *inverse) {
    const int finite = ingot_bits(most) < 0x7f800000u, zero = most < INGOT_SMALLEST_MAXIMUM;
    *inverse = zero || !finite ? 0.0f : 127.0f / most;
    return zero ? 0.0f : most / 127.0f;
}

/* q = round(x * inverse) of n values; returns their sum. */
INGOT_INLINE int32_t ingot_quantize_values(const float *x, int n, float inverse, int8_t *q) {
    int32_t sum = 0;
    for (int i = 0; i < n; i++) {
        int32_t v = (int32_t)__builtin_rintf(x[i] * inverse);
        q[i] = (int8_t)v;
        sum += v;
    }
    return sum;
}

/* VF_LANES groups of one block each, whose maxima and sums are found side by side: the values, scales and last numbers
 * of a row, at the place of the first block. 0, and nothing is written, if one of them is not finite. */
INGOT_INLINE int ingot_quantize_blocks(const float *x, int weight_bits, int8_t *q, float *scales, float *scaled_sums) {
    enum { VECTORS = INGOT_BLOCK / VF_LANES };
    vi most[VF_LANES], sums[VF_LANES];
    float maxima[VF_LANES], inverse[VF_LANES], scale[VF_LANES];
    int32_t sum[VF_LANES], *offsets = (int32_t *)scaled_sums;
    INGOT_UNROLL for (int b = 0; b < VF_LANES; b++) {
        most[b] = vi_magnitude(vf_load(x + b * INGOT_BLOCK));
        INGOT_UNROLL for (int v = 1; v < VECTORS; v++)
            most[b] = vi_max(most[b], vi_magnitude(vf_load(x + b * INGOT_BLOCK + v * VF_LANES)));
    }
    vi_store(maxima, vi_maxima(most));
    int finite = 1;
    for (int b = 0; b < VF_LANES; b++) {
        scale[b] = ingot_scale_of(maxima[b], &inverse[b]);
        finite &= ingot_bits(maxima[b]) < 0x7f800000u;
    }
    if (!finite) return 0;
    INGOT_UNROLL for (int b = 0; b < VF_LANES; b++) {
        INGOT_UNROLL for (int v = 0; v < VECTORS; v++) {
            const int at = b * INGOT_BLOCK + v * VF_LANES;
            const vi rounded = vi_round(vf_load(x + at) * vf_set1(inverse[b]));
            vi_store_i8(q + at, rounded);
            sums[b] = v ? vi_add(sums[b], rounded) : rounded;
        }
    }
    vi_store(sum, vi_sums(sums));
    for (int b = 0; b < VF_LANES; b++) {
        scales[b] = scale[b];
        if (weight_bits == 4) scaled_sums[b] = scale[b] * (float)sum[b];
        else offsets[b] = -128 * sum[b];
    }
    return 1;
}

/* Quantizes x[K] to `row`, ingot_row_bytes(K, weight_bits, group) long. A group with an infinity or a NaN gets that as
 * its scale and zeros as values, so that all that is computed from it is NaN. */
INGOT_INLINE void ingot_quantize_row(const float *x, int k, int weight_bits, int group, uint8_t *row) {
    const int k32 = ingot_k32(k), num_scales = ingot_num_scales(k, weight_bits, group);
    const int span = group ? group : k32, whole_row = weight_bits == 8 && group == 0;
    int8_t *q = (int8_t *)row;
    float *scales = (float *)(row + k32), *scaled_sums = scales + num_scales;
    int32_t *offsets = (int32_t *)scaled_sums, row_sum = 0;
    for (int start = 0; start < k32; start += span) {
        if (span == INGOT_BLOCK && start + VF_LANES * INGOT_BLOCK <= k) {
            const int i = start / INGOT_BLOCK;
            if (ingot_quantize_blocks(x + start, weight_bits, q + start, scales + i, scaled_sums + i)) {
                start += (VF_LANES - 1) * INGOT_BLOCK;
                continue;
            }
        }
        const int end = start + span < k ? start + span : k;
        const float most = ingot_max_magnitude(x + start, end - start);
        float inverse;
        const float scale = ingot_scale_of(most, &inverse);
        const int finite = ingot_bits(most) < 0x7f800000u;
        for (int b = start; b < k32 && b < start + span; b += INGOT_BLOCK) {
            const int i = whole_row ? 0 : b / INGOT_BLOCK;
            int32_t sum = 0;
            if (finite && b + INGOT_BLOCK <= k) {
                sum = ingot_quantize_values(x + b, INGOT_BLOCK, inverse, q + b);
            } else {
                memset(q + b, 0, INGOT_BLOCK);
                if (finite) sum = ingot_quantize_values(x + b, k - b, inverse, q + b);
            }
            row_sum += sum;
            scales[i] = scale;
            if (weight_bits == 4) scaled_sums[i] = scale * (float)sum;
            else offsets[i] = -128 * (whole_row ? row_sum : sum);
        }
    }
}

/* x [T, K] f32 with rows `stride` elements apart -> rows [T, ingot_row_bytes]. */
INGOT_INLINE void ingot_quantize(const float *x, uint8_t *rows, int num_rows, int k, int stride, int weight_bits,
                                 int group, int worker, int num_workers) {
    const size_t row_bytes = (size_t)ingot_row_bytes(k, weight_bits, group);
    int begin, end;
    ingot_split(num_rows, worker, num_workers, &begin, &end);
    for (int t = begin; t < end; t++)
        ingot_quantize_row(x + (size_t)t * (size_t)stride, k, weight_bits, group, rows + (size_t)t * row_bytes);
}

#ifdef VF_PAIRS
/* Channels that a vector of pairs holds. */
#define INGOT_PAIR_CHANNELS (2 * VF_LANES)

/* x [T, K] f32 with rows `stride` elements apart -> rows of bfloat16. */
INGOT_INLINE void ingot_round_to_pairs(const float *x, uint8_t *rows, int num_rows, int k, int stride, int worker,
                                       int num_workers) {
    const int vectors = (k + INGOT_PAIR_CHANNELS - 1) / INGOT_PAIR_CHANNELS, whole = k / INGOT_PAIR_CHANNELS;
    int begin, end;
    ingot_split(num_rows, worker, num_workers, &begin, &end);
    for (int t = begin; t < end; t++) {
        const float *from = x + (size_t)t * (size_t)stride;
        float *to = (float *)(rows + (size_t)t * (size_t)(vectors | 1) * 64);
        for (int v = 0; v < whole; v++, from += INGOT_PAIR_CHANNELS, to += VF_LANES)
            vf_store(to, vf_to_pairs(vf_load(from), vf_load(from + VF_LANES)));
        if (whole < vectors) {
            const int left = k % INGOT_PAIR_CHANNELS, low = left < VF_LANES ? left : VF_LANES;
            vf_store(to, vf_to_pairs(vf_load_first(from, low), vf_load_first(from + low, left - low)));
        }
    }
}
#endif

#endif
