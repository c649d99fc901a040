/* Attention of few rows: generation. Keys are read from the cache as they lie; a score is a dot product. */
#ifndef INGOT_ATTENTION_FEW_H
#define INGOT_ATTENTION_FEW_H
#include "attention/attention_types.h"

/* Rows that share one load of a key or a value. */
#define FEW_BLOCK (VF_REGISTERS == 32 ? 4 : 3)

/* scores[i][0 .. 3] of `rows` queries with the four keys from element `k` on; rows: a literal. */
INGOT_INLINE void ingot_few_scores_of(int rows, const float *q, int q_row, const void *cache, size_t k, int dim,
                                      int type, float *scores) {
    vf sum[4][4];
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = vf_zero();
    for (int d = 0; d < dim; d += VF_LANES) {
        vf key[4];
        INGOT_UNROLL
        for (int j = 0; j < 4; j++) {
            size_t at = k + (size_t)(j * dim + d);
            key[j] = d + VF_LANES <= dim ? ingot_kv_load(cache, at, type)
                                         : ingot_kv_load_first(cache, at, dim % VF_LANES, type);
        }
        INGOT_UNROLL
        for (int i = 0; i < rows; i++) {
            vf query = vf_load(q + i * q_row + d);
            INGOT_UNROLL
            for (int j = 0; j < 4; j++) sum[i][j] = vf_fma(query, key[j], sum[i][j]);
        }
    }
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) {
        vf_hsum4(scores + i * ATTENTION_FEW_KEYS, sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
}

/* The same for the first FEW_BLOCK rows or, if there are less, for all. */
INGOT_INLINE void ingot_few_scores(int rows, const float *q, int q_row, const void *cache, size_t k, int dim, int type,
                                   float *scores) {
    switch (rows) {
        case 1: ingot_few_scores_of(1, q, q_row, cache, k, dim, type, scores); break;
        case 2: ingot_few_scores_of(2, q, q_row, cache, k, dim, type, scores); break;
        case 3: ingot_few_scores_of(3, q, q_row, cache, k, dim, type, scores); break;
        default: ingot_few_scores_of(FEW_BLOCK, q, q_row, cache, k, dim, type, scores); break;
    }
}

/* sum[i][..] = scale[i] sum[i][..] + sum over keys of p[i][key] value[key][..] for `rows` rows and `vectors` vectors,
 * whose last has `last` lanes. */
INGOT_INLINE void ingot_few_columns(int rows, int vectors, int last, const float *p, const void *cache,
                                    const int32_t *blocks, int begin, int end, int head, int column, float *sum,
                                    int sum_row, const float *scale, ingot_attention c) {
    vf total[4][4];
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) {
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) {
            total[i][v] = vf_load(sum + i * sum_row + v * VF_LANES) * vf_set1(scale[i]);
        }
    }
    for (int key = begin; key < end;) {
        int stop = (key / c.block_size + 1) * c.block_size;
        stop = stop < end ? stop : end;
        size_t at = ingot_kv_row(blocks, key, head, c.kv_heads, c.block_size, c.value_dim) + (size_t)column;
        for (; key < stop; key++, at += (size_t)c.value_dim) {
            vf factor[4];
            INGOT_UNROLL
            for (int i = 0; i < rows; i++) factor[i] = vf_set1(p[i * ATTENTION_FEW_KEYS + key - begin]);
            INGOT_UNROLL
            for (int v = 0; v < vectors; v++) {
                size_t from = at + (size_t)(v * VF_LANES);
                vf value = v < vectors - 1 || last == VF_LANES ? ingot_kv_load(cache, from, c.kv_type)
                                                               : ingot_kv_load_first(cache, from, last, c.kv_type);
                INGOT_UNROLL
                for (int i = 0; i < rows; i++) total[i][v] = vf_fma(factor[i], value, total[i][v]);
            }
        }
    }
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) {
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) vf_store(sum + i * sum_row + v * VF_LANES, total[i][v]);
    }
}

/* All columns of the values for `rows` rows; rows: a literal. */
INGOT_INLINE void ingot_few_values_of(int rows, const float *p, const void *cache, const int32_t *blocks, int begin,
                                      int end, int head, float *sum, int sum_row, const float *scale,
                                      ingot_attention c) {
    int d = 0;
    for (; d + 4 * VF_LANES <= c.value_dim; d += 4 * VF_LANES) {
        ingot_few_columns(rows, 4, VF_LANES, p, cache, blocks, begin, end, head, d, sum + d, sum_row, scale, c);
    }
    for (; d + VF_LANES <= c.value_dim; d += VF_LANES) {
        ingot_few_columns(rows, 1, VF_LANES, p, cache, blocks, begin, end, head, d, sum + d, sum_row, scale, c);
    }
    if (d < c.value_dim) {
        ingot_few_columns(rows, 1, c.value_dim % VF_LANES, p, cache, blocks, begin, end, head, d, sum + d, sum_row,
                          scale, c);
    }
}

