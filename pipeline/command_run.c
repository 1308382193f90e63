#include "kernels/base/log.h"
#include "pipeline/commands.h"
#include "pipeline/job.h"
#include "pipeline/options.h"
#include "pipeline/ranks.h"
#include "pipeline/run.h"
#include "pipeline/stop.h"

#include <stdio.h>

static enum status run_with_ranks(const struct options *options, struct ranks *ranks)
{
    struct log_options log = options->log;
    struct job *job = NULL;
    struct error mine = {0};
    log.rank = ranks_rank(ranks);
    log.n_ranks = ranks_count(ranks);
    log_configure(&log);
    job_read(options->operand, options->sets, options->n_sets, &job, &mine);
    if (ranks_agree(ranks, &mine) == STATUS_OK)
        run_job(job, ranks, &mine);
    job_free(job);
    enum status status = mine.status;
    /* All ranks have agreed: one says it, and before any leaves, since launchers end the others when one has
     * gone. */
    if (ranks_rank(ranks) == 0 && status == STATUS_STOPPED)
        log_warning("stopped (%s); the same command goes on from here", mine.text);
    else if (ranks_rank(ranks) == 0 && status != STATUS_OK)
        log_error("%s", mine.text);
    return status;
}

static enum status run(int argc, char **argv, struct error *error)
{
    struct options options;
    struct ranks *ranks;
    TRY(options_read(&command_run, OPTION_SET | OPTION_LOG, argc, argv, &options, error));
    if (options.help) {
        fputs(command_run.help, stdout);
        return STATUS_OK;
    }
    log_configure(&options.log);
    TRY(ranks_init(&argc, &argv, &ranks, error));
    stop_install(); /* after MPI, whose launchers install handlers of their own */
    enum status status = run_with_ranks(&options, ranks);
    ranks_finish(ranks);
    return status;
}

const struct command command_run = {
    .name = "run",
    .summary = "run a job: stream the corpus through the model, write the store",
    .help = "usage: actdump run JOB.json [--set KEY=VALUE ...] [--log-level LEVEL] [--log-format FORMAT] "
            "[--quiet]\n"
            "       mpirun -n N actdump run JOB.json ...\n\n"
            "Runs the job, alone or on all ranks of a launcher. A job that was stopped or that died is gone "
            "on with by\n"
            "the same command, with any number of ranks. A finished one does nothing.\n\n"
            "  --set KEY=VALUE     overrides one key of the job file: --set model.dtype=bfloat16, --set "
            "corpus.limit=100\n"
            "  --log-level LEVEL   error, warning, info (default) or debug (a line for each unit)\n"
            "  --log-format FORMAT text (default) or json: one object a line\n"
            "  --quiet             the same as --log-level warning\n\n"
            "SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 to any rank stop all of them within run.grace_seconds: "
            "status 75.\n",
    .run = run,
};
