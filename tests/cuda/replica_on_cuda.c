/* The replica's tests (tests/unit/test_replica.c: every family's golden cases, isolation, carry, edits,
 * memory) on a CUDA backend instead of the CPU's. That file is compiled a second time with its
 * backend_create_cpu and main renamed to what stands here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/cuda/cuda_backend.h"

#include <stdio.h>
#ifdef ACTDUMP_EMULATED
#include "kernels/cuda/internal.h"
#include "tests/emulation/emulation.h"
#endif

int replica_main(void);
enum status create_tested_backend(int n_threads, struct backend **out, struct error *error);

#ifdef ACTDUMP_EMULATED

static const struct cuda_options ample = {
    .piece_bytes = 1 << 18, .n_pieces = 4, .table_bytes = 1 << 16, .scratch_bytes = 1 << 26};

enum status create_tested_backend(int n_threads, struct backend **out, struct error *error)
{
    (void)n_threads;
    return cuda_backend_create(&ample, out, error);
}

/* The golden cases with device memory kept from the host, which costs system calls; the others, in another
 * order of threads, without. Left out: two long ones, whose work is the CPU backend's to check (thousands of
 * tokens a family), and bfloat16 files in float32, which test_program.py runs. */
static const char *const others[] = {
    "test_golden_values_in*", "test_options",           "test_neighbours*",   "test_place*",
    "test_carry_over_short*", "test_an_edited_stream*", "test_forward_ends*", "test_no_allocation*",
    "test_identities",
};

int main(void)
{
    emulation_set_order(EMULATION_BACKWARDS);
    cmocka_set_test_filter("test_golden_values");
    int failed = replica_main();
    emulation_set_guarded(false);
    emulation_set_order(EMULATION_FORWARDS);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        cmocka_set_test_filter(others[i]);
        failed += replica_main();
    }
    const char *fault = emulation_fault();
    if (fault[0] != '\0')
        printf("the emulated device's first fault: %s\n", fault);
    return failed != 0 || fault[0] != '\0';
}

#else

enum status create_tested_backend(int n_threads, struct backend **out, struct error *error)
{
    (void)n_threads;
    return backend_create_cuda(0, false, out, error);
}

int main(void)
{
    struct error reason = {0};
    if (backend_cuda_device_count(&reason) == 0) {
        printf("skipped: %s\n", reason.text);
        return 77;
    }
    return replica_main();
}

#endif
