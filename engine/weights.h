/* Takes a model's weights from its checkpoint to a backend.
 *
 * One walk of the code that names every tensor serves three ends: without a checkpoint it counts what the
 * weights will take; with one it checks each tensor's shape, and loads those that the forward needs, straight
 * from the mapped file, one after another. What has been loaded is owned by the struct weights. */
#ifndef ACTDUMP_ENGINE_WEIGHTS_H
#define ACTDUMP_ENGINE_WEIGHTS_H

#include "engine/safetensors.h"
#include "kernels/backend.h"

/* Everything loaded, for the backend's release. */
struct weights {
    struct backend *backend;
    struct matrix **matrices;
    void **vectors;
    int64_t n_matrices, n_vectors; /* loaded so far */
};

void weights_fini(struct weights *weights);

struct loader {
    struct backend *backend;
    const struct checkpoint *checkpoint; /* NULL: count only */
    struct weights *weights;             /* with a checkpoint: room for all that was counted */
    enum dtype compute;                  /* of matrix products */
    int depth; /* the last sublayer that runs: LOADER_STEPS * layer + step; what lies past it is only checked
                */
    bool is_needed;  /* whether the tensors named next are loaded; set by loader_enter */
    double share;    /* of the tokens that pass through the matrices named next: 1 but for experts */
    char scope[128]; /* goes in front of the names */
    /* what the walk finds */
    int64_t n_matrices, n_vectors, n_tensors;
    size_t bytes;                          /* on the backend */
    double multiply_adds;                  /* a token, in matrix products */
    const struct checkpoint_tensor **used; /* [n_tensors of the counting walk], with a checkpoint */
};

/* Steps of a block, in the order of a forward: each needs the weights of those before it. */
enum loader_step { STEP_INPUT, STEP_MIXER_NORM, STEP_MIXER, STEP_MLP_NORM, STEP_MLP, LOADER_STEPS };

/* The names that follow belong to this step of this block, and start with this scope. */
void loader_enter(struct loader *l, int layer, enum loader_step step, const char *scope, ...)
    __attribute__((format(printf, 4, 5)));

/* A matrix [n, k]; NULL at *out where it is not needed or only counted. */
enum status loader_matrix(struct loader *l, const char *name, int64_t n, int64_t k, struct matrix **out,
                          struct error *error);

struct loader_part {
    const char *name;
    int64_t rows;
};

/* Matrices that read the same input, as one of all their rows. At most 4. */
enum status loader_fused(struct loader *l, const struct loader_part *parts, int n_parts, int64_t k,
                         struct matrix **out, struct error *error);
/* Vectors end to end, in float32. */
enum status loader_fused_vector(struct loader *l, const struct loader_part *parts, int n_parts,
                                const float **out, struct error *error);
enum status loader_vector(struct loader *l, const char *name, int64_t n, const float **out,
                          struct error *error);
/* conv1d.weight [channels, 1, kernel] as [kernel, channels]. */
enum status loader_conv(struct loader *l, const char *name, int64_t channels, int64_t kernel,
                        const float **out, struct error *error);
/* A_log [channels, state_dim] as A [state_dim, channels], A = -exp(A_log); a state_dim of 0: a vector
 * [channels]. */
enum status loader_decay(struct loader *l, const char *name, int64_t channels, int64_t state_dim,
                         const float **out, struct error *error);
/* The embedding [rows, cols] in the compute dtype, as a table in the backend's memory. */
enum status loader_table(struct loader *l, const char *name, int64_t rows, int64_t cols, struct tensor *out,
                         struct error *error);
/* Where the next matrix will be put: experts, loaded one after another, are an array. NULL while counting. */
struct matrix *const *loader_next(const struct loader *l);

/* Marks a tensor as known that may be there without being read (a tied lm_head). */
void loader_ignore(struct loader *l, const char *name);
/* Fails on a tensor of the checkpoint that no weight is made of, naming it. */
enum status loader_check_leftovers(const struct loader *l, struct error *error);

#endif
