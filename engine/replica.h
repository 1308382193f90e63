/* A resident model: weights on a backend, workspace planned for the largest batch, and the forward pass that offers
 * each value to an observer as it comes to it.
 *
 * Only what is wanted is computed. The observer says at creation which values it will want, at which layers; weights
 * past the last wanted site are not even loaded, the forward ends there, lm_head is applied to wanted rows only, and
 * large intermediates (scores, states, decays, per-slot expert outputs, logits) are written out for wanted rows only,
 * in pieces that fit a bounded buffer.
 *
 * Threads: a replica belongs to one thread. */
#ifndef ACTDUMP_ENGINE_REPLICA_H
#define ACTDUMP_ENGINE_REPLICA_H

#include "engine/model.h"
#include "kernels/backend.h"

struct replica;

/* A batch: windows of documents packed end to end. A window is what the corpus calls a sequence; without carry each is
 * a run of its own. With carry, consecutive windows of one document in a batch form one run, and the first run may go
 * on from the batch before. All arrays are host memory, borrowed for the call. */
struct batch {
    int64_t n_tokens;
    const int32_t *ids;             /* [n_tokens], each already checked against vocab_size */
    int64_t n_windows;
    const int32_t *window_start;    /* [n_windows + 1] rows; the last is n_tokens */
    const int32_t *window_position; /* [n_windows] position of the window's first token in its run */
    bool carry_in;                  /* window 0 goes on where the last batch's last window ended */
    bool carry_out;                 /* the next batch goes on from this one's last window */
};

/* Some rows of one value. Row i of data belongs to batch row rows[i] (a token, or a window for a PER_SEQUENCE value);
 * rows NULL: to row i. */
struct piece {
    struct tensor data; /* [n, width] in the backend's memory, valid during the call; may be edited in place where the
                           forward goes on to use it (residual streams, norms, projections) */
    const int32_t *rows;
    int64_t n;
};

/* Who watches. Calls come from the replica's thread, in the order of the forward. */
struct observer {
    void *context;
    /* Asked at creation and in every batch: is this value wanted at this layer (layer -1 for model values)? */
    bool (*wants)(void *context, enum value_id value, int layer);
    /* The rows of this batch that are wanted of it: ascending token rows, or windows for a PER_SEQUENCE value. Valid
     * until the next batch. The answer may be empty. */
    struct row_list (*rows)(void *context, enum value_id value, int layer);
    /* Takes a look at a piece that holds at least the wanted rows; a value may come in several pieces, whose rows ascend
     * over the batch. */
    void (*offer)(void *context, enum value_id value, int layer, const struct piece *piece);
};

struct replica_limits {
    int64_t max_tokens;   /* of a batch */
    int64_t max_windows;  /* of a batch */
    int64_t max_position; /* longest run: context, or the longest document with carry */
    bool carry;
    size_t piece_bytes;   /* of the buffer for large intermediates; 0: 64 MiB. At least one row is always held */
};

struct replica_memory {
    size_t weights, workspace, carry; /* bytes on the backend */
};

/* What a replica would take, from the config alone. */
enum status replica_plan(const struct model *model, struct backend *backend, const struct observer *observer,
                         const struct replica_limits *limits, struct replica_memory *out, struct error *error);

/* Loads the weights that are needed from the model's checkpoint and allocates everything. Borrows model, backend and
 * observer until replica_destroy. Returns owned at *out. */
enum status replica_create(const struct model *model, struct backend *backend, const struct observer *observer,
                           const struct replica_limits *limits, struct replica **out, struct error *error);
void replica_destroy(struct replica *replica); /* NULL is fine */

/* Runs one batch. Allocates nothing. */
enum status replica_forward(struct replica *replica, const struct batch *batch, struct error *error);
/* The same without waiting for a device: its work is queued, in the order of the calls, and a failure of it shows
 * later, at the backend's synchronize at the latest. The batch's arrays may be changed when it returns. */
enum status replica_start(struct replica *replica, const struct batch *batch, struct error *error);

/* Multiply-adds that one token costs in matrix products under the plan, for benchmarks: attention and scans excluded. */
double replica_gemm_flops_per_token(const struct replica *replica);

#endif
