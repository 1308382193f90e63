/* `actdump run`: one rank's part of a job, from job file to committed store. */
#ifndef ACTDUMP_PIPELINE_RUN_H
#define ACTDUMP_PIPELINE_RUN_H

#include "pipeline/job.h"
#include "pipeline/ranks.h"

/* Collective. STATUS_OK: the store is complete. STATUS_STOPPED: a signal or time limit; run again to go on.
 * Otherwise the failure that all ranks agreed on, in `error` on every rank. */
enum status run_job(const struct job *job, struct ranks *ranks, struct error *error);

#endif
