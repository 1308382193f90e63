/* Who runs which unit, and when everybody stops: the coordinator's book, without any message passing.
 *
 * Rank 0 keeps one. Units are handed out in order to whoever asks; a unit counts as done when its record is
 * in. A stop (signal, time limit) or a failure ends the handing out; the first of either wins, a failure over
 * a stop. Threads: every function takes the schedule's own lock. */
#ifndef ACTDUMP_PIPELINE_SCHEDULE_H
#define ACTDUMP_PIPELINE_SCHEDULE_H

#include "pipeline/writer.h"

#include <stdbool.h>

struct schedule;

/* Called with each record as it comes in, under the schedule's lock. Takes the record's contents. */
typedef void schedule_on_record(void *context, struct segment_record *record);

struct schedule_options {
    int64_t n_units;
    const int64_t *unit_tokens; /* [n_units], borrowed */
    const bool *done;           /* [n_units], copied: units that are committed already */
    schedule_on_record *on_record;
    void *context;
};

struct schedule_progress {
    int64_t units_done, units_total;
    int64_t tokens_done, tokens_total; /* over the whole job */
    int64_t tokens_this_run;           /* finished or in work since the schedule was made */
    double elapsed_s;
};

enum status schedule_create(const struct schedule_options *options, struct schedule **out,
                            struct error *error);
void schedule_destroy(struct schedule *schedule); /* NULL is fine */

/* A unit to run. */
struct assignment {
    int64_t unit;      /* -1: none is left, or everybody stops */
    int64_t in_flight; /* units handed out before it in this run whose records were not in yet */
};
void schedule_next(struct schedule *schedule, struct assignment *out);
/* A unit is committed. */
void schedule_record(struct schedule *schedule, struct segment_record *record);
/* Tokens run since the last call by anyone, for the progress line. */
void schedule_add_tokens(struct schedule *schedule, int64_t tokens);
void schedule_fail(struct schedule *schedule, const struct error *error);
/* Ends the handing out; `why` is said once. */
void schedule_stop(struct schedule *schedule, const char *why);
/* STATUS_OK while running, STATUS_STOPPED after a stop, else the failure's status, whose sentence goes to
 * `error`. */
enum status schedule_status(struct schedule *schedule, struct error *error);
void schedule_get_progress(struct schedule *schedule, struct schedule_progress *out);

#endif
