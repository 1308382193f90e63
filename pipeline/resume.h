/* Finding out what of a store is done already, and cleaning up after a job that died. */
#ifndef ACTDUMP_PIPELINE_RESUME_H
#define ACTDUMP_PIPELINE_RESUME_H

#include "pipeline/manifest.h"

/* Rank 0, with the store's lock held. Creates the store's folders where missing. Goes on with an earlier
 * store.json that fits (manifest_compare): records of committed segments move into now->segments,
 * done[now->n_units] is set for them; a segment that is recorded but altered, or whole but not readable, is
 * removed and done anew. Temporary files are removed. Writes store.json unless nothing is left to do;
 * now->complete says whether that was recorded already. */
enum status resume_prepare(struct store *now, struct corpus *corpus, bool *done, struct error *error);

#endif
