/* engine/safetensors.h: values against numbers read by the safetensors package, and every check against a
 * broken file. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "engine/safetensors.h"
#include "kernels/base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define FIXTURES TEST_DATA "/fixtures/"
#define INDEX "model.safetensors.index.json"

/* ---- folders written by hand ---- */

struct folder {
    char path[64];
    char files[16][48];
    int n_files;
};

static void folder_create(struct folder *f)
{
    *f = (struct folder){.path = "/tmp/test_safetensors.XXXXXX"};
    assert_non_null(mkdtemp(f->path));
}

static const char *file_path(const struct folder *f, const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", f->path, name);
    return path;
}

static void folder_remove(struct folder *f)
{
    for (int i = 0; i < f->n_files; i++)
        remove(file_path(f, f->files[i]));
    assert_int_equal(rmdir(f->path), 0);
}

static void remember(struct folder *f, const char *name)
{
    assert_true(f->n_files < (int)COUNT(f->files));
    snprintf(f->files[f->n_files++], sizeof f->files[0], "%s", name);
}

static void write_bytes(struct folder *f, const char *name, const void *bytes, size_t n)
{
    FILE *file = fopen(file_path(f, name), "wb");
    assert_non_null(file);
    if (n > 0)
        assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
    remember(f, name);
}

static void write_text(struct folder *f, const char *name, const char *text)
{
    write_bytes(f, name, text, strlen(text));
}

/* A file of this header and n_data bytes 0, 1, 2, ... Returned as bytes of malloc. */
static unsigned char *make_file(const char *header, size_t n_data, size_t *size)
{
    size_t length = strlen(header);
    unsigned char *bytes = malloc(8 + length + n_data);
    assert_non_null(bytes);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(length >> 8 * i);
    memcpy(bytes + 8, header, length);
    for (size_t i = 0; i < n_data; i++)
        bytes[8 + length + i] = (unsigned char)i;
    *size = 8 + length + n_data;
    return bytes;
}

static void write_file(struct folder *f, const char *name, const char *header, size_t n_data)
{
    size_t size;
    unsigned char *bytes = make_file(header, n_data, &size);
    write_bytes(f, name, bytes, size);
    free(bytes);
}

static void expect_message(const struct error *error, const char *message, size_t row)
{
    if (strstr(error->text, message) == NULL)
        fail_msg("row %zu: \"%s\" does not say \"%s\"", row, error->text, message);
}

static void expect_refused(const struct folder *f, const char *message, size_t row)
{
    struct checkpoint *checkpoint = NULL;
    struct error error = {0};
    assert_int_equal(checkpoint_open(f->path, &checkpoint, &error), STATUS_INPUT);
    assert_null(checkpoint);
    expect_message(&error, message, row);
    expect_message(&error, f->path, row);
}

/* ---- good files ---- */

static const char two_tensors[] =
    "{\"__metadata__\":{\"format\":\"pt\"},"
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,1,3],\"data_offsets\":[8,20]},"
    "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
    "\"none\":{\"dtype\":\"I8\",\"shape\":[4,0],\"data_offsets\":[8,8]},"
    "\"scalar\":{\"shape\":[],\"dtype\":\"I64\",\"data_offsets\":[20,28]}}      ";

static void test_reads(void **state)
{
    (void)state;
    struct folder f;
    folder_create(&f);
    write_file(&f, "model.safetensors", two_tensors, 28);
    write_text(&f, "._model.safetensors", "left by a copying tool");
    struct checkpoint *c;
    assert_int_equal(checkpoint_open(f.path, &c, NULL), STATUS_OK);
    assert_int_equal(checkpoint_n_tensors(c), 4);
    assert_string_equal(checkpoint_get(c, 0)->name, "a");
    assert_string_equal(checkpoint_get(c, 3)->name, "scalar");
    assert_null(checkpoint_get(c, 4));
    assert_null(checkpoint_get(c, -1));
    assert_null(checkpoint_find(c, "__metadata__"));
    assert_null(checkpoint_find(c, "A"));
    const struct checkpoint_tensor *t = checkpoint_find(c, "b");
    assert_int_equal(t->dtype, DTYPE_BF16);
    assert_string_equal(t->dtype_name, "BF16");
    assert_int_equal(t->n_dims, 3);
    assert_true(t->dims[0] == 2 && t->dims[1] == 1 && t->dims[2] == 3);
    assert_int_equal(t->bytes, 12);
    assert_string_equal(t->file, "model.safetensors");
    for (unsigned char i = 0; i < 12; i++)
        assert_int_equal(((const unsigned char *)t->data)[i], 8 + i);
    assert_int_equal(checkpoint_find(c, "none")->bytes, 0);
    assert_int_equal(checkpoint_find(c, "none")->dtype, DTYPE_COUNT);
    assert_int_equal(checkpoint_find(c, "scalar")->n_dims, 0);
    assert_int_equal(checkpoint_find(c, "scalar")->dtype, DTYPE_I64);
    for (int i = 0; i < 4; i++)
        checkpoint_prefetch(c, checkpoint_get(c, i));
    checkpoint_close(c);
    checkpoint_close(NULL);
    folder_remove(&f);
}

