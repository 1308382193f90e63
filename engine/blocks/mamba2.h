/* Mamba-2's mixer (Dao and Gu 2024, section 7; transformers modeling_bamba.py, BambaMixer):
 *
 *   z, x|B|C, dt = in_proj(u)      x|B|C = silu(conv(x|B|C))      y = ssd(x, dt, B, C)
 *   u + out_proj(norm by group (y * silu(z))) */
#ifndef ACTDUMP_ENGINE_BLOCKS_MAMBA2_H
#define ACTDUMP_ENGINE_BLOCKS_MAMBA2_H

#include "engine/blocks/scan.h"
#include "engine/weights.h"

struct mamba2 {
    struct matrix *in_proj;  /* [2 * width + 2 * groups * state_dim + heads, hidden_size] */
    struct matrix *out_proj; /* [hidden_size, width], width = heads * head_dim */
    const float *in_bias, *out_bias, *conv_weight, *conv_bias, *dt_bias, *A, *D, *norm;
    struct scan_carry carry;
};

enum status mamba2_load(struct loader *l, const struct model *m, struct mamba2 *out, struct error *error);
void mamba2_plan(struct forward *f);
void mamba2_take_carry(const struct forward *f, struct arena *arena, struct scan_carry *out);
void mamba2_run(struct forward *f, const struct mamba2 *mixer);

#endif
