#include "kernels/base/memory.h"

#include <assert.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* From here on a block is a mapping of its own: in huge pages where the system has them (weights and
 * activations are walked in long strides), and given back at once. Its pages are there before it is used, so
 * that memory runs out here, with a sentence, and the plan's figure is what the process takes. Sanitizers see
 * the edges of a block of the heap only, so there all blocks are. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MAPPED_BYTES SIZE_MAX
#else
#define MAPPED_BYTES ((size_t)4 << 20)
#endif

/* Of blocks below the first, freed ones stay in the heap; of the heap's end, up to the second. Fixed, as
 * glibc else raises both with every freed mapping, and a loader's large buffers then stay behind as holes. */
enum { HEAP_BLOCK_BYTES = 16 << 20, HEAP_END_BYTES = 32 << 20 };

void memory_tune(void)
{
    mallopt(M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES);
    mallopt(M_TRIM_THRESHOLD, HEAP_END_BYTES);
}

/* Each block starts with its size, in a header as large as the alignment so that the caller's part stays
 * aligned. */
struct header {
    size_t bytes, padded;
};

static atomic_size_t in_use, peak;
static atomic_uint_fast64_t allocations;
static _Atomic int64_t fail_countdown = -1;

static bool should_fail(void)
{
    int64_t left = atomic_load(&fail_countdown);
    while (left >= 0) {
        if (atomic_compare_exchange_weak(&fail_countdown, &left, left - 1))
            return left == 0;
    }
    return false;
}

/* Zeroed memory; NULL where there is none. */
static char *take_block(size_t padded)
{
    if (padded < MAPPED_BYTES) {
        char *block = aligned_alloc(MEMORY_ALIGNMENT, padded);
        return block == NULL ? NULL : memset(block, 0, padded);
    }
    void *block = mmap(NULL, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED)
        return NULL;
    madvise(block, padded, MADV_HUGEPAGE); /* advice only: a kernel without them says no */
#ifdef MADV_POPULATE_WRITE
    if (madvise(block, padded, MADV_POPULATE_WRITE) == 0)
        return block;
    if (errno == ENOMEM) {
        munmap(block, padded);
        return NULL;
    }
#endif
    return memset(block, 0, padded); /* kernels before 5.14 */
}

static void give_block(char *block, size_t padded)
{
    if (padded < MAPPED_BYTES)
        free(block);
    else
        munmap(block, padded);
}

enum status memory_allocate(void **out, size_t bytes, const char *what, struct error *error)
{
    size_t padded = (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT + MEMORY_ALIGNMENT;
    char *block = padded < bytes || should_fail() ? NULL : take_block(padded);
    if (block == NULL)
        return error_set(error, STATUS_RESOURCE, "out of memory: %zu bytes for %s (%zu in use)", bytes, what,
                         memory_in_use());
    *(struct header *)block = (struct header){.bytes = bytes, .padded = padded};
    size_t now = atomic_fetch_add(&in_use, bytes) + bytes, seen = atomic_load(&peak);
    while (now > seen && !atomic_compare_exchange_weak(&peak, &seen, now))
        ;
    atomic_fetch_add(&allocations, 1);
    *out = block + MEMORY_ALIGNMENT;
    return STATUS_OK;
}

enum status memory_allocate_array(void **out, size_t count, size_t size, const char *what,
                                  struct error *error)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes))
        return error_set(error, STATUS_RESOURCE, "out of memory: %zu elements of %zu bytes for %s", count,
                         size, what);
    return memory_allocate(out, bytes, what, error);
}

void memory_free(void *memory)
{
    if (memory == NULL)
        return;
    char *block = (char *)memory - MEMORY_ALIGNMENT;
    struct header header = *(struct header *)block;
    atomic_fetch_sub(&in_use, header.bytes);
    give_block(block, header.padded);
}

size_t memory_in_use(void)
{
    return atomic_load(&in_use);
}

size_t memory_peak(void)
{
    return atomic_load(&peak);
}

uint64_t memory_allocation_count(void)
{
    return atomic_load(&allocations);
}

void memory_fail_at(int64_t n)
{
    atomic_store(&fail_countdown, n);
}

void *arena_take(struct arena *arena, size_t bytes)
{
    size_t at = arena->used;
    arena->used += (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
    if (arena->base == NULL)
        return NULL;
    assert(arena->used <= arena->capacity);
    return arena->base + at;
}

enum status arena_allocate(struct arena *arena, const char *what, struct error *error)
{
    void *block;
    TRY(memory_allocate(&block, arena->used, what, error));
    *arena = (struct arena){.base = block, .capacity = arena->used};
    return STATUS_OK;
}

void arena_free(struct arena *arena)
{
    memory_free(arena->base);
    *arena = (struct arena){0};
}
