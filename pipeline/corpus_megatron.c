/* Megatron's indexed datasets: NAME.bin holds the tokens, NAME.idx, all little-endian, where they are:
 *
 *   "MMIDIDX\0\0"  uint64 version (1)  uint8 dtype  uint64 n_sequences  uint64 n_bounds
 *   int32 length[n_sequences]     tokens
 *   int64 pointer[n_sequences]    byte offset in NAME.bin
 *   int64 bound[n_bounds]         document d is sequences bound[d] ... bound[d + 1] - 1
 *   int8  mode[n_sequences]       in multimodal datasets only
 *
 * (https://github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py). Lengths and pointers
 * are checked whenever they are read; nothing of the index stays in memory. */
#include "pipeline/corpus_source.h"

#include "kernels/base/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define HEADER_BYTES 34
static const unsigned char magic[9] = "MMIDIDX\0\0";
static const struct integer_type int32_type = {.bytes = 4, .is_signed = true};
static const struct integer_type int64_type = {.bytes = 8, .is_signed = true};

struct megatron {
    struct corpus_source source;
    struct corpus_file index, data;
    struct corpus_stream bounds, lengths, pointers, tokens;
    struct integer_type type;
    int64_t n_sequences;
    int64_t lengths_at, pointers_at, bounds_at; /* bytes in the index */
    /* Where the last read stopped, so that the next one need not walk the document's sequences again. */
    int64_t cursor_document, cursor_sequence,
        cursor_offset; /* the sequence begins at that token of the document */
};

/* ---- the index ---- */

static enum status read_bounds(struct megatron *m, int64_t document, int64_t bounds[2], struct error *error)
{
    const char *path = m->index.path;
    TRY(corpus_stream_read_integers(&m->bounds, int64_type, m->bounds_at + document * 8, 2, bounds, error));
    if (document == 0 && bounds[0] != 0)
        return error_set(error, STATUS_INPUT, "%s: document 0 begins at sequence %" PRId64 ", expected 0",
                         path, bounds[0]);
    if (bounds[0] < 0 || bounds[1] < bounds[0] || bounds[1] > m->n_sequences)
        return error_set(error, STATUS_INPUT,
                         "%s: document %" PRId64 " is sequences %" PRId64 " to %" PRId64
                         " (its end not included), expected ascending bounds within %" PRId64 " sequences",
                         path, document, bounds[0], bounds[1], m->n_sequences);
    if (document == m->source.n_documents - 1 && bounds[1] != m->n_sequences)
        return error_set(error, STATUS_INPUT,
                         "%s: the last document ends at sequence %" PRId64 ", expected all %" PRId64
                         " sequences",
                         path, bounds[1], m->n_sequences);
    return STATUS_OK;
}

static enum status read_length(struct megatron *m, int64_t sequence, int64_t *length, struct error *error)
{
    TRY(corpus_stream_read_integers(&m->lengths, int32_type, m->lengths_at + sequence * 4, 1, length, error));
    if (*length >= 0)
        return STATUS_OK;
    return error_set(error, STATUS_INPUT, "%s: sequence %" PRId64 " has a length of %" PRId64 " tokens",
                     m->index.path, sequence, *length);
}

static enum status read_pointer(struct megatron *m, int64_t sequence, int64_t length, int64_t *pointer,
                                struct error *error)
{
    TRY(corpus_stream_read_integers(&m->pointers, int64_type, m->pointers_at + sequence * 8, 1, pointer,
                                    error));
    int64_t bytes = length * m->type.bytes; /* of an int32 */
    if (*pointer >= 0 && *pointer <= m->data.size && bytes <= m->data.size - *pointer)
        return STATUS_OK;
    return error_set(error, STATUS_INPUT,
                     "%s: sequence %" PRId64 " is bytes %" PRId64 " to %" PRId64 " + %" PRId64
                     " of %s, which has %" PRId64 " bytes",
                     m->index.path, sequence, *pointer, *pointer, bytes, m->data.path, m->data.size);
}

