/* Small host arrays on their way to the device, the tiles that kernels divide runs by, and operations'
 * scratch. */
#include "kernels/cuda/internal.h"

#define TABLE_ALIGNMENT 256

static size_t align_up(size_t bytes)
{
    return (bytes + TABLE_ALIGNMENT - 1) / TABLE_ALIGNMENT * TABLE_ALIGNMENT;
}

enum status staging_create(struct cuda_backend *cuda, size_t half_bytes, struct error *error)
{
    struct table_ring *ring = &cuda->tables;
    half_bytes = align_up(half_bytes);
    TRY(cuda_allocate_pinned(cuda, (void **)&ring->host, 2 * half_bytes, "tables", error));
    TRY(cuda_translate(cuda, cudaMalloc((void **)&ring->device, 2 * half_bytes),
                       "allocating device memory for tables", error));
    for (int i = 0; i < 2; i++)
        if (ring->read[i] == NULL)
            TRY(cuda_translate(cuda, cudaEventCreateWithFlags(&ring->read[i], cudaEventDisableTiming),
                               "making an event", error));
    ring->half_bytes = half_bytes;
    ring->used = 0;
    ring->half = 0;
    return STATUS_OK;
}

void staging_destroy(struct cuda_backend *cuda)
{
    cudaFreeHost(cuda->tables.host);
    cudaFree(cuda->tables.device);
    for (int i = 0; i < cuda->tables.n_outgrown; i++)
        cudaFree(cuda->tables.outgrown[i]);
    for (int i = 0; i < 2; i++)
        if (cuda->tables.read[i] != NULL)
            cudaEventDestroy(cuda->tables.read[i]);
}

/* A ring whose halves hold `bytes`: for the first batch with longer lists than any before. The operation at
 * hand may have put a shorter list into the old one and not yet launched what reads it: the device's part of
 * that stays. */
static bool grow_ring(struct cuda_backend *cuda, size_t bytes)
{
    struct table_ring *ring = &cuda->tables;
    struct error error = {0};
    if (!cuda_check(cuda, cudaStreamSynchronize(cuda->compute), "waiting for the device") ||
        !cuda_check(cuda, cudaFreeHost(ring->host), "releasing pinned host memory"))
        return false;
    ring->outgrown[ring->n_outgrown++] = ring->device;
    ring->host = ring->device = NULL;
    ring->half_bytes = 0;
    if (staging_create(cuda, 2 * bytes, &error) == STATUS_OK)
        return true;
    error_set(&cuda->base.error, error.status, "%s", error.text);
    return false;
}

/* Enters the other half, once the device has read what was in it. */
static bool turn_ring(struct cuda_backend *cuda)
{
    struct table_ring *ring = &cuda->tables;
    if (!cuda_check(cuda, cudaEventRecord(ring->read[ring->half], cuda->compute), "recording an event"))
        return false;
    ring->half = 1 - ring->half;
    ring->used = 0;
    return cuda_check(cuda, cudaEventSynchronize(ring->read[ring->half]), "waiting for tables to be read");
}

void *staging_begin(struct cuda_backend *cuda, size_t bytes)
{
    struct table_ring *ring = &cuda->tables;
    if (cuda->base.error.status != STATUS_OK)
        return NULL;
    if (align_up(bytes) > ring->half_bytes && !grow_ring(cuda, align_up(bytes)))
        return NULL;
    if (ring->used + align_up(bytes) > ring->half_bytes && !turn_ring(cuda))
        return NULL;
    return ring->host + (size_t)ring->half * ring->half_bytes + ring->used;
}

const void *staging_end(struct cuda_backend *cuda, size_t bytes)
{
    struct table_ring *ring = &cuda->tables;
    size_t at = (size_t)ring->half * ring->half_bytes + ring->used;
    ring->used += align_up(bytes);
    if (bytes > 0 && !cuda_check(cuda,
                                 cudaMemcpyAsync(ring->device + at, ring->host + at, bytes,
                                                 cudaMemcpyHostToDevice, cuda->compute),
                                 "copying a table to the device"))
        return NULL;
    return ring->device + at;
}

