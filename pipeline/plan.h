/* What a job will do, before it does it: units, batches, datasets, rows, bytes.
 *
 * Everything here follows from the job, the model's config and the corpus, never from ranks: units are cut
 * from the corpus' front, batches from a unit's front. A corpus that grows at its end keeps all its units but
 * the last. */
#ifndef ACTDUMP_PIPELINE_PLAN_H
#define ACTDUMP_PIPELINE_PLAN_H

#include "engine/replica.h"
#include "pipeline/capture.h"
#include "pipeline/layout.h"

struct plan {
    const struct job *job;     /* borrowed */
    const struct model *model; /* borrowed */
    int64_t n_sequences, n_tokens;
    int64_t n_units;
    int64_t *unit_start;           /* [n_units + 1] first sequence of each unit */
    int64_t *unit_tokens;          /* [n_units] */
    int64_t longest, largest_unit; /* tokens of a sequence, of a unit */
    int64_t batch_tokens; /* a batch takes windows while they fit; a longer window is a batch of its own */
    int64_t n_keys;       /* key axis of scores and probabilities */
    struct replica_limits limits;
    struct capture_list captures;
    struct layout layout;
    int64_t *first_dataset; /* [n_captures] index in the layout of each capture's rows/sequence; its
                               rows/position and rows/input_ids follow, then its columns in order */
};

/* The datasets of /sequences come first in the layout, in this order. */
enum { DATASET_DOCUMENT, DATASET_START, DATASET_LENGTH, DATASET_CONTINUES, DATASET_SEQUENCES_COUNT };

/* Borrows job, model and corpus (the last for the call only). Returns owned at *out. */
enum status plan_create(const struct job *job, const struct model *model, struct corpus *corpus,
                        struct plan **out, struct error *error);
void plan_free(struct plan *plan); /* NULL is fine */

/* Cuts batches anew: what "auto" came to. Before anything is made from the plan. */
enum status plan_set_batch_tokens(struct plan *plan, int64_t batch_tokens, struct error *error);
/* The backend makes float16 of what is stored as such, and counts what overflows by it: rows reach the writer
 * as they are stored. Before the layout is used. */
void plan_expect_converted(struct plan *plan);

/* Rows that each capture will have, exactly: rows[n_captures]. Reads the corpus only where skip_ids asks for
 * ids. */
enum status plan_count_rows(const struct plan *plan, struct corpus *corpus, int64_t *rows,
                            struct error *error);

/* Whose row it is: the sequence, and the position in it, of row `row` of a capture in a unit. Reads the
 * unit's sequences anew. *sequence is -1 where the unit has no such row. */
enum status plan_find_row(const struct plan *plan, struct corpus *corpus, int64_t unit, int64_t capture,
                          int64_t row, struct sequence *sequence, int64_t *position, struct error *error);

/* Raw bytes that a unit's tokens come to at most, positions chosen as the captures say. */
enum status plan_unit_bytes(const struct plan *plan, struct corpus *corpus, int64_t unit, int64_t *bytes,
                            struct error *error);

/* Raw bytes of a capture's column over the job, given the capture's rows. */
int64_t plan_column_bytes(const struct plan *plan, const struct column *column, int64_t capture_rows);

#endif
