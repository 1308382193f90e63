/* Stands in for CUDA's header: the conversions that kernels use. */
#ifndef ACTDUMP_EMULATION_CUDA_FP16_H
#define ACTDUMP_EMULATION_CUDA_FP16_H

extern "C" {
#include "kernels/base/dtype.h"
}

struct __half {
    unsigned short bits;
};

static inline __half __float2half_rn(float value)
{
    return __half{f32_to_f16(value)};
}
static inline float __half2float(__half value)
{
    return f16_to_f32(value.bits);
}
static inline unsigned short __half_as_ushort(__half value)
{
    return value.bits;
}
static inline __half __ushort_as_half(unsigned short bits)
{
    return __half{bits};
}

#endif
