/* ssd_scan: Mamba-2's recurrence in matrix form. Bound by the tensor cores (bfloat16 loads) or the float32
 * units, and by the bandwidth of the states between chunks.
 *
 * Within a chunk, with a_t = A * beta_t and their running sum cum_t from the chunk's start, S the state
 * before it: y_t = sum over i <= t of (C_t . B_i) exp(cum_t - cum_i) beta_i x_i  +  exp(cum_t) C_t S  +  D
 * x_t S after the chunk = exp(cum_last) S + sum over i of exp(cum_last - cum_i) beta_i B_i (outer) x_i so all
 * but the passing on of states between chunks are products of small matrices (tile_product.h): steps     beta
 * and cum, a thread for each head of each chunk ends      each chunk's own contribution to the state at its
 * end      [N, L] [L, P] starts    the states passed on, one chunk after the other, a thread for each element
 *   pairs     C_t . B_i within a chunk, once for all heads of a group    [L, N] [N, L]
 *   outputs   the two sums of y                                          [L, N] [N, P] + [L, L] [L, P]
 * With bfloat16 loads B, C and x enter the products as they are; states and decayed factors, which are
 * float32, in two bfloat16 terms. States pass from chunk to chunk in float32. Exponents are never positive:
 * differences of cum are taken before the exponential.
 *
 * Chunks are worked on in groups whose intermediates fit the scratch; `running` carries the state between
 * groups. */
#include "kernels/cuda/tile_product.h"

#define MAX_CHUNK 256 /* tokens: more doubles the work within chunks, less that between them */
#define STEP_THREADS 64

struct ssd {
    struct ssd_scan_args args;
    const struct tile *tiles; /* of this group */
    int64_t n_tiles;
    int chunk;
    bool is_end;    /* the group holds the batch's last chunk */
    float *betas;   /* [T, H] */
    float *sums;    /* [T, H]: cum */
    float *pairs;   /* [tiles, G, chunk, chunk] */
    float *states;  /* [tiles, H, N, P]: ends, then starts */
    float *running; /* [H, N, P]: the state after the tiles so far */
    const int32_t *state_rows;
    int64_t first_state_row; /* of this group, within the list */
};

static __device__ __forceinline__ float state_product(const struct ssd &s, const struct tensor &t,
                                                      int64_t row, int head, int state)
{
    int group = head / (s.args.n_heads / s.args.n_groups);
    return load(t, row, (int64_t)group * s.args.state_dim + state);
}

static __device__ __forceinline__ float head_input(const struct ssd &s, int64_t row, int head, int dim)
{
    return load(s.args.x, row, (int64_t)head * s.args.head_dim + dim);
}

static __device__ __forceinline__ float *tile_state(const struct ssd &s, int64_t tile, int head)
{
    return s.states + (tile * s.args.n_heads + head) * s.args.state_dim * s.args.head_dim;
}

static __device__ __forceinline__ bool is_run_start(const struct tile &tile)
{
    return tile.row == tile.run_start;
}

__global__ void ssd_steps_kernel(struct ssd s)
{
    const struct tile tile = s.tiles[blockIdx.x];
    int n_heads = s.args.n_heads, head = (int)(blockIdx.y * STEP_THREADS + threadIdx.x);
    if (head >= n_heads)
        return;
    float sum = 0, A = s.args.A[head], bias = s.args.dt_bias[head];
    for (int t = 0; t < tile.length; t++) {
        int64_t row = (int64_t)tile.row + t;
        float beta = softplus(load(s.args.dt, row, head) + bias);
        beta = fminf(fmaxf(beta, s.args.dt_min), s.args.dt_max);
        sum += beta * A;
        s.betas[row * n_heads + head] = beta;
        s.sums[row * n_heads + head] = sum;
        if (s.args.betas.data != NULL)
            store(s.args.betas, row, head, beta);
    }
}

