/* Sums, products and gates of equal elements. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

SIMD_INLINE void add_scaled_row(const struct tensor *x, const struct tensor *y, float scale,
                                const struct tensor *out, int64_t row, const enum dtype x_dtype,
                                const enum dtype y_dtype, const enum dtype out_dtype)
{
    const void *x_row = simd_row(x, row), *y_row = simd_row(y, row);
    void *out_row = simd_row(out, row);
    int64_t n = out->cols, whole = n / SIMD_WIDTH * SIMD_WIDTH;
    for (int64_t i = 0; i < whole; i += SIMD_WIDTH)
        simd_put(out_row, out_dtype, i, simd_get(x_row, x_dtype, i) + simd_get(y_row, y_dtype, i) * scale);
    if (whole < n)
        simd_put_tail(out_row, out_dtype, whole, n,
                      simd_get_tail(x_row, x_dtype, whole, n) +
                          simd_get_tail(y_row, y_dtype, whole, n) * scale);
}

static void cpu_add_scaled(struct backend *b, struct tensor x, struct tensor y, float scale,
                           struct tensor out)
{
    if (cpu_has_failed(b))
        return;
#pragma omp parallel for num_threads(b->n_threads)
    for (int64_t row = 0; row < out.rows; row++) {
        if (x.dtype == DTYPE_F32 && y.dtype == DTYPE_F32 && out.dtype == DTYPE_F32)
            add_scaled_row(&x, &y, scale, &out, row, DTYPE_F32, DTYPE_F32, DTYPE_F32);
        else if (x.dtype == DTYPE_BF16 && y.dtype == DTYPE_BF16 && out.dtype == DTYPE_BF16)
            add_scaled_row(&x, &y, scale, &out, row, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16);
        else
            add_scaled_row(&x, &y, scale, &out, row, x.dtype, y.dtype, out.dtype);
    }
}

static void cpu_add(struct backend *b, struct tensor x, struct tensor y, struct tensor out)
{
    cpu_add_scaled(b, x, y, 1.0f, out);
}

/* gate, up and y of one dtype, no activation. */
SIMD_INLINE void silu_mul_plain(const struct tensor *gate, const struct tensor *up, const struct tensor *y,
                                int64_t row, const enum dtype dtype)
{
    const void *gate_row = simd_row(gate, row), *up_row = simd_row(up, row);
    void *y_row = simd_row(y, row);
    int64_t n = y->cols, whole = n / SIMD_WIDTH * SIMD_WIDTH;
    for (int64_t i = 0; i < whole; i += SIMD_WIDTH)
        simd_put(y_row, dtype, i, simd_silu(simd_get(gate_row, dtype, i)) * simd_get(up_row, dtype, i));
    if (whole < n)
        simd_put_tail(y_row, dtype, whole, n,
                      simd_silu(simd_get_tail(gate_row, dtype, whole, n)) *
                          simd_get_tail(up_row, dtype, whole, n));
}

static void silu_mul_any(const struct tensor *gate, const struct tensor *up, const struct tensor *activation,
                         const struct tensor *y, int64_t row)
{
    const void *gate_row = simd_row(gate, row), *up_row = simd_row(up, row);
    void *y_row = simd_row(y, row);
    void *activation_row = activation->data == NULL ? NULL : simd_row(activation, row);
    int64_t n = y->cols;
    for (int64_t i = 0; i < n; i += SIMD_WIDTH) {
        vfloat silu = simd_silu(simd_read(gate_row, gate->dtype, i, n));
        vfloat product = silu * simd_read(up_row, up->dtype, i, n);
        if (activation_row != NULL)
            simd_write(activation_row, activation->dtype, i, n, silu);
        simd_write(y_row, y->dtype, i, n, product);
    }
}

