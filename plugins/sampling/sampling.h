/* From logits to tokens and log probabilities: the last launches of a step.
 *
 *   scan    the peak of every chunk of every row                         (row, chunk) pieces over the workers
 *   sum     the weights of the chunks, where a row needs no more          likewise
 *   choose  each row's token, its log probability and the best tokens     rows over the workers
 *
 * reference.py says what they compute. Whatever decides on a token is a maximum, a comparison or an exact sum, so that
 * neither the number of workers nor the other rows, nor the instruction set, can change it. */
#ifndef INGOT_SAMPLING_H
#define INGOT_SAMPLING_H
#include "cpu/ingot_kernel.h"
#include "cut.h"
#include "philox.h"

#define INGOT_SAMPLING_CHUNK 4096
#define INGOT_MAX_LOGPROBS 20
#define INGOT_SAMPLE (-1)  /* target: choose a token */
#define INGOT_NOTHING (-2) /* target: nothing is asked for but logits */

typedef struct ingot_sampling_row {
    int32_t target;       /* INGOT_SAMPLE, INGOT_NOTHING, or the token whose log probability is asked for */
    int32_t num_logprobs; /* -1: none; else of the token and of so many of the best */
    float temperature;    /* 0: the best token */
    int32_t top_k;        /* 0: off */
    float top_p;          /* 1: off */
    float min_p;          /* 0: off */
    float repetition_penalty, presence_penalty, frequency_penalty;
    int32_t stream;       /* with seed and position, what the random number is a function of */
    uint64_t seed;
    int32_t num_history;  /* tokens in the row of history_ids */
    int32_t num_biases;
    int32_t mask_row;     /* row of masks, or -1 */
    int32_t unused;
} ingot_sampling_row;

_Static_assert(sizeof(ingot_sampling_row) == 64, "as in runtime/sampling_inputs.py");

typedef struct ingot_sampling {
    int32_t num_rows;       /* of the step's logits, the first ones */
    int32_t history_stride, bias_stride, mask_stride; /* elements of a row */
    const ingot_sampling_row *rows;
    const int32_t *history_ids, *history_counts; /* distinct tokens; 0: in the prompt alone */
    const int32_t *bias_ids;
    const float *bias_values; /* -infinity: banned */
    const uint32_t *masks;    /* bit i % 32 of word i / 32: token i is allowed */
    int32_t *tokens;          /* [rows] */
    float *logprobs;          /* [rows] */
    int32_t *ranks;           /* [rows] */
    int32_t *top_ids;         /* [rows, INGOT_MAX_LOGPROBS] */
    float *top_logprobs;
    float *peaks;             /* [rows, chunks] */
    double *raw_sums, *sums;  /* [rows, chunks] of the model's own distribution; of the one to choose from */
    float *work;              /* [workers, 2, ingot_work_stride(vocab)] */
} ingot_sampling;

INGOT_INLINE ptrdiff_t ingot_work_stride(int vocab) { return (ptrdiff_t)(vocab + 63) / 64 * 64 + 64; }

INGOT_INLINE int ingot_num_chunks(int vocab) { return (vocab + INGOT_SAMPLING_CHUNK - 1) / INGOT_SAMPLING_CHUNK; }

INGOT_INLINE int ingot_chunk_size(int vocab, int chunk) {
    int rest = vocab - chunk * INGOT_SAMPLING_CHUNK;
    return rest < INGOT_SAMPLING_CHUNK ? rest : INGOT_SAMPLING_CHUNK;
}

INGOT_INLINE int ingot_is_modified(const ingot_sampling_row *row) {
    return row->num_history > 0 || row->num_biases > 0 || row->mask_row >= 0;
}

/* Is the token drawn from all tokens in the proportion of their weights, and nothing else? */
INGOT_INLINE int ingot_is_plain(const ingot_sampling_row *row) {
    return row->temperature > 0.0f && row->top_k == 0 && row->top_p >= 1.0f && row->min_p <= 0.0f &&
           !ingot_is_modified(row);
}