/* A chunk's cum and beta of one head, in shared memory. */
struct chunk_steps {
    float sum[MAX_CHUNK], beta[MAX_CHUNK];
};

static __device__ __forceinline__ void load_steps(const struct ssd &s, const struct tile &tile, int head,
                                                  chunk_steps &to)
{
    for (int t = threadIdx.x; t < tile.length; t += blockDim.x) {
        int64_t at = ((int64_t)tile.row + t) * s.args.n_heads + head;
        to.sum[t] = s.sums[at];
        to.beta[t] = s.betas[at];
    }
    __syncthreads();
}

/* exp(cum_at - cum_t) beta_t: what is left of token t's contribution at token `at` of the chunk. */
static __device__ __forceinline__ float remaining(const chunk_steps &steps, int at, int t)
{
    return expf(steps.sum[at] - steps.sum[t]) * steps.beta[t];
}

/* Blocks of 64 x 64 in a matrix of `cols` columns: which one is blockIdx.z? */
struct corner {
    int row, col;
};

static __device__ __forceinline__ struct corner block_corner(int cols)
{
    int across = (cols + TILE - 1) / TILE;
    struct corner c = {(int)blockIdx.z / across * TILE, (int)blockIdx.z % across * TILE};
    return c;
}

template <typename Product> __global__ void __launch_bounds__(TILE_THREADS) ssd_ends_kernel(struct ssd s)
{
    __shared__ typename Product::shared shared;
    __shared__ chunk_steps steps;
    int64_t index = blockIdx.x;
    int head = (int)blockIdx.y, n_states = s.args.state_dim, dim = s.args.head_dim;
    const struct tile tile = s.tiles[index];
    bool is_last_of_run = tile.row + tile.length == tile.run_start + tile.run_length;
    if (is_last_of_run && !(s.is_end && index == s.n_tiles - 1 && s.args.runs.carry_out))
        return; /* nobody goes on from it */
    struct corner c = block_corner(dim);
    int64_t row = tile.row;
    load_steps(s, tile, head, steps);
    for (int t = threadIdx.x; t < tile.length; t += blockDim.x)
        steps.beta[t] = remaining(steps, tile.length - 1, t);
    __syncthreads();
    typename Product::fragment f;
    Product::clear(f);
    Product::template multiply<2, 1>(
        f, shared, tile.length, ALONG_OUTER,
        [&](int n, int t) {
            return c.row + n < n_states ? state_product(s, s.args.B, row + t, head, c.row + n) * steps.beta[t]
                                        : 0.0f;
        },
        ALONG_OUTER,
        [&](int t, int p) { return c.col + p < dim ? head_input(s, row + t, head, c.col + p) : 0.0f; });
    float *to = tile_state(s, index, head);
    Product::for_each(f, [&](int n, int p, float &value) {
        if (c.row + n < n_states && c.col + p < dim)
            to[(c.row + n) * dim + c.col + p] = value;
    });
}

__global__ void ssd_starts_kernel(struct ssd s)
{
    int64_t size = (int64_t)s.args.n_heads * s.args.state_dim * s.args.head_dim;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size)
        return;
    int64_t head = i / (s.args.state_dim * s.args.head_dim);
    float state = s.running[i];
    for (int64_t index = 0; index < s.n_tiles; index++) {
        const struct tile tile = s.tiles[index];
        float *start = &s.states[index * size + i];
        float end = *start;
        if (is_run_start(tile))
            state = tile.run == 0 && s.args.runs.carry_in ? s.args.carry[i] : 0.0f;
        *start = state;
        state = expf(s.sums[((int64_t)tile.row + tile.length - 1) * s.args.n_heads + head]) * state + end;
    }
    s.running[i] = state;
}

