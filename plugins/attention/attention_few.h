/* Attention of few rows: generation. Keys and values are read from the cache as they lie. */
#ifndef INGOT_ATTENTION_FEW_H
#define INGOT_ATTENTION_FEW_H
#include "attention/attention_scores.h"

/* Asks for memory that is needed soon. Little at a time, beside the arithmetic: a core waits when too much is on its
 * way. Blocks follow each other in no order that the hardware could foresee. */
INGOT_INLINE void ingot_few_prefetch(const char *from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 3);
}

/* Where a position's row begins. */
INGOT_INLINE const char *ingot_few_row(const void *cache, const int32_t *blocks, int position, int head, int dim,
                                       ingot_attention c) {
    size_t row = ingot_kv_row(blocks, position, head, c.block_stride, c.block_size, dim);
    return (const char *)cache + row * ingot_kv_bytes(c.kv_type);
}

/* sum[i][..] = scale[i] sum[i][..] + sum over keys of p[i][key] value[key][..] for `rows` rows and `vectors` vectors,
 * whose last has `last` lanes. The values of the keys, all of one block, begin with element `at`. ahead: null, or rows
 * of keys that are needed next, one asked for beside each value. */
INGOT_INLINE void ingot_few_columns(int rows, int vectors, int last, const float *p, const void *cache, size_t at,
                                    int keys, float *sum, int sum_row, const float *scale, const char *ahead,
                                    ingot_attention c) {
    const int ahead_bytes = c.key_dim * (int)ingot_kv_bytes(c.kv_type);
    vf total[4][4];
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) {
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) {
            total[i][v] = vf_load(sum + i * sum_row + v * VF_LANES) * vf_set1(scale[i]);
        }
    }
    for (int key = 0; key < keys; key++, at += (size_t)c.value_dim) {
        vf factor[4];
        if (ahead) ingot_few_prefetch(ahead + key * ahead_bytes, ahead_bytes);
        INGOT_UNROLL
        for (int i = 0; i < rows; i++) factor[i] = vf_set1(p[i * ATTENTION_FEW_KEYS + key]);
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) {
            size_t from = at + (size_t)(v * VF_LANES);
            vf value = v < vectors - 1 || last == VF_LANES ? ingot_kv_load(cache, from, c.kv_type)
                                                           : ingot_kv_load_first(cache, from, last, c.kv_type);
            INGOT_UNROLL
            for (int i = 0; i < rows; i++) total[i][v] = vf_fma(factor[i], value, total[i][v]);
        }
    }
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) {
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) vf_store(sum + i * sum_row + v * VF_LANES, total[i][v]);
    }
}

/* Weights of `keys` values of 8 bits, one row after the other, take in the scales of those values. */
INGOT_INLINE void ingot_few_scale(int rows, int keys, const float *v_scale, float *p) {
    for (int i = 0; i < rows; i++, p += ATTENTION_FEW_KEYS) {
        for (int j = 0; j < keys; j++) p[j] *= v_scale[j];
    }
}

/* All columns of the values for `rows` rows; rows: a literal. */
INGOT_INLINE void ingot_few_values_of(int rows, const float *p, const void *cache, size_t at, int keys, float *sum,
                                      int sum_row, const float *scale, const char *ahead, ingot_attention c) {
    int d = 0;
    for (; d + 4 * VF_LANES <= c.value_dim; d += 4 * VF_LANES) {
        ingot_few_columns(rows, 4, VF_LANES, p, cache, at + (size_t)d, keys, sum + d, sum_row, scale, ahead, c);
        ahead = 0;
    }
    for (; d + VF_LANES <= c.value_dim; d += VF_LANES) {
        ingot_few_columns(rows, 1, VF_LANES, p, cache, at + (size_t)d, keys, sum + d, sum_row, scale, ahead, c);
        ahead = 0;
    }
    if (d < c.value_dim) {
        ingot_few_columns(rows, 1, c.value_dim % VF_LANES, p, cache, at + (size_t)d, keys, sum + d, sum_row, scale,
                          ahead, c);
    }
}

