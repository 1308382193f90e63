/* Grouped-query attention over each run (transformers modeling_jamba.py, modeling_bamba.py,
 * modeling_laguna.py), with what its family has of biases, norms on queries and keys, rotary embedding, a
 * window, and a softplus gate:
 *
 *   q, k, v = projections(u)   q, k = rotary(norm(q)), rotary(norm(k))   y = softmax(q k^T / sqrt(head_dim))
 * v u + o_proj(y * softplus(g_proj(u))) */
#ifndef ACTDUMP_ENGINE_BLOCKS_ATTENTION_H
#define ACTDUMP_ENGINE_BLOCKS_ATTENTION_H

#include "engine/forward.h"
#include "engine/weights.h"

/* Keys and values of the run that goes on from batch to batch; NULL without carry. */
struct key_cache {
    struct tensor keys, values; /* [max_position, kv heads * head_dim] */
};

struct attention {
    struct matrix *qkv;    /* [(heads + 2 * kv heads) * head_dim, hidden_size] */
    struct matrix *gate;   /* [heads or heads * head_dim, hidden_size]; NULL without a gate */
    struct matrix *o_proj; /* [hidden_size, heads * head_dim] */
    const float *qkv_bias, *o_bias, *q_norm, *k_norm; /* NULL where the model has none */
    struct key_cache cache;
};

enum status attention_load(struct loader *l, const struct model *m, const struct block *block,
                           struct attention *out, struct error *error);
void attention_plan(struct forward *f);
void attention_take_cache(const struct forward *f, struct arena *arena, struct key_cache *out);
/* Bytes that a token's row of scores and probabilities takes in the buffer for pieces. */
size_t attention_row_bytes(const struct forward *f);
void attention_run(struct forward *f, const struct attention *attention);

#endif
