/* How far a job is: one line on a terminal, rewritten; a line a minute elsewhere. */
#ifndef ACTDUMP_PIPELINE_PROGRESS_H
#define ACTDUMP_PIPELINE_PROGRESS_H

#include "pipeline/schedule.h"

struct progress {
    double shown_s; /* when a line was last shown */
};

/* Shows a line where one is due. Rank 0's compute thread calls it after each batch. */
void progress_show(struct progress *progress, struct schedule *schedule);

#endif