static enum status megatron_length(struct corpus_source *source, int64_t document, int64_t *length,
                                   struct error *error)
{
    struct megatron *m = (struct megatron *)source;
    int64_t bounds[2], total = 0;
    TRY(read_bounds(m, document, bounds, error));
    for (int64_t sequence = bounds[0]; sequence < bounds[1]; sequence++) {
        int64_t n_tokens, pointer;
        TRY(read_length(m, sequence, &n_tokens, error));
        TRY(read_pointer(m, sequence, n_tokens, &pointer, error));
        if (__builtin_add_overflow(total, n_tokens, &total))
            return error_set(error, STATUS_INPUT, "%s: document %" PRId64 " has more than 2^63 tokens",
                             m->index.path, document);
    }
    *length = total;
    return STATUS_OK;
}

/* ---- tokens ---- */

/* Moves the cursor to the sequence that holds token `offset` of the document. */
static enum status seek(struct megatron *m, int64_t document, int64_t offset, int64_t *length,
                        struct error *error)
{
    int64_t bounds[2];
    TRY(read_bounds(m, document, bounds, error));
    if (m->cursor_document != document || m->cursor_offset > offset) {
        m->cursor_document = document;
        m->cursor_sequence = bounds[0];
        m->cursor_offset = 0;
    }
    for (;; m->cursor_sequence++) {
        if (m->cursor_sequence < bounds[0] || m->cursor_sequence >= bounds[1])
            return error_set(error, STATUS_INPUT,
                             "%s: document %" PRId64 " has no token %" PRId64
                             " any more: the file was changed",
                             m->index.path, document, offset);
        TRY(read_length(m, m->cursor_sequence, length, error));
        if (offset - m->cursor_offset < *length)
            return STATUS_OK;
        m->cursor_offset += *length;
    }
}

/* A document's sequences need not lie one behind the other in the data. */
static enum status megatron_read(struct corpus_source *source, int64_t document, int64_t offset, int64_t n,
                                 int64_t *ids, struct error *error)
{
    struct megatron *m = (struct megatron *)source;
    while (n > 0) {
        int64_t length, pointer;
        TRY(seek(m, document, offset, &length, error));
        TRY(read_pointer(m, m->cursor_sequence, length, &pointer, error));
        int64_t within = offset - m->cursor_offset, count = length - within < n ? length - within : n;
        TRY(corpus_stream_read_integers(&m->tokens, m->type, pointer + within * m->type.bytes, count, ids,
                                        error));
        offset += count;
        ids += count;
        n -= count;
    }
    return STATUS_OK;
}

/* ---- opening ---- */

static void megatron_close(struct corpus_source *source)
{
    struct megatron *m = (struct megatron *)source;
    corpus_stream_fini(&m->bounds);
    corpus_stream_fini(&m->lengths);
    corpus_stream_fini(&m->pointers);
    corpus_stream_fini(&m->tokens);
    corpus_file_close(&m->index);
    corpus_file_close(&m->data);
    memory_free(m);
}

static const struct corpus_source_functions megatron_functions = {
    .length = megatron_length, .read = megatron_read, .close = megatron_close};

static enum status read_dtype(struct megatron *m, int code, struct error *error)
{
    static const struct integer_type types[] = {
        [1] = {.bytes = 1},
        [2] = {.bytes = 1, .is_signed = true},
        [3] = {.bytes = 2, .is_signed = true},
        [4] = {.bytes = 4, .is_signed = true},
        [5] = {.bytes = 8, .is_signed = true},
        [8] = {.bytes = 2},
    };
    if (code == 6 || code == 7)
        return error_set(error, STATUS_INPUT, "%s: its tokens are %s (dtype code %d), expected integers",
                         m->index.path, code == 6 ? "float64" : "float32", code);
    if (code < 1 || code > 8)
        return error_set(error, STATUS_INPUT, "%s: dtype code %d, expected 1 to 8", m->index.path, code);
    m->type = types[code];
    return STATUS_OK;
}

