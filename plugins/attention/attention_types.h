/* What the parts of the attention kernel share: its constants, an item of work, the memory it works in. */
#ifndef INGOT_ATTENTION_TYPES_H
#define INGOT_ATTENTION_TYPES_H
#include "attention/kv_cache.h"
#include "cpu/gemm.h"

typedef struct {
    int q_heads, kv_heads, key_dim, value_dim, block_size, kv_type;
    size_t block_stride;      /* elements of the cache from one block to the next */
    int q_stride, out_stride; /* floats from one token's row to the next */
    int window, chunk;        /* 0: none */
    int rows, keys;           /* of an item of many rows: its rows at most, and the keys that it takes at a time */
    int min_range;            /* keys of a range at least, if there are two */
    float scale, softcap;     /* softcap 0: none */
} ingot_attention;

/* New tokens first .. first + tokens - 1 of a sequence, the first at `position`; `heads` key/value heads from `head`
 * on; and the keys [begin, end) that at least one of the tokens may see. `context`: where the sequence ends. */
typedef struct {
    int first, tokens, position, head, heads, begin, end, context;
} ingot_attention_item;

/* Where the item's rows come from and go to: row r is query head r % (heads * group) of token r / (heads * group),
 * counted from the item's first. */
typedef struct {
    const float *q, *sinks;
    float *out, *partial; /* partial: null, or [token, Hq, value_dim + 2 padded], ending with m and l */
} ingot_attention_rows;

/* At most so many ranges of keys in a sequence. With n new tokens at most MAX / n, so that a sequence takes at most MAX
 * rows of Hq heads in scratch. */
#define ATTENTION_MAX_RANGES 16
#define ATTENTION_PARTIAL(value_dim) (((value_dim) + 2 + 15) / 16 * 16)

/* Up to so many rows a key/value head scores are dot products along the head; above, matrix products over rows in
 * lanes. */
#define ATTENTION_FEW_ROWS 12

/* Rows of few-row heads that make up one item: all heads of a token as a rule, as they lie together in a block. */
#define ATTENTION_FEW_ITEM 64

/* The start of a running maximum: finite, so that a row that has seen no key yet gives exp(-inf - m) = 0, not NaN. */
#define ATTENTION_NO_PEAK -1e30f

#define ATTENTION_FEW_KEYS 64
#define ATTENTION_ALIGN(n, a) (((n) + (a) - 1) / (a) * (a))

/* Working memory of one worker in floats, on its stack: queries, scores, keys, values, sums, and five numbers a row.
 * rows is a multiple of 64 and no less than one token's heads, keys one of GEMM_ROWS and of 16. Items of few rows, with
 * ATTENTION_FEW_ITEM queries, scores and sums, need less. */
#define ATTENTION_WORK(rows, keys, dk, dv)                                                              \
    ((rows) * ATTENTION_ALIGN(dk, 16) + (keys) * ((rows) + 16 + ATTENTION_ALIGN(dk, 16) + ATTENTION_ALIGN(dv, 16)) \
     + ((rows) + 16) * (ATTENTION_ALIGN(dv, 16) + 5))

/* How queries, keys, weights and values are multiplied. */
INGOT_INLINE int ingot_attention_kind(ingot_attention c) {
#ifdef VF_PAIRS
    if (c.kv_type == INGOT_KV_BF16) return GEMM_PAIRS;
#endif
    (void)c;
    return GEMM_FLOATS;
}

/* Lanes that a row of so many elements takes, filled up to whole vectors. */
INGOT_INLINE int ingot_attention_lanes(int kind, int dim) {
    return kind == GEMM_PAIRS ? ATTENTION_ALIGN(dim, 2 * VF_LANES) / 2 : ATTENTION_ALIGN(dim, 16);
}

/* The first key position that a token may see. */
INGOT_INLINE int ingot_attention_low(int position, ingot_attention c) {
    int low = 0;
    if (c.window && position - c.window + 1 > low) low = position - c.window + 1;
    if (c.chunk && position / c.chunk * c.chunk > low) low = position / c.chunk * c.chunk;
    return low;
}

/* Query head `head` of token `token`, counted from the item's first, is done: sum is unscaled. */
INGOT_INLINE void ingot_attention_finish(ingot_attention_rows rows, int token, int head, const float *sum, float m,
                                         float l, ingot_attention c) {
    if (rows.partial) {
        float *to = rows.partial + (ptrdiff_t)(token * c.q_heads + head) * ATTENTION_PARTIAL(c.value_dim);
        for (int d = 0; d < c.value_dim; d++) to[d] = sum[d];
        to[c.value_dim] = m;
        to[c.value_dim + 1] = l;
        return;
    }
    float factor = 1.0f;
    if (rows.sinks) {
        float peak = rows.sinks[head] > m ? rows.sinks[head] : m;
        factor = ingot_expf(m - peak);
        l = l * factor + ingot_expf(rows.sinks[head] - peak);
    }
    factor /= l;
    float *to = rows.out + (ptrdiff_t)token * c.out_stride + head * c.value_dim;
    for (int d = 0; d < c.value_dim; d++) to[d] = sum[d] * factor;
}

#endif