/* The same for the first FEW_BLOCK rows or, if there are less, for all. */
INGOT_INLINE void ingot_few_values(int rows, const float *p, const void *cache, const int32_t *blocks, int begin,
                                   int end, int head, float *sum, int sum_row, const float *scale, ingot_attention c) {
    switch (rows) {
        case 1: ingot_few_values_of(1, p, cache, blocks, begin, end, head, sum, sum_row, scale, c); break;
        case 2: ingot_few_values_of(2, p, cache, blocks, begin, end, head, sum, sum_row, scale, c); break;
        case 3: ingot_few_values_of(3, p, cache, blocks, begin, end, head, sum, sum_row, scale, c); break;
        default: ingot_few_values_of(FEW_BLOCK, p, cache, blocks, begin, end, head, sum, sum_row, scale, c); break;
    }
}

/* Asks for the block's rows of this head, which lie together: blocks follow each other in no order that the hardware
 * could foresee. */
INGOT_INLINE void ingot_few_prefetch(const void *cache, const int32_t *blocks, int position, int head, int dim,
                                     ingot_attention c) {
    size_t row = ingot_kv_row(blocks, position / c.block_size * c.block_size, head, c.kv_heads, c.block_size, dim);
    const char *from = (const char *)cache + row * ingot_kv_bytes(c.kv_type);
    int bytes = c.block_size * dim * (int)ingot_kv_bytes(c.kv_type);
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

INGOT_INLINE void ingot_attention_few(const void *k_cache, const void *v_cache, const int32_t *blocks, int head,
                                      ingot_attention_item item, ingot_attention_rows rows, ingot_attention c,
                                      float *work) {
    const int q_row = ATTENTION_ALIGN(c.key_dim, 16), sum_row = ATTENTION_ALIGN(c.value_dim, 16);
    int group = c.q_heads / c.kv_heads, count = item.tokens * group;
    float *q = work, *scores = q + ATTENTION_FEW_ROWS * q_row;
    float *sum = scores + ATTENTION_FEW_ROWS * ATTENTION_FEW_KEYS;
    float m[ATTENTION_FEW_ROWS], l[ATTENTION_FEW_ROWS], scale[ATTENTION_FEW_ROWS];
    for (int r = 0; r < count; r++) {
        const float *from = rows.q + (ptrdiff_t)(r / group) * c.q_stride + r % group * c.key_dim;
        for (int d = 0; d < c.key_dim; d++) q[r * q_row + d] = from[d] * c.scale;
        for (int d = c.key_dim; d < q_row; d++) q[r * q_row + d] = 0.0f;
        for (int d = 0; d < sum_row; d++) sum[r * sum_row + d] = 0.0f;
        m[r] = ATTENTION_NO_PEAK;
        l[r] = 0.0f;
    }
    /* Tiles start at a multiple of 4, as keys are taken by fours; whatever lies before begin is masked. */
    for (int start = item.begin & ~3; start < item.end; start += ATTENTION_FEW_KEYS) {
        int stop = start + ATTENTION_FEW_KEYS < item.end ? start + ATTENTION_FEW_KEYS : item.end;
        for (int key = start; key < stop; key += 4) {
            if (key % c.block_size == 0) {
                ingot_few_prefetch(v_cache, blocks, key, head, c.value_dim, c);
                if (key + c.block_size < item.end) {
                    ingot_few_prefetch(k_cache, blocks, key + c.block_size, head, c.key_dim, c);
                }
            }
            size_t at = ingot_kv_row(blocks, key, head, c.kv_heads, c.block_size, c.key_dim);
            for (int r = 0; r < count; r += FEW_BLOCK) {
                ingot_few_scores(count - r, q + r * q_row, q_row, k_cache, at, c.key_dim, c.kv_type,
                                 scores + r * ATTENTION_FEW_KEYS + key - start);
            }
        }
        int padded = ATTENTION_ALIGN(stop - start, VF_LANES);
        for (int r = 0; r < count; r++) {
            float *row = scores + r * ATTENTION_FEW_KEYS;
            if (c.softcap) {
                for (int j = 0; j < stop - start; j++) row[j] = c.softcap * ingot_tanhf(row[j] * (1.0f / c.softcap));
            }
            int position = item.position + r / group, low = ingot_attention_low(position, c);
            low = low > item.begin ? low : item.begin;
            int high = position + 1 < stop ? position + 1 : stop;
            for (int j = 0; j < low - start && j < padded; j++) row[j] = -__builtin_inff();
            for (int j = high > start ? high - start : 0; j < padded; j++) row[j] = -__builtin_inff();
            vf peak = vf_set1(m[r]), part = vf_zero();
            for (int j = 0; j < padded; j += VF_LANES) peak = vf_max(vf_load(row + j), peak);
            float top = vf_hmax(peak);
            for (int j = 0; j < padded; j += VF_LANES) {
                vf p = vf_exp(vf_load(row + j) - vf_set1(top));
                vf_store(row + j, p);
                part = part + p;
            }
            scale[r] = ingot_expf(m[r] - top);
            l[r] = l[r] * scale[r] + vf_hsum(part);
            m[r] = top;
        }
        int begin = start < item.begin ? item.begin : start;
        for (int r = 0; r < count; r += FEW_BLOCK) {
            ingot_few_values(count - r, scores + r * ATTENTION_FEW_KEYS + begin - start, v_cache, blocks, begin, stop,
                             head, sum + r * sum_row, sum_row, scale + r, c);
        }
    }
    for (int r = 0; r < count; r++) ingot_attention_finish(rows, r, sum + r * sum_row, m[r], l[r], c);
}

#endif
