/* Attention in tiles with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
 *
 * A task is a tile of queries of one run with the query heads that share a key/value head. Its rows are
 * ordered by query, then by head, as they lie in q. It goes through the keys in tiles, aligned to the run's
 * first key, so that a query's result does not depend on which tile or batch it lies in; keys that the mask
 * hides are skipped by panel. Scores live in a few rows of scratch that stay in the first-level cache.
 * Exponents are taken to base 2. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/tile.h"

#include <assert.h>
#include <math.h>
#include <omp.h>

/* Rows whose scores are computed, turned into weights and spent together: a multiple of every TILE_ROWS. */
#define GROUP_ROWS 24
/* Rows of a task for heads of 128 or less: packing a tile of keys then costs about 2 % of using it. */
#define TASK_ROWS 288
/* Keys of a tile for heads of 128 or less: keys and values of a tile fit the second-level cache with the
 * queries. */
#define TILE_KEYS 128
/* Keys of the next tile that are called in with each group of rows: all of them over a full task's groups. */
#define PREFETCH_KEYS ((TILE_KEYS * GROUP_ROWS + TASK_ROWS - 1) / TASK_ROWS)
#define LOG2_E 1.44269504088896340736f

struct attention_plan {
    const struct attention_args *args;
    int n_queries;    /* of a task */
    int heads;        /* query heads of a task */
    int parts;        /* tasks that a key/value head's query heads are split over */
    int keys;         /* of a tile */
    int64_t dims;     /* head_dim rounded up to whole vectors */
    int64_t rows;     /* n_queries * heads */
    bool bf16_scores; /* queries and keys stay in bfloat16, two elements in a float's place */
    size_t q_floats, o_floats, row_floats, k_floats, v_floats, s_floats;
    size_t thread_floats;
};

/* One thread's working memory. */
struct attention_scratch {
    float *q;       /* [rows, head_dim], scaled; plan->bf16_scores: [rows, head_dim / 2] */
    float *o;       /* [rows, dims], sums of weights * values */
    float *largest; /* [rows] score so far */
    float *total;   /* [rows] of weights */
    float *factor;  /* [rows] that o and total are multiplied by in this tile */
    float *k;       /* panels of the keys' transpose, depth head_dim; plan->bf16_scores: head_dim / 2 */
    float *v;       /* panels of the values, depth keys */
    float *s;       /* [GROUP_ROWS, keys] */
};

/* Queries of one run and the heads of one task. Their number in the run is index[i] - start, or first + i. */
struct query_tile {
    const struct run *run;
    const int32_t *index; /* batch rows, or NULL */
    int64_t first;
    int n_queries;
    int kv_head, first_head; /* first_head: of all query heads */
    int heads;
    int64_t first_key; /* row of k of the run's key 0 */
    int64_t offset;    /* the run's query i is its key i + offset */
};

/* Keys [low, high), of the run or of a tile. */
struct key_range {
    int64_t low, high;
};

/* TILE_CALL's rows of a group: which, and the keys of the tile that at least one of them sees. */
struct row_block {
    int64_t row;
    int rows;
    struct key_range seen;
};

struct row_group {
    struct row_block blocks[GROUP_ROWS];
    int n;
    int64_t first_row, rows;
    struct key_range seen; /* by any of its blocks */
};

static int64_t get_query(const struct query_tile *tile, int64_t i)
{
    return tile->index != NULL ? tile->index[i] - tile->run->start : tile->first + i;
}

static int64_t clip(int64_t value, int64_t low, int64_t high)
{
    return value < low ? low : value > high ? high : value;
}

/* The run's keys that query i of the tile sees. */
static struct key_range get_visible(const struct attention_args *args, const struct query_tile *tile,
                                    int64_t i)
{
    int64_t high = get_query(tile, i) + tile->offset + 1;

    return (struct key_range){.low = args->window > 0 && high > args->window ? high - args->window : 0,
                              .high = high};
}

/* What of them lies in the key tile [first, first + n), counted from its start; low == high where nothing
 * does. */
