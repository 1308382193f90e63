/* Inside the CUDA backend: what its files share. Nobody outside kernels/cuda includes this, but for the tests
 * that make a backend with small buffers.
 *
 * Host-side files are C, operations are .cu: one operation (or one family of small ones) a file, each with
 * its kernels and its entry in the table. An entry begins with cuda_begin, which is NULL after a failure,
 * launches on the compute stream through launch() of device.h, and never waits for the device.
 *
 * Streams: everything runs on `compute`; only copies of captured rows to the host run on `copy`.
 *
 * Threads: the one that drives the backend, and, for backend_captures.take alone, one more. */
#ifndef ACTDUMP_KERNELS_CUDA_INTERNAL_H
#define ACTDUMP_KERNELS_CUDA_INTERNAL_H

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/backend.h"

struct blas;     /* blas.h */
struct captures; /* captures.h */
struct transfer; /* transfer.h */

/* What a test may choose; the program takes cuda_options_default. */
struct cuda_options {
    int ordinal;
    bool tf32;
    size_t piece_bytes;   /* of one transfer buffer */
    int n_pieces;         /* transfer buffers, 2 or more */
    size_t table_bytes;   /* of one half of the ring that row lists and tile tables go up through */
    size_t scratch_bytes; /* what an operation's intermediates may take; larger problems go in pieces */
};

/* Device memory of operations for the length of one of them: blocks that are kept once made. */
#define SCRATCH_BLOCKS 16
struct scratch {
    struct {
        void *data;
        size_t bytes;
        bool taken;
    } blocks[SCRATCH_BLOCKS];
    int n_blocks;
};

/* A ring at least doubles when it grows: so often at most. */
#define TABLE_GROWTHS 40
/* A ring of small uploads. Two halves; a half is written again only after the device has read it (`read` is
 * recorded on the compute stream when the other half is entered). */
struct table_ring {
    size_t half_bytes, used;
    int half;
    char *host, *device; /* [2 * half_bytes], host is pinned */
    cudaEvent_t read[2];
    char *outgrown[TABLE_GROWTHS]; /* device memory of shorter rings: an operation may still name it */
    int n_outgrown;
};

/* The group sizes of the latest group_experts, on their way to the host for the grouped products. */
struct group_sizes {
    const int32_t *offsets; /* the device array that they are a copy of; NULL: none yet */
    int32_t *host;          /* [capacity], pinned */
    int capacity;
    cudaEvent_t arrived;
};

struct cuda_backend {
    struct backend base; /* first: a struct backend * is one of these */
    struct cuda_options options;
    char device_name[48];
    int n_processors; /* streaming multiprocessors */
    size_t max_shared_bytes;
    cudaStream_t compute, copy;
    struct transfer *transfer;
    struct captures *captures;
    struct table_ring tables;
    struct scratch scratch;
    struct group_sizes sizes;
    struct blas *blas;
};

struct matrix {
    void *data; /* [n, k] on the device */
    enum dtype dtype;
    int64_t n, k;
};

void cuda_options_default(struct cuda_options *options);
enum status cuda_backend_create(const struct cuda_options *options, struct backend **out,
                                struct error *error);

static inline struct cuda_backend *cuda_get(struct backend *b)
{
    return (struct cuda_backend *)b;
}

/* The backend, its device made current for this thread, its scratch free again; NULL where it has failed. */
struct cuda_backend *cuda_begin(struct backend *b);

/* The one place where CUDA's errors become ours: true where `code` is success; else the first failure is kept
 * in the backend, `what` saying what was being done. */
bool cuda_check(struct cuda_backend *cuda, cudaError_t code, const char *what);
/* The same into an error of the caller's. */
enum status cuda_translate(const struct cuda_backend *cuda, cudaError_t code, const char *what,
                           struct error *error);

/* Pinned host memory, which is the host's to be short of: STATUS_RESOURCE then. Returns owned at *out
 * (cudaFreeHost). */
enum status cuda_allocate_pinned(const struct cuda_backend *cuda, void **out, size_t bytes, const char *what,
                                 struct error *error);

/* Device memory until the operation's end, its contents unknown, aligned to 256 bytes. NULL after a failure.
 */
void *scratch_take(struct cuda_backend *cuda, size_t bytes, const char *what);
void scratch_free(struct cuda_backend *cuda);

/* Copies a small host array; returns its place on the device, valid for what is launched on the compute
 * stream before the ring comes round (at least table_bytes of other uploads). NULL after a failure; never
 * NULL else, also for no bytes. The host array may be changed at once. */
