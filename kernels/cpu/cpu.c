#include "kernels/cpu/cpu.h"
#include "kernels/base/memory.h"
#include "kernels/base/processors.h"
#include "kernels/cpu/gemm.h"

#include "cpu_op_files.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define DECLARE_FILLERS(file)                                                                                \
    void cpu_fill_##file##_baseline(struct backend_ops *ops);                                                \
    void cpu_fill_##file##_avx2(struct backend_ops *ops);                                                    \
    void cpu_fill_##file##_avx512(struct backend_ops *ops);
CPU_OP_FILES(DECLARE_FILLERS)

#define LIST_FILLERS(file) {cpu_fill_##file##_baseline, cpu_fill_##file##_avx2, cpu_fill_##file##_avx512},
static void (*const fillers[][CPU_ISA_COUNT])(struct backend_ops *ops) = {CPU_OP_FILES(LIST_FILLERS)};

/* As ACTDUMP_ISA spells them, and as people do. */
static const char *const isa_words[CPU_ISA_COUNT] = {"baseline", "avx2", "avx512"};
static const char *const isa_names[CPU_ISA_COUNT] = {"baseline", "AVX2", "AVX-512"};

#define SLOT(name)                                                                                           \
    {                                                                                                        \
#name, offsetof(struct backend_ops, name)                                                            \
    }
static const struct {
    const char *name;
    size_t offset;
} slots[] = {SLOT(destroy),
             SLOT(allocate),
             SLOT(release),
             SLOT(upload),
             SLOT(download),
             SLOT(synchronize),
             SLOT(matrix_create),
             SLOT(matrix_destroy),
             SLOT(matrix_bytes),
             SLOT(embed),
             SLOT(linear),
             SLOT(rms_norm),
             SLOT(add),
             SLOT(add_scaled),
             SLOT(silu_mul),
             SLOT(conv_silu),
             SLOT(selective_scan),
             SLOT(ssd_scan),
             SLOT(rotary),
             SLOT(attention),
             SLOT(softplus_gate),
             SLOT(route),
             SLOT(group_experts),
             SLOT(grouped_linear),
             SLOT(gathered_linear),
             SLOT(combine_slots),
             SLOT(ungroup_slots),
             SLOT(softmax),
             SLOT(gather_rows),
             SLOT(collect)};
_Static_assert(sizeof slots / sizeof slots[0] == sizeof(struct backend_ops) / sizeof(void (*)(void)),
               "every slot of the table is listed");

/* A slot that no file filled is found here, not in the middle of a pass. */
static enum status check_table(const struct backend_ops *ops, struct error *error)
{
    for (size_t i = 0; i < sizeof slots / sizeof slots[0]; i++) {
        void (*operation)(void);
        memcpy(&operation, (const char *)ops + slots[i].offset, sizeof operation);
        if (operation == NULL)
            return error_set(error, STATUS_BUG, "the CPU backend has no operation \"%s\"", slots[i].name);
    }
    return STATUS_OK;
}

void *cpu_scratch(struct backend *b, size_t bytes)
{
    struct cpu_backend *cpu = cpu_get(b);
    if (bytes > cpu->scratch_bytes) {
        memory_free(cpu->scratch);
        cpu->scratch = NULL;
        cpu->scratch_bytes = 0;
        if (memory_allocate(&cpu->scratch, bytes, "working memory of a CPU operation", &b->error) !=
            STATUS_OK)
            return NULL;
        cpu->scratch_bytes = bytes;
    }
    return cpu->scratch;
}

static enum status cpu_allocate(struct backend *b, void **out, size_t bytes, const char *what,
                                struct error *error)
{
    (void)b;
    return memory_allocate(out, bytes, what, error);
}

static void cpu_release(struct backend *b, void *memory)
{
    (void)b;
    memory_free(memory);
}

static void cpu_copy(struct backend *b, void *to, const void *from, size_t bytes)
{
    if (!cpu_has_failed(b) && bytes > 0)
        memcpy(to, from, bytes);
}

static enum status cpu_synchronize(struct backend *b, struct error *error)
{
    enum status status = b->error.status;
    if (status != STATUS_OK)
        error_set(error, status, "%s", b->error.text);
    error_clear(&b->error);
    return status;
}

static enum status cpu_matrix_create(struct backend *b, const struct tensor *w, enum dtype compute,
                                     const char *name, struct matrix **out, struct error *error)
{
    return gemm_pack(cpu_get(b)->gemm, w, compute, name, out, error);
}

