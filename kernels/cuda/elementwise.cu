/* add, add_scaled, silu_mul, softplus_gate, and conversions. Bound by memory bandwidth: each element is read
 * and written once, 16 bytes a thread where rows allow it, and nothing is kept. */
#include "kernels/cuda/device.h"

struct add_op {
    struct tensor x, y, out;
    float scale;

    template <int W> __device__ void run(int64_t row, int64_t col) const
    {
        float a[W], b[W];
        load_row(x, row, col, a);
        load_row(y, row, col, b);
#pragma unroll
        for (int i = 0; i < W; i++)
            a[i] += b[i] * scale;
        store_row(out, row, col, a);
    }
};

void cuda_add_scaled(struct backend *b, struct tensor x, struct tensor y, float scale, struct tensor out)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda != NULL)
        launch_rowwise(cuda, "add", out.rows, out.cols, is_wide(x) && is_wide(y) && is_wide(out),
                       add_op{x, y, out, scale});
}

void cuda_add(struct backend *b, struct tensor x, struct tensor y, struct tensor out)
{
    cuda_add_scaled(b, x, y, 1.0f, out);
}

struct silu_mul_op {
    struct tensor gate, up, activation, y;

    template <int W> __device__ void run(int64_t row, int64_t col) const
    {
        float a[W], b[W];
        load_row(gate, row, col, a);
        load_row(up, row, col, b);
#pragma unroll
        for (int i = 0; i < W; i++)
            a[i] = silu(a[i]);
        if (activation.data != NULL)
            store_row(activation, row, col, a);
#pragma unroll
        for (int i = 0; i < W; i++)
            a[i] *= b[i];
        store_row(y, row, col, a);
    }
};

void cuda_silu_mul(struct backend *b, struct tensor gate, struct tensor up, struct tensor activation,
                   struct tensor y)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda != NULL)
        launch_rowwise(cuda, "silu_mul", y.rows, y.cols,
                       is_wide(gate) && is_wide(up) && is_wide(activation) && is_wide(y),
                       silu_mul_op{gate, up, activation, y});
}

struct softplus_gate_op {
    struct tensor x, gate, y;
    int head_dim; /* columns that share a gate */

    template <int W> __device__ void run(int64_t row, int64_t col) const
    {
        float a[W];
        load_row(x, row, col, a);
#pragma unroll
        for (int i = 0; i < W; i++)
            a[i] *= softplus(load(gate, row, (col + i) / head_dim));
        store_row(y, row, col, a);
    }
};

void cuda_softplus_gate(struct backend *b, struct tensor x, struct tensor gate, int head_dim, struct tensor y)
{
    struct cuda_backend *cuda = cuda_begin(b);
    int shared_by = gate.cols == x.cols ? 1 : head_dim;
    if (cuda != NULL)
        launch_rowwise(cuda, "softplus_gate", y.rows, y.cols, is_wide(x) && is_wide(y),
                       softplus_gate_op{x, gate, y, shared_by});
}

struct convert_op {
    struct tensor from, to;

    template <int W> __device__ void run(int64_t row, int64_t col) const
    {
        float a[W];
        if (from.dtype == DTYPE_F16) {
#pragma unroll
            for (int i = 0; i < W; i++)
                a[i] = load_any(from, row, col + i);
        } else {
            load_row(from, row, col, a);
        }
        store_row(to, row, col, a);
    }
};

void convert_launch(struct cuda_backend *cuda, const struct tensor *from, const struct tensor *to)
{
    launch_rowwise(cuda, "conversion", to->rows, to->cols, is_wide(*from) && is_wide(*to),
                   convert_op{*from, *to});
}