template <typename Product> __global__ void __launch_bounds__(TILE_THREADS) ssd_pairs_kernel(struct ssd s)
{
    __shared__ typename Product::shared shared;
    int64_t index = blockIdx.x, group = blockIdx.y;
    const struct tile tile = s.tiles[index];
    struct corner c = block_corner(s.chunk);
    if (c.col > c.row || c.row >= tile.length)
        return;
    int64_t row = tile.row, first = group * s.args.state_dim;
    typename Product::fragment f;
    Product::clear(f);
    Product::template multiply<1, 1>(
        f, shared, s.args.state_dim, ALONG_K,
        [&](int t, int n) {
            return c.row + t < tile.length ? load(s.args.C, row + c.row + t, first + n) : 0.0f;
        },
        ALONG_K,
        [&](int n, int i) {
            return c.col + i < tile.length ? load(s.args.B, row + c.col + i, first + n) : 0.0f;
        });
    float *to = s.pairs + (index * s.args.n_groups + group) * s.chunk * s.chunk;
    Product::for_each(f, [&](int t, int i, float &value) {
        if (c.row + t < tile.length && c.col + i < tile.length)
            to[(c.row + t) * s.chunk + c.col + i] = value;
    });
}

/* exp(cum_t) C_t S, added to f. */
template <typename Product>
static __device__ __forceinline__ void
add_from_start(const struct ssd &s, const struct tile &tile, int64_t index, struct corner c,
               const chunk_steps &steps, typename Product::fragment &f, typename Product::shared &shared)
{
    int head = (int)blockIdx.y, dim = s.args.head_dim;
    const float *start = tile_state(s, index, head);
    int64_t row = (int64_t)tile.row + c.row;
    Product::template multiply<1, 2>(
        f, shared, s.args.state_dim, ALONG_K,
        [&](int t, int n) {
            return c.row + t < tile.length ? state_product(s, s.args.C, row + t, head, n) : 0.0f;
        },
        ALONG_OUTER, [&](int n, int p) { return c.col + p < dim ? start[n * dim + c.col + p] : 0.0f; });
    Product::for_each(f, [&](int t, int, float &value) {
        if (c.row + t < tile.length)
            value *= expf(steps.sum[c.row + t]);
    });
}

template <typename Product> __global__ void __launch_bounds__(TILE_THREADS) ssd_outputs_kernel(struct ssd s)
{
    __shared__ typename Product::shared shared;
    __shared__ chunk_steps steps;
    int64_t index = blockIdx.x;
    int head = (int)blockIdx.y, dim = s.args.head_dim, group = head / (s.args.n_heads / s.args.n_groups);
    const struct tile tile = s.tiles[index];
    struct corner c = block_corner(dim);
    if (c.row >= tile.length)
        return;
    int64_t row = tile.row;
    const float *pairs = s.pairs + (index * s.args.n_groups + group) * s.chunk * s.chunk;
    int depth = tile.length < c.row + TILE ? tile.length : c.row + TILE; /* later tokens do not count */
    load_steps(s, tile, head, steps);
    typename Product::fragment f;
    Product::clear(f);
    if (!is_run_start(tile) || (tile.run == 0 && s.args.runs.carry_in))
        add_from_start<Product>(s, tile, index, c, steps, f, shared);
    Product::template multiply<2, 1>(
        f, shared, depth, ALONG_K,
        [&](int t, int i) {
            int at = c.row + t;
            return i <= at && at < tile.length ? pairs[at * s.chunk + i] * remaining(steps, at, i) : 0.0f;
        },
        ALONG_OUTER,
        [&](int i, int p) { return c.col + p < dim ? head_input(s, row + i, head, c.col + p) : 0.0f; });
    Product::for_each(f, [&](int t, int p, float &value) {
        if (c.row + t < tile.length && c.col + p < dim)
            store(s.args.y, row + c.row + t, (int64_t)head * dim + c.col + p,
                  value + s.args.D[head] * head_input(s, row + c.row + t, head, c.col + p));
    });
}