/* Of a whole row; NaN if it holds NaN or +infinity. */
INGOT_INLINE float ingot_row_peak(const float *peaks, int chunks) {
    float peak = INGOT_NONE;
    for (int i = 0; i < chunks; i++) peak = peaks[i] > peak || peaks[i] != peaks[i] ? peaks[i] : peak;
    return peak;
}

INGOT_INLINE void ingot_sample_scan(const ingot_sampling *s, const float *logits, int vocab, int worker,
                                    int num_workers) {
    if (!s->num_rows) return;
    int chunks = ingot_num_chunks(vocab), begin, end;
    ingot_split(s->num_rows * chunks, worker, num_workers, &begin, &end);
    for (int piece = begin; piece < end; piece++) {
        int row = piece / chunks, chunk = piece % chunks;
        if (s->rows[row].target == INGOT_NOTHING) continue;
        const float *x = logits + (ptrdiff_t)row * vocab + chunk * INGOT_SAMPLING_CHUNK;
        s->peaks[piece] = ingot_peak(x, ingot_chunk_size(vocab, chunk));
    }
}

INGOT_INLINE void ingot_sample_sum(const ingot_sampling *s, const float *logits, int vocab, int worker,
                                   int num_workers) {
    if (!s->num_rows) return;
    int chunks = ingot_num_chunks(vocab), begin, end;
    ingot_split(s->num_rows * chunks, worker, num_workers, &begin, &end);
    for (int piece = begin; piece < end; piece++) {
        int number = piece / chunks, chunk = piece % chunks, n = ingot_chunk_size(vocab, chunk);
        const ingot_sampling_row *row = s->rows + number;
        int is_raw = row->target != INGOT_NOTHING && row->num_logprobs >= 0;
        int is_own = row->target == INGOT_SAMPLE && ingot_is_plain(row);
        if (!is_raw && !is_own) continue;
        const float *x = logits + (ptrdiff_t)number * vocab + chunk * INGOT_SAMPLING_CHUNK;
        float peak = ingot_row_peak(s->peaks + (ptrdiff_t)number * chunks, chunks);
        if (is_raw) s->raw_sums[piece] = ingot_weigh(x, n, peak, 1.0f);
        if (is_own) {
            s->sums[piece] = is_raw && row->temperature == 1.0f ? s->raw_sums[piece]
                                                                : ingot_weigh(x, n, peak, 1.0f / row->temperature);
        }
    }
}

/* y = x after mask, biases and penalties. Arithmetic in float64, where products are exact: nothing depends on whether
 * a compiler contracts them with sums. */
INGOT_INLINE void ingot_modify(const ingot_sampling *s, int number, const float *x, float *y, int vocab) {
    const ingot_sampling_row *row = s->rows + number;
    if (row->mask_row >= 0) {
        const uint32_t *mask = s->masks + (ptrdiff_t)row->mask_row * s->mask_stride;
        for (int i = 0; i < vocab; i += 32) {
            uint32_t bits = mask[i / 32];
            int end = vocab - i < 32 ? vocab - i : 32;
            for (int j = 0; j < end; j++) y[i + j] = bits >> j & 1u ? x[i + j] : INGOT_NONE;
        }
    } else {
        memcpy(y, x, (size_t)vocab * sizeof(float));
    }
    const int32_t *ids = s->bias_ids + (ptrdiff_t)number * s->bias_stride;
    const float *values = s->bias_values + (ptrdiff_t)number * s->bias_stride;
    for (int i = 0; i < row->num_biases; i++) {
        if ((uint32_t)ids[i] < (uint32_t)vocab) y[ids[i]] += values[i];
    }
    ids = s->history_ids + (ptrdiff_t)number * s->history_stride;
    const int32_t *counts = s->history_counts + (ptrdiff_t)number * s->history_stride;
    double repetition = row->repetition_penalty, presence = row->presence_penalty, frequency = row->frequency_penalty;
    for (int i = 0; i < row->num_history; i++) {
        if ((uint32_t)ids[i] >= (uint32_t)vocab) continue;
        double value = y[ids[i]];
        value = value > 0.0 ? value / repetition : value * repetition;
        value = value - frequency * counts[i];
        if (counts[i] > 0) value = value - presence;
        y[ids[i]] = value > (double)__FLT_MAX__ ? __FLT_MAX__ : (float)value;
    }
}

