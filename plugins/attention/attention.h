/* Attention over a paged KV cache, for any mixture of sequences with one new token (generation) or many (context).
 *
 * The keys and values of this step's tokens are in the cache already; only the cache is read. Work is cut into items:
 * (sequence, key/value heads, tile of its new tokens, range of keys). All query heads that share a key/value head are
 * rows of the same item, so that a key is read once for all of them; with few new tokens the heads themselves share an
 * item, so that a block of the cache is read from end to end. An item keeps, per row, the running maximum m of
 * the scores, the sum l of exp(score - m) and the weighted sum of values (online softmax, Milakov & Gimelshein 2018).
 *
 * Long contexts of few new tokens are cut into ranges of keys too (split-KV as in Flash-Decoding, Dao et al. 2023);
 * their m, l and unscaled sums go to `scratch`, and ingot_attention_combine, launched next, merges them. The cut
 * depends on nothing but the sequence's own lengths: the result does not change with the other sequences, nor with the
 * number of workers. */
#ifndef INGOT_ATTENTION_H
#define INGOT_ATTENTION_H
#include "attention/attention_types.h"
#include "attention/attention_few.h"
#include "attention/attention_many.h"

/* How one sequence is cut. Tile t holds new tokens [t * tile, ..), range r keys [base + r * range, ..), head block h
 * the key/value heads [h * heads, ..). `few`: there are so few rows a head that several heads make one item. */
typedef struct {
    int tokens, context, tile, tiles, base, range, ranges, few, heads, head_blocks;
} ingot_attention_cut;

INGOT_INLINE ingot_attention_cut ingot_attention_plan(const ingot_step *step, int seq, ingot_attention c) {
    ingot_attention_cut cut;
    int group = c.q_heads / c.kv_heads;
    cut.tokens = step->query_start[seq + 1] - step->query_start[seq];
    cut.context = step->context_len[seq];
    cut.tile = c.rows / group;
    cut.tiles = (cut.tokens + cut.tile - 1) / cut.tile;
    cut.few = cut.tokens * group <= ATTENTION_FEW_ROWS;
    cut.heads = cut.few && cut.tokens ? ATTENTION_FEW_ITEM / (cut.tokens * group) : 1;
    cut.heads = cut.heads < c.kv_heads ? cut.heads : c.kv_heads;
    cut.head_blocks = (c.kv_heads + cut.heads - 1) / cut.heads;
    cut.base = ingot_attention_low(cut.context - cut.tokens, c) & ~15;
    int keys = cut.context - cut.base;
    int most = cut.tokens <= ATTENTION_MAX_RANGES ? ATTENTION_MAX_RANGES / (cut.tokens ? cut.tokens : 1) : 1;
    int ranges = (keys + c.min_range - 1) / c.min_range;
    ranges = ranges > most ? most : ranges < 1 ? 1 : ranges;
    cut.range = ((keys + ranges - 1) / ranges + 15) & ~15;
    cut.ranges = keys > 0 ? (keys + cut.range - 1) / cut.range : 1;
    return cut;
}

/* Item i of that sequence; its keys are what both its range and the view of its tokens allow, perhaps none. */
INGOT_INLINE ingot_attention_item ingot_attention_item_of(ingot_attention_cut cut, int i, ingot_attention c) {
    ingot_attention_item item;
    int range = i % cut.ranges, tile = i / cut.ranges % cut.tiles;
    item.head = i / (cut.ranges * cut.tiles) * cut.heads;
    item.heads = c.kv_heads - item.head < cut.heads ? c.kv_heads - item.head : cut.heads;
    item.context = cut.context;
    int first = tile * cut.tile, last = first + cut.tile < cut.tokens ? first + cut.tile : cut.tokens;
    item.first = first;
    item.tokens = last - first;
    item.position = cut.context - cut.tokens + first;
    int low = ingot_attention_low(item.position, c), high = item.position + item.tokens;
    int begin = cut.base + range * cut.range, end = range == cut.ranges - 1 ? cut.context : begin + cut.range;
    item.begin = begin > low ? begin : low;
    item.end = end < high ? end : high;
    if (item.end < item.begin) item.end = item.begin;
    return item;
}

/* Proportional to the time an item takes: for each key the work of all rows, and that of loading it. */
INGOT_INLINE int64_t ingot_attention_cost(ingot_attention_item item, int group) {
    return (int64_t)(item.end - item.begin + 8) * (item.tokens * group + 4) * item.heads;
}

/* args: q [T, .., q_stride], K cache, V cache, their scales or null, block table, sinks [Hq] or null, scratch,
 * out [T, .., out_stride] */
