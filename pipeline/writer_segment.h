/* Inside writer*.c: the segment file that is being written, from its temporary name to its final one. What
 * lies in it, and where, is segment.h's.
 *
 * It is written as segments/.NNNNNN.h5.<host>.<pid>.tmp, flushed, closed, synced, checksummed, renamed, and
 * its folder synced; a file under its final name is whole. After a failure there is nothing left to do but
 * writer_segment_discard. Failures of the disk are STATUS_RESOURCE and say which segment it was and how much
 * room is left. What writer_fail_at asks for happens here.
 *
 * Threads: writer_segment_place and writer_segment_init may be called from any, before all others; the rest
 * from one, which has called hdf5_start. */
#ifndef ACTDUMP_PIPELINE_WRITER_SEGMENT_H
#define ACTDUMP_PIPELINE_WRITER_SEGMENT_H

#include "kernels/base/memory.h"
#include "pipeline/files.h"
#include "pipeline/hdf5_util.h"
#include "pipeline/writer.h"

enum { WRITER_FOLDER_BYTES = 4096 };

/* Rows [first_row, first_row + n_rows) of a dataset, as the file takes them: chunk_rows of them, as many as
 * in each of the dataset's chunks in this segment, those past n_rows zeros. */
struct writer_chunk {
    int64_t dataset, first_row, n_rows, chunk_rows;
    const char *bytes; /* shuffled and compressed where the layout says so */
    size_t n_bytes;
    struct statistics statistics; /* of the n_rows; unset where the dataset has none */
};

/* Its members are for writer_segment.c alone. */
struct writer_segment {
    const struct layout *layout; /* borrowed */
    char folder[WRITER_FOLDER_BYTES], segments[WRITER_FOLDER_BYTES + sizeof "/segments"];
    char temporary[FILES_PATH_BYTES]; /* empty: none */
    int sync_fd;                      /* the same file, to sync it by; negative: none */
    hid_t file;                       /* negative: none */
    int64_t unit;
    struct written *written;                          /* [n_datasets] */
    int64_t chunk_bytes_written, chunk_bytes_started; /* started: on their way to the disk */
    char *hash_buffer;
};

/* Takes its memory from the arena; against a measuring one it only counts. Once more after arena_allocate. */
void writer_segment_place(struct writer_segment *s, const struct layout *layout, struct arena *arena);
/* Makes a zeroed one ready, with no file at hand. folder: the store's; segments/ is in it and exists. Copies
 * the folder's path and borrows the layout. STATUS_USAGE where the path is too long. */
enum status writer_segment_init(struct writer_segment *s, const struct layout *layout, const char *folder,
                                struct error *error);

/* Creates the temporary file; what was at hand before is discarded. */
enum status writer_segment_begin(struct writer_segment *s, int64_t unit, struct error *error);
/* Adds a chunk: a dataset's come in the order of their rows, and all but its last are full. */
enum status writer_segment_write(struct writer_segment *s, const struct writer_chunk *chunk,
                                 struct error *error);
/* Writes what follows the chunks, and gives the file its name. record: zeroed but for n_rows, the caller's
 * room for [n_captures]; filled here, and of no use after a failure. */
enum status writer_segment_finish(struct writer_segment *s, int64_t first_sequence, int64_t n_tokens,
                                  struct segment_record *record, struct error *error);
/* Drops the segment at hand and removes its file; fine where there is none. */
void writer_segment_discard(struct writer_segment *s);

#endif
