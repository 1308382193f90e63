/* The choice of experts. Everything is float32, whatever the logits are. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

#include <math.h>
#include <omp.h>

/* One thread's rows, `width` floats each: E rounded up to whole vectors. Lanes past E are never looked at. */
struct route_scratch {
    float *scores;    /* [E] weights before renormalization */
    float *selection; /* [E] what the choice goes by; -inf where chosen already */
};

/* tanh, relative error below 3e-7: near 0 an odd polynomial (our own fit), because the quotient cancels
 * there. */
static vfloat compute_tanh(vfloat x)
{
    vfloat q = x * x;
    vfloat p = q * -0.0057049705f + 0.0206390731f;
    p = p * q - 0.0537397109f;
    p = p * q + 0.1333144215f;
    p = p * q - 0.3333328194f;
    return simd_select(simd_abs(x) < simd_set(0.625f), x + x * q * p, 1.0f - 2.0f / (simd_exp(x + x) + 1.0f));
}

static void score_softmax(const struct route_args *args, int64_t token, float *scores)
{
    const void *logits = tensor_row(&args->logits, token);
    int64_t n = args->logits.cols;
    float largest = -INFINITY, sum = 0;

    for (int64_t i = 0; i < n; i += SIMD_WIDTH)
        simd_store(scores + i, simd_read(logits, args->logits.dtype, i, n));
    for (int64_t i = 0; i < n; i++)
        largest = scores[i] > largest ? scores[i] : largest;
    for (int64_t i = 0; i < n; i += SIMD_WIDTH)
        simd_store(scores + i, simd_exp(simd_load(scores + i) - largest));
    for (int64_t i = 0; i < n; i++)
        sum += scores[i];
    for (int64_t i = 0; i < n; i += SIMD_WIDTH)
        simd_store(scores + i, simd_load(scores + i) / sum);
}

static void score_sigmoid(const struct route_args *args, int64_t token, float *scores)
{
    const void *logits = tensor_row(&args->logits, token);
    int64_t n = args->logits.cols;

    for (int64_t i = 0; i < n; i += SIMD_WIDTH) {
        vfloat x = simd_read(logits, args->logits.dtype, i, n);
        if (args->softcap > 0)
            x = compute_tanh(x / args->softcap) * args->softcap;
        simd_store(scores + i, simd_sigmoid(x));
    }
}

/* The expert of the largest selection score, the lowest index where equal. NaNs come last, in order of index.
 */
static int32_t choose_expert(const float *selection, const int32_t *chosen, int n_chosen, int64_t n)
{
    int32_t best = -1;

    for (int64_t e = 0; e < n; e++)
        if (selection[e] > (best < 0 ? -INFINITY : selection[best]))
            best = (int32_t)e;
    for (int32_t e = 0; best < 0; e++) {
        int i = 0;
        while (i < n_chosen && chosen[i] != e)
            i++;
        if (i == n_chosen)
            best = e;
    }
    return best;
}

static void write_weights(const struct route_args *args, int64_t token, const float *scores,
                          const int32_t *chosen)
{
    void *to = tensor_row(&args->weights, token);
    float sum = 0;

    for (int k = 0; k < args->top_k; k++)
        sum += scores[chosen[k]];
    for (int k = 0; k < args->top_k; k++) {
        float weight = args->router == ROUTER_SIGMOID ? scores[chosen[k]] / sum : scores[chosen[k]];
        if (args->weights.dtype == DTYPE_F32)
            ((float *)to)[k] = weight;
        else
            ((uint16_t *)to)[k] = f32_to_bf16(weight);
    }
}

static void route_token(const struct route_args *args, int64_t token, struct route_scratch scratch)
{
    int32_t *chosen = tensor_row(&args->indices, token);
    int64_t n = args->logits.cols;

    if (args->router == ROUTER_SOFTMAX)
        score_softmax(args, token, scratch.scores);
    else
        score_sigmoid(args, token, scratch.scores);
    for (int64_t e = 0; e < n; e++)
        scratch.selection[e] =
            scratch.scores[e] + (args->selection_bias != NULL ? args->selection_bias[e] : 0.0f);
    for (int k = 0; k < args->top_k; k++) {
        chosen[k] = choose_expert(scratch.selection, chosen, k, n);
        scratch.selection[chosen[k]] = -INFINITY;
    }
    write_weights(args, token, scratch.scores, chosen);
}

static void cpu_route(struct backend *b, const struct route_args *args)
{
    if (cpu_has_failed(b))
        return;
    int64_t width = (args->logits.cols + 15) / 16 * 16;
    float *memory = cpu_scratch(b, (size_t)(2 * width * b->n_threads) * sizeof(float));
    if (memory == NULL)
        return;
#pragma omp parallel num_threads(b->n_threads)
    {
        float *mine = memory + 2 * width * omp_get_thread_num();
        struct route_scratch scratch = {.scores = mine, .selection = mine + width};
#pragma omp for schedule(static)
        for (int64_t token = 0; token < args->logits.rows; token++)
            route_token(args, token, scratch);
    }
}

void CPU_NAME(cpu_fill_router)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_router)(struct backend_ops *ops)
{
    ops->route = cpu_route;
}