/* The state after a chosen row: what its chunk started from, decayed, and the chunk's tokens up to it. */
__global__ void ssd_states_kernel(struct ssd s)
{
    __shared__ chunk_steps steps;
    int64_t i = s.first_state_row + blockIdx.x, row = s.state_rows[i];
    int64_t index = find_tile(s.tiles, s.n_tiles, row);
    const struct tile tile = s.tiles[index];
    int head = (int)blockIdx.y, dim = s.args.head_dim, size = s.args.state_dim * dim,
        n = (int)(row - tile.row) + 1;
    load_steps(s, tile, head, steps);
    float decay = expf(steps.sum[n - 1]);
    for (int t = threadIdx.x; t < n; t += blockDim.x)
        steps.beta[t] = remaining(steps, n - 1, t);
    __syncthreads();
    const float *start = tile_state(s, index, head);
    for (int e = threadIdx.x; e < size; e += blockDim.x) {
        float sum = decay * start[e];
        for (int t = 0; t < n; t++)
            sum += steps.beta[t] * state_product(s, s.args.B, (int64_t)tile.row + t, head, e / dim) *
                   head_input(s, (int64_t)tile.row + t, head, e % dim);
        store(s.args.states, i, (int64_t)head * size + e, sum);
    }
}

static unsigned blocks_of(int rows, int cols)
{
    return (unsigned)(divide_up(rows, TILE) * divide_up(cols, TILE));
}

template <typename Product>
static void run_group(struct cuda_backend *cuda, const struct ssd &s, int64_t n_state_rows)
{
    unsigned tiles = (unsigned)s.n_tiles, heads = (unsigned)s.args.n_heads,
             groups = (unsigned)s.args.n_groups;
    int64_t size = (int64_t)s.args.n_heads * s.args.state_dim * s.args.head_dim;
    launch(cuda, "ssd_scan", ssd_steps_kernel, dim3(tiles, (unsigned)divide_up(heads, STEP_THREADS)),
           dim3(STEP_THREADS), 0, s);
    launch(cuda, "ssd_scan", ssd_ends_kernel<Product>,
           dim3(tiles, heads, blocks_of(s.args.state_dim, s.args.head_dim)), dim3(TILE_THREADS), 0, s);
    launch(cuda, "ssd_scan", ssd_starts_kernel, dim3((unsigned)divide_up(size, 256)), dim3(256), 0, s);
    launch(cuda, "ssd_scan", ssd_pairs_kernel<Product>, dim3(tiles, groups, blocks_of(s.chunk, s.chunk)),
           dim3(TILE_THREADS), 0, s);
    launch(cuda, "ssd_scan", ssd_outputs_kernel<Product>,
           dim3(tiles, heads, blocks_of(s.chunk, s.args.head_dim)), dim3(TILE_THREADS), 0, s);
    if (n_state_rows > 0)
        launch(cuda, "ssd_scan", ssd_states_kernel, dim3((unsigned)n_state_rows, heads), dim3(128), 0, s);
}

/* Rows of the batch that the runs reach to. */
static int64_t last_row(const struct runs *runs)
{
    return (int64_t)runs->list[runs->n - 1].start + runs->list[runs->n - 1].length;
}

/* Tiles whose intermediates fit the scratch together. */
static int64_t tiles_at_once(const struct cuda_backend *cuda, const struct ssd &s, int64_t n_tiles)
{
    int64_t state = (int64_t)s.args.n_heads * s.args.state_dim * s.args.head_dim;
    int64_t pairs = (int64_t)s.args.n_groups * s.chunk * s.chunk;
    int64_t bytes = (state + pairs) * (int64_t)sizeof(float);
    return max64(1, min64(n_tiles, (int64_t)cuda->options.scratch_bytes / bytes));
}

