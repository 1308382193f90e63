/* Mamba-1's selective scan.
 *
 * Channels are independent, so they are split: a thread has a stretch of blocks of LANES channels, and takes
 * it through all runs. Tokens go in tiles, so that the rows of a tile stay in the cache while the blocks go
 * over them. A block's states lie together as [state_dim][LANES] and stay in the first-level cache, or in
 * registers where those are many. */
#include "kernels/base/memory.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

#include <math.h>
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
    float *states;   /* [blocks][state_dim][LANES] */
    float *log2_A;   /* the same shape: A * log2 e, so that decays are powers of two */
    float *steepest; /* [blocks]: the largest -log2_A */
    float *tiles;    /* [threads][2][TILE][state_dim]: B and C in float32 */
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
    float *to = block_of(scan, scan->log2_A, block), steepest = 0;
    for (int n = 0; n < scan->args->state_dim; n++) {
        const float *from = scan->args->A + n * scan->n_channels;
        for (int lane = 0; lane < LANES; lane++) {
            int64_t c = block * LANES + lane;
            float slope = c < scan->n_channels ? (float)((double)from[c] * LOG2_E) : 0.0f;
            to[n * LANES + lane] = slope;
            if (!(-slope <= steepest))
                steepest = slope == slope ? -slope : INFINITY; /* not a number: nothing is mild */
        }
    }
    scan->steepest[block] = steepest;
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

/* A tensor's elements of a vector of channels, from a tile's first token on. Kept in registers: a store might
 * change a struct for all that the compiler knows. */
struct column {
    char *at;             /* NULL: not there */
    int64_t stride, left; /* bytes from a token to the next; channels from the vector's first to the last */
};

SIMD_INLINE struct column find_column(const struct tensor *t, int64_t row, int64_t c, const enum dtype dtype)
{
    int64_t size = dtype == DTYPE_F32 ? 4 : 2;
    struct column column = {.stride = t->stride * size, .left = t->cols - c};
    if (t->data != NULL)
        column.at = (char *)t->data + row * column.stride + c * size;
    return column;
}

/* Token i of a column. A whole block needs no look at the end of the row. */
SIMD_INLINE vfloat column_read(const struct column column, int64_t i, const enum dtype dtype,
                               const bool is_whole)
{
    const char *from = column.at + i * column.stride;
    return is_whole ? simd_get(from, dtype, 0) : simd_read(from, dtype, 0, column.left);
}

SIMD_INLINE void column_write(const struct column column, int64_t i, const enum dtype dtype,
                              const bool is_whole, vfloat v)
{
    char *to = column.at + i * column.stride;
    if (is_whole)
        simd_put(to, dtype, 0, v);
    else
        simd_write(to, dtype, 0, column.left, v);
}

/* beta and x of a tile's tokens; returns the largest beta. */
SIMD_INLINE float read_block(const struct scan *scan, int64_t block, const struct tile *tile,
                             struct block_tile *work, const enum dtype x_dtype, const enum dtype dt_dtype,
                             const bool is_whole)
{
    const struct selective_scan_args *a = scan->args;
    const int64_t n = tile->end - tile->first;
    vfloat largest = {0};
    for (int v = 0; v < VECTORS; v++) {
        int64_t c = block * LANES + v * SIMD_WIDTH;
        const vfloat bias = simd_read(a->dt_bias, DTYPE_F32, c, scan->n_channels);
        const struct column x = find_column(&a->x, tile->first, c, x_dtype);
        const struct column dt = find_column(&a->dt, tile->first, c, dt_dtype);
        for (int64_t i = 0; i < n; i++) {
            vfloat beta = simd_softplus(column_read(dt, i, dt_dtype, is_whole) + bias);
            largest = simd_max(largest, beta);
            simd_store(&work->beta[i][v * SIMD_WIDTH], beta);
            simd_store(&work->x[i][v * SIMD_WIDTH], column_read(x, i, x_dtype, is_whole));
        }
    }
    return simd_highest(largest);
}

