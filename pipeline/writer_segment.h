/* Inside writer*.c: the segment that is being written, from the creation of its file to the close. What lies
 * in it, and where, is segment.h's; what becomes of the closed file writer_file.h's. After a failure there is
 * nothing left to do but writer_segment_discard.
 *
 * Threads: writer_segment_place and writer_segment_init may be called from any, before all others; the rest
 * from one, which has called hdf5_start. */
#ifndef ACTDUMP_PIPELINE_WRITER_SEGMENT_H
#define ACTDUMP_PIPELINE_WRITER_SEGMENT_H

#include "kernels/base/memory.h"
#include "pipeline/hdf5_util.h"
#include "pipeline/writer_file.h"

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
    const struct layout *layout;        /* borrowed, as is the folder */
    const struct writer_folder *folder; /* the store's */
    struct writer_file file;
    hid_t hdf5;                                       /* the same; negative: none */
    struct written *written;                          /* [n_datasets] */
    int64_t chunk_bytes_written, chunk_bytes_started; /* started: on their way to the disk */
};

/* Takes its memory from the arena; against a measuring one it only counts. Once more after arena_allocate. */
void writer_segment_place(struct writer_segment *s, const struct layout *layout, struct arena *arena);
/* Makes a zeroed one ready, with no file at hand. */
void writer_segment_init(struct writer_segment *s, const struct layout *layout,
                         const struct writer_folder *folder);

/* Creates the temporary file; what was at hand before is discarded. */
enum status writer_segment_begin(struct writer_segment *s, int64_t unit, struct error *error);
/* Adds a chunk: a dataset's come in the order of their rows, and all but its last are full. */
enum status writer_segment_write(struct writer_segment *s, const struct writer_chunk *chunk,
                                 struct error *error);
/* Writes what follows the chunks, and closes the file, which is the caller's from then on: to publish or to
 * remove. record: zeroed but for n_rows, the caller's room for [n_captures]; all of it but what
 * writer_file_publish fills is filled here, and of no use after a failure. */
enum status writer_segment_close(struct writer_segment *s, int64_t first_sequence, int64_t n_tokens,
                                 struct writer_file *file, struct segment_record *record,
                                 struct error *error);
/* Drops the segment at hand and removes its file; fine where there is none. */
void writer_segment_discard(struct writer_segment *s);

#endif
