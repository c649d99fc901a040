/* Rounding and packing of weights: what quantize_weights.py and pack.py do in numpy, to the bit, some ten times as fast.
 *
 * A lane is a group of weights, so that every sum over a group is taken in the order in which numpy adds up rows; no
 * product and sum are contracted (-ffp-contract=off) but where both are integers. The names of steps are those of
 * quantize_weights.py, which tells why they are what they are.
 */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define BLOCK 32
#define MOST_ROWS 128
#define LEVELS 15
#define GROUPS_AT_ONCE 2048
#define F16_MAX 65504.0f

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint16_t vs __attribute__((vector_size(2 * LANES)));
typedef _Float16 vh __attribute__((vector_size(2 * LANES)));

/* A fit that is under way: step and minimum for a group that spans 0 to 1, and how much of its squares they explain. */
typedef struct { vf most, step, minimum; } fit;

INLINE vf splat(float value) { return (vf){0} + value; }
INLINE vf choose(vi where, vf a, vf b) { return (vf)((where & (vi)a) | (~where & (vi)b)); }
INLINE vf least(vf a, vf b) { return choose(a < b, a, b); }
INLINE vf greatest(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf reciprocal(vf a) { return choose(a > 0, 1.0f / a, splat(0)); }
INLINE vf widened(vh a) { return __builtin_convertvector(a, vf); }

INLINE vh to_f16(vf a) {
    a = choose(a < -F16_MAX, splat(-F16_MAX), choose(a > F16_MAX, splat(F16_MAX), a));
    return __builtin_convertvector(a, vh);
}

/* To the nearest integer, to even, below 2^22; what is larger stays larger than any level. */
INLINE vf nearest(vf a) {
    const vf magic = splat(12582912.0f);
    return (a + magic) - magic;
}

INLINE vf level(vf x, vf minimum, vf inverse) {
    return least(greatest(nearest((x - minimum) * inverse), splat(0)), splat(LEVELS));
}

INLINE vf inverse_of(vf step) { return choose(step != 0, 1.0f / step, splat(0)); }

INLINE vf load(const float *from) {
    vf value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* One candidate: the span is divided into `steps`, of which the first `below` are cut off. */
INLINE void try_grid(const vf *unit, int rows, vf unit_sum, float steps, float below, fit *found) {
    vf q_sum = splat(0), squares = splat(0), products = splat(0);
    for (int row = 0; row < rows; row++) {
        vf q = unit[row] * steps;
        if (below != 0) q = q - below;
        q = nearest(q);
        if (below != 0) q = greatest(q, splat(0));
        if (steps > LEVELS) q = least(q, splat(LEVELS));
        q_sum += q;
        squares = __builtin_elementwise_fma(q, q, squares);
        products += q * unit[row];
    }
    vf var = squares - q_sum * q_sum / (float)rows;
    vf cov = products - q_sum * unit_sum / (float)rows;
    vf slope = cov * reciprocal(var), explained = slope * cov;
    vi better = explained > found->most;
    found->most = choose(better, explained, found->most);
    found->step = choose(better, slope, found->step);
    found->minimum = choose(better, (unit_sum - slope * q_sum) / (float)rows, found->minimum);
}

/* unit: x as parts of its span. Returns its sum. */
INLINE vf to_unit(const vf *x, int rows, vf *unit, vf *low_out, vf *span_out) {
    vf low = x[0], high = x[0];
    for (int row = 1; row < rows; row++) low = least(x[row], low), high = greatest(x[row], high);
    vf span = high - low, scale = reciprocal(span), sum = splat(0);
    for (int row = 0; row < rows; row++) {
        unit[row] = (x[row] - low) * scale;
        sum += unit[row];
    }
    *low_out = low, *span_out = span;
    return sum;
}

/* The grids that every group is tried on. Returns which lanes lie on one. */
INLINE vi fit_first(const vf *x, int rows, fit *found) {
    vf unit[MOST_ROWS], low, span, sum = to_unit(x, rows, unit, &low, &span);
    *found = (fit){splat(-1), splat(0), splat(0)};
    try_grid(unit, rows, sum, 15, 0, found);
    try_grid(unit, rows, sum, 14, 0, found);
    try_grid(unit, rows, sum, 13, 0, found);
    try_grid(unit, rows, sum, 12, 0, found);
    try_grid(unit, rows, sum, 11, 0, found);
    try_grid(unit, rows, sum, 16, 0, found);
    try_grid(unit, rows, sum, 16, 0.5f, found);
    try_grid(unit, rows, sum, 16, 1, found);
    try_grid(unit, rows, sum, 17, 1, found);
    vf squares = splat(0);
    for (int row = 0; row < rows; row++) squares += unit[row] * unit[row];
    vf variance = squares - sum * sum / (float)rows;
    return (variance > 0) & (variance - found->most <= 1e-4f * variance);
}

/* Those for parts of larger groups. */
INLINE void fit_parts(const vf *x, int rows, fit *found) {
    vf unit[MOST_ROWS], low, span, sum = to_unit(x, rows, unit, &low, &span);
    try_grid(unit, rows, sum, 10, 0, found);
    try_grid(unit, rows, sum, 9, 0, found);
    try_grid(unit, rows, sum, 8, 0, found);
}

/* The line through the nearest levels once more, then the minimum that suits the step as float16. */
INLINE void fit_last(const vf *x, int rows, const fit *found, vh *step_out, vh *minimum_out) {
    vf low = x[0], high = x[0];
    for (int row = 1; row < rows; row++) low = least(x[row], low), high = greatest(x[row], high);
    vf span = high - low, step = found->step * span, minimum = found->minimum * span + low;
    vf inverse = inverse_of(step), q_sum = splat(0), squares = splat(0), x_sum = splat(0), products = splat(0);
    for (int row = 0; row < rows; row++) {
        vf q = level(x[row], minimum, inverse);
        q_sum += q;
        squares = __builtin_elementwise_fma(q, q, squares);
        x_sum += x[row];
        products += q * x[row];
    }
    vf slope = (products - q_sum * x_sum / (float)rows) * reciprocal(squares - q_sum * q_sum / (float)rows);
    minimum = (x_sum - slope * q_sum) / (float)rows;
    *step_out = to_f16(slope);
    step = widened(*step_out), inverse = inverse_of(step);
    vf sum = splat(0);
    for (int row = 0; row < rows; row++) sum += x[row] - level(x[row], minimum, inverse) * step;
    *minimum_out = to_f16(sum / (float)rows);
}

INLINE int count(vi where) {
    int total = 0;
    for (int lane = 0; lane < LANES; lane++) total -= where[lane];
    return total;
}

/* Columns [first, first + lanes) of x [rows, n]; lanes beyond n repeat the last column. */
INLINE void load_columns(const float *x, int rows, int64_t n, int64_t first, vf *out) {
    if (first + LANES <= n) {
        for (int row = 0; row < rows; row++) out[row] = load(x + row * n + first);
        return;
    }
    for (int row = 0; row < rows; row++)
        for (int lane = 0; lane < LANES; lane++)
            out[row][lane] = x[row * n + (first + lane < n ? first + lane : n - 1)];
}

/* fit_w4 of x [rows, n], rows <= 128: step and minimum, float16 [n]. scratch: 192 bytes for every 16 columns. */
EXPORT void ingot_fit_columns(const float *x, int64_t rows, int64_t n, _Float16 *step, _Float16 *minimum,
                              float *scratch) {
    vf columns[MOST_ROWS];
    int64_t exact = 0;
    for (int64_t first = 0; first < n; first += LANES) {
        fit found;
        load_columns(x, (int)rows, n, first, columns);
        vi on_grid = fit_first(columns, (int)rows, &found);
        for (int lane = 0; lane < LANES && first + lane < n; lane++) exact -= on_grid[lane];
        memcpy(scratch + first * 3, &found, sizeof found);
    }
    int parts = (double)exact / (double)n > 0.02;
    for (int64_t first = 0; first < n; first += LANES) {
        fit found;
        vh of_step, of_minimum;
        load_columns(x, (int)rows, n, first, columns);
        memcpy(&found, scratch + first * 3, sizeof found);
        if (parts) fit_parts(columns, (int)rows, &found);
        fit_last(columns, (int)rows, &found, &of_step, &of_minimum);
        size_t lanes = (size_t)(n - first < LANES ? n - first : LANES);
        memcpy(step + first, &of_step, 2 * lanes);
        memcpy(minimum + first, &of_minimum, 2 * lanes);
    }
}

/* Element `at` of w: bits of bfloat16, or float32. */
INLINE float element(const void *w, int bf16, int64_t at) {
    if (!bf16) return ((const float *)w)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)w)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* 16 elements from `at` on. */
INLINE vf elements(const void *w, int bf16, int64_t at) {
    if (!bf16) return load((const float *)w + at);
    vs bits;
    memcpy(&bits, (const uint16_t *)w + at, sizeof bits);
    return (vf)(__builtin_convertvector(bits, vi) << 16);
}

/* Block `block` of the 16 rows from row `first` on, transposed: rows of w [n, k] beyond n and channels beyond k are
 * zeros. Adds lanes with NaN or infinite elements to `odd`, of bfloat16: those in float32 have been looked at. */
INLINE void load_block(const void *w, int bf16, int64_t n, int64_t k, int64_t first, int64_t block, vf *out, vi *odd) {
    int64_t begin = first * k + block * BLOCK;
    n -= first;
    int64_t channels = k - block * BLOCK < BLOCK ? k - block * BLOCK : BLOCK;
    if (n >= LANES && channels == BLOCK) {
        for (int part = 0; part < BLOCK; part += LANES) {
            vf a[LANES], b[LANES];
            for (int lane = 0; lane < LANES; lane++) a[lane] = elements(w, bf16, begin + lane * k + part);
            /* Four rounds that each interleave the first half of the rows with the second. */
            for (int round = 0; round < 2; round++) {
                for (int i = 0; i < 8; i++) {
                    b[2 * i] = __builtin_shufflevector(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                                       7, 23);
                    b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                                                           14, 30, 15, 31);
                }
                for (int i = 0; i < 8; i++) {
                    a[2 * i] = __builtin_shufflevector(b[i], b[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                                       7, 23);
                    a[2 * i + 1] = __builtin_shufflevector(b[i], b[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                                                           14, 30, 15, 31);
                }
            }
            for (int row = 0; row < LANES; row++) out[part + row] = a[row];
        }
    } else {
        for (int row = 0; row < BLOCK; row++) {
            out[row] = splat(0);
            for (int lane = 0; lane < LANES; lane++)
                if (lane < n && row < channels) out[row][lane] = element(w, bf16, begin + lane * k + row);
        }
    }
    if (bf16)
        for (int row = 0; row < BLOCK; row++) *odd |= ((vi)out[row] & 0x7F800000) == 0x7F800000;
}

INLINE int64_t of(int64_t value, int64_t size) { return (value + size - 1) / size; }

INLINE int any(vi where) {
    int found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= where[lane];
    return found != 0;
}

/* Step and minimum of every block of 32 channels of w [n, k], float32 or bits of bfloat16: float16 [panels, blocks, 16],
 * as quantize_w4 finds them, but for what settle_exact would change. Returns 1 if a weight has bits that bfloat16 lacks,
 * for only then may it; 2 if one is NaN or infinite.
 *
 * scratch: 192 bytes for every 16 groups, then an int32 for every GROUPS_AT_ONCE groups. */
INLINE int fit_rows(const void *w, int bf16, int64_t n, int64_t k, _Float16 *step, _Float16 *minimum, float *scratch) {
    int64_t panels = of(n, LANES), blocks = of(k, BLOCK), groups = panels * LANES * blocks;
    int32_t *exact = (int32_t *)(scratch + panels * blocks * 48);
    memset(exact, 0, (size_t)of(groups, GROUPS_AT_ONCE) * sizeof *exact);
    vf x[BLOCK];
    vi low_bits = {0}, odd = {0};
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t block = 0; block < blocks; block++) {
            fit found;
            load_block(w, bf16, n, k, panel * LANES, block, x, &odd);
            for (int row = 0; row < BLOCK; row++) low_bits |= (vi)x[row] & 0xFFFF;
            vi on_grid = fit_first(x, BLOCK, &found);
            memcpy(scratch + (panel * blocks + block) * 48, &found, sizeof found);
            if (count(on_grid))
                for (int64_t lane = 0; lane < LANES; lane++)
                    exact[((panel * LANES + lane) * blocks + block) / GROUPS_AT_ONCE] -= on_grid[lane];
        }
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t block = 0; block < blocks; block++) {
            fit found;
            vi tried = {0};
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t part = ((panel * LANES + lane) * blocks + block) / GROUPS_AT_ONCE;
                int64_t size = groups - part * GROUPS_AT_ONCE;
                if (size > GROUPS_AT_ONCE) size = GROUPS_AT_ONCE;
                tried[lane] = (double)exact[part] / (double)size > 0.02 ? -1 : 0;
            }
            load_block(w, bf16, n, k, panel * LANES, block, x, &odd);
            memcpy(&found, scratch + (panel * blocks + block) * 48, sizeof found);
            if (count(tried)) {
                fit parts = found;
                fit_parts(x, BLOCK, &parts);
                found.step = choose(tried, parts.step, found.step);
                found.minimum = choose(tried, parts.minimum, found.minimum);
            }
            vh of_step, of_minimum;
            fit_last(x, BLOCK, &found, &of_step, &of_minimum);
            memcpy(step + (panel * blocks + block) * LANES, &of_step, sizeof of_step);
            memcpy(minimum + (panel * blocks + block) * LANES, &of_minimum, sizeof of_minimum);
        }
    return any(odd) ? 2 : any(low_bits);
}