static struct key_range clip_range(struct key_range range, int64_t first, int64_t n)
{
    int64_t low = clip(range.low - first, 0, n);

    return (struct key_range){.low = low, .high = clip(range.high - first, low, n)};
}

static struct attention_plan plan_attention(const struct attention_args *args)
{
    struct attention_plan plan = {.args = args};
    int64_t dim = args->head_dim, group = args->n_heads / args->n_kv_heads;
    int64_t rows = clip(TASK_ROWS * 128 / dim, GROUP_ROWS, TASK_ROWS);

    plan.parts = (int)((group + rows - 1) / rows);
    plan.heads = (int)((group + plan.parts - 1) / plan.parts);
    plan.n_queries = (int)(rows / plan.heads);
    plan.rows = (int64_t)plan.n_queries * plan.heads;
    plan.keys = (int)tile_round_up(clip(TILE_KEYS * 128 / dim, 32, TILE_KEYS), TILE_COLS);
    plan.dims = tile_round_up(dim, SIMD_WIDTH);
    plan.q_floats = (size_t)tile_round_up(plan.rows * dim, 16);
    plan.o_floats = (size_t)tile_round_up(plan.rows * plan.dims, 16);
    plan.row_floats = (size_t)tile_round_up(plan.rows, 16);
    plan.k_floats = (size_t)(plan.keys * dim);
    plan.v_floats = (size_t)(plan.keys * tile_panels(dim) * TILE_COLS);
    plan.s_floats = (size_t)(GROUP_ROWS * plan.keys);
    plan.thread_floats = plan.q_floats + plan.o_floats + 3 * plan.row_floats + plan.k_floats + plan.v_floats +
                         plan.s_floats + 16;
    plan.thread_floats = (size_t)tile_round_up((int64_t)plan.thread_floats, 16);
    return plan;
}

static struct attention_scratch lay_out_scratch(const struct attention_plan *plan, float *at)
{
    struct attention_scratch scratch;

    scratch.k = at, at += plan->k_floats;
    scratch.v = at, at += plan->v_floats;
    scratch.s = at, at += plan->s_floats;
    scratch.q = at, at += plan->q_floats;
    scratch.o = at, at += plan->o_floats;
    scratch.largest = at, at += plan->row_floats;
    scratch.total = at, at += plan->row_floats;
    scratch.factor = at;
    return scratch;
}

/* The tile's queries times `scale` (plan->bf16_scores: as they are), and the sums at their start. */
static void load_queries(const struct attention_plan *plan, const struct query_tile *tile, float scale,
                         struct attention_scratch *scratch)
{
    const struct attention_args *args = plan->args;
    int64_t dim = args->head_dim, width = tile->heads * dim;

    for (int64_t i = 0; i < tile->n_queries; i++) {
        struct tensor q = tensor_cols(args->q, tile->first_head * dim, width);
        const void *from = tensor_row(&q, tile->run->start + get_query(tile, i));
        if (plan->bf16_scores) {
            memcpy(scratch->q + i * width / 2, from, (size_t)width * sizeof(uint16_t));
            continue;
        }
        for (int64_t c = 0; c < width; c += SIMD_WIDTH)
            simd_write(scratch->q + i * width, DTYPE_F32, c, width,
                       simd_read(from, q.dtype, c, width) * scale);
    }
    for (int64_t r = 0; r < tile->n_queries * tile->heads; r++) {
        scratch->largest[r] = -INFINITY;
        scratch->total[r] = 0;
    }
    memset(scratch->o, 0, (size_t)(tile->n_queries * tile->heads * plan->dims) * sizeof(float));
}

