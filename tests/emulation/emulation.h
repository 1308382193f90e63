/* What tests ask of the emulated device. */
#ifndef ACTDUMP_EMULATION_EMULATION_H
#define ACTDUMP_EMULATION_EMULATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* In which order the threads of a block, and the blocks of a grid, take their first turns. */
enum emulation_order { EMULATION_FORWARDS, EMULATION_BACKWARDS, EMULATION_SHUFFLED };
void emulation_set_order(enum emulation_order order);

/* Devices that there seem to be (1 at start), and their memory in bytes. */
void emulation_set_devices(int n, size_t memory_bytes);
/* Whether the host is kept from device memory (yes at start). Costs two system calls a wait. */
void emulation_set_guarded(bool guarded);
/* Whether cuBLAS seems to know grouped products (yes at start). */
void emulation_set_grouped(bool known);
/* Makes the n-th device allocation from now fail (0 is the next; negative: none), or the n-th kernel launch
 * report `code` when it is waited for. */
void emulation_fail_allocation(int64_t n);
void emulation_fail_kernel(int64_t n, int code);

/* The sentence of the last fault (a barrier, a mask, a fence), empty where there was none; the call clears
 * it. A fault also makes the next wait return cudaErrorLaunchFailure. */
const char *emulation_fault(void);

/* Counts since the process began: for tests that want to know that something happened at all. */
struct emulation_counts {
    int64_t kernels, blocks, barriers, warp_operations, products, grouped_products, allocations,
        live_allocations;
};
struct emulation_counts emulation_get_counts(void);

#ifdef __cplusplus
}
#endif

#endif
