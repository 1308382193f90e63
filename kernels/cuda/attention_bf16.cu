/* attention for bfloat16 loads, on the tensor cores. Bound by them for long runs; keys and values come from
 * L2, shared by the heads of a group and by neighbouring blocks.
 *
 * Like attention.cu, with everything between the two products in registers: a warp takes 16 queries, whose
 * scores leave q k' in the very places where the operand of the product with v is expected, so exponentials
 * are rounded to bfloat16 (as transformers rounds its probabilities) and go in again. Sums of exponentials
 * are of the unrounded ones. Only keys and values go through shared memory, in rows 8 elements longer than a
 * head, so that the rows which a warp reads together lie in different banks. Four blocks fit a processor for
 * heads of 128 and hide each other's loads. */
#include "kernels/cuda/attention.h"
#include "kernels/cuda/tensor_core.h"

#define THREADS 128
#define ROWS ATTENTION_TILE    /* queries a block, keys at a time */
#define SCORE_TILES (ROWS / 8) /* of 8 keys */
#define LOG2_E 1.4426950408889634f

template <int DIM> struct rows {
    uint16_t at[ROWS][DIM + 8];
};

template <int DIM> struct bf16_shared {
    rows<DIM> q, k, v;
};

/* One warp's 16 queries. A thread has two rows of them, lane / 4 and that plus 8. */
template <int DIM> struct warp_state {
    float output[DIM / 8][4];
    float largest[2], sum[2];
};

/* Rows [first, first + 64) of one head into shared memory; zero past `last` and past the head's dimensions.
 */
template <int DIM>
static __device__ __forceinline__ void load_head(const struct tensor &t, int64_t base, int64_t first,
                                                 int64_t last, int head, int dim, bool wide, rows<DIM> &to)
{
    const uint16_t *data = static_cast<const uint16_t *>(t.data);
    for (int i = (int)threadIdx.x; i < ROWS * (DIM / 8); i += THREADS) {
        int row = i / (DIM / 8), col = i % (DIM / 8) * 8;
        const uint16_t *from = data + (base + first + row) * t.stride + (int64_t)head * dim + col;
        uint4 bits = make_uint4(0, 0, 0, 0);
        if (first + row < last && wide && col < dim) {
            bits = *reinterpret_cast<const uint4 *>(from);
        } else if (first + row < last) {
            uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (col + e < dim)
                    words[e / 2] |= (uint32_t)from[e] << e % 2 * 16;
            bits = make_uint4(words[0], words[1], words[2], words[3]);
        }
        *reinterpret_cast<uint4 *>(&to.at[row][col]) = bits;
    }
}

static __device__ __forceinline__ uint32_t word_at(const uint16_t *at)
{
    return *reinterpret_cast<const uint32_t *>(at);
}

/* The warp's scores with 64 keys, not yet scaled. */
template <int DIM>
static __device__ __forceinline__ void multiply_keys(const bf16_shared<DIM> &shared,
                                                     float (&scores)[SCORE_TILES][4])
{
    int lane = (int)threadIdx.x % WARP, row = (int)threadIdx.x / WARP * 16 + lane / 4, pair = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < SCORE_TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            scores[j][e] = 0;
#pragma unroll
    for (int k = 0; k < DIM; k += 16) {
        uint32_t a[4] = {word_at(&shared.q.at[row][k + pair]), word_at(&shared.q.at[row + 8][k + pair]),
                         word_at(&shared.q.at[row][k + pair + 8]),
                         word_at(&shared.q.at[row + 8][k + pair + 8])};
#pragma unroll
        for (int j = 0; j < SCORE_TILES; j++) {
            const uint16_t *key = shared.k.at[j * 8 + lane / 4];
            uint32_t b[2] = {word_at(&key[k + pair]), word_at(&key[k + pair + 8])};
            mma_bf16(scores[j], a, b);
        }
    }
}

/* Scaled by log2(e) too, so that a power of two follows; -inf where a key is hidden. */
static __device__ __forceinline__ void mask_scores(const struct attention_args &args,
                                                   const struct query_block &q, int64_t first,
                                                   float (&scores)[SCORE_TILES][4])
{
    int lane = (int)threadIdx.x % WARP, row = (int)threadIdx.x / WARP * 16;
    float scale = args.scale * LOG2_E;
#pragma unroll
    for (int j = 0; j < SCORE_TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int64_t own = q.own + row + mma_row(lane, e), key = first + j * 8 + mma_col(lane, e);
            bool visible = key <= own && key >= first_visible(args, own);
            scores[j][e] = visible ? scores[j][e] * scale : -INFINITY;
        }
}

/* The four lanes that share a row. */
static __device__ __forceinline__ float quad_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