/* Keys [first, first + n) of the run into panels; values too, where they are wanted. */
static void load_keys(const struct attention_plan *plan, const struct query_tile *tile, int64_t first,
                      int64_t n, bool with_values, struct attention_scratch *scratch)
{
    const struct attention_args *args = plan->args;
    int64_t dim = args->head_dim, row = tile->first_key + first;
    struct tensor k = tensor_cols(args->k, tile->kv_head * dim, dim),
                  v = tensor_cols(args->v, tile->kv_head * dim, dim);

    if (plan->bf16_scores)
        tile_pack_transposed(scratch->k, tensor_row(&k, row), DTYPE_F32, k.stride / 2, n, dim / 2);
    else
        tile_pack_transposed(scratch->k, tensor_row(&k, row), k.dtype, k.stride, n, dim);
    if (with_values)
        tile_pack(scratch->v, tensor_row(&v, row), v.dtype, v.stride, n, dim);
}

/* Calls the cache lines of keys and values [first, end) of the run in, to be there when load_keys comes:
 * their rows are too short and too far apart for the processor to see what is next. */
static void prefetch_keys(const struct attention_plan *plan, const struct query_tile *tile, int64_t first,
                          int64_t end)
{
    const struct attention_args *args = plan->args;
    int64_t dim = args->head_dim;
    struct tensor k = tensor_cols(args->k, tile->kv_head * dim, dim),
                  v = tensor_cols(args->v, tile->kv_head * dim, dim);
    int64_t bytes = dim * (int64_t)dtype_size(k.dtype);
    const char *k_row = tensor_row(&k, tile->first_key + first),
               *v_row = tensor_row(&v, tile->first_key + first);
    size_t k_step = (size_t)k.stride * dtype_size(k.dtype), v_step = (size_t)v.stride * dtype_size(v.dtype);

    for (; first < end; first++, k_row += k_step, v_row += v_step)
        for (int64_t i = 0; i < bytes; i += 64) {
            __builtin_prefetch(k_row + i, 0, 2);
            __builtin_prefetch(v_row + i, 0, 2);
        }
}

/* Blocks of the task's rows from `first_row` on, and what of the key tile [first, first + n) they see. */
static struct row_group cut_group(const struct attention_args *args, const struct query_tile *tile,
                                  int64_t first_row, int64_t first, int64_t n)
{
    struct row_group group = {.first_row = first_row, .seen = {.low = n, .high = 0}};

    group.rows = clip((int64_t)tile->n_queries * tile->heads - first_row, 0, GROUP_ROWS);
    for (int64_t r = 0; r < group.rows;) {
        struct row_block *block = &group.blocks[group.n++];
        block->row = first_row + r;
        block->rows = tile_block_rows(group.rows - r);
        /* Later queries see later keys. */
        struct key_range seen = get_visible(args, tile, block->row / tile->heads);
        seen.high = get_visible(args, tile, (block->row + block->rows - 1) / tile->heads).high;
        block->seen = clip_range(seen, first, n);
        if (block->seen.high > block->seen.low) {
            group.seen.low = block->seen.low < group.seen.low ? block->seen.low : group.seen.low;
            group.seen.high = block->seen.high > group.seen.high ? block->seen.high : group.seen.high;
        }
        r += block->rows;
    }
    return group;
}

/* One block's scores of the panel that begins at the tile's key c. */
static struct tile_product plan_scores(const struct attention_plan *plan, const struct row_group *group,
                                       const struct row_block *block, int64_t c,
                                       const struct attention_scratch *scratch)
{
    int64_t depth = plan->bf16_scores ? plan->args->head_dim / 2 : plan->args->head_dim;

    return (struct tile_product){
        .left = {.at = scratch->q + block->row * depth, .row_step = depth, .depth_step = 1},
        .panel = scratch->k + c * depth,
        .depth = depth,
        .to = scratch->s + (block->row - group->first_row) * plan->keys + c,
        .stride = plan->keys};
}

static bool sees_panel(const struct row_block *block, int64_t c)
{
    return c + TILE_COLS > block->seen.low && c < block->seen.high;
}

