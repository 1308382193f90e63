/* softmax of rows. Bound by memory bandwidth: three passes, of which the last two find the row in L1 or L2.
 */
#include "kernels/cuda/device.h"

__global__ void softmax_kernel(struct tensor x, struct tensor y)
{
    __shared__ float partial[WARP];
    int64_t row = blockIdx.x;
    float largest = -INFINITY, sum = 0;
    for (int64_t col = threadIdx.x; col < x.cols; col += blockDim.x)
        largest = fmaxf(largest, load(x, row, col));
    largest = block_reduce<true>(largest, partial);
    for (int64_t col = threadIdx.x; col < x.cols; col += blockDim.x)
        sum += expf(load(x, row, col) - largest);
    sum = block_reduce<false>(sum, partial);
    for (int64_t col = threadIdx.x; col < x.cols; col += blockDim.x)
        store(y, row, col, expf(load(x, row, col) - largest) / sum);
}

void cuda_softmax(struct backend *b, struct tensor x, struct tensor y)
{
    struct cuda_backend *cuda = cuda_begin(b);
    unsigned threads = x.cols <= 64 ? 32 : x.cols <= 512 ? 128 : 512;
    if (cuda != NULL)
        launch(cuda, "softmax", softmax_kernel, dim3((unsigned)x.rows), dim3(threads), 0, x, y);
}
