/* Attention of few rows: generation. Keys and values are read from the cache as they lie. */
#ifndef INGOT_ATTENTION_FEW_H
#define INGOT_ATTENTION_FEW_H
#include "attention/attention_scores.h"

/* Asks for memory that is needed soon. Little at a time, beside the arithmetic: a core waits when too much is on its
 * way. To the second-level cache: the first waits for fewer lines at a time, and a tile of keys nearly fills it. Blocks
 * follow each other in no order that the hardware could foresee. */
INGOT_INLINE void ingot_few_prefetch(const char *from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

/* Where a position's row begins. */
INGOT_INLINE const char *ingot_few_row(const void *cache, const int32_t *blocks, int position, int head, int dim,
                                       ingot_attention c) {
    size_t row = ingot_kv_row(blocks, position, head, c.block_stride, c.block_size, dim);
    return (const char *)cache + row * ingot_kv_bytes(c.kv_type);
}

/* A tile of keys of one head, [first, stop) of those from `start` on, whose values are summed up. */
typedef struct {
    const void *values, *keys; /* keys: what is asked for meanwhile, the next tile's */
    const int32_t *blocks;
    int head, start, first, stop, context;
} ingot_few_tile;

/* total[i][..] += sum over keys of p[i][key] value[key][..] for `rows` rows and `vectors` vectors, whose last has
 * `last` lanes. The values of the keys [key, end), all of one block, begin with element `at`. ahead: null, or rows of
 * keys that are needed next, one asked for beside each value. kind, rows, vectors: literals. */
INGOT_INLINE void ingot_few_add(int kind, int rows, int vectors, int last, const float *p, ingot_few_tile tile,
                                size_t at, int key, int end, const char *ahead, vf total[4][4], ingot_attention c) {
    const int ahead_bytes = c.key_dim * (int)ingot_kv_bytes(c.kv_type);
#ifdef VF_PAIRS
    if (kind == GEMM_PAIRS) {
        const uint16_t *value = (const uint16_t *)tile.values + at;
        const int columns = (vectors - 1) * VF_LANES + last;
        p += (key - tile.start) / 2;
        if (key % 2) {
            ingot_few_pair(rows, vectors, columns, p++, 0, value, total);
            value += c.value_dim;
            key++;
        }
        for (; key + 2 <= end; key += 2, value += 2 * c.value_dim, p++) {
            if (ahead) {
                ingot_few_prefetch(ahead, 2 * ahead_bytes);
                ahead += 2 * ahead_bytes;
            }
            ingot_few_pair(rows, vectors, columns, p, value, value + c.value_dim, total);
        }
        if (key < end) ingot_few_pair(rows, vectors, columns, p, value, 0, total);
        return;
    }
#endif
    (void)kind;
    p += key - tile.start;
    for (; key < end; key++, at += (size_t)c.value_dim, p++) {
        vf factor[4];
        if (ahead) {
            ingot_few_prefetch(ahead, ahead_bytes);
            ahead += ahead_bytes;
        }
        INGOT_UNROLL
        for (int i = 0; i < rows; i++) factor[i] = vf_set1(p[i * ATTENTION_FEW_KEYS]);
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) {
            size_t from = at + (size_t)(v * VF_LANES);
            vf value = v < vectors - 1 || last == VF_LANES ? ingot_kv_load(tile.values, from, c.kv_type)
                                                           : ingot_kv_load_first(tile.values, from, last, c.kv_type);
            INGOT_UNROLL
            for (int i = 0; i < rows; i++) total[i][v] = vf_fma(factor[i], value, total[i][v]);
        }
    }
}