/* Scores of the group's rows; panels that a block does not see are left as they are. */
static void compute_scores(const struct attention_plan *plan, const struct row_group *group,
                           const struct attention_scratch *scratch)
{
    for (int64_t c = group->seen.low / TILE_COLS * TILE_COLS; c < group->seen.high; c += TILE_COLS)
        for (int b = 0; b < group->n; b++) {
            struct tile_product product = plan_scores(plan, group, &group->blocks[b], c, scratch);
            if (sees_panel(&group->blocks[b], c))
                TILE_CALL(group->blocks[b].rows, 2, tile_product_set, &product);
        }
}

#if SIMD_WIDTH == 16
/* The same by products of bfloat16, half as many. The scale comes last: in queries it would be rounded. */
TILE_TARGET_BF16 static void compute_scores_bf16(const struct attention_plan *plan,
                                                 const struct row_group *group,
                                                 const struct attention_scratch *scratch)
{
    float scale = plan->args->scale * LOG2_E;

    for (int64_t c = group->seen.low / TILE_COLS * TILE_COLS; c < group->seen.high; c += TILE_COLS)
        for (int b = 0; b < group->n; b++) {
            struct tile_product product = plan_scores(plan, group, &group->blocks[b], c, scratch);
            if (sees_panel(&group->blocks[b], c))
                TILE_CALL(group->blocks[b].rows, 2, tile_product_set_bf16, &product, scale);
        }
}

/* Two elements of a head's row make a word, wherever its row begins. */
static bool can_score_bf16(struct backend *b, const struct attention_args *args)
{
    return cpu_get(b)->fast_bf16 && args->q.dtype == DTYPE_BF16 && args->k.dtype == DTYPE_BF16 &&
           args->head_dim % 2 == 0 && args->k.stride % 2 == 0 && (uintptr_t)args->k.data % sizeof(float) == 0;
}
#else
static void compute_scores_bf16(const struct attention_plan *plan, const struct row_group *group,
                                const struct attention_scratch *scratch)
{
    (void)plan, (void)group, (void)scratch;
}

static bool can_score_bf16(struct backend *b, const struct attention_args *args)
{
    (void)b, (void)args;
    return false;
}
#endif

static void fill(float *s, int64_t from, int64_t to, float value)
{
    for (int64_t i = from; i < to; i++)
        s[i] = value;
}

SIMD_INLINE float find_largest(const float *s, int64_t from, int64_t to)
{
    vfloat largest = simd_set(-INFINITY);

    for (int64_t i = from; i < to; i += SIMD_WIDTH)
        largest = simd_max(largest, simd_load(s + i));
    return simd_highest(largest);
}

/* s = 2^(s - largest); returns their sum. */
SIMD_INLINE float exponentiate(float *s, int64_t from, int64_t to, float largest)
{
    vfloat sum = {0};

    for (int64_t i = from; i < to; i += SIMD_WIDTH) {
        vfloat weight = simd_exp2_decay(simd_load(s + i) - largest);
        simd_store(s + i, weight);
        sum += weight;
    }
    return simd_sum(sum);
}

/* Scores of one row become weights, 0 where hidden, and the row's largest, total and factor are brought up to
 * date. whole: the panels that hold scores of the row's block. seen: what the row itself sees, perhaps
 * nothing. */
static void weigh_row(float *s, struct key_range whole, struct key_range seen,
                      struct attention_scratch *scratch, int64_t row)
{
    float before = scratch->largest[row];

    scratch->factor[row] = 1;
    if (seen.low >= seen.high) {
        fill(s, whole.low, whole.high, 0);
        return;
    }
    fill(s, whole.low, seen.low, -INFINITY);
    fill(s, seen.high, whole.high, -INFINITY);
    float largest = find_largest(s, whole.low, whole.high);
    if (largest > before) {
        scratch->largest[row] = largest;
        scratch->factor[row] = simd_exp2_decay(simd_set(before - largest))[0];
    }
    float sum = exponentiate(s, whole.low, whole.high, scratch->largest[row]);
    scratch->total[row] = scratch->total[row] * scratch->factor[row] + sum;
    fill(s, whole.low, seen.low, 0);
    fill(s, seen.high, whole.high, 0);
}

