/* Mamba-1's mixer (Gu and Dao 2023, figure 3; transformers modeling_mamba.py, MambaMixer), with Jamba's norms
 * on step, B and C where the model has them (modeling_jamba.py, JambaMambaMixer):
 *
 *   x, z = in_proj(u)      x = silu(conv(x))      r, B, C = x_proj(x)      dt = dt_proj(r)
 *   y = scan(x, dt, B, C) * silu(z)               u + out_proj(y) */
#ifndef ACTDUMP_ENGINE_BLOCKS_MAMBA1_H
#define ACTDUMP_ENGINE_BLOCKS_MAMBA1_H

#include "engine/blocks/scan.h"
#include "engine/weights.h"

struct mamba1 {
    struct matrix *in_proj;  /* [2 * channels, hidden_size] */
    struct matrix *x_proj;   /* [dt_rank + 2 * state_dim, channels] */
    struct matrix *dt_proj;  /* [channels, dt_rank] */
    struct matrix *out_proj; /* [hidden_size, channels] */
    const float *in_bias, *out_bias, *conv_weight, *conv_bias, *dt_bias, *A, *D;
    const float *dt_norm, *b_norm, *c_norm; /* NULL without mamba_norms */
    struct scan_carry carry;
};

/* Tensors in the loader's scope. */
enum status mamba1_load(struct loader *l, const struct model *m, struct mamba1 *out, struct error *error);
/* Takes the scratch of a run, for the plan. */
void mamba1_plan(struct forward *f);
/* Takes the layer's carry from an arena that measures or has memory. */
void mamba1_take_carry(const struct forward *f, struct arena *arena, struct scan_carry *out);
/* Reads normed, adds to the stream. */
void mamba1_run(struct forward *f, const struct mamba1 *mixer);

#endif