/* sum[i][..] = scale[i] sum[i][..] + sum over the tile's keys of p[i][key] value[key][d ..]; ask: for the next tile */
INGOT_INLINE void ingot_few_columns(int kind, int rows, int vectors, int last, const float *p, ingot_few_tile tile,
                                    int d, float *sum, int sum_row, const float *scale, int ask, ingot_attention c) {
    vf total[4][4];
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) {
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) {
            total[i][v] = vf_load(sum + i * sum_row + d + v * VF_LANES) * vf_set1(scale[i]);
        }
    }
    for (int key = tile.first; key < tile.stop;) {
        int block_end = (key / c.block_size + 1) * c.block_size, end = block_end < tile.stop ? block_end : tile.stop;
        int next = key + ATTENTION_FEW_KEYS;
        const char *ahead =
            ask && next < tile.context ? ingot_few_row(tile.keys, tile.blocks, next, tile.head, c.key_dim, c) : 0;
        size_t at = ingot_kv_row(tile.blocks, key, tile.head, c.block_stride, c.block_size, c.value_dim) + (size_t)d;
        ingot_few_add(kind, rows, vectors, last, p, tile, at, key, end, ahead, total, c);
        key = end;
    }
    INGOT_UNROLL
    for (int i = 0; i < rows; i++) {
        INGOT_UNROLL
        for (int v = 0; v < vectors; v++) vf_store(sum + i * sum_row + d + v * VF_LANES, total[i][v]);
    }
}

/* Weights of the keys [first, stop), one row of queries after the other, take in the scales of values of 8 bits; the
 * scales of the next tile's keys are asked for. */
INGOT_INLINE void ingot_few_scales(int rows, ingot_kv k_cache, ingot_kv v_cache, const int32_t *blocks, int head,
                                   int start, int first, int stop, int context, float *p, ingot_attention c) {
    for (int key = first; key < stop;) {
        int block_end = (key / c.block_size + 1) * c.block_size, end = block_end < stop ? block_end : stop;
        int next = key + ATTENTION_FEW_KEYS;
        const float *v_scale = ingot_kv_scale(v_cache, blocks, key, head, c.block_stride, c.block_size);
        if (next < context) {
            __builtin_prefetch(ingot_kv_scale(k_cache, blocks, next, head, c.block_stride, c.block_size), 0, 3);
        }
        for (int i = 0; i < rows; i++) {
            for (int j = key; j < end; j++) p[i * ATTENTION_FEW_KEYS + j - start] *= v_scale[j - key];
        }
        key = end;
    }
}

/* All columns of the values for `rows` rows; kind, rows: literals. */
INGOT_INLINE void ingot_few_values_of(int kind, int rows, const float *p, ingot_few_tile tile, float *sum, int sum_row,
                                      const float *scale, int ask, ingot_attention c) {
    const int whole = c.value_dim / (4 * VF_LANES) * (4 * VF_LANES), rest = c.value_dim - whole;
    for (int d = 0; d < whole; d += 4 * VF_LANES) {
        ingot_few_columns(kind, rows, 4, VF_LANES, p, tile, d, sum, sum_row, scale, ask && d == 0, c);
    }
    if (rest) {
        ingot_few_columns(kind, rows, (rest + VF_LANES - 1) / VF_LANES, (rest - 1) % VF_LANES + 1, p, tile, whole, sum,
                          sum_row, scale, ask && whole == 0, c);
    }
}

/* The same for the first FEW_BLOCK rows or, if there are less, for all. */
INGOT_INLINE void ingot_few_values(int kind, int rows, const float *p, ingot_few_tile tile, float *sum, int sum_row,
                                   const float *scale, int ask, ingot_attention c) {
    switch (rows) {
        case 1: ingot_few_values_of(kind, 1, p, tile, sum, sum_row, scale, ask, c); break;
        case 2: ingot_few_values_of(kind, 2, p, tile, sum, sum_row, scale, ask, c); break;
        case 3: ingot_few_values_of(kind, 3, p, tile, sum, sum_row, scale, ask, c); break;
        default: ingot_few_values_of(kind, FEW_BLOCK, p, tile, sum, sum_row, scale, ask, c); break;
    }
}

/* Scores of the keys [start, stop) become exp(score - m), those that a row may not see 0; m and l go on;
 * scale: what earlier sums shrink by. */
