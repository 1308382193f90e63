#include "pipeline/writer_file.h"

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

/* ---------------------------------------------------------------- faults on demand */

static _Atomic int64_t faults[WRITER_FAULT_COUNT] = {-1, -1, -1, -1, -1, -1};

void writer_fail_at(enum writer_fault fault, int64_t n)
{
    atomic_store(&faults[fault], n);
}

bool writer_fault_is_due(enum writer_fault fault)
{
    int64_t left = atomic_load(&faults[fault]);
    while (left >= 0 && !atomic_compare_exchange_weak(&faults[fault], &left, left - 1))
        ;
    if (left != 0)
        return false;
    errno = fault == WRITER_FAULT_CHUNK ? ENOSPC : EIO;
    return true;
}

/* ---------------------------------------------------------------- errors */

/* Puts what is left where the segment was to go into a sentence. */
static void describe_room(const struct writer_folder *folder, char *text, size_t size)
{
    struct statvfs fs;
    struct rlimit limit;
    size_t used = 0;
    text[0] = '\0';
    if (statvfs(folder->store, &fs) == 0)
        used = (size_t)snprintf(text, size, ", %" PRIu64 " bytes are free there",
                                (uint64_t)fs.f_bavail * (uint64_t)fs.f_frsize);
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && used < size)
        snprintf(text + used, size - used, " and no file may be larger than %" PRIu64 " bytes",
                 (uint64_t)limit.rlim_cur);
}

enum status writer_file_error(const struct writer_folder *folder, int64_t unit, int errnum, const char *extra,
                              struct error *error)
{
    char name[64], room[192];
    store_segment_name(unit, name);
    describe_room(folder, room, sizeof room);
    if (errnum == 0)
        return error_set(error, STATUS_RESOURCE, "%s/%s cannot be written (%sHDF5 failed%s)", folder->store,
                         name, extra, room);
    return error_set_errno(error, STATUS_RESOURCE, errnum, "%s/%s cannot be written (%sunit %" PRId64 "%s)",
                           folder->store, name, extra, unit, room);
}

enum status writer_file_with_place(const struct writer_folder *folder, int64_t unit, enum status call,
                                   struct error *error)
{
    char name[64], room[192];
    if (call == STATUS_OK)
        return call;
    store_segment_name(unit, name);
    describe_room(folder, room, sizeof room);
    error_prefix(error, "%s/%s cannot be written (unit %" PRId64 "%s)", folder->store, name, unit, room);
    return call;
}

/* ---------------------------------------------------------------- a file's way */

enum status writer_folder_init(struct writer_folder *folder, const char *store, struct error *error)
{
    if ((size_t)snprintf(folder->store, sizeof folder->store, "%s", store) >= sizeof folder->store)
        return error_set(error, STATUS_USAGE, "the store's path %.64s... is too long", store);
    snprintf(folder->segments, sizeof folder->segments, "%s/segments", folder->store);
    return STATUS_OK;
}

enum status writer_file_name(const struct writer_folder *folder, int64_t unit, struct writer_file *file,
                             struct error *error)
{
    char name[64];
    *file = WRITER_NO_FILE;
    file->unit = unit;
    store_segment_name(unit, name);
    return files_name_temporary(folder->segments, strrchr(name, '/') + 1, file->temporary, error);
}

int writer_file_open_sync(struct writer_file *file)
{
    file->sync_fd = open(file->temporary, O_RDONLY | O_CLOEXEC);
    return file->sync_fd >= 0 ? 0 : errno;
}

static int close_sync_fd(struct writer_file *file)
{
    int errnum = file->sync_fd >= 0 && close(file->sync_fd) != 0 ? errno : 0;
    file->sync_fd = -1;
    return errnum;
}

/* What HDF5 could not close it keeps open, so the file is emptied before it is removed, or its blocks would
 * stay taken. */
void writer_file_remove(struct writer_file *file)
{
    close_sync_fd(file);
    if (file->temporary[0] != '\0') {
        int ignored = truncate(file->temporary, 0);
        (void)ignored;
        unlink(file->temporary);
    }
    file->temporary[0] = '\0';
}

static int sync_file(const struct writer_file *file)
{
    return writer_fault_is_due(WRITER_FAULT_SYNC) || fsync(file->sync_fd) != 0 ? errno : 0;
}

static int sync_folder(const struct writer_folder *folder)
{
    return writer_fault_is_due(WRITER_FAULT_FOLDER_SYNC) ? errno : files_sync(folder->segments);
}

enum status writer_file_publish(const struct writer_folder *folder, struct writer_file *file, void *buffer,
                                struct segment_record *record, struct error *error)
{
    char name[64], path[FILES_PATH_BYTES];
    store_segment_name(file->unit, name);
    snprintf(path, sizeof path, "%s/%s", folder->store, name);
    int errnum = sync_file(file);
    if (errnum == 0)
        errnum = close_sync_fd(file);
    if (errnum == 0)
        errnum = files_hash(file->temporary, buffer, &record->bytes, &record->checksum);
    if (errnum == 0 && (writer_fault_is_due(WRITER_FAULT_RENAME) || rename(file->temporary, path) != 0))
        errnum = errno;
    if (errnum != 0)
        return writer_file_error(folder, file->unit, errnum, "", error);
    file->temporary[0] = '\0';
    errnum = sync_folder(folder);
    return errnum == 0 ? STATUS_OK : writer_file_error(folder, file->unit, errnum, "", error);
}
