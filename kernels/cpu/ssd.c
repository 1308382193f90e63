/* Mamba-2's SSD in chunks (Dao and Gu 2024, section 6), as products of small matrices.
 *
 * With cum(t) the sum of beta * A over a chunk's tokens up to t, and S the state before the chunk:
 *   y(t)  = exp(cum(t)) C(t) . S + sum over s <= t of exp(cum(t) - cum(s)) beta(s) (C(t) . B(s)) x(s) + D
 * x(t) S'    = exp(cum(end)) S + sum over s of exp(cum(end) - cum(s)) beta(s) B(s) (outer) x(s) Exponents are
 * differences of sums in float64, never positive, so nothing overflows and nothing is divided by.
 *
 * A task is one run, a block of heads of one group (they share C . B) and a block of head_dim's columns,
 * which no other column depends on. It goes through the run's chunks with its states in scratch. How work is
 * cut changes no bit. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/tile.h"

#include <assert.h>
#include <math.h>
#include <omp.h>

/* Tokens of a chunk at most: work inside a chunk grows with it, the cost of passing states on shrinks. */
#define CHUNK_TOKENS 32
/* Floats of the states of a task: half of a common second-level cache. */
#define STATE_FLOATS 65536
/* Left sides read in steps of a row are kept off multiples of 4 KiB, which would share cache sets. */
#define ROW_GAP 16
#define LOG2_E 1.44269504088896340736

struct ssd_plan {
    const struct ssd_scan_args *args;
    const float *carry; /* that run 0 starts from; not args->carry where that may be written meanwhile */
    int tokens;         /* of a chunk */
    int heads;          /* of a task */
    int head_blocks;    /* tasks that a group's heads are split over */
    int columns;        /* of head_dim of a task: a multiple of TILE_COLS, or all */
    int column_blocks;
    int64_t row;                   /* floats from one row of B or C to the next */
    int64_t width;                 /* of G and M: tokens rounded up to whole panels */
    size_t state_floats, x_floats; /* of one head's columns */
    size_t thread_floats;
};

struct ssd_scratch {
    float *B, *C;   /* [tokens, N], rows plan->row apart */
    float *Bt;      /* panels of B's transpose, depth N */
    float *G;       /* [tokens, width]: C . B */
    float *M;       /* [tokens, width]: what of x(s) reaches y(t) */
    float *x;       /* [heads] panels, depth tokens */
    float *states;  /* [heads] panels, depth N */
    float *betas;   /* [heads, width] */
    float *tails;   /* [width]: cum at the end of a token's vector, less cum at the token; base 2 */
    float *decays;  /* [width]: exp(cum) */
    float *weights; /* [width]: exp(cum(end) - cum) * beta */
    double *cums;   /* [width]: base 2 */
};

/* One task at one chunk. */
struct ssd_chunk {
    const struct run *run;
    int64_t start; /* batch row of the chunk's first token */
    int tokens;
    int group, first_head, heads;
    int64_t first_column, columns;
};

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Heads and columns of a task: as many as their states' room allows, fewer where threads would have nothing
 * to do. */
static void plan_tasks(struct ssd_plan *plan, int n_threads)
{
    const struct ssd_scan_args *args = plan->args;
    int64_t group_heads = args->n_heads / args->n_groups, wanted = 2 * (int64_t)n_threads;

    plan->columns = args->head_dim;
    if (args->runs.n * args->n_heads < wanted || (int64_t)args->head_dim * args->state_dim > STATE_FLOATS)
        plan->columns = (int)least(args->head_dim, TILE_COLS);
    plan->column_blocks = (int)divide_up(args->head_dim, plan->columns);
    plan->state_floats = (size_t)(tile_panels(plan->columns) * TILE_COLS * args->state_dim);
    int64_t heads = least(group_heads, STATE_FLOATS / (int64_t)plan->state_floats);
    int64_t balanced = args->runs.n * args->n_heads * plan->column_blocks / wanted;
    heads = least(heads, balanced);
    heads = heads < 1 ? 1 : heads;
    plan->head_blocks = (int)divide_up(group_heads, heads);
    plan->heads = (int)divide_up(group_heads, plan->head_blocks);
    plan->head_blocks = (int)divide_up(group_heads, plan->heads);
}

static struct ssd_plan plan_scan(const struct ssd_scan_args *args, int n_threads)
{
    struct ssd_plan plan = {.args = args};

