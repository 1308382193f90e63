#include "pipeline/writer_segment.h"

#include "pipeline/segment.h"
#include "pipeline/store.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Large enough for a disk to take it as one, small beside a segment. */
enum { WRITE_BACK_BYTES = 8 << 20 };

/* A dataset of the segment at hand. */
struct written {
    hid_t id; /* negative: not created yet */
    int64_t n_rows;
    struct statistics statistics;
};

/* ---------------------------------------------------------------- memory */

void writer_segment_place(struct writer_segment *s, const struct layout *layout, struct arena *arena)
{
    s->written = arena_take(arena, (size_t)layout->n_datasets * sizeof *s->written);
    for (int64_t i = 0; i < layout->n_datasets; i++) {
        const struct dataset *d = &layout->datasets[i];
        void *memory = layout_has_statistics(d) ? arena_take(arena, statistics_bytes(d->width)) : NULL;
        if (s->written == NULL)
            continue;
        s->written[i].id = H5I_INVALID_HID;
        if (memory != NULL)
            statistics_place(&s->written[i].statistics, memory, d->width, layout_is_masked(d));
    }
}

void writer_segment_init(struct writer_segment *s, const struct layout *layout,
                         const struct writer_folder *folder)
{
    s->layout = layout;
    s->folder = folder;
    s->hdf5 = H5I_INVALID_HID;
    s->file = WRITER_NO_FILE;
}

/* ---------------------------------------------------------------- errors */

/* Where HDF5 failed (errnum 0: its stack tells why) or the system did. needed: bytes of the write; 0: not
 * known. */
static enum status write_error(struct writer_segment *s, int errnum, size_t needed, struct error *error)
{
    char need[192] = "";
    if (needed > 0)
        snprintf(need, sizeof need, "its next chunk needs %zu bytes after %" PRId64 ", ", needed,
                 s->chunk_bytes_written);
    if (errnum == 0)
        errnum = hdf5_errno();
    hdf5_forget();
    return writer_file_error(s->folder, s->file.unit, errnum, need, error);
}

static enum status with_place(const struct writer_segment *s, enum status call, struct error *error)
{
    return writer_file_with_place(s->folder, s->file.unit, call, error);
}

/* ---------------------------------------------------------------- begin and discard */

static void close_datasets(struct writer_segment *s)
{
    for (int64_t i = 0; i < s->layout->n_datasets; i++) {
        if (s->written[i].id >= 0)
            H5Dclose(s->written[i].id);
        s->written[i].id = H5I_INVALID_HID;
    }
}

void writer_segment_discard(struct writer_segment *s)
{
    close_datasets(s);
    if (s->hdf5 >= 0)
        H5Fclose(s->hdf5);
    hdf5_forget();
    s->hdf5 = H5I_INVALID_HID;
    writer_file_remove(&s->file);
}

enum status writer_segment_begin(struct writer_segment *s, int64_t unit, struct error *error)
{
    writer_segment_discard(s);
    s->chunk_bytes_written = s->chunk_bytes_started = 0;
    for (int64_t i = 0; i < s->layout->n_datasets; i++) {
        s->written[i].n_rows = 0;
        if (layout_has_statistics(&s->layout->datasets[i]))
            statistics_reset(&s->written[i].statistics);
    }
    TRY(writer_file_name(s->folder, unit, &s->file, error));
    if (writer_fault_is_due(WRITER_FAULT_CREATE))
        return error_set_errno(error, STATUS_RESOURCE, errno, "%s cannot be created", s->file.temporary);
    TRY(with_place(s, hdf5_create(s->file.temporary, &s->hdf5, error), error));
    int errnum = writer_file_open_sync(&s->file);
    return errnum == 0 ? STATUS_OK : write_error(s, errnum, 0, error);
}

/* ---------------------------------------------------------------- chunks */

/* Sends what has come to the disk without waiting for it, so that the sync of the closed segment, which the
 * end of the next one waits for, has little left to do. A failure shows there: the descriptor has been open
 * since before. */
static void start_write_back(struct writer_segment *s)
{
    if (s->chunk_bytes_written - s->chunk_bytes_started < WRITE_BACK_BYTES)
        return;
    s->chunk_bytes_started = s->chunk_bytes_written;
    sync_file_range(s->file.sync_fd, 0, 0, SYNC_FILE_RANGE_WRITE);
}

