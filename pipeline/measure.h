/* How fast a job's forward runs here. */
#ifndef ACTDUMP_PIPELINE_MEASURE_H
#define ACTDUMP_PIPELINE_MEASURE_H

#include "pipeline/watch.h"

/* Loads the weights and runs the job's first batches, one to warm up and n_batches timed (fewer where the
 * corpus has no more), choosing rows and dropping them. *rate: tokens a second. */
enum status measure_rate(const struct plan *plan, struct corpus *corpus, struct backend *backend,
                         struct watch *watch, int64_t n_batches, double *rate, struct error *error);

#endif
