/* Mamba-1's selective scan.
 *
 * Channels are independent, and so are runs. Where runs divide well among threads each has whole runs, mostly
 * the rows that it had in the operations before; else, or where threads are left, the channels of a group of
 * runs are split. A thread takes its blocks of LANES channels through its runs. Tokens go in tiles, and a
 * tile in stretches of blocks: what is read of a stretch goes through buffers that stay in the second-level
 * cache. A block's states lie together as [state_dim][LANES] and stay in the first-level cache, or in
 * registers where those are many. */
#include "kernels/base/memory.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

#include <math.h>

#define LANES 16 /* channels a block: one cache line of float32 */
#define VECTORS (LANES / SIMD_WIDTH)
#define TILE 16 /* tokens */
/* Lines from a block's work to the next: not all on the same sets of the cache. */
#define TILE_STRIDE (TILE + 1)
#define STRETCH 128 /* blocks: 8 KiB of a row, and 272 KiB of work, which fit the second-level cache */

struct scan {
    const struct selective_scan_args *args;
    int64_t n_channels;
};

/* A thread's: blocks [first_block, end_block) at runs [first_run, end_run), and its working memory. */
struct share {
    int64_t first_block, end_block, first_run, end_run;
    float *beta, *x; /* [STRETCH][TILE_STRIDE][LANES] */
    float *B, *C;    /* [TILE][state_dim] in float32 */
    float *states;   /* [blocks][state_dim][LANES] */
    float *log2_A;   /* the same shape: A * log2 e, so that decays are powers of two */
    float *steepest; /* [blocks]: the largest -log2_A */
};

/* Blocks [first_block, end_block) of a share, and their beta and x at a tile's tokens; x gives way to the
 * output. */
struct stretch {
    int64_t first_block, end_block;
    float *beta, *x;
};

/* Rows [first, end) of a tile, and the wanted ones among them. */
struct tile {
    int64_t first, end;
    int64_t state_place, decay_place; /* in the row lists, of the first wanted row */
};

static float *block_of(const struct scan *scan, const struct share *share, float *table, int64_t block)
{
    return table + (block - share->first_block) * scan->args->state_dim * LANES;
}

/* log2 e in two parts, so that a product with it is rounded once. */
#define LOG2_E_HIGH 1.44269502f
#define LOG2_E_LOW 1.92596303e-8f

static void prepare_decays(const struct scan *scan, const struct share *share, int64_t block)
{
    float *to = block_of(scan, share, share->log2_A, block);
    vfloat steepest = {0}, odd = {0};
    for (int n = 0; n < scan->args->state_dim; n++) {
        const float *from = scan->args->A + n * scan->n_channels;
        for (int v = 0; v < VECTORS; v++) {
            vfloat A = simd_read(from, DTYPE_F32, block * LANES + v * SIMD_WIDTH, scan->n_channels);
            vfloat slope = simd_fma(A, simd_set(LOG2_E_HIGH), A * LOG2_E_LOW);
            simd_store(to + n * LANES + v * SIMD_WIDTH, slope);
            steepest = simd_max(steepest, -slope);
            odd += slope * 0.0f; /* not a number from then on where a slope is none, or infinite */
        }
    }
    bool is_odd = simd_sum(odd) != 0; /* so is what is not a number */
    share->steepest[block - share->first_block] = is_odd ? INFINITY : simd_highest(steepest);
}

/* States of a block before a run: the carried ones or zeros. */
static void start_states(const struct scan *scan, const struct share *share, int64_t block, bool is_carried)
{
    float *to = block_of(scan, share, share->states, block);
    int64_t count = (int64_t)scan->args->state_dim * LANES;
    memset(to, 0, (size_t)count * sizeof *to);
    int64_t width = scan->n_channels - block * LANES < LANES ? scan->n_channels - block * LANES : LANES;
    for (int n = 0; is_carried && n < scan->args->state_dim; n++)
        memcpy(to + n * LANES, scan->args->carry + n * scan->n_channels + block * LANES,
               (size_t)width * sizeof *to);
}