EXPORT int ingot_fit_rows(const void *w, int bf16, int64_t n, int64_t k, _Float16 *step, _Float16 *minimum,
                          float *scratch) {
    return bf16 ? fit_rows(w, 1, n, k, step, minimum, scratch) : fit_rows(w, 0, n, k, step, minimum, scratch);
}

/* The panels of w [n, k] in w4a8 with these steps and minimums, float16 [panels, blocks, 16]. */
INLINE void pack_w4(const void *w, int bf16, int64_t n, int64_t k, const _Float16 *step, const _Float16 *minimum,
                    uint8_t *out) {
    int64_t panels = of(n, LANES), blocks = of(k, BLOCK);
    vf x[BLOCK];
    vi odd = {0};
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t block = 0; block < blocks; block++, out += 320, step += LANES, minimum += LANES) {
            vh of_step, of_minimum;
            memcpy(&of_step, step, sizeof of_step);
            memcpy(&of_minimum, minimum, sizeof of_minimum);
            vf start = widened(of_minimum), inverse = inverse_of(widened(of_step));
            load_block(w, bf16, n, k, panel * LANES, block, x, &odd);
            for (int j = 0; j < 4; j++) {
                vi bytes = {0};
                for (int i = 0; i < 4; i++) {
                    vi low = __builtin_convertvector(level(x[4 * j + i], start, inverse), vi);
                    vi high = __builtin_convertvector(level(x[16 + 4 * j + i], start, inverse), vi);
                    bytes |= (low | high << 4) << (8 * i);
                }
                memcpy(out + 64 * j, &bytes, sizeof bytes);
            }
            memcpy(out + 256, step, 32);
            memcpy(out + 288, minimum, 32);
        }
}

