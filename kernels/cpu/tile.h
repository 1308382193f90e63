/* Small matrix products in registers, for operations that work on tiles of their own (attention, the SSD
 * scan).
 *
 * A product sums left(row, k) * panel(k, column) over k. The right side comes in panels: TILE_COLS columns,
 * the last of a matrix padded with zeros, k-major: panel[k * TILE_COLS + column]. The left side is read
 * through two steps, so that it may lie either way. A block of at most TILE_ROWS rows times a panel stays in
 * registers: 6 x 2 vectors fill the 16 registers of AVX2, 12 x 2 use 24 of AVX-512's 32.
 *
 * Every element is summed in order of k, so how rows are cut into blocks changes no bit. */
#ifndef ACTDUMP_CPU_TILE_H
#define ACTDUMP_CPU_TILE_H

#include "kernels/cpu/simd.h"

#include <stddef.h>

#define TILE_COLS (2 * SIMD_WIDTH)
#if SIMD_WIDTH == 16
#define TILE_ROWS 12
#define TILE_MIDDLE_ROWS 8
#else
#define TILE_ROWS 6
#define TILE_MIDDLE_ROWS 4
#endif

/* The loop that follows has a small constant count: unrolled early enough for its arrays to become registers.
 */
#if defined(__clang__)
#define TILE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TILE_UNROLL _Pragma("GCC unroll 16")
#endif

/* The left side: element (row, k) is at[row * row_step + k * depth_step]. */
struct tile_left {
    const float *at;
    ptrdiff_t row_step, depth_step;
};

/* A block's accumulators: row r's vectors are at[r][0] and at[r][1]. */
struct tile_sums {
    vfloat at[TILE_ROWS][2];
};

/* Calls `block(rows, vectors, ...)`, an always-inlined function, with constants in place of the first two
 * arguments. */
#define TILE_CALL(rows, vectors, block, ...)                                                                 \
    do {                                                                                                     \
        if ((vectors) == 2) {                                                                                \
            TILE_CALL_ROWS_(rows, 2, block, __VA_ARGS__)                                                     \
        } else {                                                                                             \
            TILE_CALL_ROWS_(rows, 1, block, __VA_ARGS__)                                                     \
        }                                                                                                    \
    } while (0)

#define TILE_CALL_ROWS_(rows, vectors, block, ...)                                                           \
    switch (rows) {                                                                                          \
    case TILE_ROWS:                                                                                          \
        block(TILE_ROWS, vectors, __VA_ARGS__);                                                              \
        break;                                                                                               \
    case TILE_MIDDLE_ROWS:                                                                                   \
        block(TILE_MIDDLE_ROWS, vectors, __VA_ARGS__);                                                       \
        break;                                                                                               \
    case TILE_MIDDLE_ROWS / 2:                                                                               \
        block(TILE_MIDDLE_ROWS / 2, vectors, __VA_ARGS__);                                                   \
        break;                                                                                               \
    default:                                                                                                 \
        block(1, vectors, __VA_ARGS__);                                                                      \
        break;                                                                                               \
    }

/* Rows of the next block where `left` remain, one of TILE_CALL's cases; cut so that small blocks are rare. */
SIMD_INLINE int tile_block_rows(int64_t left)
{
    if (left >= TILE_ROWS && left != 2 * TILE_MIDDLE_ROWS)
        return TILE_ROWS;
    if (left >= TILE_MIDDLE_ROWS)
        return TILE_MIDDLE_ROWS;
    return left >= TILE_MIDDLE_ROWS / 2 ? TILE_MIDDLE_ROWS / 2 : 1;
}

SIMD_INLINE int64_t tile_round_up(int64_t n, int64_t step)
{
    return (n + step - 1) / step * step;
}

/* Panels of a matrix of n columns. */
SIMD_INLINE int64_t tile_panels(int64_t n)
{
    return (n + TILE_COLS - 1) / TILE_COLS;
}

/* Vectors of the panel that begins at column `first` of n. */
SIMD_INLINE int tile_vectors(int64_t first, int64_t n)
{
    return n - first > SIMD_WIDTH ? 2 : 1;
}

SIMD_INLINE void tile_zero(int rows, int vectors, struct tile_sums *sums)
{
    TILE_UNROLL
    for (int r = 0; r < rows; r++) {
        TILE_UNROLL
        for (int v = 0; v < vectors; v++)
            sums->at[r][v] = (vfloat){0};
    }
}

