/* Stands in for the tensor cores: all 32 lanes bring their fragments, the last to come multiplies for all.
 * The layout is written out here a second time, from PTX's manual, so that kernels and stand-in cannot agree
 * on a wrong one by sharing a function. */
#ifndef ACTDUMP_EMULATION_EMULATED_MMA_H
#define ACTDUMP_EMULATION_EMULATED_MMA_H

#include "cuda_runtime.h"

namespace emulation
{

struct mma_operands {
    float *c;
    const uint32_t *a, *b;
};

static inline float half_of(uint32_t word, int which)
{
    return __uint_as_float(which == 0 ? word << 16 : word & 0xffff0000u);
}

static inline void mma_run(void *const arguments[])
{
    static float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const mma_operands *o = static_cast<const mma_operands *>(arguments[lane]);
        int group = lane >> 2, member = lane & 3;
        for (int i = 0; i < 8; i++) {
            int row = group + ((i / 2) % 2 == 1 ? 8 : 0), col = member * 2 + (i & 1) + (i >= 4 ? 8 : 0);
            a[row][col] = half_of(o->a[i / 2], i & 1);
        }
        for (int i = 0; i < 4; i++)
            b[member * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = half_of(o->b[i / 2], i & 1);
    }
    for (int lane = 0; lane < 32; lane++) {
        mma_operands *o = static_cast<mma_operands *>(arguments[lane]);
        int group = lane >> 2, member = lane & 3;
        for (int i = 0; i < 4; i++) {
            int row = group + (i >= 2 ? 8 : 0), col = member * 2 + (i & 1);
            float sum = 0;
            for (int k = 0; k < 16; k++)
                sum += a[row][k] * b[k][col];
            o->c[i] += sum;
        }
    }
}

struct load_operands {
    uint32_t *out;
    const uint16_t *row;
};

/* Reads all rows before it writes: out may not be where rows are, but a wrong kernel's might. */
static inline void load_run(void *const arguments[])
{
    static uint16_t matrix[4][8][8];
    for (int lane = 0; lane < 32; lane++) {
        const load_operands *o = static_cast<const load_operands *>(arguments[lane]);
        if ((uintptr_t)o->row % 16 != 0) {
            warp_fault("a row of ldmatrix is not aligned to 16 bytes");
            return;
        }
        std::memcpy(matrix[lane / 8][lane % 8], o->row, 16);
    }
    for (int lane = 0; lane < 32; lane++) {
        load_operands *o = static_cast<load_operands *>(arguments[lane]);
        int group = lane >> 2, member = lane & 3;
        for (int i = 0; i < 4; i++)
            o->out[i] = (uint32_t)matrix[i][2 * member][group] | (uint32_t)matrix[i][2 * member + 1][group]
                                                                     << 16;
    }
}

} // namespace emulation

static inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    emulation::mma_operands operands = {c, a, b};
    emulation::warp_together(__FILE__, __LINE__, &operands, emulation::mma_run);
}

static inline void load_transposed(uint32_t (&out)[4], const uint16_t *row)
{
    emulation::load_operands operands = {out, row};
    emulation::warp_together(__FILE__, __LINE__, &operands, emulation::load_run);
}

#endif
