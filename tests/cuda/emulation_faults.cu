/* The emulated device itself: right kernels run, and each kind of wrong one is caught. Kernels here come in
 * pairs, one that is right and one with a single mistake. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

extern "C" {
#include <cmocka.h>
}

#include <cstdio>
#include <cstring>

#include <cuda_runtime.h>

#include "tests/emulation/emulation.h"

#define THREADS 64
#define ALL_LANES 0xffffffffu

static cudaStream_t stream;
static int *device;

/* Launches a kernel over `device`, waits, and copies the results out. Returns the fault's sentence, ""
 * without one. */
static const char *run(void (*kernel)(int *), int *results)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(2);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = THREADS * sizeof(int);
    config.stream = stream;
    emulation_fault();
    assert_int_equal(cudaLaunchKernelEx(&config, kernel, device), cudaSuccess);
    cudaError_t code = cudaStreamSynchronize(stream);
    const char *fault = emulation_fault();
    assert_int_equal(code, fault[0] == '\0' ? cudaSuccess : cudaErrorLaunchFailure);
    assert_int_equal(
        cudaMemcpyAsync(results, device, 2 * THREADS * sizeof(int), cudaMemcpyDeviceToHost, stream),
        cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    return fault;
}

/* The thread on the other side of the block. */
static int other(int thread)
{
    return THREADS - 1 - thread;
}

static void exchange_right(int *out)
{
    SHARED_MEMORY(memory);
    int *shared = reinterpret_cast<int *>(memory);
    int t = (int)threadIdx.x;
    shared[t] = t * 3;
    __syncthreads();
    out[blockIdx.x * THREADS + t] = shared[other(t)];
}

static void exchange_without_barrier(int *out)
{
    SHARED_MEMORY(memory);
    int *shared = reinterpret_cast<int *>(memory);
    int t = (int)threadIdx.x;
    shared[t] = t * 3;
    out[blockIdx.x * THREADS + t] = shared[other(t)];
}

/* A second round that overwrites what the first is still reading. */
static void two_rounds(int *out, bool with_second_barrier)
{
    SHARED_MEMORY(memory);
    int *shared = reinterpret_cast<int *>(memory);
    int t = (int)threadIdx.x, sum = 0;
    for (int round = 1; round <= 2; round++) {
        shared[t] = t * round;
        __syncthreads();
        sum += shared[other(t)];
        if (with_second_barrier)
            __syncthreads();
    }
    out[blockIdx.x * THREADS + t] = sum;
}

static void rounds_right(int *out)
{
    two_rounds(out, true);
}

static void rounds_without_second_barrier(int *out)
{
    two_rounds(out, false);
}

static bool is_exchange(const int *results)
{
    for (int i = 0; i < 2 * THREADS; i++)
        if (results[i] != other(i % THREADS) * 3)
            return false;
    return true;
}

static void test_barriers(void **)
{
    int results[2 * THREADS];
    for (int order = EMULATION_FORWARDS; order <= EMULATION_SHUFFLED; order++) {
        emulation_set_order((enum emulation_order)order);
        assert_string_equal(run(exchange_right, results), "");
        assert_true(is_exchange(results));
        run(exchange_without_barrier, results);
        assert_false(is_exchange(results));
        assert_string_equal(run(rounds_right, results), "");
        assert_true(is_exchange(results));
        run(rounds_without_second_barrier, results);
        assert_false(is_exchange(results));
    }
    emulation_set_order(EMULATION_FORWARDS);
}

static void barrier_for_some(int *)
{
    if (threadIdx.x < 40)
        __syncthreads();
    else
        __syncthreads();
}

static void exit_before_barrier(int *)
{
    if (threadIdx.x == 7)
        return;
    __syncthreads();
}

static void lane_without_name(int *out)
{
    out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, (int)threadIdx.x, 1);
}

static void lane_that_does_not_come(int *out)
{
    if (threadIdx.x % 32 != 5)
        out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, (int)threadIdx.x, 1);
    else
        __syncthreads();
}

static void lane_that_has_ended(int *out)
{
    if (threadIdx.x % 32 == 31)
        return;
    out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, (int)threadIdx.x, 1);
}

static void shuffle_from_outside(int *out)
{
    if (threadIdx.x % 32 < 16)
        out[threadIdx.x] = __shfl_sync(0x0000ffffu, (int)threadIdx.x, 20);
}

