/* Brings rows from a device into the writer, behind the forward's back.
 *
 * The thread that drives the device posts rows (backend_captures) and notes what they are; a thread of the
 * landing's own takes them as they come and puts them into the writer's chunks. What the writer is told
 * besides, units begun and ended and the tables of a batch, goes through the same queue, so that the writer
 * sees everything in the order in which it was noted: what is stored does not depend on who is faster. While
 * a landing lives, its thread alone fills the writer.
 *
 * Memory is bounded: a note or a post waits for the landing where there is no room. After a failure
 * everything noted is forgotten, and every call returns that failure. */
#ifndef ACTDUMP_PIPELINE_LANDING_H
#define ACTDUMP_PIPELINE_LANDING_H

#include "kernels/backend.h"
#include "pipeline/writer.h"

struct landing;

/* Rows of a batch that are not a device's: written when their turn comes. slot: which of the caller's copies.
 */
struct landing_tables {
    void *context;
    enum status (*write)(void *context, int slot, struct error *error);
};

struct landing_options {
    const struct layout *layout;
    struct backend *backend;
    struct writer *writer;
    struct landing_tables tables;
    int64_t batch_bytes; /* of captured rows, at most */
};

/* Borrows what the options name until landing_destroy. Returns owned at *out. */
enum status landing_create(const struct landing_options *options, struct landing **out, struct error *error);
/* Bytes of the ring that it has the backend reserve, in device and in pinned host memory each. */
size_t landing_ring_bytes(const struct layout *layout, int64_t batch_bytes);
/* Forgets what has not landed. NULL is fine. */
void landing_destroy(struct landing *landing);

enum status landing_begin(struct landing *landing, int64_t unit, int64_t first_sequence, struct error *error);
enum status landing_finish(struct landing *landing, int64_t n_tokens, struct error *error);
enum status landing_abandon(struct landing *landing, struct error *error);
/* Notes the tables of a batch, then waits until those noted before the last have been written: of two copies
 * one is free again when this returns. */
enum status landing_note_tables(struct landing *landing, int slot, struct error *error);
/* Posts n rows of x for a dataset: rows[i], i < n. */
enum status landing_post(struct landing *landing, int64_t dataset, struct tensor x, const int32_t *rows,
                         int64_t n, struct error *error);
/* Waits until all that was noted has landed. */
enum status landing_settle(struct landing *landing, struct error *error);
/* Seconds that the caller waited for the landing. */
double landing_waited(const struct landing *landing);

#endif
