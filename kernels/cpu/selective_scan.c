/* Mamba-1's selective scan.
 *
 * Channels are independent, so they are split: a thread has a stretch of blocks of LANES channels, and takes
 * it through all runs. Tokens go in tiles, so that the rows of a tile stay in the cache while the blocks go
 * over them. A block's states lie together as [state_dim][LANES] and stay in the first-level cache, or in
 * registers where those are many. */
#include "kernels/base/memory.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

#include <omp.h>

#define LANES 16 /* channels a block: one cache line of float32 */
#define VECTORS (LANES / SIMD_WIDTH)
#define TILE 32 /* tokens */
#define LOG2_E 1.44269504088896340736

/* A block's channels at a tile's tokens. */
struct block_tile {
    float beta[TILE][LANES], x[TILE][LANES], output[TILE][LANES];
};

/* What all threads share. */
struct scan {
    const struct selective_scan_args *args;
    int64_t n_channels;
    float *states; /* [blocks][state_dim][LANES] */
    float *log2_A; /* the same shape: A * log2 e, so that decays are powers of two */
    float *tiles;  /* [threads][2][TILE][state_dim]: B and C in float32 */
};

/* A thread's share. */
struct share {
    int64_t first_block, end_block;
    float *B, *C; /* [TILE][state_dim] */
};

/* Rows [first, end) of a tile, and the wanted ones among them. */
struct tile {
    int64_t first, end;
    int64_t state_place, decay_place; /* in the row lists, of the first wanted row */
};

static float *block_of(const struct scan *scan, float *table, int64_t block)
{
    return table + block * scan->args->state_dim * LANES;
}

static void prepare_decays(const struct scan *scan, int64_t block)
{
    float *to = block_of(scan, scan->log2_A, block);
    for (int n = 0; n < scan->args->state_dim; n++) {
        const float *from = scan->args->A + n * scan->n_channels;
        for (int lane = 0; lane < LANES; lane++) {
            int64_t c = block * LANES + lane;
            to[n * LANES + lane] = c < scan->n_channels ? (float)((double)from[c] * LOG2_E) : 0.0f;
        }
    }
}

/* States of a block before a run: the carried ones or zeros. */
static void start_states(const struct scan *scan, int64_t block, bool is_carried)
{
    float *to = block_of(scan, scan->states, block);
    int64_t count = (int64_t)scan->args->state_dim * LANES;
    memset(to, 0, (size_t)count * sizeof *to);
    int64_t width = scan->n_channels - block * LANES < LANES ? scan->n_channels - block * LANES : LANES;
    for (int n = 0; is_carried && n < scan->args->state_dim; n++)
        memcpy(to + n * LANES, scan->args->carry + n * scan->n_channels + block * LANES,
               (size_t)width * sizeof *to);
}

static void keep_states(const struct scan *scan, int64_t block)
{
    const float *from = block_of(scan, scan->states, block);
    int64_t width = scan->n_channels - block * LANES < LANES ? scan->n_channels - block * LANES : LANES;
    for (int n = 0; n < scan->args->state_dim; n++)
        memcpy(scan->args->carry + n * scan->n_channels + block * LANES, from + n * LANES,
               (size_t)width * sizeof *from);
}

/* Row `row` of t to float32 at `to`. */
static void widen_row(const struct tensor *t, int64_t row, int64_t n, float *to)
{
    const void *from = simd_row(t, row);
    for (int64_t i = 0; i < n; i += SIMD_WIDTH)
        simd_write(to, DTYPE_F32, i, n, simd_read(from, t->dtype, i, n));
}

/* A block's rows of [channel][state] from its states or decays, [state][lane]. */
static void write_channel_major(const struct scan *scan, int64_t block, const float *from, float *to_row)
{
    int n_states = scan->args->state_dim;
    for (int64_t lane = 0; lane < LANES && block * LANES + lane < scan->n_channels; lane++)
        for (int n = 0; n < n_states; n++)
            to_row[(block * LANES + lane) * n_states + n] = from[n * LANES + lane];
}

