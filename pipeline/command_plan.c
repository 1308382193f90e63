#include "kernels/base/log.h"
#include "kernels/base/memory.h"
#include "pipeline/commands.h"
#include "pipeline/device.h"
#include "pipeline/fit.h"
#include "pipeline/measure.h"
#include "pipeline/options.h"
#include "pipeline/plan.h"
#include "pipeline/table.h"
#include "pipeline/watch.h"

#include <stdio.h>
#include <string.h>

/* Readers of store.h5 open every segment that they touch. */
#define MANY_SEGMENTS 4096

struct bill {
    struct job *job;
    struct model *model;
    struct corpus *corpus;
    struct plan *plan;
    struct backend *backend;
    struct watch *watch;
    int64_t *rows; /* [n_captures] */
};

/* Raw bytes over bytes on disk, as measured on residual streams (byte shuffle, zstd level 1). Integers are
 * small numbers in wide words. */
static double expected_ratio(const struct job *job, enum dtype dtype)
{
    if (job->compression == 0)
        return 1.0;
    switch (dtype) {
    case DTYPE_F32:
        return 1.19;
    case DTYPE_BF16:
        return 1.46;
    case DTYPE_F16:
        return 1.15;
    default:
        return 4.0;
    }
}

static struct fit_request ask_fit(const struct bill *bill)
{
    return (struct fit_request){.plan = bill->plan,
                                .backend = bill->backend,
                                .n_threads = device_count_threads(bill->job->n_threads, 1),
                                .node_count = 1};
}

/* As a run does that begins a store. */
static enum status choose_batch(struct bill *bill, struct error *error)
{
    struct fit_request request = ask_fit(bill);
    int64_t tokens;
    if (bill->job->batch_tokens > 0)
        return STATUS_OK;
    TRY(fit_choose_batch(&request, &tokens, error));
    return plan_set_batch_tokens(bill->plan, tokens, error);
}

static enum status open_all(struct bill *bill, const struct options *options, struct error *error)
{
    TRY(job_read(options->operand, options->sets, options->n_sets, &bill->job, error));
    TRY(model_open(bill->job->checkpoint, bill->job->load_dtype, &bill->model, error));
    TRY(corpus_open(&bill->job->corpus, bill->model->vocab_size, &bill->corpus, error));
    TRY(plan_create(bill->job, bill->model, bill->corpus, &bill->plan, error));
    struct device_request request = {.device = bill->job->device,
                                     .node_count = 1,
                                     .n_threads = device_count_threads(bill->job->n_threads, 1)};
    TRY(device_open(&request, &bill->backend, error));
    if (bill->backend->captures != NULL)
        plan_expect_converted(bill->plan);
    TRY(choose_batch(bill, error));
    TRY(watch_create(bill->plan, &bill->watch, error));
    void *rows;
    TRY(memory_allocate_array(&rows, (size_t)bill->plan->captures.n, sizeof(int64_t), "the bill", error));
    bill->rows = rows;
    return plan_count_rows(bill->plan, bill->corpus, bill->rows, error);
}

static void close_all(struct bill *bill)
{
    memory_free(bill->rows);
    watch_destroy(bill->watch);
    backend_destroy(bill->backend);
    plan_free(bill->plan);
    corpus_close(bill->corpus);
    model_close(bill->model);
    job_free(bill->job);
}

/* One line for each value of a capture: its layers together. Returns raw bytes; adds to *on_disk. */
static double print_value(const struct bill *bill, int64_t c, enum value_id value, bool *layers,
                          double *on_disk)
{
    const struct plan *plan = bill->plan;
    const struct capture *capture = &plan->captures.list[c];
    const struct column *first = NULL;
    double raw = 0;
    int n = 0;
    memset(layers, 0, (size_t)plan->model->n_layers * sizeof *layers);
    for (int64_t i = 0; i < capture->n_columns; i++) {
        const struct column *column = &capture->columns[i];
        if (column->value != value)
            continue;
        first = first == NULL ? column : first;
        n++;
        if (column->layer >= 0)
            layers[column->layer] = true;
        double bytes = (double)plan_column_bytes(plan, column, bill->rows[c]);
        raw += bytes;
        *on_disk += bytes / expected_ratio(bill->job, column->dtype);
    }
    if (first == NULL)
        return 0;
    char ranges[128], size[32], estimate[32];
    printf("  %-36s %-14s %-9s %14lld %4d %10s %10s\n", catalogue_path(value),
           first->layer >= 0 ? table_ranges(layers, plan->model->n_layers, ranges, sizeof ranges) : "",
           dtype_name(first->dtype),
           (long long)(first->per == PER_SEQUENCE ? plan->n_sequences : bill->rows[c]), n,
           table_bytes(raw, size, sizeof size),
           table_bytes(raw / expected_ratio(bill->job, first->dtype), estimate, sizeof estimate));
    return raw;
}

