/* Stands in for CUDA's C++ header: kernels as plain functions, threads of a block as fibers, and the built-in
 * names.
 *
 * A block's threads take turns on one CPU thread. One runs until it waits (at a barrier, or for the lanes
 * that a warp operation names), so an access that a barrier should have ordered is made in the worst order;
 * which that is depends on who goes first, so tests run with threads forwards, backwards and shuffled
 * (emulation.h). What would hang a GPU or be undefined there stops the kernel with a sentence: threads that
 * wait at different barriers, an exit while others wait, a lane that a mask names and that never comes, or
 * that comes without being named, a shuffle from a lane outside the mask. Shared memory is filled with
 * not-a-numbers before each block. */
#ifndef ACTDUMP_EMULATION_CUDA_RUNTIME_H
#define ACTDUMP_EMULATION_CUDA_RUNTIME_H

#include "cuda_runtime_api.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <type_traits>

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

extern dim3 gridDim, blockDim, blockIdx, threadIdx;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};

static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return uint4{x, y, z, w};
}
static inline float4 make_float4(float x, float y, float z, float w)
{
    return float4{x, y, z, w};
}
static inline float2 make_float2(float x, float y)
{
    return float2{x, y};
}

static inline float __uint_as_float(unsigned bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static inline unsigned __float_as_uint(float value)
{
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline int __popc(unsigned bits)
{
    return __builtin_popcount(bits);
}
static inline int __ffs(int bits)
{
    return __builtin_ffs(bits);
}

namespace emulation
{

enum warp_kind {
    WARP_SHUFFLE,
    WARP_SHUFFLE_XOR,
    WARP_SHUFFLE_UP,
    WARP_SHUFFLE_DOWN,
    WARP_BALLOT,
    WARP_SYNC,
    WARP_CALL
};

/* What one lane brings to a warp operation; the result comes back in `value`. */
struct warp_call {
    warp_kind kind;
    const char *file;
    int line;
    unsigned mask;
    int operand; /* source lane, xor mask or delta */
    int width;
    uint64_t value;
    void *argument;                       /* WARP_CALL: what `run` gets of each lane */
    void (*run)(void *const arguments[]); /* WARP_CALL: once, when all lanes are there */
};

void warp_arrive(warp_call &call);
void block_barrier(const char *file, int line);
/* Stops the kernel with a sentence. */
void warp_fault(const char *text);
unsigned char *shared_memory();
cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> kernel);

template <typename T>
T shuffle(warp_kind kind, const char *file, int line, unsigned mask, T value, int operand, int width = 32)
{
    static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most 8 bytes");
    warp_call call = {kind, file, line, mask, operand, width, 0, nullptr, nullptr};
    std::memcpy(&call.value, &value, sizeof value);
    warp_arrive(call);
    std::memcpy(&value, &call.value, sizeof value);
    return value;
}

static inline unsigned ballot(const char *file, int line, unsigned mask, bool vote)
{
    warp_call call = {WARP_BALLOT, file, line, mask, 0, 32, vote, nullptr, nullptr};
    warp_arrive(call);
    return (unsigned)call.value;
}

static inline void warp_sync(const char *file, int line, unsigned mask = 0xffffffffu)
{
    warp_call call = {WARP_SYNC, file, line, mask, 0, 32, 0, nullptr, nullptr};
    warp_arrive(call);
}

/* For the stand-ins of tensor-core instructions: all 32 lanes come, `run` sees what each brought. */
static inline void warp_together(const char *file, int line, void *argument,
                                 void (*run)(void *const arguments[]))
{
    warp_call call = {WARP_CALL, file, line, 0xffffffffu, 0, 32, 0, argument, run};
    warp_arrive(call);
}

} // namespace emulation

#define __syncthreads() emulation::block_barrier(__FILE__, __LINE__)
#define __syncwarp(...) emulation::warp_sync(__FILE__, __LINE__, ##__VA_ARGS__)
#define __shfl_sync(...) emulation::shuffle(emulation::WARP_SHUFFLE, __FILE__, __LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) emulation::shuffle(emulation::WARP_SHUFFLE_XOR, __FILE__, __LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) emulation::shuffle(emulation::WARP_SHUFFLE_UP, __FILE__, __LINE__, __VA_ARGS__)
#define __shfl_down_sync(...)                                                                                \
    emulation::shuffle(emulation::WARP_SHUFFLE_DOWN, __FILE__, __LINE__, __VA_ARGS__)
#define __ballot_sync(mask, vote) emulation::ballot(__FILE__, __LINE__, mask, vote)
#define __any_sync(mask, vote) (emulation::ballot(__FILE__, __LINE__, mask, vote) != 0)
#define __all_sync(mask, vote) (emulation::ballot(__FILE__, __LINE__, mask, !(vote)) == 0)

/* One thread runs at a time, and none is interrupted: a plain addition is atomic. */
template <typename T> static inline T atomicAdd(T *at, T value)
{
    T before = *at;
    *at = (T)(before + value);
    return before;
}
static inline int atomicMax(int *at, int value)
{
    int before = *at;
    *at = before > value ? before : value;
    return before;
}

#define SHARED_MEMORY(name) unsigned char *name = emulation::shared_memory()

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Arguments... arguments)
{
    return emulation::launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream,
                             [=]() { kernel(arguments...); });
}

#endif