/* Moves a block's states on by one token; output = C . h. is_mild: no decay of the tile is below 2^-125. */
SIMD_INLINE void step(const float *beta, const float *x, const float *log2_A, const float *B, const float *C,
                      const int n_states, const bool is_mild, float *states, float *output)
{
    vfloat rate[VECTORS], drive[VECTORS], sum[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        rate[v] = simd_load(beta + v * SIMD_WIDTH);
        drive[v] = rate[v] * simd_load(x + v * SIMD_WIDTH);
        sum[v] = (vfloat){0};
    }
    for (int n = 0; n < n_states; n++) {
        const vfloat b = simd_set(B[n]), c = simd_set(C[n]);
        for (int v = 0; v < VECTORS; v++) {
            float *state = states + n * LANES + v * SIMD_WIDTH;
            vfloat slope = simd_load(log2_A + n * LANES + v * SIMD_WIDTH);
            vfloat decay =
                is_mild ? simd_exp2_product(rate[v], slope) : simd_exp2_product_any(rate[v], slope);
            vfloat h = simd_fma(decay, simd_load(state), drive[v] * b);
            simd_store(state, h);
            sum[v] = simd_fma(h, c, sum[v]);
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
                            const struct tile *tile, struct block_tile *work, const int n_states,
                            const bool is_mild)
{
    const struct selective_scan_args *a = scan->args;
    const float *log2_A = block_of(scan, scan->log2_A, block);
    float *states = block_of(scan, scan->states, block);
    int64_t state_place = tile->state_place, decay_place = tile->decay_place;
    for (int64_t row = tile->first; row < tile->end; row++) {
        int64_t i = row - tile->first;
        step(work->beta[i], work->x[i], log2_A, share->B + i * n_states, share->C + i * n_states, n_states,
             is_mild, states, work->output[i]);
        if (is_wanted(&a->state_rows, state_place, row))
            write_channel_major(scan, block, states, simd_row(&a->states, state_place++));
        if (is_wanted(&a->decay_rows, decay_place, row))
            write_decays(scan, block, work->beta[i], simd_row(&a->decays, decay_place++));
    }
}

/* D, the gate, and what leaves. */
SIMD_INLINE void write_block(const struct scan *scan, int64_t block, const struct tile *tile,
                             const struct block_tile *work, const enum dtype z_dtype,
                             const enum dtype y_dtype, const bool is_whole)
{
    const struct selective_scan_args *a = scan->args;
    const int64_t n = tile->end - tile->first;
    for (int v = 0; v < VECTORS; v++) {
        int64_t c = block * LANES + v * SIMD_WIDTH;
        const vfloat D = simd_read(a->D, DTYPE_F32, c, scan->n_channels);
        const struct column z = find_column(&a->z, tile->first, c, z_dtype);
        const struct column y = find_column(&a->y, tile->first, c, y_dtype);
        const struct column betas = find_column(&a->betas, tile->first, c, DTYPE_F32);
        const struct column outputs = find_column(&a->outputs, tile->first, c, DTYPE_F32);
        for (int64_t i = 0; i < n; i++) {
            vfloat out =
                simd_load(&work->output[i][v * SIMD_WIDTH]) + D * simd_load(&work->x[i][v * SIMD_WIDTH]);
            if (betas.at != NULL)
                column_write(betas, i, DTYPE_F32, is_whole, simd_load(&work->beta[i][v * SIMD_WIDTH]));
            if (outputs.at != NULL)
                column_write(outputs, i, DTYPE_F32, is_whole, out);
            if (z.at != NULL)
                out *= simd_silu(column_read(z, i, z_dtype, is_whole));
            column_write(y, i, y_dtype, is_whole, out);
        }
    }
}

/* Below this the decays of a tile need no clamp: 2^x is a normal number and so are its parts. */
#define MILD_EXPONENT 125.0f

SIMD_INLINE void run_block(const struct scan *scan, const struct share *share, int64_t block,
                           const struct tile *tile, const enum dtype x_dtype, const enum dtype dt_dtype,
                           const enum dtype z_dtype, const enum dtype y_dtype, const bool is_whole)
{
    struct block_tile work;
    int n_states = scan->args->state_dim;
    float beta = read_block(scan, block, tile, &work, x_dtype, dt_dtype, is_whole);
    bool is_mild = beta * scan->steepest[block] < MILD_EXPONENT;
    if (n_states == 16 && is_mild) /* all models that we know */
        scan_block(scan, share, block, tile, &work, 16, true);
    else if (n_states == 16)
        scan_block(scan, share, block, tile, &work, 16, false);
    else
        scan_block(scan, share, block, tile, &work, n_states, false);
    write_block(scan, block, tile, &work, z_dtype, y_dtype, is_whole);
}

static void choose_block(const struct scan *scan, const struct share *share, int64_t block,
                         const struct tile *tile)
{
    const struct selective_scan_args *a = scan->args;
    enum dtype x = a->x.dtype, z = a->z.data == NULL ? x : a->z.dtype;
    bool is_even = x == a->dt.dtype && x == z && x == a->y.dtype;
    bool is_whole = (block + 1) * LANES <= scan->n_channels;
    if (is_whole && is_even && x == DTYPE_F32)
        run_block(scan, share, block, tile, DTYPE_F32, DTYPE_F32, DTYPE_F32, DTYPE_F32, true);
    else if (is_whole && is_even)
        run_block(scan, share, block, tile, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, true);
    else
        run_block(scan, share, block, tile, x, a->dt.dtype, z, a->y.dtype, false);
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
    for (int64_t block = share->first_block; block < share->end_block; block++)
        choose_block(scan, share, block, tile);
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
    scan.states = cpu_scratch(b, (size_t)(2 * table + 2 * tile * b->n_threads + n_blocks) * sizeof(float));
    if (scan.states == NULL)
        return;
    scan.log2_A = scan.states + table;
    scan.tiles = scan.log2_A + table;
    scan.steepest = scan.tiles + 2 * tile * b->n_threads;
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