static void weigh_group(const struct attention_plan *plan, const struct query_tile *tile,
                        const struct row_group *group, int64_t first, int64_t n,
                        struct attention_scratch *scratch)
{
    for (int b = 0; b < group->n; b++) {
        const struct row_block *block = &group->blocks[b];
        struct key_range whole = {.low = block->seen.low / TILE_COLS * TILE_COLS,
                                  .high = tile_round_up(block->seen.high, TILE_COLS)};
        if (block->seen.low >= block->seen.high)
            continue;
        for (int64_t row = block->row; row < block->row + block->rows; row++) {
            struct key_range seen = clip_range(get_visible(plan->args, tile, row / tile->heads), first, n);
            weigh_row(scratch->s + (row - group->first_row) * plan->keys, whole, seen, scratch, row);
        }
    }
}

/* o = o * factor + weights * values, for the keys that each block sees. */
static void add_values(const struct attention_plan *plan, const struct row_group *group, int64_t n,
                       const struct attention_scratch *scratch)
{
    int64_t dim = plan->args->head_dim;

    for (int64_t c = 0; c < dim; c += TILE_COLS)
        for (int b = 0; b < group->n; b++) {
            const struct row_block *block = &group->blocks[b];
            const float *weights =
                scratch->s + (block->row - group->first_row) * plan->keys + block->seen.low;
            struct tile_product product = {.left = {.at = weights, .row_step = plan->keys, .depth_step = 1},
                                           .panel = scratch->v + c * n + block->seen.low * TILE_COLS,
                                           .depth = block->seen.high - block->seen.low,
                                           .to = scratch->o + block->row * plan->dims + c,
                                           .stride = plan->dims};
            if (product.depth > 0)
                TILE_CALL(block->rows, tile_vectors(c, dim), tile_product_add, &product,
                          scratch->factor + block->row, 1);
        }
}

/* y = o / total. */
static void write_outputs(const struct attention_plan *plan, const struct query_tile *tile,
                          const struct attention_scratch *scratch)
{
    const struct attention_args *args = plan->args;
    int64_t dim = args->head_dim;
    struct tensor y = tensor_cols(args->y, tile->first_head * dim, tile->heads * dim);

    for (int64_t r = 0; r < (int64_t)tile->n_queries * tile->heads; r++) {
        char *row = tensor_row(&y, tile->run->start + get_query(tile, r / tile->heads));
        void *to = row + (size_t)(r % tile->heads * dim) * dtype_size(y.dtype);
        vfloat total = simd_set(scratch->total[r]);
        for (int64_t c = 0; c < dim; c += SIMD_WIDTH)
            simd_write(to, y.dtype, c, dim, simd_load(scratch->o + r * plan->dims + c) / total);
    }
}

/* The run's keys that at least one query of the tile sees, from the start of a key tile on. */
static struct key_range get_key_range(const struct attention_plan *plan, const struct query_tile *tile)
{
    int64_t low = get_visible(plan->args, tile, 0).low;

    return (struct key_range){.low = low / plan->keys * plan->keys,
                              .high = get_visible(plan->args, tile, tile->n_queries - 1).high};
}

static void attend_tile(const struct attention_plan *plan, const struct query_tile *tile,
                        struct attention_scratch *scratch)
{
    struct key_range keys = get_key_range(plan, tile);

    load_queries(plan, tile, plan->args->scale * LOG2_E, scratch);
    for (int64_t first = keys.low; first < keys.high; first += plan->keys) {
        int64_t n = clip(keys.high - first, 0, plan->keys), next = first + n;
        load_keys(plan, tile, first, n, true, scratch);
        for (int64_t r = 0; r < (int64_t)tile->n_queries * tile->heads; r += GROUP_ROWS) {
            struct row_group group = cut_group(plan->args, tile, r, first, n);
            int64_t ahead = clip(next + PREFETCH_KEYS, next, keys.high);
            prefetch_keys(plan, tile, next, ahead);
            next = ahead;
            if (plan->bf16_scores)
                compute_scores_bf16(plan, &group, scratch);
            else
                compute_scores(plan, &group, scratch);
            weigh_group(plan, tile, &group, first, n, scratch);
            add_values(plan, &group, n, scratch);
        }
    }
    write_outputs(plan, tile, scratch);
}

