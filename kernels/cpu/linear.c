/* Products with weight matrices: brings any rows to what gemm.h takes, and its results to any output. */
#include "kernels/base/memory.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/simd.h"

#include <omp.h>
#include <stdatomic.h>

/* A product of few rows is one that all threads share, cut up by the library. Where each thread can have
 * OWN_ROWS, it multiplies rows of its own instead, the same that it has in the operations before and after:
 * they are still in its cache, no thread waits within a product, and thin matrices lose nothing (two threads:
 * the products of mamba-130m 4 to 18 % faster with AVX-512). With fewer, every thread reading all of the
 * weights would cost more. */
#define OWN_ROWS 256

/* One call of linear, and what of it can be left to the library. */
struct product {
    struct tensor x, addend, y;
    const struct matrix *w;
    const float *bias;
    const int32_t *slots; /* where not NULL: row i of the product is x's row slots[i] / top_k */
    int top_k;
    bool x_is_ready;  /* rows of x can be multiplied where they lie */
    bool y_is_ready;  /* results can be written where they belong */
    bool accumulates; /* the addend is y itself, and the library adds to it */
};

/* Who computes: all threads together, or one by itself. */
struct worker {
    struct gemm *gemm;
    int n_threads; /* that share the work: 1 where alone */
    bool alone;
    int thread;    /* where alone */
    char *scratch; /* for copies of `rows` rows, x and sums */
    int64_t rows;
    struct error error;
};

static bool is_dense(const struct tensor *t)
{
    return t->stride == t->cols || t->rows == 1;
}

static struct product plan_product(struct tensor x, const struct matrix *w, const float *bias,
                                   struct tensor addend, struct tensor y)
{
    struct product p = {.x = x, .addend = addend, .y = y, .w = w, .bias = bias};
    p.x_is_ready = is_dense(&x) && x.dtype == w->kept && !(w->compute != w->kept && x.dtype == DTYPE_F32);
    bool addend_is_y = addend.data == y.data && addend.dtype == y.dtype && addend.stride == y.stride;
    p.y_is_ready = is_dense(&y) &&
                   (y.dtype == DTYPE_F32 || (y.dtype == w->kept && (addend.data == NULL || addend_is_y)));
    p.accumulates = p.y_is_ready && addend.data != NULL && addend_is_y;
    return p;
}

/* What row `row` of the product multiplies. */
static const void *find_x(const struct product *p, int64_t row)
{
    return simd_row(&p->x, p->slots == NULL ? row : p->slots[row] / p->top_k);
}

/* Rows [first, first + n) of x, converted to the kept dtype, by way of the load's where x is finer than that;
 * then zeros up to `padded` rows. */
static void copy_in(const struct worker *worker, const struct product *p, int64_t first, int64_t n,
                    int64_t padded, void *to)
{
    int64_t k = p->w->k;
    enum dtype kept = p->w->kept;
    bool round = p->w->compute == DTYPE_BF16 && kept == DTYPE_F32 && p->x.dtype == DTYPE_F32;
#pragma omp parallel for num_threads(worker->n_threads) if (!worker->alone)
    for (int64_t row = 0; row < padded; row++) {
        void *to_row = (char *)to + (size_t)(row * k) * dtype_size(kept);
        if (row >= n) {
            memset(to_row, 0, (size_t)k * dtype_size(kept));
            continue;
        }
        const void *from = find_x(p, first + row);
        if (p->x.dtype == kept && !round) {
            memcpy(to_row, from, (size_t)k * dtype_size(kept));
            continue;
        }
        for (int64_t i = 0; i < k; i += SIMD_WIDTH) {
            vfloat v = simd_read(from, p->x.dtype, i, k);
            simd_write(to_row, kept, i, k, round ? simd_round_bf16(v) : v);
        }
    }
}

/* y = sums + addend for rows [first, first + n); sums may be y's own rows. */
static void copy_out(const struct worker *worker, const struct product *p, int64_t first, int64_t n,
                     const float *sums)
{
    int64_t width = p->w->n;
#pragma omp parallel for num_threads(worker->n_threads) if (!worker->alone)
    for (int64_t row = 0; row < n; row++) {
        const float *sums_row = sums + row * width;
        void *y_row = simd_row(&p->y, first + row);
        const void *addend_row = p->addend.data == NULL ? NULL : simd_row(&p->addend, first + row);
        for (int64_t i = 0; i < width; i += SIMD_WIDTH) {
            vfloat v = simd_read(sums_row, DTYPE_F32, i, width);
            if (addend_row != NULL)
                v += simd_read(addend_row, p->addend.dtype, i, width);
            simd_write(y_row, p->y.dtype, i, width, v);
        }
    }
}

