#include "pipeline/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum status files_name_temporary(const char *folder, const char *name, char path[FILES_PATH_BYTES],
                                 struct error *error)
{
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    int n = snprintf(path, FILES_PATH_BYTES, "%s/.%s.%s.%ld.tmp", folder, name, host, (long)getpid());
    if (n < 0 || n >= FILES_PATH_BYTES)
        return error_set(error, STATUS_USAGE, "the path %.64s... is too long", folder);
    return STATUS_OK;
}

int files_is_temporary(const char *name)
{
    size_t n = strlen(name);
    return name[0] == '.' && n > 5 && strcmp(name + n - 4, ".tmp") == 0;
}

double files_temporary_missing(const char *folder, int64_t before, double whole)
{
    double bytes = 0;
    DIR *listing = opendir(folder);
    if (listing == NULL)
        return 0;
    for (struct dirent *entry; (entry = readdir(listing)) != NULL;) {
        struct stat about;
        if (!files_is_temporary(entry->d_name) || strtoll(entry->d_name + 1, NULL, 10) >= before ||
            fstatat(dirfd(listing), entry->d_name, &about, 0) != 0)
            continue;
        if ((double)about.st_size < whole)
            bytes += whole - (double)about.st_size;
    }
    closedir(listing);
    return bytes;
}

int files_sync(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    int errnum = fsync(fd) != 0 ? errno : 0;
    if (close(fd) != 0 && errnum == 0)
        errnum = errno;
    return errnum;
}

int files_hash(const char *path, void *buffer, int64_t *bytes, uint64_t *checksum)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    XXH3_state_t *state = XXH3_createState();
    if (state == NULL) {
        close(fd);
        return ENOMEM;
    }
    int64_t total = 0;
    ssize_t n;
    XXH3_64bits_reset(state);
    while ((n = read(fd, buffer, FILES_HASH_BYTES)) > 0) {
        XXH3_64bits_update(state, buffer, (size_t)n);
        total += n;
    }
    int errnum = n < 0 ? errno : 0;
    *bytes = total;
    *checksum = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    close(fd);
    return errnum;
}

enum status files_publish(const char *temporary, const char *folder, const char *name, struct error *error)
{
    char path[FILES_PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int errnum = files_sync(temporary);
    if (errnum == 0 && rename(temporary, path) != 0)
        errnum = errno;
    if (errnum != 0) {
        unlink(temporary);
        return error_set_errno(error, STATUS_RESOURCE, errnum, "%s cannot be written", path);
    }
    errnum = files_sync(folder);
    return errnum == 0
               ? STATUS_OK
               : error_set_errno(error, STATUS_RESOURCE, errnum, "the folder %s cannot be synced", folder);
}

static int write_all(int fd, const char *text, size_t length)
{
    while (length > 0) {
        ssize_t n = write(fd, text, length);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno;
        text += n;
        length -= (size_t)n;
    }
    return 0;
}

enum status files_write(const char *folder, const char *name, const char *text, size_t length,
                        struct error *error)
{
    char temporary[FILES_PATH_BYTES];
    TRY(files_name_temporary(folder, name, temporary, error));
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return error_set_errno(error, STATUS_RESOURCE, errno, "%s cannot be created", temporary);
    int errnum = write_all(fd, text, length);
    if (close(fd) != 0 && errnum == 0)
        errnum = errno;
    if (errnum != 0) {
        unlink(temporary);
        return error_set_errno(error, STATUS_RESOURCE, errnum, "%s/%s cannot be written", folder, name);
    }
    return files_publish(temporary, folder, name, error);
}