/* Goes through tasks in ascending order; each thread has one. */
struct task_cursor {
    int64_t run;
    int64_t before; /* tasks of the runs before it */
};

static void set_tile_run(const struct attention_args *args, struct query_tile *tile, int64_t run)
{
    tile->run = &args->runs.list[run];
    tile->offset = run == 0 ? args->past : 0;
    tile->first_key = run == 0 ? 0 : tile->run->start + args->past;
}

/* part: which of the n_kv_heads * parts tasks of these queries. */
static void set_tile_heads(const struct attention_plan *plan, struct query_tile *tile, int64_t part)
{
    int64_t group = plan->args->n_heads / plan->args->n_kv_heads, first = part % plan->parts * plan->heads;

    tile->kv_head = (int)(part / plan->parts);
    tile->first_head = (int)(tile->kv_head * group + first);
    tile->heads = (int)clip(group - first, 0, plan->heads);
}

static int64_t count_tiles(const struct attention_plan *plan, const struct run *run)
{
    return (run->length + (int64_t)plan->n_queries - 1) / plan->n_queries;
}

/* Within a run the last queries, which see most keys, come first. */
static struct query_tile find_tile(const struct attention_plan *plan, struct task_cursor *cursor,
                                   int64_t task)
{
    const struct run *list = plan->args->runs.list;
    int64_t per_tile = (int64_t)plan->args->n_kv_heads * plan->parts;
    struct query_tile tile = {0};

    while (task - cursor->before >= count_tiles(plan, &list[cursor->run]) * per_tile) {
        cursor->before += count_tiles(plan, &list[cursor->run]) * per_tile;
        cursor->run++;
    }
    task -= cursor->before;
    set_tile_run(plan->args, &tile, cursor->run);
    set_tile_heads(plan, &tile, task % per_tile);
    tile.first = (count_tiles(plan, tile.run) - 1 - task / per_tile) * plan->n_queries;
    tile.n_queries = (int)clip(tile.run->length - tile.first, 0, plan->n_queries);
    return tile;
}

/* Scores and probabilities of one tile of pattern rows; row i of the tile is row first_pattern + i of the
 * outputs. */
struct pattern_tile {
    struct query_tile queries;
    int64_t first_pattern;
};

static void fill_elements(void *row, enum dtype dtype, int64_t from, int64_t to, float value)
{
    uint16_t half = f32_to_bf16(value);

    for (int64_t i = from; i < to && dtype == DTYPE_F32; i++)
        ((float *)row)[i] = value;
    for (int64_t i = from; i < to && dtype != DTYPE_F32; i++)
        ((uint16_t *)row)[i] = half;
}

/* Columns of `head` in row `pattern` of scores or probabilities. */
static void *pattern_at(const struct attention_args *args, const struct tensor *out, int64_t pattern,
                        int64_t head)
{
    return (char *)tensor_row(out, pattern) + (size_t)(head * args->n_keys) * dtype_size(out->dtype);
}

/* Position in the document's run of the run's key 0. */
static int64_t get_position(const struct query_tile *tile)
{
    return tile->run->position - tile->offset;
}

/* One row's scores of the keys `seen` of the tile that begins at the run's key `first`, where they are
 * wanted. */
