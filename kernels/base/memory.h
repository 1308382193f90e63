/* Memory: aligned, zeroed, counted allocations, and arenas planned before they are allocated.
 *
 * Every allocation of actdump's own that grows with the model, the batch or the corpus goes through here, so
 * that the plan's figures can be checked against what is used, and so that tests can make the n-th one fail.
 * Thread safety: all functions may be called from any thread; an arena belongs to one thread at a time. */
#ifndef ACTDUMP_BASE_MEMORY_H
#define ACTDUMP_BASE_MEMORY_H

#include "kernels/base/error.h"

#include <stdint.h>

/* 64 bytes: a cache line, and the widest vector register. */
#define MEMORY_ALIGNMENT 64

/* For a program's first lines: has the C library keep what small blocks were freed. oneDNN takes up to some
 * MiB for each product; given back to the system and faulted in again each time, that was 5 to 19 % of a
 * forward. */
void memory_tune(void);

/* Returns zeroed memory at *out, aligned to MEMORY_ALIGNMENT, owned by the caller. bytes may be 0 (then *out
 * is still a pointer that memory_free takes). On failure the sentence names `what` and the size. */
enum status memory_allocate(void **out, size_t bytes, const char *what, struct error *error);
/* count * size with overflow checked. */
enum status memory_allocate_array(void **out, size_t count, size_t size, const char *what,
                                  struct error *error);
void memory_free(void *memory); /* NULL is fine */

/* Bytes allocated now, and the most there have been. */
size_t memory_in_use(void);
size_t memory_peak(void);
/* Calls of memory_allocate so far: a batch loop must not change it. */
uint64_t memory_allocation_count(void);
/* Tests: makes the n-th allocation from now fail (0 is the next; negative: none). */
void memory_fail_at(int64_t n);

/* An arena hands out aligned pieces of one block. Run the same code twice: first against a measuring arena
 * (base NULL, hands out NULL, only counts), then, after arena_allocate, for real. */
struct arena {
    char *base;      /* NULL while measuring */
    size_t capacity; /* bytes of the block */
    size_t used;
};

void *arena_take(struct arena *arena, size_t bytes); /* a bug (assert) when a real arena runs out */
/* Turns a measuring arena into a real one of the bytes that it counted. */
enum status arena_allocate(struct arena *arena, const char *what, struct error *error);
void arena_free(struct arena *arena);

#endif
