#include "pipeline/permutation.h"

#include <assert.h>

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

void permutation_init(struct permutation *permutation, int64_t n, uint64_t seed)
{
    assert(n >= 1 && n <= INT64_C(1) << 62);
    permutation->n = (uint64_t)n;
    permutation->half_bits = 1;
    while (permutation->half_bits < 31 && permutation->n - 1 >= UINT64_C(1) << (2 * permutation->half_bits))
        permutation->half_bits++;
    for (int i = 0; i < PERMUTATION_ROUNDS; i++) {
        seed += UINT64_C(0x9e3779b97f4a7c15);
        permutation->keys[i] = mix(seed);
    }
}

int64_t permutation_get(const struct permutation *permutation, int64_t i)
{
    assert(i >= 0 && (uint64_t)i < permutation->n);
    const int h = permutation->half_bits;
    const uint64_t mask = (UINT64_C(1) << h) - 1;
    uint64_t x = (uint64_t)i;
    do {
        uint64_t left = x >> h, right = x & mask;
        for (int round = 0; round < PERMUTATION_ROUNDS; round++) {
            uint64_t next = left ^ (mix(right + permutation->keys[round]) & mask);
            left = right;
            right = next;
        }
        x = left << h | right;
    } while (x >= permutation->n);
    return (int64_t)x;
}
