#include "pipeline/chunk.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#define ZSTD_STATIC_LINKING_ONLY /* for ZSTD_c_literalCompressionMode, a parameter like others since 1.4 */
#include <zstd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* ---------------------------------------------------------------- shuffle */

static inline void shuffle_plain(uint8_t *to, const uint8_t *from, size_t size, size_t first, size_t n)
{
    for (size_t b = 0; b < size; b++)
        for (size_t i = first; i < n; i++)
            to[b * n + i] = from[i * size + b];
}

#ifdef __SSE2__
/* Sixteen elements a step; each returns how many elements it did. */
static size_t shuffle2(uint8_t *to, const uint8_t *from, size_t n)
{
    const __m128i low = _mm_set1_epi16(0xff);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m128i *in = (const __m128i *)(const void *)(from + i * 2);
        __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
        __m128i byte0 = _mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low));
        __m128i byte1 = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
        _mm_storeu_si128((__m128i *)(void *)(to + i), byte0);
        _mm_storeu_si128((__m128i *)(void *)(to + n + i), byte1);
    }
    return i;
}

/* The bytes at `shift` bits of sixteen 4-byte elements. */
static inline __m128i gather4(const __m128i x[4], int shift)
{
    const __m128i low = _mm_set1_epi32(0xff);
    __m128i by = _mm_cvtsi32_si128(shift);
    __m128i a = _mm_packs_epi32(_mm_and_si128(_mm_srl_epi32(x[0], by), low),
                                _mm_and_si128(_mm_srl_epi32(x[1], by), low));
    __m128i b = _mm_packs_epi32(_mm_and_si128(_mm_srl_epi32(x[2], by), low),
                                _mm_and_si128(_mm_srl_epi32(x[3], by), low));
    return _mm_packus_epi16(a, b);
}

static size_t shuffle4(uint8_t *to, const uint8_t *from, size_t n)
{
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m128i x[4];
        for (int k = 0; k < 4; k++)
            x[k] = _mm_loadu_si128((const __m128i *)(const void *)(from + i * 4) + k);
        for (size_t b = 0; b < 4; b++)
            _mm_storeu_si128((__m128i *)(void *)(to + b * n + i), gather4(x, (int)b * 8));
    }
    return i;
}
#endif

void chunk_shuffle(void *to, const void *from, size_t element_bytes, size_t bytes)
{
    size_t n = bytes / element_bytes, done = 0;
#ifdef __SSE2__
    if (element_bytes == 2)
        done = shuffle2(to, from, n);
    else if (element_bytes == 4)
        done = shuffle4(to, from, n);
#endif
    shuffle_plain(to, from, element_bytes, done, n);
    memcpy((char *)to + n * element_bytes, (const char *)from + n * element_bytes, bytes - n * element_bytes);
}

static inline void unshuffle_plain(uint8_t *to, const uint8_t *from, size_t size, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (size_t b = 0; b < size; b++)
            to[i * size + b] = from[b * n + i];
}

void chunk_unshuffle(void *to, const void *from, size_t element_bytes, size_t bytes)
{
    size_t n = bytes / element_bytes;
    /* a constant size lets the compiler unroll the inner loop */
    if (element_bytes == 2)
        unshuffle_plain(to, from, 2, n);
    else if (element_bytes == 4)
        unshuffle_plain(to, from, 4, n);
    else
        unshuffle_plain(to, from, element_bytes, n);
    memcpy((char *)to + n * element_bytes, (const char *)from + n * element_bytes, bytes - n * element_bytes);
}

/* ---------------------------------------------------------------- zstd */

static enum status zstd_error(struct error *error, enum status status, size_t code, const char *doing)
{
    return error_set(error, status, "zstd could not %s: %s", doing, ZSTD_getErrorName(code));
}

size_t chunk_bound(size_t bytes)
{
    return ZSTD_compressBound(bytes);
}

static ZSTD_CCtx *context_of(struct chunk_compressor *compressor)
{
    return (ZSTD_CCtx *)(void *)compressor;
}

enum status chunk_compressor_create(int level, struct chunk_compressor **out, struct error *error)
{
    ZSTD_CCtx *context = ZSTD_createCCtx();
    if (context == NULL)
        return error_set(error, STATUS_RESOURCE, "out of memory: a zstd context");
    size_t code = ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, level);
    if (!ZSTD_isError(code))
        code = ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
    if (ZSTD_isError(code)) {
        ZSTD_freeCCtx(context);
        return zstd_error(error, STATUS_USAGE, code, "take the compression level");
    }
    *out = (struct chunk_compressor *)(void *)context;
    return STATUS_OK;
}

