/* Moving rows: embeddings, picked rows, and the capture's way out. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

static bool is_vector_dtype(enum dtype dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_BF16;
}

static void convert_row(void *to, enum dtype to_dtype, const void *from, enum dtype from_dtype, int64_t n)
{
    if (to_dtype == from_dtype || !is_vector_dtype(to_dtype) || !is_vector_dtype(from_dtype)) {
        dtype_convert(to, to_dtype, from, from_dtype, (size_t)n);
        return;
    }
    for (int64_t i = 0; i < n; i += SIMD_WIDTH)
        simd_write(to, to_dtype, i, n, simd_read(from, from_dtype, i, n));
}

/* to[i] = from[index[i]], or from[i] where index is NULL; i < to.rows. */
static void pick_rows(struct backend *b, struct tensor from, const int32_t *index, struct tensor to)
{
    if (cpu_has_failed(b))
        return;
#pragma omp parallel for num_threads(b->n_threads)
    for (int64_t i = 0; i < to.rows; i++) {
        int64_t row = index == NULL ? i : index[i];
        convert_row(tensor_row(&to, i), to.dtype, tensor_row(&from, row), from.dtype, to.cols);
    }
}

static void cpu_embed(struct backend *b, struct tensor table, const int32_t *ids, struct tensor out)
{
    pick_rows(b, table, ids, out);
}

static void cpu_gather_rows(struct backend *b, struct tensor x, struct row_list rows, struct tensor out)
{
    out.rows = rows.n;
    pick_rows(b, x, rows.index, out);
}

static void cpu_collect(struct backend *b, struct tensor x, const int32_t *rows, int64_t n, enum dtype dtype,
                        void *host)
{
    pick_rows(b, x, rows, tensor_make(host, dtype, n, x.cols));
}

void CPU_NAME(cpu_fill_rows)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_rows)(struct backend_ops *ops)
{
    ops->embed = cpu_embed;
    ops->gather_rows = cpu_gather_rows;
    ops->collect = cpu_collect;
}
