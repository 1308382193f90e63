/* attention: softmax(q k' scale) v over runs, causal, within a window, heads grouped. This file: the way in,
 * and the kernel for float32 loads (and mixed ones), bound by the float32 units. attention_bf16.cu is for
 * bfloat16 loads.
 *
 * A block takes 64 queries of one head and goes through the keys that any of them can see, 64 at a time,
 * keeping for each query the largest score so far, the sum of exponentials and the weighted sum of values,
 * rescaled whenever the largest grows: the pattern is never in memory. Keys outside the window are not even
 * visited. */
#include "kernels/cuda/attention.h"
#include "kernels/cuda/tile_product.h"

static_assert(TILE == ATTENTION_TILE, "both kernels cut runs alike");

typedef exact_product product;

struct attention_shared {
    product::shared operands;
    float scores[TILE][TILE + 1];
    float largest[TILE], sum[TILE], rescale[TILE];
};

/* Scaled scores of the block's queries with keys [first, first + 64), -inf where hidden, in shared memory. */
static __device__ __forceinline__ void score_keys(const struct attention_args &args,
                                                  const struct query_block &q, int64_t first,
                                                  attention_shared &shared)
{
    int64_t dim = args.head_dim, last = q.own + q.tile.length;
    product::fragment f;
    product::clear(f);
    product::multiply<1, 1>(
        f, shared.operands, args.head_dim, ALONG_K,
        [&](int m, int k) {
            return m < q.tile.length ? load(args.q, q.tile.row + m, q.head * dim + k) : 0.0f;
        },
        ALONG_K,
        [&](int k, int n) {
            return first + n < last ? load(args.k, q.keys.base + first + n, q.kv_head * dim + k) : 0.0f;
        });
    product::for_each(f, [&](int m, int n, float &value) {
        int64_t own = q.own + m, key = first + n;
        bool visible = m < q.tile.length && key <= own && key >= first_visible(args, own);
        shared.scores[m][n] = visible ? value * args.scale : -INFINITY;
    });
}

/* Scores become exponentials relative to the largest so far; two threads a query. */
static __device__ __forceinline__ void exponentiate(attention_shared &shared)
{
    int m = (int)threadIdx.x / 2, first = (int)threadIdx.x % 2 * (TILE / 2);
    float before = shared.largest[m], largest = before, sum = 0;
    for (int n = first; n < first + TILE / 2; n++)
        largest = fmaxf(largest, shared.scores[m][n]);
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    /* A query that has seen nothing yet keeps zeros: -inf minus -inf would be not a number. */
    float reference = largest == -INFINITY ? 0.0f : largest;
    for (int n = first; n < first + TILE / 2; n++) {
        float e = expf(shared.scores[m][n] - reference);
        shared.scores[m][n] = e;
        sum += e;
    }
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    if (first == 0) {
        float rescale = expf(before - reference);
        shared.largest[m] = largest;
        shared.rescale[m] = rescale;
        shared.sum[m] = shared.sum[m] * rescale + sum;
    }
}

static __device__ __forceinline__ void add_values(const struct attention_args &args,
                                                  const struct query_block &q, int64_t first, int dims_at,
                                                  attention_shared &shared, product::fragment &f)
{
    int64_t dim = args.head_dim, last = q.own + q.tile.length;
    product::for_each(f, [&](int m, int, float &value) { value *= shared.rescale[m]; });
    product::multiply<2, 1>(
        f, shared.operands, TILE, ALONG_K, [&](int m, int k) { return shared.scores[m][k]; }, ALONG_OUTER,
        [&](int k, int n) {
            return first + k < last && dims_at + n < dim
                       ? load(args.v, q.keys.base + first + k, q.kv_head * dim + dims_at + n)
                       : 0.0f;
        });
}

/* DIM_TILES: 64 columns of a head each. */
template <int DIM_TILES>
__global__ void __launch_bounds__(TILE_THREADS)
    attention_kernel(struct attention_args args, const struct tile *tiles)
{
    SHARED_MEMORY(memory);
    attention_shared &shared = *reinterpret_cast<attention_shared *>(memory);
    const struct query_block q = make_block(args, tiles);
    product::fragment output[DIM_TILES];
#pragma unroll
    for (int d = 0; d < DIM_TILES; d++)
        product::clear(output[d]);
    if (threadIdx.x < TILE) {
        shared.largest[threadIdx.x] = -INFINITY;
        shared.sum[threadIdx.x] = 0;
    }
    for (int64_t first = first_visible(args, q.own) / TILE * TILE; first < q.own + q.tile.length;
         first += TILE) {
        score_keys(args, q, first, shared);
        __syncthreads();
        exponentiate(shared);
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DIM_TILES; d++)
            add_values(args, q, first, d * TILE, shared, output[d]);
    }
#pragma unroll
    for (int d = 0; d < DIM_TILES; d++)
        product::for_each(output[d], [&](int m, int n, float &value) {
            if (m < q.tile.length && d * TILE + n < args.head_dim)
                store(args.y, q.tile.row + m, (int64_t)q.head * args.head_dim + d * TILE + n,
                      value / shared.sum[m]);
        });
}

template <int DIM_TILES>
static void launch_attention(struct cuda_backend *cuda, const struct attention_args *args)
{
    struct tiles tiles = tiles_upload(cuda, &args->runs, TILE);
    launch(cuda, "attention", attention_kernel<DIM_TILES>, dim3((unsigned)tiles.n, (unsigned)args->n_heads),
           dim3(TILE_THREADS), sizeof(attention_shared), *args, tiles.list);
}

static void run_attention(struct cuda_backend *cuda, const struct attention_args *args)
{
    if (args->head_dim <= TILE)
        launch_attention<1>(cuda, args);
    else if (args->head_dim <= 2 * TILE)
        launch_attention<2>(cuda, args);
    else if (args->head_dim <= 4 * TILE)
        launch_attention<4>(cuda, args);
    else
        error_set(&cuda->base.error, STATUS_BUG,
                  "attention on a GPU takes heads of at most %d dimensions, not %d", 4 * TILE,
                  args->head_dim);
}

void cuda_attention(struct backend *b, const struct attention_args *args)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL || args->runs.n == 0)
        return;
    if (args->q.dtype == DTYPE_BF16 && args->k.dtype == DTYPE_BF16 && args->v.dtype == DTYPE_BF16)
        attention_bf16_launch(cuda, args);
    else
        run_attention(cuda, args);
    if (args->pattern_rows.n > 0 && (args->scores.data != NULL || args->probabilities.data != NULL))
        attention_pattern_launch(cuda, args);
}
