/* Vectors of float32 as wide as the instruction set that the file is compiled for: 4, 8 or 16.
 *
 * Written with the vector extensions of GCC and clang; intrinsics only where those give poor code. The
 * compiler fuses a * b + c (-ffp-contract=fast). Infinities and NaNs go through all functions as through the
 * formulas they stand for.
 *
 * Polynomials here are minimax fits of our own (Lawson's weighted least squares in float64). */
#ifndef ACTDUMP_CPU_SIMD_H
#define ACTDUMP_CPU_SIMD_H

#include "kernels/base/tensor.h"

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#else
#include <emmintrin.h>
#endif

#if defined(__AVX512F__)
#define SIMD_WIDTH 16
#elif defined(__AVX2__)
#define SIMD_WIDTH 8
#else
#define SIMD_WIDTH 4
#endif

typedef float vfloat __attribute__((vector_size(4 * SIMD_WIDTH)));
/* The same among floats, wherever they lie. */
typedef float vfloat_there __attribute__((vector_size(4 * SIMD_WIDTH), aligned(4), may_alias));
typedef int32_t vint __attribute__((vector_size(4 * SIMD_WIDTH)));
typedef uint32_t vuint __attribute__((vector_size(4 * SIMD_WIDTH)));
typedef uint16_t vhalf __attribute__((vector_size(2 * SIMD_WIDTH)));

#define SIMD_INLINE static inline __attribute__((always_inline, unused))

SIMD_INLINE vfloat simd_set(float value)
{
#if defined(__AVX512F__)
    return _mm512_set1_ps(value);
#elif defined(__AVX2__)
    return _mm256_set1_ps(value);
#else
    return _mm_set1_ps(value);
#endif
}

/* From here to simd_end_flush this thread takes numbers below 2^-126 for zeros, read and made. Where decays
 * multiply each other such numbers are common, and on many processors a product that has one leaves the fast
 * path for a hundred cycles and more: with steep decays an SSD scan took 68 times as long (bench_kernels).
 * Returns what was set before. */
SIMD_INLINE unsigned simd_begin_flush(void)
{
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* MXCSR's FTZ and DAZ */
    return before;
}

SIMD_INLINE void simd_end_flush(unsigned before)
{
    _mm_setcsr(before);
}

SIMD_INLINE vfloat simd_load(const float *from)
{
    vfloat v;
    memcpy(&v, from, sizeof v);
    return v;
}

SIMD_INLINE void simd_store(float *to, vfloat v)
{
    memcpy(to, &v, sizeof v);
}

/* Sixteen bits of each lane to thirty-two and back. The compilers' __builtin_convertvector is two or three
 * times as long on the wider sets. */
SIMD_INLINE vuint simd_widen(vhalf h)
{
#if defined(__AVX512F__)
    return (vuint)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
    return (vuint)_mm256_cvtepu16_epi32((__m128i)h);
#else
    return __builtin_convertvector(h, vuint);
#endif
}

/* The upper halves are 0. */
SIMD_INLINE vhalf simd_narrow(vuint v)
{
#if defined(__AVX512F__)
    return (vhalf)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
    return (vhalf)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)v),
                                   _mm256_extracti128_si256((__m256i)v, 1));
#else
    return __builtin_convertvector(v, vhalf);
#endif
}

SIMD_INLINE vfloat simd_load_bf16(const uint16_t *from)
{
    vhalf h;
    memcpy(&h, from, sizeof h);
    return (vfloat)(simd_widen(h) << 16);
}

/* mask ? a : b, each lane of mask being 0 or -1 (what comparisons give). */
SIMD_INLINE vfloat simd_select(vint mask, vfloat a, vfloat b)
{
    return (vfloat)((mask & (vint)a) | (~mask & (vint)b));
}

