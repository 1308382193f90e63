/* rotary: pairs of columns turned in place. Bound by memory bandwidth; the table of cosines stays in L2. */
#include "kernels/cuda/device.h"

#define STRETCH 8 /* tokens a block */
#define THREADS 128

__global__ void rotary_kernel(struct rotary_args args, const struct tile *tiles)
{
    const struct tile tile = tiles[blockIdx.x];
    int half = args.rotary_dim / 2, pairs = args.n_heads * half;
    for (int i = threadIdx.x; i < pairs * tile.length; i += THREADS) {
        int t = i / pairs, head = i % pairs / half, pair = i % half;
        int64_t row = (int64_t)tile.row + t, at = ((int64_t)tile.position + t) * half + pair;
        int64_t low = (int64_t)head * args.head_dim + pair;
        float x = load(args.x, row, low), y = load(args.x, row, low + half);
        float c = args.cosine[at], s = args.sine[at];
        store(args.x, row, low, x * c - y * s);
        store(args.x, row, low + half, y * c + x * s);
    }
}

void cuda_rotary(struct backend *b, const struct rotary_args *args)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL || args->runs.n == 0)
        return;
    struct tiles tiles = tiles_upload(cuda, &args->runs, STRETCH);
    launch(cuda, "rotary", rotary_kernel, dim3((unsigned)tiles.n), dim3(THREADS), 0, *args, tiles.list);
}
