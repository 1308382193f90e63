/* attention: softmax(q k' scale) v over runs, causal, within a window, heads grouped. Bound by the tensor
 * cores (bfloat16 loads) or the float32 units (float32 loads) for long runs.
 *
 * A block takes 64 queries of one head and goes through the keys that any of them can see, 64 at a time,
 * keeping for each query the largest score so far, the sum of exponentials and the weighted sum of values,
 * rescaled whenever the largest grows: the pattern is never in memory. Keys outside the window are not even
 * visited. Products are tile_product.h's; probabilities enter theirs in two bfloat16 terms, so only inputs
 * and outputs are rounded.
 *
 * The pattern of chosen rows is made by a kernel of its own, a block for each row and head, in pieces that
 * scratch can hold; it costs nothing where nobody captures it. */
#include "kernels/cuda/tile_product.h"

#define PATTERN_THREADS 256

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

template <typename Product> struct attention_shared {
    typename Product::shared product;
    float scores[TILE][TILE + 1];
    float largest[TILE], sum[TILE], rescale[TILE];
};

/* What a block works on. */
struct query_block {
    struct tile tile;
    struct run_keys keys;
    int head, kv_head;
    int64_t own; /* key number of the first query */
};

/* Scaled scores of the block's queries with keys [first, first + 64), -inf where hidden, in shared memory. */
template <typename Product>
static __device__ __forceinline__ void score_keys(const struct attention_args &args,
                                                  const struct query_block &q, int64_t first,
                                                  attention_shared<Product> &shared)
{
    int64_t dim = args.head_dim, last = q.own + q.tile.length;
    typename Product::fragment f;
    Product::clear(f);
    Product::template multiply<1, 1>(
        f, shared.product, args.head_dim, ALONG_K,
        [&](int m, int k) {
            return m < q.tile.length ? load(args.q, q.tile.row + m, q.head * dim + k) : 0.0f;
        },
        ALONG_K,
        [&](int k, int n) {
            return first + n < last ? load(args.k, q.keys.base + first + n, q.kv_head * dim + k) : 0.0f;
        });
    Product::for_each(f, [&](int m, int n, float &value) {
        int64_t own = q.own + m, key = first + n;
        bool visible = m < q.tile.length && key <= own && key >= first_visible(args, own);
        shared.scores[m][n] = visible ? value * args.scale : -INFINITY;
    });
}

/* Scores become exponentials relative to the largest so far; two threads a query. */
template <typename Shared> static __device__ __forceinline__ void exponentiate(Shared &shared)
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

template <typename Product>
static __device__ __forceinline__ void
add_values(const struct attention_args &args, const struct query_block &q, int64_t first, int dims_at,
           attention_shared<Product> &shared, typename Product::fragment &f)
{
    int64_t dim = args.head_dim, last = q.own + q.tile.length;
    Product::for_each(f, [&](int m, int, float &value) { value *= shared.rescale[m]; });
    Product::template multiply<2, 1>(
        f, shared.product, TILE, ALONG_K, [&](int m, int k) { return shared.scores[m][k]; }, ALONG_OUTER,
        [&](int k, int n) {
            return first + k < last && dims_at + n < dim
                       ? load(args.v, q.keys.base + first + k, q.kv_head * dim + dims_at + n)
                       : 0.0f;
        });
}

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

/* DIM_TILES: 64 columns of a head each. */
template <typename Product, int DIM_TILES>
__global__ void __launch_bounds__(TILE_THREADS)
    attention_kernel(struct attention_args args, const struct tile *tiles)
{
    SHARED_MEMORY(memory);
    attention_shared<Product> &shared = *reinterpret_cast<attention_shared<Product> *>(memory);
    const struct query_block q = make_block(args, tiles);
    typename Product::fragment output[DIM_TILES];
#pragma unroll
    for (int d = 0; d < DIM_TILES; d++)
        Product::clear(output[d]);
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
        __syncthreads(); /* the scores have been used */
    }
#pragma unroll
    for (int d = 0; d < DIM_TILES; d++)
        Product::for_each(output[d], [&](int m, int n, float &value) {
            if (m < q.tile.length && d * TILE + n < args.head_dim)
                store(args.y, q.tile.row + m, (int64_t)q.head * args.head_dim + d * TILE + n,
                      value / shared.sum[m]);
        });
}

struct pattern {
    struct attention_args args;
    const struct tile *runs; /* a tile a run */
    int64_t n_runs;
    const int32_t *rows;
    int64_t first; /* row of the outputs that block 0 makes */
    float *scores; /* [rows of this piece, H, n_keys] */
};