/* Every type of the format with its size in bits: eight elements, so bits bytes. */
static void test_dtypes(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        unsigned bits;
        enum dtype dtype;
    } rows[] = {
        {"F64", 64, DTYPE_COUNT},    {"F32", 32, DTYPE_F32},          {"F16", 16, DTYPE_F16},
        {"BF16", 16, DTYPE_BF16},    {"I64", 64, DTYPE_I64},          {"I32", 32, DTYPE_I32},
        {"I16", 16, DTYPE_COUNT},    {"I8", 8, DTYPE_COUNT},          {"U64", 64, DTYPE_COUNT},
        {"U32", 32, DTYPE_COUNT},    {"U16", 16, DTYPE_COUNT},        {"U8", 8, DTYPE_COUNT},
        {"BOOL", 8, DTYPE_COUNT},    {"F8_E4M3", 8, DTYPE_COUNT},     {"F8_E5M2", 8, DTYPE_COUNT},
        {"F8_E8M0", 8, DTYPE_COUNT}, {"F8_E4M3FNUZ", 8, DTYPE_COUNT}, {"F8_E5M2FNUZ", 8, DTYPE_COUNT},
        {"F6_E2M3", 6, DTYPE_COUNT}, {"F6_E3M2", 6, DTYPE_COUNT},     {"F4", 4, DTYPE_COUNT},
        {"C64", 64, DTYPE_COUNT},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        struct folder f;
        char header[128];
        folder_create(&f);
        snprintf(header, sizeof header, "{\"w\":{\"dtype\":\"%s\",\"shape\":[2,4],\"data_offsets\":[0,%u]}}",
                 rows[i].name, rows[i].bits);
        write_file(&f, "model.safetensors", header, rows[i].bits);
        struct checkpoint *c;
        assert_int_equal(checkpoint_open(f.path, &c, NULL), STATUS_OK);
        assert_int_equal(checkpoint_find(c, "w")->dtype, rows[i].dtype);
        assert_string_equal(checkpoint_find(c, "w")->dtype_name, rows[i].name);
        checkpoint_close(c);
        folder_remove(&f);
    }
}

static void test_require(void **state)
{
    (void)state;
    struct folder f;
    folder_create(&f);
    write_file(&f, "model.safetensors", two_tensors, 28);
    struct checkpoint *c;
    assert_int_equal(checkpoint_open(f.path, &c, NULL), STATUS_OK);
    static const struct {
        const char *name;
        int n_dims;
        int64_t dims[3];
        const char *message; /* NULL: it is there */
    } rows[] = {
        {"b", 3, {2, 1, 3}, NULL},
        {"a", 1, {2}, NULL},
        {"b", 2, {2, 3}, "tensor b in model.safetensors has shape [2, 1, 3], the config's sizes make [2, 3]"},
        {"a", 2, {2, 1}, "tensor a in model.safetensors has shape [2], the config's sizes make [2, 1]"},
        {"a", 1, {3}, "has shape [2], the config's sizes make [3]"},
        {"c", 1, {3}, "the checkpoint has no tensor c, expected one of shape [3]"},
        {"none", 2, {4, 0}, "tensor none in model.safetensors has dtype I8, expected F32, F16 or BF16"},
        {"scalar", 0, {0}, "tensor scalar in model.safetensors has dtype I64, expected F32, F16 or BF16"},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        const struct checkpoint_tensor *t = NULL;
        struct error error = {0};
        enum status status = checkpoint_require(c, rows[i].name, rows[i].dims, rows[i].n_dims, &t, &error);
        assert_int_equal(status, rows[i].message == NULL ? STATUS_OK : STATUS_INPUT);
        if (rows[i].message == NULL)
            assert_ptr_equal(t, checkpoint_find(c, rows[i].name));
        else
            expect_message(&error, rows[i].message, i);
    }
    checkpoint_close(c);
    folder_remove(&f);
}

