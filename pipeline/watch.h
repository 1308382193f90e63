/* Between the replica and the writer: says which rows of which values are wanted, and puts them into the
 * writer's chunks as the forward offers them.
 *
 * Implements the observer of engine/replica.h for a plan's captures. Rows that lie in the host's memory go
 * into chunks as they are offered. Rows on a device are posted on their way and go on without the forward
 * (landing.h): the writer is then filled by another thread, a batch later at the latest, in the same order.
 * All memory is allocated by watch_create and watch_connect. */
#ifndef ACTDUMP_PIPELINE_WATCH_H
#define ACTDUMP_PIPELINE_WATCH_H

#include "pipeline/plan.h"
#include "pipeline/writer.h"

struct watch;

/* Borrows the plan until watch_destroy. Returns owned at *out. */
enum status watch_create(const struct plan *plan, struct watch **out, struct error *error);
void watch_destroy(struct watch *watch); /* before its writer and its backend; NULL is fine */
/* Where rows go, and on which backend they lie: before the first batch, and between batches. Both are
 * borrowed until the watch is connected anew or destroyed. With a NULL writer rows are chosen and dropped
 * (measuring the forward alone). What has not settled is forgotten. For a device memory is allocated:
 * watch_settle tells where that failed. */
void watch_connect(struct watch *watch, struct backend *backend, struct writer *writer);
/* Bytes that connecting to a device takes, there and in pinned host memory each. */
size_t watch_ring_bytes(const struct plan *plan);
const struct observer *watch_observer(struct watch *watch);

/* What writer_begin, writer_finish and writer_abandon do, in their turn between the batches. */
enum status watch_begin_unit(struct watch *watch, int64_t unit, struct error *error);
enum status watch_finish_unit(struct watch *watch, int64_t n_tokens, struct error *error);
void watch_abandon_unit(struct watch *watch);
/* Waits until everything so far is the writer's. */
enum status watch_settle(struct watch *watch, struct error *error);

/* Chooses the rows of a batch and writes the tables: sequences/... and each capture's rows/... */
enum status watch_begin_batch(struct watch *watch, const struct batch *batch,
                              const struct sequence *sequences, struct error *error);
/* After the forward: the first failure while rows were written, and whether every dataset got its rows (a bug
 * otherwise). */
enum status watch_end_batch(struct watch *watch, struct error *error);

#endif