/* Rounds to the nearest bfloat16, ties to even; NaNs stay NaNs, as f32_to_bf16 does it. */
SIMD_INLINE vuint simd_bf16_bits(vfloat v)
{
    vuint bits = (vuint)v;
    vuint rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
#if defined(__AVX512F__)
    __mmask16 is_none = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return (vuint)_mm512_mask_or_epi32((__m512i)rounded, is_none, (__m512i)bits,
                                       _mm512_set1_epi32(0x00400000));
#else
    vuint quiet = bits | 0x00400000u;
    vuint is_number = (vuint)(v == v);
    return (rounded & is_number) | (quiet & ~is_number);
#endif
}

SIMD_INLINE vfloat simd_round_bf16(vfloat v)
{
    return (vfloat)(simd_bf16_bits(v) & 0xffff0000u);
}

SIMD_INLINE void simd_store_bf16(uint16_t *to, vfloat v)
{
    vhalf h = simd_narrow(simd_bf16_bits(v) >> 16);
    memcpy(to, &h, sizeof h);
}

/* tensor_row for float32 and bfloat16, without a call. */
SIMD_INLINE void *simd_row(const struct tensor *t, int64_t row)
{
    return (char *)t->data + row * t->stride * (t->dtype == DTYPE_F32 ? 4 : 2);
}

/* SIMD_WIDTH elements of a row of float32 or bfloat16, from element i on. Where `dtype` is a constant no
 * branch is left: hot loops dispatch on it once, outside, and take the end of a row after them. */
SIMD_INLINE vfloat simd_get(const void *row, const enum dtype dtype, int64_t i)
{
    return dtype == DTYPE_F32 ? simd_load((const float *)row + i) : simd_load_bf16((const uint16_t *)row + i);
}

SIMD_INLINE void simd_put(void *row, const enum dtype dtype, int64_t i, vfloat v)
{
    if (dtype == DTYPE_F32)
        simd_store((float *)row + i, v);
    else
        simd_store_bf16((uint16_t *)row + i, v);
}

/* The same at the end of a row of `n` elements, n - i < SIMD_WIDTH: lanes past n are 0. */
SIMD_INLINE vfloat simd_get_tail(const void *row, enum dtype dtype, int64_t i, int64_t n)
{
    float lanes[SIMD_WIDTH] = {0};
    for (int64_t lane = 0; lane < n - i; lane++)
        lanes[lane] = dtype == DTYPE_F32 ? ((const float *)row)[i + lane]
                                         : bf16_to_f32(((const uint16_t *)row)[i + lane]);
    return simd_load(lanes);
}

/* Lanes past n are dropped. */
SIMD_INLINE void simd_put_tail(void *row, enum dtype dtype, int64_t i, int64_t n, vfloat v)
{
    for (int64_t lane = 0; lane < n - i; lane++) {
        if (dtype == DTYPE_F32)
            ((float *)row)[i + lane] = v[lane];
        else
            ((uint16_t *)row)[i + lane] = f32_to_bf16(v[lane]);
    }
}

/* Either of the two, for loops
 *     for (int64_t i = 0; i < n; i += SIMD_WIDTH)
 * that need no tail of their own. */
SIMD_INLINE vfloat simd_read(const void *row, enum dtype dtype, int64_t i, int64_t n)
{
    return n - i >= SIMD_WIDTH ? simd_get(row, dtype, i) : simd_get_tail(row, dtype, i, n);
}

SIMD_INLINE void simd_write(void *row, enum dtype dtype, int64_t i, int64_t n, vfloat v)
{
    if (n - i >= SIMD_WIDTH)
        simd_put(row, dtype, i, v);
    else
        simd_put_tail(row, dtype, i, n, v);
}

/* The larger and the smaller; where either is a NaN, b. */
SIMD_INLINE vfloat simd_max(vfloat a, vfloat b)
{
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return _mm_max_ps(a, b);
#endif
}