static void keep_states(const struct scan *scan, const struct share *share, int64_t block)
{
    const float *from = block_of(scan, share, share->states, block);
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

/* A stretch's channels: vectors up to `whole` need no look at the end of the row, which is at `end`; those
 * from there to `padded` fill the last block with zeros. Kept in registers: a store might change a struct for
 * all that the compiler knows. */
struct lanes {
    int64_t first, whole, end, padded;
    float *beta, *x;
};

static struct lanes find_lanes(const struct scan *scan, const struct stretch *stretch)
{
    struct lanes lanes = {.first = stretch->first_block * LANES,
                          .padded = stretch->end_block * LANES,
                          .beta = stretch->beta,
                          .x = stretch->x};
    lanes.end = lanes.padded < scan->n_channels ? lanes.padded : scan->n_channels;
    lanes.whole = lanes.first + (lanes.end - lanes.first) / SIMD_WIDTH * SIMD_WIDTH;
    return lanes;
}

/* Where a channel of a tile's token is in a stretch's beta and x. */
SIMD_INLINE int64_t work_index(const struct lanes *lanes, int64_t channel, int64_t token)
{
    int64_t place = channel - lanes->first;
    return (place / LANES * TILE_STRIDE + token) * LANES + place % LANES;
}

/* Row by row, so that the hardware's prefetchers see long runs of lines: going down the columns of one block
 * at a time, half of the scan's time was waiting for memory (AVX-512, rows in the third-level cache). */
SIMD_INLINE void read_rows(const struct scan *scan, const struct stretch *stretch, const struct tile *tile,
                           const enum dtype x_dtype, const enum dtype dt_dtype)
{
    const struct selective_scan_args *a = scan->args;
    const struct lanes lanes = find_lanes(scan, stretch);
    for (int64_t row = tile->first; row < tile->end; row++) {
        const void *x_row = simd_row(&a->x, row), *dt_row = simd_row(&a->dt, row);
        for (int64_t i = lanes.first; i < lanes.padded; i += SIMD_WIDTH) {
            int64_t end = i < lanes.whole ? i + SIMD_WIDTH : lanes.end;
            vfloat dt = simd_read(dt_row, dt_dtype, i, end);
            vfloat x = simd_read(x_row, x_dtype, i, end);
            vfloat bias = simd_read(a->dt_bias, DTYPE_F32, i, end);
            int64_t at = work_index(&lanes, i, row - tile->first);
            simd_store(lanes.beta + at, simd_softplus(dt + bias));
            simd_store(lanes.x + at, x);
        }
    }
}

/* Moves a block's states on by one token; x = C . h + D x. is_mild: no decay of the tile is below 2^-125. */
SIMD_INLINE void step(const float *beta, const float *log2_A, const float *B, const float *C, const float *D,
                      const int n_states, const bool is_mild, vfloat_there *states, float *x)
{
    vfloat rate[VECTORS], drive[VECTORS], sum[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        rate[v] = simd_load(beta + v * SIMD_WIDTH);
        drive[v] = rate[v] * simd_load(x + v * SIMD_WIDTH);
        sum[v] = (vfloat){0};
    }
#pragma GCC unroll 16
    for (int n = 0; n < n_states; n++) {
        const vfloat b = simd_set(B[n]), c = simd_set(C[n]);
        for (int v = 0; v < VECTORS; v++) {
            vfloat slope = simd_load(log2_A + n * LANES + v * SIMD_WIDTH);
            vfloat decay =
                is_mild ? simd_exp2_product(rate[v], slope) : simd_exp2_product_any(rate[v], slope);
            vfloat h = simd_fma(decay, states[n * VECTORS + v], drive[v] * b);
            sum[v] = simd_fma(h, c, sum[v]);
            states[n * VECTORS + v] = h;
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        float *at = x + v * SIMD_WIDTH;
        simd_store(at, simd_fma(simd_load(D + v * SIMD_WIDTH), simd_load(at), sum[v]));
    }
}

#define HELD_STATES 16

/* Tokens of a block that are worked through with nothing captured between them. Where there are as many
 * states as all models that we know have, and a vector holds a whole block, they stay in registers. */
SIMD_INLINE void walk(const float *log2_A, const float *B, const float *C, const float *D, const int n_states,
                      const bool is_mild, const int64_t n_tokens, const float *beta, float *states, float *x)
{
    vfloat_there held[HELD_STATES];
    const bool holds = VECTORS == 1 && n_states == HELD_STATES;
    if (holds)
#pragma GCC unroll 16
        for (int n = 0; n < HELD_STATES; n++)
            held[n] = simd_load(states + n * LANES);
    for (int64_t i = 0; i < n_tokens; i++) /* a token's row: LANES of beta and x, n_states of B and C */
        step(beta + i * LANES, log2_A, B + i * n_states, C + i * n_states, D, n_states, is_mild,
             holds ? held : (vfloat_there *)states, x + i * LANES);
    if (holds)
#pragma GCC unroll 16
        for (int n = 0; n < HELD_STATES; n++)
            simd_store(states + n * LANES, held[n]);
}

static bool is_wanted(const struct row_list *rows, int64_t place, int64_t row)
{
    return place < rows->n && rows->index[place] == row;
}

/* The row after the next wanted one: up to there nothing is captured but at its end. */
static int64_t row_after(const struct row_list *rows, int64_t place)
{
    return place < rows->n ? (int64_t)rows->index[place] + 1 : INT64_MAX;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

SIMD_INLINE void scan_block(const struct scan *scan, const struct share *share, int64_t block,
                            const struct tile *tile, const float *beta, float *x, const int n_states,
                            const bool is_mild)
{
    const struct selective_scan_args *a = scan->args;
    const float *log2_A = block_of(scan, share, share->log2_A, block);
    float *states = block_of(scan, share, share->states, block);
    float D[LANES];
    for (int64_t i = 0; i < LANES; i += SIMD_WIDTH)
        simd_store(D + i, simd_read(a->D, DTYPE_F32, block * LANES + i, scan->n_channels));
    int64_t state_place = tile->state_place, decay_place = tile->decay_place, end;
    for (int64_t row = tile->first; row < tile->end; row = end) {
        int64_t i = row - tile->first;
        end = min64(min64(row_after(&a->state_rows, state_place), row_after(&a->decay_rows, decay_place)),
                    tile->end);
        walk(log2_A, share->B + i * n_states, share->C + i * n_states, D, n_states, is_mild, end - row,
             beta + i * LANES, states, x + i * LANES);
        if (is_wanted(&a->state_rows, state_place, end - 1))
            write_channel_major(scan, block, states, simd_row(&a->states, state_place++));
        if (is_wanted(&a->decay_rows, decay_place, end - 1))
            write_decays(scan, block, beta + (end - 1 - tile->first) * LANES,
                         simd_row(&a->decays, decay_place++));
    }
}

/* Below this the decays of a tile need no clamp: 2^x is a normal number and so are its parts. */
#define MILD_EXPONENT 125.0f

static void choose_scan(const struct scan *scan, const struct share *share, int64_t block,
                        const struct tile *tile, const float *beta, float *x)
{
    int n_states = scan->args->state_dim;
    vfloat largest = {0};
    for (int64_t i = 0; i < (tile->end - tile->first) * LANES; i += SIMD_WIDTH)
        largest = simd_max(largest, simd_load(beta + i));
    bool is_mild = simd_highest(largest) * share->steepest[block - share->first_block] < MILD_EXPONENT;
    if (n_states == 16 && is_mild) /* all models that we know */
        scan_block(scan, share, block, tile, beta, x, 16, true);
    else if (n_states == 16)
        scan_block(scan, share, block, tile, beta, x, 16, false);
    else
        scan_block(scan, share, block, tile, beta, x, n_states, false);
}

/* The gate, and what leaves. */
SIMD_INLINE void write_rows(const struct scan *scan, const struct stretch *stretch, const struct tile *tile,
                            const enum dtype z_dtype, const enum dtype y_dtype)
{
    const struct selective_scan_args *a = scan->args;
    const struct lanes lanes = find_lanes(scan, stretch);
    const bool has_gate = a->z.data != NULL;
    for (int64_t row = tile->first; row < tile->end; row++) {
        const void *z_row = has_gate ? simd_row(&a->z, row) : NULL;
        void *y_row = simd_row(&a->y, row);
        for (int64_t i = lanes.first; i < lanes.end; i += SIMD_WIDTH) {
            int64_t end = i < lanes.whole ? i + SIMD_WIDTH : lanes.end;
            vfloat out = simd_load(lanes.x + work_index(&lanes, i, row - tile->first));
            if (has_gate)
                out *= simd_silu(simd_read(z_row, z_dtype, i, end));
            simd_write(y_row, y_dtype, i, end, out);
        }
    }
}

/* Captured rows: their values from beta or x of a stretch. */
static void capture_rows(const struct scan *scan, const struct stretch *stretch, const struct tile *tile,
                         const float *from, const struct tensor *to)
{
    const struct lanes lanes = find_lanes(scan, stretch);
    for (int64_t row = tile->first; to->data != NULL && row < tile->end; row++)
        for (int64_t i = lanes.first; i < lanes.end; i += SIMD_WIDTH)
            simd_write(simd_row(to, row), DTYPE_F32, i, lanes.end,
                       simd_load(from + work_index(&lanes, i, row - tile->first)));
}

SIMD_INLINE void run_stretch(const struct scan *scan, const struct share *share,
                             const struct stretch *stretch, const struct tile *tile, const enum dtype x_dtype,
                             const enum dtype dt_dtype, const enum dtype z_dtype, const enum dtype y_dtype)
{
    read_rows(scan, stretch, tile, x_dtype, dt_dtype);
    for (int64_t block = stretch->first_block; block < stretch->end_block; block++) {
        int64_t at = (block - stretch->first_block) * TILE_STRIDE * LANES;
        choose_scan(scan, share, block, tile, stretch->beta + at, stretch->x + at);
    }
    capture_rows(scan, stretch, tile, stretch->beta, &scan->args->betas);
    capture_rows(scan, stretch, tile, stretch->x, &scan->args->outputs);
    write_rows(scan, stretch, tile, z_dtype, y_dtype);
}

static void choose_stretch(const struct scan *scan, const struct share *share, const struct stretch *stretch,
                           const struct tile *tile)
{
    const struct selective_scan_args *a = scan->args;
    enum dtype x = a->x.dtype, z = a->z.data == NULL ? x : a->z.dtype;
    bool is_even = x == a->dt.dtype && x == z && x == a->y.dtype;
    if (is_even && x == DTYPE_F32)
        run_stretch(scan, share, stretch, tile, DTYPE_F32, DTYPE_F32, DTYPE_F32, DTYPE_F32);
    else if (is_even)
        run_stretch(scan, share, stretch, tile, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16);
    else
        run_stretch(scan, share, stretch, tile, x, a->dt.dtype, z, a->y.dtype);
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
    for (int64_t block = share->first_block; block < share->end_block; block += STRETCH) {
        struct stretch stretch = {
            .first_block = block, .end_block = block + STRETCH, .beta = share->beta, .x = share->x};
        if (stretch.end_block > share->end_block)
            stretch.end_block = share->end_block;
        choose_stretch(scan, share, &stretch, tile);
    }
}

static void scan_share(const struct scan *scan, const struct share *share)
{
    const struct runs *runs = &scan->args->runs;
    for (int64_t block = share->first_block; block < share->end_block; block++)
        prepare_decays(scan, share, block);
    for (int64_t i = share->first_run; i < share->end_run; i++) {
        for (int64_t block = share->first_block; block < share->end_block; block++)
            start_states(scan, share, block, i == 0 && runs->carry_in);
        int64_t end = (int64_t)runs->list[i].start + runs->list[i].length;
        for (int64_t row = runs->list[i].start; row < end; row += TILE) {
            struct tile tile = {.first = row, .end = row + TILE < end ? row + TILE : end};
            scan_tile(scan, share, &tile);
        }
    }
}

/* How work is split: n_groups of runs, and the channels of each among as many threads. */
struct division {
    int n_groups, n_columns;
    int64_t n_blocks, share_blocks; /* of all channels; the most that a share has */
};

static int64_t count_tokens(const struct runs *runs, int64_t first, int64_t end)
{
    if (first >= end)
        return 0;
    const struct run *last = &runs->list[end - 1];
    return (int64_t)last->start + last->length - runs->list[first].start;
}

/* The first run of a group: the one whose middle is nearest behind the group's share of the tokens. */
static int64_t find_group(const struct runs *runs, int group, int n_groups)
{
    int64_t target = count_tokens(runs, 0, runs->n) * group / n_groups, low = 0, high = runs->n;
    if (group == n_groups)
        return runs->n;
    while (low < high) {
        int64_t i = low + (high - low) / 2;
        if (runs->list[i].start - runs->list[0].start + runs->list[i].length / 2 < target)
            low = i + 1;
        else
            high = i;
    }
    return low;
}

/* No group has more than a twentieth above its share, for which threads would wait, and none has nothing. */
static bool divides_well(const struct runs *runs, int n_groups)
{
    int64_t n = count_tokens(runs, 0, runs->n);
    for (int group = 0; group < n_groups; group++) {
        int64_t tokens =
            count_tokens(runs, find_group(runs, group, n_groups), find_group(runs, group + 1, n_groups));
        if (tokens == 0 || tokens * n_groups > n + n / 20)
            return false;
    }
    return true;
}

static struct division divide(const struct scan *scan, int n_threads)
{
    const struct runs *runs = &scan->args->runs;
    struct division d = {.n_groups = n_threads, .n_blocks = (scan->n_channels + LANES - 1) / LANES};
    while (d.n_groups > 1 &&
           (n_threads % d.n_groups != 0 || runs->n < d.n_groups || !divides_well(runs, d.n_groups)))
        d.n_groups--;
    d.n_columns = n_threads / d.n_groups;
    d.share_blocks = (d.n_blocks + d.n_columns - 1) / d.n_columns;
    return d;
}

#define STRETCH_FLOATS (STRETCH * TILE_STRIDE * LANES)

/* Of a share's working memory, in whole cache lines. */
static int64_t share_floats(const struct scan *scan, const struct division *d)
{
    int64_t n = scan->args->state_dim;
    int64_t floats = 2 * STRETCH_FLOATS + 2 * TILE * n + 2 * d->share_blocks * n * LANES + d->share_blocks;
    return (floats + LANES - 1) / LANES * LANES;
}

static struct share make_share(const struct scan *scan, const struct division *d, int thread, float *memory)
{
    int64_t n = scan->args->state_dim, table = d->share_blocks * n * LANES;
    int group = thread / d->n_columns, column = thread % d->n_columns;
    struct share share = {.first_block = d->n_blocks * column / d->n_columns,
                          .end_block = d->n_blocks * (column + 1) / d->n_columns,
                          .first_run = find_group(&scan->args->runs, group, d->n_groups),
                          .end_run = find_group(&scan->args->runs, group + 1, d->n_groups)};
    share.beta = memory + share_floats(scan, d) * thread;
    share.x = share.beta + STRETCH_FLOATS;
    share.states = share.x + STRETCH_FLOATS;
    share.log2_A = share.states + table;
    share.B = share.log2_A + table;
    share.C = share.B + TILE * n;
    share.steepest = share.C + TILE * n;
    return share;
}

static void cpu_selective_scan(struct backend *b, const struct selective_scan_args *args)
{
    if (cpu_has_failed(b) || args->runs.n == 0)
        return;
    const struct scan scan = {.args = args, .n_channels = args->x.cols};
    const struct division division = divide(&scan, b->n_threads);
    float *memory = cpu_scratch(b, (size_t)(share_floats(&scan, &division) * b->n_threads) * sizeof *memory);
    if (memory == NULL)
        return;
#pragma omp parallel for num_threads(b->n_threads) schedule(static, 1)
    for (int thread = 0; thread < b->n_threads; thread++) {
        struct share share = make_share(&scan, &division, thread, memory);
        unsigned before = simd_begin_flush();
        scan_share(&scan, &share);
        simd_end_flush(before);
    }
    /* Not before all have read the carry that came in. */
    for (int thread = 0; args->runs.carry_out && thread < b->n_threads; thread++) {
        struct share share = make_share(&scan, &division, thread, memory);
        bool has_last = share.end_run == args->runs.n;
        for (int64_t block = share.first_block; has_last && block < share.end_block; block++)
            keep_states(&scan, &share, block);
    }
}

void CPU_NAME(cpu_fill_selective_scan)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_selective_scan)(struct backend_ops *ops)
{
    ops->selective_scan = cpu_selective_scan;
}