static enum status print_captures(const struct bill *bill, struct error *error)
{
    const struct plan *plan = bill->plan;
    void *layers;
    double raw = 0, on_disk = 0;
    char size[32], estimate[32];
    TRY(memory_allocate_array(&layers, (size_t)plan->model->n_layers, sizeof(bool), "the bill", error));
    for (int64_t c = 0; c < plan->captures.n; c++) {
        printf("\ncapture %s: %lld rows\n", plan->captures.list[c].spec->name, (long long)bill->rows[c]);
        printf("  %-36s %-14s %-9s %14s %4s %10s %10s\n", "value", "layers", "dtype", "rows", "sets", "raw",
               "on disk ~");
        for (int v = 0; v < VALUE_COUNT; v++)
            raw += print_value(bill, c, (enum value_id)v, layers, &on_disk);
    }
    memory_free(layers);
    printf("\ntotal: %.0f bytes raw (%s), about %s on disk, in %lld segments and store.h5\n", raw,
           table_bytes(raw, size, sizeof size), table_bytes(on_disk, estimate, sizeof estimate),
           (long long)plan->n_units);
    if (plan->n_units > MANY_SEGMENTS) {
        int64_t proposed = (plan->n_tokens / MANY_SEGMENTS / 65536 + 1) * 65536;
        printf("That is many files: with store.unit_tokens %lld there would be at most %d.\n",
               (long long)proposed, MANY_SEGMENTS);
    }
    return STATUS_OK;
}

/* What lies on a GPU, and whether it fits there. */
static void print_device_memory(const struct fit *fit)
{
    char needed[32], ring[32], operations[32], left[32], total[32];
    printf("on the GPU: %s, captured rows on their way (%s) and operations (%s) included; %s of %s are free: "
           "it %s\n",
           table_bytes(fit->device, needed, sizeof needed), table_bytes(fit->ring, ring, sizeof ring),
           table_bytes((double)fit->on_device.operations, operations, sizeof operations),
           table_bytes((double)fit->on_device.free_bytes, left, sizeof left),
           table_bytes((double)fit->on_device.total_bytes, total, sizeof total),
           fit->device <= (double)fit->on_device.free_bytes ? "fits" : "does not fit");
}

static void print_host_memory(const struct fit *fit)
{
    char needed[32], left[32], total[32];
    printf("memory a rank on the host: about %.0f bytes (%s)", fit->host,
           table_bytes(fit->host, needed, sizeof needed));
    if (fit->host_total > 0)
        printf("; %s of %s are free: it %s", table_bytes(fit->host_available, left, sizeof left),
               table_bytes(fit->host_total, total, sizeof total),
               fit->host <= fit->host_available ? "fits" : "does not fit");
    printf("\n");
}

static enum status print_memory(const struct bill *bill, struct error *error)
{
    struct fit_request request = ask_fit(bill);
    struct fit fit;
    char weights[32], workspace[32], carry[32], writer[32], program[32];
    TRY(fit_plan(&request, &fit, error));
    printf("memory a rank: weights %s, workspace %s, carried state %s, chunks being written %s, the program "
           "itself about "
           "%s\n",
           table_bytes((double)fit.replica.weights, weights, sizeof weights),
           table_bytes((double)fit.replica.workspace, workspace, sizeof workspace),
           table_bytes((double)fit.replica.carry, carry, sizeof carry),
           table_bytes(fit.writer, writer, sizeof writer), table_bytes(fit.program, program, sizeof program));
    print_host_memory(&fit);
    if (!fit.is_host)
        print_device_memory(&fit);
    return STATUS_OK;
}

static enum status print_bill(const struct bill *bill, int64_t measure, struct error *error)
{
    const struct plan *plan = bill->plan;
    printf("model: %s (%s, %d layers, load dtype %s)\n", bill->model->checkpoint, bill->model->name,
           bill->model->n_layers, dtype_name(bill->model->load_dtype));
    printf("corpus: %s: %lld documents (%lld empty), %lld sequences, %lld tokens to run\n",
           bill->job->corpus.path, (long long)corpus_n_documents(bill->corpus),
           (long long)corpus_n_empty(bill->corpus), (long long)plan->n_sequences, (long long)plan->n_tokens);
    printf("work: %lld units of about %lld tokens, batches of %lld tokens, on %s\n", (long long)plan->n_units,
           (long long)bill->job->unit_tokens, (long long)plan->batch_tokens, bill->backend->name);
    TRY(print_captures(bill, error));
    TRY(print_memory(bill, error));
    if (measure == 0)
        return STATUS_OK;
    double rate;
    TRY(measure_rate(plan, bill->corpus, bill->backend, bill->watch, measure, &rate, error));
    printf("measured: %.0f tokens/s a rank without writing; %.1f hours for the whole on one rank\n", rate,
           (double)plan->n_tokens / rate / 3600);
    return STATUS_OK;
}

static enum status run(int argc, char **argv, struct error *error)
{
    struct options options;
    struct bill bill = {0};
    TRY(options_read(&command_plan, OPTION_SET | OPTION_LOG | OPTION_MEASURE, argc, argv, &options, error));
    log_configure(&options.log);
    if (options.help) {
        fputs(command_plan.help, stdout);
        return STATUS_OK;
    }
    enum status status = open_all(&bill, &options, error);
    if (status == STATUS_OK)
        status = print_bill(&bill, options.measure, error);
    close_all(&bill);
    return status;
}

const struct command command_plan = {
    .name = "plan",
    .summary = "print what a job will write, and how much",
    .help = "usage: actdump plan JOB.json [--set KEY=VALUE ...] [--measure[=BATCHES]]\n\n"
            "From the config and the corpus alone: units, rows, bytes (raw ones exact, those on disk "
            "estimated), files,\n"
            "memory a rank. Nothing is written.\n\n"
            "  --measure[=BATCHES] loads the weights, runs some batches (4) and says how long the whole will "
            "take\n",
    .run = run,
};