SIMD_INLINE vfloat simd_min(vfloat a, vfloat b)
{
#if defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_min_ps(a, b);
#else
    return _mm_min_ps(a, b);
#endif
}

SIMD_INLINE vfloat simd_abs(vfloat v)
{
    return (vfloat)((vint)v & 0x7fffffff);
}

/* a * b + c, rounded once where the set has an instruction for it. The compiler fuses by itself, but not
 * alike in two places: for results that must be the same bits from both. */
SIMD_INLINE vfloat simd_fma(vfloat a, vfloat b, vfloat c)
{
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

/* The halves of a vector of sixteen lanes. */
#if defined(__AVX512F__)
SIMD_INLINE __m256 simd_low_half(vfloat v)
{
    return _mm512_castps512_ps256(v);
}

SIMD_INLINE __m256 simd_high_half(vfloat v)
{
    return _mm512_extractf32x8_ps(v, 1);
}
#endif

/* Sum and maximum over the lanes, in pairs: lane i with lane i + half. */
SIMD_INLINE float simd_sum(vfloat v)
{
#if defined(__AVX512F__)
    __m256 eight = simd_low_half(v) + simd_high_half(v);
    __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
#elif defined(__AVX2__)
    __m128 four = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
#else
    __m128 four = v;
#endif
    __m128 two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
}

/* Where either of a pair is a NaN, the latter. */
SIMD_INLINE float simd_highest(vfloat v)
{
#if defined(__AVX512F__)
    __m256 eight = _mm256_max_ps(simd_low_half(v), simd_high_half(v));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif defined(__AVX2__)
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
#else
    __m128 four = v;
#endif
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return two[0] > two[1] ? two[0] : two[1];
}

/* 1.5 * 2^23: adding it to a float below 2^22 in size rounds that to a whole number, in the low mantissa
 * bits. */
#define SIMD_ROUNDER 12582912.0f

/* p * 2^n with n from -252 to 254: through two factors, so that results may be subnormal or overflow. */
SIMD_INLINE vfloat simd_scale(vfloat p, vfloat rounded)
{
    vint n = (vint)rounded - 0x4b400000;
    vint half = n >> 1;
    vfloat first = (vfloat)((half + 127) << 23);
    vfloat second = (vfloat)((n - half + 127) << 23);
    return p * first * second;
}

/* 2^(rate * slope) for a product in [-125, 0], relative error below 2e-7; exactly 1 at 0. */
#if defined(__AVX512F__)
/* 2^(i / 32): two registers, from which one instruction takes sixteen. */
static const float simd_exp2_table[32] = {
    1.0f,        1.0218972f,  1.04427373f, 1.06714046f, 1.09050775f, 1.1143868f,  1.13878858f, 1.1637249f,
    1.18920708f, 1.21524739f, 1.24185777f, 1.26905096f, 1.29683959f, 1.32523668f, 1.35425556f, 1.38390994f,
    1.41421354f, 1.44518077f, 1.47682619f, 1.50916445f, 1.54221082f, 1.5759809f,  1.61049032f, 1.64575553f,
    1.68179286f, 1.71861935f, 1.75625217f, 1.79470909f, 1.8340081f,  1.87416768f, 1.91520655f, 1.95714414f};

/* 1.5 * 2^18: rounds to whole 32nds; the low bits of the sum are the table's index. */
#define SIMD_ROUNDER_32 (SIMD_ROUNDER / 32)

/* (1 + q) * 2^rounded, of what SIMD_ROUNDER_32 was added to and n, the same without it. Gives subnormals too.
 */
SIMD_INLINE vfloat simd_scale_32(vfloat q, vfloat rounded, vfloat n)
{
    vfloat power =
        _mm512_permutex2var_ps(simd_load(simd_exp2_table), (__m512i)rounded, simd_load(simd_exp2_table + 16));
    return _mm512_scalef_ps(simd_fma(power, q, power), n);
}

/* 2^r - 1 for a rest of at most 1/64. */
SIMD_INLINE vfloat simd_exp2_rest(vfloat r)
{
    return r * simd_fma(r, simd_set(0.240226601f), simd_set(0.693157332f));
}

/* The product in whole 32nds, which the table and the exponent take, and a rest: eight operations, two fewer
 * than without a table. */
SIMD_INLINE vfloat simd_exp2_product(vfloat rate, vfloat slope)
{
    vfloat rounded = simd_fma(rate, slope, simd_set(SIMD_ROUNDER_32));
    vfloat n = rounded - SIMD_ROUNDER_32;
    vfloat r = simd_fma(rate, slope, -n);
    return simd_scale_32(simd_exp2_rest(r), rounded, n);
}
#else
SIMD_INLINE vfloat simd_exp2_product(vfloat rate, vfloat slope)
{
    vfloat rounded = simd_fma(rate, slope, simd_set(SIMD_ROUNDER));
    vfloat r = simd_fma(rate, slope, -(rounded - SIMD_ROUNDER));
    vfloat p = simd_fma(r, simd_set(0.0013264727303f), simd_set(0.0096715127287f));
    p = simd_fma(p, r, simd_set(0.0555073374381f));
    p = simd_fma(p, r, simd_set(0.2402224208402f));
    p = simd_fma(p, r, simd_set(0.6931469775984f));
    p = simd_fma(p, r, simd_set(1.0f));
    return (vfloat)((vuint)p + ((vuint)rounded << 23));
}
#endif

/* The same bits for a product in [-125, 0], and 2^-126 for any below. */
SIMD_INLINE vfloat simd_exp2_product_any(vfloat rate, vfloat slope)
{
    return simd_select(rate * slope < -125.0f, simd_set(0x1p-126f), simd_exp2_product(rate, slope));
}

/* e^x, relative error below 1.2e-7 where the result is normal; inf above 88.73, 0 below -103.98. */
SIMD_INLINE vfloat simd_exp(vfloat x)
{
    x = simd_min(simd_set(90.0f), simd_max(simd_set(-105.0f), x));
    vfloat rounded = x * 1.44269504f + SIMD_ROUNDER;
    vfloat n = rounded - SIMD_ROUNDER;
    /* ln 2 in two parts: the first has 9 bits, so that n times it is exact even without fused multiply-add.
     */
    vfloat r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vfloat p = r * 0.0013814598631f + 0.0083687169304f;
    p = p * r + 0.0416683880497f;
    p = p * r + 0.1666652063129f;
    p = p * r + 0.4999999344777f;
    p = p * (r * r) + r;
    return simd_scale(p + 1.0f, rounded);
}

/* 2^x for x <= 0, relative error below 2e-7; exactly 1 at 0. Below -126 the result is a number below 2^-125
 * rather than a smaller one: for decays that are multiplied by something ordinary. */
#if defined(__AVX512F__)
SIMD_INLINE vfloat simd_exp2_decay(vfloat x)
{
    x = simd_max(simd_set(-126.0f), x);
    vfloat rounded = x + SIMD_ROUNDER_32;
    vfloat n = rounded - SIMD_ROUNDER_32;
    return simd_scale_32(simd_exp2_rest(x - n), rounded, n);
}
#else
SIMD_INLINE vfloat simd_exp2_decay(vfloat x)
{
    x = simd_max(simd_set(-126.0f), x);
    /* The exponent's bias comes in with the rounder, so that a shift alone makes 2^n of the low bits. */
    const float rounder = SIMD_ROUNDER + 127.0f;
    vfloat rounded = x + rounder;
    vfloat r = x - (rounded - rounder);
    vfloat p = r * 0.0013264727303f + 0.0096715127287f;
    p = p * r + 0.0555073374381f;
    p = p * r + 0.2402224208402f;
    p = p * r + 0.6931469775984f;
    p = p * r + 1.0f;
    return p * (vfloat)((vuint)rounded << 23);
}
#endif

/* from < 0 or -0 ? a : b, lane by lane. */
SIMD_INLINE vfloat simd_select_negative(vfloat from, vfloat a, vfloat b)
{
#if defined(__AVX512F__)
    return _mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)from), b, a);
