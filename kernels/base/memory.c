#include "kernels/base/memory.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Each block starts with its size, in a header as large as the alignment so that the caller's part stays
 * aligned. */
struct header {
    size_t bytes;
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

enum status memory_allocate(void **out, size_t bytes, const char *what, struct error *error)
{
    size_t padded = (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT + MEMORY_ALIGNMENT;
    char *block = padded < bytes || should_fail() ? NULL : aligned_alloc(MEMORY_ALIGNMENT, padded);
    if (block == NULL)
        return error_set(error, STATUS_RESOURCE, "out of memory: %zu bytes for %s (%zu in use)", bytes, what,
                         memory_in_use());
    memset(block, 0, padded);
    ((struct header *)block)->bytes = bytes;
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
    atomic_fetch_sub(&in_use, ((struct header *)block)->bytes);
    free(block);
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