    plan.tokens = (int)least(args->chunk < 1 ? 1 : args->chunk, CHUNK_TOKENS);
    plan.row = tile_round_up(args->state_dim, ROW_GAP) + ROW_GAP;
    plan.width = tile_round_up(plan.tokens, TILE_COLS);
    plan_tasks(&plan, n_threads);
    plan.x_floats = (size_t)(tile_panels(plan.columns) * TILE_COLS * plan.tokens);
    plan.thread_floats = (size_t)(2 * plan.tokens * plan.row + plan.width * args->state_dim +
                                  2 * plan.tokens * plan.width + (plan.heads + 3 + 2) * plan.width) +
                         (size_t)plan.heads * (plan.state_floats + plan.x_floats);
    plan.thread_floats = (size_t)tile_round_up((int64_t)plan.thread_floats, 16);
    return plan;
}

static struct ssd_scratch lay_out_scratch(const struct ssd_plan *plan, float *at)
{
    struct ssd_scratch scratch;
    int64_t tokens = plan->tokens, width = plan->width;

    scratch.cums = (double *)(void *)at, at += 2 * width;
    scratch.states = at, at += (size_t)plan->heads * plan->state_floats;
    scratch.Bt = at, at += width * plan->args->state_dim;
    scratch.x = at, at += (size_t)plan->heads * plan->x_floats;
    scratch.B = at, at += tokens * plan->row;
    scratch.C = at, at += tokens * plan->row;
    scratch.G = at, at += tokens * width;
    scratch.M = at, at += tokens * width;
    scratch.betas = at, at += plan->heads * width;
    scratch.tails = at, at += width;
    scratch.decays = at, at += width;
    scratch.weights = at;
    return scratch;
}

/* Rows of B or C of the chunk's group, as float32. */
static void load_rows(const struct ssd_plan *plan, const struct ssd_chunk *chunk, const struct tensor *from,
                      float *to)
{
    int64_t n = plan->args->state_dim;
    struct tensor group = tensor_cols(*from, chunk->group * n, n);

    for (int t = 0; t < chunk->tokens; t++)
        for (int64_t i = 0; i < n; i += SIMD_WIDTH)
            simd_write(to + t * plan->row, DTYPE_F32, i, n,
                       simd_read(tensor_row(&group, chunk->start + t), group.dtype, i, n));
}

/* G = C . B where s <= t, and some of what is right of it. */
static void multiply_C_B(const struct ssd_plan *plan, const struct ssd_chunk *chunk,
                         const struct ssd_scratch *scratch)
{
    int64_t n = plan->args->state_dim;
    int rows;

    for (int64_t s = 0; s < chunk->tokens; s += TILE_COLS)
        for (int t = 0; t < chunk->tokens; t += rows) {
            struct tile_product product = {
                .left = {.at = scratch->C + t * plan->row, .row_step = plan->row, .depth_step = 1},
                .panel = scratch->Bt + s * n,
                .depth = n,
                .to = scratch->G + t * plan->width + s,
                .stride = plan->width};
            rows = tile_block_rows(chunk->tokens - t);
            if (s < t + rows)
                TILE_CALL(rows, 2, tile_product_set, &product);
        }
}

/* One head's panels. */
static float *get_x(const struct ssd_plan *plan, const struct ssd_scratch *scratch, int h)
{
    return scratch->x + (size_t)h * plan->x_floats;
}

/* x of all the task's heads, row by row: they lie side by side, and the processor sees what is next. */
static void load_x(const struct ssd_plan *plan, const struct ssd_chunk *chunk,
                   const struct ssd_scratch *scratch)
{
    const struct tensor *x = &plan->args->x;

    for (int64_t t = 0; t < chunk->tokens; t++)
        for (int h = 0; h < chunk->heads; h++) {
            int64_t column = (int64_t)(chunk->first_head + h) * plan->args->head_dim + chunk->first_column;
            const char *row =
                (const char *)simd_row(x, chunk->start + t) + (size_t)column * dtype_size(x->dtype);
            float *to = get_x(plan, scratch, h) + t * TILE_COLS;
            for (int64_t c = 0; c < chunk->columns; c += TILE_COLS, to += chunk->tokens * TILE_COLS)
                for (int64_t i = c; i < c + TILE_COLS && i < chunk->columns; i += SIMD_WIDTH)
                    simd_store(to + i - c, simd_read(row, x->dtype, i, chunk->columns));
        }
}

