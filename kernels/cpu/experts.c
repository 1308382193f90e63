/* The ways of a mixture's tokens: into the order of their experts, and back. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

#include <assert.h>

#define COMBINE_VECTORS 8

/* A counting sort: slots of an expert keep their order. It is short beside the experts' products, so one
 * thread. */
static void cpu_group_experts(struct backend *b, struct tensor indices, struct expert_groups *groups)
{
    int32_t *offsets = groups->offsets;

    if (cpu_has_failed(b))
        return;
    memset(offsets, 0, ((size_t)groups->n_experts + 1) * sizeof *offsets);
    for (int64_t t = 0; t < groups->n_tokens; t++) {
        const int32_t *chosen = tensor_row(&indices, t);
        for (int k = 0; k < groups->top_k; k++) {
            assert(chosen[k] >= 0 && chosen[k] < groups->n_experts);
            offsets[chosen[k] + 1]++;
        }
    }
    for (int e = 0; e < groups->n_experts; e++)
        offsets[e + 1] += offsets[e];
    /* offsets[e] serves as the next free place of expert e, and is its end afterwards: one expert too far on.
     */
    for (int64_t t = 0; t < groups->n_tokens; t++) {
        const int32_t *chosen = tensor_row(&indices, t);
        for (int k = 0; k < groups->top_k; k++) {
            int32_t slot = (int32_t)(t * groups->top_k + k), place = offsets[chosen[k]]++;
            groups->order[place] = slot;
            groups->places[slot] = place;
        }
    }
    memmove(offsets + 1, offsets, (size_t)groups->n_experts * sizeof *offsets);
    offsets[0] = 0;
}

/* A slot's weight, or 1 where there are none. */
static float get_weight(const struct tensor *weights, int64_t token, int64_t slot)
{
    if (weights->data == NULL)
        return 1;
    const void *row = simd_row(weights, token);
    return weights->dtype == DTYPE_F32 ? ((const float *)row)[slot]
                                       : bf16_to_f32(((const uint16_t *)row)[slot]);
}

/* n_vectors vectors of a token's columns from `first` on, sums in registers. */
SIMD_INLINE void combine_columns(const struct tensor *yg, const struct expert_groups *groups,
                                 const struct tensor *weights, float scale, const struct tensor *out,
                                 int64_t token, int64_t first, const int n_vectors, const bool is_whole)
{
    const int32_t *places = groups->places + token * groups->top_k;
    vfloat sums[COMBINE_VECTORS] = {0};
    for (int k = 0; k < groups->top_k; k++) {
        const void *from = simd_row(yg, places[k]);
        float weight = get_weight(weights, token, k);
        for (int v = 0; v < n_vectors; v++) {
            int64_t i = first + v * SIMD_WIDTH;
            sums[v] +=
                (is_whole ? simd_get(from, yg->dtype, i) : simd_read(from, yg->dtype, i, out->cols)) * weight;
        }
    }
    for (int v = 0; v < n_vectors; v++)
        simd_write(simd_row(out, token), out->dtype, first + v * SIMD_WIDTH, out->cols, sums[v] * scale);
}

static void combine_token(const struct tensor *yg, const struct expert_groups *groups,
                          const struct tensor *weights, float scale, const struct tensor *out, int64_t token)
{
    const int64_t step = COMBINE_VECTORS * SIMD_WIDTH;
    int64_t i = 0;
    for (; i + step <= out->cols; i += step)
        combine_columns(yg, groups, weights, scale, out, token, i, COMBINE_VECTORS, true);
    for (; i < out->cols; i += SIMD_WIDTH)
        combine_columns(yg, groups, weights, scale, out, token, i, 1, false);
}

static void cpu_combine_slots(struct backend *b, struct tensor yg, const struct expert_groups *groups,
                              struct tensor weights, float scale, struct tensor out)
{
    if (cpu_has_failed(b))
        return;
#pragma omp parallel for num_threads(b->n_threads)
    for (int64_t token = 0; token < groups->n_tokens; token++)
        combine_token(&yg, groups, &weights, scale, &out, token);
}

static void ungroup_token(const struct tensor *yg, const struct expert_groups *groups,
                          const struct tensor *weights, int64_t token, char *to, enum dtype dtype)
{
    for (int k = 0; k < groups->top_k; k++) {
        const void *from = tensor_row(yg, groups->places[token * groups->top_k + k]);
        float weight = get_weight(weights, token, k);
        for (int64_t i = 0; i < yg->cols; i += SIMD_WIDTH)
            simd_write(to, dtype, i, yg->cols, simd_read(from, yg->dtype, i, yg->cols) * weight);
        to += (size_t)yg->cols * dtype_size(dtype);
    }
}

static void cpu_ungroup_slots(struct backend *b, struct tensor yg, const struct expert_groups *groups,
                              struct tensor weights, struct row_list rows, struct tensor out)
{
    if (cpu_has_failed(b))
        return;
#pragma omp parallel for num_threads(b->n_threads)
    for (int64_t i = 0; i < rows.n; i++)
        ungroup_token(&yg, groups, &weights, rows.index[i], tensor_row(&out, i), out.dtype);
}

void CPU_NAME(cpu_fill_experts)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_experts)(struct backend_ops *ops)
{
    ops->group_experts = cpu_group_experts;
    ops->combine_slots = cpu_combine_slots;
    ops->ungroup_slots = cpu_ungroup_slots;
}
