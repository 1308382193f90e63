/* Element types and their conversions. */
#ifndef ACTDUMP_BASE_DTYPE_H
#define ACTDUMP_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum dtype { DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I32, DTYPE_I64, DTYPE_COUNT };

size_t dtype_size(enum dtype dtype);
/* "float32", "bfloat16", "float16", "int32", "int64": the spelling of job files, stores and torch. */
const char *dtype_name(enum dtype dtype);
/* Takes "bfloat16" and "torch.bfloat16". Returns false where the name is none of ours. */
bool dtype_parse(const char *name, enum dtype *out);
bool dtype_is_float(enum dtype dtype);

static inline float bf16_to_f32(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Round to nearest, ties to even; a not-a-number stays one (quiet). */
static inline uint16_t f32_to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x0040u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float f16_to_f32(uint16_t bits);
/* Round to nearest, ties to even; above 65504 (after rounding) gives infinity, small ones subnormals. */
uint16_t f32_to_f16(float value);

/* Converts n elements between any two of the float types, or copies where they are equal; int32 <-> int64
 * too. Source and destination do not overlap. */
void dtype_convert(void *to, enum dtype to_dtype, const void *from, enum dtype from_dtype, size_t n);

#endif