/* Numbers that Python's safetensors 0.8 and torch give for the same files. */
static void test_fixtures(void **state)
{
    (void)state;
    struct checkpoint *c;
    struct error error = {0};
    if (checkpoint_open(FIXTURES "mamba", &c, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    assert_int_equal(checkpoint_n_tensors(c), 32);
    const struct checkpoint_tensor *t;
    const int64_t conv[] = {48, 1, 4}, embedding[] = {97, 24}, states[] = {64, 8};
    assert_int_equal(checkpoint_require(c, "backbone.layers.0.mixer.conv1d.weight", conv, 3, &t, NULL),
                     STATUS_OK);
    assert_int_equal(t->dtype, DTYPE_F32);
    float values[2], last;
    memcpy(values, t->data, sizeof values);
    memcpy(&last, (const char *)t->data + t->bytes - sizeof last, sizeof last);
    assert_true(values[0] == 0.8078317046165466f && values[1] == -0.7462720274925232f);
    assert_true(last == 0.6422622799873352f);
    assert_int_equal(checkpoint_require(c, "backbone.embeddings.weight", embedding, 2, &t, NULL), STATUS_OK);
    memcpy(values, t->data, sizeof values);
    assert_true(values[0] == 0.3217722475528717f && values[1] == -0.5758396983146667f);
    checkpoint_close(c);

    assert_int_equal(checkpoint_open(FIXTURES "jamba-bf16", &c, NULL), STATUS_OK);
    assert_int_equal(checkpoint_n_tensors(c), 83);
    assert_int_equal(checkpoint_require(c, "model.layers.0.mamba.A_log", states, 2, &t, NULL), STATUS_OK);
    assert_string_equal(t->file, "model-00002-of-00011.safetensors");
    assert_int_equal(t->dtype, DTYPE_BF16);
    uint16_t bits[3];
    memcpy(bits, t->data, sizeof bits);
    assert_true(bf16_to_f32(bits[0]) == -1.0703125f && bf16_to_f32(bits[1]) == 1.9296875f &&
                bits[2] == 0x3f74);
    assert_string_equal(checkpoint_find(c, "model.layers.3.pre_ff_layernorm.weight")->file,
                        "model-00011-of-00011.safetensors");
    checkpoint_close(c);
}

/* Sizes and offsets past 2^32, in a sparse file. */
static void test_larger_than_4_gib(void **state)
{
    (void)state;
    const int64_t first = INT64_C(5) << 30, second = 8;
    struct folder f;
    char header[256];
    folder_create(&f);
    snprintf(header, sizeof header,
             "{\"a\":{\"dtype\":\"BF16\",\"shape\":[65536,40960],\"data_offsets\":[0,%lld]},"
             "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[%lld,%lld]}}",
             (long long)first, (long long)first, (long long)(first + second));
    write_file(&f, "model.safetensors", header, 0);
    const float values[2] = {1.5f, -2};
    FILE *file = fopen(file_path(&f, "model.safetensors"), "r+b");
    assert_non_null(file);
    if (fseeko(file, (off_t)(8 + strlen(header)) + first, SEEK_SET) != 0 ||
        fwrite(values, sizeof values, 1, file) != 1 || fflush(file) != 0) {
        fclose(file);
        folder_remove(&f);
        print_message("skipped: the file system of temporary files takes no file of this size\n");
        skip();
    }
    fclose(file);
    struct checkpoint *c;
    struct error error = {0};
    if (checkpoint_open(f.path, &c, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    assert_true(checkpoint_find(c, "a")->bytes == (size_t)first);
    assert_memory_equal(checkpoint_find(c, "b")->data, values, sizeof values);
    checkpoint_prefetch(c, checkpoint_find(c, "b"));
    checkpoint_close(c);
    assert_int_equal(truncate(file_path(&f, "model.safetensors"), (off_t)(8 + strlen(header)) + first), 0);
    expect_refused(&f, "expected 5368709120 at most, where the file ends", 0);
    folder_remove(&f);
}

/* ---- broken single files ---- */

#define ENTRY(dtype, shape, offsets) "\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets
#define ONE(entry) "{\"w\":{" entry "}}"

struct broken {
    const char *header;
    size_t n_data;
    const char *message;
};

static const struct broken broken_headers[] = {
    {"", 0, "its header does not begin with '{'"},
    {"[]", 0, "its header does not begin with '{'"},
    {" {}", 0, "its header does not begin with '{'"},
    {"{\"w\":", 0, "model.safetensors (header), line 1, column 6: expected a value, found the end"},
    {"{}x", 0, "expected nothing after the end of the JSON value"},
    {"{\"w\":{},\"w\":{}}", 0, "column 9: the key \"w\" occurs twice"},
    {"{\"\xff\":{}}", 0, "not UTF-8"},
    {"{\"w\":1}", 0, "tensor \"w\": it is a number (1), expected an object"},
    {"{\"w\\n\":null}", 0, "tensor \"w?\": it is null, expected an object"},
    {"{\"__metadata__\":[]}", 0, "__metadata__ is a list, expected an object of strings"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__: \"a\" is a number (1), expected a string"},
    {ONE(""), 0, "tensor \"w\": dtype is missing"},
    {ONE("\"dtype\":3"), 0, "tensor \"w\": dtype is a number (3), expected a type of the safetensors format"},
    {ONE(ENTRY("F31", "[1]", "[0,4]")), 4, "dtype is a string (\"F31\"), expected a type"},
    {ONE(ENTRY("f32", "[1]", "[0,4]")), 4, "dtype is a string (\"f32\"), expected a type"},
    {ONE("\"dtype\":\"F32\""), 0, "tensor \"w\": shape is missing, expected a list"},
    {ONE(ENTRY("F32", "{}", "[0,4]")), 4, "shape is an object, expected a list"},
    {ONE(ENTRY("F32", "[-1]", "[0,4]")), 4, "an axis of shape is a number (-1), expected a whole number"},
    {ONE(ENTRY("F32", "[0.5]", "[0,4]")), 4, "an axis of shape is a number (0.5), expected a whole number"},
    {ONE(ENTRY("F32", "[NaN]", "[0,4]")), 4, "an axis of shape is a number (nan), expected a whole number"},
    {ONE(ENTRY("F32", "[1e300]", "[0,4]")), 4, "expected a whole number"},
    {ONE(ENTRY("F32", "[\"1\"]", "[0,4]")), 4,
     "an axis of shape is a string (\"1\"), expected a whole number"},
    {ONE(ENTRY("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]")), 4, "shape is a list, expected 8 axes at most"},
    {ONE(ENTRY("F32", "[4294967296,4294967296]", "[0,4]")), 4, "more bits than 64-bit sizes can count"},
    {ONE(ENTRY("F32", "[9007199254740992,8,64]", "[0,0]")), 0, "more bits than 64-bit sizes can count"},
    {ONE(ENTRY("F64", "[288230376151711744]", "[0,0]")), 0, "expected a whole number"},
    {ONE(ENTRY("F4", "[3]", "[0,2]")), 2, "tensor \"w\" of F4 has 12 bits, expected whole bytes"},
    {ONE("\"dtype\":\"F32\",\"shape\":[1]"), 4, "data_offsets is missing, expected a list of two"},
    {ONE(ENTRY("F32", "[1]", "[4]")), 4, "data_offsets is a list, expected a list of two"},
    {ONE(ENTRY("F32", "[1]", "[0,4,4]")), 4, "data_offsets is a list, expected a list of two"},
    {ONE(ENTRY("F32", "[1]", "{\"0\":0,\"1\":4}")), 4, "data_offsets is an object, expected a list of two"},
    {ONE(ENTRY("F32", "[1]", "[-4,0]")), 4, "the first of data_offsets is a number (-4), expected"},
    {ONE(ENTRY("F32", "[1]", "[4,0]")), 4,
     "the second of data_offsets is a number (0), expected a whole number of at least"},
    {ONE(ENTRY("F32", "[1]", "[0,1e18]")), 4, "the second of data_offsets is a number (1e+18), expected"},
    {ONE(ENTRY("F32", "[1]", "[0,4]")), 3,
     "the second of data_offsets is a number (4), expected 3 at most, where the file ends"},
    {ONE(ENTRY("F32", "[1]", "[9007199254740988,9007199254740992]")), 4,
     "expected 4 at most, where the file ends"},
    {ONE(ENTRY("F32", "[2]", "[0,4]")), 4,
     "tensor \"w\": data_offsets span 4 bytes, its dtype and shape make 8"},
    {ONE(ENTRY("F32", "[0,9007199254740992]", "[0,4]")), 4, "span 4 bytes, its dtype and shape make 0"},
    {ONE(ENTRY("F16", "[2]", "[0,4]")), 5, "has 5 bytes of data, expected 4: its tensors end there"},
    {ONE(ENTRY("F16", "[2]", "[1,5]")), 5,
     "no tensor covers bytes 0 to 1 of the data, between the start and \"w\""},
    {"{}", 1, "has 1 bytes of data, expected 0"},
    {"{\"a\":{" ENTRY("U8", "[4]", "[0,4]") "},\"b\":{" ENTRY("U8", "[4]", "[3,7]") "}}", 7,
     "tensor \"b\" begins at 3, inside tensor \"a\", which ends at 4"},
    {"{\"a\":{" ENTRY("U8", "[4]", "[0,4]") "},\"b\":{" ENTRY("U8", "[4]", "[0,4]") "}}", 4, "inside tensor"},
    {"{\"a\":{" ENTRY("U8", "[4]", "[0,4]") "},\"b\":{" ENTRY("U8", "[0]", "[2,2]") "}}", 4,
     "tensor \"b\" begins at 2, inside tensor \"a\", which ends at 4"},
    {"{\"a\":{" ENTRY("U8", "[4]", "[5,9]") "},\"b\":{" ENTRY("U8", "[4]", "[0,4]") "}}", 9,
     "no tensor covers bytes 4 to 5 of the data, between \"b\" and \"a\""},
};

static void test_broken_headers(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(broken_headers); i++) {
        struct folder f;
        folder_create(&f);
        write_file(&f, "model.safetensors", broken_headers[i].header, broken_headers[i].n_data);
        expect_refused(&f, broken_headers[i].message, i);
        folder_remove(&f);
    }
}

/* The first eight bytes, and files that end too early: the same through a file and through memory. */
static void test_broken_lengths(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t size;
        const char *message;
    } rows[] = {
        {"", 0, "has 0 bytes, expected at least 8"},
        {"\2\0\0\0\0\0\0", 7, "has 7 bytes, expected at least 8"},
        {"\3\0\0\0\0\0\0\0{}", 10, "its header's length is 3, but only 2 bytes follow"},
        {"\1\xe1\xf5\5\0\0\0\0{}", 10, "its header's length is 100000001, expected 100000000 at most"},
        {"\xff\xff\xff\xff\xff\xff\xff\xff{}", 10, "its header's length is 18446744073709551615, expected"},
        {"\0\xe1\xf5\5\0\0\0\0{}", 10, "its header's length is 100000000, but only 2 bytes follow"},
        {"\0\0\0\0\0\0\0\0{}", 10, "its header does not begin with '{'"},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        struct folder f;
        folder_create(&f);
        write_bytes(&f, "model.safetensors", rows[i].bytes, rows[i].size);
        expect_refused(&f, rows[i].message, i);
        struct error error = {0};
        int64_t n = -1;
        assert_int_equal(checkpoint_check_bytes(rows[i].bytes, rows[i].size, "x", &n, &error), STATUS_INPUT);
        expect_message(&error, rows[i].message, i);
        assert_int_equal(n, -1);
        folder_remove(&f);
    }
}

/* Each shorter version of a good file is refused. */
static void test_every_truncation(void **state)
{
    (void)state;
    size_t size;
    unsigned char *bytes = make_file(two_tensors, 28, &size);
    int64_t n = 0;
    assert_int_equal(checkpoint_check_bytes(bytes, size, "x", &n, NULL), STATUS_OK);
    assert_int_equal(n, 4);
    for (size_t kept = 0; kept < size; kept++) {
        unsigned char *part =
            malloc(kept + (kept == 0)); /* of its own, so that a sanitizer sees a byte too many */
        memcpy(part, bytes, kept);
        assert_int_equal(checkpoint_check_bytes(part, kept, "x", &n, NULL), STATUS_INPUT);
        free(part);
    }
    free(bytes);
}

/* ---- folders and indexes ---- */

#define SHARD(name) "{\"" name "\":{" ENTRY("U8", "[2]", "[0,2]") "}}"
#define SHARD_1 "model-00001-of-00002.safetensors"
#define SHARD_2 "model-00002-of-00002.safetensors"
#define MAP(inside) "{\"weight_map\":{" inside "}}"

/* Two shards, a in the first and b in the second, and this index. */
static void write_sharded(struct folder *f, const char *index)
{
    folder_create(f);
    write_file(f, SHARD_1, SHARD("a"), 2);
    write_file(f, SHARD_2, SHARD("b"), 2);
    write_text(f, INDEX, index);
}

static void test_sharded(void **state)
{
    (void)state;
    static const char *const indexes[] = {
        MAP("\"a\":\"" SHARD_1 "\",\"b\":\"" SHARD_2 "\""),
        /* A wrong total_size is only worth a warning. */
        "{\"metadata\":{\"total_size\":5},\"weight_map\":{\"b\":\"" SHARD_2 "\",\"a\":\"" SHARD_1 "\"}}",
        "{\"metadata\":{\"total_size\":4},\"weight_map\":{\"b\":\"" SHARD_2 "\",\"a\":\"" SHARD_1 "\"}}",
        "{\"metadata\":\"x\",\"weight_map\":{\"b\":\"" SHARD_2 "\",\"a\":\"" SHARD_1 "\"}}",
    };
    for (size_t i = 0; i < COUNT(indexes); i++) {
        struct folder f;
        write_sharded(&f, indexes[i]);
        struct checkpoint *c;
        struct error error = {0};
        if (checkpoint_open(f.path, &c, &error) != STATUS_OK)
            fail_msg("row %zu: %s", i, error.text);
        assert_int_equal(checkpoint_n_tensors(c), 2);
        assert_string_equal(checkpoint_find(c, "a")->file, SHARD_1);
        assert_string_equal(checkpoint_find(c, "b")->file, SHARD_2);
        checkpoint_prefetch(c, checkpoint_find(c, "b"));
        checkpoint_close(c);
        folder_remove(&f);
    }
}

static const struct {
    const char *index, *message;
} broken_indexes[] = {
    {"", "index.json is empty"},
    {"[]", "index.json holds a list, expected an object"},
    {"{}", "weight_map is missing, expected an object of tensor names and files"},
    {"{\"weight_map\":[]}", "weight_map is a list, expected an object"},
    {MAP(""), "weight_map is empty"},
    {MAP("\"a\":1"), "weight_map gives a number (1) for tensor \"a\", expected a file name"},
    {MAP("\"a\":\"../" SHARD_1 "\""),
     "weight_map gives \"../model-00001-of-00002.safetensors\" for tensor \"a\""},
    {MAP("\"a\":\"x/" SHARD_1 "\""), "expected the plain name of a *.safetensors file"},
    {MAP("\"a\":\"/" SHARD_1 "\""), "expected the plain name of a *.safetensors file"},
    {MAP("\"a\":\"..\""), "expected the plain name of a *.safetensors file"},
    {MAP("\"a\":\"\""), "expected the plain name of a *.safetensors file"},
    {MAP("\"a\":\"pytorch_model.bin\""), "expected the plain name of a *.safetensors file"},
    {MAP("\"a\":\"" SHARD_1 "\",\"b\":\"model-3.safetensors\""),
     "names \"model-3.safetensors\" for tensor \"b\", but there is no such file in the folder"},
    {MAP("\"a\":\"" SHARD_1 "\""), "holds \"" SHARD_2 "\", which is no part of the checkpoint"},
    {MAP("\"a\":\"" SHARD_1 "\",\"b\":\"" SHARD_2 "\",\"c\":\"" SHARD_2 "\""),
     "says that tensor \"c\" is in " SHARD_2 ", which does not have it"},
    {MAP("\"a\":\"" SHARD_2 "\",\"b\":\"" SHARD_1 "\""),
     "says that tensor \"a\" is in " SHARD_2 ", but it is in " SHARD_1},
    {MAP("\"a\":\"" SHARD_1 "\",\"c\":\"" SHARD_2 "\""),
     "says that tensor \"c\" is in " SHARD_2 ", which does not have it"},
    {MAP("\"a\":\"" SHARD_1 "\",\"a\":\"" SHARD_2 "\""), "the key \"a\" occurs twice"},
};

static void test_broken_indexes(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(broken_indexes); i++) {
        struct folder f;
        write_sharded(&f, broken_indexes[i].index);
        expect_refused(&f, broken_indexes[i].message, i);
        folder_remove(&f);
    }
}

static void test_broken_folders(void **state)
{
    (void)state;
    struct folder f;
    const char good[] = MAP("\"a\":\"" SHARD_1 "\",\"b\":\"" SHARD_2 "\"");
    /* A tensor that the index does not know, at each place in the order of names. */
    static const char *const extra[] = {"A", "ab", "c"};
    for (size_t i = 0; i < COUNT(extra); i++) {
        char header[256], message[128];
        write_sharded(&f, good);
        snprintf(header, sizeof header,
                 "{\"%s\":{" ENTRY("U8", "[2]", "[0,2]") "},\"b\":{" ENTRY("U8", "[2]", "[2,4]") "}}",
                 extra[i]);
        snprintf(message, sizeof message, "tensor \"%s\" of " SHARD_2 " is not in weight_map", extra[i]);
        write_file(&f, SHARD_2, header, 4);
        expect_refused(&f, message, i);
        folder_remove(&f);
    }
    /* The same tensor in both shards. */
    write_sharded(&f, good);
    write_file(&f, SHARD_2,
               "{\"a\":{" ENTRY("U8", "[2]", "[0,2]") "},\"b\":{" ENTRY("U8", "[2]", "[2,4]") "}}", 4);
    expect_refused(&f, "tensor \"a\" is both in ", 0);
    folder_remove(&f);
    /* A stray file beside whole shards; beside a single file; shards and their index beside a single file. */
    write_sharded(&f, good);
    write_file(&f, "other.safetensors", SHARD("a"), 2);
    expect_refused(
        &f, "holds \"other.safetensors\", which is no part of the checkpoint that " INDEX " describes", 0);
    folder_remove(&f);
    write_sharded(&f, good);
    write_file(&f, "model.safetensors", SHARD("a"), 2);
    expect_refused(
        &f, "holds \"" SHARD_1 "\", which is no part of the checkpoint that model.safetensors describes", 0);
    folder_remove(&f);
    folder_create(&f);
    expect_refused(&f, "holds neither model.safetensors nor " INDEX, 0);
    write_file(&f, SHARD_1, SHARD("a"), 2);
    expect_refused(&f, "nor " INDEX ", only \"" SHARD_1 "\"", 0);
    folder_remove(&f);
    expect_refused(&f, "cannot open the checkpoint's folder", 0);
}

/* Things under a shard's name that are no files. */
static void test_not_files(void **state)
{
    (void)state;
    struct folder f;
    folder_create(&f);
    assert_int_equal(mkfifo(file_path(&f, "model.safetensors"), 0600), 0);
    remember(&f, "model.safetensors");
    expect_refused(&f, "model.safetensors is not a regular file", 0);
    folder_remove(&f);
    folder_create(&f);
    assert_int_equal(mkdir(file_path(&f, "model.safetensors"), 0700), 0);
    remember(&f, "model.safetensors");
    expect_refused(&f, "model.safetensors is not a regular file", 0);
    folder_remove(&f);
    folder_create(&f);
    assert_int_equal(symlink("nowhere", file_path(&f, "model.safetensors")), 0);
    remember(&f, "model.safetensors");
    expect_refused(&f, "No such file or directory", 0);
    folder_remove(&f);
}

/* A single file with an index beside it, and no shards: the index is not used, as in transformers. */
static void test_single_file_first(void **state)
{
    (void)state;
    struct folder f;
    folder_create(&f);
    write_file(&f, "model.safetensors", SHARD("a"), 2);
    write_text(&f, INDEX, "not read");
    struct checkpoint *c;
    assert_int_equal(checkpoint_open(f.path, &c, NULL), STATUS_OK);
    assert_int_equal(checkpoint_n_tensors(c), 1);
    checkpoint_close(c);
    folder_remove(&f);
}

/* ---- identity ---- */

/* Digests computed with Python's xxhash over name, NUL, size and contents of each file. */
static void test_identity(void **state)
{
    (void)state;
    char digest[33];
    int64_t bytes;
    assert_int_equal(checkpoint_identify(FIXTURES "mamba", digest, &bytes, NULL), STATUS_OK);
    assert_string_equal(digest, "f62afd8f700ab895147d19218adf0fd5");
    assert_int_equal(bytes, 76413);
    assert_int_equal(checkpoint_identify(FIXTURES "jamba-bf16", digest, &bytes, NULL), STATUS_OK);
    assert_string_equal(digest, "0960ae82613178e6ae2615f7aa8d9cc0");
    assert_int_equal(bytes, 181661);
}

/* A bit anywhere, and the border between two files, change the digest. */
static void test_identity_differs(void **state)
{
    (void)state;
    struct folder f;
    folder_create(&f);
    write_text(&f, "model.safetensors", "data");
    char digests[3][33];
    int64_t bytes;
    struct error error = {0};
    assert_int_equal(checkpoint_identify(f.path, digests[0], &bytes, &error), STATUS_INPUT);
    expect_message(&error, "config.json: No such file", 0);
    write_text(&f, "config.json", "{}");
    assert_int_equal(checkpoint_identify(f.path, digests[0], &bytes, NULL), STATUS_OK);
    assert_int_equal(bytes, 6);
    write_text(&f, "model.safetensors", "datb");
    assert_int_equal(checkpoint_identify(f.path, digests[1], &bytes, NULL), STATUS_OK);
    write_text(&f, "config.json", "{}d");
    write_text(&f, "model.safetensors", "ata");
    assert_int_equal(checkpoint_identify(f.path, digests[2], &bytes, NULL), STATUS_OK);
    assert_string_not_equal(digests[0], digests[1]);
    assert_string_not_equal(digests[0], digests[2]);
    assert_int_equal(strspn(digests[0], "0123456789abcdef"), 32);
    folder_remove(&f);
}

/* ---- out of memory ---- */

/* The n-th allocation fails, for every n. */
static void test_out_of_memory(void **state)
{
    (void)state;
    size_t before = memory_in_use();
    for (int n = 0;; n++) {
        struct checkpoint *c = NULL;
        struct error error = {0};
        memory_fail_at(n);
        enum status status = checkpoint_open(FIXTURES "jamba-bf16", &c, &error);
        memory_fail_at(-1);
        checkpoint_close(c);
        assert_int_equal(memory_in_use(), before);
        if (status == STATUS_OK) {
            assert_true(n > 50);
            break;
        }
        assert_int_equal(status, STATUS_RESOURCE);
        assert_int_equal(error.status, STATUS_RESOURCE);
        assert_null(c);
    }
    for (int n = 0;; n++) {
        char digest[33];
        int64_t bytes;
        memory_fail_at(n);
        enum status status = checkpoint_identify(FIXTURES "jamba-bf16", digest, &bytes, NULL);
        memory_fail_at(-1);
        assert_int_equal(memory_in_use(), before);
        if (status == STATUS_OK)
            return;
        assert_int_equal(status, STATUS_RESOURCE);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads),
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_require),
        cmocka_unit_test(test_fixtures),
        cmocka_unit_test(test_larger_than_4_gib),
        cmocka_unit_test(test_broken_headers),
        cmocka_unit_test(test_broken_lengths),
        cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_sharded),
        cmocka_unit_test(test_broken_indexes),
        cmocka_unit_test(test_broken_folders),
        cmocka_unit_test(test_not_files),
        cmocka_unit_test(test_single_file_first),
        cmocka_unit_test(test_identity),
        cmocka_unit_test(test_identity_differs),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
