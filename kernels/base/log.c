#include "kernels/base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static struct log_options options = {.level = LOG_INFO, .n_ranks = 1};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool progress_shown; /* under lock */

static const char *const level_names[] = {"error", "warning", "info", "debug"};

void log_configure(const struct log_options *wanted)
{
    pthread_mutex_lock(&lock);
    options = *wanted;
    pthread_mutex_unlock(&lock);
}

bool log_is_enabled(enum log_level level)
{
    return level <= options.level;
}

bool log_is_terminal(void)
{
    return isatty(STDERR_FILENO) && !options.json;
}

static void erase_progress(void)
{
    if (progress_shown)
        fputs("\r\033[K", stderr);
    progress_shown = false;
}

static void write_json(enum log_level level, const char *message)
{
    char now[64];
    time_t seconds = time(NULL);
    struct tm utc;
    strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&seconds, &utc));
    fprintf(stderr, "{\"time\": \"%s\", \"level\": \"%s\", \"rank\": %d, \"message\": \"", now,
            level_names[level], options.rank);
    for (const unsigned char *c = (const unsigned char *)message; *c != '\0'; c++) {
        if (*c == '"' || *c == '\\')
            fprintf(stderr, "\\%c", *c);
        else if (*c < 0x20)
            fprintf(stderr, "\\u%04x", *c);
        else
            fputc(*c, stderr);
    }
    fputs("\"}\n", stderr);
}

void log_line(enum log_level level, const char *format, ...)
{
    if (!log_is_enabled(level))
        return;
    char message[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    pthread_mutex_lock(&lock);
    erase_progress();
    if (options.json) {
        write_json(level, message);
    } else {
        char rank[32] = "";
        if (options.n_ranks > 1)
            snprintf(rank, sizeof rank, "[rank %d] ", options.rank);
        const char *prefix = level == LOG_ERROR ? "error: " : level == LOG_WARNING ? "warning: " : "";
        fprintf(stderr, "actdump: %s%s%s\n", rank, prefix, message);
    }
    fflush(stderr);
    pthread_mutex_unlock(&lock);
}

void log_progress(const char *text)
{
    if (!log_is_terminal())
        return;
    pthread_mutex_lock(&lock);
    erase_progress();
    if (text[0] != '\0') {
        fputs(text, stderr);
        progress_shown = true;
    }
    fflush(stderr);
    pthread_mutex_unlock(&lock);
}
