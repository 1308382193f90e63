#include "kernels/cuda/captures.h"
#include "kernels/base/memory.h"

#include <pthread.h>

/* Of stretches: what the widest stores of kernels want, and room for a count behind the rows. */
#define STRETCH_ALIGNMENT 256

/* Rows on their way, in the ring's bytes [at, at + span). */
struct post {
    size_t at, span;
    size_t bytes;     /* of rows */
    size_t count_at;  /* of the overflow count, a uint64_t; 0: none is kept */
    cudaEvent_t done; /* the rows are on the host */
};

struct captures {
    char *host, *device; /* [ring_bytes] each; host is pinned */
    size_t ring_bytes;
    size_t head; /* where the next stretch begins, if it fits there */
    cudaEvent_t filled;
    struct post posts[BACKEND_MAX_POSTS]; /* number i lies at i % BACKEND_MAX_POSTS */
    pthread_mutex_t lock;
    int64_t n_posted, n_taken; /* under the lock */
    size_t taken;              /* bytes of the oldest post; the taking thread's */
};

enum status captures_create(struct cuda_backend *cuda, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct captures), "the captures' state", error));
    struct captures *captures = memory;
    cuda->captures = captures;
    pthread_mutex_init(&captures->lock, NULL);
    TRY(cuda_translate(cuda, cudaEventCreateWithFlags(&captures->filled, cudaEventDisableTiming),
                       "making an event", error));
    for (int i = 0; i < BACKEND_MAX_POSTS; i++)
        /* Who waits for these sleeps: the processor is for those who compress. */
        TRY(cuda_translate(cuda,
                           cudaEventCreateWithFlags(&captures->posts[i].done,
                                                    cudaEventDisableTiming | cudaEventBlockingSync),
                           "making an event", error));
    return STATUS_OK;
}

void captures_destroy(struct cuda_backend *cuda)
{
    struct captures *captures = cuda->captures;
    if (captures == NULL)
        return;
    cudaFreeHost(captures->host);
    cudaFree(captures->device);
    if (captures->filled != NULL)
        cudaEventDestroy(captures->filled);
    for (int i = 0; i < BACKEND_MAX_POSTS; i++)
        if (captures->posts[i].done != NULL)
            cudaEventDestroy(captures->posts[i].done);
    pthread_mutex_destroy(&captures->lock);
    memory_free(captures);
    cuda->captures = NULL;
}

static enum status reserve(struct backend *b, size_t bytes, struct error *error)
{
    struct cuda_backend *cuda = cuda_get(b);
    struct captures *captures = cuda->captures;
    bytes = (bytes + STRETCH_ALIGNMENT - 1) / STRETCH_ALIGNMENT * STRETCH_ALIGNMENT;
    if (bytes <= captures->ring_bytes)
        return STATUS_OK;
    char doing[128];
    snprintf(doing, sizeof doing, "allocating %zu bytes for captured rows", bytes);
    TRY(cuda_translate(cuda, cudaSetDevice(cuda->options.ordinal), "choosing the device", error));
    cudaFreeHost(captures->host);
    cudaFree(captures->device);
    captures->host = captures->device = NULL;
    captures->ring_bytes = captures->head = 0;
    TRY(cuda_translate(cuda, cudaMalloc((void **)&captures->device, bytes), doing, error));
    TRY(cuda_allocate_pinned(cuda, (void **)&captures->host, bytes, "captured rows", error));
    captures->ring_bytes = bytes;
    return STATUS_OK;
}

/* Where a stretch of `span` bytes may begin; false where there is no room. The oldest stretch not yet taken
 * is the limit; head never comes to stand on it, since then a full ring would look like an empty one. */
static bool find_stretch(struct captures *captures, size_t span, size_t *at)
{
    pthread_mutex_lock(&captures->lock);
    int64_t n = captures->n_posted - captures->n_taken;
    size_t tail = captures->posts[captures->n_taken % BACKEND_MAX_POSTS].at;
    pthread_mutex_unlock(&captures->lock);
    if (n == 0)
        captures->head = tail = 0;
    if (n == BACKEND_MAX_POSTS || span > captures->ring_bytes)
        return false;
    bool wraps = captures->head < tail;
    if (!wraps && span <= captures->ring_bytes - captures->head) {
        *at = captures->head;
        return true;
    }
    *at = wraps ? captures->head : 0;
    return n > 0 && *at + span < tail;
}

