/* The one tensor-core instruction that our own kernels use: PTX's mma.m16n8k16, bfloat16 in, float32
 * accumulated (compute capability 8.0 and later). Where a lane's elements lie is fixed by PTX (ISA manual,
 * "Matrix fragments for mma.m16n8k16"); with g = lane / 4 and t = lane % 4: a[0..3]: rows g, g+8, g, g+8;
 * columns 2t, 2t+1 of the first and then of the second eight; two elements a word b[0..1]: rows 2t, 2t+1 of
 * the first and then of the second eight; column g c[0..3]: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1) */
#ifndef ACTDUMP_KERNELS_CUDA_TENSOR_CORE_H
#define ACTDUMP_KERNELS_CUDA_TENSOR_CORE_H

#include <cuda_runtime.h>

static __device__ __forceinline__ int mma_row(int lane, int element)
{
    return lane / 4 + (element < 2 ? 0 : 8);
}

static __device__ __forceinline__ int mma_col(int lane, int element)
{
    return lane % 4 * 2 + element % 2;
}

#ifdef __CUDACC__
/* c[16, 8] += a[16, 16] b[16, 8]; all lanes of the warp together. */
static __device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four 8 x 8 matrices of 16-bit elements from shared memory, each transposed (PTX's ldmatrix.x4.trans): lanes
 * 8i to 8i+7 name the rows of matrix i, 16 bytes each and aligned to that; a lane gets, of each matrix, the
 * elements (2t, g) and (2t+1, g). That is an operand b whose rows lie as matrix rows in memory. */
static __device__ __forceinline__ void load_transposed(uint32_t (&out)[4], const uint16_t *row)
{
    uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}
#else
#include <emulated_mma.h>
#endif

#endif
