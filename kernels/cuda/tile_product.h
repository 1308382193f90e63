/* Products of small matrices inside kernels: acc[64, 64] += A[64, K] B[K, 64], by a block of 128 threads,
 * elements given by functions of (row, column) so that scaling, masking and conversion happen on the way in.
 *
 * Two engines. The exact one multiplies in float32 on the ordinary units: for float32 loads. The split one is
 * for bfloat16 loads: it uses the tensor cores (bfloat16 in, float32 accumulated), with each operand given as
 * the sum of one or two bfloat16 terms. An operand that is bfloat16 already needs one term and loses nothing;
 * a float32 one in two terms keeps 16 bits of mantissa (an error of 2^-17 of each product). The product of
 * two second terms is dropped.
 *
 * Both have the same face: fragment, multiply, and each thread's elements by for_each. */
#ifndef ACTDUMP_KERNELS_CUDA_TILE_PRODUCT_H
#define ACTDUMP_KERNELS_CUDA_TILE_PRODUCT_H

#include "kernels/cuda/device.h"
#include "kernels/cuda/tensor_core.h"

#define TILE 64
#define TILE_DEPTH 32 /* of K in shared memory at a time */
#define TILE_THREADS 128

/* Which index of an operand's elements lies along memory: threads next to each other take neighbours of it.
 */
enum along { ALONG_K, ALONG_OUTER };

/* Place of the i-th element of a [64 x TILE_DEPTH] piece. */
static __device__ __forceinline__ void piece_place(enum along along, int i, int *outer, int *k)
{
    *outer = along == ALONG_K ? i / TILE_DEPTH : i % TILE;
    *k = along == ALONG_K ? i % TILE_DEPTH : i / TILE;
}

struct exact_product {
    /* Thread (row group of 8, column group of 16): rows 8 * (t / 16) + i, columns t % 16 + 16 * j. */
    struct fragment {
        float value[8][4];
    };
    struct shared {
        float a[TILE_DEPTH][TILE + 1], b[TILE_DEPTH][TILE + 1];
    };

    static __device__ __forceinline__ void clear(fragment &f)
    {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                f.value[i][j] = 0;
    }

    template <typename Function>
    static __device__ __forceinline__ void for_each(fragment &f, Function function)
    {
        int row = (int)threadIdx.x / 16 * 8, col = (int)threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                function(row + i, col + 16 * j, f.value[i][j]);
    }

    template <int A_TERMS, int B_TERMS, typename A, typename B>
    static __device__ __forceinline__ void multiply(fragment &f, shared &s, int depth, enum along a_along,
                                                    A a, enum along b_along, B b)
    {
        int row = (int)threadIdx.x / 16 * 8, col = (int)threadIdx.x % 16;
        for (int first = 0; first < depth; first += TILE_DEPTH) {
            __syncthreads(); /* what is in shared memory has been used */
            for (int i = (int)threadIdx.x; i < TILE * TILE_DEPTH; i += TILE_THREADS) {
                int outer, k;
                piece_place(a_along, i, &outer, &k);
                s.a[k][outer] = first + k < depth ? a(outer, first + k) : 0.0f;
                piece_place(b_along, i, &outer, &k);
                s.b[k][outer] = first + k < depth ? b(first + k, outer) : 0.0f;
            }
            __syncthreads();
            for (int k = 0; k < TILE_DEPTH; k++) {
                float left[8], right[4];
#pragma unroll
                for (int i = 0; i < 8; i++)
                    left[i] = s.a[k][row + i];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    right[j] = s.b[k][col + 16 * j];
#pragma unroll
                for (int i = 0; i < 8; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        f.value[i][j] += left[i] * right[j];
            }
        }
    }
};

/* A row of a piece in shared memory, in bfloat16: TILE_DEPTH and a gap, so that the eight rows that a
 * fragment's lanes read lie in different banks. */
#define SPLIT_STRIDE (TILE_DEPTH + 8)

struct split_product {
    /* Four warps, each 32 rows by 32 columns: 2 x 4 of the tensor cores' 16 x 8. */
    struct fragment {
        float value[2][4][4];
    };
    struct shared {
        uint16_t a[2][TILE][SPLIT_STRIDE], b[2][TILE][SPLIT_STRIDE]; /* [term][row or column][k] */
    };

    static __device__ __forceinline__ void clear(fragment &f)
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    f.value[i][j][e] = 0;
    }

    static __device__ __forceinline__ int warp_row()
    {
        return (int)threadIdx.x / WARP / 2 * 32;
    }
    static __device__ __forceinline__ int warp_col()
    {
        return (int)threadIdx.x / WARP % 2 * 32;
    }

