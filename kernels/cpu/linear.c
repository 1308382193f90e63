/* Products with weight matrices: brings any rows to what gemm.h takes, and its results to any output. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/simd.h"

/* One call of linear, and what of it can be left to the library. */
struct product {
    struct tensor x, addend, y;
    const struct matrix *w;
    const float *bias;
    bool x_is_ready;  /* rows of x can be multiplied where they lie */
    bool y_is_ready;  /* results can be written where they belong */
    bool accumulates; /* the addend is y itself, and the library adds to it */
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

/* Rows [first, first + n) of x, converted to the kept dtype, by way of the load's where x is finer than that;
 * then zeros up to `padded` rows. */
static void copy_in(const struct backend *b, const struct product *p, int64_t first, int64_t n,
                    int64_t padded, void *to)
{
    int64_t k = p->w->k;
    enum dtype kept = p->w->kept;
    bool round = p->w->compute == DTYPE_BF16 && kept == DTYPE_F32 && p->x.dtype == DTYPE_F32;
#pragma omp parallel for num_threads(b->n_threads)
    for (int64_t row = 0; row < padded; row++) {
        void *to_row = (char *)to + (size_t)(row * k) * dtype_size(kept);
        if (row >= n) {
            memset(to_row, 0, (size_t)k * dtype_size(kept));
            continue;
        }
        const void *from = simd_row(&p->x, first + row);
        for (int64_t i = 0; i < k; i += SIMD_WIDTH) {
            vfloat v = simd_read(from, p->x.dtype, i, k);
            simd_write(to_row, kept, i, k, round ? simd_round_bf16(v) : v);
        }
    }
}

/* y = sums + addend for rows [first, first + n); sums may be y's own rows. */
static void copy_out(const struct backend *b, const struct product *p, int64_t first, int64_t n,
                     const float *sums)
{
    int64_t width = p->w->n;
#pragma omp parallel for num_threads(b->n_threads)
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
static void multiply_in_place(struct backend *b, const struct product *p, int64_t first, int64_t n)
{
    const struct gemm_call call = {.x = simd_row(&p->x, first),
                                   .bias = p->bias,
                                   .y = simd_row(&p->y, first),
                                   .y_dtype = p->y.dtype,
                                   .rows = n,
                                   .accumulate = p->accumulates};
    if (gemm_run(cpu_get(b)->gemm, p->w, &call, &b->error) != STATUS_OK)
        return;
    if (p->addend.data != NULL && !p->accumulates)
        copy_out(b, p, first, n, call.y);
}

/* Through copies in the scratch memory: x rounded up to `padded` rows, sums in float32. */
static void multiply_copies(struct backend *b, const struct product *p, int64_t first, int64_t n,
                            int64_t padded)
{
    size_t x_bytes = (size_t)(padded * p->w->k) * dtype_size(p->w->kept);
    x_bytes = (x_bytes + 63) / 64 * 64;
    char *scratch = cpu_scratch(b, x_bytes + (size_t)(padded * p->w->n) * sizeof(float));
    if (scratch == NULL)
        return;
    struct gemm_call call = {.x = simd_row(&p->x, first),
                             .bias = p->bias,
                             .y = scratch + x_bytes,
                             .y_dtype = DTYPE_F32,
                             .rows = padded};
    if (!p->x_is_ready || n != padded) {
        copy_in(b, p, first, n, padded, scratch);
        call.x = scratch;
    }
    if (gemm_run(cpu_get(b)->gemm, p->w, &call, &b->error) == STATUS_OK)
        copy_out(b, p, first, n, call.y);
}

/* Rows of copies that the scratch memory holds; at least one tile of 64, for which it grows. */
static int64_t rows_that_fit(const struct matrix *w)
{
    int64_t row_bytes = (w->k + w->n) * (int64_t)sizeof(float);
    int64_t rows = (int64_t)CPU_SCRATCH_BYTES / row_bytes / GEMM_ROW_STEP * GEMM_ROW_STEP;
    return rows < 64 ? 64 : rows;
}

static void cpu_linear(struct backend *b, struct tensor x, const struct matrix *w, const float *bias,
                       struct tensor addend, struct tensor y)
{
    struct product p = plan_product(x, w, bias, addend, y);
    int64_t tile = w->n > GEMM_WIDE ? GEMM_ROWS_WIDE : GEMM_ROWS;
    int64_t fit = rows_that_fit(w);
    int64_t n = 0;
    for (int64_t first = 0; first < y.rows && !cpu_has_failed(b); first += n) {
        n = y.rows - first < tile ? y.rows - first : tile;
        bool copies = !p.x_is_ready || !p.y_is_ready || n % GEMM_ROW_STEP != 0;
        if (!copies) {
            multiply_in_place(b, &p, first, n);
            continue;
        }
        n = n < fit ? n : fit;
        multiply_copies(b, &p, first, n, (n + GEMM_ROW_STEP - 1) / GEMM_ROW_STEP * GEMM_ROW_STEP);
    }
}

/* An expert's rows rounded up to whole steps where they lie: the rows past its own are the next expert's, whose
 * results come later and take the place of what is left there. False where it cannot be done. */
static bool multiply_over_the_next(struct backend *b, struct tensor xg, const struct matrix *w, int64_t first,
                                   int64_t n, struct tensor yg)
{
    int64_t padded = (n + GEMM_ROW_STEP - 1) / GEMM_ROW_STEP * GEMM_ROW_STEP;
    if (padded > GEMM_ROWS || w->n > GEMM_WIDE || first + padded > yg.rows)
        return false;
    struct product p = plan_product(tensor_rows(xg, first, padded), w, NULL, (struct tensor){0},
                                    tensor_rows(yg, first, padded));
    if (!p.x_is_ready || !p.y_is_ready)
        return false;
    multiply_in_place(b, &p, 0, padded);
    return true;
}

/* In the order of the experts, see multiply_over_the_next. */
static void cpu_grouped_linear(struct backend *b, struct tensor xg, const struct expert_groups *groups,
                               struct matrix *const *experts, struct tensor yg)
{
    for (int e = 0; e < groups->n_experts; e++) {
        int64_t first = groups->offsets[e], n = groups->offsets[e + 1] - first;
        if (n > 0 && !multiply_over_the_next(b, xg, experts[e], first, n, yg))
            cpu_linear(b, tensor_rows(xg, first, n), experts[e], NULL, (struct tensor){0},
                       tensor_rows(yg, first, n));
    }
}

void CPU_NAME(cpu_fill_linear)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_linear)(struct backend_ops *ops)
{
    ops->linear = cpu_linear;
    ops->grouped_linear = cpu_grouped_linear;
}
