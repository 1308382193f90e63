/* route: scores and the top K. Bound by latency; a warp a token, whose lanes hold the scores in shared
 * memory, since E is small. Ties go to the lower index. A not-a-number never wins while another expert is
 * left, so that indices are always those of experts. */
#include "kernels/cuda/device.h"

#define WARPS 4

struct routed {
    struct route_args args;
    int n_experts;
};

/* What wins: a larger score, or an equal one of a lower index. */
static __device__ __forceinline__ bool beats(float a, int a_index, float b, int b_index)
{
    return a > b || (a == b && a_index < b_index);
}

/* The best of `scores` (in shared memory, -inf where taken or not a number), known to all lanes. */
static __device__ __forceinline__ int warp_best(const float *scores, int n, int lane)
{
    float best = -INFINITY;
    int index = n;
    for (int e = lane; e < n; e += WARP) {
        if (beats(scores[e], e, best, index)) {
            best = scores[e];
            index = e;
        }
    }
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, best, offset);
        int other_index = __shfl_xor_sync(ALL_LANES, index, offset);
        if (beats(other, other_index, best, index)) {
            best = other;
            index = other_index;
        }
    }
    return index;
}

static __device__ __forceinline__ float sigmoid_score(float logit, float softcap)
{
    if (softcap > 0)
        logit = tanhf(logit / softcap) * softcap;
    return 1.0f / (1.0f + expf(-logit));
}

/* weights[e] of every expert, and what they are chosen by. Softmax keeps the order of logits, so those
 * choose. */
static __device__ void score_experts(const struct routed &r, int64_t token, int lane, float *weights,
                                     float *choice)
{
    float largest = -INFINITY, sum = 0;
    for (int e = lane; e < r.n_experts; e += WARP) {
        float logit = load(r.args.logits, token, e);
        weights[e] = logit;
        largest = fmaxf(largest, logit);
    }
    if (r.args.router == ROUTER_SOFTMAX) {
        largest = warp_max(largest);
        for (int e = lane; e < r.n_experts; e += WARP)
            sum += expf(weights[e] - largest);
        sum = warp_sum(sum);
    }
    for (int e = lane; e < r.n_experts; e += WARP) {
        float logit = weights[e], chosen_by = logit;
        if (r.args.router == ROUTER_SOFTMAX) {
            weights[e] = expf(logit - largest) / sum;
        } else {
            weights[e] = sigmoid_score(logit, r.args.softcap);
            chosen_by = weights[e] + (r.args.selection_bias == NULL ? 0.0f : r.args.selection_bias[e]);
        }
        choice[e] = chosen_by == chosen_by ? chosen_by : -INFINITY;
    }
}

__global__ void route_kernel(struct routed r)
{
    SHARED_MEMORY(memory);
    int lane = (int)threadIdx.x, warp = (int)threadIdx.y, top_k = r.args.top_k;
    float *weights = reinterpret_cast<float *>(memory) + (int64_t)warp * (2 * r.n_experts + 2 * top_k);
    float *choice = weights + r.n_experts, *chosen_weights = choice + r.n_experts;
    int32_t *chosen = reinterpret_cast<int32_t *>(chosen_weights + top_k);
    int64_t token = (int64_t)blockIdx.x * WARPS + warp;
    if (token >= r.args.logits.rows)
        return;
    score_experts(r, token, lane, weights, choice);
    __syncwarp();
    float total = 0;
    for (int j = 0; j < top_k; j++) {
        int index = warp_best(choice, r.n_experts, lane);
        if (lane == 0) {
            chosen[j] = index;
            chosen_weights[j] = weights[index];
            /* Below every choice, also below -inf: nothing beats from there, not even itself. */
            choice[index] = __uint_as_float(0x7fc00000u);
        }
        __syncwarp();
        total += weights[index];
    }
    for (int j = lane; j < top_k; j += WARP) {
        float weight = r.args.router == ROUTER_SOFTMAX ? chosen_weights[j] : chosen_weights[j] / total;
        store(r.args.weights, token, j, weight);
        static_cast<int32_t *>(r.args.indices.data)[token * r.args.indices.stride + j] = chosen[j];
    }
}

void cuda_route(struct backend *b, const struct route_args *args)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL)
        return;
    struct routed r = {*args, (int)args->logits.cols};
    size_t shared_bytes = (size_t)WARPS * (2 * r.n_experts + 2 * args->top_k) * sizeof(float);
    launch(cuda, "route", route_kernel, dim3((unsigned)divide_up(args->logits.rows, WARPS)),
           dim3(WARP, WARPS), shared_bytes, r);
}