#elif defined(__AVX2__)
    return _mm256_blendv_ps(b, a, from);
#else
    return simd_select((vint)from >> 31, a, b);
#endif
}

/* e^-|x|, relative error below 2e-7 where the result is normal; 0 above 105. */
#if defined(__AVX512F__)
SIMD_INLINE vfloat simd_exp_falling(vfloat x)
{
    vfloat y = simd_max(simd_set(-105.0f), (vfloat)((vuint)x | 0x80000000u));
    vfloat rounded = simd_fma(y, simd_set(1.44269504f), simd_set(SIMD_ROUNDER_32));
    vfloat n = rounded - SIMD_ROUNDER_32;
    vfloat r = simd_fma(n, simd_set(2.12194440e-4f), simd_fma(n, simd_set(-0.693359375f), y));
    vfloat q = r * simd_fma(r, simd_set(0.5000002f), simd_set(1.00001464f));
    return simd_scale_32(q, rounded, n);
}
#else
/* A chain half as long as simd_exp's: 2^64 too much goes into the exponent, so that one addition and one
 * product scale down to subnormals. */
SIMD_INLINE vfloat simd_exp_falling(vfloat x)
{
    const float rounder = SIMD_ROUNDER + 64.0f;
    vfloat a = simd_abs(x);
    vfloat rounded = simd_fma(a, simd_set(-1.44269504f), simd_set(rounder));
    vfloat n = rounded - rounder;
    vfloat r = simd_fma(n, simd_set(2.12194440e-4f), simd_fma(n, simd_set(-0.693359375f), -a));
    vfloat r2 = r * r;
    vfloat high = simd_fma(r, simd_set(0.0013814598631f), simd_set(0.0083687169304f));
    vfloat middle = simd_fma(r, simd_set(0.0416683880497f), simd_set(0.1666652063129f));
    vfloat low = simd_fma(r, simd_set(0.4999999344777f), simd_set(1.0f));
    vfloat p = simd_fma(simd_fma(simd_fma(high, r2, middle), r2, low), r, simd_set(1.0f));
    vfloat scaled = (vfloat)((vuint)p + ((vuint)rounded << 23)) * 0x1p-64f;
    return (vfloat)((vint)scaled & (vint)(a < 105.0f));
}
#endif

