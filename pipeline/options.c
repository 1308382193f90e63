#include "pipeline/options.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

enum { SHORT_SET = 256, SHORT_LEVEL, SHORT_FORMAT, SHORT_QUIET, SHORT_DTYPE, SHORT_CONTEXT, SHORT_MEASURE };

static const struct {
    int bit;
    struct option option;
} known[] = {
    {0, {"help", no_argument, NULL, 'h'}},
    {OPTION_SET, {"set", required_argument, NULL, SHORT_SET}},
    {OPTION_LOG, {"log-level", required_argument, NULL, SHORT_LEVEL}},
    {OPTION_LOG, {"log-format", required_argument, NULL, SHORT_FORMAT}},
    {OPTION_LOG, {"quiet", no_argument, NULL, SHORT_QUIET}},
    {OPTION_DTYPE, {"dtype", required_argument, NULL, SHORT_DTYPE}},
    {OPTION_CONTEXT, {"context", required_argument, NULL, SHORT_CONTEXT}},
    {OPTION_MEASURE, {"measure", optional_argument, NULL, SHORT_MEASURE}},
};
enum { N_KNOWN = sizeof known / sizeof *known };

static enum status read_count(const char *name, const char *text, int64_t *out, struct error *error)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < 1)
        return error_set(error, STATUS_USAGE, "--%s takes a whole number from 1, not \"%s\"", name, text);
    *out = value;
    return STATUS_OK;
}

static enum status read_level(const char *text, struct options *out, struct error *error)
{
    static const char *const names[] = {"error", "warning", "info", "debug"};
    for (int i = 0; i < 4; i++) {
        if (strcmp(text, names[i]) == 0) {
            out->log.level = (enum log_level)i;
            return STATUS_OK;
        }
    }
    return error_set(error, STATUS_USAGE, "--log-level is error, warning, info or debug, not \"%s\"", text);
}

static enum status read_format(const char *text, struct options *out, struct error *error)
{
    out->log.json = strcmp(text, "json") == 0;
    if (!out->log.json && strcmp(text, "text") != 0)
        return error_set(error, STATUS_USAGE, "--log-format is text or json, not \"%s\"", text);
    return STATUS_OK;
}

static enum status take(int code, const char *value, struct options *out, struct error *error)
{
    switch (code) {
    case 'h':
        out->help = true;
        return STATUS_OK;
    case SHORT_SET:
        if (out->n_sets == OPTIONS_MAX_SETS)
            return error_set(error, STATUS_USAGE, "more than %d times --set", OPTIONS_MAX_SETS);
        out->sets[out->n_sets++] = value;
        return STATUS_OK;
    case SHORT_LEVEL:
        return read_level(value, out, error);
    case SHORT_FORMAT:
        return read_format(value, out, error);
    case SHORT_QUIET:
        out->log.level = LOG_WARNING;
        return STATUS_OK;
    case SHORT_DTYPE:
        out->dtype = value;
        return STATUS_OK;
    case SHORT_CONTEXT:
        return read_count("context", value, &out->context, error);
    case SHORT_MEASURE:
        out->measure = 4;
        return value == NULL ? STATUS_OK : read_count("measure", value, &out->measure, error);
    default:
        return STATUS_BUG;
    }
}

enum status options_read(const struct command *command, int allowed, int argc, char **argv,
                         struct options *out, struct error *error)
{
    struct option list[N_KNOWN + 1] = {{0}};
    struct options options = {.log = {.level = LOG_INFO, .n_ranks = 1}};
    int n = 0, code;
    for (int i = 0; i < N_KNOWN; i++) {
        if (known[i].bit == 0 || (known[i].bit & allowed) != 0)
            list[n++] = known[i].option;
    }
    opterr = 0;
    optind = 1;
    while ((code = getopt_long(argc, argv, ":h", list, NULL)) != -1) {
        const char *word = argv[optind - 1];
        if (code == '?')
            return error_set(error, STATUS_USAGE, "%s: there is no option %s; see actdump %s --help",
                             command->name, word, command->name);
        if (code == ':')
            return error_set(error, STATUS_USAGE, "%s: %s takes a value; see actdump %s --help",
                             command->name, word, command->name);
        TRY(take(code, optarg, &options, error));
    }
    if (!options.help && argc - optind != 1)
        return error_set(error, STATUS_USAGE, "%s takes one argument, not %d; see actdump %s --help",
                         command->name, argc - optind, command->name);
    options.operand = options.help ? NULL : argv[optind];
    *out = options;
    return STATUS_OK;
}
