/* The attention pattern of chosen rows. Bound by the bandwidth of what is written; a block for each row and
 * head, a warp a key, in pieces that scratch can hold. Costs nothing where nobody captures a pattern. */
#include "kernels/cuda/attention.h"

#define PATTERN_THREADS 256

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

void attention_pattern_launch(struct cuda_backend *cuda, const struct attention_args *args)
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
