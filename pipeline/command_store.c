/* info, verify and index: what is done with a store that is there. */
#include "kernels/base/log.h"
#include "pipeline/commands.h"
#include "pipeline/options.h"
#include "pipeline/store.h"

#include <stdio.h>

static enum status read_options(const struct command *command, int argc, char **argv, struct options *options,
                                struct error *error)
{
    TRY(options_read(command, OPTION_LOG, argc, argv, options, error));
    log_configure(&options->log);
    if (options->help)
        fputs(command->help, stdout);
    return STATUS_OK;
}

static enum status info(int argc, char **argv, struct error *error)
{
    struct options options;
    TRY(read_options(&command_info, argc, argv, &options, error));
    return options.help ? STATUS_OK : info_print(options.operand, error);
}

static void print_fault(void *context, const char *sentence)
{
    (void)context;
    puts(sentence);
}

static enum status verify(int argc, char **argv, struct error *error)
{
    struct options options;
    int64_t n_faults = 0;
    TRY(read_options(&command_verify, argc, argv, &options, error));
    if (options.help)
        return STATUS_OK;
    TRY(verify_store(options.operand, print_fault, NULL, &n_faults, error));
    if (n_faults > 0)
        return error_set(error, STATUS_INPUT, "%s: %lld fault%s", options.operand, (long long)n_faults,
                         n_faults == 1 ? "" : "s");
    printf("%s: no fault\n", options.operand);
    return STATUS_OK;
}

static enum status build_index(int argc, char **argv, struct error *error)
{
    struct options options;
    TRY(read_options(&command_index, argc, argv, &options, error));
    return options.help ? STATUS_OK : index_build(options.operand, error);
}

const struct command command_info = {
    .name = "info",
    .summary = "print what a store holds and how to read it",
    .help = "usage: actdump info STORE\n\nPrints captures, values, layers, rows, shapes, dtypes, bytes, and "
            "how to read "
            "them in Python.\n",
    .run = info,
};

const struct command command_verify = {
    .name = "verify",
    .summary = "check every file, chunk, count and checksum of a store",
    .help = "usage: actdump verify STORE\n\nReads the whole store and prints every fault, a line each. Exit "
            "status 3 where "
            "there is any.\n",
    .run = verify,
};

const struct command command_index = {
    .name = "index",
    .summary = "rebuild store.h5 and the statistics from the segments",
    .help =
        "usage: actdump index STORE\n\nWrites store.h5 anew from store.json and the segments, and the merged "
        "statistics into both.\n",
    .run = build_index,
};
