/* Tables of rotary embeddings (Su et al. 2021), plain and stretched by YaRN (Peng et al. 2023; transformers
 * modeling_rope_utils.py, _compute_yarn_parameters). */
#ifndef ACTDUMP_ENGINE_ROPE_H
#define ACTDUMP_ENGINE_ROPE_H

#include "engine/model.h"

/* cosine, sine [n_positions, rotary_dim / 2] in host memory, YaRN's attention factor included. In float32
 * where the reference is: the angle of a late position carries the frequency's rounding, and so should ours.
 */
void rope_fill(const struct rope *rope, int64_t n_positions, float *cosine, float *sine);

#endif
