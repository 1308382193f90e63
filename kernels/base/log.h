/* Logging: lines on standard error, as text or as one JSON object a line.
 *
 * Thread safety: any thread; a line is written whole. Nothing here fails. */
#ifndef ACTDUMP_BASE_LOG_H
#define ACTDUMP_BASE_LOG_H

#include <stdbool.h>

enum log_level { LOG_ERROR, LOG_WARNING, LOG_INFO, LOG_DEBUG };

struct log_options {
    enum log_level level; /* lines above it are dropped; LOG_INFO at start */
    bool json;            /* {"time": "...", "level": "info", "rank": 0, "message": "..."} */
    int rank, n_ranks;    /* "[rank 1] " goes in front where there is more than one rank */
};

void log_configure(const struct log_options *options);
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool log_is_enabled(enum log_level level);
/* A status line that the next one overwrites, on a terminal; nothing elsewhere. An empty string clears it. */
void log_progress(const char *text);
bool log_is_terminal(void);

#define log_error(...) log_line(LOG_ERROR, __VA_ARGS__)
#define log_warning(...) log_line(LOG_WARNING, __VA_ARGS__)
#define log_info(...) log_line(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_DEBUG, __VA_ARGS__)

#endif
