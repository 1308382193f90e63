/* Inside writer*.c: what the caller's side (writer.c) and the threads (writer_threads.c) share. */
#ifndef ACTDUMP_PIPELINE_WRITER_STATE_H
#define ACTDUMP_PIPELINE_WRITER_STATE_H

#include "kernels/base/memory.h"
#include "pipeline/chunk.h"
#include "pipeline/writer_segment.h"

#include <pthread.h>
#include <stdatomic.h>

enum slot_kind { SLOT_BEGIN, SLOT_CHUNK, SLOT_FINISH, SLOT_ABANDON };

/* One order in the ring: a chunk, or a mark between chunks. It belongs to the caller until submitted, then to
 * one worker, then (ready) to the HDF5 thread. */
struct slot {
    enum slot_kind kind;
    bool ready; /* under the lock */
    int64_t unit, first_sequence, n_tokens;
    struct writer_chunk chunk; /* which rows: by the caller; bytes and statistics: by a worker */
    int64_t n_overflow;        /* before the rows were handed over */
    char *source;              /* the rows as handed over, zeros after them */
    char *shuffled;            /* stored dtype */
    char *packed;              /* also where a conversion goes before it is shuffled */
    void *statistics_memory;
};

/* A dataset of the unit at hand. */
struct filling {
    char *buffer;   /* the current chunk, source dtype */
    bool is_traded; /* as large as a slot's source, with which it changes places */
    int64_t n_filled;
    int64_t n_submitted; /* rows in chunks before it */
    int64_t n_overflow;
};

/* A unit that the caller finished, from the close of its file on: first on its way to its name (closing),
 * then waiting to be collected. */
struct done {
    struct done *next;
    struct writer_file file;
    struct segment_record record;
};

struct writer {
    const struct layout *layout;
    int n_threads;

    /* the caller's */
    bool stop_on_nonfinite;
    bool has_unit;
    int64_t unit, first_sequence;
    struct filling *filling; /* [n_datasets] */

    /* the ring; counters only grow, slot i is number i % n_slots */
    pthread_mutex_t lock;
    pthread_cond_t work_added, slot_ready, slot_freed; /* slot_freed also: a unit is done */
    pthread_cond_t closing_changed;
    struct slot *slots;
    int64_t n_slots;
    int64_t n_submitted, n_taken, n_written; /* under the lock, like all below */
    bool stop, met_nonfinite;
    struct error failure;
    int64_t n_pending;    /* units finished by the caller and not yet committed */
    struct done *closing; /* the publisher's; NULL: it waits for one */
    struct done *first_done, *last_done;
    double waited_s, compressed_s, wrote_s;
    struct writer_place nonfinite; /* where met_nonfinite */

    struct writer_folder folder;
    struct writer_segment segment; /* the HDF5 thread's */
    char *hash_buffer;             /* the publisher's */

    struct arena arena;
    struct chunk_compressor **compressors; /* [n_threads] */
    pthread_t *workers;                    /* [n_threads] */
    int n_workers_started;
    bool is_hdf5_started, is_publisher_started;
    pthread_t hdf5_thread, publisher;
    _Atomic int next_worker; /* hands each worker its number */
};

/* Keeps the first failure and wakes whoever waits. */
void writer_keep_failure(struct writer *w, const struct error *failure);
/* Under the lock: the failure so far, as the caller's. */
enum status writer_tell_failure(const struct writer *w, struct error *error);

/* STATUS_RESOURCE where not all start. Those that did end once stop is set, and are then joined. */
enum status writer_start_threads(struct writer *w, struct error *error);
void writer_join_threads(struct writer *w);
void writer_free_done(struct done *done);

#endif