static void silu_mul_row(const struct tensor *gate, const struct tensor *up, const struct tensor *activation,
                         const struct tensor *y, int64_t row)
{
    bool is_plain = activation->data == NULL && gate->dtype == y->dtype && up->dtype == y->dtype;
    if (is_plain && y->dtype == DTYPE_F32)
        silu_mul_plain(gate, up, y, row, DTYPE_F32);
    else if (is_plain && y->dtype == DTYPE_BF16)
        silu_mul_plain(gate, up, y, row, DTYPE_BF16);
    else
        silu_mul_any(gate, up, activation, y, row);
}

static void cpu_silu_mul(struct backend *b, struct tensor gate, struct tensor up, struct tensor activation,
                         struct tensor y)
{
    if (cpu_has_failed(b))
        return;
#pragma omp parallel for num_threads(b->n_threads)
    for (int64_t row = 0; row < y.rows; row++)
        silu_mul_row(&gate, &up, &activation, &y, row);
}

/* One gate for each element. */
static void softplus_gate_elements(const struct tensor *x, const struct tensor *gate, const struct tensor *y,
                                   int64_t row)
{
    const void *x_row = simd_row(x, row), *gate_row = simd_row(gate, row);
    void *y_row = simd_row(y, row);
    int64_t n = y->cols;
    for (int64_t i = 0; i < n; i += SIMD_WIDTH) {
        vfloat factor = simd_softplus(simd_read(gate_row, gate->dtype, i, n));
        simd_write(y_row, y->dtype, i, n, simd_read(x_row, x->dtype, i, n) * factor);
    }
}

/* One gate for each head of head_dim elements: as many at once as a vector holds. */
SIMD_INLINE void softplus_gate_heads(const struct tensor *x, const struct tensor *gate, int head_dim,
                                     const struct tensor *y, int64_t row, const enum dtype x_dtype,
                                     const enum dtype y_dtype)
{
    const void *x_row = simd_row(x, row), *gate_row = simd_row(gate, row);
    void *y_row = simd_row(y, row);
    float factors[SIMD_WIDTH];
    for (int64_t head = 0; head < gate->cols; head++) {
        if (head % SIMD_WIDTH == 0)
            simd_store(factors, simd_softplus(simd_read(gate_row, gate->dtype, head, gate->cols)));
        const vfloat factor = simd_set(factors[head % SIMD_WIDTH]);
        int64_t i = head * head_dim, end = i + head_dim;
        for (; i + SIMD_WIDTH <= end; i += SIMD_WIDTH)
            simd_put(y_row, y_dtype, i, simd_get(x_row, x_dtype, i) * factor);
        if (i < end)
            simd_put_tail(y_row, y_dtype, i, end, simd_get_tail(x_row, x_dtype, i, end) * factor);
    }
}

static void softplus_gate_row(const struct tensor *x, const struct tensor *gate, int head_dim,
                              const struct tensor *y, int64_t row)
{
    if (gate->cols == x->cols)
        softplus_gate_elements(x, gate, y, row);
    else if (x->dtype == DTYPE_F32 && y->dtype == DTYPE_F32)
        softplus_gate_heads(x, gate, head_dim, y, row, DTYPE_F32, DTYPE_F32);
    else if (x->dtype == DTYPE_BF16 && y->dtype == DTYPE_BF16)
        softplus_gate_heads(x, gate, head_dim, y, row, DTYPE_BF16, DTYPE_BF16);
    else
        softplus_gate_heads(x, gate, head_dim, y, row, x->dtype, y->dtype);
}

static void cpu_softplus_gate(struct backend *b, struct tensor x, struct tensor gate, int head_dim,
                              struct tensor y)
{
    if (cpu_has_failed(b))
        return;
#pragma omp parallel for num_threads(b->n_threads)
    for (int64_t row = 0; row < y.rows; row++)
        softplus_gate_row(&x, &gate, head_dim, &y, row);
}

void CPU_NAME(cpu_fill_elementwise)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_elementwise)(struct backend_ops *ops)
{
    ops->add = cpu_add;
    ops->add_scaled = cpu_add_scaled;
    ops->silu_mul = cpu_silu_mul;
    ops->softplus_gate = cpu_softplus_gate;
}
