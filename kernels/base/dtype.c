#include "kernels/base/dtype.h"

#include <assert.h>

static const struct {
    const char *name;
    size_t size;
} dtypes[DTYPE_COUNT] = {
    [DTYPE_F32] = {"float32", 4}, [DTYPE_BF16] = {"bfloat16", 2}, [DTYPE_F16] = {"float16", 2},
    [DTYPE_I32] = {"int32", 4},   [DTYPE_I64] = {"int64", 8},
};

size_t dtype_size(enum dtype dtype)
{
    return dtypes[dtype].size;
}

const char *dtype_name(enum dtype dtype)
{
    return dtypes[dtype].name;
}

bool dtype_parse(const char *name, enum dtype *out)
{
    if (strncmp(name, "torch.", 6) == 0)
        name += 6;
    for (int i = 0; i < DTYPE_COUNT; i++) {
        if (strcmp(name, dtypes[i].name) == 0) {
            *out = (enum dtype)i;
            return true;
        }
    }
    return false;
}

bool dtype_is_float(enum dtype dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_BF16 || dtype == DTYPE_F16;
}

float f16_to_f32(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (bits >> 10) & 0x1fu, fraction = bits & 0x3ffu, wide;
    if (exponent == 31) {
        wide = sign | 0x7f800000u | (fraction << 13);
    } else if (exponent != 0) {
        wide = sign | ((exponent + 112) << 23) | (fraction << 13);
    } else {
        /* zero or subnormal: fraction * 2^-24, exact in float32 */
        float value = (float)fraction * 0x1p-24f;
        memcpy(&wide, &value, sizeof wide);
        wide |= sign;
    }
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

uint16_t f32_to_f16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (bits >= 0x47800000u) /* 65536 and above */
        return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x38800000u) {
        /* below 2^-14: adding 0.5 lines the float's last place up with a half's 2^-24, rounding to nearest
         * even */
        float magnitude, shifted;
        memcpy(&magnitude, &bits, sizeof magnitude);
        shifted = magnitude + 0.5f;
        memcpy(&bits, &shifted, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    /* rebias the exponent by 15 - 127 and round the 13 dropped bits; a carry runs into the exponent as it
     * should */
    bits += 0xfffu + ((bits >> 13) & 1u) - (112u << 23);
    return (uint16_t)(sign | (bits >> 13));
}

static void to_f32(float *to, const void *from, enum dtype dtype, size_t n)
{
    const uint16_t *half = from;
    if (dtype == DTYPE_BF16) {
        for (size_t i = 0; i < n; i++)
            to[i] = bf16_to_f32(half[i]);
    } else if (dtype == DTYPE_F16) {
        for (size_t i = 0; i < n; i++)
            to[i] = f16_to_f32(half[i]);
    } else {
        memcpy(to, from, n * sizeof *to);
    }
}

static void from_f32(void *to, enum dtype dtype, const float *from, size_t n)
{
    uint16_t *half = to;
    if (dtype == DTYPE_BF16) {
        for (size_t i = 0; i < n; i++)
            half[i] = f32_to_bf16(from[i]);
    } else {
        for (size_t i = 0; i < n; i++)
            half[i] = f32_to_f16(from[i]);
    }
}

void dtype_convert(void *to, enum dtype to_dtype, const void *from, enum dtype from_dtype, size_t n)
{
    if (to_dtype == from_dtype) {
        memcpy(to, from, n * dtype_size(to_dtype));
        return;
    }
    if (to_dtype == DTYPE_I64 && from_dtype == DTYPE_I32) {
        for (size_t i = 0; i < n; i++)
            ((int64_t *)to)[i] = ((const int32_t *)from)[i];
        return;
    }
    if (to_dtype == DTYPE_I32 && from_dtype == DTYPE_I64) {
        for (size_t i = 0; i < n; i++)
            ((int32_t *)to)[i] = (int32_t)((const int64_t *)from)[i];
        return;
    }
    assert(dtype_is_float(to_dtype) && dtype_is_float(from_dtype));
    if (to_dtype == DTYPE_F32) {
        to_f32(to, from, from_dtype, n);
    } else if (from_dtype == DTYPE_F32) {
        from_f32(to, to_dtype, from, n);
    } else {
        float buffer[512];
        for (size_t i = 0; i < n; i += 512) {
            size_t m = n - i < 512 ? n - i : 512;
            to_f32(buffer, (const char *)from + i * 2, from_dtype, m);
            from_f32((char *)to + i * 2, to_dtype, buffer, m);
        }
    }
}
