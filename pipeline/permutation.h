/* A permutation of 0 ... n - 1 that takes no memory: its i-th element is computed from i, n and a seed alone.
 *
 * A Feistel network over the smallest even number of bits (at least 2) that holds n - 1, walked again from
 * its own result until that is below n (Black and Rogaway 2002, "Ciphers with arbitrary finite domains",
 * cycle walking). With h half the bits, L and R the upper and lower half of x, a round makes (L, R) into (R,
 * L xor low_h(mix(R + key))); there are 8, and the last one's (L, R) are put together as they are. mix is
 * splitmix64's finaliser (Steele, Lea and Flood 2014), the keys are the first 8 outputs of splitmix64 started
 * with the seed. All arithmetic is in 64 bits, so that every machine gives the same order: stores are resumed
 * and compared by it. It is no cipher. */
#ifndef ACTDUMP_PIPELINE_PERMUTATION_H
#define ACTDUMP_PIPELINE_PERMUTATION_H

#include <stdint.h>

#define PERMUTATION_ROUNDS 8

struct permutation {
    uint64_t n;
    int half_bits;
    uint64_t keys[PERMUTATION_ROUNDS];
};

/* n is at least 1 and at most 2^62. */
void permutation_init(struct permutation *permutation, int64_t n, uint64_t seed);
/* i in [0, n). On average at most 4 walks. */
int64_t permutation_get(const struct permutation *permutation, int64_t i);

#endif