    template <typename Function>
    static __device__ __forceinline__ void for_each(fragment &f, Function function)
    {
        int lane = (int)threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    function(warp_row() + 16 * i + mma_row(lane, e), warp_col() + 8 * j + mma_col(lane, e),
                             f.value[i][j][e]);
    }

    /* Two neighbours along k, as one word a term. */
    template <int TERMS>
    static __device__ __forceinline__ void put(uint16_t (&to)[2][TILE][SPLIT_STRIDE], int outer, int k,
                                               float first, float second)
    {
        uint32_t high = bf16_pair(first, second);
        *reinterpret_cast<uint32_t *>(&to[0][outer][k]) = high;
        if (TERMS == 2) {
            /* An infinity has no second term; its difference from itself would be a not-a-number. */
            float rest = isfinite(first) ? first - bf16_widen(high & 0xffffu) : 0.0f;
            float rest_second = isfinite(second) ? second - bf16_widen(high >> 16) : 0.0f;
            *reinterpret_cast<uint32_t *>(&to[1][outer][k]) = bf16_pair(rest, rest_second);
        }
    }

    /* Brings elements [0, 64) x [first, first + TILE_DEPTH) of an operand into shared memory; zero from
     * `depth` on. */
    template <int TERMS, typename Element>
    static __device__ __forceinline__ void bring(uint16_t (&to)[2][TILE][SPLIT_STRIDE], enum along along,
                                                 int first, int depth, Element element)
    {
        for (int i = (int)threadIdx.x; i < TILE * TILE_DEPTH / 2; i += TILE_THREADS) {
            int outer = along == ALONG_K ? i / (TILE_DEPTH / 2) : i % TILE;
            int k = 2 * (along == ALONG_K ? i % (TILE_DEPTH / 2) : i / TILE);
            float low = first + k < depth ? element(outer, first + k) : 0.0f;
            float high = first + k + 1 < depth ? element(outer, first + k + 1) : 0.0f;
            put<TERMS>(to, outer, k, low, high);
        }
    }

    static __device__ __forceinline__ void take_a(const uint16_t (&from)[TILE][SPLIT_STRIDE], int i, int k,
                                                  uint32_t (&a)[4])
    {
        int lane = (int)threadIdx.x % WARP, row = warp_row() + 16 * i + lane / 4, col = k + lane % 4 * 2;
        a[0] = *reinterpret_cast<const uint32_t *>(&from[row][col]);
        a[1] = *reinterpret_cast<const uint32_t *>(&from[row + 8][col]);
        a[2] = *reinterpret_cast<const uint32_t *>(&from[row][col + 8]);
        a[3] = *reinterpret_cast<const uint32_t *>(&from[row + 8][col + 8]);
    }

    static __device__ __forceinline__ void take_b(const uint16_t (&from)[TILE][SPLIT_STRIDE], int j, int k,
                                                  uint32_t (&b)[2])
    {
        int lane = (int)threadIdx.x % WARP, row = warp_col() + 8 * j + lane / 4, col = k + lane % 4 * 2;
        b[0] = *reinterpret_cast<const uint32_t *>(&from[row][col]);
        b[1] = *reinterpret_cast<const uint32_t *>(&from[row][col + 8]);
    }

    static __device__ __forceinline__ void multiply_terms(fragment &f,
                                                          const uint16_t (&a)[TILE][SPLIT_STRIDE],
                                                          const uint16_t (&b)[TILE][SPLIT_STRIDE])
    {
#pragma unroll
        for (int k = 0; k < TILE_DEPTH; k += 16) {
            uint32_t left[2][4], right[4][2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                take_a(a, i, k, left[i]);
#pragma unroll
            for (int j = 0; j < 4; j++)
                take_b(b, j, k, right[j]);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma_bf16(f.value[i][j], left[i], right[j]);
        }
    }

    template <int A_TERMS, int B_TERMS, typename A, typename B>
    static __device__ __forceinline__ void multiply(fragment &f, shared &s, int depth, enum along a_along,
                                                    A a, enum along b_along, B b)
    {
        for (int first = 0; first < depth; first += TILE_DEPTH) {
            __syncthreads(); /* what is in shared memory has been used */
            bring<A_TERMS>(s.a, a_along, first, depth, a);
            bring<B_TERMS>(s.b, b_along, first, depth, [&](int outer, int k) { return b(k, outer); });
            __syncthreads();
            multiply_terms(f, s.a[0], s.b[0]);
            if (A_TERMS == 2)
                multiply_terms(f, s.a[1], s.b[0]);
            if (B_TERMS == 2)
                multiply_terms(f, s.a[0], s.b[1]);
        }
    }
};

#endif
