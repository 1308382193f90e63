/* Captured rows on their way to the host: the table `captures` of kernels/backend.h.
 *
 * A ring of device memory has a twin in pinned host memory. A post gathers and converts its rows into the
 * next stretch of the device's, on the compute stream; the copy stream brings the stretch over once that is
 * done, and an event tells when it has come. A stretch is used again after its rows were taken. */
#ifndef ACTDUMP_KERNELS_CUDA_CAPTURES_H
#define ACTDUMP_KERNELS_CUDA_CAPTURES_H

#include "kernels/cuda/internal.h"

extern const struct backend_captures cuda_captures;

enum status captures_create(struct cuda_backend *cuda, struct error *error);
void captures_destroy(struct cuda_backend *cuda); /* NULL is fine */

#endif
