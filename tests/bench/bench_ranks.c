/* What the hand-out of units costs: ranks.c and schedule.c with units of no work.
 *
 *   mpirun -n RANKS bench_ranks [--units N] [--captures N] [--work SECONDS] [--batches N] [--ahead]
 *                               [--only-others] [--stop-at UNIT] [--fail-at UNIT]
 *   bench_ranks --manifest STORE FOLDER [--units N]
 *
 * Each rank takes units until none is left: for each it sleeps --work seconds in --batches batches, reports
 * the tokens of each batch and one record of --captures counts. --ahead asks for the next unit before the
 * last batch, as `run` does. --only-others: rank 0 answers and takes none. At the end every unit must have
 * been done exactly once, or status 6; with --stop-at or --fail-at the rank that gets that unit stops all,
 * and no unit may have been done twice. Rank 0 prints one JSON object: units/s, and the seconds of rank 0's
 * processor and of a rank's waiting that a unit cost.
 *
 * --manifest: how long store.json takes to write where the store has N units, from a store that is there. */
#include "kernels/base/memory.h"
#include "pipeline/clock.h"
#include "pipeline/ranks.h"
#include "pipeline/store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

struct options {
    int64_t n_units, n_captures, n_batches, stop_at, fail_at;
    double work_s;
    bool ahead, only_others;
    const char *store, *folder;
};

/* Rank 0's. */
struct book {
    int64_t *times;  /* [n_units] how often each was done */
    int64_t *tokens; /* [n_units] */
};

struct tally {
    int64_t n_units;
    double waited_s, waited_most_s;
};

static bool read_number(const char *name, const char *text, struct options *o)
{
    const struct {
        const char *name;
        int64_t *to;
    } names[] = {{"--units", &o->n_units},
                 {"--captures", &o->n_captures},
                 {"--batches", &o->n_batches},
                 {"--stop-at", &o->stop_at},
                 {"--fail-at", &o->fail_at}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i].name) == 0) {
            *names[i].to = atoll(text);
            return true;
        }
    }
    if (strcmp(name, "--work") != 0)
        return false;
    o->work_s = atof(text);
    return true;
}

static bool read_options(int argc, char **argv, struct options *o)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--ahead") == 0)
            o->ahead = true;
        else if (strcmp(argv[i], "--only-others") == 0)
            o->only_others = true;
        else if (strcmp(argv[i], "--manifest") == 0 && i + 2 < argc) {
            o->store = argv[++i];
            o->folder = argv[++i];
        } else if (i + 1 < argc && read_number(argv[i], argv[i + 1], o))
            i++;
        else
            return false;
    }
    return o->n_units >= 1 && o->n_captures >= 0 && o->n_batches >= 1;
}

static void fail(const char *what)
{
    fprintf(stderr, "bench_ranks: %s\n", what);
    exit(STATUS_BUG);
}

static double processor_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* ---------------------------------------------------------------- units */

static void on_record(void *context, struct segment_record *record)
{
    struct book *book = context;
    book->times[record->unit]++;
    segment_record_fini(record);
}

static void report(struct ranks *ranks, const struct options *o, int64_t unit)
{
    struct segment_record record = {
        .unit = unit, .n_sequences = 1, .n_tokens = o->n_batches, .bytes = 1, .raw_bytes = 1};
    void *rows;
    if (memory_allocate_array(&rows, (size_t)o->n_captures, sizeof(int64_t), "rows", NULL) != STATUS_OK)
        fail("no memory");
    record.n_rows = rows;
    ranks_report(ranks, &record);
}

/* False where all stop. */
static bool run_unit(struct ranks *ranks, const struct options *o, int64_t unit)
{
    struct error error = {0};
    for (int64_t i = 0; i < o->n_batches; i++) {
        if (ranks_poll(ranks) != STATUS_OK)
            return false;
        if (o->ahead && i == o->n_batches - 1)
            ranks_ask_ahead(ranks);
        if (o->work_s > 0)
            clock_sleep(o->work_s / (double)o->n_batches);
        ranks_report_tokens(ranks, 1);
    }
    if (unit == o->fail_at) {
        error_set(&error, STATUS_INPUT, "unit %lld was to fail", (long long)unit);
        ranks_report_failure(ranks, &error);
        return false;
    }
    if (unit == o->stop_at)
        ranks_report_stop(ranks, "the benchmark was to stop");
    report(ranks, o, unit);
    return true;
}

static struct tally run_units(struct ranks *ranks, const struct options *o)
{
    struct tally tally = {0};
    if (o->only_others && ranks_rank(ranks) == 0)
        return tally;
    for (;;) {
        struct assignment next;
        double start = clock_seconds();
        ranks_next_unit(ranks, &next);
        double waited = clock_seconds() - start;
        if (next.unit < 0)
            break;
        tally.waited_s += waited;
        tally.waited_most_s = waited > tally.waited_most_s ? waited : tally.waited_most_s;
        tally.n_units++;
        if (!run_unit(ranks, o, next.unit))
            break;
    }
    return tally;
}

