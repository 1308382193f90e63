/* actdump: captures a language model's activations over a tokenized corpus. See README.md. */
#include "kernels/base/log.h"
#include "kernels/base/memory.h"
#include "pipeline/commands.h"

#include <stdio.h>
#include <string.h>

static const struct command *const commands[] = {&command_run,  &command_plan,   &command_values,
                                                 &command_info, &command_verify, &command_index};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

static void print_help(FILE *stream)
{
    fputs("actdump " ACTDUMP_VERSION ": captures a language model's activations over a tokenized corpus\n\n"
          "usage: actdump COMMAND ARGUMENT [OPTION ...]\n\n",
          stream);
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(stream, "  %-8s %s\n", commands[i]->name, commands[i]->summary);
    fputs("\n`actdump COMMAND --help` says more.\n"
          "Exit status: 0 done; 2 bad usage or job file; 3 bad input (checkpoint, corpus, store); 4 out of "
          "memory or\n"
          "disk; 5 device; 6 a bug; 75 stopped by a signal or a time limit: run the same command again to go "
          "on.\n",
          stream);
}

static const struct command *find(const char *name)
{
    for (int i = 0; i < N_COMMANDS; i++) {
        if (strcmp(name, commands[i]->name) == 0)
            return commands[i];
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc >= 2 &&
        (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0)) {
        print_help(stdout);
        return STATUS_OK;
    }
    if (argc >= 2 && strcmp(argv[1], "--version") == 0) {
        puts("actdump " ACTDUMP_VERSION);
        return STATUS_OK;
    }
    const struct command *command = argc < 2 ? NULL : find(argv[1]);
    if (command == NULL) {
        if (argc >= 2)
            log_error("there is no command \"%s\"", argv[1]);
        print_help(stderr);
        return STATUS_USAGE;
    }
    memory_tune();
    struct error error = {0};
    enum status status = command->run(argc - 1, argv + 1, &error);
    if (error.status != STATUS_OK)
        log_line(error.status == STATUS_STOPPED ? LOG_WARNING : LOG_ERROR, "%s", error.text);
    if (fflush(stdout) != 0 && status == STATUS_OK) {
        log_error("standard output cannot be written");
        return STATUS_RESOURCE;
    }
    return (int)status;
}
