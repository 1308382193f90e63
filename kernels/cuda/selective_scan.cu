/* selective_scan: Mamba-1's recurrence. Bound by the special-function units (an exponential for each state of
 * each channel and token), then by latency where there are few threads.
 *
 * A thread holds S states of a channel in registers and walks through the tokens of a tile; where N > S,
 * neighbouring lanes share a channel and add up their parts of C . h by shuffles. B and C, the same for all
 * channels, come through shared memory, STEP tokens at a time.
 *
 * A whole run is a tile as long as channels and runs give each processor enough to do. Else runs are cut into
 * shorter tiles, and the scan is done in three steps: each tile's end state from zero (and the sum of its
 * step sizes, which gives its decay), the tiles' starting states one after the other, then the real scan of
 * all tiles at once. */
#include "kernels/cuda/device.h"

#define THREADS 128
#define STEP 8          /* tokens of B and C in shared memory at a time */
#define MIN_TILE 64     /* shorter tiles spend more on their starts than they win */
#define WANTED_BLOCKS 2 /* a processor: below it, runs are cut */
#define LOG2_E 1.4426950408889634f

struct scan {
    struct selective_scan_args args;
    const struct tile *tiles;
    const int32_t *state_rows; /* on the device */
    int lanes;                 /* that share a channel: a power of two */
    int64_t n_channels;
    int64_t n_tiles;
    float *starts; /* [tiles, N, C]: first the tiles' end states from zero, then their starting states; NULL:
                      uncut */
    float *step_sum; /* [tiles, C] */
    float *last;     /* [N, C]: the state at the last run's end, for the carry; NULL: not wanted */
};

/* What a thread keeps. */
template <int S> struct scan_thread {
    int64_t channel;
    int first_state; /* its states are [first_state, first_state + S) */
    bool is_there;   /* a channel past the last is computed with the last and not stored */
    float h[S], decay[S];
};

template <int S>
static __device__ __forceinline__ void start_thread(const struct scan &s, struct scan_thread<S> &self)
{
    int64_t channel = (int64_t)blockIdx.y * (THREADS / s.lanes) + threadIdx.x / s.lanes;
    self.is_there = channel < s.n_channels;
    self.channel = self.is_there ? channel : s.n_channels - 1;
    self.first_state = (int)threadIdx.x % s.lanes * S;
#pragma unroll
    for (int i = 0; i < S; i++) {
        int n = self.first_state + i;
        self.h[i] = 0;
        self.decay[i] =
            n < s.args.state_dim ? s.args.A[(int64_t)n * s.n_channels + self.channel] * LOG2_E : 0.0f;
    }
}

/* B and C of tokens [first, first + n) into shared memory, [STEP][2][states], zero past the last state. */
static __device__ __forceinline__ void load_step(const struct scan &s, int64_t first, int n, int states,
                                                 float *to)
{
    for (int i = threadIdx.x; i < n * 2 * states; i += THREADS) {
        int t = i / (2 * states), which = i / states % 2, state = i % states;
        const struct tensor &from = which == 0 ? s.args.B : s.args.C;
        to[i] = state < s.args.state_dim ? load(from, first + t, state) : 0.0f;
    }
}

template <int S>
static __device__ __forceinline__ void load_state(const struct scan &s, const float *from,
                                                  struct scan_thread<S> &self)
{
#pragma unroll
    for (int i = 0; i < S; i++)
        if (self.first_state + i < s.args.state_dim)
            self.h[i] = from[(int64_t)(self.first_state + i) * s.n_channels + self.channel];
}

template <int S>
static __device__ __forceinline__ void store_state(const struct scan &s, float *to,
                                                   const struct scan_thread<S> &self)
{
#pragma unroll
    for (int i = 0; i < S; i++)
        if (self.is_there && self.first_state + i < s.args.state_dim)
            to[(int64_t)(self.first_state + i) * s.n_channels + self.channel] = self.h[i];
}