/* Scores of one query with every key position, into scratch. */
static __device__ __forceinline__ void score_row(const struct pattern &p, const struct tile &run, int64_t row,
                                                 int head, float *scores)
{
    const struct attention_args &args = p.args;
    int lane = (int)threadIdx.x % WARP, dim = args.head_dim,
        kv_head = head / (args.n_heads / args.n_kv_heads);
    struct run_keys keys = keys_of(args, run);
    int64_t own = keys.offset + row - run.run_start, position = (int64_t)run.position - keys.offset;
    for (int64_t at = threadIdx.x / WARP; at < args.n_keys; at += PATTERN_THREADS / WARP) {
        int64_t key = at - position; /* the key axis counts from the document's start */
        float sum = -INFINITY;
        if (key >= first_visible(args, own) && key <= own) {
            sum = 0;
            for (int i = lane; i < dim; i += WARP)
                sum += load(args.q, row, (int64_t)head * dim + i) *
                       load(args.k, keys.base + key, (int64_t)kv_head * dim + i);
            sum = warp_sum(sum) * args.scale;
        }
        if (lane == 0)
            scores[at] = sum;
    }
}

__global__ void pattern_kernel(struct pattern p)
{
    __shared__ float partial[WARP];
    const struct attention_args &args = p.args;
    int64_t i = p.first + blockIdx.x, row = p.rows[i], start = (int64_t)blockIdx.y * args.n_keys;
    float *scores = p.scores + ((int64_t)blockIdx.x * args.n_heads + blockIdx.y) * args.n_keys;
    float largest = -INFINITY, sum = 0;
    score_row(p, p.runs[find_tile(p.runs, p.n_runs, row)], row, (int)blockIdx.y, scores);
    __syncthreads();
    for (int64_t k = threadIdx.x; k < args.n_keys; k += PATTERN_THREADS)
        largest = fmaxf(largest, scores[k]);
    largest = block_reduce<true>(largest, partial);
    for (int64_t k = threadIdx.x; k < args.n_keys; k += PATTERN_THREADS)
        sum += expf(scores[k] - largest);
    sum = block_reduce<false>(sum, partial);
    for (int64_t k = threadIdx.x; k < args.n_keys; k += PATTERN_THREADS) {
        if (args.scores.data != NULL)
            store(args.scores, i, start + k, scores[k]);
        if (args.probabilities.data != NULL)
            store(args.probabilities, i, start + k, expf(scores[k] - largest) / sum);
    }
}

static void run_pattern(struct cuda_backend *cuda, const struct attention_args *args)
{
    struct tiles runs = tiles_upload(cuda, &args->runs, INT32_MAX);
    int64_t row_bytes = args->n_heads * args->n_keys * (int64_t)sizeof(float);
    int64_t at_once = max64(1, min64(args->pattern_rows.n, (int64_t)cuda->options.scratch_bytes / row_bytes));
    struct pattern p = {*args, runs.list, runs.n, NULL, 0, NULL};
    p.rows = static_cast<const int32_t *>(
        staging_upload(cuda, args->pattern_rows.index, (size_t)args->pattern_rows.n * sizeof(int32_t)));
    p.scores = static_cast<float *>(scratch_take(cuda, (size_t)(at_once * row_bytes), "attention scores"));
    for (p.first = 0; p.first < args->pattern_rows.n && cuda->base.error.status == STATUS_OK;
         p.first += at_once) {
        unsigned rows = (unsigned)min64(at_once, args->pattern_rows.n - p.first);
        launch(cuda, "attention pattern", pattern_kernel, dim3(rows, (unsigned)args->n_heads),
               dim3(PATTERN_THREADS), 0, p);
    }
}

template <typename Product, int DIM_TILES>
static void launch_attention(struct cuda_backend *cuda, const struct attention_args *args)
{
    struct tiles tiles = tiles_upload(cuda, &args->runs, TILE);
    launch(cuda, "attention", attention_kernel<Product, DIM_TILES>,
           dim3((unsigned)tiles.n, (unsigned)args->n_heads), dim3(TILE_THREADS),
           sizeof(attention_shared<Product>), *args, tiles.list);
}

template <typename Product>
static void run_attention(struct cuda_backend *cuda, const struct attention_args *args)
{
    if (args->head_dim <= TILE)
        launch_attention<Product, 1>(cuda, args);
    else if (args->head_dim <= 2 * TILE)
        launch_attention<Product, 2>(cuda, args);
    else if (args->head_dim <= 4 * TILE)
        launch_attention<Product, 4>(cuda, args);
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
        run_attention<split_product>(cuda, args);
    else
        run_attention<exact_product>(cuda, args);
    if (args->pattern_rows.n > 0 && (args->scores.data != NULL || args->probabilities.data != NULL))
        run_pattern(cuda, args);
}
