/* Bytes between host and device, through pinned buffers that are made once and go round.
 *
 * A piece is a pinned host buffer with a device buffer of the same size. Uploads and downloads use the host
 * side alone; rows that `collect` is asked for are gathered and converted into the device side, copied to the
 * host side on the copy stream, and taken out to where they belong when the piece is needed again or at the
 * next synchronize. A job's captures have a way of their own (captures.h). */
#ifndef ACTDUMP_KERNELS_CUDA_TRANSFER_H
#define ACTDUMP_KERNELS_CUDA_TRANSFER_H

#include "kernels/cuda/internal.h"

enum status transfer_create(struct cuda_backend *cuda, size_t piece_bytes, int n_pieces, struct error *error);
void transfer_destroy(struct cuda_backend *cuda);

/* What it copies is in pinned memory when it returns, and on the device before what is launched next. */
void transfer_upload(struct cuda_backend *cuda, void *to, const void *from_host, size_t bytes);
/* Waited for. */
void transfer_download(struct cuda_backend *cuda, void *to_host, const void *from, size_t bytes);

/* Uploads rows of w, converted to to->dtype on the device where they differ; `to` has no gaps. Not waited
 * for. */
void transfer_matrix(struct cuda_backend *cuda, const struct tensor *w, const struct tensor *to);

/* The operation `collect`. rows is host memory. */
void transfer_collect(struct cuda_backend *cuda, const struct tensor *x, const int32_t *rows, int64_t n,
                      enum dtype dtype, void *host);
/* Takes everything on its way out to where it belongs. */
void transfer_finish(struct cuda_backend *cuda);

#endif
