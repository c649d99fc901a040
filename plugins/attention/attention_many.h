/* Attention of many rows: context. Rows lie in lanes, so that the softmax runs down the keys without any exchange
 * between lanes, and both products are blocks of broadcast and multiply-add:
 *
 *   scores [keys, rows]     = K tile [keys, key_dim] x Q^T [key_dim, rows]
 *   sums   [rows, value_dim] += P^T [rows, keys] x V tile [keys, value_dim]
 *
 * Where pairs of bfloat16 are multiplied, what both products run along, key_dim and keys, lies in pairs. */
#ifndef INGOT_ATTENTION_MANY_H
#define INGOT_ATTENTION_MANY_H
#include "attention/attention_pairs.h"

/* Copies rows [begin, end) of the cache to rows of `row` floats, row 0 being position `start`: float32, or the pairs of
 * bfloat16 that lie there. The other rows of the tile become 0, so that nothing unwritten takes part in a product. */
INGOT_INLINE void ingot_many_load(int kind, ingot_kv cache, const int32_t *blocks, int head, int dim, int start,
                                  int begin, int end, int tile_end, float *tile, int row, ingot_attention c) {
    for (int key = start; key < tile_end; key++) {
        float *to = tile + (key - start) * row;
        if (key < begin || key >= end) {
            for (int d = 0; d < row; d++) to[d] = 0.0f;
            continue;
        }
        size_t at = ingot_kv_row(blocks, key, head, c.block_stride, c.block_size, dim);
#ifdef VF_PAIRS
        if (kind == GEMM_PAIRS) {
            for (int d = 0; d < dim; d += 2 * VF_LANES) {
                vf_store(to + d / 2, ingot_kv_load_pairs(cache.rows, at + (size_t)d, dim - d));
            }
            continue;
        }
#endif
        (void)kind;
        vf scale = vf_set1(1.0f);
        if (c.kv_type == INGOT_KV_I8) {
            scale = vf_set1(*ingot_kv_scale(cache, blocks, key, head, c.block_stride, c.block_size));
        }
        for (int d = 0; d < dim; d += VF_LANES) {
            vf x = d + VF_LANES <= dim ? ingot_kv_load(cache.rows, at + (size_t)d, c.kv_type)
                                       : ingot_kv_load_first(cache.rows, at + (size_t)d, dim % VF_LANES, c.kv_type);
            vf_store(to + d, c.kv_type == INGOT_KV_I8 ? x * scale : x);
        }
    }
}

/* Values of the keys [start, stop): rows as above, or with pairs rows of two keys whose elements take turns. */
INGOT_INLINE void ingot_many_load_values(int kind, ingot_kv cache, const int32_t *blocks, int head, int start,
                                         int begin, int stop, float *tile, int row, ingot_attention c) {
#ifdef VF_PAIRS
    if (kind == GEMM_PAIRS) {
        for (int key = start; key < stop; key += 2) {
            size_t at = ingot_kv_row(blocks, key, head, c.block_stride, c.block_size, c.value_dim);
            float *to = tile + (key - start) / 2 * row;
            for (int d = 0; d < c.value_dim; d += 2 * VF_LANES) {
                vf even = vf_zero(), odd = vf_zero();
                size_t from = at + (size_t)d;
                if (key >= begin) even = ingot_kv_load_pairs(cache.rows, from, c.value_dim - d);
                if (key + 1 >= begin && key + 1 < stop) {
                    odd = ingot_kv_load_pairs(cache.rows, from + (size_t)c.value_dim, c.value_dim - d);
                }
                vf_store(to + d, vf_interleave_elements_low(even, odd));
                if (d + VF_LANES < row) vf_store(to + d + VF_LANES, vf_interleave_elements_high(even, odd));
            }
        }
        return;
    }
#endif
    ingot_many_load(kind, cache, blocks, head, c.value_dim, start, begin, stop, stop, tile, row, c);
}

/* Lanes d .. d + VF_LANES - 1 of a query times scale, elements or pairs of them. */
INGOT_INLINE vf ingot_many_query(int kind, const float *x, int d, ingot_attention c) {
#ifdef VF_PAIRS
    if (kind == GEMM_PAIRS) return ingot_query_pairs(x + 2 * d, c.key_dim - 2 * d, c.scale);
#endif
    (void)kind;
    int width = c.key_dim - d < VF_LANES ? c.key_dim - d : VF_LANES;
    return (width == VF_LANES ? vf_load(x + d) : vf_load_first(x + d, width)) * vf_set1(c.scale);
}

