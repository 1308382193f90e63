/* gathered_linear's rows, combine_slots, ungroup_slots: rows moved to experts and back. Bound by memory
 * bandwidth. */
#include "kernels/cuda/device.h"

struct gather_slots_op {
    struct tensor x;
    const int32_t *order;
    int top_k;
    struct tensor xg;

    template <int W> __device__ void run(int64_t row, int64_t col) const
    {
        float a[W];
        load_row(x, (int64_t)(order[row] / top_k), col, a);
        store_row(xg, row, col, a);
    }
};

void cuda_gather_slots(struct backend *b, struct tensor x, const struct expert_groups *groups,
                       struct tensor xg)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda != NULL)
        launch_rowwise(cuda, "gather_slots", groups->n_tokens * groups->top_k, x.cols,
                       is_wide(x) && is_wide(xg), gather_slots_op{x, groups->order, groups->top_k, xg});
}

struct combine_op {
    struct tensor yg;
    const int32_t *places;
    int top_k;
    struct tensor weights;
    float scale;
    struct tensor out;

    template <int W> __device__ void run(int64_t row, int64_t col) const
    {
        float sum[W] = {};
        for (int j = 0; j < top_k; j++) {
            float a[W], weight = load(weights, row, j);
            load_row(yg, (int64_t)places[row * top_k + j], col, a);
#pragma unroll
            for (int i = 0; i < W; i++)
                sum[i] += weight * a[i];
        }
#pragma unroll
        for (int i = 0; i < W; i++)
            sum[i] *= scale;
        store_row(out, row, col, sum);
    }
};

void cuda_combine_slots(struct backend *b, struct tensor yg, const struct expert_groups *groups,
                        struct tensor weights, float scale, struct tensor out)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda != NULL)
        launch_rowwise(cuda, "combine_slots", groups->n_tokens, out.cols, is_wide(yg) && is_wide(out),
                       combine_op{yg, groups->places, groups->top_k, weights, scale, out});
}

/* A row of the grid is one slot of one selected token. */
struct ungroup_op {
    struct tensor yg;
    const int32_t *places;
    int top_k;
    struct tensor weights;
    const int32_t *rows;
    struct tensor out;

    template <int W> __device__ void run(int64_t row, int64_t col) const
    {
        int64_t i = row / top_k, j = row % top_k, token = rows[i];
        float a[W], weight = weights.data == NULL ? 1.0f : load(weights, token, j);
        load_row(yg, (int64_t)places[token * top_k + j], col, a);
#pragma unroll
        for (int k = 0; k < W; k++)
            a[k] *= weight;
        store_row(out, i, j * yg.cols + col, a);
    }
};

void cuda_ungroup_slots(struct backend *b, struct tensor yg, const struct expert_groups *groups,
                        struct tensor weights, struct row_list rows, struct tensor out)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL)
        return;
    const int32_t *index =
        static_cast<const int32_t *>(staging_upload(cuda, rows.index, (size_t)rows.n * sizeof(int32_t)));
    if (index != NULL)
        launch_rowwise(cuda, "ungroup_slots", rows.n * groups->top_k, yg.cols, is_wide(yg) && is_wide(out),
                       ungroup_op{yg, groups->places, groups->top_k, weights, index, out});
}