/* The same for the first FEW_BLOCK rows or, if there are less, for all. */
INGOT_INLINE void ingot_few_values(int rows, const float *p, const void *cache, size_t at, int keys, float *sum,
                                   int sum_row, const float *scale, const char *ahead, ingot_attention c) {
    switch (rows) {
        case 1: ingot_few_values_of(1, p, cache, at, keys, sum, sum_row, scale, ahead, c); break;
        case 2: ingot_few_values_of(2, p, cache, at, keys, sum, sum_row, scale, ahead, c); break;
        case 3: ingot_few_values_of(3, p, cache, at, keys, sum, sum_row, scale, ahead, c); break;
        default: ingot_few_values_of(FEW_BLOCK, p, cache, at, keys, sum, sum_row, scale, ahead, c); break;
    }
}

/* Scores of the keys [start, stop) become exp(score - m), those that a row may not see 0; m and l go on;
 * scale: what earlier sums shrink by. */
INGOT_INLINE void ingot_few_softmax(float *scores, int count, int start, int stop, ingot_attention_item item, float *m,
                                    float *l, float *scale, float *peak, ingot_attention c) {
    int group = c.q_heads / c.kv_heads, padded = ATTENTION_ALIGN(stop - start, VF_LANES);
    for (int r = 0; r < count; r++) {
        float *row = scores + r * ATTENTION_FEW_KEYS;
        if (c.softcap) {
            for (int j = 0; j < stop - start; j++) row[j] = c.softcap * ingot_tanhf(row[j] * (1.0f / c.softcap));
        }
        int position = item.position + r / group % item.tokens, low = ingot_attention_low(position, c);
        low = low > item.begin ? low : item.begin;
        int high = position + 1 < stop ? position + 1 : stop;
        for (int j = 0; j < low - start && j < padded; j++) row[j] = -__builtin_inff();
        for (int j = high > start ? high - start : 0; j < padded; j++) row[j] = -__builtin_inff();
        vf top = vf_set1(m[r]);
        for (int j = 0; j < padded; j += VF_LANES) top = vf_max(vf_load(row + j), top);
        peak[r] = vf_hmax(top);
    }
    for (int r = 0; r < count; r++) {
        scale[r] = ingot_expf(m[r] - peak[r]);
        m[r] = peak[r];
    }
    for (int r = 0; r < count; r++) {
        float *row = scores + r * ATTENTION_FEW_KEYS;
        vf sum = vf_zero();
        for (int j = 0; j < padded; j += VF_LANES) {
            vf p = vf_exp(vf_load(row + j) - vf_set1(m[r]));
            vf_store(row + j, p);
            sum = sum + p;
        }
        l[r] = l[r] * scale[r] + vf_hsum(sum);
    }
}

