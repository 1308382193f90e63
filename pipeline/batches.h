/* A unit's sequences as batches: taken in order, packed end to end while they fit.
 *
 * Where batches end depends on the unit, batch_tokens and the sequences' lengths alone, so that any rank runs
 * the same ones. All memory is allocated at creation. */
#ifndef ACTDUMP_PIPELINE_BATCHES_H
#define ACTDUMP_PIPELINE_BATCHES_H

#include "pipeline/plan.h"

struct batches;

/* Borrows plan and corpus until batches_destroy. Returns owned at *out. */
enum status batches_create(const struct plan *plan, struct corpus *corpus, struct batches **out,
                           struct error *error);
void batches_destroy(struct batches *batches); /* NULL is fine */

/* Starts with the first sequence of a unit. */
void batches_begin(struct batches *batches, int64_t unit);
/* The next batch and its sequences ([batch->n_windows]), both borrowed until the next call; *have false at
 * the unit's end. */
enum status batches_next(struct batches *batches, struct batch *batch, const struct sequence **sequences,
                         bool *have, struct error *error);

#endif
