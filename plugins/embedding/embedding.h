/* y[t, :] = w[ids[t], :] in float32, from a matrix packed for the linear kernels (see "linear/panel.h"), so that an
 * embedding that is the head's matrix too is stored once. */
#ifndef INGOT_EMBEDDING_H
#define INGOT_EMBEDDING_H
#include "../cpu/ingot_kernel.h"
#include "../cpu/simd.h"

/* panel: the 16 rows of w in which this one is number `lane`. */
typedef void (*ingot_read_row)(const uint8_t *panel, int lane, int k, float *y);

INGOT_INLINE void ingot_read_fp32(const uint8_t *panel, int lane, int k, float *y) {
    const float *w = (const float *)panel + lane;
    for (int i = 0; i < k; i++) y[i] = w[16 * i];
}

INGOT_INLINE void ingot_read_bf16(const uint8_t *panel, int lane, int k, float *y) {
    const uint16_t *w = (const uint16_t *)panel + 2 * lane;
    for (int i = 0; i < k; i++) y[i] = ingot_from_bits((uint32_t)w[32 * (i / 2) + i % 2] << 16);
}

INGOT_INLINE void ingot_read_int8(const uint8_t *panel, int lane, int k, float *y) {
    const int k32 = (k + 31) / 32 * 32;
    const int8_t *w = (const int8_t *)panel + 4 * lane;
    const float scale = ((const float *)(panel + 16 * k32))[lane];
    for (int i = 0; i < k; i++) y[i] = scale * (float)w[64 * (i / 4) + i % 4];
}

INGOT_INLINE void ingot_read_int8g32(const uint8_t *panel, int lane, int k, float *y) {
    for (int begin = 0; begin < k; begin += 64, panel += 1088) {
        const uint16_t *scales = (const uint16_t *)panel + lane;
        const int8_t *w = (const int8_t *)panel + 64 + 4 * lane;
        for (int i = 0; i < 64 && begin + i < k; i++)
            y[begin + i] = ingot_from_f16(scales[i / 32 * 16]) * (float)w[64 * (i / 4) + i % 4];
    }
}

INGOT_INLINE void ingot_read_w4a8(const uint8_t *panel, int lane, int k, float *y) {
    for (int begin = 0; begin < k; begin += 32, panel += 320) {
        float block[32];
        const uint16_t *scales = (const uint16_t *)(panel + 256) + lane;
        const float scale = ingot_from_f16(scales[0]), minimum = ingot_from_f16(scales[16]);
        for (int i = 0; i < 16; i++) {
            const int byte = panel[64 * (i / 4) + 4 * lane + i % 4];
            block[i] = scale * (float)(byte & 15) + minimum;
            block[i + 16] = scale * (float)(byte >> 4) + minimum;
        }
        memcpy(y + begin, block, sizeof(float) * (size_t)(k - begin < 32 ? k - begin : 32));
    }
}

INGOT_INLINE void ingot_embedding(ingot_read_row read, const uint8_t *w, size_t panel_bytes, const int32_t *ids,
                                  float *y, int num_tokens, int k, int worker, int num_workers) {
    int begin, end;
    ingot_split(num_tokens, worker, num_workers, &begin, &end);
    for (int t = begin; t < end; t++)
        read(w + (size_t)(ids[t] / 16) * panel_bytes, ids[t] % 16, k, y + (size_t)t * (size_t)k);
}

#endif