template <int S>
static __device__ __forceinline__ void store_captured(const struct scan &s, int64_t i,
                                                      const struct scan_thread<S> &self)
{
#pragma unroll
    for (int j = 0; j < S; j++)
        if (self.is_there && self.first_state + j < s.args.state_dim)
            store(s.args.states, i, self.channel * s.args.state_dim + self.first_state + j, self.h[j]);
}

/* h after one token; returns this thread's part of C . h. */
template <int S>
static __device__ __forceinline__ float advance(struct scan_thread<S> &self, float beta, float x,
                                                const float *B, const float *C)
{
    float sum = 0, beta_x = beta * x;
#pragma unroll
    for (int i = 0; i < S; i++) {
        self.h[i] = exp2f(beta * self.decay[i]) * self.h[i] + beta_x * B[i];
        sum += C[i] * self.h[i];
    }
    return sum;
}

static __device__ __forceinline__ float lanes_sum(float value, int lanes)
{
    for (int offset = lanes / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

/* One channel's inputs of STEP tokens, asked for together so that they arrive together. */
struct step_inputs {
    float beta[STEP], x[STEP], z[STEP];
};

static __device__ __forceinline__ void load_inputs(const struct selective_scan_args &args, int64_t first,
                                                   int n, int64_t channel, float dt_bias,
                                                   struct step_inputs &in)
{
#pragma unroll
    for (int t = 0; t < STEP; t++) {
        in.beta[t] = t < n ? load(args.dt, first + t, channel) : 0.0f;
        in.x[t] = t < n ? load(args.x, first + t, channel) : 0.0f;
        in.z[t] = t < n && args.z.data != NULL ? load(args.z, first + t, channel) : 0.0f;
    }
#pragma unroll
    for (int t = 0; t < STEP; t++)
        in.beta[t] = softplus(in.beta[t] + dt_bias);
}

/* Writes what one token gives; `sum` is C . h. */
static __device__ __forceinline__ void store_token(const struct selective_scan_args &args, int64_t row,
                                                   int64_t channel, const struct step_inputs &in, int t,
                                                   float sum)
{
    float beta = in.beta[t], output = sum + args.D[channel] * in.x[t];
    if (args.betas.data != NULL)
        store(args.betas, row, channel, beta);
    if (args.outputs.data != NULL)
        store(args.outputs, row, channel, output);
    if (args.z.data != NULL)
        output *= silu(in.z[t]);
    store(args.y, row, channel, output);
}

template <int S>
static __device__ __forceinline__ void scan_start(const struct scan &s, int64_t index,
                                                  const struct tile &tile, struct scan_thread<S> &self)
{
    start_thread(s, self);
    if (s.starts != NULL)
        load_state(s, s.starts + index * s.args.state_dim * s.n_channels, self);
    else if (tile.run == 0 && s.args.runs.carry_in)
        load_state(s, s.args.carry, self);
}

/* The scan of one tile from its starting state. */
template <int S> __global__ void scan_kernel(struct scan s)
{
    SHARED_MEMORY(memory);
    float *shared = reinterpret_cast<float *>(memory);
    const struct selective_scan_args &args = s.args;
    int64_t index = blockIdx.x;
    const struct tile tile = s.tiles[index];
    int states = S * s.lanes;
    struct scan_thread<S> self;
    scan_start(s, index, tile, self);
    float dt_bias = args.dt_bias[self.channel];
    bool stores = self.is_there && self.first_state == 0;
    int64_t captured = args.states.data == NULL ? 0 : lower_bound(s.state_rows, args.state_rows.n, tile.row);
    for (int first = 0; first < tile.length; first += STEP) {
        int n = tile.length - first < STEP ? tile.length - first : STEP;
        struct step_inputs in;
        load_inputs(args, (int64_t)tile.row + first, n, self.channel, dt_bias, in);
        __syncthreads(); /* the last step's B and C have been used */
        load_step(s, (int64_t)tile.row + first, n, states, shared);
        __syncthreads();
#pragma unroll
        for (int t = 0; t < STEP; t++) {
            if (t >= n)
                break;
            int64_t row = (int64_t)tile.row + first + t;
            const float *B = shared + 2 * t * states + self.first_state;
            float sum = lanes_sum(advance(self, in.beta[t], in.x[t], B, B + states), s.lanes);
            if (stores)
                store_token(args, row, self.channel, in, t, sum);
            if (args.states.data != NULL && captured < args.state_rows.n && s.state_rows[captured] == row)
                store_captured(s, captured++, self);
        }
    }
    if (s.last != NULL && index == s.n_tiles - 1)
        store_state(s, s.last, self);
}

/* A tile's end state from zero, and the sum of its step sizes. */
template <int S> __global__ void tile_end_kernel(struct scan s)
{
    SHARED_MEMORY(memory);
    float *shared = reinterpret_cast<float *>(memory);
    const struct tile tile = s.tiles[blockIdx.x];
    int states = S * s.lanes;
    struct scan_thread<S> self;
    start_thread(s, self);
    struct selective_scan_args args = s.args;
    args.z.data = NULL; /* not needed for states */
    float dt_bias = args.dt_bias[self.channel], total = 0;
    for (int first = 0; first < tile.length; first += STEP) {
        int n = tile.length - first < STEP ? tile.length - first : STEP;
        struct step_inputs in;
        load_inputs(args, (int64_t)tile.row + first, n, self.channel, dt_bias, in);
        __syncthreads();
        load_step(s, (int64_t)tile.row + first, n, states, shared);
        __syncthreads();
#pragma unroll
        for (int t = 0; t < STEP; t++) {
            if (t >= n)
                break;
            const float *B = shared + 2 * t * states + self.first_state;
            advance(self, in.beta[t], in.x[t], B, B + states);
            total += in.beta[t];
        }
    }
    store_state(s, s.starts + (int64_t)blockIdx.x * s.args.state_dim * s.n_channels, self);
    if (self.is_there && self.first_state == 0)
        s.step_sum[(int64_t)blockIdx.x * s.n_channels + self.channel] = total;
}

/* Each tile's starting state from the one before; a thread for each state of each channel. */
__global__ void tile_start_kernel(struct scan s)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, size = s.args.state_dim * s.n_channels;
    if (i >= size)
        return;
    float A = s.args.A[i], h = 0;
    for (int64_t tile = 0; tile < s.n_tiles; tile++) {
        float *start = &s.starts[tile * size + i];
        float end = *start;
        if (s.tiles[tile].row == s.tiles[tile].run_start)
            h = s.tiles[tile].run == 0 && s.args.runs.carry_in ? s.args.carry[i] : 0.0f;
        *start = h;
        h = expf(A * s.step_sum[tile * s.n_channels + i % s.n_channels]) * h + end;
    }
}

/* beta * A for chosen rows, channel-major; needs no scan. */
__global__ void decay_kernel(struct selective_scan_args args, const int32_t *rows)
{
    int64_t row = rows[blockIdx.x], size = args.x.cols * args.state_dim;
    for (int64_t i = (int64_t)blockIdx.y * blockDim.x + threadIdx.x; i < size;
         i += (int64_t)gridDim.y * blockDim.x) {
        int64_t channel = i / args.state_dim, state = i % args.state_dim;
        float beta = softplus(load(args.dt, row, channel) + args.dt_bias[channel]);
        store(args.decays, (int64_t)blockIdx.x, i, beta * args.A[state * args.x.cols + channel]);
    }
}

static void store_decays(struct cuda_backend *cuda, const struct selective_scan_args *args)
{
    const int32_t *rows = static_cast<const int32_t *>(
        staging_upload(cuda, args->decay_rows.index, (size_t)args->decay_rows.n * sizeof(int32_t)));
    unsigned blocks = (unsigned)min64(divide_up(args->x.cols * args->state_dim, 256), 64);
    launch(cuda, "selective_scan", decay_kernel, dim3((unsigned)args->decay_rows.n, blocks), dim3(256), 0,
           *args, rows);
}

/* Rows of a tile: a whole run where there is enough to do, else what gives twice WANTED_BLOCKS a processor.
 */
static int64_t choose_tile(const struct cuda_backend *cuda, const struct runs *runs, int64_t channel_blocks)
{
    int64_t wanted = (int64_t)cuda->n_processors * WANTED_BLOCKS, tokens = 0;
    for (int64_t i = 0; i < runs->n; i++)
        tokens += runs->list[i].length;
    if (runs->n * channel_blocks >= wanted)
        return INT32_MAX;
    int64_t rows = divide_up(tokens * channel_blocks, 2 * wanted);
    return divide_up(max64(rows, MIN_TILE), STEP) * STEP;
}

template <int S> static void run_scan(struct cuda_backend *cuda, struct scan *s)
{
    int64_t channel_blocks = divide_up(s->n_channels, THREADS / s->lanes);
    int64_t size = s->args.state_dim * s->n_channels;
    struct tiles tiles = tiles_upload(cuda, &s->args.runs, choose_tile(cuda, &s->args.runs, channel_blocks));
    dim3 grid((unsigned)tiles.n, (unsigned)channel_blocks);
    size_t shared_bytes = (size_t)STEP * 2 * S * s->lanes * sizeof(float);
    s->tiles = tiles.list;
    s->n_tiles = tiles.n;
    if (tiles.n > s->args.runs.n) {
        s->starts = static_cast<float *>(
            scratch_take(cuda, (size_t)(tiles.n * size) * sizeof(float), "the states at a scan's tiles"));
        s->step_sum = static_cast<float *>(scratch_take(
            cuda, (size_t)(tiles.n * s->n_channels) * sizeof(float), "the step sizes of a scan's tiles"));
        launch(cuda, "selective_scan", tile_end_kernel<S>, grid, dim3(THREADS), shared_bytes, *s);
        launch(cuda, "selective_scan", tile_start_kernel, dim3((unsigned)divide_up(size, THREADS)),
               dim3(THREADS), 0, *s);
    }
    launch(cuda, "selective_scan", scan_kernel<S>, grid, dim3(THREADS), shared_bytes, *s);
}

/* The state of the last run's end goes to the carry only now: the scan of the first run may have read it
 * late. */
static void store_carry(struct cuda_backend *cuda, const struct scan *s)
{
    if (s->last != NULL && cuda->base.error.status == STATUS_OK)
        cuda_check(cuda,
                   cudaMemcpyAsync(s->args.carry, s->last,
                                   (size_t)(s->args.state_dim * s->n_channels) * sizeof(float),
                                   cudaMemcpyDeviceToDevice, cuda->compute),
                   "keeping a scan's state");
}

void cuda_selective_scan(struct backend *b, const struct selective_scan_args *args)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL || args->runs.n == 0)
        return;
    struct scan s = {};
    s.args = *args;
    s.n_channels = args->x.cols;
    int states = args->state_dim <= 8 ? 8 : 16;
    for (s.lanes = 1; s.lanes * states < args->state_dim;)
        s.lanes *= 2;
    if (s.lanes > WARP) {
        error_set(&b->error, STATUS_BUG, "selective_scan on a GPU holds at most %d states a channel, not %d",
                  WARP * states, args->state_dim);
        return;
    }
    if (args->states.data != NULL)
        s.state_rows = static_cast<const int32_t *>(
            staging_upload(cuda, args->state_rows.index, (size_t)args->state_rows.n * sizeof(int32_t)));
    if (args->runs.carry_out && args->carry != NULL)
        s.last = static_cast<float *>(scratch_take(
            cuda, (size_t)(args->state_dim * s.n_channels) * sizeof(float), "a scan's last state"));
    if (states == 8)
        run_scan<8>(cuda, &s);
    else
        run_scan<16>(cuda, &s);
    store_carry(cuda, &s);
    if (args->decays.data != NULL)
        store_decays(cuda, args);
}
