#include "pipeline/corpus_source.h"

#include "kernels/base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LEAST_AHEAD 4096
#define BUFFER_BYTES (256 * 1024)

enum status corpus_file_open(const char *path, struct corpus_file *file, struct error *error)
{
    *file = (struct corpus_file){.fd = -1};
    void *name;
    TRY(memory_allocate(&name, strlen(path) + 1, "a path", error));
    file->path = strcpy(name, path);
    /* Without O_NONBLOCK the open of a FIFO would wait for a writer. */
    file->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat info = {0};
    enum status status = STATUS_OK;
    if (file->fd < 0)
        status = error_set_errno(error, STATUS_INPUT, errno, "cannot open the corpus file %s", path);
    else if (fstat(file->fd, &info) != 0)
        status = error_set_errno(error, STATUS_INPUT, errno, "cannot read the size of %s", path);
    else if (!S_ISREG(info.st_mode))
        status = error_set(error, STATUS_INPUT, "%s is %s, expected a file", path,
                           S_ISDIR(info.st_mode) ? "a folder" : "not a regular file");
    file->size = (int64_t)info.st_size;
    if (status != STATUS_OK)
        corpus_file_close(file);
    return status;
}

void corpus_file_close(struct corpus_file *file)
{
    if (file->path != NULL && file->fd >= 0)
        close(file->fd);
    memory_free(file->path);
    *file = (struct corpus_file){.fd = -1};
}

enum status corpus_stream_init(struct corpus_stream *stream, const struct corpus_file *file,
                               struct error *error)
{
    void *buffer;
    TRY(memory_allocate(&buffer, BUFFER_BYTES, "a read buffer", error));
    *stream = (struct corpus_stream){.file = file, .buffer = buffer, .ahead = LEAST_AHEAD};
    return STATUS_OK;
}

void corpus_stream_fini(struct corpus_stream *stream)
{
    memory_free(stream->buffer);
    *stream = (struct corpus_stream){0};
}

/* At least `least` bytes from offset, at most `most`. */
static enum status read_file(const struct corpus_file *file, int64_t offset, int64_t least, int64_t most,
                             unsigned char *to, int64_t *n_read, struct error *error)
{
    int64_t done = 0;
    while (done < least) {
        ssize_t n = pread(file->fd, to + done, (size_t)(most - done), (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_set_errno(error, STATUS_INPUT, errno, "cannot read %s at byte %lld", file->path,
                                   (long long)(offset + done));
        if (n == 0)
            return error_set(error, STATUS_INPUT,
                             "%s ends at byte %lld, expected %lld bytes (it had %lld when it was opened)",
                             file->path, (long long)(offset + done), (long long)(offset + least),
                             (long long)file->size);
        done += n;
    }
    *n_read = done;
    return STATUS_OK;
}

/* Puts the bytes from offset on into the buffer. */
static enum status fill(struct corpus_stream *stream, int64_t offset, int64_t n, struct error *error)
{
    bool is_followed =
        stream->held > 0 && offset >= stream->at && offset <= stream->at + stream->held + stream->ahead;
    stream->ahead = is_followed ? stream->ahead * 2 : LEAST_AHEAD;
    if (stream->ahead > BUFFER_BYTES)
        stream->ahead = BUFFER_BYTES;
    int64_t most = n > stream->ahead ? n : stream->ahead;
    stream->at = offset;
    stream->held = 0;
    return read_file(stream->file, offset, n, most, stream->buffer, &stream->held, error);
}

enum status corpus_stream_read(struct corpus_stream *stream, int64_t offset, int64_t n, void *to,
                               struct error *error)
{
    int64_t n_read;
    if (n == 0)
        return STATUS_OK;
    if (n > BUFFER_BYTES)
        return read_file(stream->file, offset, n, n, to, &n_read, error);
    if (offset < stream->at || offset + n > stream->at + stream->held)
        TRY(fill(stream, offset, n, error));
    memcpy(to, stream->buffer + (offset - stream->at), (size_t)n);
    return STATUS_OK;
}

static int64_t decode(const unsigned char *bytes, struct integer_type type)
{
    uint64_t value = 0;
    for (int i = 0; i < type.bytes; i++)
        value |= (uint64_t)bytes[type.is_big_endian ? type.bytes - 1 - i : i] << (8 * i);
    int unused = 64 - 8 * type.bytes;
    if (type.is_signed) /* the shift to the right brings the sign down */
        return (int64_t)(value << unused) >> unused;
    return (int64_t)value;
}

enum status corpus_stream_read_integers(struct corpus_stream *stream, struct integer_type type,
                                        int64_t offset, int64_t n, int64_t *to, struct error *error)
{
    unsigned char raw[8192];
    const int64_t most = (int64_t)sizeof raw / type.bytes;
    while (n > 0) {
        int64_t count = n < most ? n : most;
        TRY(corpus_stream_read(stream, offset, count * type.bytes, raw, error));
        for (int64_t i = 0; i < count; i++)
            to[i] = decode(raw + i * type.bytes, type);
        offset += count * type.bytes;
        to += count;
        n -= count;
    }
    return STATUS_OK;
}
