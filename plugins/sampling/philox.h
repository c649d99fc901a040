/* Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"): random numbers that
 * are a function of a key and a counter, with no state between calls. */
#ifndef INGOT_PHILOX_H
#define INGOT_PHILOX_H
#include "cpu/scalar_math.h"

INGOT_INLINE void ingot_philox(uint32_t counter[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * counter[0], b = (uint64_t)0xCD9E8D57u * counter[2];
        uint32_t c1 = counter[1], c3 = counter[3];
        counter[0] = (uint32_t)(b >> 32) ^ c1 ^ key0;
        counter[1] = (uint32_t)b;
        counter[2] = (uint32_t)(a >> 32) ^ c3 ^ key1;
        counter[3] = (uint32_t)a;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

/* A multiple of 2^-53 in [0, 1). Equal arguments give equal numbers, on every machine. */
INGOT_INLINE double ingot_uniform(uint64_t seed, uint64_t position, uint32_t stream) {
    uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), stream, 0};
    ingot_philox(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
    return (double)(((uint64_t)counter[1] << 32 | counter[0]) >> 11) * 0x1p-53;
}

#endif
