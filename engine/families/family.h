/* The families: what is particular to each architecture. A family's file reads like the architecture's
 * description: its config's keys, its tensors' names, the order of a block. The arithmetic is in
 * engine/blocks and in the backend. */
#ifndef ACTDUMP_ENGINE_FAMILIES_FAMILY_H
#define ACTDUMP_ENGINE_FAMILIES_FAMILY_H

#include "engine/config.h"

struct family {
    const char *name;         /* config.json's model_type */
    const char *architecture; /* config.json's architectures: the class that the weights are of */
    /* Fills the model's sizes and options and model->blocks, which it allocates with model_allocate_blocks.
     */
    enum status (*read_config)(const struct json_object *config, struct model *model, struct error *error);
};

extern const struct family family_mamba, family_jamba, family_bamba, family_laguna;

/* Reads num_hidden_layers and allocates model->blocks, zeroed. */
enum status model_allocate_blocks(const struct json_object *config, int fallback, struct model *model,
                                  struct error *error);

#endif
