/* The tile instructions of AMX in plain C, for machines without them: included before the kernels, in place of the
 * compiler's intrinsics. What the processor faults for ends the program with a message.
 *
 * Semantics: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, LDTILECFG, TILELOADD, TILESTORED,
 * TILEZERO, TILERELEASE, TDPBSSD, TDPBF16PS. */
#ifndef INGOT_TEST_AMX_H
#define INGOT_TEST_AMX_H
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_loadconfig
#define _tile_release amx_release
#define _tile_loadd amx_loadd
#define _tile_stored amx_stored
#define _tile_zero amx_zero
#define _tile_dpbssd amx_dpbssd
#define _tile_dpbf16ps amx_dpbf16ps

typedef struct { uint8_t palette, start_row, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } amx_config;

static _Thread_local amx_config amx_shape;
static _Thread_local uint8_t amx_tile[8][16][64];

#define AMX_FAULT(condition, what) \
    do { \
        if (condition) { \
            fprintf(stderr, "amx: %s\n", what); \
            abort(); \
        } \
    } while (0)

static inline void amx_release(void) {
    memset(&amx_shape, 0, sizeof amx_shape);
    memset(amx_tile, 0, sizeof amx_tile);
}

static inline void amx_loadconfig(const void *from) {
    static const uint8_t zeros[14];
    amx_config config;
    memcpy(&config, from, sizeof config);
    amx_release();
    AMX_FAULT(config.palette != 1, "the palette is not 1");
    AMX_FAULT(config.start_row || memcmp(config.reserved, zeros, sizeof zeros), "reserved bytes of a configuration");
    for (int i = 0; i < 16; i++) {
        AMX_FAULT(i >= 8 && (config.row_bytes[i] || config.rows[i]), "a shape for a tile that there is not");
        AMX_FAULT(config.row_bytes[i] > 64 || config.rows[i] > 16, "a tile is larger than 16 rows of 64 bytes");
        AMX_FAULT(!config.row_bytes[i] != !config.rows[i], "a tile has rows without bytes, or bytes without rows");
    }
    amx_shape = config;
}

static inline void amx_require(int tile) {
    AMX_FAULT(tile < 0 || tile > 7 || !amx_shape.rows[tile], "a tile is used that is not configured");
}

static inline void amx_zero(int tile) {
    amx_require(tile);
    memset(amx_tile[tile], 0, sizeof amx_tile[tile]);
}

static inline void amx_loadd(int tile, const void *base, ptrdiff_t stride) {
    amx_zero(tile);
    for (int row = 0; row < amx_shape.rows[tile]; row++)
        memcpy(amx_tile[tile][row], (const uint8_t *)base + row * stride, amx_shape.row_bytes[tile]);
}

static inline void amx_stored(int tile, void *base, ptrdiff_t stride) {
    amx_require(tile);
    for (int row = 0; row < amx_shape.rows[tile]; row++)
        memcpy((uint8_t *)base + row * stride, amx_tile[tile][row], amx_shape.row_bytes[tile]);
}

static inline void amx_require_product(int sums, int a, int b) {
    amx_require(sums), amx_require(a), amx_require(b);
    AMX_FAULT(sums == a || sums == b || a == b, "an instruction has the same tile twice");
    AMX_FAULT(amx_shape.rows[sums] != amx_shape.rows[a], "sums and inputs have different numbers of rows");
    AMX_FAULT(amx_shape.row_bytes[sums] != amx_shape.row_bytes[b], "sums and weights have rows of different lengths");
    AMX_FAULT(amx_shape.row_bytes[a] % 4 || amx_shape.row_bytes[b] % 4, "rows are no multiples of 4 bytes");
    AMX_FAULT(amx_shape.row_bytes[a] / 4 != amx_shape.rows[b], "inputs and weights have different depths");
}

static inline void amx_dpbssd(int sums, int a, int b) {
    amx_require_product(sums, a, b);
    for (int m = 0; m < amx_shape.rows[sums]; m++)
        for (int n = 0; n < amx_shape.row_bytes[sums] / 4; n++) {
            uint32_t sum;
            memcpy(&sum, amx_tile[sums][m] + 4 * n, 4);
            for (int k = 0; k < amx_shape.row_bytes[a]; k++)
                sum += (uint32_t)((int8_t)amx_tile[a][m][k] * (int8_t)amx_tile[b][k / 4][4 * n + k % 4]);
            memcpy(amx_tile[sums][m] + 4 * n, &sum, 4);
        }
}

/* A subnormal number is a zero of its sign, as an operand and as a result. */
static inline float amx_flushed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
    memcpy(&x, &bits, 4);
    return x;
}

static inline float amx_bf16(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return amx_flushed(x);
}

static inline void amx_dpbf16ps(int sums, int a, int b) {
    amx_require_product(sums, a, b);
    for (int m = 0; m < amx_shape.rows[sums]; m++)
        for (int n = 0; n < amx_shape.row_bytes[sums] / 4; n++) {
            float of[2] = {0, 0}, sum;
            for (int k = 0; k < amx_shape.row_bytes[a] / 2; k++)
                of[k % 2] = amx_flushed(__builtin_fmaf(amx_bf16(amx_tile[a][m] + 2 * k),
                                                       amx_bf16(amx_tile[b][k / 2] + 4 * n + 2 * (k % 2)), of[k % 2]));
            memcpy(&sum, amx_tile[sums][m] + 4 * n, 4);
            sum = amx_flushed(amx_flushed(sum) + amx_flushed(of[0] + of[1]));
            memcpy(amx_tile[sums][m] + 4 * n, &sum, 4);
        }
}

#endif
