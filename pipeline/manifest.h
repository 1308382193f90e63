/* store.json's contents made from a plan, and two of them held against each other when a job is resumed. */
#ifndef ACTDUMP_PIPELINE_MANIFEST_H
#define ACTDUMP_PIPELINE_MANIFEST_H

#include "pipeline/plan.h"
#include "pipeline/store.h"

struct manifest_facts {
    const char *checkpoint_digest; /* 32 hexadecimal digits */
    int64_t checkpoint_bytes;
    const char *backend; /* struct backend's name */
    int n_threads;
};

/* Everything store.json says before any unit is done. Borrows the plan's layout and units. Reads the corpus
 * for its digests. Returns owned at *out (manifest_free). */
enum status manifest_create(const struct plan *plan, struct corpus *corpus,
                            const struct manifest_facts *facts, struct store **out, struct error *error);
void manifest_free(struct store *manifest); /* NULL is fine */

/* Whether a job described by `now` may go on with a store described by `then`: refused (STATUS_USAGE) naming
 * every difference in model, corpus, captures, datasets and geometry. keep[now->n_units] says which units of
 * `then` are units of `now`: all but the last of a corpus that grew. Differences that may only change
 * rounding (backend, threads) are logged. */
enum status manifest_compare(const struct store *then, const struct store *now, struct corpus *corpus,
                             bool *keep, struct error *error);

#endif