/* sums = from, rows `stride` apart. */
SIMD_INLINE void tile_load(int rows, int vectors, struct tile_sums *sums, const float *from, ptrdiff_t stride)
{
    TILE_UNROLL
    for (int r = 0; r < rows; r++) {
        TILE_UNROLL
        for (int v = 0; v < vectors; v++)
            sums->at[r][v] = simd_load(from + r * stride + v * SIMD_WIDTH);
    }
}

SIMD_INLINE void tile_store(int rows, int vectors, const struct tile_sums *sums, float *to, ptrdiff_t stride)
{
    TILE_UNROLL
    for (int r = 0; r < rows; r++) {
        TILE_UNROLL
        for (int v = 0; v < vectors; v++)
            simd_store(to + r * stride + v * SIMD_WIDTH, sums->at[r][v]);
    }
}

/* Row r times factors[r * step]. */
SIMD_INLINE void tile_scale(int rows, int vectors, struct tile_sums *sums, const float *factors,
                            ptrdiff_t step)
{
    TILE_UNROLL
    for (int r = 0; r < rows; r++) {
        vfloat factor = simd_set(factors[r * step]);
        TILE_UNROLL
        for (int v = 0; v < vectors; v++)
            sums->at[r][v] *= factor;
    }
}

/* sums += left * panel over `depth`. */
SIMD_INLINE void tile_multiply(int rows, int vectors, struct tile_sums *sums, struct tile_left left,
                               const float *panel, int64_t depth)
{
    for (int64_t k = 0; k < depth; k++) {
        vfloat right[2];
        TILE_UNROLL
        for (int v = 0; v < vectors; v++)
            right[v] = simd_load(panel + k * TILE_COLS + v * SIMD_WIDTH);
        TILE_UNROLL
        for (int r = 0; r < rows; r++) {
            vfloat value = simd_set(left.at[r * left.row_step + k * left.depth_step]);
            TILE_UNROLL
            for (int v = 0; v < vectors; v++)
                sums->at[r][v] = value * right[v] + sums->at[r][v];
        }
    }
}

/* One block of a product, and where it goes: rows `stride` apart. */
struct tile_product {
    struct tile_left left;
    const float *panel;
    int64_t depth;
    float *to;
    ptrdiff_t stride;
};

/* to = left * panel. For TILE_CALL. */
SIMD_INLINE void tile_product_set(int rows, int vectors, const struct tile_product *p)
{
    struct tile_sums sums;

    tile_zero(rows, vectors, &sums);
    tile_multiply(rows, vectors, &sums, p->left, p->panel, p->depth);
    tile_store(rows, vectors, &sums, p->to, p->stride);
}

/* to = to * factors + left * panel, row r's factor being factors[r * step]. For TILE_CALL. */
SIMD_INLINE void tile_product_add(int rows, int vectors, const struct tile_product *p, const float *factors,
                                  ptrdiff_t step)
{
    struct tile_sums sums;

    tile_load(rows, vectors, &sums, p->to, p->stride);
    tile_scale(rows, vectors, &sums, factors, step);
    tile_multiply(rows, vectors, &sums, p->left, p->panel, p->depth);
    tile_store(rows, vectors, &sums, p->to, p->stride);
}

#if SIMD_WIDTH == 16
/* Products of bfloat16 summed in float32, where the processor has them (AVX512_BF16; it takes numbers below
 * 2^-126 for zeros): two elements of depth that follow each other lie in one 32-bit word, on the left and in
 * panels, so `depth` counts words. Callers carry the same target. */
#define TILE_TARGET_BF16 __attribute__((target("avx512bf16")))