static void write_pattern_row(const struct attention_plan *plan, const struct pattern_tile *tile, int64_t row,
                              int64_t first, struct key_range seen, const struct attention_scratch *scratch)
{
    const struct attention_args *args = plan->args;
    int64_t pattern = tile->first_pattern + row / tile->queries.heads;
    int64_t head = tile->queries.first_head + row % tile->queries.heads;
    int64_t at = first + seen.low + get_position(&tile->queries), n = seen.high - seen.low;
    const float *s = scratch->s + row % GROUP_ROWS * plan->keys + seen.low;
    vfloat largest = simd_set(scratch->largest[row]), total = simd_set(scratch->total[row]);

    if (args->scores.data != NULL) {
        char *to = pattern_at(args, &args->scores, pattern, head);
        to += (size_t)at * dtype_size(args->scores.dtype);
        for (int64_t i = 0; i < n; i += SIMD_WIDTH)
            simd_write(to, args->scores.dtype, i, n, simd_read(s, DTYPE_F32, i, n));
    }
    if (args->probabilities.data != NULL) {
        char *to = pattern_at(args, &args->probabilities, pattern, head);
        to += (size_t)at * dtype_size(args->probabilities.dtype);
        for (int64_t i = 0; i < n; i += SIMD_WIDTH) {
            vfloat weight = simd_exp(simd_read(s, DTYPE_F32, i, n) - largest);
            simd_write(to, args->probabilities.dtype, i, n, weight / total);
        }
    }
}

/* First pass: the row's largest score and the total of its weights; the scores themselves are dropped. */
static void measure_row(float *s, struct key_range seen, struct attention_scratch *scratch, int64_t row)
{
    int64_t from = seen.low / SIMD_WIDTH * SIMD_WIDTH, to = tile_round_up(seen.high, SIMD_WIDTH);
    float before = scratch->largest[row];
    vfloat sum = {0};

    fill(s, from, seen.low, -INFINITY);
    fill(s, seen.high, to, -INFINITY);
    float largest = find_largest(s, from, to);
    largest = largest > before ? largest : before;
    for (int64_t i = from; i < to; i += SIMD_WIDTH)
        sum += simd_exp(simd_load(s + i) - largest);
    float factor = scratch->total[row] > 0 ? simd_exp(simd_set(before - largest))[0] : 0;
    scratch->largest[row] = largest;
    scratch->total[row] = scratch->total[row] * factor + simd_sum(sum);
}

/* One pass over the keys that the tile's rows see: measures, or writes. */
static void pass_patterns(const struct attention_plan *plan, const struct pattern_tile *tile, bool writes,
                          struct attention_scratch *scratch)
{
    const struct query_tile *queries = &tile->queries;
    struct key_range keys = get_key_range(plan, queries);

    for (int64_t first = keys.low; first < keys.high; first += plan->keys) {
        int64_t n = clip(keys.high - first, 0, plan->keys);
        load_keys(plan, queries, first, n, false, scratch);
        for (int64_t r = 0; r < (int64_t)queries->n_queries * queries->heads; r += GROUP_ROWS) {
            struct row_group group = cut_group(plan->args, queries, r, first, n);
            compute_scores(plan, &group, scratch);
            for (int64_t row = r; row < r + group.rows; row++) {
                struct key_range seen =
                    clip_range(get_visible(plan->args, queries, row / queries->heads), first, n);
                if (seen.low < seen.high && writes)
                    write_pattern_row(plan, tile, row, first, seen, scratch);
                else if (seen.low < seen.high)
                    measure_row(scratch->s + row % GROUP_ROWS * plan->keys, seen, scratch, row);
            }
        }
    }
}

/* `value` at the positions that a row does not see. */
static void fill_hidden(const struct attention_plan *plan, const struct pattern_tile *tile,
                        const struct tensor *out, float value)
{
    int64_t n_keys = plan->args->n_keys, shift = get_position(&tile->queries);

    for (int64_t i = 0; out->data != NULL && i < tile->queries.n_queries; i++) {
        struct key_range seen = get_visible(plan->args, &tile->queries, i);
        for (int head = tile->queries.first_head; head < tile->queries.first_head + tile->queries.heads;
             head++) {
            void *row = pattern_at(plan->args, out, tile->first_pattern + i, head);
            fill_elements(row, out->dtype, 0, seen.low + shift, value);
            fill_elements(row, out->dtype, seen.high + shift, n_keys, value);
        }
    }
}