INGOT_INLINE void ingot_few_softmax(float *scores, int count, int start, int stop, ingot_attention_item item, float *m,
                                    float *l, float *scale, float *peak, ingot_attention c) {
    const int kind = ingot_attention_kind(c);
    int group = c.q_heads / c.kv_heads;
    int padded = ATTENTION_ALIGN(stop - start, kind == GEMM_PAIRS ? 2 * VF_LANES : VF_LANES);
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
#ifdef VF_PAIRS
        if (kind == GEMM_PAIRS) {
            l[r] = l[r] * scale[r] + ingot_few_weights(row, padded, m[r]);
            continue;
        }
#endif
        for (int j = 0; j < padded; j += VF_LANES) {
            vf p = vf_exp(vf_load(row + j) - vf_set1(m[r]));
            vf_store(row + j, p);
            sum = sum + p;
        }
        l[r] = l[r] * scale[r] + vf_hsum(sum);
    }
}

/* A query times scale as products take it, `row` floats; its scale, where it is quantized. */
INGOT_INLINE float ingot_few_query(const float *from, float *q, int row, ingot_attention c) {
    if (c.kv_type == INGOT_KV_I8) return c.scale * ingot_few_quantize(from, c.key_dim, q);
#ifdef VF_PAIRS
    if (ingot_attention_kind(c) == GEMM_PAIRS) {
        for (int d = 0; d < c.key_dim; d += 2 * VF_LANES) {
            vf_store(q + d / 2, ingot_query_pairs(from + d, c.key_dim - d, c.scale));
        }
        return 1.0f;
    }
#endif
    for (int d = 0; d < c.key_dim; d++) q[d] = from[d] * c.scale;
    for (int d = c.key_dim; d < row; d++) q[d] = 0.0f;
    return 1.0f;
}

INGOT_INLINE void ingot_attention_few(ingot_kv k_cache, ingot_kv v_cache, const int32_t *blocks,
                                      ingot_attention_item item, ingot_attention_rows rows, ingot_attention c,
                                      float *work) {
    const int integers = c.kv_type == INGOT_KV_I8, kind = ingot_attention_kind(c);
    const int q_row = integers ? FEW_INTEGER_ROW(c.key_dim) : ingot_attention_lanes(kind, c.key_dim);
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
        q_scale[r] = ingot_few_query(from, q + r * q_row, q_row, c);
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
                        ingot_few_scores(kind, per_head - r, q + row * q_row, q_row, q_scale + row, k_cache.rows, at,
                                         integers ? k_scale + (j - key) : 0, c.key_dim, c.kv_type,
                                         scores + row * ATTENTION_FEW_KEYS + j - start);
                    }
                }
            }
            key = end;
        }
        ingot_few_softmax(scores, count, start, stop, item, m, l, scale, peak, c);
        for (int h = 0; h < item.heads; h++) {
            int first = start < item.begin ? item.begin : start;
            float *weights = scores + h * per_head * ATTENTION_FEW_KEYS;
            if (integers) {
                ingot_few_scales(per_head, k_cache, v_cache, blocks, item.head + h, start, first, stop, item.context,
                                 weights, c);
            }
            ingot_few_tile tile = {.values = v_cache.rows, .keys = k_cache.rows, .blocks = blocks,
                                   .head = item.head + h, .start = start, .first = first, .stop = stop,
                                   .context = item.context};
            for (int r = 0; r < per_head; r += FEW_BLOCK) {
                int row = h * per_head + r;
                ingot_few_values(kind, per_head - r, weights + r * ATTENTION_FEW_KEYS, tile, sum + row * sum_row,
                                 sum_row, scale + row, r == 0, c);
            }
        }
    }
    for (int r = 0; r < count; r++) {
        int token = r % per_head / group, head = r / per_head * group + r % group;
        ingot_attention_finish(rows, token, head, sum + r * sum_row, m[r], l[r], c);
    }
}

#endif