/* Puts the post's rows into its stretch, and sends them. */
static bool send(struct cuda_backend *cuda, struct post *post, const struct tensor *x, const int32_t *rows,
                 int64_t n, enum dtype dtype)
{
    struct captures *captures = cuda->captures;
    char *device = captures->device + post->at;
    unsigned long long *count = NULL;
    size_t bytes = post->bytes;
    if (post->count_at != 0) {
        count = (unsigned long long *)(void *)(device + post->count_at);
        bytes = post->count_at + sizeof *count;
        if (!cuda_check(cuda, cudaMemsetAsync(count, 0, sizeof *count, cuda->compute), "clearing a count"))
            return false;
    }
    collect_launch(cuda, &(struct collection){*x, rows, 0, n * x->cols, dtype, device, count});
    return cuda->base.error.status == STATUS_OK &&
           cuda_check(cuda, cudaEventRecord(captures->filled, cuda->compute), "recording an event") &&
           cuda_check(cuda, cudaStreamWaitEvent(cuda->copy, captures->filled, 0), "ordering streams") &&
           cuda_check(
               cuda,
               cudaMemcpyAsync(captures->host + post->at, device, bytes, cudaMemcpyDeviceToHost, cuda->copy),
               "copying captured rows to the host") &&
           cuda_check(cuda, cudaEventRecord(post->done, cuda->copy), "recording an event");
}

static bool post_rows(struct backend *b, struct tensor x, const int32_t *rows, int64_t n, enum dtype dtype)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL)
        return false;
    struct captures *captures = cuda->captures;
    struct post *post = &captures->posts[captures->n_posted % BACKEND_MAX_POSTS];
    size_t bytes = (size_t)(n * x.cols) * dtype_size(dtype), at;
    size_t count_at = dtype == DTYPE_F16 ? (bytes + 7) / 8 * 8 : 0;
    size_t span = ((count_at > 0 ? count_at + 8 : bytes) + STRETCH_ALIGNMENT - 1) / STRETCH_ALIGNMENT *
                  STRETCH_ALIGNMENT;
    if (!find_stretch(captures, span, &at))
        return false;
    const int32_t *rows_there = NULL;
    if (rows != NULL && (rows_there = staging_upload(cuda, rows, (size_t)n * sizeof *rows)) == NULL)
        return false;
    *post = (struct post){.at = at, .span = span, .bytes = bytes, .count_at = count_at, .done = post->done};
    if (!send(cuda, post, &x, rows_there, n, dtype))
        return false;
    captures->head = at + span;
    pthread_mutex_lock(&captures->lock);
    captures->n_posted++;
    pthread_mutex_unlock(&captures->lock);
    return true;
}

static void free_oldest(struct captures *captures)
{
    captures->taken = 0;
    pthread_mutex_lock(&captures->lock);
    captures->n_taken++;
    pthread_mutex_unlock(&captures->lock);
}

/* Does not touch the backend's own error: that is the driving thread's. */
static enum status take_bytes(struct backend *b, void *host, size_t bytes, int64_t *n_overflow,
                              struct error *error)
{
    struct cuda_backend *cuda = cuda_get(b);
    struct captures *captures = cuda->captures;
    TRY(cuda_translate(cuda, cudaSetDevice(cuda->options.ordinal), "choosing the device", error));
    for (char *to = host; bytes > 0;) {
        struct post *post = &captures->posts[captures->n_taken % BACKEND_MAX_POSTS];
        const char *from = captures->host + post->at;
        if (captures->taken == 0)
            TRY(cuda_translate(cuda, cudaEventSynchronize(post->done), "waiting for captured rows", error));
        size_t left = post->bytes - captures->taken, n = bytes < left ? bytes : left;
        memcpy(to, from + captures->taken, n);
        captures->taken += n;
        to += n;
        bytes -= n;
        if (captures->taken < post->bytes)
            continue;
        if (post->count_at != 0)
            *n_overflow += *(const int64_t *)(const void *)(from + post->count_at);
        free_oldest(captures);
    }
    return STATUS_OK;
}

static void drop_posts(struct backend *b)
{
    struct cuda_backend *cuda = cuda_get(b);
    cuda_check(cuda, cudaStreamSynchronize(cuda->copy), "copying captured rows to the host");
    while (cuda->captures->n_taken < cuda->captures->n_posted)
        free_oldest(cuda->captures);
}

const struct backend_captures cuda_captures = {
    .reserve = reserve,
    .post = post_rows,
    .take = take_bytes,
    .drop = drop_posts,
};
