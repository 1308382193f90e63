/* Stands in for CUDA's header: the conversions that kernels use. */
#ifndef ACTDUMP_EMULATION_CUDA_BF16_H
#define ACTDUMP_EMULATION_CUDA_BF16_H

extern "C" {
#include "kernels/base/dtype.h"
}

struct __nv_bfloat16 {
    unsigned short bits;
};

static inline __nv_bfloat16 __float2bfloat16_rn(float value)
{
    return __nv_bfloat16{f32_to_bf16(value)};
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value)
{
    return value.bits;
}

#endif
