#include "pipeline/writer_segment.h"

#include "pipeline/segment.h"
#include "pipeline/store.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* Large enough for a disk to take it as one, small beside a segment. */
enum { WRITE_BACK_BYTES = 8 << 20 };

/* A dataset of the segment at hand. */
struct written {
    hid_t id; /* negative: not created yet */
    int64_t n_rows;
    struct statistics statistics;
};

/* ---------------------------------------------------------------- faults on demand */

static _Atomic int64_t faults[WRITER_FAULT_COUNT] = {-1, -1, -1, -1, -1, -1};

void writer_fail_at(enum writer_fault fault, int64_t n)
{
    atomic_store(&faults[fault], n);
}

/* True where this call is to fail; errno says as what. */
static bool is_fault_due(enum writer_fault fault)
{
    int64_t left = atomic_load(&faults[fault]);
    while (left >= 0 && !atomic_compare_exchange_weak(&faults[fault], &left, left - 1))
        ;
    if (left != 0)
        return false;
    errno = fault == WRITER_FAULT_CHUNK ? ENOSPC : EIO;
    return true;
}

/* ---------------------------------------------------------------- memory */

void writer_segment_place(struct writer_segment *s, const struct layout *layout, struct arena *arena)
{
    s->written = arena_take(arena, (size_t)layout->n_datasets * sizeof *s->written);
    s->hash_buffer = arena_take(arena, FILES_HASH_BYTES);
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

enum status writer_segment_init(struct writer_segment *s, const struct layout *layout, const char *folder,
                                struct error *error)
{
    s->layout = layout;
    s->file = H5I_INVALID_HID;
    s->sync_fd = -1;
    if ((size_t)snprintf(s->folder, sizeof s->folder, "%s", folder) >= sizeof s->folder)
        return error_set(error, STATUS_USAGE, "the store's path %.64s... is too long", folder);
    snprintf(s->segments, sizeof s->segments, "%s/segments", s->folder);
    return STATUS_OK;
}

/* ---------------------------------------------------------------- errors */

/* Puts what is left where the segment was to go into a sentence. */
static void describe_room(const struct writer_segment *s, char *text, size_t size)
{
    struct statvfs fs;
    struct rlimit limit;
    size_t used = 0;
    text[0] = '\0';
    if (statvfs(s->folder, &fs) == 0)
        used = (size_t)snprintf(text, size, ", %" PRIu64 " bytes are free there",
                                (uint64_t)fs.f_bavail * (uint64_t)fs.f_frsize);
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && used < size)
        snprintf(text + used, size - used, " and no file may be larger than %" PRIu64 " bytes",
                 (uint64_t)limit.rlim_cur);
}

/* Where HDF5 failed (errnum 0: its stack tells why) or the system did. needed: bytes of the write; 0: not
 * known. */
static enum status write_error(struct writer_segment *s, int errnum, size_t needed, struct error *error)
{
    char name[64], room[192], need[192] = "";
    store_segment_name(s->unit, name);
    describe_room(s, room, sizeof room);
    if (needed > 0)
        snprintf(need, sizeof need, "its next chunk needs %zu bytes after %" PRId64 ", ", needed,
                 s->chunk_bytes_written);
    if (errnum == 0)
        errnum = hdf5_errno();
    hdf5_forget();
    if (errnum == 0)
        return error_set(error, STATUS_RESOURCE, "%s/%s cannot be written (%sHDF5 failed%s)", s->folder, name,
                         need, room);
    return error_set_errno(error, STATUS_RESOURCE, errnum, "%s/%s cannot be written (%sunit %" PRId64 "%s)",
                           s->folder, name, need, s->unit, room);
}

