/* Captures made concrete: a job's captures against a model, as lists of columns (one dataset each) and a choice of rows.
 *
 * Named values that none of the chosen layers has are refused with the model's reason (STATUS_USAGE); globs take what
 * there is, and one that takes nothing is refused too. */
#ifndef ACTDUMP_PIPELINE_CAPTURE_H
#define ACTDUMP_PIPELINE_CAPTURE_H

#include "engine/model.h"
#include "pipeline/job.h"

/* One dataset of a capture. */
struct column {
    enum value_id value;
    int layer;       /* -1 for model values */
    char path[160];  /* inside the capture's group: "logits", "layers/3/linear_attn/states" */
    struct value_description shape;
    enum value_per per;
    enum dtype dtype;  /* stored */
    int64_t row_bytes; /* stored */
    int64_t chunk_rows;
};

struct capture {
    const struct job_capture *spec; /* borrowed from the job */
    struct column *columns;
    int64_t n_columns;
    bool has_token_columns, has_sequence_columns;
};

struct capture_list {
    struct capture *list;
    int64_t n;
};

/* n_keys: size of the key axis of scores and probabilities. Returns owned contents (capture_list_free). */
enum status capture_resolve(const struct job *job, const struct model *model, int64_t n_keys,
                            struct capture_list *out, struct error *error);
void capture_list_free(struct capture_list *captures);

/* The positions of a sequence that the capture keeps, ascending, into positions[length]; returns how many. Depends on
 * nothing but its arguments, so that any rank gives the same rows. */
int64_t capture_select(const struct positions *p, int64_t sequence, const int32_t *ids, int64_t length,
                       int32_t *positions);

/* Rows a chunk of rows of row_bytes: wanted, or fewer so that a chunk stays within 4 MiB, at least 1. */
int64_t capture_chunk_rows(int64_t wanted, int64_t row_bytes);

#endif
