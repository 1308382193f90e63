/* What follows a command on the command line. */
#ifndef ACTDUMP_PIPELINE_OPTIONS_H
#define ACTDUMP_PIPELINE_OPTIONS_H

#include "kernels/base/log.h"
#include "pipeline/commands.h"

#include <stdint.h>

#define OPTIONS_MAX_SETS 64

/* Options that a command takes, as bits. --help is always there. */
enum option_bit {
    OPTION_SET = 1,     /* --set a.b=VALUE, any number */
    OPTION_LOG = 2,     /* --log-level, --log-format, --quiet */
    OPTION_DTYPE = 4,   /* --dtype */
    OPTION_CONTEXT = 8, /* --context */
    OPTION_MEASURE = 16 /* --measure [N] */
};

struct options {
    const char *operand; /* the one argument that every command takes */
    const char *sets[OPTIONS_MAX_SETS];
    int64_t n_sets;
    struct log_options log;
    const char *dtype; /* NULL: not given */
    int64_t context;   /* 0: not given */
    int64_t measure;   /* batches; 0: not asked for */
    bool help;         /* --help was given: nothing else is checked */
};

/* Reads argv for a command that takes `allowed`. Faults are STATUS_USAGE and name the option. */
enum status options_read(const struct command *command, int allowed, int argc, char **argv,
                         struct options *out, struct error *error);

#endif