INGOT_INLINE void ingot_attention_few(ingot_kv k_cache, ingot_kv v_cache, const int32_t *blocks,
                                      ingot_attention_item item, ingot_attention_rows rows, ingot_attention c,
                                      float *work) {
    const int integers = c.kv_type == INGOT_KV_I8;
    const int q_row = integers ? FEW_INTEGER_ROW(c.key_dim) : ATTENTION_ALIGN(c.key_dim, 16);
    const int sum_row = ATTENTION_ALIGN(c.value_dim, 16);
    /* Rows of a key/value head are neighbours here: head h, token t, member g of the group is row (h * tokens + t) *
     * group + g. */
    int group = c.q_heads / c.kv_heads, per_head = item.tokens * group, count = item.heads * per_head;
    float *q = work, *scores = q + ATTENTION_FEW_ITEM * q_row;
    float *sum = scores + ATTENTION_FEW_ITEM * ATTENTION_FEW_KEYS;
    float m[ATTENTION_FEW_ITEM], l[ATTENTION_FEW_ITEM], scale[ATTENTION_FEW_ITEM], peak[ATTENTION_FEW_ITEM];
    float q_scale[ATTENTION_FEW_ITEM];
    for (int r = 0; r < count; r++) {
        int token = r % per_head / group, head = r / per_head * group + r % group;
        const float *from = rows.q + (ptrdiff_t)token * c.q_stride + head * c.key_dim;
        if (integers) {
            q_scale[r] = c.scale * ingot_few_quantize(from, c.key_dim, q + r * q_row);
        } else {
            for (int d = 0; d < c.key_dim; d++) q[r * q_row + d] = from[d] * c.scale;
            for (int d = c.key_dim; d < q_row; d++) q[r * q_row + d] = 0.0f;
        }
        for (int d = 0; d < sum_row; d++) sum[r * sum_row + d] = 0.0f;
        m[r] = ATTENTION_NO_PEAK;
        l[r] = 0.0f;
    }
    /* Tiles start at a multiple of 4, as keys are taken by fours; whatever lies before begin is masked. */
    for (int start = item.begin & ~3; start < item.end; start += ATTENTION_FEW_KEYS) {
        int stop = start + ATTENTION_FEW_KEYS < item.end ? start + ATTENTION_FEW_KEYS : item.end;
        for (int key = start; key < stop;) {
            int block_end = (key / c.block_size + 1) * c.block_size, end = block_end < stop ? block_end : stop;
            for (int h = 0; h < item.heads; h++) {
                const char *ahead = ingot_few_row(v_cache.rows, blocks, key, item.head + h, c.value_dim, c);
                const int ahead_bytes = 4 * c.value_dim * (int)ingot_kv_bytes(c.kv_type);
                size_t at = ingot_kv_row(blocks, key, item.head + h, c.block_stride, c.block_size, c.key_dim);
                const float *k_scale = 0;
                if (integers) {
                    k_scale = ingot_kv_scale(k_cache, blocks, key, item.head + h, c.block_stride, c.block_size);
                    __builtin_prefetch(ingot_kv_scale(v_cache, blocks, key, item.head + h, c.block_stride,
                                                      c.block_size), 0, 3);
                }
                for (int j = key; j < end; j += 4, at += (size_t)(4 * c.key_dim), ahead += ahead_bytes) {
                    ingot_few_prefetch(ahead, ahead_bytes);
                    for (int r = 0; r < per_head; r += FEW_BLOCK) {
                        int row = h * per_head + r;
                        ingot_few_scores(per_head - r, q + row * q_row, q_row, q_scale + row, k_cache.rows, at,
                                         integers ? k_scale + (j - key) : 0, c.key_dim, c.kv_type,
                                         scores + row * ATTENTION_FEW_KEYS + j - start);
                    }
                }
            }
            key = end;
        }
        ingot_few_softmax(scores, count, start, stop, item, m, l, scale, peak, c);
        for (int key = start < item.begin ? item.begin : start; key < stop;) {
            int block_end = (key / c.block_size + 1) * c.block_size, end = block_end < stop ? block_end : stop;
            for (int h = 0; h < item.heads; h++) {
                /* the next tile's keys, be they this item's or those of the next range */
                int next = key + ATTENTION_FEW_KEYS;
                const char *ahead =
                    next < item.context ? ingot_few_row(k_cache.rows, blocks, next, item.head + h, c.key_dim, c) : 0;
                size_t at = ingot_kv_row(blocks, key, item.head + h, c.block_stride, c.block_size, c.value_dim);
                if (integers) {
                    if (ahead) __builtin_prefetch(ingot_kv_scale(k_cache, blocks, next, item.head + h, c.block_stride,
                                                                 c.block_size), 0, 3);
                    ingot_few_scale(per_head, end - key, ingot_kv_scale(v_cache, blocks, key, item.head + h,
                                                                        c.block_stride, c.block_size),
                                    scores + h * per_head * ATTENTION_FEW_KEYS + key - start);
                }
                for (int r = 0; r < per_head; r += FEW_BLOCK) {
                    int row = h * per_head + r;
                    ingot_few_values(per_head - r, scores + row * ATTENTION_FEW_KEYS + key - start, v_cache.rows, at,
                                     end - key, sum + row * sum_row, sum_row, scale + row, r ? 0 : ahead, c);
                }
            }
            for (int r = 0; r < count; r++) scale[r] = 1.0f;
            key = end;
        }
    }
    for (int r = 0; r < count; r++) {
        int token = r % per_head / group, head = r / per_head * group + r % group;
        ingot_attention_finish(rows, token, head, sum + r * sum_row, m[r], l[r], c);
    }
}

#endif
