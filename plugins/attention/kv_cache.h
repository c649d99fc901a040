/* Where a key or a value lies. A block of the cache holds block_size tokens of every layer that shares a block table:
 * each layer has its keys, [kv_heads, block_size, key_dim], and its values, likewise with value_dim, at fixed places in
 * the block. A kernel is given the address of its keys, or values, in block 0, and knows as constants how many elements
 * it is from a block to the next, and their type. Of 8 bits, an element is its integer times the scale of its row;
 * scales lie in the block likewise, float [kv_heads, block_size]. */
#ifndef INGOT_KV_CACHE_H
#define INGOT_KV_CACHE_H
#include "cpu/ingot_kernel.h"
#include "cpu/simd.h"
#include "quantize/quantize.h"

enum { INGOT_KV_F32, INGOT_KV_BF16, INGOT_KV_I8 };

/* Keys, or values, of block 0; scales: with INGOT_KV_I8. */
typedef struct {
    void *rows;
    float *scales;
} ingot_kv;

INGOT_INLINE size_t ingot_kv_bytes(int type) { return type == INGOT_KV_F32 ? 4 : type == INGOT_KV_BF16 ? 2 : 1; }

/* Number of the first element of a position's row. blocks: of its sequence. */
INGOT_INLINE size_t ingot_kv_row(const int32_t *blocks, int position, int head, size_t block_stride, int block_size,
                                 int dim) {
    size_t block = (size_t)blocks[position / block_size], slot = (size_t)(position % block_size);
    return block * block_stride + ((size_t)head * (size_t)block_size + slot) * (size_t)dim;
}

/* The scale of a position's row, null if there are none; those of the positions behind it in the block follow. */
INGOT_INLINE float *ingot_kv_scale(ingot_kv kv, const int32_t *blocks, int position, int head, size_t block_stride,
                                   int block_size) {
    if (!kv.scales) return 0;
    return kv.scales + ingot_kv_row(blocks, position, head, block_stride / sizeof(float), block_size, 1);
}

/* Elements i .. i + VF_LANES - 1, of 8 bits without their scale */
INGOT_INLINE vf ingot_kv_load(const void *cache, size_t i, int type) {
    return type == INGOT_KV_F32 ? vf_load((const float *)cache + i)
         : type == INGOT_KV_BF16 ? vf_load_bf16((const uint16_t *)cache + i) : vf_load_i8((const int8_t *)cache + i);
}

/* Elements i .. i + n - 1, the other lanes 0: what lies behind a row's end may be anything, NaN too. */
INGOT_INLINE vf ingot_kv_load_first(const void *cache, size_t i, int n, int type) {
    if (type == INGOT_KV_F32) return vf_load_first((const float *)cache + i, n);
    if (type == INGOT_KV_I8) return vf_keep_first(vf_load_i8((const int8_t *)cache + i), n, 0.0f);
    uint16_t lanes[VF_LANES] = {0};
    memcpy(lanes, (const uint16_t *)cache + i, sizeof(uint16_t) * (size_t)n);
    return vf_load_bf16(lanes);
}

#ifdef VF_PAIRS
/* Elements i .. i + 2 VF_LANES - 1 of a cache of bfloat16 as they lie, two a lane; those from the n-th on 0. */
INGOT_INLINE vf ingot_kv_load_pairs(const void *cache, size_t i, int n) {
    const uint16_t *from = (const uint16_t *)cache + i;
    return n >= 2 * VF_LANES ? vf_load((const float *)from) : vf_load_pairs_first(from, n);
}
#endif

/* x[dim] to the row that begins with element i. A row with an infinity or a NaN becomes NaN; scale: with 8 bits. */
INGOT_INLINE void ingot_kv_store_row(void *cache, size_t i, float *scale, const float *x, int dim, int type) {
    if (type == INGOT_KV_F32) {
        memcpy((float *)cache + i, x, sizeof(float) * (size_t)dim);
    } else if (type == INGOT_KV_BF16) {
        uint16_t *to = (uint16_t *)cache + i;
        for (int d = 0; d < dim; d++) to[d] = ingot_to_bf16(x[d]);
    } else {
        float inverse;
        *scale = ingot_scale_of(ingot_max_magnitude(x, dim), &inverse);
        if (inverse == 0.0f) memset((int8_t *)cache + i, 0, (size_t)dim);
        else (void)ingot_quantize_values(x, dim, inverse, (int8_t *)cache + i);
    }
}

#endif