static void cpu_matrix_destroy(struct backend *b, struct matrix *matrix)
{
    (void)b;
    gemm_unpack(matrix);
}

static size_t cpu_matrix_bytes(struct backend *b, int64_t n, int64_t k, enum dtype compute)
{
    return gemm_bytes(cpu_get(b)->gemm, n, k, compute);
}

static void cpu_destroy(struct backend *b)
{
    struct cpu_backend *cpu = cpu_get(b);
    gemm_destroy(cpu->gemm);
    memory_free(cpu->scratch);
    memory_free(cpu);
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

/* Without these instructions the library emulates products of bfloat16, slower than those of float32. */
static bool has_bf16_products(enum cpu_isa isa)
{
    return isa == CPU_AVX512 && __builtin_cpu_supports("avx512bf16");
}

/* Of the processors that have the instructions, AMD's (Zen 4) multiply twice what they do in float32; Intel's
 * without AMX half of it (Emerald Rapids: 84 against 169 GFLOP/s a core). */
static bool has_fast_bf16(enum cpu_isa isa)
{
    return has_bf16_products(isa) && __builtin_cpu_is("amd");
}

/* The best set of the machine, or a lesser one that ACTDUMP_ISA names. */
static enum status choose_isa(enum cpu_isa *out, struct error *error)
{
    enum cpu_isa best = has_avx512() ? CPU_AVX512 : has_avx2() ? CPU_AVX2 : CPU_BASELINE;
    const char *wanted = getenv("ACTDUMP_ISA");
    if (wanted == NULL || *wanted == '\0') {
        *out = best;
        return STATUS_OK;
    }
    for (int isa = CPU_BASELINE; isa <= (int)best; isa++) {
        if (strcasecmp(wanted, isa_words[isa]) == 0) {
            *out = (enum cpu_isa)isa;
            return STATUS_OK;
        }
    }
    return error_set(
        error, STATUS_USAGE,
        "the environment variable ACTDUMP_ISA is \"%s\"; expected baseline, avx2 or avx512, and no "
        "more than this CPU has, which is %s",
        wanted, isa_words[best]);
}

static void fill_table(struct cpu_backend *cpu)
{
    cpu->ops = (struct backend_ops){.destroy = cpu_destroy,
                                    .allocate = cpu_allocate,
                                    .release = cpu_release,
                                    .upload = cpu_copy,
                                    .download = cpu_copy,
                                    .synchronize = cpu_synchronize,
                                    .matrix_create = cpu_matrix_create,
                                    .matrix_destroy = cpu_matrix_destroy,
                                    .matrix_bytes = cpu_matrix_bytes};
    for (size_t i = 0; i < sizeof fillers / sizeof fillers[0]; i++)
        fillers[i][cpu->isa](&cpu->ops);
    cpu->base.ops = &cpu->ops;
}

enum status backend_create_cpu(int n_threads, struct backend **out, struct error *error)
{
    enum cpu_isa isa = CPU_BASELINE;
    TRY(choose_isa(&isa, error));
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct cpu_backend), "the CPU backend", error));
    struct cpu_backend *cpu = memory;
    cpu->isa = isa;
    cpu->fast_bf16 = has_fast_bf16(isa);
    cpu->base.is_host = true;
    cpu->base.n_threads = n_threads > 0 ? n_threads : processors_count();
    snprintf(cpu->base.name, sizeof cpu->base.name, "cpu (%s, %d thread%s)", isa_names[isa],
             cpu->base.n_threads, cpu->base.n_threads == 1 ? "" : "s");
    fill_table(cpu);
    enum status status = check_table(&cpu->ops, error);
    if (status == STATUS_OK)
        status = gemm_create(cpu->base.n_threads, has_bf16_products(isa), &cpu->gemm, error);
    if (status == STATUS_OK)
        status =
            memory_allocate(&cpu->scratch, CPU_SCRATCH_BYTES, "working memory of the CPU backend", error);
    if (status != STATUS_OK) {
        cpu_destroy(&cpu->base);
        return status;
    }
    cpu->scratch_bytes = CPU_SCRATCH_BYTES;
    *out = &cpu->base;
    return STATUS_OK;
}

void backend_destroy(struct backend *backend)
{
    if (backend != NULL)
        backend->ops->destroy(backend);
}