INGOT_INLINE void ingot_attention_run(const ingot_step *step, void *const *args, int worker, int num_workers,
                                      ingot_attention c, float *work) {
    const float *q = args[0], *sinks = args[6];
    const ingot_kv k_cache = {args[1], args[3]}, v_cache = {args[2], args[4]};
    const int32_t *table = args[5];
    float *scratch = args[7], *out = args[8];
    int group = c.q_heads / c.kv_heads;
    int64_t total = 0;
    for (int seq = 0; seq < step->num_seqs; seq++) {
        ingot_attention_cut cut = ingot_attention_plan(step, seq, c);
        int items = cut.head_blocks * cut.tiles * cut.ranges;
        for (int i = 0; i < items; i++) total += ingot_attention_cost(ingot_attention_item_of(cut, i, c), group);
    }
    int64_t done = 0; /* an item belongs to the worker whose share of the total cost its middle lies in */
    size_t unit = 0;  /* rows of scratch that belong to earlier sequences */
    for (int seq = 0; seq < step->num_seqs; seq++) {
        ingot_attention_cut cut = ingot_attention_plan(step, seq, c);
        const int32_t *blocks = table + (size_t)seq * (size_t)step->max_blocks;
        int items = cut.head_blocks * cut.tiles * cut.ranges;
        for (int i = 0; i < items; i++) {
            ingot_attention_item item = ingot_attention_item_of(cut, i, c);
            int64_t cost = ingot_attention_cost(item, group);
            int64_t owner = (2 * done + cost) * num_workers / (2 * total);
            done += cost;
            if (owner != worker) continue;
            int query = step->query_start[seq] + item.first, head = item.head * group;
            ingot_attention_rows rows = {
                .q = q + (ptrdiff_t)query * c.q_stride + head * c.key_dim,
                .out = out + (ptrdiff_t)query * c.out_stride + head * c.value_dim,
                .sinks = sinks ? sinks + head : 0,
            };
            if (cut.ranges > 1) {
                size_t row = unit + (size_t)(i % cut.ranges) * (size_t)cut.tokens + (size_t)item.first;
                rows.partial = scratch + (row * (size_t)c.q_heads + (size_t)head) * ATTENTION_PARTIAL(c.value_dim);
            }
            if (cut.few) ingot_attention_few(k_cache, v_cache, blocks, item, rows, c, work);
            else ingot_attention_many(k_cache, v_cache, blocks, item, rows, c, work);
        }
        if (cut.ranges > 1) unit += (size_t)cut.ranges * (size_t)cut.tokens;
    }
}

/* One row of out: what `ranges` ranges left, `next` floats apart, weighted. sink: null, or of the row's head. */
INGOT_INLINE void ingot_attention_merge(const float *partial, size_t next, int ranges, const float *sink, float *to,
                                        ingot_attention c) {
    float m[ATTENTION_MAX_RANGES] = {0}, weight[ATTENTION_MAX_RANGES];
    float peak = sink ? *sink : ATTENTION_NO_PEAK, sum = 0.0f;
    for (int r = 0; r < ranges; r++) {
        m[r] = partial[(size_t)r * next + (size_t)c.value_dim];
        peak = m[r] > peak ? m[r] : peak;
    }
    for (int r = 0; r < ranges; r += VF_LANES) vf_store(weight + r, vf_exp(vf_load(m + r) - vf_set1(peak)));
    for (int r = 0; r < ranges; r++) sum += weight[r] * partial[(size_t)r * next + (size_t)c.value_dim + 1];
    if (sink) sum += ingot_expf(*sink - peak);
    for (int d = 0; d < c.value_dim; d += 4 * VF_LANES) {
        vf value[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
        for (int r = 0; r < ranges; r++) {
            const float *from = partial + (size_t)r * next + d; /* its room is a multiple of 16 */
            INGOT_UNROLL
            for (int v = 0; v < 4; v++) {
                if (d + v * VF_LANES < c.value_dim) {
                    value[v] = vf_fma(vf_set1(weight[r]), vf_load(from + v * VF_LANES), value[v]);
                }
            }
        }
        INGOT_UNROLL
        for (int v = 0; v < 4; v++) {
            int rest = c.value_dim - d - v * VF_LANES;
            if (rest >= VF_LANES) vf_store(to + d + v * VF_LANES, value[v] / vf_set1(sum));
            else if (rest > 0) vf_store_first(to + d + v * VF_LANES, value[v] / vf_set1(sum), rest);
        }
    }
}

/* Merges what the ranges of a sequence left in scratch. args: scratch, sinks [Hq] or null, what the first launch wrote
 * for sequences of one range, or null if that is in `out` already, out. */
INGOT_INLINE void ingot_attention_combine(const ingot_step *step, void *const *args, int worker, int num_workers,
                                          ingot_attention c) {
    const float *scratch = args[0], *sinks = args[1];
    const float *whole = args[2];
    float *out = args[3];
    const int stride = ATTENTION_PARTIAL(c.value_dim);
    size_t unit = 0;
    for (int seq = 0; seq < step->num_seqs; seq++) {
        ingot_attention_cut cut = ingot_attention_plan(step, seq, c);
        if (cut.ranges == 1 && !whole) continue;
        int begin, end;
        ingot_split(cut.tokens * c.q_heads, worker, num_workers, &begin, &end);
        for (int row = begin; row < end; row++) {
            ptrdiff_t at = (ptrdiff_t)(step->query_start[seq] + row / c.q_heads) * c.out_stride
                         + row % c.q_heads * c.value_dim;
            if (cut.ranges == 1) {
                memcpy(out + at, whole + at, sizeof(float) * (size_t)c.value_dim);
                continue;
            }
            int head = row % c.q_heads;
            ingot_attention_merge(scratch + (unit * (size_t)c.q_heads + (size_t)row) * (size_t)stride,
                                  (size_t)cut.tokens * (size_t)c.q_heads * (size_t)stride, cut.ranges,
                                  sinks ? sinks + head : 0, out + at, c);
        }
        if (cut.ranges > 1) unit += (size_t)cut.ranges * (size_t)cut.tokens;
    }
}

#endif