static void write_decays(const struct scan *scan, int64_t block, const float *beta, float *to_row)
{
    int n_states = scan->args->state_dim;
    for (int64_t lane = 0; lane < LANES && block * LANES + lane < scan->n_channels; lane++) {
        int64_t c = block * LANES + lane;
        for (int n = 0; n < n_states; n++)
            to_row[c * n_states + n] = beta[lane] * scan->args->A[n * scan->n_channels + c];
    }
}

/* beta and x of a tile's tokens. */
static void read_block(const struct scan *scan, int64_t block, const struct tile *tile,
                       struct block_tile *work)
{
    const struct selective_scan_args *a = scan->args;
    int64_t n = scan->n_channels;
    for (int64_t row = tile->first; row < tile->end; row++) {
        const void *x = simd_row(&a->x, row), *dt = simd_row(&a->dt, row);
        for (int v = 0; v < VECTORS; v++) {
            int64_t c = block * LANES + v * SIMD_WIDTH;
            vfloat step = simd_read(dt, a->dt.dtype, c, n) + simd_read(a->dt_bias, DTYPE_F32, c, n);
            simd_store(&work->beta[row - tile->first][v * SIMD_WIDTH], simd_softplus(step));
            simd_store(&work->x[row - tile->first][v * SIMD_WIDTH], simd_read(x, a->x.dtype, c, n));
        }
    }
}

/* Moves a block's states on by one token; output = C . h. */
SIMD_INLINE void step(const float *beta, const float *x, const float *log2_A, const float *B, const float *C,
                      const int n_states, float *states, float *output)
{
    vfloat rate[VECTORS], drive[VECTORS], sum[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        rate[v] = simd_load(beta + v * SIMD_WIDTH);
        drive[v] = rate[v] * simd_load(x + v * SIMD_WIDTH);
        sum[v] = (vfloat){0};
    }
    for (int n = 0; n < n_states; n++) {
        for (int v = 0; v < VECTORS; v++) {
            float *state = states + n * LANES + v * SIMD_WIDTH;
            vfloat decay = simd_exp2_decay(rate[v] * simd_load(log2_A + n * LANES + v * SIMD_WIDTH));
            vfloat h = decay * simd_load(state) + drive[v] * B[n];
            simd_store(state, h);
            sum[v] += h * C[n];
        }
    }
    for (int v = 0; v < VECTORS; v++)
        simd_store(output + v * SIMD_WIDTH, sum[v]);
}

static bool is_wanted(const struct row_list *rows, int64_t place, int64_t row)
{
    return place < rows->n && rows->index[place] == row;
}

SIMD_INLINE void scan_block(const struct scan *scan, const struct share *share, int64_t block,
                            const struct tile *tile, struct block_tile *work, const int n_states)
{
    const struct selective_scan_args *a = scan->args;
    const float *log2_A = block_of(scan, scan->log2_A, block);
    float *states = block_of(scan, scan->states, block);
    int64_t state_place = tile->state_place, decay_place = tile->decay_place;
    for (int64_t row = tile->first; row < tile->end; row++) {
        int64_t i = row - tile->first;
        step(work->beta[i], work->x[i], log2_A, share->B + i * n_states, share->C + i * n_states, n_states,
             states, work->output[i]);
        if (is_wanted(&a->state_rows, state_place, row))
            write_channel_major(scan, block, states, simd_row(&a->states, state_place++));
        if (is_wanted(&a->decay_rows, decay_place, row))
            write_decays(scan, block, work->beta[i], simd_row(&a->decays, decay_place++));
    }
}

static void write_optional(const struct tensor *t, int64_t row, int64_t c, int64_t n, vfloat v)
{
    if (t->data != NULL)
        simd_write(simd_row(t, row), DTYPE_F32, c, n, v);
}