static __device__ __forceinline__ float quad_sum(float value)
{
    value += __shfl_xor_sync(ALL_LANES, value, 1);
    return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

/* Scores become exponentials relative to the largest so far, and what there is is rescaled to it. */
template <int DIM>
static __device__ __forceinline__ void exponentiate(float (&scores)[SCORE_TILES][4], warp_state<DIM> &state)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = state.largest[half], sum = 0;
#pragma unroll
        for (int j = 0; j < SCORE_TILES; j++)
            largest = fmaxf(largest, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
        largest = quad_max(largest);
        /* A query that has seen nothing yet keeps zeros: -inf minus -inf would be not a number. */
        float reference = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
        for (int j = 0; j < SCORE_TILES; j++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                scores[j][e] = exp2f(scores[j][e] - reference);
                sum += scores[j][e];
            }
        float rescale = exp2f(state.largest[half] - reference);
        state.largest[half] = largest;
        state.sum[half] = state.sum[half] * rescale + quad_sum(sum);
#pragma unroll
        for (int d = 0; d < DIM / 8; d++) {
            state.output[d][2 * half] *= rescale;
            state.output[d][2 * half + 1] *= rescale;
        }
    }
}

template <int DIM>
static __device__ __forceinline__ void add_values(const rows<DIM> &v, const float (&weights)[SCORE_TILES][4],
                                                  warp_state<DIM> &state)
{
    int lane = (int)threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < SCORE_TILES; j += 2) {
        uint32_t a[4] = {bf16_pair(weights[j][0], weights[j][1]), bf16_pair(weights[j][2], weights[j][3]),
                         bf16_pair(weights[j + 1][0], weights[j + 1][1]),
                         bf16_pair(weights[j + 1][2], weights[j + 1][3])};
#pragma unroll
        for (int d = 0; d < DIM / 8; d += 2) {
            /* Four 8 x 8 matrices: the first and second eight keys, at this and the next eight dimensions. */
            uint32_t b[4];
            load_transposed(b, &v.at[j * 8 + lane % 16][d * 8 + lane / 16 * 8]);
            uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
            mma_bf16(state.output[d], a, low);
            mma_bf16(state.output[d + 1], a, high);
        }
    }
}

template <int DIM>
static __device__ __forceinline__ void store_output(const struct attention_args &args,
                                                    const struct query_block &q, const warp_state<DIM> &state)
{
    int lane = (int)threadIdx.x % WARP, first = (int)threadIdx.x / WARP * 16;
#pragma unroll
    for (int d = 0; d < DIM / 8; d++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = first + mma_row(lane, e), col = d * 8 + mma_col(lane, e);
            if (row < q.tile.length && col < args.head_dim)
                store(args.y, (int64_t)q.tile.row + row, (int64_t)q.head * args.head_dim + col,
                      state.output[d][e] / state.sum[e / 2]);
        }
}

template <int DIM>
__global__ void __launch_bounds__(THREADS)
    attention_bf16_kernel(struct attention_args args, const struct tile *tiles, bool wide)
{
    SHARED_MEMORY(memory);
    bf16_shared<DIM> &shared = *reinterpret_cast<bf16_shared<DIM> *>(memory);
    const struct query_block q = make_block(args, tiles);
    int64_t last = q.own + q.tile.length; /* no query sees a key from here on */
    warp_state<DIM> state;
#pragma unroll
    for (int d = 0; d < DIM / 8; d++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            state.output[d][e] = 0;
    state.largest[0] = state.largest[1] = -INFINITY;
    state.sum[0] = state.sum[1] = 0;
    load_head(args.q, q.tile.row, 0, q.tile.length, q.head, args.head_dim, wide, shared.q);
    for (int64_t first = first_visible(args, q.own) / ROWS * ROWS; first < last; first += ROWS) {
        float scores[SCORE_TILES][4];
        __syncthreads(); /* the last keys and values have been used */
        load_head(args.k, q.keys.base, first, last, q.kv_head, args.head_dim, wide, shared.k);
        load_head(args.v, q.keys.base, first, last, q.kv_head, args.head_dim, wide, shared.v);
        __syncthreads();
        multiply_keys(shared, scores);
        mask_scores(args, q, first, scores);
        exponentiate(scores, state);
        add_values(shared.v, scores, state);
    }
    store_output(args, q, state);
}

static bool can_be_wide(const struct attention_args *args)
{
    const struct tensor *all[] = {&args->q, &args->k, &args->v};
    for (const struct tensor *t : all)
        if (t->stride % 8 != 0 || (uintptr_t)t->data % 16 != 0)
            return false;
    return args->head_dim % 8 == 0;
}

template <int DIM> static void launch_for(struct cuda_backend *cuda, const struct attention_args *args)
{
    struct tiles tiles = tiles_upload(cuda, &args->runs, ROWS);
    launch(cuda, "attention", attention_bf16_kernel<DIM>, dim3((unsigned)tiles.n, (unsigned)args->n_heads),
           dim3(THREADS), sizeof(bf16_shared<DIM>), *args, tiles.list, can_be_wide(args));
}

void attention_bf16_launch(struct cuda_backend *cuda, const struct attention_args *args)
{
    if (args->head_dim <= 32)
        launch_for<32>(cuda, args);
    else if (args->head_dim <= 64)
        launch_for<64>(cuda, args);
    else if (args->head_dim <= 128)
        launch_for<128>(cuda, args);
    else if (args->head_dim <= 256)
        launch_for<256>(cuda, args);
    else
        error_set(&cuda->base.error, STATUS_BUG,
                  "attention on a GPU takes heads of at most %d dimensions, not %d", ATTENTION_BF16_DIM,
                  args->head_dim);
}
