/* Between the replica and the writer: says which rows of which values are wanted, and puts them into the
 * writer's chunks as the forward offers them.
 *
 * Implements the observer of engine/replica.h for a plan's captures. All memory is allocated at creation. */
#ifndef ACTDUMP_PIPELINE_WATCH_H
#define ACTDUMP_PIPELINE_WATCH_H

#include "pipeline/plan.h"
#include "pipeline/writer.h"

struct watch;

/* Borrows the plan until watch_destroy. Returns owned at *out. */
enum status watch_create(const struct plan *plan, struct watch **out, struct error *error);
void watch_destroy(struct watch *watch); /* NULL is fine */
/* Where rows go, and on which backend they lie: set before the first batch. With a NULL writer rows are
 * chosen and dropped (measuring the forward alone). */
void watch_connect(struct watch *watch, struct backend *backend, struct writer *writer);
const struct observer *watch_observer(struct watch *watch);

/* Chooses the rows of a batch and writes the tables: sequences/... and each capture's rows/... */
enum status watch_begin_batch(struct watch *watch, const struct batch *batch,
                              const struct sequence *sequences, struct error *error);
/* After the forward: the first failure while rows were written, and whether every dataset got its rows (a bug
 * otherwise). */
enum status watch_end_batch(struct watch *watch, struct error *error);

#endif
