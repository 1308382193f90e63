/* linear and grouped_linear: cuBLAS, and what it cannot do at once. Bound by the tensor cores for batches of
 * more than a few hundred tokens.
 *
 * A residual is added by cuBLAS itself (beta 1), in float32 before the one rounding. A bias, or an addend of
 * another dtype than y's, is added by a second kernel from a float32 product in scratch, in pieces that
 * scratch can hold. */
#include "kernels/cuda/blas.h"
#include "kernels/cuda/device.h"

#define PRODUCTS_AT_ONCE 512

struct epilogue_op {
    struct tensor product;
    const float *bias;
    struct tensor addend, y;

    template <int W> __device__ void run(int64_t row, int64_t col) const
    {
        float a[W], b[W];
        load_row(product, row, col, a);
        if (bias != NULL) {
#pragma unroll
            for (int i = 0; i < W; i++)
                a[i] += bias[col + i];
        }
        if (addend.data != NULL) {
            load_row(addend, row, col, b);
#pragma unroll
            for (int i = 0; i < W; i++)
                a[i] += b[i];
        }
        store_row(y, row, col, a);
    }
};

/* x in the weights' dtype: as it is, or a copy in scratch. data is NULL after a failure. */
static struct tensor match_dtype(struct cuda_backend *cuda, const struct tensor &x, enum dtype dtype)
{
    if (x.dtype == dtype)
        return x;
    struct tensor copy = {NULL, dtype, x.rows, x.cols, x.cols};
    copy.data = scratch_take(cuda, (size_t)(x.rows * x.cols) * dtype_size(dtype), "a converted operand");
    if (copy.data != NULL)
        convert_launch(cuda, &x, &copy);
    return copy;
}

static struct blas_product make_product(const struct tensor &x, const struct matrix *w, float beta,
                                        const struct tensor &y)
{
    struct blas_product p = {x.rows,   w->n,     w->k,     x.data,  w->data, y.data,
                             x.stride, y.stride, w->dtype, y.dtype, beta};
    return p;
}

static void multiply(struct cuda_backend *cuda, const struct tensor &x, const struct matrix *w, float beta,
                     const struct tensor &y)
{
    struct blas_product product = make_product(x, w, beta, y);
    blas_run(cuda, &product);
}

static bool is_direct(enum dtype w, enum dtype y)
{
    return y == w || y == DTYPE_F32;
}

static void run_through_scratch(struct cuda_backend *cuda, const struct tensor &x, const struct matrix *w,
                                const float *bias, const struct tensor &addend, const struct tensor &y)
{
    int64_t row_bytes = w->n * (int64_t)sizeof(float);
    int64_t rows = max64(1, min64(y.rows, (int64_t)cuda->options.scratch_bytes / row_bytes));
    struct tensor product = {NULL, DTYPE_F32, rows, w->n, w->n};
    product.data = scratch_take(cuda, (size_t)(rows * row_bytes), "a float32 product");
    for (int64_t first = 0; first < y.rows && product.data != NULL; first += rows) {
        int64_t n = min64(rows, y.rows - first);
        struct tensor part = tensor_rows(product, 0, n), x_part = tensor_rows(x, first, n);
        multiply(cuda, x_part, w, 0, part);
        struct tensor a = tensor_rows(addend, first, n), to = tensor_rows(y, first, n);
        launch_rowwise(cuda, "linear", n, w->n, is_wide(part) && is_wide(a) && is_wide(to),
                       epilogue_op{part, bias, a, to});
    }
}

void cuda_linear(struct backend *b, struct tensor x, const struct matrix *w, const float *bias,
                 struct tensor addend, struct tensor y)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL || y.rows == 0)
        return;
    struct tensor matched = match_dtype(cuda, x, w->dtype);
    if (matched.data == NULL)
        return;
    bool addend_fits = addend.data == NULL || addend.dtype == y.dtype;
    if (bias != NULL || !addend_fits || !is_direct(w->dtype, y.dtype)) {
        run_through_scratch(cuda, matched, w, bias, addend, y);
        return;
    }
    if (addend.data != NULL && addend.data != y.data)
        convert_launch(cuda, &addend, &y);
    multiply(cuda, matched, w, addend.data != NULL ? 1.0f : 0.0f, y);
}

/* Where the rows of each expert begin, on the host: from the copy that group_experts sent along, else asked
 * for now. */
static const int32_t *await_offsets(struct cuda_backend *cuda, const struct expert_groups *groups)
{
    struct group_sizes *sizes = &cuda->sizes;
    if (sizes->offsets != groups->offsets) {
        if (!group_sizes_send(cuda, groups))
            return NULL;
    }
    return cuda_check(cuda, cudaEventSynchronize(sizes->arrived), "waiting for the experts' token counts")
               ? sizes->host
               : NULL;
}

static void run_groups(struct cuda_backend *cuda, const struct tensor &xg, const int32_t *offsets,
                       int n_experts, struct matrix *const *experts, const struct tensor &yg)
{
    struct blas_product list[PRODUCTS_AT_ONCE];
    int n = 0;
    for (int e = 0; e < n_experts; e++) {
        int64_t rows = offsets[e + 1] - offsets[e];
        if (rows > 0)
            list[n++] = make_product(tensor_rows(xg, offsets[e], rows), experts[e], 0,
                                     tensor_rows(yg, offsets[e], rows));
        if (n == PRODUCTS_AT_ONCE || (e == n_experts - 1 && n > 0)) {
            blas_run_many(cuda, list, n);
            n = 0;
        }
    }
}

void cuda_grouped_linear(struct backend *b, struct tensor xg, const struct expert_groups *groups,
                         struct matrix *const *experts, struct tensor yg)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL || xg.rows == 0)
        return;
    enum dtype dtype = experts[0]->dtype;
    struct tensor matched = match_dtype(cuda, xg, dtype), result = yg;
    if (!is_direct(dtype, yg.dtype)) {
        result = tensor_make(NULL, DTYPE_F32, yg.rows, yg.cols);
        result.data =
            scratch_take(cuda, (size_t)(yg.rows * yg.cols) * sizeof(float), "the experts' products");
    }
    const int32_t *offsets = await_offsets(cuda, groups);
    if (matched.data == NULL || result.data == NULL || offsets == NULL)
        return;
    run_groups(cuda, matched, offsets, groups->n_experts, experts, result);
    if (result.data != yg.data)
        convert_launch(cuda, &result, &yg);
}

void cuda_gathered_linear(struct backend *b, struct tensor x, const struct expert_groups *groups,
                          struct matrix *const *experts, struct tensor xg, struct tensor yg)
{
    cuda_gather_slots(b, x, groups, xg);
    cuda_grouped_linear(b, xg, groups, experts, yg);
}