static void masks_that_differ(int *out)
{
    out[threadIdx.x] = __shfl_xor_sync(threadIdx.x % 32 < 30 ? ALL_LANES : 0xfffffff0u, (int)threadIdx.x, 1);
}

static void write_behind(int *out)
{
    out[2 * THREADS + threadIdx.x % 2] = 1;
}

static void write_before(int *out)
{
    if (threadIdx.x == 0)
        out[-1] = 1;
}

static void write_past_shared(int *)
{
    SHARED_MEMORY(memory);
    reinterpret_cast<int *>(memory)[threadIdx.x + 1] = 1;
}

static void test_faults(void **)
{
    static const struct {
        void (*kernel)(int *);
        const char *said;
    } table[] = {
        {barrier_for_some, "different barriers"},
        {exit_before_barrier, "ended while others wait at this barrier"},
        {lane_without_name, "whose mask 0000ffff does not name it"},
        {lane_that_does_not_come, "waits for a lane that does not come"},
        {lane_that_has_ended, "mask ffffffff"},
        {shuffle_from_outside, "shuffles from lane 20"},
        {masks_that_differ, "waits for a lane that does not come"},
        {write_behind, "wrote behind a block"},
        {write_before, "wrote before a block"},
        {write_past_shared, "past its 256 bytes of shared memory"},
    };
    int results[2 * THREADS];
    for (int order = EMULATION_FORWARDS; order <= EMULATION_SHUFFLED; order++) {
        emulation_set_order((enum emulation_order)order);
        for (const auto &row : table) {
            const char *fault = run(row.kernel, results);
            if (strstr(fault, row.said) == nullptr)
                fail_msg("expected \"%s\", got \"%s\"", row.said, fault);
        }
    }
    emulation_set_order(EMULATION_FORWARDS);
}

static void warp_operations(int *out)
{
    int lane = (int)threadIdx.x % 32;
    int sum = __shfl_down_sync(ALL_LANES, lane, 4) + __shfl_up_sync(ALL_LANES, lane, 3) * 100;
    unsigned odd = __ballot_sync(ALL_LANES, lane % 2 == 1);
    sum += __any_sync(ALL_LANES, lane == 9) && !__all_sync(ALL_LANES, lane == 9) ? 10000 : 0;
    if (lane < 8)
        sum += __shfl_sync(0xffu, lane, 5) * 100000;
    __syncwarp();
    out[blockIdx.x * THREADS + threadIdx.x] = odd == 0xaaaaaaaau ? sum : -1;
}

static void test_warp_operations(void **)
{
    int results[2 * THREADS];
    assert_string_equal(run(warp_operations, results), "");
    for (int i = 0; i < 2 * THREADS; i++) {
        int lane = i % 32;
        int wanted = (lane + 4 < 32 ? lane + 4 : lane) + (lane >= 3 ? lane - 3 : lane) * 100 + 10000;
        assert_int_equal(results[i], wanted + (lane < 8 ? 500000 : 0));
    }
}

/* Nothing runs before it is waited for, and a stream waits for another's event. */
static void test_streams_are_lazy(void **)
{
    cudaStream_t second;
    cudaEvent_t event;
    int first = 1, results[2 * THREADS];
    assert_int_equal(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), cudaSuccess);
    assert_int_equal(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    cudaMemcpyAsync(device, &first, sizeof first, cudaMemcpyHostToDevice, stream);
    cudaEventRecord(event, stream);
    first = 2; /* too early: the copy has not been made */
    cudaMemcpyAsync(results, device, sizeof first, cudaMemcpyDeviceToHost, second);
    cudaStreamSynchronize(second); /* without waiting for the event */
    assert_int_not_equal(results[0], 2);
    cudaStreamWaitEvent(second, event, 0);
    cudaMemcpyAsync(results, device, sizeof first, cudaMemcpyDeviceToHost, second);
    cudaStreamSynchronize(second);
    assert_int_equal(results[0], 2);
    assert_int_equal(cudaMemcpyAsync(device, &first, 4, cudaMemcpyDeviceToHost, stream),
                     cudaErrorInvalidValue);
    cudaEventDestroy(event);
    cudaStreamDestroy(second);
}

static int set_up(void **)
{
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    return cudaMalloc(reinterpret_cast<void **>(&device), 2 * THREADS * sizeof(int)) == cudaSuccess ? 0 : 1;
}

static int tear_down(void **)
{
    cudaFree(device);
    cudaStreamDestroy(stream);
    return 0;
}

int main()
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_barriers),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_warp_operations),
        cmocka_unit_test(test_streams_are_lazy),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
