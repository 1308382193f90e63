/* The only file that knows MPI: start and end, agreement, and messages between rank 0's schedule and the
 * others.
 *
 * Rank 0 runs units like everybody else; a thread of its own answers the others, so that nobody waits for a
 * batch of rank 0's. All MPI calls of a process are made under one lock (MPI_THREAD_SERIALIZED suffices);
 * waiting is done by polling with short sleeps, never by spinning, since compute threads want the processor.
 * MPI_ERRORS_RETURN is set; a failing MPI call ends the process with STATUS_BUG, since then nobody can be
 * told. */
#ifndef ACTDUMP_PIPELINE_RANKS_H
#define ACTDUMP_PIPELINE_RANKS_H

#include "pipeline/schedule.h"

struct ranks;

/* Collective. Returns owned at *out. */
enum status ranks_init(int *argc, char ***argv, struct ranks **out, struct error *error);
/* Collective on a good end. With `abandon` the process leaves without the others (they are told by the
 * launcher). */
void ranks_finish(struct ranks *ranks);

int ranks_rank(const struct ranks *ranks);
int ranks_count(const struct ranks *ranks);
/* Among the ranks of this node, and how many they are. */
int ranks_node_rank(const struct ranks *ranks);
int ranks_node_count(const struct ranks *ranks);

/* Collective: all ranks leave with the most severe of their statuses, and with its sentence, the first rank's
 * where several are equal. `error` holds this rank's. */
enum status ranks_agree(struct ranks *ranks, struct error *error);
/* Collective: rank 0's bytes go to all. */
void ranks_broadcast(struct ranks *ranks, void *bytes, size_t n);

/* Rank 0 gives its schedule (others NULL) and starts answering. n_captures: of a record. Collective. */
enum status ranks_start(struct ranks *ranks, struct schedule *schedule, int64_t n_captures,
                        struct error *error);
/* The next unit for this rank; unit -1: none is left, or all stop. */
void ranks_next_unit(struct ranks *ranks, struct assignment *out);
/* Asks for the unit that ranks_next_unit will return next, without waiting: rank 0's answer comes while the
 * last batch of the one at hand runs. Not earlier, lest a slow rank hold at the job's end what another could
 * run. Asking is optional; a unit asked for and not taken is left to the next run. */
void ranks_ask_ahead(struct ranks *ranks);
/* Hands a record to rank 0; takes its contents. */
void ranks_report(struct ranks *ranks, struct segment_record *record);
/* For the progress line: sent on now and then, the rest with the next record. */
void ranks_report_tokens(struct ranks *ranks, int64_t tokens);
void ranks_report_failure(struct ranks *ranks, const struct error *error);
/* This rank was told to stop: everybody shall. */
void ranks_report_stop(struct ranks *ranks, const char *why);
/* Whether all are to stop: STATUS_OK, STATUS_STOPPED, or the status of a failure somewhere. Cheap: ask in
 * every batch. */
enum status ranks_poll(struct ranks *ranks);
/* Collective: each value becomes its sum over all ranks. */
void ranks_sum(struct ranks *ranks, double *values, int n);
/* Collective end of the work: waits (politely) until every rank is here, then stops answering. */
void ranks_join(struct ranks *ranks);

#endif
