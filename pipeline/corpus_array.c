/* Arrays of ids in a file: .npy (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html) and
 * bare ids. */
#include "pipeline/corpus_source.h"

#include "kernels/base/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAX_HEADER_BYTES (1 << 20)

struct array {
    struct corpus_source source;
    struct corpus_file file;
    struct corpus_stream stream;
    struct integer_type type;
    int64_t data_at; /* bytes before the first id */
};

static enum status array_read(struct corpus_source *source, int64_t document, int64_t offset, int64_t n,
                              int64_t *ids, struct error *error)
{
    struct array *a = (struct array *)source;
    int64_t first = document * source->width + offset;
    return corpus_stream_read_integers(&a->stream, a->type, a->data_at + first * a->type.bytes, n, ids,
                                       error);
}

static void array_close(struct corpus_source *source)
{
    struct array *a = (struct array *)source;
    corpus_stream_fini(&a->stream);
    corpus_file_close(&a->file);
    memory_free(a);
}

static const struct corpus_source_functions array_functions = {.read = array_read, .close = array_close};

static enum status array_open(const char *path, struct array **out, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct array), "the corpus", error));
    struct array *a = memory;
    a->source.functions = &array_functions;
    a->file.fd = -1;
    enum status status;
    TRY_ELSE(corpus_file_open(path, &a->file, error), fail);
    a->source.path = a->file.path;
    TRY_ELSE(corpus_stream_init(&a->stream, &a->file, error), fail);
    *out = a;
    return STATUS_OK;
fail:
    array_close(&a->source);
    return status;
}

/* ---- bare ids ---- */

enum status corpus_open_raw(const char *path, int token_bytes, struct corpus_source **out,
                            struct error *error)
{
    struct array *a;
    TRY(array_open(path, &a, error));
    if (a->file.size % token_bytes != 0) {
        enum status status = error_set(
            error, STATUS_INPUT, "%s has %" PRId64 " bytes, which is no multiple of the %d bytes of an id",
            path, a->file.size, token_bytes);
        array_close(&a->source);
        return status;
    }
    a->type = (struct integer_type){.bytes = token_bytes};
    a->source.n_documents = 1;
    a->source.width = a->file.size / token_bytes;
    *out = &a->source;
    return STATUS_OK;
}

/* ---- .npy ---- */

/* The header is a Python dict: {'descr': '<u2', 'fortran_order': False, 'shape': (3, 4), }. */
struct header_reader {
    const char *path, *at, *end;
    struct error *error;
};

struct npy_header {
    char descr[16];
    bool is_fortran;
    int64_t shape[2];
    int n_dims;
    bool has_descr, has_order, has_shape;
};

static enum status fail_header(const struct header_reader *r, const char *expected)
{
    char near[25];
    size_t left = (size_t)(r->end - r->at), n = left < sizeof near - 1 ? left : sizeof near - 1;
    for (size_t i = 0; i < n; i++)
        near[i] = r->at[i] < 0x20 || r->at[i] > 0x7e ? '?' : r->at[i];
    near[n] = '\0';
    return error_set(r->error, STATUS_INPUT, "%s: in its .npy header, expected %s, found '%s'", r->path,
                     expected, near);
}

static void skip_space(struct header_reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\t'))
        r->at++;
}

static bool take(struct header_reader *r, const char *word)
{
    size_t n = strlen(word);
    skip_space(r);
    if ((size_t)(r->end - r->at) < n || memcmp(r->at, word, n) != 0)
        return false;
    r->at += n;
    return true;
}

static enum status take_string(struct header_reader *r, char *out, size_t size, const char *expected)
{
    skip_space(r);
    char quote = r->at < r->end ? *r->at : '\0';
    if (quote != '\'' && quote != '"')
        return fail_header(r, expected);
    const char *start = r->at + 1, *close = memchr(start, quote, (size_t)(r->end - start));
    if (close == NULL || (size_t)(close - start) >= size)
        return fail_header(r, expected);
    memcpy(out, start, (size_t)(close - start));
    out[close - start] = '\0';
    r->at = close + 1;
    return STATUS_OK;
}

static enum status take_size(struct header_reader *r, int64_t *out)
{
    int64_t value = 0;
    skip_space(r);
    const char *start = r->at;
    for (; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++)
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *r->at - '0', &value))
            return error_set(r->error, STATUS_INPUT, "%s: its .npy header has a size of more than 2^63",
                             r->path);
    if (r->at == start)
        return fail_header(r, "a size");
    take(r, "L"); /* Python 2's long integers */
    *out = value;
    return STATUS_OK;
}

static enum status take_shape(struct header_reader *r, struct npy_header *h)
{
    if (!take(r, "("))
        return fail_header(r, "a shape in brackets");
    for (h->n_dims = 0; !take(r, ")"); h->n_dims++) {
        int64_t size = 0;
        TRY(take_size(r, &size));
        if (h->n_dims < 2)
            h->shape[h->n_dims] = size;
        if (!take(r, ",") && (r->at == r->end || *r->at != ')'))
            return fail_header(r, "',' or ')' in the shape");
    }
    if (h->n_dims == 1 || h->n_dims == 2)
        return STATUS_OK;
    return error_set(r->error, STATUS_INPUT, "%s: its array has %d axes, expected 1 or 2 (sequence, context)",
                     r->path, h->n_dims);
}

