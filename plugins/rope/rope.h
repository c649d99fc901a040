/* What stands between the projections and attention: a norm of each head, rotary position embedding (Su et al. 2021),
 * and the write of keys and values into the cache. One row is one head of one token. */
#ifndef INGOT_ROPE_H
#define INGOT_ROPE_H
#include "attention/kv_cache.h"
#include "norm/norm.h"

typedef struct {
    int q_heads, kv_heads;                           /* 0: no queries, no keys and values */
    int key_dim, value_dim, block_size, kv_type;
    size_t block_stride;                             /* elements of the cache from one block to the next */
    int q_stride, q_out_stride, k_stride, v_stride;  /* floats from one token's row to the next */
    int rotary, rotary_begin, interleaved;           /* elements [rotary_begin, + rotary) of a head turn; 0: none do */
    int table_width, table_stride;                   /* of cos and sin: rotary (a factor an element), or half of it */
    int norm;
    float eps;
} ingot_rope;

/* y = rope([norm] x) of one head; y is no part of x. */
INGOT_INLINE void ingot_rope_row(const float *x, const float *weight, const float *cos, const float *sin, float *y,
                                 ingot_rope c) {
    if (c.norm) ingot_rms_norm_row(x, weight, y, c.key_dim, c.eps);
    else memcpy(y, x, sizeof(float) * (size_t)c.key_dim);
    float *turned = y + c.rotary_begin;
    int half = c.rotary / 2, each = c.table_width == c.rotary;
    if (c.interleaved) {
        for (int i = 0; i < half; i++) {
            int first = each ? 2 * i : i, second = each ? 2 * i + 1 : i;
            float a = turned[2 * i], b = turned[2 * i + 1];
            turned[2 * i] = a * cos[first] - b * sin[first];
            turned[2 * i + 1] = b * cos[second] + a * sin[second];
        }
    } else {
        for (int i = 0; i < half; i++) {
            int second = each ? half + i : i;
            float a = turned[i], b = turned[half + i];
            turned[i] = a * cos[i] - b * sin[i];
            turned[half + i] = b * cos[second] + a * sin[second];
        }
    }
}

/* work: key_dim floats. q_out may be q. */
INGOT_INLINE void ingot_rope_run(const ingot_step *step, const float *q, const float *k, const float *v,
                                 const float *cos, const float *sin, const float *q_weight, const float *k_weight,
                                 float *q_out, ingot_kv keys, ingot_kv values, const int32_t *table, int worker,
                                 int num_workers, ingot_rope c, float *work) {
    const int rows = c.q_heads + 2 * c.kv_heads; /* of a token: queries, keys, values */
    int begin, end;
    ingot_split(step->num_tokens * rows, worker, num_workers, &begin, &end);
    for (int i = begin; i < end; i++) {
        int token = i / rows, row = i % rows;
        ptrdiff_t angle = (ptrdiff_t)token * c.table_stride;
        if (row < c.q_heads) {
            const float *from = q + (ptrdiff_t)token * c.q_stride + row * c.key_dim;
            ingot_rope_row(from, q_weight, cos + angle, sin + angle, work, c);
            float *to = q_out + (ptrdiff_t)token * c.q_out_stride + row * c.key_dim;
            memcpy(to, work, sizeof(float) * (size_t)c.key_dim);
            continue;
        }
        const int32_t *blocks = table + (ptrdiff_t)step->token_seq[token] * step->max_blocks;
        int position = step->positions[token];
        row -= c.q_heads;
        if (row < c.kv_heads) {
            const float *from = k + (ptrdiff_t)token * c.k_stride + row * c.key_dim;
            ingot_rope_row(from, k_weight, cos + angle, sin + angle, work, c);
            size_t at = ingot_kv_row(blocks, position, row, c.block_stride, c.block_size, c.key_dim);
            float *scale = ingot_kv_scale(keys, blocks, position, row, c.block_stride, c.block_size);
            ingot_kv_store_row(keys.rows, at, scale, work, c.key_dim, c.kv_type);
        } else {
            row -= c.kv_heads;
            size_t at = ingot_kv_row(blocks, position, row, c.block_stride, c.block_size, c.value_dim);
            const float *from = v + (ptrdiff_t)token * c.v_stride + row * c.value_dim;
            float *scale = ingot_kv_scale(values, blocks, position, row, c.block_stride, c.block_size);
            ingot_kv_store_row(values.rows, at, scale, from, c.value_dim, c.kv_type);
        }
    }
}

#endif
