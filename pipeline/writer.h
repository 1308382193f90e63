/* Writes segments: takes rows, fills chunks, compresses them in threads, hands them to HDF5 in order,
 * commits.
 *
 * Four kinds of threads: the caller's, which puts rows into chunk buffers; workers, which compute
 * statistics, convert, shuffle and compress, at a priority a little below the caller's; one that alone calls
 * HDF5, up to the close of a segment's file; and one that syncs, checksums and renames the closed file while
 * the next is written, one file at a time.
 * Chunks reach the file in the order in which the caller filled them: the bytes of a segment depend on its
 * rows alone. All memory is allocated at creation.
 *
 * A file under its final name is whole; how it gets there is in writer_file.h. Failures are kept: the
 * first one is returned by the next call, and leaves no file behind but the temporary one, which is removed
 * where possible. */
#ifndef ACTDUMP_PIPELINE_WRITER_H
#define ACTDUMP_PIPELINE_WRITER_H

#include "pipeline/layout.h"
#include "pipeline/statistics.h"

struct writer;

/* What became of a unit: what store.json records of its segment. */
struct segment_record {
    int64_t unit;
    int64_t first_sequence, n_sequences, n_tokens;
    int64_t *n_rows;   /* [n_captures], owned by the record (memory_free) */
    int64_t bytes;     /* of the file */
    int64_t raw_bytes; /* of all datasets before compression */
    uint64_t checksum; /* XXH3-64 of the file's bytes */
};
void segment_record_fini(struct segment_record *record);

struct writer_options {
    const char *folder;     /* the store's; segments/ is in it and exists. Borrowed */
    int n_threads;          /* compression workers, at least 1 */
    bool stop_on_nonfinite; /* an element that is not finite is a failure (STATUS_INPUT) */
};

/* Borrows layout until writer_destroy. Returns owned at *out. */
enum status writer_create(const struct layout *layout, const struct writer_options *options,
                          struct writer **out, struct error *error);
/* Abandons what is not committed. NULL is fine. */
void writer_destroy(struct writer *writer);
/* Bytes that writer_create allocates. */
size_t writer_bytes(const struct layout *layout, const struct writer_options *options);

enum status writer_begin(struct writer *writer, int64_t unit, int64_t first_sequence, struct error *error);
/* Room for the next rows of a dataset: *room points to space for *n rows (1 or more, at most `wanted`) of the
 * source dtype. Fill them and call writer_advance with that many before asking again for the same dataset.
 * May wait for a worker. */
enum status writer_reserve(struct writer *writer, int64_t dataset, int64_t wanted, void **room, int64_t *n,
                           struct error *error);
enum status writer_advance(struct writer *writer, int64_t dataset, int64_t n, struct error *error);
/* Rows that were or will be reserved next hold n elements that were finite before they became the source
 * dtype. */
void writer_count_overflow(struct writer *writer, int64_t dataset, int64_t n);
/* Copies rows that lie in host memory in the source dtype. */
enum status writer_append(struct writer *writer, int64_t dataset, const void *rows, int64_t n,
                          struct error *error);
/* Queues the commit of the unit begun last. All datasets of a capture must have got the same rows (a bug
 * otherwise). */
enum status writer_finish(struct writer *writer, int64_t n_tokens, struct error *error);
/* Drops the unit begun last. */
void writer_abandon(struct writer *writer);
/* Takes the next committed unit's record: *have false where none is ready (wait false) or where none is
 * pending (wait true). The record is owned by the caller. After a failure the records of units that were
 * whole before it come first. */
enum status writer_collect(struct writer *writer, bool wait, struct segment_record *record, bool *have,
                           struct error *error);
/* Where stop_on_nonfinite met the first such element: its unit, dataset and row in the unit. False where it
 * met none. */
struct writer_place {
    int64_t unit, dataset, row;
};
bool writer_find_nonfinite(struct writer *writer, struct writer_place *out);
/* Seconds that the caller waited for workers, and that workers, and those who write and name files, worked.
 */
void writer_times(const struct writer *writer, double *waited_s, double *compressed_s, double *wrote_s);

/* Tests: makes the n-th call of a kind from now fail as the system would (0 is the next; negative: none). */
enum writer_fault {
    WRITER_FAULT_CREATE, /* of the temporary file */
    WRITER_FAULT_CHUNK,
    WRITER_FAULT_CLOSE,
    WRITER_FAULT_SYNC,
    WRITER_FAULT_RENAME,
    WRITER_FAULT_FOLDER_SYNC,
    WRITER_FAULT_COUNT
};
void writer_fail_at(enum writer_fault fault, int64_t n);

#endif