/* ---------------------------------------------------------------- the whole */

/* How many units were not done exactly once; where all were to stop, how many more than once. */
static int64_t count_wrong(const struct options *o, const struct book *book)
{
    bool stops = o->stop_at >= 0 || o->fail_at >= 0;
    int64_t n_wrong = 0;
    for (int64_t u = 0; u < o->n_units; u++)
        n_wrong += stops ? book->times[u] > 1 : book->times[u] != 1;
    return n_wrong;
}

static struct schedule *make_schedule(const struct options *o, struct book *book)
{
    struct error error = {0};
    struct schedule *schedule;
    book->tokens = calloc((size_t)o->n_units, sizeof *book->tokens);
    bool *done = calloc((size_t)o->n_units, sizeof *done);
    book->times = calloc((size_t)o->n_units, sizeof *book->times);
    if (book->tokens == NULL || done == NULL || book->times == NULL)
        fail("no memory");
    for (int64_t u = 0; u < o->n_units; u++)
        book->tokens[u] = o->n_batches;
    struct schedule_options options = {.n_units = o->n_units,
                                       .unit_tokens = book->tokens,
                                       .done = done,
                                       .on_record = on_record,
                                       .context = book};
    if (schedule_create(&options, &schedule, &error) != STATUS_OK)
        fail(error.text);
    free(done);
    return schedule;
}

static int run(struct ranks *ranks, const struct options *o)
{
    struct error error = {0};
    struct book book = {0};
    struct schedule *schedule = ranks_rank(ranks) == 0 ? make_schedule(o, &book) : NULL;
    if (ranks_start(ranks, schedule, o->n_captures, &error) != STATUS_OK)
        fail(error.text);
    double start = clock_seconds(), processor = processor_seconds();
    struct tally tally = run_units(ranks, o);
    ranks_join(ranks);
    double seconds = clock_seconds() - start;
    double sums[3] = {(double)tally.n_units, tally.waited_s, 0};
    processor = processor_seconds() - processor;
    ranks_sum(ranks, sums, 3);
    struct error outcome = {0};
    int64_t n_wrong = 0;
    if (schedule != NULL) {
        schedule_status(schedule, &outcome);
        n_wrong = count_wrong(o, &book);
        printf("{\"ranks\": %d, \"units\": %.0f, \"seconds\": %.4f, \"units_s\": %.0f, "
               "\"rank_0_processor_us\": %.2f, \"waited_us\": %.1f, \"wrong\": %lld, \"status\": %d}\n",
               ranks_count(ranks), sums[0], seconds, sums[0] / seconds, processor / sums[0] * 1e6,
               sums[1] / sums[0] * 1e6, (long long)n_wrong, (int)outcome.status);
    }
    schedule_destroy(schedule);
    free(book.times);
    free(book.tokens);
    if (n_wrong > 0)
        error_set(&outcome, STATUS_BUG, "%lld units were not done once", (long long)n_wrong);
    return (int)ranks_agree(ranks, &outcome);
}

/* ---------------------------------------------------------------- store.json */

static int time_manifest(const struct options *o)
{
    struct error error = {0};
    struct store *store;
    if (store_open(o->store, &store, &error) != STATUS_OK)
        fail(error.text);
    struct store large = *store;
    large.n_units = o->n_units;
    large.unit_start = calloc((size_t)o->n_units + 1, sizeof *large.unit_start);
    large.segments = calloc((size_t)o->n_units, sizeof *large.segments);
    large.folder = strdup(o->folder);
    if (large.unit_start == NULL || large.segments == NULL || large.folder == NULL)
        fail("no memory");
    for (int64_t u = 0; u < o->n_units; u++) {
        large.segments[u] = store->segments[0];
        large.segments[u].unit = u;
        large.unit_start[u + 1] = u + 1;
    }
    double start = clock_seconds();
    if (store_write(&large, NULL, &error) != STATUS_OK)
        fail(error.text);
    printf("{\"units\": %lld, \"store_json_s\": %.4f}\n", (long long)o->n_units, clock_seconds() - start);
    free(large.unit_start);
    free(large.segments);
    free(large.folder);
    store_close(store);
    return STATUS_OK;
}

int main(int argc, char **argv)
{
    struct options options = {
        .n_units = 10000, .n_captures = 3, .n_batches = 1, .stop_at = -1, .fail_at = -1};
    struct error error = {0};
    struct ranks *ranks;
    if (!read_options(argc, argv, &options)) {
        fputs("usage: bench_ranks [--units N] [--captures N] [--work SECONDS] [--batches N] [--ahead] "
              "[--only-others] [--stop-at UNIT] [--fail-at UNIT], or bench_ranks --manifest STORE FOLDER\n",
              stderr);
        return STATUS_USAGE;
    }
    if (options.store != NULL)
        return time_manifest(&options);
    if (ranks_init(&argc, &argv, &ranks, &error) != STATUS_OK)
        fail(error.text);
    int status = run(ranks, &options);
    ranks_finish(ranks);
    return status;
}
