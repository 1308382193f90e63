/* What kernels share: launching, elements of tensors whatever their dtype, and sums over warps and blocks.
 *
 * Kernels take tensors as the table gives them and read elements through here: the branch on the dtype is the
 * same for all threads and costs less than what a kernel for each pair of dtypes would cost to build and to
 * test. */
#ifndef ACTDUMP_KERNELS_CUDA_DEVICE_H
#define ACTDUMP_KERNELS_CUDA_DEVICE_H

#include "kernels/cuda/internal.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define WARP 32
#define ALL_LANES 0xffffffffu

/* Elements that a thread moves at once where rows allow it: 16 bytes of bfloat16. */
#define WIDE 8

/* The only way that kernels are launched. Does nothing after a failure or for an empty grid. */
template <typename... Parameters, typename... Arguments>
static void launch(struct cuda_backend *cuda, const char *what, void (*kernel)(Parameters...), dim3 grid,
                   dim3 block, size_t shared_bytes, Arguments... arguments)
{
    if (cuda->base.error.status != STATUS_OK || grid.x == 0 || grid.y == 0 || grid.z == 0)
        return;
    if (shared_bytes > 48 * 1024 &&
        !cuda_check(cuda,
                    cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes),
                    what))
        return;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = cuda->compute;
    cuda_check(cuda, cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), what);
}

/* Dynamic shared memory, aligned to 16 bytes. */
#ifndef SHARED_MEMORY
#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]
#endif

static __device__ __forceinline__ float bf16_widen(uint32_t low_bits)
{
    return __uint_as_float(low_bits << 16);
}

static __device__ __forceinline__ uint32_t bf16_bits(float value)
{
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

/* Two bfloat16 as a matrix operand's 32 bits; the lower column in the lower half. */
static __device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    return bf16_bits(low) | bf16_bits(high) << 16;
}

/* Element `at` of an array of float32 or bfloat16. */
static __device__ __forceinline__ float load(const void *data, enum dtype dtype, int64_t at)
{
    if (dtype == DTYPE_BF16)
        return bf16_widen(static_cast<const uint16_t *>(data)[at]);
    return static_cast<const float *>(data)[at];
}

static __device__ __forceinline__ float load(const struct tensor &t, int64_t row, int64_t col)
{
    return load(t.data, t.dtype, row * t.stride + col);
}

/* Any of the float dtypes: weights as files have them, and what captures ask for. */
static __device__ __forceinline__ float load_any(const struct tensor &t, int64_t row, int64_t col)
{
    if (t.dtype == DTYPE_F16)
        return __half2float(__ushort_as_half(static_cast<const uint16_t *>(t.data)[row * t.stride + col]));
    return load(t, row, col);
}

static __device__ __forceinline__ void store(void *data, enum dtype dtype, int64_t at, float value)
{
    if (dtype == DTYPE_BF16)
        static_cast<uint16_t *>(data)[at] = (uint16_t)bf16_bits(value);
    else
        static_cast<float *>(data)[at] = value;
}

static __device__ __forceinline__ void store(const struct tensor &t, int64_t row, int64_t col, float value)
{
    store(t.data, t.dtype, row * t.stride + col, value);
}

static __device__ __forceinline__ void store_any(void *data, enum dtype dtype, int64_t at, float value)
{
    if (dtype == DTYPE_F16)
        static_cast<uint16_t *>(data)[at] = __half_as_ushort(__float2half_rn(value));
    else
        store(data, dtype, at, value);
}

/* W neighbours of a row: 1, or WIDE where is_wide said so of the tensor. */
template <int W>
static __device__ __forceinline__ void load_row(const struct tensor &t, int64_t row, int64_t col,
                                                float (&out)[W])
{
    int64_t at = row * t.stride + col;
    if (W == 1) {
        out[0] = load(t.data, t.dtype, at);
    } else if (t.dtype == DTYPE_BF16) {
        uint4 bits = *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(t.data) + at);
        uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < W; i++)
            out[i] = i % 2 == 0 ? bf16_widen(words[i / 2]) : __uint_as_float(words[i / 2] & 0xffff0000u);
    } else {
        const float4 *from = reinterpret_cast<const float4 *>(static_cast<const float *>(t.data) + at);
#pragma unroll
        for (int i = 0; i < W / 4; i++) {
            float4 four = from[i];
            out[4 * i] = four.x, out[4 * i + 1] = four.y, out[4 * i + 2] = four.z, out[4 * i + 3] = four.w;
        }
    }
}