static void load_chunk(const struct ssd_plan *plan, const struct ssd_chunk *chunk,
                       const struct ssd_scratch *scratch)
{
    load_rows(plan, chunk, &plan->args->B, scratch->B);
    load_rows(plan, chunk, &plan->args->C, scratch->C);
    load_x(plan, chunk, scratch);
    tile_pack_transposed(scratch->Bt, scratch->B, DTYPE_F32, plan->row, chunk->tokens, plan->args->state_dim);
    multiply_C_B(plan, chunk, scratch);
}

static float get_beta(const struct ssd_plan *plan, int64_t row, int64_t head)
{
    return simd_read(tensor_row(&plan->args->dt, row), plan->args->dt.dtype, head, head + 1)[0];
}

/* betas [heads, width] of the chunk. Written out by the tasks of the first columns. */
static void compute_betas(const struct ssd_plan *plan, const struct ssd_chunk *chunk,
                          const struct ssd_scratch *scratch)
{
    const struct ssd_scan_args *args = plan->args;
    vfloat low = simd_set(args->dt_min), high = simd_set(args->dt_max);

    for (int h = 0; h < chunk->heads; h++) {
        int head = chunk->first_head + h;
        float *betas = scratch->betas + h * plan->width;
        for (int64_t t = 0; t < plan->width; t++)
            betas[t] =
                t < chunk->tokens ? get_beta(plan, chunk->start + t, head) + args->dt_bias[head] : 0.0f;
        for (int64_t t = 0; t < chunk->tokens; t += SIMD_WIDTH)
            simd_store(betas + t, simd_min(high, simd_max(low, simd_softplus(simd_load(betas + t)))));
        if (args->betas.data == NULL || chunk->first_column > 0)
            continue;
        for (int64_t t = 0; t < chunk->tokens; t++)
            ((float *)tensor_row(&args->betas, chunk->start + t))[head] = betas[t];
    }
}

/* cums, tails, decays and weights of one head. */
static void compute_decays(const struct ssd_plan *plan, const struct ssd_chunk *chunk, int h,
                           const struct ssd_scratch *scratch)
{
    const float *betas = scratch->betas + h * plan->width;
    double sum = 0, step = (double)plan->args->A[chunk->first_head + h] * LOG2_E;
    int last = chunk->tokens - 1;

    for (int t = 0; t < plan->width; t++) {
        sum += t <= last ? (double)betas[t] * step : 0;
        scratch->cums[t] = sum;
    }
    for (int t = 0; t < plan->width; t++) {
        scratch->tails[t] =
            (float)(scratch->cums[t / SIMD_WIDTH * SIMD_WIDTH + SIMD_WIDTH - 1] - scratch->cums[t]);
        scratch->decays[t] = (float)scratch->cums[t];
        scratch->weights[t] = (float)(sum - scratch->cums[t]);
    }
    for (int t = 0; t < chunk->tokens; t += SIMD_WIDTH) {
        simd_store(scratch->decays + t, simd_exp2_decay(simd_load(scratch->decays + t)));
        simd_store(scratch->weights + t,
                   simd_exp2_decay(simd_load(scratch->weights + t)) * simd_load(betas + t));
    }
}

/* cum(t) - cum(s) for the vector of tokens from s on. Where t is among them the two may be large and close:
 * float64 then. Otherwise the difference is summed of two of one sign, and is as good as float32 can be.
 * Tokens past t get anything. */
SIMD_INLINE vfloat get_exponents(const struct ssd_scratch *scratch, int t, int s)
{
    float lanes[SIMD_WIDTH];

    if (t >= s + SIMD_WIDTH)
        return simd_load(scratch->tails + s) + (float)(scratch->cums[t] - scratch->cums[s + SIMD_WIDTH - 1]);
    for (int i = 0; i < SIMD_WIDTH; i++)
        lanes[i] = (float)(scratch->cums[t] - scratch->cums[s + i]);
    return simd_load(lanes);
}

/* M(t, s) = exp(cum(t) - cum(s)) beta(s) G(t, s), with D on the diagonal and 0 right of it as far as products
 * read. */