/* D, the gate, and what leaves. */
static void write_block(const struct scan *scan, int64_t block, const struct tile *tile,
                        const struct block_tile *work)
{
    const struct selective_scan_args *a = scan->args;
    int64_t n = scan->n_channels;
    for (int64_t row = tile->first; row < tile->end; row++) {
        int64_t i = row - tile->first;
        for (int v = 0; v < VECTORS; v++) {
            int64_t c = block * LANES + v * SIMD_WIDTH;
            vfloat y = simd_load(&work->output[i][v * SIMD_WIDTH]) +
                       simd_read(a->D, DTYPE_F32, c, n) * simd_load(&work->x[i][v * SIMD_WIDTH]);
            write_optional(&a->betas, row, c, n, simd_load(&work->beta[i][v * SIMD_WIDTH]));
            write_optional(&a->outputs, row, c, n, y);
            if (a->z.data != NULL)
                y *= simd_silu(simd_read(simd_row(&a->z, row), a->z.dtype, c, n));
            simd_write(simd_row(&a->y, row), a->y.dtype, c, n, y);
        }
    }
}

static void scan_tile(const struct scan *scan, const struct share *share, struct tile *tile)
{
    const struct selective_scan_args *a = scan->args;
    int n_states = a->state_dim;
    tile->state_place = a->states.data == NULL ? a->state_rows.n : cpu_find_row(&a->state_rows, tile->first);
    tile->decay_place = a->decays.data == NULL ? a->decay_rows.n : cpu_find_row(&a->decay_rows, tile->first);
    for (int64_t row = tile->first; row < tile->end; row++) {
        widen_row(&a->B, row, n_states, share->B + (row - tile->first) * n_states);
        widen_row(&a->C, row, n_states, share->C + (row - tile->first) * n_states);
    }
    for (int64_t block = share->first_block; block < share->end_block; block++) {
        struct block_tile work;
        read_block(scan, block, tile, &work);
        if (n_states == 16) /* all models that we know */
            scan_block(scan, share, block, tile, &work, 16);
        else
            scan_block(scan, share, block, tile, &work, n_states);
        write_block(scan, block, tile, &work);
    }
}

static void scan_share(const struct scan *scan, const struct share *share)
{
    const struct runs *runs = &scan->args->runs;
    for (int64_t block = share->first_block; block < share->end_block; block++)
        prepare_decays(scan, block);
    for (int64_t i = 0; i < runs->n; i++) {
        for (int64_t block = share->first_block; block < share->end_block; block++)
            start_states(scan, block, i == 0 && runs->carry_in);
        int64_t end = (int64_t)runs->list[i].start + runs->list[i].length;
        for (int64_t row = runs->list[i].start; row < end; row += TILE) {
            struct tile tile = {.first = row, .end = row + TILE < end ? row + TILE : end};
            scan_tile(scan, share, &tile);
        }
    }
    for (int64_t block = share->first_block; runs->carry_out && block < share->end_block; block++)
        keep_states(scan, block);
}

static void cpu_selective_scan(struct backend *b, const struct selective_scan_args *args)
{
    if (cpu_has_failed(b) || args->runs.n == 0)
        return;
    struct scan scan = {.args = args, .n_channels = args->x.cols};
    int64_t n_blocks = (scan.n_channels + LANES - 1) / LANES;
    int64_t table = n_blocks * args->state_dim * LANES;
    int64_t tile = (int64_t)TILE * args->state_dim;
    scan.states = cpu_scratch(b, (size_t)(2 * table + 2 * tile * b->n_threads) * sizeof(float));
    if (scan.states == NULL)
        return;
    scan.log2_A = scan.states + table;
    scan.tiles = scan.log2_A + table;
#pragma omp parallel num_threads(b->n_threads)
    {
        int64_t thread = omp_get_thread_num(), n_threads = omp_get_num_threads();
        struct share share = {.first_block = n_blocks * thread / n_threads,
                              .end_block = n_blocks * (thread + 1) / n_threads,
                              .B = scan.tiles + 2 * tile * thread,
                              .C = scan.tiles + 2 * tile * thread + tile};
        scan_share(&scan, &share);
    }
}

void CPU_NAME(cpu_fill_selective_scan)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_selective_scan)(struct backend_ops *ops)
{
    ops->selective_scan = cpu_selective_scan;
}