template <int W>
static __device__ __forceinline__ void store_row(const struct tensor &t, int64_t row, int64_t col,
                                                 const float (&in)[W])
{
    int64_t at = row * t.stride + col;
    if (W == 1) {
        store(t.data, t.dtype, at, in[0]);
    } else if (t.dtype == DTYPE_BF16) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < W / 2; i++)
            words[i] = bf16_pair(in[2 * i], in[2 * i + 1]);
        *reinterpret_cast<uint4 *>(static_cast<uint16_t *>(t.data) + at) =
            make_uint4(words[0], words[1], words[2], words[3]);
    } else {
        float4 *to = reinterpret_cast<float4 *>(static_cast<float *>(t.data) + at);
#pragma unroll
        for (int i = 0; i < W / 4; i++)
            to[i] = make_float4(in[4 * i], in[4 * i + 1], in[4 * i + 2], in[4 * i + 3]);
    }
}

/* Whether rows of t can be moved WIDE elements at once; an absent tensor never stands in the way. */
static inline bool is_wide(const struct tensor &t)
{
    return t.data == NULL || (t.cols % WIDE == 0 && t.stride % WIDE == 0 && (uintptr_t)t.data % 16 == 0);
}

static __device__ __forceinline__ float silu(float x)
{
    return x / (1.0f + expf(-x));
}

/* The threshold is torch's. */
static __device__ __forceinline__ float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

static __device__ __forceinline__ float warp_sum(float value)
{
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

static __device__ __forceinline__ float warp_max(float value)
{
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}

/* The sum (or largest) over all threads of a block, the same for each. `partial` is WARP floats of shared
 * memory; a block is a multiple of 32 threads. */
template <bool MAXIMUM> static __device__ __forceinline__ float block_reduce(float value, float *partial)
{
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, n_warps = (int)blockDim.x / WARP;
    value = MAXIMUM ? warp_max(value) : warp_sum(value);
    __syncthreads(); /* `partial` may still be read from the time before */
    if (lane == 0)
        partial[warp] = value;
    __syncthreads();
    value = lane < n_warps ? partial[lane] : (MAXIMUM ? -INFINITY : 0.0f);
    return MAXIMUM ? warp_max(value) : warp_sum(value);
}

/* First place in an ascending list whose value is at least `wanted`. */
static __device__ __forceinline__ int64_t lower_bound(const int32_t *list, int64_t n, int64_t wanted)
{
    int64_t low = 0, high = n;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (list[middle] < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The tile that holds a row; tiles ascend. */
static __device__ __forceinline__ int64_t find_tile(const struct tile *tiles, int64_t n, int64_t row)
{
    int64_t low = 0, high = n;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (tiles[middle].row <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* A block for row-wise work without reductions: enough threads along the row for its units of work, the rest
 * along rows; at most 256. */
struct row_shape {
    dim3 grid, block;
};

static inline struct row_shape row_shape_plan(int64_t rows, int64_t units)
{
    unsigned along = WARP;
    while (along < 256 && along < units)
        along *= 2;
    struct row_shape shape;
    shape.block = dim3(along, 256 / along, 1);
    shape.grid = dim3((unsigned)divide_up(rows, 256 / along), 1, 1);
    return shape;
}

/* Calls op.run<W>(row, col) for every unit of W columns of every row. */
template <int W, typename Op> __global__ void rowwise_kernel(int64_t rows, int64_t cols, Op op)
{
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows)
        return;
    for (int64_t col = (int64_t)threadIdx.x * W; col < cols; col += (int64_t)blockDim.x * W)
        op.template run<W>(row, col);
}

template <typename Op>
static void launch_rowwise(struct cuda_backend *cuda, const char *what, int64_t rows, int64_t cols, bool wide,
                           Op op)
{
    struct row_shape shape = row_shape_plan(rows, wide ? cols / WIDE : cols);
    if (cols == 0)
        return;
    if (wide)
        launch(cuda, what, rowwise_kernel<WIDE, Op>, shape.grid, shape.block, 0, rows, cols, op);
    else
        launch(cuda, what, rowwise_kernel<1, Op>, shape.grid, shape.block, 0, rows, cols, op);
}

#endif
