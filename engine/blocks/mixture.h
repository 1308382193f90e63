/* A mixture of experts, each a gated MLP, of which a router chooses top_k for every token (transformers
 * modeling_jamba.py, JambaSparseMoeBlock; modeling_laguna.py, LagunaSparseMoeBlock):
 *
 *   w, e = route(router(u))     u' = scale * sum over slots of w * expert_e(u) + shared_expert(u)
 *
 * Runs grouped by expert: one product for each expert that has tokens. */
#ifndef ACTDUMP_ENGINE_BLOCKS_MIXTURE_H
#define ACTDUMP_ENGINE_BLOCKS_MIXTURE_H

#include "engine/blocks/mlp.h"

struct mixture {
    struct matrix *router;          /* [n_experts, hidden_size] */
    const float *selection_bias;    /* [n_experts]; NULL without sigmoid routing */
    struct matrix *const *gate_ups; /* [n_experts] of [2 * width, hidden_size] */
    struct matrix *const *downs;    /* [n_experts] of [hidden_size, width] */
    struct mlp shared;              /* where the model has a shared expert */
};

/* router: the router's own name in the loader's scope, under which experts.N and shared_expert lie beside it.
 */
enum status mixture_load(struct loader *l, const struct model *m, const char *router, struct mixture *out,
                         struct error *error);
void mixture_plan(struct forward *f);
/* Bytes that a token's row of a large value takes in the buffer for pieces: the widest that is wanted. */
size_t mixture_row_bytes(const struct forward *f);
void mixture_run(struct forward *f, const struct mixture *mixture);

#endif