static void write_patterns(const struct attention_plan *plan, const struct pattern_tile *tile,
                           struct attention_scratch *scratch)
{
    const struct attention_args *args = plan->args;

    load_queries(plan, &tile->queries, args->scale, scratch);
    if (args->probabilities.data != NULL)
        pass_patterns(plan, tile, false, scratch);
    pass_patterns(plan, tile, true, scratch);
    fill_hidden(plan, tile, &args->scores, -INFINITY);
    fill_hidden(plan, tile, &args->probabilities, 0);
}

/* The tile of pattern rows that begins at row `from` of the list: of one run, at most plan->n_queries.
 * Advances *run. */
static struct pattern_tile find_pattern_tile(const struct attention_plan *plan, int64_t from, int64_t *run)
{
    const struct attention_args *args = plan->args;
    const struct row_list *rows = &args->pattern_rows;
    struct pattern_tile tile = {.first_pattern = from};

    while (rows->index[from] >= args->runs.list[*run].start + (int64_t)args->runs.list[*run].length)
        (*run)++;
    set_tile_run(args, &tile.queries, *run);
    tile.queries.index = rows->index + from;
    int64_t end = tile.queries.run->start + (int64_t)tile.queries.run->length;
    while (tile.queries.n_queries < plan->n_queries && from + tile.queries.n_queries < rows->n &&
           rows->index[from + tile.queries.n_queries] < end)
        tile.queries.n_queries++;
    return tile;
}

static void attend_patterns(struct backend *b, const struct attention_plan *plan, float *memory)
{
    const struct attention_args *args = plan->args;

    if (args->pattern_rows.n == 0 || (args->scores.data == NULL && args->probabilities.data == NULL))
        return;
#pragma omp parallel num_threads(b->n_threads)
    {
        struct attention_scratch scratch =
            lay_out_scratch(plan, memory + (size_t)omp_get_thread_num() * plan->thread_floats);
        int64_t run = 0;
        for (int64_t from = 0; from < args->pattern_rows.n;) {
            struct pattern_tile tile = find_pattern_tile(plan, from, &run);
            from += tile.queries.n_queries;
#pragma omp for schedule(dynamic) nowait
            for (int64_t part = 0; part < (int64_t)args->n_kv_heads * plan->parts; part++) {
                struct pattern_tile mine = tile;
                set_tile_heads(plan, &mine.queries, part);
                write_patterns(plan, &mine, &scratch);
            }
        }
    }
}

static void attention(struct backend *b, const struct attention_args *args)
{
    if (cpu_has_failed(b) || args->runs.n == 0)
        return;
    assert(args->n_heads % args->n_kv_heads == 0 && args->head_dim > 0);
    struct attention_plan plan = plan_attention(args);
    float *memory = cpu_scratch(b, plan.thread_floats * sizeof(float) * (size_t)b->n_threads);
    if (memory == NULL)
        return;
    int64_t n_tasks = 0;
    for (int64_t i = 0; i < args->runs.n; i++)
        n_tasks += count_tiles(&plan, &args->runs.list[i]) * args->n_kv_heads * plan.parts;
    plan.bf16_scores = can_score_bf16(b, args);
#pragma omp parallel num_threads(b->n_threads)
    {
        struct attention_scratch scratch =
            lay_out_scratch(&plan, memory + (size_t)omp_get_thread_num() * plan.thread_floats);
        struct task_cursor cursor = {0};
#pragma omp for schedule(monotonic : dynamic)
        for (int64_t task = 0; task < n_tasks; task++) {
            struct query_tile tile = find_tile(&plan, &cursor, task);
            attend_tile(&plan, &tile, &scratch);
        }
    }
    plan.bf16_scores = false; /* scores that are captured have another scale, and are few */
    attend_patterns(b, &plan, memory);
}

void CPU_NAME(cpu_fill_attention)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_attention)(struct backend_ops *ops)
{
    ops->attention = attention;
}
