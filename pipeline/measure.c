#include "pipeline/measure.h"

#include "pipeline/batches.h"
#include "pipeline/clock.h"

/* Runs the next batch of the job, going on to the next unit where one ends. *n_tokens is 0 at the corpus'
 * end. */
static enum status run_next(const struct plan *plan, struct batches *batches, struct replica *replica,
                            struct watch *watch, int64_t *unit, int64_t *n_tokens, struct error *error)
{
    struct batch batch;
    const struct sequence *sequences;
    bool have = false;
    *n_tokens = 0;
    TRY(batches_next(batches, &batch, &sequences, &have, error));
    while (!have && *unit + 1 < plan->n_units) {
        batches_begin(batches, ++*unit);
        TRY(batches_next(batches, &batch, &sequences, &have, error));
    }
    if (!have)
        return STATUS_OK;
    TRY(watch_begin_batch(watch, &batch, sequences, error));
    TRY(replica_start(replica, &batch, error));
    *n_tokens = batch.n_tokens;
    return watch_end_batch(watch, error);
}

/* What measure_rate makes and ends. */
struct measured {
    const struct plan *plan;
    struct backend *backend;
    struct watch *watch;
    struct batches *batches;
    struct replica *replica;
};

static enum status time_batches(const struct measured *m, int64_t n_batches, double *rate,
                                struct error *error)
{
    int64_t unit = 0, tokens = 0, n;
    double warm_s = 0, start;
    batches_begin(m->batches, 0);
    start = clock_seconds();
    TRY(run_next(m->plan, m->batches, m->replica, m->watch, &unit, &n, error));
    TRY(m->backend->ops->synchronize(m->backend, error));
    warm_s = clock_seconds() - start;
    *rate = (double)n / warm_s;
    start = clock_seconds();
    for (int64_t i = 0; i < n_batches; i++) {
        TRY(run_next(m->plan, m->batches, m->replica, m->watch, &unit, &n, error));
        tokens += n;
    }
    TRY(m->backend->ops->synchronize(m->backend, error));
    if (tokens > 0)
        *rate = (double)tokens / (clock_seconds() - start);
    return STATUS_OK;
}

enum status measure_rate(const struct plan *plan, struct corpus *corpus, struct backend *backend,
                         struct watch *watch, int64_t n_batches, double *rate, struct error *error)
{
    struct measured m = {.plan = plan, .backend = backend, .watch = watch};
    enum status status;
    watch_connect(watch, backend, NULL);
    TRY_ELSE(batches_create(plan, corpus, &m.batches, error), done);
    TRY_ELSE(replica_create(plan->model, backend, watch_observer(watch), &plan->limits, &m.replica, error),
             done);
    status = time_batches(&m, n_batches, rate, error);
done:
    replica_destroy(m.replica);
    batches_destroy(m.batches);
    return status;
}
