#include "pipeline/progress.h"

#include "kernels/base/log.h"
#include "pipeline/clock.h"

#include <stdio.h>

/* Seconds between lines. */
#define TERMINAL_SECONDS 0.5
#define BATCH_SECONDS 60.0

static void print_duration(double seconds, char *buffer, size_t size)
{
    long long s = seconds > 0 ? (long long)seconds : 0;
    if (s >= 86400)
        snprintf(buffer, size, "%lldd %02lldh", s / 86400, s / 3600 % 24);
    else
        snprintf(buffer, size, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
}

void progress_show(struct progress *progress, struct schedule *schedule)
{
    double now = clock_seconds();
    bool terminal = log_is_terminal();
    if (progress->shown_s == 0 && !terminal)
        progress->shown_s =
            now; /* the first line of a batch log comes after a minute, when it can say a rate */
    if (now - progress->shown_s < (terminal ? TERMINAL_SECONDS : BATCH_SECONDS))
        return;
    progress->shown_s = now;
    struct schedule_progress p;
    schedule_get_progress(schedule, &p);
    double rate = p.elapsed_s > 0 ? (double)p.tokens_this_run / p.elapsed_s : 0;
    /* units of other ranks count when they are done; tokens in work only for the rate */
    double left = rate > 0 ? (double)(p.tokens_total - p.tokens_done) / rate : 0;
    char line[200], time_left[32];
    print_duration(left, time_left, sizeof time_left);
    snprintf(line, sizeof line, "%lld/%lld units, %.1f %%, %.0f tokens/s, %s left", (long long)p.units_done,
             (long long)p.units_total, 100.0 * (double)p.tokens_done / (double)p.tokens_total, rate,
             time_left);
    if (terminal)
        log_progress(line);
    else
        log_info("%s", line);
}
