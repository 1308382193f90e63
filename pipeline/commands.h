/* The commands of the program: one file each, command_<name>.c. */
#ifndef ACTDUMP_PIPELINE_COMMANDS_H
#define ACTDUMP_PIPELINE_COMMANDS_H

#include "kernels/base/error.h"

#include <stdbool.h>

/* argv[0] is the command's name. Results go to standard output, everything else to the log. */
typedef enum status command_run_function(int argc, char **argv, struct error *error);

struct command {
    const char *name;
    const char *summary; /* one line, for `actdump --help` */
    const char *help;    /* what --help prints */
    command_run_function *run;
};

extern const struct command command_run, command_plan, command_values, command_info, command_verify,
    command_index;

#endif
