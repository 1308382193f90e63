#include "pipeline/lock.h"

#include "kernels/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void read_holder(int descriptor, char *holder, size_t size)
{
    ssize_t n = pread(descriptor, holder, size - 1, 0);
    holder[n > 0 ? n : 0] = '\0';
    holder[strcspn(holder, "\n")] = '\0';
}

static void write_holder(int descriptor)
{
    char host[128] = "", holder[192];
    gethostname(host, sizeof host - 1);
    int length = snprintf(holder, sizeof holder, "process %ld on %s\n", (long)getpid(), host);
    /* Only for the other job's message: nothing depends on it. */
    if (ftruncate(descriptor, 0) != 0 || pwrite(descriptor, holder, (size_t)length, 0) != length)
        log_debug("store.lock cannot be written: %s", strerror(errno));
}

enum status lock_acquire(const char *folder, int *out, struct error *error)
{
    char path[4096], holder[192];
    if ((size_t)snprintf(path, sizeof path, "%s/store.lock", folder) >= sizeof path)
        return error_set(error, STATUS_USAGE, "%s: the path is too long", folder);
    int descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor < 0)
        return error_set_errno(error, STATUS_USAGE, errno, "%s cannot be opened", path);
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fcntl(descriptor, F_OFD_SETLK, &range) == 0) {
        write_holder(descriptor);
        *out = descriptor;
        return STATUS_OK;
    }
    enum status status;
    if (errno == EAGAIN || errno == EACCES) {
        read_holder(descriptor, holder, sizeof holder);
        status = error_set(error, STATUS_USAGE, "%s: another job is writing this store (%s)", folder,
                           holder[0] != '\0' ? holder : "it did not say who it is");
    } else if (errno == ENOLCK || errno == EOPNOTSUPP || errno == EINVAL || errno == ENOSYS) {
        log_warning("%s: this file system has no locks (%s); see to it that only one job writes the store",
                    path, strerror(errno));
        *out = descriptor;
        return STATUS_OK;
    } else {
        status = error_set_errno(error, STATUS_USAGE, errno, "%s cannot be locked", path);
    }
    close(descriptor);
    return status;
}

void lock_release(int descriptor)
{
    if (descriptor >= 0)
        close(descriptor);
}