static void compute_M(const struct ssd_plan *plan, const struct ssd_chunk *chunk, int h,
                      const struct ssd_scratch *scratch)
{
    const float *betas = scratch->betas + h * plan->width;

    for (int t = 0; t < chunk->tokens; t++) {
        const float *G = scratch->G + t * plan->width;
        float *M = scratch->M + t * plan->width;
        for (int s = 0; s <= t; s += SIMD_WIDTH) {
            vfloat decay = simd_exp2_decay(get_exponents(scratch, t, s));
            simd_store(M + s, decay * simd_load(betas + s) * simd_load(G + s));
        }
        M[t] += plan->args->D[chunk->first_head + h];
        for (int64_t s = t + 1; s < least(t + TILE_ROWS, plan->width); s++)
            M[s] = 0;
    }
}

struct output_block {
    struct tile_left C, M;
    const float *state, *x; /* panels */
    int64_t state_dim, tokens;
    const float *decays;
    const struct tensor *y; /* the task's columns */
    int64_t row, column;
};

/* y = exp(cum) (C . S) + M x for a block of rows. */
SIMD_INLINE void write_output_block(int rows, int vectors, const struct output_block *block)
{
    struct tile_sums sums;

    tile_zero(rows, vectors, &sums);
    tile_multiply(rows, vectors, &sums, block->C, block->state, block->state_dim);
    tile_scale(rows, vectors, &sums, block->decays, 1);
    tile_multiply(rows, vectors, &sums, block->M, block->x, block->tokens);
    TILE_UNROLL
    for (int r = 0; r < rows; r++) {
        void *to = tensor_row(block->y, block->row + r);
        TILE_UNROLL
        for (int v = 0; v < vectors; v++)
            simd_write(to, block->y->dtype, block->column + v * SIMD_WIDTH, block->y->cols, sums.at[r][v]);
    }
}

static void write_outputs(const struct ssd_plan *plan, const struct ssd_chunk *chunk, int h,
                          const struct ssd_scratch *scratch)
{
    const struct ssd_scan_args *args = plan->args;
    int64_t head_column = (int64_t)(chunk->first_head + h) * args->head_dim + chunk->first_column;
    struct tensor y = tensor_cols(args->y, head_column, chunk->columns);
    const float *state = scratch->states + (size_t)h * plan->state_floats;
    int rows;

    for (int64_t c = 0; c < chunk->columns; c += TILE_COLS)
        for (int t = 0; t < chunk->tokens; t += rows) {
            rows = tile_block_rows(chunk->tokens - t);
            struct output_block block = {
                .C = {.at = scratch->C + t * plan->row, .row_step = plan->row, .depth_step = 1},
                .M = {.at = scratch->M + t * plan->width, .row_step = plan->width, .depth_step = 1},
                .state = state + c * args->state_dim,
                .x = get_x(plan, scratch, h) + c * chunk->tokens,
                .state_dim = args->state_dim,
                .tokens = t + rows,
                .decays = scratch->decays + t,
                .y = &y,
                .row = chunk->start + t,
                .column = c};
            TILE_CALL(rows, tile_vectors(c, chunk->columns), write_output_block, &block);
        }
}

/* x(t) *= weights(t), of all panels. */
static void weigh_x(const struct ssd_chunk *chunk, float *x, const float *weights)
{
    for (int64_t panel = 0; panel < tile_panels(chunk->columns); panel++)
        for (int64_t t = 0; t < chunk->tokens; t++, x += TILE_COLS)
            for (int v = 0; v < TILE_COLS; v += SIMD_WIDTH)
                simd_store(x + v, simd_load(x + v) * weights[t]);
}

/* The state behind the chunk. x's panels are weighed in place. */
static void update_state(const struct ssd_plan *plan, const struct ssd_chunk *chunk, int h,
                         const struct ssd_scratch *scratch)
{
    int64_t n = plan->args->state_dim;
    float *state = scratch->states + (size_t)h * plan->state_floats, *x = get_x(plan, scratch, h);
    const float *factor = scratch->decays + chunk->tokens - 1;
    int rows;

    weigh_x(chunk, x, scratch->weights);
    for (int64_t c = 0; c < chunk->columns; c += TILE_COLS)
        for (int64_t i = 0; i < n; i += rows) {
            struct tile_product product = {
                .left = {.at = scratch->B + i, .row_step = 1, .depth_step = plan->row},
                .panel = x + c * chunk->tokens,
                .depth = chunk->tokens,
                .to = state + c * n + i * TILE_COLS,
                .stride = TILE_COLS};
            rows = tile_block_rows(n - i);
            TILE_CALL(rows, tile_vectors(c, chunk->columns), tile_product_add, &product, factor, 0);
        }
}

