/* Root-mean-square norm (Zhang and Sennrich 2019), with Mamba-2's gate in front and groups. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

#include <math.h>
#include <omp.h>

/* values[i] = x * silu(gate), i < n; returns the sum of their squares. gate NULL: x alone. */
SIMD_INLINE float gate_and_square(const void *x, const void *gate, int64_t n, const enum dtype dtype,
                                  const enum dtype gate_dtype, float *values)
{
    vfloat sum = {0};
    int64_t whole = n / SIMD_WIDTH * SIMD_WIDTH;
    for (int64_t i = 0; i < whole; i += SIMD_WIDTH) {
        vfloat v = simd_get(x, dtype, i);
        if (gate != NULL)
            v *= simd_silu(simd_get(gate, gate_dtype, i));
        sum += v * v;
        simd_store(values + i, v);
    }
    if (whole < n) {
        vfloat v = simd_get_tail(x, dtype, whole, n);
        if (gate != NULL)
            v *= simd_silu(simd_get_tail(gate, gate_dtype, whole, n));
        sum += v * v;
        simd_put_tail(values, DTYPE_F32, whole, n, v);
    }
    return simd_sum(sum);
}

/* y[i] = values[i] * scale * weight[i] */
SIMD_INLINE void scale_and_weigh(const float *values, float scale, const float *weight, int64_t n,
                                 const enum dtype dtype, void *y)
{
    int64_t whole = n / SIMD_WIDTH * SIMD_WIDTH;
    for (int64_t i = 0; i < whole; i += SIMD_WIDTH)
        simd_put(y, dtype, i, simd_load(values + i) * scale * simd_load(weight + i));
    if (whole < n)
        simd_put_tail(y, dtype, whole, n,
                      simd_get_tail(values, DTYPE_F32, whole, n) * scale *
                          simd_get_tail(weight, DTYPE_F32, whole, n));
}

SIMD_INLINE void *element_at(const struct tensor *t, int64_t row, int64_t column, const enum dtype dtype)
{
    return (char *)t->data + (row * t->stride + column) * (dtype == DTYPE_F32 ? 4 : 2);
}

/* The group that starts at column `first`. */
SIMD_INLINE void norm_group(const struct norm_args *args, int64_t row, int64_t first, float *values,
                            const enum dtype x_dtype, const enum dtype gate_dtype, const enum dtype y_dtype)
{
    int64_t n = args->group;
    const void *gate = args->gate.data == NULL ? NULL : element_at(&args->gate, row, first, gate_dtype);
    float squares =
        gate_and_square(element_at(&args->x, row, first, x_dtype), gate, n, x_dtype, gate_dtype, values);
    float scale = 1.0f / sqrtf(squares / (float)n + args->epsilon);
    const float *weight = args->weight_per_group ? args->weight : args->weight + first;
    scale_and_weigh(values, scale, weight, n, y_dtype, element_at(&args->y, row, first, y_dtype));
}

static void norm_row(const struct norm_args *args, int64_t row, float *values)
{
    enum dtype x = args->x.dtype, y = args->y.dtype, gate = args->gate.data == NULL ? x : args->gate.dtype;
    for (int64_t first = 0; first < args->x.cols; first += args->group) {
        if (x == DTYPE_F32 && gate == x && y == x)
            norm_group(args, row, first, values, DTYPE_F32, DTYPE_F32, DTYPE_F32);
        else if (x == DTYPE_BF16 && gate == x && y == x)
            norm_group(args, row, first, values, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16);
        else
            norm_group(args, row, first, values, x, gate, y);
    }
}

static void cpu_rms_norm(struct backend *b, const struct norm_args *args)
{
    if (cpu_has_failed(b))
        return;
    /* A group at a time goes through a buffer of its thread: x may be y, and the gate's silu is taken once.
     */
    size_t stride = ((size_t)args->group + 15) / 16 * 16;
    float *buffers = cpu_scratch(b, (size_t)b->n_threads * stride * sizeof *buffers);
    if (buffers == NULL)
        return;
#pragma omp parallel for num_threads(b->n_threads)
    for (int64_t row = 0; row < args->y.rows; row++)
        norm_row(args, row, buffers + (size_t)omp_get_thread_num() * stride);
}

void CPU_NAME(cpu_fill_norm)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_norm)(struct backend_ops *ops)
{
    ops->rms_norm = cpu_rms_norm;
}