void chunk_compressor_destroy(struct chunk_compressor *compressor)
{
    ZSTD_freeCCtx(context_of(compressor));
}

#if ZSTD_VERSION_NUMBER < 10500
#define ZSTD_ps_auto ZSTD_lcm_auto
#define ZSTD_ps_enable ZSTD_lcm_huffman
#endif

/* Bytes that level 1 goes on by where it finds no match, at first. */
#define FLOAT_STEP 8

/* Shuffled floats hardly repeat: what there is to gain is in the frequencies of signs and exponents, which
 * Huffman's code takes, and level 1 spends half of its time on looking for matches that it does not find or
 * that cost more than they save. Longer steps leave some of those out; zstd then stops coding literals as
 * well, unless told not to. A step of 8, residual stream of 768 columns (Zen 3): float32 at 493 MB/s for 409,
 * ratio 1.191 for 1.188; bfloat16 at 394 for 275, 1.472 for 1.462; a small trained model's, 773 for 491 and
 * 366 for 260, the same within 0.2 %; unpacking is as fast or faster. Decays, keys and queries of small
 * models grow by 1 to 3 %. Steps of 128 do 721 and 589 MB/s, but miss what does repeat: embeddings of the
 * same tokens took twice the room. Other levels are as they were asked for; where a zstd does not know the
 * parameter, level 1 is what it is. */
static void suit_content(ZSTD_CCtx *context, enum chunk_content content)
{
    int level = 0;
    if (ZSTD_isError(ZSTD_CCtx_getParameter(context, ZSTD_c_compressionLevel, &level)) || level != 1)
        return;
    bool steps = content == CHUNK_FLOATS;
    size_t code = ZSTD_CCtx_setParameter(context, ZSTD_c_literalCompressionMode,
                                         steps ? (int)ZSTD_ps_enable : (int)ZSTD_ps_auto);
    ZSTD_CCtx_setParameter(context, ZSTD_c_targetLength, steps && !ZSTD_isError(code) ? FLOAT_STEP : 0);
}

enum status chunk_compress(struct chunk_compressor *compressor, enum chunk_content content, void *to,
                           size_t room, const void *from, size_t bytes, size_t *packed, struct error *error)
{
    suit_content(context_of(compressor), content);
    size_t code = ZSTD_compress2(context_of(compressor), to, room, from, bytes);
    if (ZSTD_isError(code))
        return zstd_error(error, STATUS_RESOURCE, code, "compress a chunk");
    *packed = code;
    return STATUS_OK;
}

/* Bit 2 of the descriptor, the byte after the magic number (RFC 8878, 3.1.1.1.1). Bit 4 is unused: zstd
 * writes 0 and reads anything, which would let a flipped bit pass. */
static bool has_checksum(const void *frame, size_t bytes)
{
    return bytes > 4 && (((const uint8_t *)frame)[4] & 0x14) == 4;
}

enum status chunk_decompress(void *to, size_t bytes, const void *from, size_t packed, struct error *error)
{
    size_t length = ZSTD_findFrameCompressedSize(from, packed);
    if (ZSTD_isError(length))
        return zstd_error(error, STATUS_INPUT, length, "read the frame");
    if (length != packed)
        return error_set(error, STATUS_INPUT, "its zstd frame ends after %zu of %zu bytes", length, packed);
    if (!has_checksum(from, packed))
        return error_set(error, STATUS_INPUT, "its zstd frame carries no checksum");
    size_t got = ZSTD_decompress(to, bytes, from, packed);
    if (ZSTD_isError(got))
        return zstd_error(error, STATUS_INPUT, got, "unpack it");
    if (got != bytes)
        return error_set(error, STATUS_INPUT, "it unpacks to %zu bytes instead of %zu", got, bytes);
    return STATUS_OK;
}

void *chunk_unpack_any(const void *from, size_t packed, size_t *bytes)
{
    unsigned long long size = ZSTD_getFrameContentSize(from, packed);
    if (size == 0 || size > UINT32_MAX) /* the two codes of failure are above it too */
        return NULL;
    void *out = malloc(size);
    if (out == NULL)
        return NULL;
    if (ZSTD_decompress(out, size, from, packed) != size) {
        free(out);
        return NULL;
    }
    *bytes = size;
    return out;
}
