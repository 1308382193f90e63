/* conv_silu: causal depthwise convolution over packed runs. Bound by memory bandwidth. A thread takes one
 * channel of a stretch of STRETCH tokens and keeps the last inputs in registers, so each input is read
 * (STRETCH + kernel - 1) / STRETCH times instead of `kernel` times; neighbouring threads read neighbouring
 * channels. */
#include "kernels/cuda/device.h"

#define STRETCH 32
#define THREADS 128

struct convolved {
    struct conv_args args;
    const struct tile *tiles;
};

/* Input of `channel` at `offset` tokens from the run's start; before it come the carried tail, or nothing. */
static __device__ __forceinline__ float run_input(const struct conv_args &args, const struct tile &tile,
                                                  int64_t offset, int64_t channel)
{
    if (offset >= 0)
        return load(args.x, tile.run_start + offset, channel);
    if (tile.run != 0 || !args.runs.carry_in || offset < -(int64_t)(args.kernel - 1))
        return 0.0f;
    return args.tail[(args.kernel - 1 + offset) * args.x.cols + channel];
}

/* Kernels of TAPS taps: the window moves through registers. */
template <int TAPS> __global__ void conv_kernel(struct convolved c)
{
    const struct conv_args &args = c.args;
    const struct tile tile = c.tiles[blockIdx.x];
    int64_t channel = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    if (channel >= args.x.cols)
        return;
    int64_t offset = tile.row - tile.run_start;
    float weight[TAPS], window[TAPS], bias = args.bias == NULL ? 0.0f : args.bias[channel];
#pragma unroll
    for (int k = 0; k < TAPS; k++) {
        weight[k] = args.weight[(int64_t)k * args.x.cols + channel];
        window[k] = k == 0 ? 0.0f : run_input(args, tile, offset - TAPS + k, channel);
    }
    for (int t = 0; t < tile.length; t++) {
        float sum = bias;
#pragma unroll
        for (int k = 0; k < TAPS - 1; k++)
            window[k] = window[k + 1];
        window[TAPS - 1] = load(args.x, (int64_t)tile.row + t, channel);
#pragma unroll
        for (int k = 0; k < TAPS; k++)
            sum += weight[k] * window[k];
        store(args.y, (int64_t)tile.row + t, channel, silu(sum));
    }
}

/* Any number of taps. */
__global__ void conv_long_kernel(struct convolved c)
{
    const struct conv_args &args = c.args;
    const struct tile tile = c.tiles[blockIdx.x];
    int64_t channel = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    if (channel >= args.x.cols)
        return;
    for (int t = 0; t < tile.length; t++) {
        int64_t offset = tile.row - tile.run_start + t;
        float sum = args.bias == NULL ? 0.0f : args.bias[channel];
        for (int k = 0; k < args.kernel; k++)
            sum += args.weight[(int64_t)k * args.x.cols + channel] *
                   run_input(args, tile, offset - (args.kernel - 1) + k, channel);
        store(args.y, (int64_t)tile.row + t, channel, silu(sum));
    }
}

/* The last inputs of the last run. A thread goes through its channel's tail from the oldest on, so it reads
 * an old entry before it overwrites it. */
__global__ void tail_kernel(struct conv_args args, struct tile last)
{
    int64_t channel = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (channel >= args.x.cols)
        return;
    for (int i = 0; i < args.kernel - 1; i++)
        args.tail[(int64_t)i * args.x.cols + channel] =
            run_input(args, last, (int64_t)last.run_length - (args.kernel - 1) + i, channel);
}

static void launch_conv(struct cuda_backend *cuda, const struct convolved &c, dim3 grid)
{
    switch (c.args.kernel) {
    case 2:
        return launch(cuda, "conv_silu", conv_kernel<2>, grid, dim3(THREADS), 0, c);
    case 3:
        return launch(cuda, "conv_silu", conv_kernel<3>, grid, dim3(THREADS), 0, c);
    case 4:
        return launch(cuda, "conv_silu", conv_kernel<4>, grid, dim3(THREADS), 0, c);
    default:
        return launch(cuda, "conv_silu", conv_long_kernel, grid, dim3(THREADS), 0, c);
    }
}

void cuda_conv_silu(struct backend *b, const struct conv_args *args)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL || args->runs.n == 0)
        return;
    struct tiles tiles = tiles_upload(cuda, &args->runs, STRETCH);
    unsigned channel_blocks = (unsigned)divide_up(args->x.cols, THREADS);
    struct convolved c = {*args, tiles.list};
    launch_conv(cuda, c, dim3((unsigned)tiles.n, channel_blocks));
    if (!args->runs.carry_out || args->tail == NULL)
        return;
    const struct run *run = &args->runs.list[args->runs.n - 1];
    struct tile last = {run->start, run->length, (int32_t)(args->runs.n - 1),
                        run->start, run->length, run->position};
    launch(cuda, "conv_silu", tail_kernel, dim3(channel_blocks), dim3(THREADS), 0, *args, last);
}