/* Queries times scale, transposed, in panels [rows / GEMM_COLUMNS][depth][GEMM_COLUMNS]; depth: their elements, or
 * pairs of these. The last row is repeated in those that are absent, which are never used. */
INGOT_INLINE void ingot_many_queries(int kind, int depth, ingot_attention_rows rows, int count, int padded,
                                     float *panels, ingot_attention c) {
    int group = c.q_heads / c.kv_heads;
    for (int r = 0; r < padded; r += VF_LANES) {
        float *panel = panels + (ptrdiff_t)(r / GEMM_COLUMNS) * GEMM_COLUMNS * depth + r % GEMM_COLUMNS;
        for (int d = 0; d < depth; d += VF_LANES) {
            vf lanes[VF_LANES];
            INGOT_UNROLL
            for (int i = 0; i < VF_LANES; i++) {
                int row = r + i < count ? r + i : count - 1;
                const float *from = rows.q + (ptrdiff_t)(row / group) * c.q_stride + row % group * c.key_dim;
                lanes[i] = ingot_many_query(kind, from, d, c);
            }
            vf_transpose(lanes);
            INGOT_UNROLL
            for (int i = 0; i < VF_LANES; i++) {
                if (d + i < depth) vf_store(panel + (ptrdiff_t)(d + i) * GEMM_COLUMNS, lanes[i]);
            }
        }
    }
}

/* Scores of as many queries as a vector has lanes become exp(score - m); returns their sum. */
INGOT_INLINE vf ingot_many_exp(float *column, int row, int keys, vf m) {
    vf sum = vf_zero(), sum2 = vf_zero();
    int j = 0;
    for (; j + 2 <= keys; j += 2) {
        vf p = vf_exp(vf_load(column + j * row) - m), p2 = vf_exp(vf_load(column + (j + 1) * row) - m);
        vf_store(column + j * row, p);
        vf_store(column + (j + 1) * row, p2);
        sum = sum + p;
        sum2 = sum2 + p2;
    }
    if (j < keys) {
        vf p = vf_exp(vf_load(column + j * row) - m);
        vf_store(column + j * row, p);
        sum = sum + p;
    }
    return sum + sum2;
}

/* One tile of scores, rows in lanes: scores become exp(score - m), with pairs in half the rows; m and l go on;
 * scale: what earlier sums shrink by */
INGOT_INLINE void ingot_many_softmax(int kind, float *scores, int row, int keys, int padded, float *m, float *l,
                                     float *scale) {
    for (int r = 0; r < padded; r += VF_LANES) {
        vf old = vf_load(m + r), peak = old, peak2 = old, sum;
        float *column = scores + r;
        int j = 0;
        for (; j + 2 <= keys; j += 2) {
            peak = vf_max(vf_load(column + j * row), peak);
            peak2 = vf_max(vf_load(column + (j + 1) * row), peak2);
        }
        if (j < keys) peak = vf_max(vf_load(column + j * row), peak);
        peak = vf_max(peak, peak2);
#ifdef VF_PAIRS
        if (kind == GEMM_PAIRS) sum = ingot_many_weights(column, row, keys, peak);
        else
#endif
        sum = ingot_many_exp(column, row, keys, peak);
        (void)kind;
        vf shrink = vf_exp(old - peak);
        vf_store(m + r, peak);
        vf_store(l + r, vf_fma(vf_load(l + r), shrink, sum));
        vf_store(scale + r, shrink);
    }
}