/* Puts the segment and the room left in front of what `call` said. */
static enum status with_place(const struct writer_segment *s, enum status call, struct error *error)
{
    char name[64], room[192];
    if (call == STATUS_OK)
        return call;
    store_segment_name(s->unit, name);
    describe_room(s, room, sizeof room);
    error_prefix(error, "%s/%s cannot be written (unit %" PRId64 "%s)", s->folder, name, s->unit, room);
    return call;
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

static int close_sync_fd(struct writer_segment *s)
{
    int errnum = s->sync_fd >= 0 && close(s->sync_fd) != 0 ? errno : 0;
    s->sync_fd = -1;
    return errnum;
}

/* HDF5 may be unable to close a file that it could not write; then its descriptor stays open, so the file is
 * emptied before it is removed, or its blocks would stay taken. */
void writer_segment_discard(struct writer_segment *s)
{
    close_datasets(s);
    if (s->file >= 0)
        H5Fclose(s->file);
    hdf5_forget();
    s->file = H5I_INVALID_HID;
    close_sync_fd(s);
    if (s->temporary[0] != '\0') {
        int ignored = truncate(s->temporary, 0);
        (void)ignored;
        unlink(s->temporary);
    }
    s->temporary[0] = '\0';
}

enum status writer_segment_begin(struct writer_segment *s, int64_t unit, struct error *error)
{
    writer_segment_discard(s);
    s->unit = unit;
    s->chunk_bytes_written = s->chunk_bytes_started = 0;
    for (int64_t i = 0; i < s->layout->n_datasets; i++) {
        s->written[i].n_rows = 0;
        if (layout_has_statistics(&s->layout->datasets[i]))
            statistics_reset(&s->written[i].statistics);
    }
    char name[64];
    store_segment_name(unit, name);
    TRY(files_name_temporary(s->segments, strrchr(name, '/') + 1, s->temporary, error));
    if (is_fault_due(WRITER_FAULT_CREATE))
        return error_set_errno(error, STATUS_RESOURCE, errno, "%s cannot be created", s->temporary);
    TRY(with_place(s, hdf5_create(s->temporary, &s->file, error), error));
    s->sync_fd = open(s->temporary, O_RDONLY | O_CLOEXEC);
    return s->sync_fd >= 0 ? STATUS_OK : write_error(s, errno, 0, error);
}

/* ---------------------------------------------------------------- chunks */

/* Sends what has come to the disk without waiting for it, so that the sync at the segment's end, during which
 * nothing else is written, has little left to do. A failure shows there: the descriptor has been open since
 * before. */
static void start_write_back(struct writer_segment *s)
{
    if (s->chunk_bytes_written - s->chunk_bytes_started < WRITE_BACK_BYTES)
        return;
    s->chunk_bytes_started = s->chunk_bytes_written;
    sync_file_range(s->sync_fd, 0, 0, SYNC_FILE_RANGE_WRITE);
}

static enum status create_dataset(struct writer_segment *s, int64_t dataset, int64_t chunk_rows,
                                  struct error *error)
{
    return segment_create_chunked(s->file, &s->layout->datasets[dataset], chunk_rows, s->layout->compression,
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
    if (is_fault_due(WRITER_FAULT_CHUNK))
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
            TRY(segment_write_statistics(s->file, d, &s->written[i].statistics, "m2", s->layout->compression,
                                         NULL, error));
    }
    TRY(hdf5_set_string(s->file, "actdump", ACTDUMP_VERSION, error));
    TRY(hdf5_set_int(s->file, "store_version", STORE_VERSION, error));
    TRY(hdf5_set_int(s->file, "unit", s->unit, error));
    TRY(hdf5_set_int(s->file, "first_sequence", first_sequence, error));
    return hdf5_set_int(s->file, "n_tokens", n_tokens, error);
}

static enum status close_file(struct writer_segment *s, struct error *error)
{
    if (is_fault_due(WRITER_FAULT_CLOSE))
        return write_error(s, errno, 0, error);
    if (H5Fflush(s->file, H5F_SCOPE_LOCAL) < 0)
        return write_error(s, 0, 0, error);
    close_datasets(s);
    hid_t file = s->file;
    s->file = H5I_INVALID_HID;
    return H5Fclose(file) < 0 ? write_error(s, 0, 0, error) : STATUS_OK;
}

static int sync_file(const struct writer_segment *s)
{
    return is_fault_due(WRITER_FAULT_SYNC) || fsync(s->sync_fd) != 0 ? errno : 0;
}

static int sync_folder(const struct writer_segment *s)
{
    return is_fault_due(WRITER_FAULT_FOLDER_SYNC) ? errno : files_sync(s->segments);
}

/* Syncs the closed file, gives it its name and syncs the folder. */
static enum status publish_file(struct writer_segment *s, struct segment_record *record, struct error *error)
{
    char name[64], path[FILES_PATH_BYTES];
    store_segment_name(s->unit, name);
    snprintf(path, sizeof path, "%s/%s", s->folder, name);
    int errnum = sync_file(s);
    if (errnum == 0)
        errnum = close_sync_fd(s);
    if (errnum == 0)
        errnum = files_hash(s->temporary, s->hash_buffer, &record->bytes, &record->checksum);
    if (errnum == 0 && (is_fault_due(WRITER_FAULT_RENAME) || rename(s->temporary, path) != 0))
        errnum = errno;
    if (errnum != 0)
        return write_error(s, errnum, 0, error);
    s->temporary[0] = '\0';
    errnum = sync_folder(s);
    return errnum == 0 ? STATUS_OK : write_error(s, errnum, 0, error);
}

static void fill_record(const struct writer_segment *s, int64_t first_sequence, int64_t n_tokens,
                        struct segment_record *record)
{
    record->unit = s->unit;
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

enum status writer_segment_finish(struct writer_segment *s, int64_t first_sequence, int64_t n_tokens,
                                  struct segment_record *record, struct error *error)
{
    TRY(with_place(s, write_rest(s, first_sequence, n_tokens, error), error));
    TRY(close_file(s, error));
    TRY(publish_file(s, record, error));
    fill_record(s, first_sequence, n_tokens, record);
    return STATUS_OK;
}
