/* What the kernels of attention share: which keys a query sees. */
#ifndef ACTDUMP_KERNELS_CUDA_ATTENTION_H
#define ACTDUMP_KERNELS_CUDA_ATTENTION_H

#include "kernels/cuda/device.h"

/* Queries of a block, and keys that it takes at a time. */
#define ATTENTION_TILE 64

/* The keys of a run: key k of it is row `base + k` of k and v; `offset` are there before the run's first
 * query. */
struct run_keys {
    int64_t base, offset;
};

static __device__ __forceinline__ struct run_keys keys_of(const struct attention_args &args,
                                                          const struct tile &tile)
{
    struct run_keys keys = {args.past + tile.run_start, 0};
    if (tile.run == 0) {
        keys.base = tile.run_start;
        keys.offset = args.past;
    }
    return keys;
}

/* First key that the query with key number `own` sees. */
static __device__ __forceinline__ int64_t first_visible(const struct attention_args &args, int64_t own)
{
    return args.window > 0 && own >= args.window ? own - args.window + 1 : 0;
}

/* What a block works on. */
struct query_block {
    struct tile tile;
    struct run_keys keys;
    int head, kv_head;
    int64_t own; /* key number of the first query */
};

static __device__ __forceinline__ struct query_block make_block(const struct attention_args &args,
                                                                const struct tile *tiles)
{
    struct query_block q;
    q.tile = tiles[blockIdx.x];
    q.keys = keys_of(args, q.tile);
    q.head = (int)blockIdx.y;
    q.kv_head = q.head / (args.n_heads / args.n_kv_heads);
    q.own = q.keys.offset + q.tile.row - q.tile.run_start;
    return q;
}

/* bfloat16 heads of up to ATTENTION_BF16_DIM dimensions (attention_bf16.cu). */
#define ATTENTION_BF16_DIM 256
void attention_bf16_launch(struct cuda_backend *cuda, const struct attention_args *args);
/* Scores and probabilities of chosen rows (attention_pattern.cu). */
void attention_pattern_launch(struct cuda_backend *cuda, const struct attention_args *args);

#endif
