/* rms_norm, plain and gated. Bound by memory bandwidth: the second read of a row comes from L1 or L2. A group
 * of up to 1,024 columns is a warp's (per-head norms: many short rows, no barrier), a longer one a block's.
 */
#include "kernels/cuda/device.h"

#define WARP_GROUP_LIMIT 1024

struct normed {
    struct norm_args args;
    int64_t n_groups; /* of a row */
};

/* x, or x * silu(gate), at W columns. */
template <int W>
static __device__ __forceinline__ void load_normed(const struct norm_args &args, int64_t row, int64_t col,
                                                   float (&out)[W])
{
    load_row(args.x, row, col, out);
    if (args.gate.data == NULL)
        return;
    float gate[W];
    load_row(args.gate, row, col, gate);
#pragma unroll
    for (int i = 0; i < W; i++)
        out[i] *= silu(gate[i]);
}

/* `member` of `n_members` threads that share a group; its own elements are the same in both passes, so y may
 * be x. */
template <int W, typename Sum>
static __device__ __forceinline__ void norm_group(const struct norm_args &args, int64_t row, int64_t group,
                                                  int member, int n_members, Sum sum_over_members)
{
    int64_t start = group * args.group;
    float squares = 0;
    for (int64_t col = (int64_t)member * W; col < args.group; col += (int64_t)n_members * W) {
        float a[W];
        load_normed(args, row, start + col, a);
#pragma unroll
        for (int i = 0; i < W; i++)
            squares += a[i] * a[i];
    }
    squares = sum_over_members(squares);
    float scale = 1.0f / sqrtf(squares / (float)args.group + args.epsilon);
    for (int64_t col = (int64_t)member * W; col < args.group; col += (int64_t)n_members * W) {
        float a[W];
        load_normed(args, row, start + col, a);
#pragma unroll
        for (int i = 0; i < W; i++)
            a[i] = a[i] * scale * args.weight[(args.weight_per_group ? 0 : start) + col + i];
        store_row(args.y, row, start + col, a);
    }
}

struct sum_in_warp {
    __device__ float operator()(float value) const
    {
        return warp_sum(value);
    }
};

struct sum_in_block {
    float *partial;
    __device__ float operator()(float value) const
    {
        return block_reduce<false>(value, partial);
    }
};

template <int W> __global__ void norm_warp_kernel(struct normed n)
{
    int64_t unit = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (unit >= n.args.x.rows * n.n_groups)
        return;
    norm_group<W>(n.args, unit / n.n_groups, unit % n.n_groups, (int)threadIdx.x, WARP, sum_in_warp{});
}

template <int W> __global__ void norm_block_kernel(struct normed n)
{
    __shared__ float partial[WARP];
    norm_group<W>(n.args, blockIdx.x / n.n_groups, blockIdx.x % n.n_groups, (int)threadIdx.x, (int)blockDim.x,
                  sum_in_block{partial});
}

template <int W> static void launch_norm(struct cuda_backend *cuda, const struct normed &n)
{
    int64_t units = n.args.x.rows * n.n_groups;
    if (n.args.group <= WARP_GROUP_LIMIT)
        launch(cuda, "rms_norm", norm_warp_kernel<W>, dim3((unsigned)divide_up(units, 4)), dim3(WARP, 4), 0,
               n);
    else
        launch(cuda, "rms_norm", norm_block_kernel<W>, dim3((unsigned)units), dim3(256), 0, n);
}

void cuda_rms_norm(struct backend *b, const struct norm_args *args)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL)
        return;
    struct normed n = {*args, args->x.cols / args->group};
    if (args->group % WIDE == 0 && is_wide(args->x) && is_wide(args->gate) && is_wide(args->y))
        launch_norm<WIDE>(cuda, n);
    else
        launch_norm<1>(cuda, n);
}