const void *staging_upload(struct cuda_backend *cuda, const void *host, size_t bytes);
/* The same in two steps, for what is made in place: begin gives pinned memory to fill, end sends it. */
void *staging_begin(struct cuda_backend *cuda, size_t bytes);
const void *staging_end(struct cuda_backend *cuda, size_t bytes);
enum status staging_create(struct cuda_backend *cuda, size_t half_bytes, struct error *error);
void staging_destroy(struct cuda_backend *cuda);

/* A stretch of a run: how kernels divide a batch where runs matter. */
struct tile {
    int32_t row;       /* first row in the batch */
    int32_t length;    /* rows */
    int32_t run;       /* index of its run */
    int32_t run_start; /* the run's first row */
    int32_t run_length;
    int32_t position; /* of the tile's first token in its document's run */
};

struct tiles {
    const struct tile *list; /* on the device */
    int64_t n;
};

/* Cuts runs into tiles of at most `rows` rows and uploads them. n is 0 after a failure. */
struct tiles tiles_upload(struct cuda_backend *cuda, const struct runs *runs, int64_t rows);

static inline int64_t divide_up(int64_t n, int64_t by)
{
    return (n + by - 1) / by;
}

static inline int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Sends the groups' offsets to the host; sizes.arrived tells when they are there. */
bool group_sizes_send(struct cuda_backend *cuda, const struct expert_groups *groups);

/* Kernels that host-side files need. */
void convert_launch(struct cuda_backend *cuda, const struct tensor *from, const struct tensor *to);
/* to[i] = the elements [first, first + n) of x's selected rows, counted row by row, as dtype. */
struct collection {
    struct tensor x;
    const int32_t *rows; /* on the device; NULL: all */
    int64_t first, n;
    enum dtype dtype;
    void *to;
    unsigned long long *n_overflow; /* on the device: grows by what is finite in x and infinite in float16;
                                       NULL: not counted */
};
void collect_launch(struct cuda_backend *cuda, const struct collection *collection);

/* The table's entries, each in the file of its name. */
void cuda_embed(struct backend *b, struct tensor table, const int32_t *ids, struct tensor out);
void cuda_linear(struct backend *b, struct tensor x, const struct matrix *w, const float *bias,
                 struct tensor addend, struct tensor y);
void cuda_rms_norm(struct backend *b, const struct norm_args *args);
void cuda_add(struct backend *b, struct tensor x, struct tensor y, struct tensor out);
void cuda_add_scaled(struct backend *b, struct tensor x, struct tensor y, float scale, struct tensor out);
void cuda_silu_mul(struct backend *b, struct tensor gate, struct tensor up, struct tensor activation,
                   struct tensor y);
void cuda_conv_silu(struct backend *b, const struct conv_args *args);
void cuda_selective_scan(struct backend *b, const struct selective_scan_args *args);
void cuda_ssd_scan(struct backend *b, const struct ssd_scan_args *args);
void cuda_rotary(struct backend *b, const struct rotary_args *args);
void cuda_attention(struct backend *b, const struct attention_args *args);
void cuda_softplus_gate(struct backend *b, struct tensor x, struct tensor gate, int head_dim,
                        struct tensor y);
void cuda_route(struct backend *b, const struct route_args *args);
void cuda_group_experts(struct backend *b, struct tensor indices, struct expert_groups *groups);
/* xg[i] = x[order[i] / K], i < T * K. */
void cuda_gather_slots(struct backend *b, struct tensor x, const struct expert_groups *groups,
                       struct tensor xg);
void cuda_grouped_linear(struct backend *b, struct tensor xg, const struct expert_groups *groups,
                         struct matrix *const *experts, struct tensor yg);
void cuda_gathered_linear(struct backend *b, struct tensor x, const struct expert_groups *groups,
                          struct matrix *const *experts, struct tensor xg, struct tensor yg);
void cuda_combine_slots(struct backend *b, struct tensor yg, const struct expert_groups *groups,
                        struct tensor weights, float scale, struct tensor out);
void cuda_ungroup_slots(struct backend *b, struct tensor yg, const struct expert_groups *groups,
                        struct tensor weights, struct row_list rows, struct tensor out);
void cuda_softmax(struct backend *b, struct tensor x, struct tensor y);
void cuda_gather_rows(struct backend *b, struct tensor x, struct row_list rows, struct tensor out);

#ifdef __cplusplus
}
#endif

#endif