static bool take_scratch(struct cuda_backend *cuda, struct ssd *s, int64_t n_tiles)
{
    int64_t state = (int64_t)s->args.n_heads * s->args.state_dim * s->args.head_dim;
    size_t steps = (size_t)(last_row(&s->args.runs) * s->args.n_heads) * sizeof(float);
    size_t pairs = (size_t)(n_tiles * s->args.n_groups * s->chunk * s->chunk) * sizeof(float);
    s->betas = static_cast<float *>(scratch_take(cuda, steps, "step sizes of a scan"));
    s->sums = static_cast<float *>(scratch_take(cuda, steps, "decays of a scan"));
    s->pairs = static_cast<float *>(scratch_take(cuda, pairs, "products within a scan's chunks"));
    s->states = static_cast<float *>(
        scratch_take(cuda, (size_t)(n_tiles * state) * sizeof(float), "states of a scan's chunks"));
    s->running = static_cast<float *>(
        scratch_take(cuda, (size_t)state * sizeof(float), "the running state of a scan"));
    return s->running != NULL;
}

/* How many of the wanted rows lie before `row`. */
static int64_t count_before(const struct row_list *rows, int64_t row)
{
    int64_t n = 0;
    while (n < rows->n && rows->index[n] < row)
        n++;
    return n;
}

/* The first row behind tile number n, counted over the runs; the same cutting as tiles_upload's. */
static int64_t row_after_tiles(const struct runs *runs, int64_t rows, int64_t n)
{
    for (int64_t i = 0; i < runs->n; i++) {
        int64_t tiles = divide_up(runs->list[i].length, rows);
        if (n <= tiles)
            return runs->list[i].start + min64(n * rows, runs->list[i].length);
        n -= tiles;
    }
    return last_row(runs);
}

static bool is_bf16(const struct ssd_scan_args *args)
{
    return args->x.dtype == DTYPE_BF16 && args->B.dtype == DTYPE_BF16 && args->C.dtype == DTYPE_BF16;
}

static void run_groups(struct cuda_backend *cuda, struct ssd *s, const struct tiles &tiles, int64_t at_once)
{
    const struct row_list *rows = &s->args.state_rows;
    for (int64_t first = 0; first < tiles.n; first += at_once) {
        struct ssd group = *s;
        int64_t n = min64(at_once, tiles.n - first), n_rows = 0;
        group.tiles = tiles.list + first;
        group.n_tiles = n;
        group.is_end = first + n == tiles.n;
        if (s->args.states.data != NULL) {
            group.first_state_row = count_before(rows, row_after_tiles(&s->args.runs, s->chunk, first));
            n_rows = count_before(rows, row_after_tiles(&s->args.runs, s->chunk, first + n)) -
                     group.first_state_row;
        }
        if (is_bf16(&s->args))
            run_group<split_product>(cuda, group, n_rows);
        else
            run_group<exact_product>(cuda, group, n_rows);
    }
}

void cuda_ssd_scan(struct backend *b, const struct ssd_scan_args *args)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL || args->runs.n == 0)
        return;
    struct ssd s = {};
    s.args = *args;
    s.chunk = (int)max64(1, min64(args->chunk, MAX_CHUNK));
    struct tiles tiles = tiles_upload(cuda, &args->runs, s.chunk);
    int64_t at_once = tiles_at_once(cuda, s, tiles.n);
    if (args->states.data != NULL)
        s.state_rows = static_cast<const int32_t *>(
            staging_upload(cuda, args->state_rows.index, (size_t)args->state_rows.n * sizeof(int32_t)));
    if (!take_scratch(cuda, &s, at_once))
        return;
    run_groups(cuda, &s, tiles, at_once);
    if (args->runs.carry_out && args->carry != NULL && cuda->base.error.status == STATUS_OK)
        cuda_check(cuda,
                   cudaMemcpyAsync(args->carry, s.running,
                                   (size_t)args->n_heads * args->state_dim * args->head_dim * sizeof(float),
                                   cudaMemcpyDeviceToDevice, cuda->compute),
                   "keeping a scan's state");
}
