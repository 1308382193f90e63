/* The bytes of a chunk: HDF5's byte shuffle (filter 2) and zstd frames (filter 32015), without HDF5.
 *
 * Shuffle: byte b of element i of n goes to place b * n + i; bytes past the last whole element stay at the
 * end. A frame carries its content's size and zstd's own checksum. Threads: functions without a context may
 * be called from any thread; a context belongs to one. */
#ifndef ACTDUMP_PIPELINE_CHUNK_H
#define ACTDUMP_PIPELINE_CHUNK_H

#include "kernels/base/error.h"

#include <stdint.h>

void chunk_shuffle(void *to, const void *from, size_t element_bytes, size_t bytes);
void chunk_unshuffle(void *to, const void *from, size_t element_bytes, size_t bytes);

/* Most bytes that a frame of `bytes` takes. */
size_t chunk_bound(size_t bytes);

/* What a chunk holds: floats of any width are packed in less time, see chunk.c. */
enum chunk_content { CHUNK_ANYTHING, CHUNK_FLOATS };

struct chunk_compressor; /* a zstd context */
enum status chunk_compressor_create(int level, struct chunk_compressor **out, struct error *error);
void chunk_compressor_destroy(struct chunk_compressor *compressor); /* NULL is fine */
/* Packs shuffled elements into `to` of `room` bytes, at least chunk_bound. */
enum status chunk_compress(struct chunk_compressor *compressor, enum chunk_content content, void *to,
                           size_t room, const void *from, size_t bytes, size_t *packed, struct error *error);
/* Unpacks one frame that must hold exactly `bytes`, end where the input ends, and carry a checksum that fits.
 */
enum status chunk_decompress(void *to, size_t bytes, const void *from, size_t packed, struct error *error);
/* For HDF5's filter pipeline, which does not say how large the content is: unpacks a frame whose header says
 * its size (at most 4 GiB, as no chunk is larger) into malloc'ed memory. NULL where it cannot. */
void *chunk_unpack_any(const void *from, size_t packed, size_t *bytes);

#endif
