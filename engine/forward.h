/* One forward pass at work: what the blocks share. A replica owns one and runs every batch through it.
 *
 * The same struct serves planning: blocks take their scratch tensors from an arena, which only measures while
 * a plan is made, so that what a run uses is what was planned. While planning nothing else of the batch is
 * set.
 *
 * The pass counts the sites that are still wanted; when the last has been offered it is `done`, and the
 * functions here and in engine/blocks do nothing more, so that a family's forward reads without ifs. */
#ifndef ACTDUMP_ENGINE_FORWARD_H
#define ACTDUMP_ENGINE_FORWARD_H

#include "engine/replica.h"
#include "kernels/base/memory.h"

/* Rotary embedding of one kind of attention block, on the backend: [max_position, rotary_dim / 2] each. */
struct rotary_table {
    float *cosine, *sine;
};

struct forward {
    const struct model *model;
    struct backend *backend;
    const struct observer *observer;
    struct replica_limits limits;
    uint64_t
        *wanted; /* [n_layers + 1] a bit for each value; [0]: the model's, [1 + i]: layer i's. Borrowed */
    int64_t n_wanted;   /* sites in all */
    int64_t token_rows; /* max_tokens, rounded up as the backend wants it */

    /* [token_rows, hidden_size], through the whole pass */
    struct tensor stream;          /* the residual stream */
    struct tensor normed;          /* what the sublayer at hand reads */
    struct tensor out;             /* what it adds */
    struct rotary_table rotary[2]; /* of full and of sliding blocks */
    struct arena scratch;          /* of the sublayer at hand; taken anew by each */
    size_t scratch_peak;           /* the most that one took, while planning */
    struct tensor zeros;           /* [1, width of a state]: a state before the first token */
    void *piece;                   /* the buffer for large intermediates */
    size_t piece_bytes;

    /* host memory for lists of rows */
    char *marks;          /* [max_tokens] */
    int32_t *identity;    /* [max of max_tokens, max_windows]: 0, 1, 2, ... */
    int32_t *marked;      /* [max_tokens] the rows that were marked */
    int32_t *relative[2]; /* [max_tokens] rows counted from a piece's first */
    struct run *clipped;  /* [max_windows] runs of a piece */
    float *host_floats;   /* [max_tokens + 1, heads of a Mamba-2 mixer] where its decays are wanted */

    /* this batch */
    const struct batch *batch;
    int64_t n_tokens;
    struct runs runs;
    int layer;      /* at hand; -1: values of the model */
    int64_t n_left; /* wanted sites not yet offered */
    bool done;
};

/* ---- sites ---- */

/* Is the value wanted at the layer at hand? */
bool forward_wants(const struct forward *f, enum value_id value);
/* The rows of this batch that are wanted of it; none where it is not wanted. */
struct row_list forward_rows(const struct forward *f, enum value_id value);
/* Offers a value of every token, and closes its site. */
void forward_offer(struct forward *f, enum value_id value, struct tensor data);
/* Offers some rows: row i of data is the batch's row rows[i] (or window). Leaves the site open for more. */
void forward_offer_piece(struct forward *f, enum value_id value, struct tensor data, const int32_t *rows,
                         int64_t n);
/* No more of this value will come. */
void forward_close(struct forward *f, enum value_id value);

/* ---- steps that blocks of all kinds have ---- */

static inline const struct block *forward_block(const struct forward *f)
{
    return &f->model->blocks[f->layer];
}
/* normed = norm of the stream, offered as `value`. */
void forward_norm(struct forward *f, const float *weight, enum value_id value);
/* The sublayer's last product, x [T, k] to hidden_size, added to the stream; offered as `value` on the way
 * where that is wanted. */
void forward_project(struct forward *f, struct tensor x, const struct matrix *matrix, const float *bias,
                     enum value_id value);

/* ---- buffers ---- */

/* A scratch tensor for `rows` rows (at most; the view starts with none), until the next sublayer takes its
 * own. */
struct tensor forward_take(struct forward *f, int64_t rows, int64_t cols, enum dtype dtype);
/* The same where a value is wanted, else a tensor without data. */
struct tensor forward_take_if(struct forward *f, bool is_wanted, int64_t cols, enum dtype dtype);
/* A row for each token of this batch. */
static inline struct tensor forward_tokens(const struct forward *f, struct tensor t)
{
    t.rows = f->n_tokens;
    return t;
}
/* How many rows of row_bytes fit `share` of the buffer for pieces, at least 1. */
int64_t forward_piece_rows(const struct forward *f, size_t row_bytes, int share);
int64_t forward_round_rows(int64_t rows);

/* ---- pieces: a batch cut into stretches of tokens so that few enough rows of large values fall into each
 * ---- */

struct cut {
    struct row_list wanted[2]; /* of values written out by the same operation, ascending */
    int64_t max_rows[2];       /* that fit the buffer */
    int64_t stop;              /* a token at which to cut besides; 0: none */
    /* the piece at hand */
    int64_t first, n;            /* tokens */
    struct row_list absolute[2]; /* its part of the wanted rows, as rows of the batch */
    struct row_list relative[2]; /* the same, counted from `first` */
    struct runs runs;            /* clipped to it, counted from `first`; the first may start within a run */
    int64_t run;                 /* which run of the batch the first of them is */
};

/* Goes on to the next piece; false after the last. Start with a cut whose piece is empty: first and n zero.
 */
bool forward_cut(struct forward *f, struct cut *cut);

/* Rows gathered one by one into a list: mark, then collect (which clears the marks). */
void forward_mark(struct forward *f, int64_t row);
void forward_mark_all(struct forward *f, struct row_list rows);
struct row_list forward_collect(struct forward *f);

#endif