/* log(1 + u) for 0 <= u <= 1, as 2 atanh(u / (2 + u)); relative error below 2.5e-7. */
SIMD_INLINE vfloat simd_log1p_unit(vfloat u)
{
    vfloat s = u / (u + 2.0f);
    vfloat q = s * s;
    vfloat p = q * 0.1401223098174f + 0.1399957025574f;
    p = p * q + 0.2001084954423f;
    p = p * q + 0.3333320656616f;
    p = p * q;
    return 2.0f * (p * s + s);
}

/* log(1 + e^x). torch's F.softplus returns x above 20; so does this, the rest being under half a last place
 * there. */
SIMD_INLINE vfloat simd_softplus(vfloat x)
{
    vfloat positive = simd_max((vfloat){0}, x);
    return positive + simd_log1p_unit(simd_exp_falling(x));
}

SIMD_INLINE vfloat simd_sigmoid(vfloat x)
{
    vfloat e = simd_exp_falling(x);
    return simd_select_negative(x, e, simd_set(1.0f)) / (e + 1.0f);
}

SIMD_INLINE vfloat simd_silu(vfloat x)
{
    vfloat e = simd_exp_falling(x);
    return x * simd_select_negative(x, e, simd_set(1.0f)) / (e + 1.0f);
}

#endif