/* Where the columns of one head of a task begin in states [H, N, head_dim] of the carry or the output. */
static int64_t get_columns(const struct ssd_plan *plan, const struct ssd_chunk *chunk, int h)
{
    const struct ssd_scan_args *args = plan->args;

    return (int64_t)(chunk->first_head + h) * args->state_dim * args->head_dim + chunk->first_column;
}

/* Panels -> rows `head_dim` apart. */
static void copy_state_out(const struct ssd_plan *plan, const struct ssd_chunk *chunk, const float *state,
                           float *to)
{
    int64_t n = plan->args->state_dim;

    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < chunk->columns; c += SIMD_WIDTH)
            simd_write(to + i * plan->args->head_dim, DTYPE_F32, c, chunk->columns,
                       simd_load(state + c / TILE_COLS * n * TILE_COLS + i * TILE_COLS + c % TILE_COLS));
}

/* A head's state at token `last` of a chunk, from that at token `first`, or at the chunk's start (-1). Rows
 * of both are head_dim apart; they may be the same memory. */
struct state_step {
    int head; /* of the task */
    int first, last;
    const float *from;
    float *to;
};

/* to = exp(cum(last) - cum(first)) from + sum over t of exp(cum(last) - cum(t)) beta(t) B(t) (outer) x(t). */
static void advance_state(const struct ssd_plan *plan, const struct ssd_chunk *chunk,
                          const struct ssd_scratch *scratch, const struct state_step *step)
{
    int64_t dim = plan->args->head_dim, columns = chunk->columns;
    const double *cums = scratch->cums;
    const float *panels = get_x(plan, scratch, step->head),
                *betas = scratch->betas + step->head * plan->width;
    float exponent = (float)(cums[step->last] - (step->first < 0 ? 0 : cums[step->first]));
    vfloat decay = simd_exp2_decay(simd_set(exponent));
    float weights[CHUNK_TOKENS], factors[CHUNK_TOKENS];

    for (int t = step->first + 1; t <= step->last; t++)
        weights[t] = simd_exp2_decay(simd_set((float)(cums[step->last] - cums[t])))[0] * betas[t];
    for (int64_t i = 0; i < plan->args->state_dim; i++) {
        for (int t = step->first + 1; t <= step->last; t++)
            factors[t] = weights[t] * scratch->B[t * plan->row + i];
        for (int64_t c = 0; c < columns; c += SIMD_WIDTH) {
            const float *x = panels + c / TILE_COLS * chunk->tokens * TILE_COLS + c % TILE_COLS;
            vfloat sum = simd_read(step->from + i * dim, DTYPE_F32, c, columns) * decay;
            for (int t = step->first + 1; t <= step->last; t++)
                sum += simd_load(x + t * TILE_COLS) * factors[t];
            simd_write(step->to + i * dim, DTYPE_F32, c, columns, sum);
        }
    }
}

/* States at the chunk's chosen tokens, each from the one before. next: the first row of the list in the
 * chunk. */
static void write_states(const struct ssd_plan *plan, const struct ssd_chunk *chunk, int h,
                         const struct ssd_scratch *scratch, int64_t next)
{
    const struct row_list *rows = &plan->args->state_rows;
    struct state_step step = {.head = h, .first = -1};

    if (plan->args->states.data == NULL)
        return;
    for (; next < rows->n && rows->index[next] < chunk->start + chunk->tokens; next++) {
        step.to = (float *)tensor_row(&plan->args->states, next) + get_columns(plan, chunk, h);
        step.last = (int)(rows->index[next] - chunk->start);
        if (step.from == NULL) {
            copy_state_out(plan, chunk, scratch->states + (size_t)h * plan->state_floats, step.to);
            step.from = step.to;
        }
        advance_state(plan, chunk, scratch, &step);
        step.from = step.to;
        step.first = step.last;
    }
}

