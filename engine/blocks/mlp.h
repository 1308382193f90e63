/* The gated MLP: down_proj(silu(gate_proj(u)) * up_proj(u)), as a block's own or as a mixture's shared
 * expert. */
#ifndef ACTDUMP_ENGINE_BLOCKS_MLP_H
#define ACTDUMP_ENGINE_BLOCKS_MLP_H

#include "engine/forward.h"
#include "engine/weights.h"

struct mlp {
    int64_t width;                         /* intermediate_size */
    struct matrix *gate_up;                /* [2 * width, hidden_size] */
    struct matrix *down;                   /* [hidden_size, width] */
    const float *gate_up_bias, *down_bias; /* NULL where the model has none */
};

/* Tensors gate_proj, up_proj and down_proj under `prefix` in the loader's scope. */
enum status mlp_load(struct loader *l, const struct model *m, const char *prefix, int64_t width,
                     struct mlp *out, struct error *error);
void mlp_plan(struct forward *f);
void mlp_run(struct forward *f, const struct mlp *mlp);

/* The part in front of down_proj, for the shared expert too: values are those of the MLP at hand. */
struct mlp_values {
    enum value_id activation, neurons;
};
struct mlp_scratch {
    struct tensor gate_up;    /* [T, 2 * width] */
    struct tensor neurons;    /* [T, width]: what down_proj reads, so its rows lie end to end */
    struct tensor activation; /* [T, width], where wanted */
};
struct mlp_scratch mlp_take_scratch(struct forward *f, int64_t width, const struct mlp_values *values);
/* Returns the neurons [T, width]. */
struct tensor mlp_run_neurons(struct forward *f, const struct mlp *mlp, struct mlp_scratch *scratch,
                              const struct mlp_values *values);

#endif