static enum status take_entry(struct header_reader *r, struct npy_header *h)
{
    char key[32];
    TRY(take_string(r, key, sizeof key, "a key"));
    if (!take(r, ":"))
        return fail_header(r, "':' after a key");
    if (strcmp(key, "descr") == 0) {
        h->has_descr = true;
        return take_string(r, h->descr, sizeof h->descr, "an integer dtype such as '<u2'");
    }
    if (strcmp(key, "shape") == 0) {
        h->has_shape = true;
        return take_shape(r, h);
    }
    if (strcmp(key, "fortran_order") != 0)
        return error_set(r->error, STATUS_INPUT,
                         "%s: its .npy header has the key '%s', expected descr, fortran_order and shape",
                         r->path, key);
    h->has_order = true;
    h->is_fortran = take(r, "True");
    if (!h->is_fortran && !take(r, "False"))
        return fail_header(r, "True or False");
    return STATUS_OK;
}

static enum status parse_header(struct header_reader *r, struct npy_header *h)
{
    if (!take(r, "{"))
        return fail_header(r, "'{'");
    while (!take(r, "}")) {
        TRY(take_entry(r, h));
        if (!take(r, ",") && (r->at == r->end || *r->at != '}'))
            return fail_header(r, "',' or '}'");
    }
    skip_space(r);
    if (r->at != r->end)
        return fail_header(r, "nothing after '}'");
    if (!h->has_descr || !h->has_order || !h->has_shape)
        return error_set(r->error, STATUS_INPUT, "%s: its .npy header lacks %s", r->path,
                         !h->has_descr   ? "descr"
                         : !h->has_order ? "fortran_order"
                                         : "shape");
    return STATUS_OK;
}

static enum status parse_descr(struct array *a, const char *descr, struct error *error)
{
    bool has_order = descr[0] != '\0' && strchr("<>|=", descr[0]) != NULL;
    const char *kind = descr + has_order;
    bool is_integer = kind[0] == 'i' || kind[0] == 'u';
    int bytes = is_integer && kind[1] != '\0' && kind[2] == '\0' ? kind[1] - '0' : 0;
    if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8)
        return error_set(error, STATUS_INPUT,
                         "%s: its dtype is '%s', expected an integer such as '<u2' or '<i8'", a->file.path,
                         descr);
    a->type =
        (struct integer_type){.bytes = bytes, .is_signed = kind[0] == 'i', .is_big_endian = descr[0] == '>'};
    a->source.is_unsigned = kind[0] == 'u';
    return STATUS_OK;
}

/* Takes the shape over and checks it against the file. */
static enum status place_data(struct array *a, const struct npy_header *h, struct error *error)
{
    a->source.n_documents = h->n_dims == 2 ? h->shape[0] : 1;
    a->source.width = h->shape[h->n_dims - 1];
    a->source.is_bounded = h->n_dims == 2;
    int64_t bytes;
    if (__builtin_mul_overflow(a->source.n_documents, a->source.width, &bytes) ||
        __builtin_mul_overflow(bytes, a->type.bytes, &bytes) || bytes != a->file.size - a->data_at)
        return error_set(
            error, STATUS_INPUT,
            "%s has %" PRId64 " bytes behind its header, expected %" PRId64 " x %" PRId64 " ids of %d bytes",
            a->file.path, a->file.size - a->data_at, a->source.n_documents, a->source.width, a->type.bytes);
    return STATUS_OK;
}

/* Magic, version and the header's place. */
static enum status read_npy_start(struct array *a, int64_t *length, struct error *error)
{
    static const unsigned char magic[6] = "\x93NUMPY";
    unsigned char start[12] = {0};
    int64_t n = a->file.size < (int64_t)sizeof start ? a->file.size : (int64_t)sizeof start;
    TRY(corpus_stream_read(&a->stream, 0, n, start, error));
    if (n < 10 || memcmp(start, magic, sizeof magic) != 0)
        return error_set(error, STATUS_INPUT, "%s does not begin with \\x93NUMPY: it is no .npy file",
                         a->file.path);
    int major = start[6];
    if (major < 1 || major > 3 || start[7] != 0)
        return error_set(error, STATUS_INPUT, "%s: .npy version %d.%d, expected 1.0, 2.0 or 3.0",
                         a->file.path, major, start[7]);
    int64_t header_at = major == 1 ? 10 : 12;
    *length = start[8] | start[9] << 8;
    if (major > 1)
        *length |= (int64_t)start[10] << 16 | (int64_t)start[11] << 24;
    a->data_at = header_at + *length;
    if (*length > MAX_HEADER_BYTES || a->data_at > a->file.size)
        return error_set(error, STATUS_INPUT,
                         "%s: its .npy header is said to have %" PRId64 " bytes of the file's %" PRId64,
                         a->file.path, *length, a->file.size);
    return STATUS_OK;
}

static enum status read_npy_header(struct array *a, struct error *error)
{
    int64_t length = 0;
    void *text;
    TRY(read_npy_start(a, &length, error));
    TRY(memory_allocate(&text, (size_t)length, "a .npy header", error));
    struct npy_header header = {0};
    struct header_reader reader = {
        .path = a->file.path, .at = text, .end = (const char *)text + length, .error = error};
    enum status status;
    TRY_ELSE(corpus_stream_read(&a->stream, a->data_at - length, length, text, error), done);
    TRY_ELSE(parse_header(&reader, &header), done);
    TRY_ELSE(parse_descr(a, header.descr, error), done);
    if (header.is_fortran && header.n_dims == 2)
        status = error_set(error, STATUS_INPUT, "%s: its array is in Fortran order, expected C order",
                           a->file.path);
    else
        status = place_data(a, &header, error);
done:
    memory_free(text);
    return status;
}

enum status corpus_open_npy(const char *path, struct corpus_source **out, struct error *error)
{
    struct array *a;
    TRY(array_open(path, &a, error));
    enum status status = read_npy_header(a, error);
    if (status != STATUS_OK)
        array_close(&a->source);
    else
        *out = &a->source;
    return status;
}
