/* embed, gather_rows and collect's gathering: rows copied and converted. Bound by memory bandwidth. */
#include "kernels/cuda/device.h"

struct gather_op {
    struct tensor from;
    const int32_t *index;
    struct tensor out;

    template <int W> __device__ void run(int64_t row, int64_t col) const
    {
        float a[W];
        load_row(from, (int64_t)index[row], col, a);
        store_row(out, row, col, a);
    }
};

/* int32 rows (expert indices) and float16 outputs, one element at a time: both are small or rare. */
struct gather_any_op {
    struct tensor from;
    const int32_t *index;
    struct tensor out;

    template <int W> __device__ void run(int64_t row, int64_t col) const
    {
        int64_t at = row * out.stride + col, source = (int64_t)index[row];
        if (from.dtype == DTYPE_I32)
            static_cast<int32_t *>(out.data)[at] =
                static_cast<const int32_t *>(from.data)[source * from.stride + col];
        else
            store_any(out.data, out.dtype, at, load_any(from, source, col));
    }
};

static bool is_common(enum dtype dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_BF16;
}

static void gather(struct cuda_backend *cuda, const char *what, const struct tensor &from,
                   const int32_t *index, const struct tensor &out)
{
    if (is_common(from.dtype) && is_common(out.dtype))
        launch_rowwise(cuda, what, out.rows, out.cols, is_wide(from) && is_wide(out),
                       gather_op{from, index, out});
    else
        launch_rowwise(cuda, what, out.rows, out.cols, false, gather_any_op{from, index, out});
}

void cuda_embed(struct backend *b, struct tensor table, const int32_t *ids, struct tensor out)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda != NULL)
        gather(cuda, "embed", table, ids, out);
}

void cuda_gather_rows(struct backend *b, struct tensor x, struct row_list rows, struct tensor out)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL)
        return;
    const int32_t *index =
        static_cast<const int32_t *>(staging_upload(cuda, rows.index, (size_t)rows.n * sizeof(int32_t)));
    if (index != NULL)
        gather(cuda, "gather_rows", x, index, out);
}

/* Elements, not rows: a piece may begin and end anywhere in a row. */
__global__ void collect_kernel(struct collection c)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < c.n;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = (c.first + i) / c.x.cols, col = (c.first + i) % c.x.cols;
        int64_t source = c.rows == NULL ? row : (int64_t)c.rows[row];
        if (c.x.dtype != DTYPE_I32)
            store_any(c.to, c.dtype, i, load_any(c.x, source, col));
        else if (c.dtype == DTYPE_I64)
            static_cast<int64_t *>(c.to)[i] =
                static_cast<const int32_t *>(c.x.data)[source * c.x.stride + col];
        else
            static_cast<int32_t *>(c.to)[i] =
                static_cast<const int32_t *>(c.x.data)[source * c.x.stride + col];
    }
}

/* To float16, with a look at what becomes infinite by it. */
__global__ void collect_half_kernel(struct collection c)
{
    int n_overflow = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < c.n;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = (c.first + i) / c.x.cols, col = (c.first + i) % c.x.cols;
        float value = load_any(c.x, c.rows == NULL ? row : (int64_t)c.rows[row], col);
        uint16_t bits = __half_as_ushort(__float2half_rn(value));
        static_cast<uint16_t *>(c.to)[i] = bits;
        n_overflow += isfinite(value) && (bits & 0x7fffu) == 0x7c00u;
    }
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        n_overflow += __shfl_xor_sync(ALL_LANES, n_overflow, offset);
    if (threadIdx.x % WARP == 0 && n_overflow > 0)
        atomicAdd(c.n_overflow, (unsigned long long)n_overflow);
}

/* The wide way for rows that a piece holds whole. */
struct collect_op {
    struct collection c;

    template <int W> __device__ void run(int64_t row, int64_t col) const
    {
        float a[W];
        struct tensor out = {c.to, c.dtype, c.n / c.x.cols, c.x.cols, c.x.cols};
        load_row(c.x, c.rows == NULL ? row : (int64_t)c.rows[row], col, a);
        store_row(out, row, col, a);
    }
};

void collect_launch(struct cuda_backend *cuda, const struct collection *collection)
{
    const struct collection &c = *collection;
    if (c.first == 0 && c.n % c.x.cols == 0 && is_common(c.x.dtype) && is_common(c.dtype)) {
        launch_rowwise(cuda, "collect", c.n / c.x.cols, c.x.cols, is_wide(c.x), collect_op{c});
        return;
    }
    unsigned blocks = (unsigned)min64(divide_up(c.n, 256), (int64_t)cuda->n_processors * 16);
    launch(cuda, "collect", c.n_overflow == NULL ? collect_kernel : collect_half_kernel, dim3(blocks),
           dim3(256), 0, c);
}
