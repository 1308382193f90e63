/* pipeline/corpus.h: formats and widths, windows, prepended ids, padding, order, digests, and files that lie.
 */
#include "tests/unit/corpus_files.h"

#include "kernels/base/memory.h"
#include "pipeline/corpus.h"
#include "pipeline/hdf5_util.h"
#include "pipeline/permutation.h"

#define MAX_CONTEXT 512

/* ---- what the tests share ---- */

static struct corpus *open_good(const struct corpus_options *o, int64_t n_ids)
{
    struct corpus *corpus = NULL;
    struct error error = {0};
    if (corpus_open(o, n_ids, &corpus, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    return corpus;
}

struct expected_sequence {
    int64_t document, start, length, n_prepended;
    bool continues;
    int64_t first_id; /* of ids[0] */
};

static void check_sequence(const struct sequence *s, int64_t index, const struct expected_sequence *expected)
{
    assert_int_equal(s->index, index);
    assert_int_equal(s->document, expected->document);
    assert_int_equal(s->start, expected->start);
    assert_int_equal(s->length, expected->length);
    assert_int_equal(s->n_prepended, expected->n_prepended);
    assert_int_equal(s->continues, expected->continues);
}

/* Each sequence, described and read. */
static void check_sequences(struct corpus *corpus, const struct expected_sequence *expected, int64_t n)
{
    assert_int_equal(corpus_n_sequences(corpus), n);
    for (int64_t i = 0; i < n; i++) {
        struct sequence described, read;
        int32_t ids[MAX_CONTEXT];
        struct error error = {0};
        if (corpus_describe(corpus, i, &described, &error) != STATUS_OK ||
            corpus_read(corpus, i, &read, ids, &error) != STATUS_OK)
            fail_msg("sequence %lld: %s", (long long)i, error.text);
        check_sequence(&described, i, &expected[i]);
        check_sequence(&read, i, &expected[i]);
        assert_int_equal(ids[0], expected[i].first_id);
    }
}

static void check_ids(struct corpus *corpus, int64_t index, const int32_t *expected, int64_t n)
{
    int32_t ids[MAX_CONTEXT];
    struct sequence s;
    struct error error = {0};
    if (corpus_read(corpus, index, &s, ids, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    assert_int_equal(s.length, n);
    for (int64_t i = 0; i < n; i++)
        assert_int_equal(ids[i], expected[i]);
}

/* Opens and, where that goes well, reads all sequences: one of them must fail with the status and the
 * message. */
static void check_fails(const struct corpus_options *o, int64_t n_ids, enum status wanted,
                        const char *message)
{
    struct corpus *corpus = NULL;
    struct error error = {0};
    enum status status = corpus_open(o, n_ids, &corpus, &error);
    for (int64_t i = 0; status == STATUS_OK && i < corpus_n_sequences(corpus); i++) {
        struct sequence s;
        int32_t ids[MAX_CONTEXT];
        status = corpus_read(corpus, i, &s, ids, &error);
    }
    corpus_close(corpus);
    if (status != wanted || error.status != wanted || strstr(error.text, message) == NULL)
        fail_msg("status %d, \"%s\"; expected %d, \"%s\"", status, error.text, wanted, message);
    assert_int_equal(memory_in_use(), 0);
}

/* ---- widths ---- */

struct width_case {
    const char *name;
    int width;
    bool is_signed, is_big_endian;
};

/* Ids that fit the width, the largest last. */
static int64_t fitting_ids(const struct width_case *c, int64_t ids[6])
{
    int bits = 8 * c->width - c->is_signed;
    int64_t largest = bits >= 31 ? INT32_MAX - 1 : (INT64_C(1) << bits) - 1;
    const int64_t all[] = {0, 1, 127, largest / 3, largest - 1, largest};
    memcpy(ids, all, sizeof all);
    return COUNT(all);
}

static void check_width(const struct corpus_options *o, const struct width_case *c)
{
    int64_t ids[6], n = fitting_ids(c, ids);
    int32_t expected[6];
    for (int64_t i = 0; i < n; i++)
        expected[i] = (int32_t)ids[i];
    struct corpus *corpus = open_good(o, INT32_MAX);
    assert_int_equal(corpus_n_sequences(corpus), 1);
    assert_int_equal(corpus_n_tokens(corpus), n);
    check_ids(corpus, 0, expected, n);
    corpus_close(corpus);
    assert_int_equal(memory_in_use(), 0);
}

static void test_megatron_widths(void **state)
{
    (void)state;
    static const struct width_case cases[] = {
        {"", 0, false, false}, {"1", 1, false, false}, {"2", 1, true, false},
        {"3", 2, true, false}, {"4", 4, true, false},  {"5", 8, true, false},
        {"", 0, false, false}, {"", 0, false, false},  {"8", 2, false, false}};
    for (int dtype = 1; dtype <= 8; dtype++) {
        if (dtype == 6 || dtype == 7)
            continue;
        int64_t ids[6], n = fitting_ids(&cases[dtype], ids);
        const struct megatron_files m = {.dtype = dtype,
                                         .n_sequences = 1,
                                         .lengths = (int32_t[]){(int32_t)n},
                                         .n_bounds = 2,
                                         .bounds = (int64_t[]){0, 1}};
        const struct corpus_options o = {
            .format = CORPUS_MEGATRON, .path = write_megatron("c", &m, ids, n), .context = 16, .limit = -1};
        check_width(&o, &cases[dtype]);
    }
}

static void test_npy_widths(void **state)
{
    (void)state;
    static const struct width_case cases[] = {
        {"|u1", 1, false, false}, {"|i1", 1, true, false},  {"<u1", 1, false, false},
        {"<u2", 2, false, false}, {"<i2", 2, true, false},  {"<u4", 4, false, false},
        {"<i4", 4, true, false},  {"<u8", 8, false, false}, {"<i8", 8, true, false},
        {">u2", 2, false, true},  {">i2", 2, true, true},   {">u4", 4, false, true},
        {">i4", 4, true, true},   {">u8", 8, false, true},  {">i8", 8, true, true},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        for (int major = 1; major <= 3; major++) {
            char header[128];
            int64_t ids[6], n = fitting_ids(&cases[i], ids);
            snprintf(header, sizeof header, "{'descr': '%s', 'fortran_order': False, 'shape': (%lld,), }",
                     cases[i].name, (long long)n);
            struct bytes b = make_npy(major, header, cases[i].width, cases[i].is_big_endian, ids, n);
            const struct corpus_options o = {
                .format = CORPUS_NPY, .path = write_file("c.npy", &b), .context = 16, .limit = -1};
            check_width(&o, &cases[i]);
        }
    }
}

static void test_raw_widths(void **state)
{
    (void)state;
    static const struct width_case cases[] = {{"uint16", 2, false, false}, {"uint32", 4, false, false}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct bytes b = {0};
        int64_t ids[6], n = fitting_ids(&cases[i], ids);
        for (int64_t t = 0; t < n; t++)
            put_integer(&b, (uint64_t)ids[t], cases[i].width, false);
        const struct corpus_options o = {.format = CORPUS_RAW,
                                         .path = write_file("c.raw", &b),
                                         .raw_bytes = cases[i].width,
                                         .context = 16,
                                         .limit = -1};
        check_width(&o, &cases[i]);
    }
}

/* ---- HDF5 files ---- */

struct hdf5_case {
    hid_t type; /* in the file */
    int rank;
    hsize_t sizes[3];
    hsize_t chunk[3]; /* 0: contiguous */
    bool is_deflated;
};

static const char *write_hdf5(const struct hdf5_case *c, const int64_t *ids)
{
    const char *path = file_path("c.h5");
    hdf5_start();
    hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    hid_t group = H5Gcreate2(file, "group", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    hid_t space = H5Screate_simple(c->rank, c->sizes, NULL), creation = H5Pcreate(H5P_DATASET_CREATE);
    if (c->chunk[0] > 0)
        H5Pset_chunk(creation, c->rank, c->chunk);
    if (c->is_deflated) {
        H5Pset_shuffle(creation);
        H5Pset_deflate(creation, 1);
    }
    hid_t dataset = H5Dcreate2(file, "group/ids", c->type, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    assert_true(dataset >= 0);
    hid_t memory_type = H5Tequal(c->type, H5T_STD_U64LE) > 0 ? H5T_NATIVE_UINT64 : H5T_NATIVE_INT64;
    if (ids != NULL)
        assert_true(H5Dwrite(dataset, memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, ids) >= 0);
    H5Dclose(dataset);
    H5Pclose(creation);
    H5Sclose(space);
    H5Gclose(group);
    assert_true(H5Fclose(file) >= 0);
    return path;
}

static void test_hdf5_widths(void **state)
{
    (void)state;
    hdf5_start();
    const struct {
        hid_t type;
        struct width_case width;
    } rows[] = {
        {H5T_STD_U8LE, {"", 1, false, false}},  {H5T_STD_I8LE, {"", 1, true, false}},
        {H5T_STD_U16LE, {"", 2, false, false}}, {H5T_STD_I16BE, {"", 2, true, true}},
        {H5T_STD_U32BE, {"", 4, false, true}},  {H5T_STD_I32LE, {"", 4, true, false}},
        {H5T_STD_U64LE, {"", 8, false, false}}, {H5T_STD_I64BE, {"", 8, true, true}},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        int64_t ids[6], n = fitting_ids(&rows[i].width, ids);
        const struct hdf5_case c = {.type = rows[i].type, .rank = 1, .sizes = {(hsize_t)n}};
        const struct corpus_options o = {.format = CORPUS_HDF5,
                                         .path = write_hdf5(&c, ids),
                                         .dataset = "/group/ids",
                                         .context = 16,
                                         .limit = -1};
        check_width(&o, &rows[i].width);
    }
}

/* Rows longer than what is read at once, in compressed chunks that cut them, against the array they were made
 * from. */
static void test_hdf5_chunks(void **state)
{
    (void)state;
    enum { ROWS = 7, WIDTH = 9001, CONTEXT = 500 };
    int64_t *ids = malloc(ROWS * WIDTH * sizeof *ids);
    for (int64_t i = 0; i < ROWS * WIDTH; i++)
        ids[i] = i % 50021;
    const struct hdf5_case c = {
        .type = H5T_STD_U16LE, .rank = 2, .sizes = {ROWS, WIDTH}, .chunk = {3, 1000}, .is_deflated = true};
    const struct corpus_options o = {.format = CORPUS_HDF5,
                                     .path = write_hdf5(&c, ids),
                                     .dataset = "group/ids",
                                     .context = CONTEXT,
                                     .limit = -1};
    struct corpus *corpus = open_good(&o, 65536);
    const int64_t per_row = (WIDTH + CONTEXT - 1) / CONTEXT;
    assert_int_equal(corpus_n_documents(corpus), ROWS);
    assert_int_equal(corpus_n_sequences(corpus), ROWS * per_row);
    for (int64_t i = 0; i < ROWS * per_row; i++) {
        int64_t index = i * 31 % (ROWS * per_row), row = index / per_row, start = index % per_row * CONTEXT;
        int32_t read[CONTEXT];
        struct sequence s;
        assert_int_equal(corpus_read(corpus, index, &s, read, NULL), STATUS_OK);
        assert_int_equal(s.document, row);
        assert_int_equal(s.start, start);
        assert_int_equal(s.length, WIDTH - start < CONTEXT ? WIDTH - start : CONTEXT);
        for (int64_t t = 0; t < s.length; t++)
            assert_int_equal(read[t], ids[row * WIDTH + start + t]);
    }
    corpus_close(corpus);
    free(ids);
}

/* ---- ids out of range ---- */

static void test_ids_out_of_range(void **state)
{
    (void)state;
    static const struct {
        const char *descr;
        int width;
        uint64_t id;
        int64_t n_ids;
        const char *message;
    } rows[] = {
        {"<u2", 2, 100, 100,
         "c.npy: document 0, token 2 is id 100, expected 0 to 99 (the embedding has 100 rows)"},
        {"<u2", 2, 65535, 65535, "is id 65535, expected 0 to 65534"},
        {"<i2", 2, (uint64_t)-1, 100, "is id -1, expected 0 to 99"},
        {"|i1", 1, (uint64_t)-128, 100, "is id -128,"},
        {"<u4", 4, 4294967295, 100, "is id 4294967295,"},
        {"<u4", 4, 4294967296 - 100, INT64_C(1) << 31, "is id 4294967196,"},
        {"<u4", 4, 2147483648, INT64_C(1) << 40,
         "is id 2147483648,"}, /* ids are run as int32, whatever the rows */
        {"<i8", 8, (UINT64_C(1) << 32) + 5, 100, "is id 4294967301,"}, /* not 5 */
        {"<i8", 8, UINT64_C(1) << 63, 100, "is id -9223372036854775808,"},
        {"<u8", 8, (UINT64_C(1) << 63) + 5, 100, "is id 9223372036854775813,"},
        {">u8", 8, UINT64_MAX, 100, "is id 18446744073709551615,"},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        char header[128];
        const int64_t ids[] = {0, 99, (int64_t)rows[i].id, 1};
        snprintf(header, sizeof header, "{'descr': '%s', 'fortran_order': False, 'shape': (4,), }",
                 rows[i].descr);
        struct bytes b = make_npy(1, header, rows[i].width, rows[i].descr[0] == '>', ids, 4);
        const struct corpus_options o = {
            .format = CORPUS_NPY, .path = write_file("c.npy", &b), .context = 4, .limit = -1};
        check_fails(&o, rows[i].n_ids, STATUS_INPUT, rows[i].message);
    }
}

/* The place that is named: of the document in the file, whatever was cut, skipped or put in front. */
static void test_id_places(void **state)
{
    (void)state;
    const int64_t ids[] = {9, 9, 9, 9, 9, 9, 9, 77, 9, 9};
    const struct megatron_files m = {.dtype = 4,
                                     .n_sequences = 2,
                                     .lengths = (int32_t[]){2, 8},
                                     .n_bounds = 3,
                                     .bounds = (int64_t[]){0, 1, 2}};
    const int32_t prepend[] = {1};
    const struct corpus_options o = {.format = CORPUS_MEGATRON,
                                     .path = write_megatron("c", &m, ids, 10),
                                     .context = 5,
                                     .prepend = prepend,
                                     .n_prepend = 1,
                                     .start = 1,
                                     .limit = -1};
    check_fails(&o, 77, STATUS_INPUT, "c.bin: document 1, token 5 is id 77, expected 0 to 76");

    const struct hdf5_case c = {.type = H5T_STD_U64LE, .rank = 2, .sizes = {2, 5}};
    struct corpus_options h = {.format = CORPUS_HDF5,
                               .path = write_hdf5(&c, ids),
                               .dataset = "group/ids",
                               .context = 2,
                               .limit = -1};
    check_fails(&h, 77, STATUS_INPUT, "c.h5:group/ids: document 1, token 2 is id 77");
    const int64_t wide[10] = {[9] = INT64_MIN + 5};
    h.path = write_hdf5(&c, wide);
    check_fails(&h, 77, STATUS_INPUT,
                "document 1, token 4 is id 9223372036854775813"); /* 2^63 + 5, not clipped */
}

/* ---- windows ---- */

/* Documents of 0, 3, 8, 9, 0 and 20 tokens; token t of document d is 10 d + t. */
static const char *write_documents(void)
{
    static const int32_t lengths[] = {0, 3, 8, 9, 0, 20};
    static const int64_t bounds[] = {0, 1, 2, 3, 4, 5, 6};
    const struct megatron_files m = {
        .dtype = 8, .n_sequences = 6, .lengths = lengths, .n_bounds = 7, .bounds = bounds};
    int64_t ids[40], n = 0;
    for (int64_t d = 0; d < 6; d++)
        for (int64_t t = 0; t < lengths[d]; t++)
            ids[n++] = 10 * d + t;
    return write_megatron("c", &m, ids, n);
}

static struct corpus_options documents_options(void)
{
    return (struct corpus_options){
        .format = CORPUS_MEGATRON, .path = write_documents(), .context = 8, .limit = -1};
}

static void test_windows(void **state)
{
    (void)state;
    static const struct expected_sequence expected[] = {
        {1, 0, 3, 0, false, 10}, {2, 0, 8, 0, false, 20}, {3, 0, 8, 0, false, 30},  {3, 8, 1, 0, false, 38},
        {5, 0, 8, 0, false, 50}, {5, 8, 8, 0, false, 58}, {5, 16, 4, 0, false, 66},
    };
    const struct corpus_options o = documents_options();
    struct corpus *corpus = open_good(&o, 100);
    assert_int_equal(corpus_n_documents(corpus), 6);
    assert_int_equal(corpus_n_empty(corpus), 2);
    assert_int_equal(corpus_n_tokens(corpus), 40);
    assert_int_equal(corpus_longest_run(corpus), 8);
    check_sequences(corpus, expected, COUNT(expected));
    check_ids(corpus, 6, (int32_t[]){66, 67, 68, 69}, 4);
    corpus_close(corpus);
}

static void test_start_and_limit(void **state)
{
    (void)state;
    static const struct {
        int64_t start, limit, n, first_id;
    } rows[] = {{0, 2, 2, 10},   {2, 2, 2, 30}, {5, -1, 2, 58},
                {6, 100, 1, 66}, {7, -1, 0, 0}, {INT64_MAX, INT64_MAX, 0, 0},
                {3, 0, 0, 0}};
    struct corpus_options o = documents_options();
    for (size_t i = 0; i < COUNT(rows); i++) {
        o.start = rows[i].start;
        o.limit = rows[i].limit;
        struct corpus *corpus = open_good(&o, 100);
        int32_t ids[8];
        struct sequence s;
        assert_int_equal(corpus_n_sequences(corpus), rows[i].n);
        if (rows[i].n > 0) {
            assert_int_equal(corpus_read(corpus, 0, &s, ids, NULL), STATUS_OK);
            assert_int_equal(s.index, 0);
            assert_int_equal(ids[0], rows[i].first_id);
        }
        corpus_close(corpus);
    }
}

/* Without document bounds: one document, cut every context tokens. */
static void test_unbounded(void **state)
{
    (void)state;
    const int64_t ids[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    static const struct expected_sequence expected[] = {
        {0, 0, 4, 0, false, 0}, {0, 4, 4, 0, false, 4}, {0, 8, 2, 0, false, 8}};
    static const struct expected_sequence carried[] = {
        {0, 0, 4, 0, false, 0}, {0, 4, 4, 0, true, 4}, {0, 8, 2, 0, true, 8}};
    struct corpus_options o = {
        .format = CORPUS_NPY, .path = write_npy("c.npy", 0, 10, ids), .context = 4, .limit = -1};
    struct corpus *corpus = open_good(&o, 10);
    assert_int_equal(corpus_n_documents(corpus), 1);
    check_sequences(corpus, expected, COUNT(expected));
    corpus_close(corpus);
    o.carry = true;
    corpus = open_good(&o, 10);
    assert_int_equal(corpus_longest_run(corpus), 10);
    check_sequences(corpus, carried, COUNT(carried));
    corpus_close(corpus);
}

/* A document's sequences lie anywhere in the data, in any order, overlapping even. */
static void test_scattered_documents(void **state)
{
    (void)state;
    const int64_t ids[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    const struct megatron_files m = {.dtype = 8,
                                     .n_sequences = 5,
                                     .lengths = (int32_t[]){3, 0, 4, 2, 3},
                                     .pointers = (int64_t[]){14, 20, 2, 0, 4},
                                     .n_bounds = 4,
                                     .bounds = (int64_t[]){0, 3, 3, 5},
                                     .extra_bytes = 5}; /* modes, as multimodal datasets have them */
    static const struct expected_sequence expected[] = {
        {0, 0, 5, 0, false, 7}, {0, 5, 2, 0, false, 3}, {2, 0, 5, 0, false, 0}};
    const struct corpus_options o = {
        .format = CORPUS_MEGATRON, .path = write_megatron("c", &m, ids, 10), .context = 5, .limit = -1};
    struct corpus *corpus = open_good(&o, 10);
    assert_int_equal(corpus_n_empty(corpus), 1);
    assert_int_equal(corpus_n_tokens(corpus), 12);
    check_sequences(corpus, expected, COUNT(expected));
    check_ids(corpus, 0, (int32_t[]){7, 8, 9, 1, 2}, 5);
    check_ids(corpus, 2, (int32_t[]){0, 1, 2, 3, 4}, 5);
    check_ids(corpus, 1, (int32_t[]){3, 4}, 2);
    check_ids(corpus, 0, (int32_t[]){7, 8, 9, 1, 2}, 5); /* back in the same document */
    corpus_close(corpus);
}

static void test_no_documents(void **state)
{
    (void)state;
    const struct megatron_files none = {.dtype = 8, .n_bounds = 1, .bounds = (int64_t[]){0}};
    struct corpus_options o = {
        .format = CORPUS_MEGATRON, .path = write_megatron("c", &none, NULL, 0), .context = 5, .limit = -1};
    for (int i = 0; i < 4; i++) {
        char digest[33];
        o.has_shuffle = i % 2 == 1;
        o.carry = i / 2 == 1;
        struct corpus *corpus = open_good(&o, 10);
        assert_int_equal(corpus_n_sequences(corpus), 0);
        assert_int_equal(corpus_n_documents(corpus), 0);
        assert_int_equal(corpus_longest_run(corpus), 0);
        assert_int_equal(corpus_digest(corpus, 0, digest, NULL), STATUS_OK);
        corpus_close(corpus);
    }
    /* rows without tokens, as many as one likes in no bytes */
    struct bytes b =
        make_npy(1, "{'descr': '<i8', 'fortran_order': False, 'shape': (4611686018427387904, 0), }", 8, false,
                 NULL, 0);
    o = (struct corpus_options){
        .format = CORPUS_NPY, .path = write_file("c.npy", &b), .context = 5, .limit = -1, .has_pad = true};
    struct corpus *corpus = open_good(&o, 10);
    assert_int_equal(corpus_n_sequences(corpus), 0);
    assert_int_equal(corpus_n_empty(corpus), INT64_C(1) << 62);
    corpus_close(corpus);
}

/* ---- prepended ids ---- */

/* Id 0 is an id: neither "no id" nor the end of anything (field reports of a BOS of 0 that was never put). */
static void test_prepend_zero(void **state)
{
    (void)state;
    const int64_t ids[] = {5, 6, 7};
    const int32_t zero[] = {0};
    const struct corpus_options o = {.format = CORPUS_NPY,
                                     .path = write_npy("c.npy", 1, 3, ids),
                                     .context = 8,
                                     .prepend = zero,
                                     .n_prepend = 1,
                                     .limit = -1};
    struct corpus *corpus = open_good(&o, 10);
    check_sequences(corpus, (struct expected_sequence[]){{0, 0, 4, 1, false, 0}}, 1);
    check_ids(corpus, 0, (int32_t[]){0, 5, 6, 7}, 4);
    assert_int_equal(corpus_longest_run(corpus), 4);
    corpus_close(corpus);
}

/* Where a sequence begins with the ids already they are not put twice. Windows lie every context - n_prepend
 * tokens. */
static void test_prepend_once(void **state)
{
    (void)state;
    const int64_t rows[] = {
        1, 2, 3, 4, 5, 6, /* begins with 1, 2; so does neither 3, 4 nor 5, 6 */
        1, 1, 2, 2, 1, 2, /* 1, 1 is not 1, 2 */
        2, 1, 2, 1, 1, 9,
    };
    const int32_t prepend[] = {1, 2};
    static const struct expected_sequence expected[] = {
        {0, 0, 4, 0, false, 1}, {0, 4, 4, 2, false, 1}, {1, 0, 6, 2, false, 1},
        {1, 4, 2, 0, false, 1}, {2, 0, 6, 2, false, 1}, {2, 4, 4, 2, false, 1},
    };
    struct corpus_options o = {.format = CORPUS_NPY,
                               .path = write_npy("c.npy", 3, 6, rows),
                               .context = 6,
                               .prepend = prepend,
                               .n_prepend = 2,
                               .limit = -1};
    struct corpus *corpus = open_good(&o, 10);
    check_sequences(corpus, expected, COUNT(expected));
    check_ids(corpus, 0, (int32_t[]){1, 2, 3, 4}, 4);
    check_ids(corpus, 1, (int32_t[]){1, 2, 5, 6}, 4);
    check_ids(corpus, 2, (int32_t[]){1, 2, 1, 1, 2, 2}, 6);
    check_ids(corpus, 3, (int32_t[]){1, 2}, 2);
    corpus_close(corpus);
    o.carry = true; /* nothing before a window that goes on */
    static const struct expected_sequence carried[] = {
        {0, 0, 4, 0, false, 1}, {0, 4, 2, 0, true, 5},  {1, 0, 6, 2, false, 1},
        {1, 4, 2, 0, true, 1},  {2, 0, 6, 2, false, 1}, {2, 4, 2, 0, true, 1},
    };
    corpus = open_good(&o, 10);
    check_sequences(corpus, carried, COUNT(carried));
    assert_int_equal(corpus_longest_run(corpus), 8);
    corpus_close(corpus);
    o.start = 1; /* inside row 0: a run begins there */
    static const struct expected_sequence from_inside[] = {{0, 4, 4, 2, false, 1}, {1, 0, 6, 2, false, 1}};
    o.limit = 2;
    corpus = open_good(&o, 10);
    check_sequences(corpus, from_inside, COUNT(from_inside));
    corpus_close(corpus);
}

/* A sequence of nothing but the start of what is prepended, and one longer than is compared at a time. */
static void test_prepend_long(void **state)
{
    (void)state;
    enum { N = 150 };
    int32_t prepend[N];
    int64_t rows[2 * N];
    for (int i = 0; i < N; i++) {
        prepend[i] = i;
        rows[i] = rows[N + i] = i;
    }
    rows[N + N - 1] = 0; /* the last differs */
    const struct corpus_options o = {.format = CORPUS_NPY,
                                     .path = write_npy("c.npy", 2, N, rows),
                                     .context = 2 * N,
                                     .prepend = prepend,
                                     .n_prepend = N,
                                     .limit = -1};
    static const struct expected_sequence expected[] = {{0, 0, N, 0, false, 0}, {1, 0, 2 * N, N, false, 0}};
    struct corpus *corpus = open_good(&o, N);
    check_sequences(corpus, expected, 2);
    corpus_close(corpus);
}

/* ---- padding ---- */

static void test_padding(void **state)
{
    (void)state;
    const int64_t rows[] = {
        5, 6, 7, 0, 0, 0, /* right */
        0, 0, 0, 5, 6, 7, /* left */
        5, 0, 0, 6, 0, 7, /* none: 0 is a separator too, and stays */
        0, 5, 0, 6, 0, 0, /* both ends: the right one is the padding, the first 0 stays */
        0, 0, 0, 0, 0, 0, /* nothing else: no sequence */
        5, 6, 7, 8, 9, 1,
    };
    static const struct expected_sequence expected[] = {
        {0, 0, 3, 0, false, 5}, {1, 3, 3, 0, false, 5}, {2, 0, 6, 0, false, 5},
        {3, 0, 4, 0, false, 0}, {5, 0, 6, 0, false, 5},
    };
    struct corpus_options o = {.format = CORPUS_NPY,
                               .path = write_npy("c.npy", 6, 6, rows),
                               .context = 6,
                               .limit = -1,
                               .has_pad = true,
                               .pad = 0};
    struct corpus *corpus = open_good(&o, 10);
    assert_int_equal(corpus_n_documents(corpus), 6);
    assert_int_equal(corpus_n_empty(corpus), 1);
    assert_int_equal(corpus_n_tokens(corpus), 36);
    check_sequences(corpus, expected, COUNT(expected));
    check_ids(corpus, 1, (int32_t[]){5, 6, 7}, 3);
    check_ids(corpus, 2, (int32_t[]){5, 0, 0, 6, 0, 7}, 6);
    check_ids(corpus, 3, (int32_t[]){0, 5, 0, 6}, 4);
    corpus_close(corpus);
    o.context = 2; /* rows longer than the context */
    static const struct expected_sequence windows[] = {
        {0, 0, 2, 0, false, 5}, {0, 2, 1, 0, false, 7}, {1, 3, 2, 0, false, 5}, {1, 5, 1, 0, false, 7},
        {2, 0, 2, 0, false, 5}, {2, 2, 2, 0, false, 0}, {2, 4, 2, 0, false, 0}, {3, 0, 2, 0, false, 0},
        {3, 2, 2, 0, false, 0}, {5, 0, 2, 0, false, 5}, {5, 2, 2, 0, false, 7}, {5, 4, 2, 0, false, 9},
    };
    corpus = open_good(&o, 10);
    check_sequences(corpus, windows, COUNT(windows));
    corpus_close(corpus);
}

/* A pad outside of the ids, as -100 or a vocabulary's size, is cut off before ids are checked, but not inside
 * a row. */
static void test_padding_outside_of_ids(void **state)
{
    (void)state;
    const int64_t rows[] = {5, -100, -100, -100, 6, 7, 5, -100, 6};
    struct corpus_options o = {.format = CORPUS_NPY,
                               .path = write_npy("c.npy", 3, 3, rows),
                               .context = 6,
                               .limit = 2,
                               .has_pad = true,
                               .pad = -100};
    static const struct expected_sequence expected[] = {{0, 0, 1, 0, false, 5}, {1, 1, 2, 0, false, 6}};
    struct corpus *corpus = open_good(&o, 10);
    check_sequences(corpus, expected, 2);
    corpus_close(corpus);
    o.limit = -1;
    check_fails(&o, 10, STATUS_INPUT, "document 2, token 1 is id -100");
}

static void test_padding_without_rows(void **state)
{
    (void)state;
    const int64_t ids[] = {5, 0, 0};
    const struct corpus_options o = {.format = CORPUS_NPY,
                                     .path = write_npy("c.npy", 0, 3, ids),
                                     .context = 3,
                                     .limit = -1,
                                     .has_pad = true};
    check_fails(&o, 10, STATUS_USAGE, "has no rows, only one run of tokens");
}

/* ---- order ---- */

/* First elements and the last, computed by another implementation (Python's integers) of what permutation.h
 * says. */
static void test_permutation_golden(void **state)
{
    (void)state;
    static const struct {
        int64_t n;
        uint64_t seed;
        int64_t first[6], last;
    } rows[] = {
        {10, 0, {2, 0, 8, 1, 9, 7}, 3},
        {10, 1, {1, 6, 8, 0, 3, 5}, 9},
        {1000, 7, {19, 470, 979, 407, 520, 149}, 447},
        {3244, 1, {3205, 2914, 115, 2309, 1808, 334}, 43},
        {INT64_C(1) << 40,
         42,
         {503068395832, 552234470656, 869473632459, 277315100913, 474089322173, 309855938536},
         793833353475},
        {INT64_C(1) << 62,
         9007199254740991,
         {168011096816172490, 4592523497859671625, 4179903918522791965, 2463389015933122226,
          1531523509559059744, 27163194435471383},
         1129391504597770982},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        struct permutation p;
        permutation_init(&p, rows[i].n, rows[i].seed);
        for (int64_t k = 0; k < 6; k++)
            assert_int_equal(permutation_get(&p, k), rows[i].first[k]);
        assert_int_equal(permutation_get(&p, rows[i].n - 1), rows[i].last);
    }
}

static void test_permutation_is_one(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 1000, 4099};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        for (uint64_t seed = 0; seed < 3; seed++) {
            struct permutation p;
            bool *is_taken = calloc((size_t)sizes[i], sizeof *is_taken);
            permutation_init(&p, sizes[i], seed);
            for (int64_t k = 0; k < sizes[i]; k++) {
                int64_t to = permutation_get(&p, k);
                assert_true(to >= 0 && to < sizes[i] && !is_taken[to]);
                is_taken[to] = true;
            }
            free(is_taken);
        }
    }
}

/* Rows, shuffled: row permutation(i) is sequence i; start and limit count after that. */
static void test_shuffle(void **state)
{
    (void)state;
    int64_t ids[20];
    for (int64_t i = 0; i < 20; i++)
        ids[i] = i;
    static const int64_t order[] = {1, 6, 8, 0, 3, 5}; /* of 10 with seed 1, as above */
    struct corpus_options o = {.format = CORPUS_NPY,
                               .path = write_npy("c.npy", 10, 2, ids),
                               .context = 2,
                               .limit = -1,
                               .has_shuffle = true,
                               .shuffle_seed = 1};
    struct corpus *corpus = open_good(&o, 20);
    for (int64_t i = 0; i < 6; i++)
        check_ids(corpus, i, (int32_t[]){(int32_t)(2 * order[i]), (int32_t)(2 * order[i] + 1)}, 2);
    corpus_close(corpus);
    o.start = 2;
    o.limit = 3;
    corpus = open_good(&o, 20);
    assert_int_equal(corpus_n_sequences(corpus), 3);
    for (int64_t i = 0; i < 3; i++)
        check_ids(corpus, i, (int32_t[]){(int32_t)(2 * order[i + 2]), (int32_t)(2 * order[i + 2] + 1)}, 2);
    corpus_close(corpus);
}

/* With carry, documents change places, and their windows stay together and in order. */
static void test_shuffle_with_carry(void **state)
{
    (void)state;
    struct corpus_options o = documents_options();
    o.carry = o.has_shuffle = true;
    o.shuffle_seed = 5;
    struct permutation p;
    permutation_init(&p, 6, 5);
    static const int64_t lengths[] = {0, 3, 8, 9, 0, 20};
    struct expected_sequence expected[16];
    int64_t n = 0;
    for (int64_t rank = 0; rank < 6; rank++) {
        int64_t d = permutation_get(&p, rank);
        for (int64_t at = 0; at < lengths[d]; at += 8)
            expected[n++] = (struct expected_sequence){d, at,     lengths[d] - at < 8 ? lengths[d] - at : 8,
                                                       0, at > 0, 10 * d + at};
    }
    assert_int_equal(n, 7);
    struct corpus *corpus = open_good(&o, 100);
    check_sequences(corpus, expected, n);
    assert_int_equal(corpus_longest_run(corpus), 20);
    corpus_close(corpus);
}

/* ---- many documents: marks and blocks against a plain list ---- */

enum { MANY = 5000, MORE = 150000 /* than there are marks for each */, MANY_CONTEXT = 16 };

struct list {
    struct expected_sequence *items;
    int64_t n;
};

static int64_t many_length(int64_t document, int64_t longest)
{
    uint64_t x = (uint64_t)document * UINT64_C(0x9e3779b97f4a7c15);
    return (int64_t)(x >> 40) % (longest + 1);
}

static int64_t many_id(int64_t document, int64_t token)
{
    return (document * 31 + token) % 1000 + 1;
}

static const char *write_many(int64_t n_documents, int64_t longest)
{
    int32_t *lengths = malloc((size_t)n_documents * sizeof *lengths);
    int64_t *bounds = calloc((size_t)n_documents + 1, sizeof *bounds);
    int64_t *ids = malloc((size_t)(n_documents * longest) * sizeof *ids), n = 0;
    for (int64_t d = 0; d < n_documents; d++) {
        lengths[d] = (int32_t)many_length(d, longest);
        bounds[d + 1] = d + 1;
        for (int64_t t = 0; t < lengths[d]; t++)
            ids[n++] = many_id(d, t);
    }
    const struct megatron_files m = {.dtype = 8,
                                     .n_sequences = n_documents,
                                     .lengths = lengths,
                                     .n_bounds = n_documents + 1,
                                     .bounds = bounds};
    const char *path = write_megatron("many", &m, ids, n);
    free(ids);
    free(bounds);
    free(lengths);
    return path;
}

/* With carry where the documents have an order. */
static struct list list_many(int64_t n_documents, int64_t longest, const struct permutation *order)
{
    size_t room = (size_t)n_documents * (size_t)(longest / MANY_CONTEXT + 1);
    struct list list = {.items = malloc(room * sizeof *list.items)};
    for (int64_t rank = 0; rank < n_documents; rank++) {
        int64_t d = order == NULL ? rank : permutation_get(order, rank), length = many_length(d, longest);
        for (int64_t at = 0; at < length; at += MANY_CONTEXT)
            list.items[list.n++] =
                (struct expected_sequence){.document = d,
                                           .start = at,
                                           .length = length - at < MANY_CONTEXT ? length - at : MANY_CONTEXT,
                                           .continues = order != NULL && at > 0,
                                           .first_id = many_id(d, at)};
    }
    return list;
}

/* n sequences, step apart, around and around. */
static void check_many(const struct corpus_options *o, const struct list *list,
                       const struct permutation *windows, int64_t n, int64_t step)
{
    struct corpus *corpus = open_good(o, 1001);
    assert_int_equal(corpus_n_sequences(corpus), list->n);
    for (int64_t i = 0; i < n; i++) {
        int64_t index = i * step % list->n;
        const struct expected_sequence *e =
            &list->items[windows == NULL ? index : permutation_get(windows, index)];
        struct sequence s;
        int32_t ids[MANY_CONTEXT];
        assert_int_equal(corpus_read(corpus, index, &s, ids, NULL), STATUS_OK);
        check_sequence(&s, index, e);
        assert_int_equal(ids[0], e->first_id);
        assert_int_equal(ids[s.length - 1], many_id(e->document, e->start + e->length - 1));
    }
    corpus_close(corpus);
}

static void check_many_orders(int64_t n_documents, int64_t longest, bool is_thorough)
{
    struct corpus_options o = {.format = CORPUS_MEGATRON,
                               .path = write_many(n_documents, longest),
                               .context = MANY_CONTEXT,
                               .limit = -1};
    struct list list = list_many(n_documents, longest, NULL);
    int64_t n = is_thorough ? list.n : 1000;
    check_many(&o, &list, NULL, n, 1);
    check_many(&o, &list, NULL, n, 7919); /* a prime: far apart, and all of them in the end */

    struct permutation p;
    o.has_shuffle = true;
    o.shuffle_seed = 3;
    permutation_init(&p, list.n, 3);
    check_many(&o, &list, &p, n, 1);
    free(list.items);

    o.carry = true;
    permutation_init(&p, n_documents, 3);
    list = list_many(n_documents, longest, &p);
    n = is_thorough ? list.n : 1000;
    check_many(&o, &list, NULL, n, 1);
    check_many(&o, &list, NULL, n, 7919);
    free(list.items);
}

static void test_many_documents(void **state)
{
    (void)state;
    check_many_orders(MANY, MANY_CONTEXT, true); /* one window each at most */
    check_many_orders(MANY, 50, true);
    check_many_orders(MORE, MANY_CONTEXT, false);
    check_many_orders(MORE, 20, false);
}

/* Blocks in which each document has one window are found without measuring all of it; one empty row changes
 * that. */
static void test_blocks_of_single_windows(void **state)
{
    (void)state;
    enum { ROWS = 3000 };
    int64_t *ids = malloc(ROWS * 2 * sizeof *ids);
    for (int64_t i = 0; i < ROWS * 2; i++)
        ids[i] = i / 2 + 1;
    ids[2 * 1500] = ids[2 * 1500 + 1] = 0; /* all padding */
    ids[2 * 10] = 0;                       /* padded on the left */
    const struct corpus_options o = {.format = CORPUS_NPY,
                                     .path = write_npy("c.npy", ROWS, 2, ids),
                                     .context = 4,
                                     .limit = -1,
                                     .has_pad = true};
    struct corpus *corpus = open_good(&o, ROWS + 1);
    assert_int_equal(corpus_n_sequences(corpus), ROWS - 1);
    for (int64_t i = ROWS - 2; i >= 0; i--) {
        struct sequence s;
        assert_int_equal(corpus_describe(corpus, i, &s, NULL), STATUS_OK);
        assert_int_equal(s.document, i < 1500 ? i : i + 1);
        assert_int_equal(s.length, i == 10 ? 1 : 2);
        assert_int_equal(s.start, i == 10);
    }
    corpus_close(corpus);
    free(ids);
}

/* A read of more than any buffer, and then back to the start. */
static void test_long_reads(void **state)
{
    (void)state;
    enum { N = 700001 };
    struct bytes b = {0};
    for (uint64_t i = 0; i < N; i++)
        put_integer(&b, i, 4, false);
    const struct corpus_options o = {.format = CORPUS_RAW,
                                     .path = write_file("c.raw", &b),
                                     .raw_bytes = 4,
                                     .context = 300000,
                                     .limit = -1};
    struct corpus *corpus = open_good(&o, N);
    int32_t *ids = malloc(300000 * sizeof *ids);
    static const int64_t order[] = {0, 1, 2, 0, 2, 1};
    for (size_t i = 0; i < COUNT(order); i++) {
        struct sequence s;
        assert_int_equal(corpus_read(corpus, order[i], &s, ids, NULL), STATUS_OK);
        assert_int_equal(s.length, order[i] == 2 ? 100001 : 300000);
        for (int64_t t = 0; t < s.length; t++)
            if (ids[t] != 300000 * order[i] + t)
                fail_msg("sequence %lld, token %lld is %d", (long long)order[i], (long long)t, (int)ids[t]);
    }
    free(ids);
    corpus_close(corpus);
}

/* ---- digests ---- */

static void digest_of(const struct corpus_options *o, int64_t n, char digest[33])
{
    struct corpus *corpus = open_good(o, 1000);
    struct error error = {0};
    if (corpus_digest(corpus, n < 0 ? corpus_n_sequences(corpus) : n, digest, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    assert_int_equal(strlen(digest), 32);
    assert_int_equal(strspn(digest, "0123456789abcdef"), 32);
    corpus_close(corpus);
}

static void test_digest(void **state)
{
    (void)state;
    int64_t ids[600];
    for (int64_t i = 0; i < 600; i++)
        ids[i] = i;
    struct corpus_options o = {
        .format = CORPUS_NPY, .path = write_npy("a.npy", 200, 3, ids), .context = 3, .limit = -1};
    char whole[33], other[33];
    digest_of(&o, 100, whole);
    digest_of(&o, 100, other);
    assert_string_equal(whole, other);
    digest_of(&o, 99, other);
    assert_string_not_equal(whole, other);
    o.path = write_npy("a.npy", 100, 3, ids); /* the other is this one, grown */
    digest_of(&o, -1, other);
    assert_string_equal(whole, other);
    static const int64_t places[] = {0, 150, 299}; /* up to 256 sequences each token counts */
    for (size_t i = 0; i < COUNT(places); i++) {
        ids[places[i]]++;
        o.path = write_npy("a.npy", 100, 3, ids);
        digest_of(&o, -1, other);
        assert_string_not_equal(whole, other);
        ids[places[i]]--;
    }
    o.path = write_npy("a.npy", 60, 5, ids); /* the same tokens, other bounds */
    o.context = 5;
    digest_of(&o, -1, other);
    assert_string_not_equal(whole, other);
    o.context = 3;
    o.path = write_npy("a.npy", 100, 3, ids);
    const int32_t prepend[] = {0};
    o.prepend = prepend;
    o.n_prepend = 1;
    digest_of(&o, -1, other);
    assert_string_not_equal(whole, other);
}

static void test_digest_of_fewer(void **state)
{
    (void)state;
    const struct corpus_options o = documents_options();
    struct corpus *corpus = open_good(&o, 100);
    char digest[33];
    struct error error = {0};
    assert_int_equal(corpus_digest(corpus, 8, digest, &error), STATUS_INPUT);
    assert_non_null(strstr(error.text, "c.bin gives 7 sequences, expected at least 8"));
    corpus_close(corpus);
}

/* ---- broken files ---- */

static void test_broken_options(void **state)
{
    (void)state;
    const int32_t prepend[] = {3, 100};
    struct corpus_options o = documents_options();
    o.prepend = prepend;
    o.n_prepend = 2;
    check_fails(&o, 100, STATUS_USAGE,
                "corpus.prepend[1] is 100, expected 0 to 99 (the embedding has 100 rows)");
    o.context = 2;
    check_fails(&o, 1000, STATUS_USAGE, "a context of 2 leaves no room behind 2 prepended ids");
    o.n_prepend = 0;
    o.context = 0;
    check_fails(&o, 1000, STATUS_USAGE, "a context of 0 leaves no room");
    o = documents_options();
    o.start = -1;
    check_fails(&o, 1000, STATUS_USAGE, "start -1");
}

static void test_broken_megatron(void **state)
{
    (void)state;
#define GOOD .dtype = 8, .n_sequences = 3, .lengths = lengths, .n_bounds = 3, .bounds = bounds
    static const int32_t lengths[] = {2, 3, 1}, negative[] = {2, -3, 1}, long_one[] = {2, 5, 1};
    static const int64_t bounds[] = {0, 2, 3}, late[] = {1, 2, 3}, down[] = {0, 2, 1}, past[] = {0, 4, 3},
                         less[] = {0, 1, 2}, below[] = {0, -1, 3}, outside[] = {0, 4, 11},
                         before[] = {0, -2, 10}, wild[] = {0, INT64_MAX, 10};
    static const struct {
        struct megatron_files files;
        const char *message;
    } rows[] = {
        {{GOOD, .magic = "MMIDIDX\0\1"}, "c.idx does not begin with MMIDIDX"},
        {{GOOD, .version = 2}, "version 2, expected 1"},
        {{GOOD, .version = UINT64_MAX}, "version 18446744073709551615, expected 1"},
        {{.dtype = 0, .n_sequences = 3, .lengths = lengths, .n_bounds = 3, .bounds = bounds},
         "dtype code 0, expected"},
        {{.dtype = 9, .n_sequences = 3, .lengths = lengths, .n_bounds = 3, .bounds = bounds},
         "dtype code 9, expected"},
        {{.dtype = 6, .n_sequences = 3, .lengths = lengths, .n_bounds = 3, .bounds = bounds},
         "its tokens are float64"},
        {{.dtype = 7, .n_sequences = 3, .lengths = lengths, .n_bounds = 3, .bounds = bounds},
         "its tokens are float32"},
        {{GOOD, .claimed_sequences = 4}, "4 sequences and 3 document bounds do not fit in its 94 bytes"},
        {{GOOD, .claimed_sequences = -1}, "18446744073709551615 sequences and 3 document bounds do not fit"},
        {{GOOD, .claimed_sequences = INT64_MAX / 12 * 2 + 2}, "do not fit"}, /* times 12 overflows */
        {{GOOD, .claimed_bounds = INT64_MIN},
         "3 sequences and 9223372036854775808 document bounds do not fit"},
        {{GOOD, .claimed_bounds = INT64_C(1) << 61}, "do not fit"}, /* times 8 is 0 */
        {{GOOD, .claimed_bounds = 2}, "8 bytes behind the document bounds, expected none"},
        {{GOOD, .extra_bytes = 2},
         "2 bytes behind the document bounds, expected none (or a mode for each of the 3"},
        {{.dtype = 8, .n_sequences = 3, .lengths = lengths, .n_bounds = 0}, "no document bounds"},
        {{.dtype = 8, .n_sequences = 3, .lengths = lengths, .n_bounds = 1, .bounds = bounds},
         "3 sequences but no documents"},
        {{.dtype = 8, .n_sequences = 3, .lengths = negative, .n_bounds = 3, .bounds = bounds},
         "sequence 1 has a length of -3 tokens"},
        {{.dtype = 8, .n_sequences = 3, .lengths = long_one, .n_bounds = 3, .bounds = bounds},
         "sequence 1 is bytes 4 to 4 + 10 of"},
        {{.dtype = 8,
          .n_sequences = 3,
          .lengths = lengths,
          .n_bounds = 3,
          .bounds = bounds,
          .pointers = outside},
         "sequence 2 is bytes 11 to 11 + 2 of"},
        {{.dtype = 8,
          .n_sequences = 3,
          .lengths = lengths,
          .n_bounds = 3,
          .bounds = bounds,
          .pointers = before},
         "sequence 1 is bytes -2 to -2 + 6 of"},
        {{.dtype = 8,
          .n_sequences = 3,
          .lengths = lengths,
          .n_bounds = 3,
          .bounds = bounds,
          .pointers = wild},
         "sequence 1 is bytes 9223372036854775807 to"},
        {{.dtype = 8, .n_sequences = 3, .lengths = lengths, .n_bounds = 3, .bounds = late},
         "document 0 begins at sequence 1, expected 0"},
        {{.dtype = 8, .n_sequences = 3, .lengths = lengths, .n_bounds = 3, .bounds = down},
         "document 1 is sequences 2 to 1"},
        {{.dtype = 8, .n_sequences = 3, .lengths = lengths, .n_bounds = 3, .bounds = past},
         "document 0 is sequences 0 to 4 (its end not included), expected ascending bounds within 3 "
         "sequences"},
        {{.dtype = 8, .n_sequences = 3, .lengths = lengths, .n_bounds = 3, .bounds = below},
         "document 0 is sequences 0 to -1"},
        {{.dtype = 8, .n_sequences = 3, .lengths = lengths, .n_bounds = 3, .bounds = less},
         "the last document ends at sequence 2, expected all 3 sequences"},
    };
#undef GOOD
    const int64_t ids[] = {1, 2, 3, 4, 5, 6};
    for (size_t i = 0; i < COUNT(rows); i++) {
        const struct corpus_options o = {.format = CORPUS_MEGATRON,
                                         .path = write_megatron("c", &rows[i].files, ids, 6),
                                         .context = 8,
                                         .limit = -1};
        check_fails(&o, 100, STATUS_INPUT, rows[i].message);
    }
}

/* Cut off anywhere, no index is taken for a whole one; nor a .bin. */
static void test_cut_megatron(void **state)
{
    (void)state;
    struct corpus_options o = documents_options();
    struct stat index, data;
    assert_int_equal(stat(file_path("c.idx"), &index), 0);
    assert_int_equal(stat(file_path("c.bin"), &data), 0);
    for (off_t size = 0; size < index.st_size; size++) {
        write_documents();
        assert_int_equal(truncate(file_path("c.idx"), size), 0);
        check_fails(&o, 100, STATUS_INPUT, "c.idx");
    }
    for (off_t size = 0; size < data.st_size; size += 7) {
        write_documents();
        assert_int_equal(truncate(file_path("c.bin"), size), 0);
        check_fails(&o, 100, STATUS_INPUT, "c.bin, which has");
    }
}

static void test_broken_npy(void **state)
{
    (void)state;
#define HEAD(descr, order, shape) "{'descr': " descr ", 'fortran_order': " order ", 'shape': " shape ", }"
    static const struct {
        const char *header, *message;
    } rows[] = {
        {HEAD("'<f4'", "False", "(8,)"), "its dtype is '<f4', expected an integer"},
        {HEAD("'|b1'", "False", "(8,)"), "its dtype is '|b1'"},
        {HEAD("'<i3'", "False", "(8,)"), "its dtype is '<i3'"},
        {HEAD("'<i16'", "False", "(8,)"), "its dtype is '<i16'"},
        {HEAD("'<U2'", "False", "(8,)"), "its dtype is '<U2'"},
        {HEAD("''", "False", "(8,)"), "its dtype is ''"},
        {HEAD("'i'", "False", "(8,)"), "its dtype is 'i'"},
        {HEAD("[('a', '<i8')]", "False", "(8,)"), "expected an integer dtype such as '<u2', found '[("},
        {HEAD("'<i8'", "True", "(2, 4)"), "its array is in Fortran order"},
        {HEAD("'<i8'", "Maybe", "(8,)"), "expected True or False, found 'Maybe"},
        {HEAD("'<i8'", "False", "(2, 2, 2)"), "its array has 3 axes, expected 1 or 2"},
        {HEAD("'<i8'", "False", "()"), "its array has 0 axes"},
        {HEAD("'<i8'", "False", "8"), "expected a shape in brackets, found '8"},
        {HEAD("'<i8'", "False", "(8"), "expected a size, found '}"},
        {HEAD("'<i8'", "False", "(-8,)"), "expected a size, found '-8"},
        {HEAD("'<i8'", "False", "(4 2)"), "expected ',' or ')' in the shape"},
        {HEAD("'<i8'", "False", "(9,)"), "has 64 bytes behind its header, expected 1 x 9 ids of 8 bytes"},
        {HEAD("'<i8'", "False", "(7,)"), "has 64 bytes behind its header, expected 1 x 7"},
        {HEAD("'<i8'", "False", "(2, 5)"), "expected 2 x 5 ids"},
        {HEAD("'<i8'", "False", "(2305843009213693953,)"),
         "expected 1 x 2305843009213693953"}, /* times 8 wraps */
        {HEAD("'<i8'", "False", "(4294967296, 4294967297)"), "expected 4294967296 x 4294967297"},
        {HEAD("'<i8'", "False", "(99999999999999999999,)"), "a size of more than 2^63"},
        {"{'descr': '<i8', 'shape': (8,), }", "lacks fortran_order"},
        {"{'fortran_order': False, 'shape': (8,), }", "lacks descr"},
        {"{'descr': '<i8', 'fortran_order': False}", "lacks shape"},
        {"{'descr': '<i8', 'order': False}", "has the key 'order'"},
        {"{}", "lacks descr"},
        {"", "expected '{'"},
        {"{", "expected a key"},
        {"{'descr", "expected a key, found ''descr"},
        {"{'descr' '<i8'}", "expected ':' after a key"},
        {"{'descr': '<i8' 'shape': (8,)}", "expected ',' or '}'"},
        {HEAD("'<i8'", "False", "(8,)") " x", "expected nothing after '}', found 'x"},
        {HEAD("'an unreasonably long dtype'", "False", "(8,)"), "expected an integer dtype"},
    };
#undef HEAD
    const int64_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8};
    for (size_t i = 0; i < COUNT(rows); i++) {
        struct bytes b = make_npy(1, rows[i].header, 8, false, ids, 8);
        const struct corpus_options o = {
            .format = CORPUS_NPY, .path = write_file("c.npy", &b), .context = 8, .limit = -1};
        check_fails(&o, 100, STATUS_INPUT, rows[i].message);
    }
}

/* The bytes before the header, and a file that is cut off anywhere. */
static void test_broken_npy_start(void **state)
{
    (void)state;
    static const struct {
        size_t at;
        unsigned char byte;
        const char *message;
    } rows[] = {
        {0, 'N', "does not begin with \\x93NUMPY"},
        {5, 'Z', "does not begin with \\x93NUMPY"},
        {6, 0, ".npy version 0.0, expected 1.0, 2.0 or 3.0"},
        {6, 4, ".npy version 4.0"},
        {7, 1, ".npy version 2.1"},
        {9, 255, "its .npy header is said to have 65396 bytes"},
        {11, 255, "its .npy header is said to have 4278190196 bytes"},
        {8, 9, "expected an integer dtype such as '<u2', found ''"},
    };
    static const char header[] = "{'descr': '<i8', 'fortran_order': False, 'shape': (4,), }";
    const int64_t ids[] = {1, 2, 3, 4};
    struct corpus_options o = {.format = CORPUS_NPY, .path = file_path("c.npy"), .context = 8, .limit = -1};
    for (size_t i = 0; i < COUNT(rows); i++) {
        struct bytes b = make_npy(2, header, 8, false, ids, 4);
        b.data[rows[i].at] = rows[i].byte;
        o.path = write_file("c.npy", &b);
        check_fails(&o, 100, STATUS_INPUT, rows[i].message);
    }
    struct bytes b = make_npy(2, header, 8, false, ids, 4);
    size_t whole = b.n;
    free(b.data);
    for (size_t size = 0; size < whole; size++) {
        b = make_npy(2, header, 8, false, ids, 4);
        b.n = size;
        o.path = write_file("c.npy", &b);
        check_fails(&o, 100, STATUS_INPUT, "c.npy");
    }
}

static void test_broken_raw(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_bytes(&b, "12345", 5);
    struct corpus_options o = {
        .format = CORPUS_RAW, .path = write_file("c.raw", &b), .raw_bytes = 2, .context = 8, .limit = -1};
    check_fails(&o, 100, STATUS_INPUT, "c.raw has 5 bytes, which is no multiple of the 2 bytes of an id");
    put_bytes(&b, "123456", 6);
    write_file("c.raw", &b);
    o.raw_bytes = 4;
    check_fails(&o, 100, STATUS_INPUT, "which is no multiple of the 4 bytes of an id");
}

static void test_files_that_are_none(void **state)
{
    (void)state;
    assert_int_equal(mkdir(file_path("folder"), 0700), 0);
    assert_int_equal(mkdir(file_path("folder.idx"), 0700), 0);
    assert_int_equal(mkfifo(file_path("pipe"), 0600), 0);
    write_documents();
    static const enum corpus_format formats[] = {CORPUS_NPY, CORPUS_RAW, CORPUS_HDF5};
    for (size_t i = 0; i < COUNT(formats); i++) {
        struct corpus_options o = {
            .format = formats[i], .dataset = "x", .raw_bytes = 2, .context = 8, .limit = -1};
        o.path = file_path("missing");
        check_fails(&o, 100, STATUS_INPUT, "missing: No such file or directory");
        o.path = file_path("folder");
        check_fails(&o, 100, STATUS_INPUT, "folder is a folder, expected a file");
        o.path = file_path("pipe");
        check_fails(&o, 100, STATUS_INPUT, "pipe is not a regular file");
    }
    struct corpus_options o = {
        .format = CORPUS_MEGATRON, .path = file_path("missing"), .context = 8, .limit = -1};
    check_fails(&o, 100, STATUS_INPUT, "missing.idx: No such file or directory");
    o.path = file_path("folder");
    check_fails(&o, 100, STATUS_INPUT, "folder.idx is a folder");
    o.path = file_path("c.bin");
    check_fails(&o, 100, STATUS_INPUT, "a Megatron corpus is given without .bin or .idx");
    unlink(file_path("c.bin"));
    o.path = file_path("c");
    check_fails(&o, 100, STATUS_INPUT, "c.bin: No such file or directory");
}

static void test_broken_hdf5(void **state)
{
    (void)state;
    hdf5_start();
    const int64_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8};
    const struct {
        struct hdf5_case file;
        const char *dataset, *message;
    } rows[] = {
        {{.type = H5T_STD_I32LE, .rank = 1, .sizes = {8}},
         "group/tokens",
         "c.h5: there is no dataset group/tokens"},
        {{.type = H5T_STD_I32LE, .rank = 1, .sizes = {8}}, "group", "c.h5: there is no dataset group"},
        {{.type = H5T_STD_I32LE, .rank = 1, .sizes = {8}}, "no/such", "there is no dataset no/such"},
        {{.type = H5T_IEEE_F32LE, .rank = 1, .sizes = {8}},
         "group/ids",
         "c.h5:group/ids is no dataset of integers"},
        {{.type = H5T_STD_I32LE, .rank = 3, .sizes = {2, 2, 2}}, "group/ids", "has 3 axes, expected 1 or 2"},
        {{.type = H5T_STD_I32LE, .rank = 0}, "group/ids", "has 0 axes, expected 1 or 2"},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        const struct corpus_options o = {.format = CORPUS_HDF5,
                                         .path = write_hdf5(&rows[i].file, ids),
                                         .dataset = rows[i].dataset,
                                         .context = 8,
                                         .limit = -1};
        check_fails(&o, 100, STATUS_INPUT, rows[i].message);
    }
}

/* What was never written would read as zeros. */
static void test_unwritten_hdf5(void **state)
{
    (void)state;
    hdf5_start();
    const struct hdf5_case cases[] = {
        {.type = H5T_STD_I32LE, .rank = 2, .sizes = {4, 5}},
        {.type = H5T_STD_I32LE, .rank = 2, .sizes = {4, 5}, .chunk = {2, 3}},
        {.type = H5T_STD_I32LE, .rank = 2, .sizes = {INT64_C(1) << 50, 256}, .chunk = {2, 3}},
    };
    static const char *const messages[] = {"0 of its 1 chunks", "0 of its 4 chunks", "is not wholly written"};
    for (size_t i = 0; i < COUNT(cases); i++) {
        const struct corpus_options o = {.format = CORPUS_HDF5,
                                         .path = write_hdf5(&cases[i], NULL),
                                         .dataset = "group/ids",
                                         .context = 8,
                                         .limit = -1,
                                         .has_pad = true};
        check_fails(&o, 100, STATUS_INPUT, messages[i]);
    }
    const struct hdf5_case wide = {
        .type = H5T_STD_I32LE, .rank = 2, .sizes = {INT64_C(1) << 40, INT64_C(1) << 21}, .chunk = {2, 3}};
    const struct corpus_options o = {.format = CORPUS_HDF5,
                                     .path = write_hdf5(&wide, NULL),
                                     .dataset = "group/ids",
                                     .context = 8,
                                     .limit = -1};
    check_fails(&o, 100, STATUS_INPUT, "has more than 2^60 tokens");
}

static void test_virtual_hdf5(void **state)
{
    (void)state;
    hdf5_start();
    hsize_t size = 8;
    hid_t file = H5Fcreate(file_path("c.h5"), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    hid_t space = H5Screate_simple(1, &size, NULL), creation = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_virtual(creation, space, "elsewhere.h5", "ids", space);
    hid_t dataset = H5Dcreate2(file, "ids", H5T_STD_I32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    assert_true(dataset >= 0);
    H5Dclose(dataset);
    H5Pclose(creation);
    H5Sclose(space);
    H5Fclose(file);
    const struct corpus_options o = {
        .format = CORPUS_HDF5, .path = file_path("c.h5"), .dataset = "ids", .context = 8, .limit = -1};
    check_fails(&o, 100, STATUS_INPUT, "is a virtual dataset");
}

static size_t pass_through(unsigned flags, size_t n_values, const unsigned values[], size_t bytes,
                           size_t *room, void **buffer)
{
    (void)flags;
    (void)n_values;
    (void)values;
    (void)room;
    (void)buffer;
    return bytes;
}

static void test_missing_filter(void **state)
{
    (void)state;
    hdf5_start();
    static const H5Z_class2_t filter = {.version = H5Z_CLASS_T_VERS,
                                        .id = 300,
                                        .encoder_present = 1,
                                        .decoder_present = 1,
                                        .name = "made up",
                                        .filter = pass_through};
    hsize_t size = 8;
    const int32_t ids[8] = {0};
    assert_true(H5Zregister(&filter) >= 0);
    hid_t file = H5Fcreate(file_path("c.h5"), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    hid_t space = H5Screate_simple(1, &size, NULL), creation = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(creation, 1, &size);
    H5Pset_filter(creation, 300, H5Z_FLAG_MANDATORY, 0, NULL);
    hid_t dataset = H5Dcreate2(file, "ids", H5T_STD_I32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    assert_true(dataset >= 0 && H5Dwrite(dataset, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, ids) >= 0);
    H5Dclose(dataset);
    H5Pclose(creation);
    H5Sclose(space);
    H5Fclose(file);
    H5Zunregister(300);
    const struct corpus_options o = {
        .format = CORPUS_HDF5, .path = file_path("c.h5"), .dataset = "ids", .context = 8, .limit = -1};
    check_fails(&o, 100, STATUS_INPUT,
                "is compressed with the HDF5 filter 300 (made up), which is not installed");
}

/* No HDF5 file; a compressed one that is cut off; and one of which every 97th byte is wrong, which must not
 * crash. */
static void test_damaged_hdf5(void **state)
{
    (void)state;
    hdf5_start();
    static int64_t ids[4096];
    for (int64_t i = 0; i < 4096; i++)
        ids[i] = i * 7919 % 1000;
    const struct hdf5_case c = {
        .type = H5T_STD_I32LE, .rank = 1, .sizes = {4096}, .chunk = {512}, .is_deflated = true};
    struct corpus_options o = {.format = CORPUS_HDF5,
                               .path = write_hdf5(&c, ids),
                               .dataset = "group/ids",
                               .context = 64,
                               .limit = -1};
    struct stat info;
    assert_int_equal(stat(o.path, &info), 0);
    assert_int_equal(truncate(o.path, info.st_size / 2), 0);
    check_fails(&o, 1000, STATUS_INPUT, "c.h5");
    struct bytes text = {0};
    put_bytes(&text, "no HDF5 at all", 14);
    o.path = write_file("c.h5", &text);
    check_fails(&o, 1000, STATUS_INPUT, "c.h5 cannot be opened as an HDF5 file");
    for (long at = 2100; at < (long)info.st_size;
         at += 97) { /* the data; HDF5's own metadata is HDF5's to check */
        o.path = write_hdf5(&c, ids);
        FILE *file = fopen(o.path, "r+b");
        assert_non_null(file);
        fseek(file, at, SEEK_SET);
        int byte = fgetc(file);
        fseek(file, at, SEEK_SET);
        fputc(byte ^ 0xff, file);
        fclose(file);
        struct corpus *corpus = NULL;
        struct error error = {0};
        enum status status = corpus_open(&o, 1000, &corpus, &error);
        for (int64_t i = 0; status == STATUS_OK && i < corpus_n_sequences(corpus); i++) {
            struct sequence s;
            int32_t read[64];
            status = corpus_read(corpus, i, &s, read, &error);
        }
        assert_true(status == STATUS_OK || (status == STATUS_INPUT && strstr(error.text, "c.h5") != NULL));
        corpus_close(corpus);
    }
}

/* A file that shrinks while it is open gives an error, not a signal. */
static void test_shrinking_file(void **state)
{
    (void)state;
    struct bytes b = {0};
    for (uint64_t i = 0; i < 400000; i++)
        put_integer(&b, i % 100, 2, false);
    const struct corpus_options o = {
        .format = CORPUS_RAW, .path = write_file("c.raw", &b), .raw_bytes = 2, .context = 64, .limit = -1};
    struct corpus *corpus = open_good(&o, 100);
    assert_int_equal(truncate(file_path("c.raw"), 100000), 0);
    struct sequence s;
    int32_t ids[64];
    struct error error = {0};
    assert_int_equal(corpus_read(corpus, 0, &s, ids, &error), STATUS_OK);
    assert_int_equal(corpus_read(corpus, corpus_n_sequences(corpus) - 1, &s, ids, &error), STATUS_INPUT);
    assert_non_null(strstr(error.text, "c.raw ends at byte"));
    assert_non_null(strstr(error.text, "(it had 800000 when it was opened)"));
    corpus_close(corpus);
}

/* ---- the fixtures' corpora, and memory ---- */

/* As numpy reads the .bin; bounds as the index's arrays say. */
static void test_fixture(void **state)
{
    (void)state;
    static const int32_t ids[] = {5,  1,  12, 87, 37, 41, 77, 82, 52, 7,  93, 23, 44, 74, 73, 22, 38, 87, 60,
                                  86, 45, 24, 90, 53, 95, 6,  82, 16, 91, 46, 64, 17, 33, 96, 95, 64, 40, 18};
    static const int64_t lengths[] = {13, 1, 21, 3};
    const struct corpus_options o = {
        .format = CORPUS_MEGATRON, .path = TEST_DATA "/fixtures/mamba/corpus", .context = 64, .limit = -1};
    struct corpus *corpus = open_good(&o, 97);
    assert_int_equal(corpus_n_sequences(corpus), 4);
    assert_int_equal(corpus_longest_run(corpus), 21);
    int64_t at = 0;
    for (int64_t i = 0; i < 4; at += lengths[i++])
        check_ids(corpus, i, ids + at, lengths[i]);
    corpus_close(corpus);
    check_fails(&o, 96, STATUS_INPUT, "fixtures/mamba/corpus.bin: document 2, token 19 is id 96");
}

static void check_out_of_memory(const struct corpus_options *o)
{
    enum status status = STATUS_RESOURCE;
    int n = 0;
    for (; status != STATUS_OK && n < 100; n++) {
        struct corpus *corpus = NULL;
        struct error error = {0};
        char digest[33];
        memory_fail_at(n);
        status = corpus_open(o, 100, &corpus, &error);
        if (status == STATUS_OK)
            status = corpus_digest(corpus, corpus_n_sequences(corpus), digest, &error);
        memory_fail_at(-1);
        assert_true(status == STATUS_OK || (status == STATUS_RESOURCE && error.status == status));
        corpus_close(corpus);
        assert_int_equal(memory_in_use(), 0);
    }
    assert_true(status == STATUS_OK && n > 4);
}

static void test_out_of_memory(void **state)
{
    (void)state;
    const int64_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8};
    const int32_t prepend[] = {1};
    struct corpus_options o = documents_options();
    o.prepend = prepend;
    o.n_prepend = 1;
    o.has_shuffle = o.carry = true;
    check_out_of_memory(&o);
    o = (struct corpus_options){.format = CORPUS_NPY,
                                .path = write_npy("c.npy", 2, 4, ids),
                                .context = 4,
                                .limit = -1,
                                .has_pad = true};
    check_out_of_memory(&o);
    const struct hdf5_case c = {.type = H5T_STD_I32LE, .rank = 1, .sizes = {8}};
    o = (struct corpus_options){.format = CORPUS_HDF5,
                                .path = write_hdf5(&c, ids),
                                .dataset = "group/ids",
                                .context = 4,
                                .limit = -1};
    check_out_of_memory(&o);
}

/* Reading allocates nothing, and a hundred times the documents take no more than their marks, which have an
 * end. */
static void test_memory_is_bounded(void **state)
{
    (void)state;
    struct corpus_options o = documents_options();
    struct corpus *corpus = open_good(&o, 100);
    size_t small = memory_in_use();
    corpus_close(corpus);
    o.path = write_many(MANY, 50);
    o.context = MANY_CONTEXT;
    corpus = open_good(&o, 1001);
    assert_true(memory_in_use() <= small + 8 * (MANY + 1));
    uint64_t before = memory_allocation_count();
    for (int64_t i = 0; i < corpus_n_sequences(corpus); i++) {
        struct sequence s;
        int32_t ids[MANY_CONTEXT];
        assert_int_equal(corpus_read(corpus, i, &s, ids, NULL), STATUS_OK);
    }
    assert_int_equal(memory_allocation_count(), before);
    corpus_close(corpus);
    o.path = write_many(MORE, 3);
    corpus = open_good(&o, 1001);
    assert_true(memory_in_use() <= small + (512 << 10) + (8 << 10));
    corpus_close(corpus);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        TEST(test_megatron_widths),
        TEST(test_npy_widths),
        TEST(test_raw_widths),
        TEST(test_hdf5_widths),
        TEST(test_hdf5_chunks),
        TEST(test_ids_out_of_range),
        TEST(test_id_places),
        TEST(test_windows),
        TEST(test_start_and_limit),
        TEST(test_unbounded),
        TEST(test_scattered_documents),
        TEST(test_no_documents),
        TEST(test_prepend_zero),
        TEST(test_prepend_once),
        TEST(test_prepend_long),
        TEST(test_padding),
        TEST(test_padding_outside_of_ids),
        TEST(test_padding_without_rows),
        cmocka_unit_test(test_permutation_golden),
        cmocka_unit_test(test_permutation_is_one),
        TEST(test_shuffle),
        TEST(test_shuffle_with_carry),
        TEST(test_many_documents),
        TEST(test_blocks_of_single_windows),
        TEST(test_long_reads),
        TEST(test_digest),
        TEST(test_digest_of_fewer),
        TEST(test_broken_options),
        TEST(test_broken_megatron),
        TEST(test_cut_megatron),
        TEST(test_broken_npy),
        TEST(test_broken_npy_start),
        TEST(test_broken_raw),
        TEST(test_files_that_are_none),
        TEST(test_broken_hdf5),
        TEST(test_unwritten_hdf5),
        TEST(test_virtual_hdf5),
        TEST(test_missing_filter),
        TEST(test_damaged_hdf5),
        TEST(test_shrinking_file),
        cmocka_unit_test(test_fixture),
        TEST(test_out_of_memory),
        TEST(test_memory_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