/* Where nothing needs copying: rows [first, first + n) straight from x to y. */
static void multiply_in_place(struct worker *worker, const struct product *p, int64_t first, int64_t n)
{
    const struct gemm_call call = {.x = simd_row(&p->x, first),
                                   .bias = p->bias,
                                   .y = simd_row(&p->y, first),
                                   .y_dtype = p->y.dtype,
                                   .rows = n,
                                   .accumulate = p->accumulates,
                                   .alone = worker->alone,
                                   .thread = worker->thread};
    if (gemm_run(worker->gemm, p->w, &call, &worker->error) != STATUS_OK)
        return;
    if (p->addend.data != NULL && !p->accumulates)
        copy_out(worker, p, first, n, call.y);
}

static int64_t round_up(int64_t n, int64_t step)
{
    return (n + step - 1) / step * step;
}

static size_t x_copy_bytes(const struct matrix *w, int64_t rows)
{
    return (size_t)round_up(rows * w->k * (int64_t)dtype_size(w->kept), MEMORY_ALIGNMENT);
}

static size_t copies_bytes(const struct matrix *w, int64_t rows)
{
    return x_copy_bytes(w, rows) + (size_t)round_up(rows * w->n * (int64_t)sizeof(float), MEMORY_ALIGNMENT);
}

/* Through copies in the scratch memory: x rounded up to `padded` rows, sums in float32; results that can be
 * written where they belong are. */
static void multiply_copies(struct worker *worker, const struct product *p, int64_t first, int64_t n,
                            int64_t padded)
{
    bool writes_y = p->y_is_ready && n == padded;
    struct gemm_call call = {.x = simd_row(&p->x, first),
                             .bias = p->bias,
                             .y = writes_y ? simd_row(&p->y, first)
                                           : worker->scratch + x_copy_bytes(p->w, padded),
                             .y_dtype = writes_y ? p->y.dtype : DTYPE_F32,
                             .rows = padded,
                             .accumulate = writes_y && p->accumulates,
                             .alone = worker->alone,
                             .thread = worker->thread};
    if (!p->x_is_ready || n != padded) {
        copy_in(worker, p, first, n, padded, worker->scratch);
        call.x = worker->scratch;
    }
    if (gemm_run(worker->gemm, p->w, &call, &worker->error) != STATUS_OK)
        return;
    if (!writes_y || (p->addend.data != NULL && !p->accumulates))
        copy_out(worker, p, first, n, call.y);
}

/* Rows that go into one of the library's products. */
static int64_t tile_rows(const struct matrix *w)
{
    return w->n > GEMM_WIDE ? GEMM_ROWS_WIDE : GEMM_ROWS;
}

/* Rows of copies that `bytes` of scratch memory hold; at least 64, for which it grows, and no more than a
 * tile. */
static int64_t rows_that_fit(const struct matrix *w, size_t bytes)
{
    int64_t row_bytes = (w->k + w->n) * (int64_t)sizeof(float);
    int64_t rows = (int64_t)bytes / row_bytes / GEMM_ROW_STEP * GEMM_ROW_STEP;
    rows = rows < 64 ? 64 : rows;
    return rows < tile_rows(w) ? rows : tile_rows(w);
}

/* Rows [first, end), by whole `block`s while there are any. */
static void multiply_rows(struct worker *worker, const struct product *p, int64_t first, int64_t end,
                          int64_t block)
{
    int64_t tile = tile_rows(p->w), n = 0;
    for (; first < end && worker->error.status == STATUS_OK; first += n) {
        n = end - first < tile ? end - first : tile;
        n = n < block ? n : n - n % block;
        bool copies = !p->x_is_ready || !p->y_is_ready || n % GEMM_ROW_STEP != 0;
        if (!copies) {
            multiply_in_place(worker, p, first, n);
            continue;
        }
        n = n < worker->rows ? n : worker->rows;
        multiply_copies(worker, p, first, n, round_up(n, GEMM_ROW_STEP));
    }
}

/* Part `part` of n_parts of some work: of one thread, or of all together. */
typedef void work_fn(struct worker *worker, const void *context, int part, int n_parts);

static void work_together(struct backend *b, struct worker *all, char *scratch, work_fn *work,
                          const void *context)
{
    all->n_threads = b->n_threads;
    all->scratch = scratch;
    work(all, context, 0, 1);
    if (all->error.status != STATUS_OK)
        b->error = all->error;
}