/* Lays out the index's regions and checks that they fill the file. */
static enum status place_regions(struct megatron *m, uint64_t n_sequences, uint64_t n_bounds,
                                 struct error *error)
{
    const char *path = m->index.path;
    uint64_t room = (uint64_t)m->index.size - HEADER_BYTES;
    if (n_bounds == 0)
        return error_set(error, STATUS_INPUT, "%s: no document bounds, expected at least one", path);
    /* Each count alone against the file first: their products cannot overflow then. */
    if (n_sequences > room / 12 || n_bounds > room / 8 || n_sequences * 12 + n_bounds * 8 > room)
        return error_set(error, STATUS_INPUT,
                         "%s: %" PRIu64 " sequences and %" PRIu64
                         " document bounds do not fit in its %" PRId64 " bytes"
                         " (is it cut off?)",
                         path, n_sequences, n_bounds, m->index.size);
    uint64_t left = room - n_sequences * 12 - n_bounds * 8;
    if (left != 0 && left != n_sequences)
        return error_set(error, STATUS_INPUT,
                         "%s: %" PRIu64
                         " bytes behind the document bounds, expected none (or a mode for each of the"
                         " %" PRIu64 " sequences)",
                         path, left, n_sequences);
    m->n_sequences = (int64_t)n_sequences;
    m->source.n_documents = (int64_t)n_bounds - 1;
    m->lengths_at = HEADER_BYTES;
    m->pointers_at = m->lengths_at + m->n_sequences * 4;
    m->bounds_at = m->pointers_at + m->n_sequences * 8;
    return STATUS_OK;
}

static enum status read_header(struct megatron *m, struct error *error)
{
    unsigned char header[HEADER_BYTES];
    int64_t version, counts[2];
    if (m->index.size < HEADER_BYTES)
        return error_set(error, STATUS_INPUT,
                         "%s has %" PRId64 " bytes, fewer than the %d of an index's header", m->index.path,
                         m->index.size, HEADER_BYTES);
    TRY(corpus_stream_read(&m->bounds, 0, HEADER_BYTES, header, error));
    if (memcmp(header, magic, sizeof magic) != 0)
        return error_set(error, STATUS_INPUT, "%s does not begin with MMIDIDX: it is no Megatron index",
                         m->index.path);
    TRY(corpus_stream_read_integers(&m->bounds, int64_type, 9, 1, &version, error));
    if (version != 1)
        return error_set(error, STATUS_INPUT, "%s: version %" PRIu64 ", expected 1", m->index.path,
                         (uint64_t)version);
    TRY(read_dtype(m, header[17], error));
    TRY(corpus_stream_read_integers(&m->bounds, int64_type, 18, 2, counts, error));
    return place_regions(m, (uint64_t)counts[0], (uint64_t)counts[1], error);
}

/* NAME.bin or NAME.idx. Who gives the name with its suffix is told. */
static enum status open_part(const char *path, const char *suffix, struct corpus_file *file,
                             struct error *error)
{
    void *name;
    size_t length = strlen(path), size = length + strlen(suffix) + 1;
    TRY(memory_allocate(&name, size, "a path", error));
    snprintf(name, size, "%s%s", path, suffix);
    enum status status = corpus_file_open(name, file, error);
    memory_free(name);
    bool has_suffix =
        length > 4 && (strcmp(path + length - 4, ".bin") == 0 || strcmp(path + length - 4, ".idx") == 0);
    if (status == STATUS_INPUT && has_suffix)
        error_prefix(error, "a Megatron corpus is given without .bin or .idx");
    return status;
}

static enum status open_files(struct megatron *m, const char *path, struct error *error)
{
    TRY(open_part(path, ".idx", &m->index, error));
    TRY(open_part(path, ".bin", &m->data, error));
    TRY(corpus_stream_init(&m->bounds, &m->index, error));
    TRY(corpus_stream_init(&m->lengths, &m->index, error));
    TRY(corpus_stream_init(&m->pointers, &m->index, error));
    TRY(corpus_stream_init(&m->tokens, &m->data, error));
    TRY(read_header(m, error));
    if (m->source.n_documents == 0 && m->n_sequences > 0)
        return error_set(error, STATUS_INPUT, "%s: %" PRId64 " sequences but no documents", m->index.path,
                         m->n_sequences);
    return STATUS_OK;
}

enum status corpus_open_megatron(const char *path, struct corpus_source **out, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct megatron), "the corpus", error));
    struct megatron *m = memory;
    *m = (struct megatron){.source = {.functions = &megatron_functions, .width = -1, .is_bounded = true},
                           .cursor_document = -1};
    enum status status = open_files(m, path, error);
    m->source.path = m->data.path;
    if (status != STATUS_OK)
        megatron_close(&m->source);
    else
        *out = &m->source;
    return status;
}