const void *staging_upload(struct cuda_backend *cuda, const void *host, size_t bytes)
{
    void *place = staging_begin(cuda, bytes);
    if (place == NULL)
        return NULL;
    if (bytes > 0)
        memcpy(place, host, bytes);
    return staging_end(cuda, bytes);
}

static int64_t count_tiles(const struct runs *runs, int64_t rows)
{
    int64_t n = 0;
    for (int64_t i = 0; i < runs->n; i++)
        n += divide_up(runs->list[i].length, rows);
    return n;
}

static void fill_tiles(struct tile *list, const struct runs *runs, int64_t rows)
{
    int64_t n = 0;
    for (int64_t i = 0; i < runs->n; i++) {
        const struct run *run = &runs->list[i];
        for (int64_t at = 0; at < run->length; at += rows)
            list[n++] = (struct tile){.row = (int32_t)(run->start + at),
                                      .length = (int32_t)min64(rows, run->length - at),
                                      .run = (int32_t)i,
                                      .run_start = run->start,
                                      .run_length = run->length,
                                      .position = (int32_t)(run->position + at)};
    }
}

struct tiles tiles_upload(struct cuda_backend *cuda, const struct runs *runs, int64_t rows)
{
    struct tiles tiles = {.n = count_tiles(runs, rows)};
    size_t bytes = (size_t)tiles.n * sizeof(struct tile);
    struct tile *list = staging_begin(cuda, bytes);
    if (list == NULL)
        return (struct tiles){0};
    fill_tiles(list, runs, rows);
    tiles.list = staging_end(cuda, bytes);
    return tiles.list == NULL ? (struct tiles){0} : tiles;
}

/* The smallest free block that is large enough, or -1. */
static int find_block(const struct scratch *scratch, size_t bytes)
{
    int best = -1;
    for (int i = 0; i < scratch->n_blocks; i++)
        if (!scratch->blocks[i].taken && scratch->blocks[i].bytes >= bytes &&
            (best < 0 || scratch->blocks[i].bytes < scratch->blocks[best].bytes))
            best = i;
    return best;
}

/* The largest free block, or -1. */
static int find_largest(const struct scratch *scratch)
{
    int best = -1;
    for (int i = 0; i < scratch->n_blocks; i++)
        if (!scratch->blocks[i].taken && (best < 0 || scratch->blocks[i].bytes > scratch->blocks[best].bytes))
            best = i;
    return best;
}

/* A place for a new block: that of the largest free one, which is too small and is given up, so that what is
 * kept never comes to more than operations held at once; else an empty one; -1 where there is none. */
static int make_room(struct cuda_backend *cuda)
{
    struct scratch *scratch = &cuda->scratch;
    int place = find_largest(scratch);
    if (place < 0)
        return scratch->n_blocks < SCRATCH_BLOCKS ? scratch->n_blocks++ : -1;
    void *old = scratch->blocks[place].data;
    scratch->blocks[place].data = NULL;
    scratch->blocks[place].bytes = 0;
    cuda_check(cuda, cudaStreamSynchronize(cuda->compute), "waiting for the device");
    cuda_check(cuda, cudaFree(old), "releasing scratch");
    return place;
}

void *scratch_take(struct cuda_backend *cuda, size_t bytes, const char *what)
{
    struct scratch *scratch = &cuda->scratch;
    if (cuda->base.error.status != STATUS_OK)
        return NULL;
    int place = find_block(scratch, bytes);
    if (place < 0) {
        place = make_room(cuda);
        if (place < 0) {
            error_set(&cuda->base.error, STATUS_BUG,
                      "GPU %d: an operation takes more than %d blocks of scratch", cuda->options.ordinal,
                      SCRATCH_BLOCKS);
            return NULL;
        }
        size_t rounded = align_up(bytes + bytes / 4 + 1);
        if (!cuda_check(cuda, cudaMalloc(&scratch->blocks[place].data, rounded), what))
            return NULL;
        scratch->blocks[place].bytes = rounded;
    }
    scratch->blocks[place].taken = true;
    return scratch->blocks[place].data;
}

void scratch_free(struct cuda_backend *cuda)
{
    for (int i = 0; i < cuda->scratch.n_blocks; i++)
        cudaFree(cuda->scratch.blocks[i].data);
    cuda->scratch.n_blocks = 0;
}