/* The parts of a thread, `each` of them from thread * each on: the next that nobody has begun. */
struct hand {
    _Alignas(MEMORY_ALIGNMENT) atomic_int next;
};

/* Parts go to the thread that they belong to; who is through with its own takes of what others have not
 * begun: they may have been held up, by the thread that compresses rows or by a neighbour on the machine. */
static void work_through(struct worker *own, struct hand *hands, int n_threads, int each, work_fn *work,
                         const void *context)
{
    for (int i = 0; i < n_threads; i++) {
        int owner = (own->thread + i) % n_threads, end = (owner + 1) * each, part;
        while (own->error.status == STATUS_OK && (part = atomic_fetch_add(&hands[owner].next, 1)) < end)
            work(own, context, part, n_threads * each);
    }
}

/* scratch: the hands, then `bytes` for each thread. */
static void work_alone(struct backend *b, const struct worker *all, char *scratch, size_t bytes, int each,
                       work_fn *work, const void *context)
{
    struct hand *hands = (struct hand *)(void *)scratch;
    for (int thread = 0; thread < b->n_threads; thread++)
        atomic_init(&hands[thread].next, thread * each);
#pragma omp parallel num_threads(b->n_threads)
    {
        int thread = omp_get_thread_num();
        struct worker own = *all;
        own.n_threads = 1;
        own.alone = true;
        own.thread = thread;
        own.scratch = (char *)(hands + b->n_threads) + (size_t)thread * bytes;
        work_through(&own, hands, b->n_threads, each, work, context);
        if (own.error.status != STATUS_OK) {
#pragma omp critical(linear_error)
            b->error = own.error;
        }
    }
}

/* What copies may take where each thread has its own: where they would take more (the head of a large
 * vocabulary, on many threads), threads work together. */
#define MAX_COPIES_BYTES (4 * CPU_SCRATCH_BYTES)

/* Parts of a thread: of OWN_ROWS rows or more, at most MAX_PARTS. Where each product copies the weights
 * before it multiplies, twice as many rows share a copy (Zen 3, AVX2, two threads, float32, parts of 512 rows
 * over parts of 256: mamba-130m 1.10 to 1.2 times as fast, bamba's bench checkpoint 1.05, jamba's 1.02). */
#define MAX_PARTS 4

static int count_parts(const struct matrix *w, int64_t n_rows, int n_threads)
{
    int64_t rows = w->packed ? OWN_ROWS : 2 * OWN_ROWS, parts = n_rows / (n_threads * rows);
    return parts > MAX_PARTS ? MAX_PARTS : parts < 1 ? 1 : (int)parts;
}

/* Runs `work` on products with w (one of those of a group, which are alike) that have n_rows rows. */
static void divide_work(struct backend *b, const struct matrix *w, int64_t n_rows, work_fn *work,
                        const void *context)
{
    size_t n_workers = (size_t)b->n_threads;
    if (n_workers == 1 || n_rows < b->n_threads * (int64_t)OWN_ROWS ||
        n_workers * copies_bytes(w, rows_that_fit(w, CPU_SCRATCH_BYTES / n_workers)) > MAX_COPIES_BYTES)
        n_workers = 1;
    struct worker all = {.gemm = cpu_get(b)->gemm, .rows = rows_that_fit(w, CPU_SCRATCH_BYTES / n_workers)};
    size_t bytes = copies_bytes(w, all.rows);
    char *scratch = cpu_scratch(b, (bytes + sizeof(struct hand)) * n_workers);
    if (scratch == NULL)
        return;
    if (n_workers > 1)
        work_alone(b, &all, scratch, bytes, count_parts(w, n_rows, b->n_threads), work, context);
    else
        work_together(b, &all, scratch, work, context);
}

/* Where part `part` of n rows starts: about where OpenMP's loops give a thread its rows, at whole blocks. */
static int64_t part_start(int64_t n, int part, int n_parts)
{
    return part == n_parts ? n : n * part / n_parts / GEMM_ROW_BLOCK * GEMM_ROW_BLOCK;
}

static void multiply_part(struct worker *worker, const void *context, int part, int n_parts)
{
    const struct product *p = context;
    multiply_rows(worker, p, part_start(p->y.rows, part, n_parts), part_start(p->y.rows, part + 1, n_parts),
                  GEMM_ROW_BLOCK);
}

