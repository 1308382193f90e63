/* Inside the CPU backend: what its files share. Nobody outside kernels/cpu includes this.
 *
 * Each file of operations (embed.c, norm.c, ...) is compiled once for each instruction set, holds static
 * functions and one filler, CPU_NAME(cpu_fill_<file>), which puts its operations into a table. cpu.c calls
 * the fillers of the set that the machine has. Operations are written with simd.h, whose vectors are as wide
 * as the set's.
 *
 * Rules for operations: return at once where cpu_has_failed(b); no memory is allocated except by cpu_scratch;
 * OpenMP regions carry num_threads(b->n_threads); the result of an element may not depend on how work was
 * split. */
#ifndef ACTDUMP_CPU_CPU_H
#define ACTDUMP_CPU_CPU_H

#include "kernels/backend.h"

enum cpu_isa { CPU_BASELINE, CPU_AVX2, CPU_AVX512, CPU_ISA_COUNT };

struct gemm; /* gemm.h */

struct cpu_backend {
    struct backend base; /* first: a struct backend * is one of these */
    struct backend_ops ops;
    enum cpu_isa isa;
    bool fast_bf16; /* AVX512_BF16 multiplies twice what FMA does in float32 */
    struct gemm *gemm;
    void *scratch;
    size_t scratch_bytes;
};

/* cpu_fill_norm becomes cpu_fill_norm_avx2: the same name in each of the three builds of a file. */
#ifdef CPU_ISA
#define CPU_PASTE_(name, isa) name##_##isa
#define CPU_PASTE(name, isa) CPU_PASTE_(name, isa)
#define CPU_NAME(name) CPU_PASTE(name, CPU_ISA)
#endif

static inline bool cpu_has_failed(const struct backend *b)
{
    return b->error.status != STATUS_OK;
}

/* The index of the run that holds `row` (the last, for rows past the end). */
static inline int64_t cpu_find_run(const struct runs *runs, int64_t row)
{
    int64_t low = 0, high = runs->n;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (runs->list[middle].start <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The place in rows->index of the first row at or after `row`. */
static inline int64_t cpu_find_row(const struct row_list *rows, int64_t row)
{
    int64_t low = 0, high = rows->n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (rows->index[middle] < row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static inline struct cpu_backend *cpu_get(struct backend *b)
{
    return (struct cpu_backend *)b;
}

/* Working memory of one operation, aligned to MEMORY_ALIGNMENT, its contents unknown; the next operation may
 * have the same bytes. CPU_SCRATCH_BYTES are there from the start; more is allocated at the first need and
 * kept. NULL when there is no more memory: the backend has failed then. Call it outside parallel regions. */
#define CPU_SCRATCH_BYTES ((size_t)16 << 20)
void *cpu_scratch(struct backend *b, size_t bytes);

#endif
