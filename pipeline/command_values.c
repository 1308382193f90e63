#include "kernels/base/log.h"
#include "pipeline/commands.h"
#include "pipeline/options.h"
#include "pipeline/table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the key axis of scores and probabilities is shown with where --context does not say. */
#define DEFAULT_CONTEXT 2048

static void describe_block(const struct block *block, char *buffer, size_t size)
{
    static const char *const feed_forwards[] = {"", " + dense MLP", " + mixture (moe)"};
    if (block->mixer == MIXER_ATTENTION)
        snprintf(buffer, size, "attention (%s, %d heads)%s", block->sliding ? "sliding" : "full",
                 block->n_heads, feed_forwards[block->feed_forward]);
    else
        snprintf(buffer, size, "mamba (Mamba-%d)%s", block->mixer == MIXER_MAMBA1 ? 1 : 2,
                 feed_forwards[block->feed_forward]);
}

/* Calls for each group of equal layers, in the order of their first; `equal` compares two layers. */
struct grouping {
    const struct model *model;
    bool *taken, *group; /* [n_layers] */
};

static void print_blocks(const struct grouping *g)
{
    const struct model *model = g->model;
    char ranges[512], mine[128], other[128];
    puts("\nblocks");
    memset(g->taken, 0, (size_t)model->n_layers);
    for (int i = 0; i < model->n_layers; i++) {
        if (g->taken[i])
            continue;
        describe_block(&model->blocks[i], mine, sizeof mine);
        for (int j = 0; j < model->n_layers; j++) {
            describe_block(&model->blocks[j], other, sizeof other);
            g->group[j] = strcmp(mine, other) == 0;
            g->taken[j] |= g->group[j];
        }
        printf("  %-24s %s\n", table_ranges(g->group, model->n_layers, ranges, sizeof ranges), mine);
    }
}

static void print_value(const char *layers, enum value_id value, const struct value_description *d)
{
    char shape[128];
    bool per_sequence = catalogue_get(value)->per == PER_SEQUENCE;
    printf("  %-12s %-36s %-40s %-9s %12lld%s\n", layers, catalogue_path(value),
           table_shape(d, shape, sizeof shape), dtype_name(d->dtype),
           (long long)d->width * (long long)dtype_size(d->dtype), per_sequence ? " a sequence" : "");
}

static bool same_description(const struct value_description *a, const struct value_description *b)
{
    if (a->available != b->available)
        return false;
    return a->available ? a->width == b->width && a->dtype == b->dtype && a->axis_sizes[0] == b->axis_sizes[0]
                        : strcmp(a->reason, b->reason) == 0;
}

/* Prints one line for each group of layers that have the value alike (or lack it for the same reason). */
static void print_layers(const struct grouping *g, enum value_id value, int64_t context, bool available)
{
    const struct model *model = g->model;
    char ranges[512];
    memset(g->taken, 0, (size_t)model->n_layers);
    for (int i = 0; i < model->n_layers; i++) {
        struct value_description mine, other;
        model_describe_value(model, value, i, context, &mine);
        if (g->taken[i] || mine.available != available)
            continue;
        for (int j = 0; j < model->n_layers; j++) {
            model_describe_value(model, value, j, context, &other);
            g->group[j] = same_description(&mine, &other);
            g->taken[j] |= g->group[j];
        }
        table_ranges(g->group, model->n_layers, ranges, sizeof ranges);
        if (available)
            print_value(ranges, value, &mine);
        else
            printf("  %-12s %-36s %s\n", ranges, catalogue_path(value), mine.reason);
    }
}

static void print_values(const struct grouping *g, int64_t context)
{
    printf("\n  %-12s %-36s %-40s %-9s %12s\n", "layers", "value", "shape a row", "dtype", "bytes a token");
    for (int v = 0; v < VALUE_COUNT; v++) {
        struct value_description d;
        if (value_is_per_layer((enum value_id)v)) {
            print_layers(g, (enum value_id)v, context, true);
            continue;
        }
        model_describe_value(g->model, (enum value_id)v, -1, context, &d);
        if (d.available)
            print_value("", (enum value_id)v, &d);
    }
    puts("\nnot to be had");
    for (int v = 0; v < VALUE_COUNT; v++) {
        struct value_description d;
        if (value_is_per_layer((enum value_id)v)) {
            print_layers(g, (enum value_id)v, context, false);
            continue;
        }
        model_describe_value(g->model, (enum value_id)v, -1, context, &d);
        if (!d.available)
            printf("  %-12s %-36s %s\n", "", catalogue_path((enum value_id)v), d.reason);
    }
}

static enum status print_model(const struct model *model, int64_t context, struct error *error)
{
    struct grouping g = {.model = model,
                         .taken = calloc((size_t)model->n_layers, sizeof(bool)),
                         .group = calloc((size_t)model->n_layers, sizeof(bool))};
    enum status status = STATUS_OK;
    if (g.taken == NULL || g.group == NULL) {
        status = error_set(error, STATUS_RESOURCE, "out of memory for %d layers", model->n_layers);
    } else {
        printf("%s: %s, %d blocks, hidden_size %lld, vocab_size %lld, file dtype %s, load dtype %s\n",
               model->checkpoint, model->name, model->n_layers, (long long)model->hidden_size,
               (long long)model->vocab_size, dtype_name(model->file_dtype), dtype_name(model->load_dtype));
        print_blocks(&g);
        print_values(&g, context);
        printf("\nThe key axis of scores and probabilities is the job's context; %lld is shown here.\n",
               (long long)context);
    }
    free(g.taken);
    free(g.group);
    return status;
}

static enum status run(int argc, char **argv, struct error *error)
{
    struct options options;
    struct model *model;
    enum dtype dtype = DTYPE_COUNT;
    TRY(options_read(&command_values, OPTION_LOG | OPTION_DTYPE | OPTION_CONTEXT, argc, argv, &options,
                     error));
    log_configure(&options.log);
    if (options.help) {
        fputs(command_values.help, stdout);
        return STATUS_OK;
    }
    if (options.dtype != NULL &&
        (!dtype_parse(options.dtype, &dtype) || (dtype != DTYPE_F32 && dtype != DTYPE_BF16)))
        return error_set(error, STATUS_USAGE, "--dtype is float32 or bfloat16, not \"%s\"", options.dtype);
    TRY(model_open(options.operand, options.dtype == NULL ? LOAD_DTYPE_OWN : (int)dtype, &model, error));
    enum status status = print_model(model, options.context > 0 ? options.context : DEFAULT_CONTEXT, error);
    model_close(model);
    return status;
}

const struct command command_values = {
    .name = "values",
    .summary = "print a model's blocks and every value it can give",
    .help = "usage: actdump values CHECKPOINT [--dtype float32|bfloat16] [--context N]\n\n"
            "Reads config.json alone. Prints the blocks as they are, and each value with its shape, dtype "
            "and bytes a\n"
            "token, and each missing one with its reason.\n",
    .run = run,
};
