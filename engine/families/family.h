/* The families: what is particular to each architecture. A family's file reads like the architecture's
 * description: its config's keys, its tensors' names, the order of a block. The arithmetic is in
 * engine/blocks and in the backend. */
#ifndef ACTDUMP_ENGINE_FAMILIES_FAMILY_H
#define ACTDUMP_ENGINE_FAMILIES_FAMILY_H

#include "engine/blocks/attention.h"
#include "engine/blocks/mamba1.h"
#include "engine/blocks/mamba2.h"
#include "engine/blocks/mixture.h"
#include "engine/blocks/mlp.h"
#include "engine/config.h"

/* The weights of one block; of the mixers and of the feed-forward parts, the one that the block has. */
struct layer {
    const float *mixer_norm, *mlp_norm; /* [hidden_size] */
    struct mamba1 mamba1;
    struct mamba2 mamba2;
    struct attention attention;
    struct mlp mlp;
    struct mixture mixture;
};

struct family {
    const char *name;         /* config.json's model_type */
    const char *architecture; /* config.json's architectures: the class that the weights are of */
    /* Fills the model's sizes and options and model->blocks, which it allocates with model_allocate_blocks.
     */
    enum status (*read_config)(const struct json_object *config, struct model *model, struct error *error);
    const char *embedding, *final_norm; /* tensors */
    const char *old_embedding;          /* what older checkpoints call it; NULL: nothing else */
    /* Names every tensor of the block to the loader. */
    enum status (*load_block)(struct loader *loader, const struct model *model, int layer, struct layer *out,
                              struct error *error);
    /* Takes the stream through block f->layer. */
    void (*run_block)(struct forward *f, const struct layer *layer);
};

extern const struct family family_mamba, family_jamba, family_bamba, family_laguna;

/* Reads num_hidden_layers and allocates model->blocks, zeroed. */
enum status model_allocate_blocks(const struct json_object *config, int fallback, struct model *model,
                                  struct error *error);

#endif
