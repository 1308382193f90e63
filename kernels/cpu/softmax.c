/* Softmax over each row, in float32. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

#include <math.h>

static float find_row_largest(const struct tensor *x, int64_t row)
{
    const void *from = tensor_row(x, row);
    int64_t whole = x->cols / SIMD_WIDTH * SIMD_WIDTH;
    vfloat largest = simd_set(-INFINITY);

    for (int64_t i = 0; i < whole; i += SIMD_WIDTH)
        largest = simd_max(largest, simd_read(from, x->dtype, i, x->cols));
    vfloat rest = simd_read(from, x->dtype, whole, x->cols);
    for (int64_t i = 0; i < x->cols - whole; i++)
        largest[i] = rest[i] > largest[i] ? rest[i] : largest[i];
    return simd_highest(largest);
}

/* The exponentials are computed twice rather than kept, because y may be narrower than they are. */
static void softmax_row(const struct tensor *x, const struct tensor *y, int64_t row)
{
    const void *from = tensor_row(x, row);
    void *to = tensor_row(y, row);
    vfloat largest = simd_set(find_row_largest(x, row)), sum = {0};
    int64_t n = x->cols, whole = n / SIMD_WIDTH * SIMD_WIDTH;

    for (int64_t i = 0; i < whole; i += SIMD_WIDTH)
        sum += simd_exp(simd_read(from, x->dtype, i, n) - largest);
    vfloat rest = simd_exp(simd_read(from, x->dtype, whole, n) - largest);
    for (int64_t i = 0; i < n - whole; i++)
        sum[i] += rest[i];
    vfloat total = simd_set(simd_sum(sum));
    for (int64_t i = 0; i < n; i += SIMD_WIDTH)
        simd_write(to, y->dtype, i, n, simd_exp(simd_read(from, x->dtype, i, n) - largest) / total);
}

static void cpu_softmax(struct backend *b, struct tensor x, struct tensor y)
{
    if (cpu_has_failed(b))
        return;
#pragma omp parallel for num_threads(b->n_threads)
    for (int64_t row = 0; row < x.rows; row++)
        softmax_row(&x, &y, row);
}

void CPU_NAME(cpu_fill_softmax)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_softmax)(struct backend_ops *ops)
{
    ops->softmax = cpu_softmax;
}
