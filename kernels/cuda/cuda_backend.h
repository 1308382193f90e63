/* The CUDA backend: the table of kernels/backend.h on one NVIDIA GPU.
 *
 * A build without CUDA has the same functions (cuda_absent.c): no device is counted and creating one fails
 * with STATUS_DEVICE and a sentence that says why. The program starts on machines without a driver or without
 * cuBLAS: the runtime is linked statically and finds the driver when it is first asked, cuBLAS is opened when
 * a backend is made. */
#ifndef ACTDUMP_KERNELS_CUDA_CUDA_BACKEND_H
#define ACTDUMP_KERNELS_CUDA_CUDA_BACKEND_H

#include "kernels/backend.h"

/* GPUs that this process may use (within CUDA_VISIBLE_DEVICES); 0 where there are none, no driver, or no CUDA
 * in the build. `reason`, where not NULL, is then filled with a sentence that says which. Never fails. */
int backend_cuda_device_count(struct error *reason);

/* Bytes of device memory, free now and in all. STATUS_DEVICE where the device cannot be asked. */
enum status backend_cuda_memory(int ordinal, size_t *free_bytes, size_t *total_bytes, struct error *error);

/* Bytes of device memory that the operations of a backend take for intermediates at most, beside what
 * `allocate`, `matrix_create` and `reserve` are asked for and what a backend takes when it is made. For
 * plans. */
size_t backend_cuda_scratch_bytes(void);

/* A backend on GPU `ordinal`, 0-based within those visible. tf32: matrix products of float32 may use the
 * tensor cores' 10-bit mantissas. Returns owned at *out; backend_destroy ends it. STATUS_DEVICE where it
 * cannot be made. */
enum status backend_create_cuda(int ordinal, bool tf32, struct backend **out, struct error *error);

#endif