EXPORT void ingot_pack_w4(const void *w, int bf16, int64_t n, int64_t k, const _Float16 *step,
                          const _Float16 *minimum, uint8_t *out) {
    if (bf16) pack_w4(w, 1, n, k, step, minimum, out);
    else pack_w4(w, 0, n, k, step, minimum, out);
}

/* The panels of w [n, k] in int8g32: quantize_w8_groups, and where panel.h wants the numbers. Returns 2 if a weight is
 * NaN or infinite. */
INLINE int pack_w8_groups(const void *w, int bf16, int64_t n, int64_t k, uint8_t *out) {
    int64_t panels = of(n, LANES), blocks = of(k, BLOCK);
    vf x[BLOCK];
    vi odd = {0};
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t block = 0; block < blocks; block++) {
            load_block(w, bf16, n, k, panel * LANES, block, x, &odd);
            vf low = x[0], high = x[0];
            for (int row = 1; row < BLOCK; row++) low = least(x[row], low), high = greatest(x[row], high);
            vf most = greatest(high, -low), scale = widened(to_f16(most / 127.0f));
            scale = choose(most > 0, greatest(scale, splat(0x1p-24f)), splat(0));
            /* One step up where the largest weight would be cut off: the next float16. */
            vi is_short = (most - 127.0f * scale > scale) & (scale < F16_MAX);
            vh half = __builtin_convertvector(scale, vh);
            uint16_t bits[LANES];
            memcpy(bits, &half, sizeof bits);
            for (int lane = 0; lane < LANES; lane++) bits[lane] -= (uint16_t)is_short[lane];
            memcpy(&half, bits, sizeof bits);
            vf inverse = reciprocal(widened(half));
            if (block % 2 == 0) {
                memcpy(out, bits, sizeof bits);
                memset(out + 32, 0, 32);
                out += 64;
            } else {
                memcpy(out - 512 - 32, bits, sizeof bits);
            }
            for (int j = 0; j < 8; j++, out += 64) {
                vi bytes = {0};
                for (int i = 0; i < 4; i++) {
                    vf q = least(greatest(nearest(x[4 * j + i] * inverse), splat(-127)), splat(127));
                    bytes |= (__builtin_convertvector(q, vi) & 0xFF) << (8 * i);
                }
                memcpy(out, &bytes, sizeof bytes);
            }
        }
    return any(odd) ? 2 : 0;
}

EXPORT int ingot_pack_w8_groups(const void *w, int bf16, int64_t n, int64_t k, uint8_t *out) {
    return bf16 ? pack_w8_groups(w, 1, n, k, out) : pack_w8_groups(w, 0, n, k, out);
}