/* The first token whose logit is the peak of its row. */
INGOT_INLINE int ingot_choose_best(const float *peaks, const float *x, int vocab, float peak) {
    int chunk = 0;
    while (peaks[chunk] < peak) chunk++;
    int begin = chunk * INGOT_SAMPLING_CHUNK;
    return begin + ingot_first(x + begin, ingot_chunk_size(vocab, chunk), peak);
}

/* The token that `uniform` falls on when each has a share of [0, 1) in proportion to its weight, in the order of ids;
 * of a plain row. */
INGOT_INLINE int ingot_choose_plain(const double *sums, const float *x, float *w, int vocab, float peak, float inverse,
                                    double uniform) {
    int chunks = ingot_num_chunks(vocab), chunk = 0;
    double total = 0.0, running = 0.0;
    for (int i = 0; i < chunks; i++) total += sums[i];
    double goal = uniform * total;
    while (running + sums[chunk] <= goal) running += sums[chunk++];
    int begin = chunk * INGOT_SAMPLING_CHUNK, n = ingot_chunk_size(vocab, chunk);
    ingot_weigh_into(w, x + begin, n, peak, inverse);
    return begin + ingot_pick(w, n, &running, goal);
}

/* The same of a row that is truncated or modified: its weights are written to w. */
INGOT_INLINE int ingot_choose_truncated(const ingot_sampling_row *row, const float *x, float *w, int vocab, float peak,
                                        float inverse, double uniform) {
    double total = ingot_weigh_into(w, x, vocab, peak, inverse);
    if (row->top_k > 0 && row->top_k < vocab) {
        int heavy = 0;
        for (int i = 0; i < vocab; i++) heavy += w[i] > 0.0f;
        if (row->top_k < heavy) {
            ingot_apply_cut(ingot_find_cut(x, w, vocab, peak, row->temperature, row->top_k, 0.0), x, w, vocab);
            total = ingot_drop_light(w, vocab, 0.0f);
        }
    }
    if (row->top_p < 1.0f) {
        ingot_cut cut = ingot_find_cut(x, w, vocab, peak, row->temperature, 0, (double)row->top_p * total);
        ingot_apply_cut(cut, x, w, vocab);
    }
    total = ingot_drop_light(w, vocab, row->min_p);
    double running = 0.0;
    return ingot_pick(w, vocab, &running, uniform * total);
}

/* -1 if nothing is allowed. */
INGOT_INLINE int ingot_choose_token(const ingot_sampling *s, int number, const float *x, int vocab, float peak,
                                    float *work, uint64_t position) {
    const ingot_sampling_row *row = s->rows + number;
    const ptrdiff_t first = (ptrdiff_t)number * ingot_num_chunks(vocab);
    float *w = work + ingot_work_stride(vocab);
    if (ingot_is_modified(row)) {
        ingot_modify(s, number, x, work, vocab);
        x = work;
        peak = ingot_peak(x, vocab);
        if (!(peak > INGOT_NONE)) return -1;
        if (row->temperature == 0.0f) return ingot_first(x, vocab, peak);
    }
    if (row->temperature == 0.0f) return ingot_choose_best(s->peaks + first, x, vocab, peak);
    float inverse = 1.0f / row->temperature;
    double uniform = ingot_uniform(row->seed, position, (uint32_t)row->stream);
    if (ingot_is_plain(row)) {
        return ingot_choose_plain(s->sums + first, x, w, vocab, peak, inverse, uniform);
    }
    return ingot_choose_truncated(row, x, w, vocab, peak, inverse, uniform);
}