/* to = left * panel * scale. For TILE_CALL. */
TILE_TARGET_BF16 SIMD_INLINE void tile_product_set_bf16(int rows, int vectors, const struct tile_product *p,
                                                        float scale)
{
    struct tile_sums sums;

    tile_zero(rows, vectors, &sums);
    for (int64_t k = 0; k < p->depth; k++) {
        __m512bh right[2];
        TILE_UNROLL
        for (int v = 0; v < vectors; v++)
            right[v] = (__m512bh)simd_load(p->panel + k * TILE_COLS + v * SIMD_WIDTH);
        TILE_UNROLL
        for (int r = 0; r < rows; r++) {
            __m512bh value = (__m512bh)simd_set(p->left.at[r * p->left.row_step + k * p->left.depth_step]);
            TILE_UNROLL
            for (int v = 0; v < vectors; v++)
                sums.at[r][v] = _mm512_dpbf16_ps(sums.at[r][v], value, right[v]);
        }
    }
    TILE_UNROLL
    for (int r = 0; r < rows; r++) {
        TILE_UNROLL
        for (int v = 0; v < vectors; v++)
            sums.at[r][v] *= scale;
    }
    tile_store(rows, vectors, &sums, p->to, p->stride);
}
#endif

/* Panels of `rows` rows (the depth) of a matrix whose row r starts at from + r * stride elements. */
SIMD_INLINE void tile_pack(float *panels, const void *from, enum dtype dtype, int64_t stride, int64_t rows,
                           int64_t cols)
{
    for (int64_t r = 0; r < rows; r++) {
        const void *row = (const char *)from + (size_t)(r * stride) * dtype_size(dtype);
        for (int64_t c = 0; c < cols; c += SIMD_WIDTH) {
            float *panel = panels + c / TILE_COLS * rows * TILE_COLS;
            simd_store(panel + r * TILE_COLS + c % TILE_COLS, simd_read(row, dtype, c, cols));
        }
    }
}

/* Elements [c, c + 4) of a row, float32. */
SIMD_INLINE __m128 tile_load_four(const void *row, enum dtype dtype, int64_t c)
{
    if (dtype == DTYPE_F32)
        return _mm_loadu_ps((const float *)row + c);
    __m128i half = _mm_loadl_epi64((const __m128i *)(const void *)((const uint16_t *)row + c));
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), half));
}

SIMD_INLINE float tile_load_one(const void *row, enum dtype dtype, int64_t c)
{
    return dtype == DTYPE_F32 ? ((const float *)row)[c] : bf16_to_f32(((const uint16_t *)row)[c]);
}

/* Four rows of a matrix become four columns of a panel. */
SIMD_INLINE void tile_pack_four(float *panel, const char *from, enum dtype dtype, size_t row_bytes,
                                int64_t depth)
{
    int64_t c = 0;

    for (; c + 4 <= depth; c += 4) {
        __m128 a = tile_load_four(from, dtype, c), b = tile_load_four(from + row_bytes, dtype, c);
        __m128 d = tile_load_four(from + 2 * row_bytes, dtype, c),
               e = tile_load_four(from + 3 * row_bytes, dtype, c);
        _MM_TRANSPOSE4_PS(a, b, d, e);
        _mm_storeu_ps(panel + c * TILE_COLS, a);
        _mm_storeu_ps(panel + (c + 1) * TILE_COLS, b);
        _mm_storeu_ps(panel + (c + 2) * TILE_COLS, d);
        _mm_storeu_ps(panel + (c + 3) * TILE_COLS, e);
    }
    for (; c < depth; c++)
        for (size_t r = 0; r < 4; r++)
            panel[c * TILE_COLS + (int64_t)r] = tile_load_one(from + r * row_bytes, dtype, c);
}

/* Panels of the transpose: `rows` rows of the matrix become the columns, `depth` elements of each the depth.
 * Columns past the last row are zeros. */
SIMD_INLINE void tile_pack_transposed(float *panels, const void *from, enum dtype dtype, int64_t stride,
                                      int64_t rows, int64_t depth)
{
    size_t row_bytes = (size_t)stride * dtype_size(dtype);

    for (int64_t r = 0; r < tile_round_up(rows, TILE_COLS); r += 4) {
        float *panel = panels + r / TILE_COLS * depth * TILE_COLS + r % TILE_COLS;
        const char *row = (const char *)from + (size_t)r * row_bytes;
        if (r + 4 <= rows) {
            tile_pack_four(panel, row, dtype, row_bytes, depth);
            continue;
        }
        for (int64_t c = 0; c < depth; c++)
            for (int64_t i = 0; i < 4; i++)
                panel[c * TILE_COLS + i] =
                    r + i < rows ? tile_load_one(row + (size_t)i * row_bytes, dtype, c) : 0.0f;
    }
}

#endif