/* First of the chosen rows that is not before the batch row `start`. */
static int64_t find_row(const struct row_list *rows, int64_t start)
{
    int64_t low = 0, high = rows->n;

    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (rows->index[middle] < start)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void scan_chunk(const struct ssd_plan *plan, const struct ssd_chunk *chunk,
                       const struct ssd_scratch *scratch)
{
    int64_t next = find_row(&plan->args->state_rows, chunk->start);

    load_chunk(plan, chunk, scratch);
    compute_betas(plan, chunk, scratch);
    for (int h = 0; h < chunk->heads; h++) {
        compute_decays(plan, chunk, h, scratch);
        compute_M(plan, chunk, h, scratch);
        write_outputs(plan, chunk, h, scratch);
        write_states(plan, chunk, h, scratch, next);
        update_state(plan, chunk, h, scratch);
    }
}

/* The states that a run starts from: the carry's, or zeros. */
static void load_states(const struct ssd_plan *plan, const struct ssd_chunk *task, bool carried,
                        float *states)
{
    const struct ssd_scan_args *args = plan->args;

    memset(states, 0, (size_t)plan->heads * plan->state_floats * sizeof *states);
    for (int h = 0; carried && h < task->heads; h++)
        tile_pack(states + (size_t)h * plan->state_floats, plan->carry + get_columns(plan, task, h),
                  DTYPE_F32, args->head_dim, args->state_dim, task->columns);
}

/* Task number `task` of the run: its heads and columns, before the run's first chunk. */
static struct ssd_chunk find_task(const struct ssd_plan *plan, const struct run *run, int64_t task)
{
    const struct ssd_scan_args *args = plan->args;
    int64_t group_heads = args->n_heads / args->n_groups, block = task / plan->column_blocks;
    struct ssd_chunk chunk = {.run = run, .start = run->start};

    chunk.first_column = task % plan->column_blocks * plan->columns;
    chunk.columns = least(plan->columns, args->head_dim - chunk.first_column);
    chunk.group = (int)(block / plan->head_blocks);
    int64_t first = block % plan->head_blocks * plan->heads;
    chunk.first_head = (int)(chunk.group * group_heads + first);
    chunk.heads = (int)least(plan->heads, group_heads - first);
    return chunk;
}

static void scan_run(const struct ssd_plan *plan, int64_t run, int64_t task,
                     const struct ssd_scratch *scratch)
{
    const struct ssd_scan_args *args = plan->args;
    struct ssd_chunk chunk = find_task(plan, &args->runs.list[run], task);
    int64_t end = chunk.run->start + (int64_t)chunk.run->length;

    load_states(plan, &chunk, run == 0 && args->runs.carry_in, scratch->states);
    for (; chunk.start < end; chunk.start += plan->tokens) {
        chunk.tokens = (int)least(plan->tokens, end - chunk.start);
        scan_chunk(plan, &chunk, scratch);
    }
    for (int h = 0; h < chunk.heads && run == args->runs.n - 1 && args->runs.carry_out; h++)
        copy_state_out(plan, &chunk, scratch->states + (size_t)h * plan->state_floats,
                       args->carry + get_columns(plan, &chunk, h));
}

static void cpu_ssd_scan(struct backend *b, const struct ssd_scan_args *args)
{
    if (cpu_has_failed(b) || args->runs.n == 0)
        return;
    assert(args->n_heads % args->n_groups == 0 && args->head_dim > 0 && args->state_dim > 0);
    struct ssd_plan plan = plan_scan(args, b->n_threads);
    size_t carry_floats = (size_t)args->n_heads * (size_t)args->state_dim * (size_t)args->head_dim;
    size_t stash_floats = args->runs.n > 1 && args->runs.carry_in && args->runs.carry_out ? carry_floats : 0;
    float *memory =
        cpu_scratch(b, (plan.thread_floats * (size_t)b->n_threads + stash_floats) * sizeof(float));
    if (memory == NULL)
        return;
    plan.carry = args->carry;
    if (stash_floats > 0)
        plan.carry = memcpy(memory + plan.thread_floats * (size_t)b->n_threads, args->carry,
                            stash_floats * sizeof(float));
    int64_t per_run = (int64_t)args->n_groups * plan.head_blocks * plan.column_blocks;
#pragma omp parallel num_threads(b->n_threads)
    {
        struct ssd_scratch scratch =
            lay_out_scratch(&plan, memory + (size_t)omp_get_thread_num() * plan.thread_floats);
        unsigned before = simd_begin_flush();
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < args->runs.n * per_run; task++)
            scan_run(&plan, task / per_run, task % per_run, &scratch);
        simd_end_flush(before);
    }
}

void CPU_NAME(cpu_fill_ssd)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_ssd)(struct backend_ops *ops)
{
    ops->ssd_scan = cpu_ssd_scan;
}
