/* group_experts: a counting sort of slots by expert, stable. Bound by latency; three small launches. Blocks
 * take stretches of slots. Counting uses integer atomics in shared memory, whose order does not matter;
 * placing keeps the slots' order by letting one thread place all slots of an expert within a stretch. */
#include "kernels/cuda/device.h"

#define STRETCH 512 /* slots a block */
#define THREADS 256

/* counts[block][expert] */
__global__ void count_kernel(struct tensor indices, int64_t n_slots, int top_k, int n_experts,
                             int32_t *counts)
{
    SHARED_MEMORY(memory);
    int32_t *mine = reinterpret_cast<int32_t *>(memory);
    for (int e = threadIdx.x; e < n_experts; e += blockDim.x)
        mine[e] = 0;
    __syncthreads();
    int64_t first = (int64_t)blockIdx.x * STRETCH;
    for (int64_t s = first + threadIdx.x; s < n_slots && s < first + STRETCH; s += blockDim.x)
        atomicAdd(&mine[static_cast<const int32_t *>(indices.data)[s / top_k * indices.stride + s % top_k]],
                  1);
    __syncthreads();
    for (int e = threadIdx.x; e < n_experts; e += blockDim.x)
        counts[(int64_t)blockIdx.x * n_experts + e] = mine[e];
}

/* One block: offsets from the counts, and counts turned into each block's first place for each expert. */
__global__ void offset_kernel(int32_t *counts, int n_blocks, int n_experts, int32_t *offsets)
{
    SHARED_MEMORY(memory);
    int32_t *totals = reinterpret_cast<int32_t *>(memory);
    for (int e = threadIdx.x; e < n_experts; e += blockDim.x) {
        int32_t total = 0;
        for (int i = 0; i < n_blocks; i++)
            total += counts[(int64_t)i * n_experts + e];
        totals[e] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t before = 0;
        for (int e = 0; e < n_experts; e++) {
            int32_t total = totals[e];
            totals[e] = offsets[e] = before;
            before += total;
        }
        offsets[n_experts] = before;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n_experts; e += blockDim.x) {
        int32_t place = totals[e];
        for (int i = 0; i < n_blocks; i++) {
            int32_t count = counts[(int64_t)i * n_experts + e];
            counts[(int64_t)i * n_experts + e] = place;
            place += count;
        }
    }
}

__global__ void place_kernel(struct tensor indices, int64_t n_slots, int top_k, int n_experts,
                             const int32_t *places, int32_t *order, int32_t *place_of)
{
    __shared__ int32_t experts[STRETCH];
    int64_t first = (int64_t)blockIdx.x * STRETCH;
    int n = (int)(n_slots - first < STRETCH ? n_slots - first : STRETCH);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int64_t s = first + i;
        experts[i] = static_cast<const int32_t *>(indices.data)[s / top_k * indices.stride + s % top_k];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n_experts; e += blockDim.x) {
        int32_t place = places[(int64_t)blockIdx.x * n_experts + e];
        for (int i = 0; i < n; i++) {
            if (experts[i] == e) {
                order[place] = (int32_t)(first + i);
                place_of[first + i] = place++;
            }
        }
    }
}

bool group_sizes_send(struct cuda_backend *cuda, const struct expert_groups *groups)
{
    struct group_sizes *sizes = &cuda->sizes;
    int n = groups->n_experts + 1;
    sizes->offsets = NULL;
    if (n > sizes->capacity) {
        /* the last copy may still be on its way */
        if (!cuda_check(cuda, cudaEventSynchronize(sizes->arrived),
                        "waiting for the experts' token counts") ||
            !cuda_check(cuda, cudaFreeHost(sizes->host), "releasing pinned host memory"))
            return false;
        sizes->host = NULL;
        sizes->capacity = 0;
        if (cuda_allocate_pinned(cuda, reinterpret_cast<void **>(&sizes->host), (size_t)n * sizeof(int32_t),
                                 "the experts' token counts", &cuda->base.error) != STATUS_OK)
            return false;
        sizes->capacity = n;
    }
    if (!cuda_check(cuda,
                    cudaMemcpyAsync(sizes->host, groups->offsets, (size_t)n * sizeof(int32_t),
                                    cudaMemcpyDeviceToHost, cuda->compute),
                    "copying the experts' token counts") ||
        !cuda_check(cuda, cudaEventRecord(sizes->arrived, cuda->compute), "recording an event"))
        return false;
    sizes->offsets = groups->offsets;
    return true;
}

void cuda_group_experts(struct backend *b, struct tensor indices, struct expert_groups *groups)
{
    struct cuda_backend *cuda = cuda_begin(b);
    if (cuda == NULL)
        return;
    int64_t n_slots = groups->n_tokens * groups->top_k, n_blocks = divide_up(n_slots, STRETCH);
    int n_experts = groups->n_experts;
    size_t shared_bytes = (size_t)n_experts * sizeof(int32_t);
    int32_t *counts = static_cast<int32_t *>(
        scratch_take(cuda, (size_t)(n_blocks * n_experts) * sizeof(int32_t), "the experts' token counts"));
    launch(cuda, "group_experts", count_kernel, dim3((unsigned)n_blocks), dim3(THREADS), shared_bytes,
           indices, n_slots, groups->top_k, n_experts, counts);
    launch(cuda, "group_experts", offset_kernel, dim3(1), dim3(THREADS), shared_bytes, counts, (int)n_blocks,
           n_experts, groups->offsets);
    launch(cuda, "group_experts", place_kernel, dim3((unsigned)n_blocks), dim3(THREADS), 0, indices, n_slots,
           groups->top_k, n_experts, static_cast<const int32_t *>(counts), groups->order, groups->places);
    if (b->error.status == STATUS_OK)
        group_sizes_send(cuda, groups);
}
