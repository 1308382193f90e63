/* Root-mean-square norm (Zhang and Sennrich 2019), with Mamba-2's gate in front and groups. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

#include <math.h>
#include <omp.h>

/* values[i] = x * silu(gate) for the group that starts at column `first`; returns the sum of their squares.
 */
static float gate_and_square(const struct norm_args *args, int64_t row, int64_t first, float *values)
{
    struct tensor x = tensor_cols(args->x, first, args->group),
                  gate = tensor_cols(args->gate, first, args->group);
    const void *x_row = simd_row(&x, row);
    const void *gate_row = gate.data == NULL ? NULL : simd_row(&gate, row);
    int64_t n = args->group;
    vfloat sum = {0};
    for (int64_t i = 0; i < n; i += SIMD_WIDTH) {
        vfloat v = simd_read(x_row, x.dtype, i, n);
        if (gate_row != NULL)
            v *= simd_silu(simd_read(gate_row, gate.dtype, i, n));
        sum += v * v;
        simd_write(values, DTYPE_F32, i, n, v);
    }
    return simd_sum(sum);
}

static void norm_group(const struct norm_args *args, int64_t row, int64_t first, float *values)
{
    int64_t n = args->group;
    float squares = gate_and_square(args, row, first, values);
    float scale = 1.0f / sqrtf(squares / (float)n + args->epsilon);
    const float *weight = args->weight_per_group ? args->weight : args->weight + first;
    struct tensor y = tensor_cols(args->y, first, n);
    void *y_row = simd_row(&y, row);
    for (int64_t i = 0; i < n; i += SIMD_WIDTH) {
        vfloat normed = simd_read(values, DTYPE_F32, i, n) * scale;
        simd_write(y_row, y.dtype, i, n, normed * simd_read(weight, DTYPE_F32, i, n));
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
        for (int64_t first = 0; first < args->x.cols; first += args->group)
            norm_group(args, row, first, buffers + (size_t)omp_get_thread_num() * stride);
}

void CPU_NAME(cpu_fill_norm)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_norm)(struct backend_ops *ops)
{
    ops->rms_norm = cpu_rms_norm;
}