/* ids = the best `count` tokens, the best first, of equals the smaller id; -1 beyond the vocabulary. */
INGOT_INLINE void ingot_best(const float *x, int vocab, int count, int32_t *ids) {
    int found = 0;
    for (int i = 0; i < vocab; i += VF_LANES) {
        int size = vocab - i < VF_LANES ? vocab - i : VF_LANES;
        unsigned better = (1u << size) - 1;
        if (found == count) better &= vf_above(ingot_lanes(x, i, vocab, INGOT_NONE), vf_set1(x[ids[count - 1]]));
        for (; better; better &= better - 1) {
            int token = i + __builtin_ctz(better), place = found < count ? found++ : count;
            if (place == count && !(x[token] > x[ids[--place]])) continue;
            for (; place > 0 && x[token] > x[ids[place - 1]]; place--) ids[place] = ids[place - 1];
            ids[place] = token;
        }
    }
    for (; found < count; found++) ids[found] = -1;
}

/* 1 + tokens that are better than `token`, or as good and of a smaller id. */
INGOT_INLINE int ingot_rank(const float *x, int vocab, int token) {
    int rank = 1;
    vf value = vf_set1(x[token]);
    for (int i = 0; i < token; i += VF_LANES) {
        unsigned before = token - i < VF_LANES ? (1u << (token - i)) - 1 : ~0u;
        vf lanes = ingot_lanes(x, i, vocab, INGOT_NONE);
        rank += __builtin_popcount(vf_at_least(lanes, value) & before);
    }
    for (int i = token + 1; i < vocab; i += VF_LANES) {
        rank += __builtin_popcount(vf_above(ingot_lanes(x, i, vocab, INGOT_NONE), value));
    }
    return rank;
}

/* Log probabilities of the model's own distribution. */
INGOT_INLINE void ingot_report(const ingot_sampling *s, int number, const float *x, int vocab, float peak, int token) {
    int chunks = ingot_num_chunks(vocab), count = s->rows[number].num_logprobs;
    int is_number = peak > INGOT_NONE;
    double total = 0.0;
    for (int i = 0; i < chunks; i++) total += s->raw_sums[(ptrdiff_t)number * chunks + i];
    float log_total = ingot_logf((float)total);
    s->logprobs[number] = token < 0 ? __builtin_nanf("") : x[token] - peak - log_total;
    s->ranks[number] = token < 0 ? 0 : ingot_rank(x, vocab, token);
    int32_t *ids = s->top_ids + (ptrdiff_t)number * INGOT_MAX_LOGPROBS;
    if (count > 0) ingot_best(x, is_number ? vocab : 0, count, ids);
    for (int i = 0; i < count; i++) {
        s->top_logprobs[(ptrdiff_t)number * INGOT_MAX_LOGPROBS + i] =
            ids[i] < 0 ? INGOT_NONE : x[ids[i]] - peak - log_total;
    }
}

/* positions, logit_rows: of the step. */
INGOT_INLINE void ingot_sample_choose(const ingot_sampling *s, const float *logits, const int32_t *positions,
                                      const int32_t *logit_rows, int vocab, int worker, int num_workers) {
    if (!s->num_rows) return;
    int chunks = ingot_num_chunks(vocab), begin, end;
    float *work = s->work + worker * 2 * ingot_work_stride(vocab);
    ingot_split(s->num_rows, worker, num_workers, &begin, &end);
    for (int number = begin; number < end; number++) {
        int target = s->rows[number].target, token = -1;
        if (target == INGOT_NOTHING) continue;
        const float *x = logits + (ptrdiff_t)number * vocab;
        float peak = ingot_row_peak(s->peaks + (ptrdiff_t)number * chunks, chunks);
        if (peak > INGOT_NONE) {
            uint64_t position = (uint64_t)positions[logit_rows[number]];
            token = target >= 0 ? target : ingot_choose_token(s, number, x, vocab, peak, work, position);
        }
        s->tokens[number] = token;
        if (s->rows[number].num_logprobs >= 0) ingot_report(s, number, x, vocab, peak, token);
    }
}

#endif