static enum status create_dataset(struct writer_segment *s, int64_t dataset, int64_t chunk_rows,
                                  struct error *error)
{
    return segment_create_chunked(s->hdf5, &s->layout->datasets[dataset], chunk_rows, s->layout->compression,
                                  &s->written[dataset].id, error);
}

enum status writer_segment_write(struct writer_segment *s, const struct writer_chunk *chunk,
                                 struct error *error)
{
    struct written *written = &s->written[chunk->dataset];
    const struct dataset *d = &s->layout->datasets[chunk->dataset];
    hsize_t size[VALUE_MAX_AXES + 1], offset[VALUE_MAX_AXES + 1] = {(hsize_t)chunk->first_row};
    if (written->id < 0)
        TRY(with_place(s, create_dataset(s, chunk->dataset, chunk->chunk_rows, error), error));
    segment_get_shape(d, chunk->first_row + chunk->n_rows, size);
    if (writer_fault_is_due(WRITER_FAULT_CHUNK))
        return write_error(s, errno, chunk->n_bytes, error);
    if (H5Dset_extent(written->id, size) < 0 ||
        H5Dwrite_chunk(written->id, H5P_DEFAULT, 0, offset, chunk->n_bytes, chunk->bytes) < 0)
        return write_error(s, 0, chunk->n_bytes, error);
    written->n_rows += chunk->n_rows;
    s->chunk_bytes_written += (int64_t)chunk->n_bytes;
    start_write_back(s);
    if (layout_has_statistics(d))
        statistics_merge(&written->statistics, &chunk->statistics);
    return STATUS_OK;
}

/* ---------------------------------------------------------------- finish */

/* What follows the chunks: datasets that got no row, statistics, the file's own attributes. */
static enum status write_rest(struct writer_segment *s, int64_t first_sequence, int64_t n_tokens,
                              struct error *error)
{
    for (int64_t i = 0; i < s->layout->n_datasets; i++) {
        const struct dataset *d = &s->layout->datasets[i];
        if (s->written[i].id < 0)
            TRY(create_dataset(s, i, layout_chunk_rows(d, 0), error));
        if (layout_has_statistics(d))
            TRY(segment_write_statistics(s->hdf5, d, &s->written[i].statistics, "m2", s->layout->compression,
                                         NULL, error));
    }
    TRY(hdf5_set_string(s->hdf5, "actdump", ACTDUMP_VERSION, error));
    TRY(hdf5_set_int(s->hdf5, "store_version", STORE_VERSION, error));
    TRY(hdf5_set_int(s->hdf5, "unit", s->file.unit, error));
    TRY(hdf5_set_int(s->hdf5, "first_sequence", first_sequence, error));
    return hdf5_set_int(s->hdf5, "n_tokens", n_tokens, error);
}

static enum status close_file(struct writer_segment *s, struct error *error)
{
    if (writer_fault_is_due(WRITER_FAULT_CLOSE))
        return write_error(s, errno, 0, error);
    if (H5Fflush(s->hdf5, H5F_SCOPE_LOCAL) < 0)
        return write_error(s, 0, 0, error);
    close_datasets(s);
    hid_t file = s->hdf5;
    s->hdf5 = H5I_INVALID_HID;
    return H5Fclose(file) < 0 ? write_error(s, 0, 0, error) : STATUS_OK;
}

static void fill_record(const struct writer_segment *s, int64_t first_sequence, int64_t n_tokens,
                        struct segment_record *record)
{
    record->unit = s->file.unit;
    record->first_sequence = first_sequence;
    record->n_tokens = n_tokens;
    for (int64_t i = 0; i < s->layout->n_datasets; i++) {
        const struct dataset *d = &s->layout->datasets[i];
        record->raw_bytes += s->written[i].n_rows * d->row_bytes;
        if (d->rows == ROWS_OF_CAPTURE)
            record->n_rows[d->capture] = s->written[i].n_rows;
        else
            record->n_sequences = s->written[i].n_rows;
    }
}

enum status writer_segment_close(struct writer_segment *s, int64_t first_sequence, int64_t n_tokens,
                                 struct writer_file *file, struct segment_record *record, struct error *error)
{
    TRY(with_place(s, write_rest(s, first_sequence, n_tokens, error), error));
    TRY(close_file(s, error));
    fill_record(s, first_sequence, n_tokens, record);
    *file = s->file;
    s->file = WRITER_NO_FILE;
    return STATUS_OK;
}