static void cpu_linear(struct backend *b, struct tensor x, const struct matrix *w, const float *bias,
                       struct tensor addend, struct tensor y)
{
    if (cpu_has_failed(b))
        return;
    struct product p = plan_product(x, w, bias, addend, y);
    divide_work(b, w, y.rows, multiply_part, &p);
}

struct grouped_product {
    struct tensor x, yg;
    bool gathers; /* x has a row for each token; else one for each slot, in the order of the experts */
    const struct expert_groups *groups;
    struct matrix *const *experts;
};

/* Places [first, first + n). */
static struct product plan_places(const struct grouped_product *g, const struct matrix *w, int64_t first,
                                  int64_t n)
{
    struct tensor x = g->gathers ? g->x : tensor_rows(g->x, first, n);
    struct product p = plan_product(x, w, NULL, (struct tensor){0}, tensor_rows(g->yg, first, n));
    if (g->gathers) {
        p.slots = g->groups->order + first;
        p.top_k = g->groups->top_k;
        p.x_is_ready = false;
    }
    return p;
}

/* An expert's rows rounded up to whole steps where they lie: the rows past its own are the next expert's,
 * whose results come later, from the same worker, and take the place of what is left there. `end` is the
 * worker's. False where it cannot be done. */
static bool multiply_over_the_next(struct worker *worker, const struct grouped_product *g,
                                   const struct matrix *w, int64_t first, int64_t n, int64_t end)
{
    int64_t padded = round_up(n, GEMM_ROW_STEP);
    if (padded > tile_rows(w) || first + padded > end)
        return false;
    struct product p = plan_places(g, w, first, padded);
    if (!p.y_is_ready || (!p.x_is_ready && padded > worker->rows))
        return false;
    if (p.x_is_ready)
        multiply_in_place(worker, &p, 0, padded);
    else
        multiply_copies(worker, &p, 0, padded, padded);
    return true;
}

/* Where a part starts: its share of all rows, or up to a step before it, so that its first expert's rows are
 * cut between whole steps. */
static int64_t group_part_start(const struct expert_groups *groups, int part, int n_parts)
{
    int64_t n = groups->offsets[groups->n_experts], start = n * part / n_parts;
    int e = 0;
    while (e < groups->n_experts && groups->offsets[e + 1] <= start)
        e++;
    return part == n_parts ? n : start - (start - groups->offsets[e]) % GEMM_ROW_STEP;
}

/* In the order of the experts, see multiply_over_the_next. */
static void multiply_group_part(struct worker *worker, const void *context, int part, int n_parts)
{
    const struct grouped_product *g = context;
    int64_t start = group_part_start(g->groups, part, n_parts),
            end = group_part_start(g->groups, part + 1, n_parts);
    for (int e = 0; e < g->groups->n_experts && worker->error.status == STATUS_OK; e++) {
        int64_t first = g->groups->offsets[e], last = g->groups->offsets[e + 1];
        first = first > start ? first : start;
        last = last < end ? last : end;
        if (first >= last || multiply_over_the_next(worker, g, g->experts[e], first, last - first, end))
            continue;
        struct product p = plan_places(g, g->experts[e], first, last - first);
        multiply_rows(worker, &p, 0, last - first, GEMM_ROW_STEP);
    }
}

static void multiply_groups(struct backend *b, const struct grouped_product *g)
{
    int64_t n = g->groups->offsets[g->groups->n_experts];
    if (!cpu_has_failed(b) && n > 0)
        divide_work(b, g->experts[0], n, multiply_group_part, g);
}

static void cpu_grouped_linear(struct backend *b, struct tensor xg, const struct expert_groups *groups,
                               struct matrix *const *experts, struct tensor yg)
{
    const struct grouped_product g = {.x = xg, .yg = yg, .groups = groups, .experts = experts};
    multiply_groups(b, &g);
}

/* Rows are copied together just before they are multiplied, into a buffer that stays in the cache. */
static void cpu_gathered_linear(struct backend *b, struct tensor x, const struct expert_groups *groups,
                                struct matrix *const *experts, struct tensor xg, struct tensor yg)
{
    const struct grouped_product g = {
        .x = x, .yg = yg, .gathers = true, .groups = groups, .experts = experts};
    (void)xg;
    multiply_groups(b, &g);
}

void CPU_NAME(cpu_fill_linear)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_linear)(struct backend_ops *ops)
{
    ops->linear = cpu_linear;
    ops->grouped_linear = cpu_grouped_linear;
    ops->gathered_linear = cpu_gathered_linear;
}