/* An item of one key/value head. */
INGOT_INLINE void ingot_attention_many(ingot_kv k_cache, ingot_kv v_cache, const int32_t *blocks,
                                       ingot_attention_item item, ingot_attention_rows rows, ingot_attention c,
                                       float *work) {
    const int kind = ingot_attention_kind(c), pairs = kind == GEMM_PAIRS, max_rows = c.rows;
    const int depth = pairs ? (c.key_dim + 1) / 2 : c.key_dim, v_rows = pairs ? c.keys / 2 : c.keys;
    const int k_row = ingot_attention_lanes(kind, c.key_dim), v_row = ATTENTION_ALIGN(c.value_dim, 16);
    const int s_row = max_rows + 16;
    float *panels = work, *scores = panels + max_rows * k_row, *k_tile = scores + c.keys * s_row;
    float *v_tile = k_tile + c.keys * k_row, *sums = v_tile + v_rows * v_row;
    float *m = sums + (max_rows + 16) * v_row, *l = m + s_row, *scale = l + s_row, *low = scale + s_row;
    float *high = low + s_row;
    int group = c.q_heads / c.kv_heads, count = item.tokens * group;
    int padded = ATTENTION_ALIGN(count, VF_LANES), sum_rows = ATTENTION_ALIGN(count, GEMM_ROWS);

    ingot_many_queries(kind, depth, rows, count, padded, panels, c);
    for (int r = 0; r < s_row; r++) {
        int row = r < count ? r : count - 1, position = item.position + row / group;
        m[r] = ATTENTION_NO_PEAK;
        l[r] = 0.0f;
        scale[r] = 0.0f;
        low[r] = (float)ingot_attention_low(position, c); /* positions below 2^24 are exact in float32 */
        high[r] = (float)position;
    }
    for (int i = 0; i < sum_rows * v_row; i++) sums[i] = 0.0f;
    for (int j = 0; j < c.keys; j++) {
        for (int r = padded; r < sum_rows; r++) scores[j * s_row + r] = 0.0f;
    }
    int first_low = ingot_attention_low(item.position, c);
    int last_low = ingot_attention_low(item.position + item.tokens - 1, c);

    /* Tiles lie at multiples of their size, whatever the item's begin: a row's arithmetic does not depend on which
     * other rows it shares the item with. */
    for (int start = item.begin / c.keys * c.keys; start < item.end; start += c.keys) {
        int stop = start + c.keys < item.end ? start + c.keys : item.end, keys = stop - start;
        int by_rows = ATTENTION_ALIGN(keys, GEMM_ROWS);
        ingot_many_load(kind, k_cache, blocks, item.head, c.key_dim, start, item.begin, stop, start + by_rows, k_tile,
                        k_row, c);
        ingot_many_load_values(kind, v_cache, blocks, item.head, start, item.begin, stop, v_tile, v_row, c);
        for (int r = 0; r < padded; r += GEMM_COLUMNS) {
            int vectors = (padded - r < GEMM_COLUMNS ? padded - r : GEMM_COLUMNS) / VF_LANES;
            for (int j = 0; j < keys; j += GEMM_ROWS) {
                ingot_gemm_vectors(kind, GEMM_ROWS, vectors, VF_LANES, depth, k_tile + j * k_row, k_row, 1,
                                   panels + (ptrdiff_t)r * depth, GEMM_COLUMNS, scores + j * s_row + r, s_row, 0);
            }
        }
        if (c.softcap) {
            for (int j = 0; j < keys; j++) {
                float *row = scores + j * s_row;
                for (int r = 0; r < padded; r++) row[r] = c.softcap * ingot_tanhf(row[r] * (1.0f / c.softcap));
            }
        }
        if (stop - 1 > item.position || start < last_low || item.begin > start || first_low > start) {
            for (int j = 0; j < keys; j++) {
                float *row = scores + j * s_row, key = (float)(start + j);
                int outside = start + j < item.begin;
                for (int r = 0; r < padded; r++) {
                    int hidden = outside | (key > high[r]) | (key < low[r]);
                    row[r] = hidden ? -__builtin_inff() : row[r];
                }
            }
        }
        if (pairs && keys % 2) { /* what would make a pair with the last key has no weight */
            for (int r = 0; r < padded; r++) scores[keys * s_row + r] = -__builtin_inff();
            keys++;
        }
        ingot_many_softmax(kind, scores, s_row, keys, padded, m, l, scale);
        for (int r = 0; r < sum_rows; r += GEMM_ROWS) {
            for (int d = 0; d < v_row; d += GEMM_COLUMNS) {
                int vectors = (v_row - d < GEMM_COLUMNS ? v_row - d : GEMM_COLUMNS) / VF_LANES;
                ingot_gemm_vectors(kind, GEMM_ROWS, vectors, VF_LANES, pairs ? keys / 2 : keys, scores + r, 1, s_row,
                                   v_tile + d, v_row, sums + r * v_row + d, v_row, scale + r);
            }
        }
    }
    for (int r = 0; r < count; r++) ingot_attention_finish(rows, r / group, r % group, sums + r * v_row, m[r], l[r], c);
}

#endif
