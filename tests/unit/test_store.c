#include "tests/tools/made_up.h"

#include "engine/json.h"
#include "pipeline/chunk.h"
#include "pipeline/segment.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { PATH_BYTES = 256, N_UNITS = 5 };

/* One store made for all tests; each test breaks a copy. */
static char original[PATH_BYTES];

/* A shell command in which $STORE is the folder. */
static void run(const char *folder, const char *command)
{
    setenv("STORE", folder, 1);
    if (system(command) != 0)
        fail_msg("%s failed for %s", command, folder);
}

static void copy_store(char folder[PATH_BYTES])
{
    snprintf(folder, PATH_BYTES, "/tmp/actdump-store-XXXXXX");
    assert_non_null(mkdtemp(folder));
    run(folder, "cp -r $ORIGINAL/. $STORE");
}

/* store.json alone: for what is refused before anything else is looked at. */
static void copy_manifest(char folder[PATH_BYTES])
{
    snprintf(folder, PATH_BYTES, "/tmp/actdump-store-XXXXXX");
    assert_non_null(mkdtemp(folder));
    run(folder, "cp $ORIGINAL/store.json $STORE");
}

static void remove_store(const char *folder)
{
    run(folder, "rm -rf $STORE");
}

static char *read_text(const char *folder, const char *name)
{
    char path[2 * PATH_BYTES], *text;
    size_t length;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_int_equal(json_read_text(path, 1 << 24, STATUS_INPUT, &text, &length, NULL), STATUS_OK);
    return text;
}

static void write_text(const char *folder, const char *name, const char *text)
{
    char path[2 * PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

/* Replaces the first `find` in store.json. */
static void edit(const char *folder, const char *find, const char *replace)
{
    char *text = read_text(folder, "store.json"), *at = strstr(text, find);
    if (at == NULL)
        fail_msg("store.json has no %s", find);
    char *edited = malloc(strlen(text) + strlen(replace) + 1);
    sprintf(edited, "%.*s%s%s", (int)(at - text), text, replace, at + strlen(find));
    write_text(folder, "store.json", edited);
    free(edited);
    memory_free(text);
}

/* ---------------------------------------------------------------- what verify says */

struct report {
    char text[65536];
    size_t used;
    int n;
};

static void take(void *context, const char *sentence)
{
    struct report *r = context;
    r->n++;
    if (r->used < sizeof r->text)
        r->used += (size_t)snprintf(r->text + r->used, sizeof r->text - r->used, "%s\n", sentence);
}

static int64_t verify(const char *folder, struct report *r)
{
    struct error error = {0};
    int64_t n = -1;
    *r = (struct report){0};
    if (verify_store(folder, take, r, &n, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    return n;
}

static void assert_says(const struct report *r, const char *wanted)
{
    if (strstr(r->text, wanted) == NULL)
        fail_msg("\"%s\" is not in:\n%s", wanted, r->text);
}

/* ---------------------------------------------------------------- reading and writing store.json */

static void test_round_trip(void **state)
{
    struct made_up m;
    struct store *store;
    struct error error = {0};
    (void)state;
    made_up_init(&m, 1);
    if (store_open(original, &store, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    assert_true(store->complete);
    assert_int_equal(store->n_units, N_UNITS);
    assert_int_equal(store->layout.compression, 1);
    assert_int_equal(store->layout.n_captures, MADE_UP_CAPTURES);
    assert_int_equal(store->layout.n_datasets, MADE_UP_DATASETS);
    for (int i = 0; i < MADE_UP_DATASETS; i++) {
        const struct dataset *a = &store->layout.datasets[i], *b = &m.datasets[i];
        assert_string_equal(a->path, b->path);
        assert_int_equal(a->capture, b->capture);
        assert_int_equal(a->rows, b->rows);
        assert_int_equal(a->is_value, b->is_value);
        assert_int_equal(a->layer, b->layer);
        assert_int_equal(a->dtype, b->dtype);
        assert_int_equal(a->width, b->width);
        assert_int_equal(a->row_bytes, b->row_bytes);
        assert_int_equal(a->chunk_rows, b->chunk_rows);
        assert_int_equal(a->n_axes, b->n_axes);
        if (b->is_value)
            assert_int_equal(a->value, b->value);
        for (int k = 0; k < b->n_axes; k++) {
            assert_string_equal(a->axis_names[k], b->axis_names[k]);
            assert_int_equal(a->axis_sizes[k], b->axis_sizes[k]);
        }
    }
    for (int64_t u = 0, first = 0; u < N_UNITS; first += made_up_unit_sequences(u++)) {
        assert_int_equal(store->unit_start[u], first);
        assert_int_equal(store->segments[u].first_sequence, first);
        assert_int_equal(store->segments[u].n_sequences, made_up_unit_sequences(u));
        assert_true(store->segments[u].bytes > 0);
    }
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(store->corpus, "path")),
                        "made up\t\"quoted\"");
    assert_null(store->summary);
    store_close(store);
    store_close(NULL);
}

/* What is read can be written again, byte for byte. */
static void test_written_again(void **state)
{
    struct store *store;
    char folder[PATH_BYTES];
    (void)state;
    copy_store(folder);
    char *before = read_text(folder, "store.json");
    assert_int_equal(store_open(folder, &store, NULL), STATUS_OK);
    const cJSON *statistics = cJSON_GetObjectItemCaseSensitive(store->tree, "statistics");
    assert_int_equal(store_write(store, statistics, NULL), STATUS_OK);
    char *after = read_text(folder, "store.json");
    assert_string_equal(before, after);
    store_close(store);
    memory_free(before);
    memory_free(after);
    remove_store(folder);
}

static void test_names_and_folders(void **state)
{
    char name[64], folder[PATH_BYTES], deep[2 * PATH_BYTES];
    struct error error = {0};
    struct stat info;
    (void)state;
    store_segment_name(12, name);
    assert_string_equal(name, "segments/000012.h5");
    store_segment_name(1234567, name);
    assert_string_equal(name, "segments/1234567.h5");
    snprintf(folder, sizeof folder, "/tmp/actdump-store-XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(deep, sizeof deep, "%s/a//b/c", folder);
    assert_false(store_exists(deep));
    assert_int_equal(store_make_folders(deep, NULL), STATUS_OK);
    assert_int_equal(store_make_folders(deep, NULL), STATUS_OK);
    strcat(deep, "/segments");
    assert_int_equal(stat(deep, &info), 0);
    assert_true(store_exists(original));
    write_text(folder, "file", "x");
    snprintf(deep, sizeof deep, "%s/file/store", folder);
    assert_int_equal(store_make_folders(deep, &error), STATUS_RESOURCE);
    assert_non_null(strstr(error.text, "/file"));
    assert_int_equal(store_make_folders("", NULL), STATUS_USAGE);
    remove_store(folder);
}

static void test_read_segment(void **state)
{
    struct store *store;
    struct segment_record record = {0};
    struct error error = {0};
    char folder[PATH_BYTES];
    (void)state;
    copy_store(folder);
    assert_int_equal(store_open(folder, &store, NULL), STATUS_OK);
    for (int64_t u = 0; u < N_UNITS; u++) {
        const struct segment_record *wanted = &store->segments[u];
        assert_int_equal(store_read_segment(store, u, &record, NULL), STATUS_OK);
        assert_int_equal(record.unit, u);
        assert_int_equal(record.first_sequence, wanted->first_sequence);
        assert_int_equal(record.n_sequences, wanted->n_sequences);
        assert_int_equal(record.n_tokens, wanted->n_tokens);
        assert_int_equal(record.bytes, wanted->bytes);
        assert_int_equal(record.raw_bytes, wanted->raw_bytes);
        assert_true(record.checksum == wanted->checksum);
        assert_memory_equal(record.n_rows, wanted->n_rows, MADE_UP_CAPTURES * sizeof(int64_t));
    }
    run(folder, "cp $STORE/segments/000000.h5 $STORE/segments/000001.h5");
    assert_int_equal(store_read_segment(store, 1, &record, &error), STATUS_INPUT);
    assert_non_null(strstr(error.text, "it is of unit 0, expected 1"));
    error_clear(&error);
    run(folder, "truncate -s 1000 $STORE/segments/000001.h5");
    assert_int_equal(store_read_segment(store, 1, &record, &error), STATUS_INPUT);
    assert_non_null(strstr(error.text, "segments/000001.h5"));
    error_clear(&error);
    run(folder, "rm $STORE/segments/000001.h5");
    assert_int_equal(store_read_segment(store, 1, &record, &error), STATUS_INPUT);
    assert_non_null(strstr(error.text, "No such file"));
    segment_record_fini(&record);
    store_close(store);
    remove_store(folder);
}

/* ---------------------------------------------------------------- broken store.json */

static const struct broken {
    const char *find, *replace, *message;
} broken[] = {
    {"\"version\": 1", "\"version\": 2", "it is of version 2, this actdump reads 1"},
    {"\"version\": 1", "\"version\": 0", "version"},
    {"\"version\": 1", "\"version\": \"1\"", "version"},
    {"\"version\": 1,", "", "version"},
    {"\"layout\": \"row hidden_size\"", "\"layout\": \"row hidden\\nsize\"", "expected names of axes"},
    {"\"path\": \"sequences/start\"", "\"path\": \"sequences/st\\nart\"", "expected groups and a name"},
    {"\"kind\": \"actdump store\"", "\"kind\": \"store\"", "kind is \"store\", expected"},
    {"\"complete\": true", "\"complete\": 1", "complete"},
    {"\"complete\": true", "\"compleet\": true", "compleet"},
    {"\"job\": {", "\"job\": 3, \"job2\": {", "job2"},
    {"\"summary\": null", "\"summary\": 7", "summary is a number (7)"},
    {"\"totals\": {", "\"totals\": [], \"run2\": {", "run2"},
    {"\"level\": 1", "\"level\": 99", "compression.level"},
    {"\"captures\": [\"all\", ", "\"captures\": [", "captures"},
    {"\"captures\": [\"all\", ", "\"captures\": [\"all\", \"all\", ", "twice"},
    {"\"captures\": [\"all\", ", "\"captures\": [\"../all\", ", "captures[0]"},
    {"\"captures\": [\"all\", ", "\"captures\": [\"sequences\", ", "captures[0]"},
    {"\"captures\": [\"all\", ", "\"captures\": [\"..\", ", "captures[0]"},
    {"\"captures\": [\"all\", ", "\"captures\": [7, ", "captures[0] is a number (7)"},
    {"\"path\": \"sequences/start\"", "\"path\": \"sequences/../start\"", "datasets[1]"},
    {"\"path\": \"sequences/start\"", "\"path\": \"sequences/document\"", "datasets[1]"},
    {"\"path\": \"sequences/start\"", "\"path\": 1", "datasets[1].path"},
    {"\"path\": \"all/layers/0/layer_output\"", "\"path\": \"all/layers/1/layer_output\"",
     "datasets[7].path"},
    {"\"path\": \"all/layers/0/layer_output\"", "\"path\": \"/etc/passwd\"", "datasets[7].path"},
    {"\"value\": \"layer_output\"", "\"value\": \"layer_outputs\"", "layer_outputs"},
    {"\"value\": \"layer_output\", \"layer\": 0", "\"value\": \"layer_output\", \"layer\": -1",
     "datasets[7].path"},
    {"\"value\": \"layer_output\", \"layer\": 0", "\"value\": \"layer_output\", \"layer\": 1e12", "layer"},
    {"\"value\": \"layer_output\", \"layer\": 0", "\"value\": \"layer_output\", \"layer\": 0.5", "layer"},
    {"\"capture\": \"some\"", "\"capture\": \"nothing\"", "expected one of the captures"},
    {"\"layout\": \"row hidden_size\"", "\"layout\": \"token hidden_size\"",
     "expected row or sequence first"},
    {"\"layout\": \"row hidden_size\"", "\"layout\": \"row\"", "more sizes than the layout"},
    {"\"layout\": \"row hidden_size\"", "\"layout\": \"row a b\"", "fewer sizes than the layout"},
    {"\"layout\": \"row hidden_size\"", "\"layout\": \"\"", "expected row or sequence first"},
    {"\"layout\": \"row hidden_size\", \"shape\": [24]",
     "\"layout\": \"row a b c d\", \"shape\": [1, 2, 3, 4]", "more sizes than the layout"},
    {"\"shape\": [24]", "\"shape\": [0]", "shape[0]"},
    {"\"shape\": [24]", "\"shape\": [-3]", "shape[0]"},
    {"\"shape\": [24]", "\"shape\": [1.5]", "shape[0]"},
    {"\"shape\": [24]", "\"shape\": [4294967297]", "shape[0]"},
    {"\"shape\": [24]", "\"shape\": [null]", "shape[0]"},
    {"\"shape\": [24]", "\"shape\": 24", "shape is a number (24)"},
    {"\"shape\": [5, 3]", "\"shape\": [4000000000, 4000000000]", "shape[1]"},
    {"\"dtype\": \"bfloat16\"", "\"dtype\": \"float8\"", "float8"},
    {"\"float16\", \"load_dtype\": \"float32\"", "\"float16\", \"load_dtype\": null", "load_dtype"},
    {"\"index\": {", "\"index\": 1, \"x\": {", "x"},
    {"\"index\": {\"file\": \"store.h5\"", "\"index\": {\"file\": \"/etc/passwd\"", "index.file"},
    {"\"index\": {\"file\": \"store.h5\", \"bytes\": ", "\"index\": {\"file\": \"store.h5\", \"bytes\": -",
     "index.bytes"},
    {"\"chunk_rows\": 8", "\"chunk_rows\": 0", "chunk_rows"},
    {"\"chunk_rows\": 8", "\"chunk_rows\": 99999999999", "chunk_rows"},
    {"\"row_bytes\": 96}", "\"row_bytes\": 96, \"more\": 1}", "more"},
    {"{\"path\": \"sequences/length\"", "{\"path\": \"sequences/extra\"", "no table"},
    {"\"unit_start\": [0", "\"unit_start\": [1", "unit_start[0]"},
    {"\"unit_start\": [0, 9", "\"unit_start\": [0, -9", "unit_start[1]"},
    {"\"unit_start\": [0, 9, 10", "\"unit_start\": [0, 9, 8", "unit_start[2]"},
    {"\"unit_start\": [0, 9", "\"unit_start\": [0, 9.5", "unit_start[1]"},
    {"\"unit_start\": [0", "\"unit_start\": {}, \"units\": [0", "units"},
    {"{\"unit\": 1,", "{\"unit\": 0,", "segments[1] repeats unit 0"},
    {"{\"unit\": 1,", "{\"unit\": 5,", "segments[1].unit"},
    {"{\"unit\": 1,", "{\"unit\": -1,", "segments[1].unit"},
    {"\"file\": \"segments/000001.h5\"", "\"file\": \"../../etc/passwd\"", "segments[1].file"},
    {"\"file\": \"segments/000001.h5\"", "\"file\": \"segments/000002.h5\"", "segments[1].file"},
    {"\"rows\": {\"all\": ", "\"rows\": {\"al\": ", "segments[0].rows.all"},
    {"\"rows\": {\"all\": ", "\"rows\": {\"more\": 1, \"all\": ", "has 4 captures, expected 3"},
    {"\"rows\": {\"all\": ", "\"rows\": {\"all\": -", "segments[0].rows.all"},
    {"\"rows\": {\"all\": ", "\"rows\": {\"all\": 1e15, \"x\": ", "segments[0].rows.all"},
    {"\"n_sequences\": 9, \"n_tokens\": 53, \"rows", "\"n_sequences\": -9, \"n_tokens\": 53, \"rows",
     "segments[0].n_sequences"},
    {"\"checksum\": \"", "\"checksum\": \"x", "segments[0].checksum"},
    {"\"statistics\": {", "\"statistics\": [], \"x\": {", "x"},
};

static void test_broken_store_json(void **state)
{
    (void)state;
    int64_t tokens = 0;
    for (int64_t s = 0; s < 9; s++)
        tokens += made_up_length(s);
    assert_int_equal(tokens, 53); /* what a row of the table has to find */
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        struct store *store = NULL;
        struct error error = {0};
        char folder[PATH_BYTES];
        copy_manifest(folder);
        edit(folder, broken[i].find, broken[i].replace);
        enum status status = store_open(folder, &store, &error);
        if (status != STATUS_INPUT || strstr(error.text, broken[i].message) == NULL ||
            strstr(error.text, "store.json") == NULL)
            fail_msg("%s -> %s: status %d, \"%s\"", broken[i].find, broken[i].replace, (int)status,
                     error.text);
        int64_t n = 0;
        error_clear(&error);
        struct report r = {0};
        assert_int_equal(verify_store(folder, take, &r, &n, &error), STATUS_INPUT);
        error_clear(&error);
        assert_int_equal(index_build(folder, &error), STATUS_INPUT);
        remove_store(folder);
    }
}

/* Cut anywhere, it is refused, and nothing leaks or crashes. */
static void test_cut_store_json(void **state)
{
    char folder[PATH_BYTES];
    (void)state;
    copy_manifest(folder);
    char *text = read_text(folder, "store.json");
    for (size_t n = strlen(text) - 3; n > 3; n -= n > 200 ? 97 : 1) {
        struct store *store = NULL;
        text[n] = '\0';
        write_text(folder, "store.json", text);
        assert_int_equal(store_open(folder, &store, NULL), STATUS_INPUT);
    }
    memory_free(text);
    run(folder, "rm $STORE/store.json");
    struct store *store = NULL;
    assert_int_equal(store_open(folder, &store, NULL), STATUS_INPUT);
    assert_int_equal(info_print(folder, NULL), STATUS_INPUT);
    remove_store(folder);
}

static void test_out_of_memory(void **state)
{
    struct store *store = NULL;
    enum status status = STATUS_RESOURCE;
    (void)state;
    for (int64_t n = 0; status != STATUS_OK; n++) {
        memory_fail_at(n);
        status = store_open(original, &store, NULL);
        assert_true(status == STATUS_OK || status == STATUS_RESOURCE);
    }
    store_close(store);
    char folder[PATH_BYTES];
    copy_store(folder);
    status = STATUS_RESOURCE;
    for (int64_t n = 0; status != STATUS_OK; n++) {
        memory_fail_at(n);
        status = index_build(folder, NULL);
        assert_true(status == STATUS_OK || status == STATUS_RESOURCE);
    }
    status = STATUS_RESOURCE;
    for (int64_t n = 0; status != STATUS_OK; n += n < 40 ? 1 : 41) {
        struct report r = {0};
        int64_t n_faults = 0;
        memory_fail_at(n);
        status = verify_store(folder, take, &r, &n_faults, NULL);
        assert_true(status == STATUS_OK || status == STATUS_RESOURCE);
    }
    memory_fail_at(-1);
    struct report r;
    assert_int_equal(verify(folder, &r), 0);
    remove_store(folder);
}

/* ---------------------------------------------------------------- verify */

static void test_a_whole_store(void **state)
{
    struct report r;
    (void)state;
    assert_int_equal(verify(original, &r), 0);
    assert_int_equal(r.n, 0);
}

/* Numbers of store.json that can be read and are wrong: what is said, and where. */
static const struct broken disagreeing[] = {
    {"\"totals\": {\"n_segments\": 5", "\"totals\": {\"n_segments\": 6",
     "store.json: totals.n_segments is 6"},
    {"\"complete\": true", "\"complete\": false", "it says that the store is not complete"},
    {"\"filters\": [2, 32015]", "\"filters\": [2]", "compression.filters"},
    {"\"level\": 1", "\"level\": 0", "other filters than none"},
    {"\"row_bytes\": 96}", "\"row_bytes\": 97}", "row_bytes of all/layers/0/layer_output"},
    {"\"shape\": [24]", "\"shape\": [25]",
     "dataset all/layers/0/layer_output has rows of shape [24] instead of [25]"},
    {"\"dtype\": \"bfloat16\"", "\"dtype\": \"float16\"", "has elements of bfloat16 instead of float16"},
    {"\"float16\", \"load_dtype\": \"float32\"", "\"float16\", \"load_dtype\": \"bfloat16\"",
     "attribute load_dtype"},
    {"\"layout\": \"row hidden_size\"", "\"layout\": \"row channels\"", "attribute layout"},
    {"\"chunk_rows\": 8", "\"chunk_rows\": 9", "has chunks of 8 rows, expected 9"},
    {"\"unit_start\": [0, 9, 10", "\"unit_start\": [0, 8, 10",
     "segments/000001.h5: store.json says 1 sequences from 9"},
    {"\"first_sequence\": 9", "\"first_sequence\": 8",
     "segments/000001.h5: attribute first_sequence is 9, expected 8"},
    {"\"n_sequences\": 9, \"n_tokens\": 53, \"rows", "\"n_sequences\": 8, \"n_tokens\": 53, \"rows",
     "segments/000000.h5: dataset sequences/document has 9 rows, store.json says 8"},
    {"\"n_sequences\": 9, \"n_tokens\": 53, \"rows", "\"n_sequences\": 9, \"n_tokens\": 54, \"rows",
     "segments/000000.h5: its sequences have 53 tokens, store.json says 54"},
    {"\"rows\": {\"all\": 53", "\"rows\": {\"all\": 54",
     "segments/000000.h5: dataset all/rows/sequence has 53 rows, store.json says 54"},
    {"\"none\": 0", "\"none\": 1", "segments/000000.h5: dataset none/rows/sequence has 0 rows"},
    {"\"n_nonfinite\":0", "\"n_nonfinite\":1",
     "store.json: statistics.all/layers/0/layer_output are not those"},
    {"\"statistics\": {", "\"statistics\": {\"x\": 1,", "store.json: statistics has"},
};

static void test_disagreeing_store_json(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof disagreeing / sizeof disagreeing[0]; i++) {
        struct report r;
        char folder[PATH_BYTES];
        copy_store(folder);
        edit(folder, disagreeing[i].find, disagreeing[i].replace);
        if (verify(folder, &r) == 0)
            fail_msg("%s -> %s passes", disagreeing[i].find, disagreeing[i].replace);
        assert_says(&r, disagreeing[i].message);
        remove_store(folder);
    }
}

static void flip(const char *path, off_t at)
{
    unsigned char byte;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

/* A byte in the middle of a dataset's chunk of a segment. */
static off_t find_chunk(const char *path, const char *dataset, int64_t first_row)
{
    hid_t file;
    hsize_t offset[4] = {(hsize_t)first_row}, size = 0;
    haddr_t address = 0;
    unsigned mask;
    assert_int_equal(hdf5_open(path, &file, NULL), STATUS_OK);
    hid_t id = H5Dopen2(file, dataset, H5P_DEFAULT);
    assert_true(H5Dget_chunk_info_by_coord(id, offset, &mask, &address, &size) >= 0);
    H5Dclose(id);
    H5Fclose(file);
    return (off_t)(address + size / 2);
}

/* Makes store.json's size and checksum of unit 0 those of the file as it is. */
static void restate(const char *folder)
{
    struct store *store;
    struct segment_record *r;
    assert_int_equal(store_open(folder, &store, NULL), STATUS_OK);
    r = &store->segments[0];
    struct segment_record found = {0};
    if (store_read_segment(store, 0, &found, NULL) == STATUS_OK) {
        r->bytes = found.bytes;
        r->checksum = found.checksum;
    }
    segment_record_fini(&found);
    store_write(store, cJSON_GetObjectItemCaseSensitive(store->tree, "statistics"), NULL);
    store_close(store);
}

static void test_flipped_bytes(void **state)
{
    static const struct {
        const char *dataset;
        int64_t row;
        const char *message;
    } chunks[] = {
        {"all/layers/0/layer_output", 0, "dataset all/layers/0/layer_output: chunk 0"},
        {"all/layers/0/layer_output", 48, "dataset all/layers/0/layer_output: chunk 6"},
        {"all/layers/1/layer_output", 8, "dataset all/layers/1/layer_output: chunk 1"},
        {"all/next_token_probs", 8, "dataset all/next_token_probs: chunk 2"},
        {"all/rows/position", 16, "dataset all/rows/position: chunk 1"},
        {"sequences/length", 0, "dataset sequences/length: chunk 0"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++) {
        struct report r;
        char folder[PATH_BYTES], path[2 * PATH_BYTES];
        copy_store(folder);
        snprintf(path, sizeof path, "%s/segments/000000.h5", folder);
        flip(path, find_chunk(path, chunks[i].dataset, chunks[i].row));
        assert_true(verify(folder, &r) >= 2);
        assert_says(&r, "segments/000000.h5: its checksum is");
        assert_says(&r, chunks[i].message);
        restate(folder); /* only the chunk itself can tell now */
        assert_true(verify(folder, &r) >= 1);
        assert_says(&r, chunks[i].message);
        remove_store(folder);
    }
}

/* Bytes anywhere in a small segment: the checksum sees each, and no reading of what is behind crashes. */
static void test_flipped_anywhere(void **state)
{
    struct stat info;
    char folder[PATH_BYTES], path[2 * PATH_BYTES];
    (void)state;
    copy_store(folder);
    snprintf(path, sizeof path, "%s/segments/000002.h5", folder);
    assert_int_equal(stat(path, &info), 0);
    for (off_t at = 0; at < info.st_size; at += info.st_size / 100) {
        struct report r;
        flip(path, at);
        assert_true(verify(folder, &r) >= 1);
        assert_says(&r, "segments/000002.h5: its checksum is");
        flip(path, at);
    }
    remove_store(folder);
}

/* The same of store.h5. */
static void test_flipped_anywhere_in_the_index(void **state)
{
    struct stat info;
    char folder[PATH_BYTES], path[2 * PATH_BYTES];
    (void)state;
    copy_store(folder);
    snprintf(path, sizeof path, "%s/store.h5", folder);
    assert_int_equal(stat(path, &info), 0);
    for (off_t at = 0; at < info.st_size; at += info.st_size / 20) {
        struct report r;
        flip(path, at);
        assert_int_equal(verify(folder, &r), 1);
        assert_says(&r, "store.h5: it has");
        flip(path, at);
    }
    remove_store(folder);
}

static void test_faults_of_the_folder(void **state)
{
    static const struct {
        const char *command;
        const char *message;
        int n_faults; /* -1: any but 0 */
    } rows[] = {
        {"rm $STORE/segments/000003.h5", "segments/000003.h5: it is missing", 1},
        {"truncate -s 5000 $STORE/segments/000004.h5",
         "segments/000004.h5: it has 5000 bytes, store.json says", -1},
        {"truncate -s 0 $STORE/segments/000004.h5", "segments/000004.h5: it has 0 bytes", -1},
        {"printf x >> $STORE/segments/000004.h5", "segments/000004.h5: it has", 1},
        {"cp $STORE/segments/000000.h5 $STORE/segments/000009.h5",
         "segments/000009.h5: store.json does not list it", 1},
        {"cp $STORE/segments/000000.h5 $STORE/segments/junk", "segments/junk: store.json does not list it",
         1},
        {"touch $STORE/segments/.000001.h5.host.12.tmp", "note: segments/.000001.h5.host.12.tmp", 0},
        {"touch $STORE/.store.json.host.12.tmp", "note: .store.json.host.12.tmp", 0},
        {"touch $STORE/notes.txt", "", 0},
        {"cp $STORE/segments/000000.h5 $STORE/segments/000003.h5",
         "segments/000003.h5: attribute unit is 0, expected 3", -1},
        {"rm $STORE/store.h5", "store.h5: it cannot be read (No such file or directory)", 1},
        {"truncate -s 700 $STORE/store.h5", "store.h5", 1},
        {"cp $STORE/segments/000000.h5 $STORE/store.h5", "store.h5: it has", -1},
        {"rm -r $STORE/segments", "segments/000000.h5: it is missing", -1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct report r;
        char folder[PATH_BYTES];
        copy_store(folder);
        run(folder, rows[i].command);
        int64_t n = verify(folder, &r);
        assert_says(&r, rows[i].message);
        if (rows[i].n_faults < 0 ? n == 0 : n != rows[i].n_faults)
            fail_msg("%s: %d faults\n%s", rows[i].command, (int)n, r.text);
        remove_store(folder);
    }
}

/* A segment's dataset rewritten, with store.json's checksum put right. */
static void rewrite(const char *folder, const char *dataset, hid_t type, hsize_t row, const void *value)
{
    char path[2 * PATH_BYTES];
    hsize_t one = 1;
    snprintf(path, sizeof path, "%s/segments/000000.h5", folder);
    hid_t access = hdf5_access_create(), file = H5Fopen(path, H5F_ACC_RDWR, access);
    hid_t id = H5Dopen2(file, dataset, H5P_DEFAULT), space = H5Dget_space(id), memory = H5Screate(H5S_SCALAR);
    assert_true(H5Sselect_hyperslab(space, H5S_SELECT_SET, &row, NULL, &one, NULL) >= 0);
    assert_true(H5Dwrite(id, type, memory, space, H5P_DEFAULT, value) >= 0);
    H5Sclose(memory);
    H5Sclose(space);
    H5Dclose(id);
    assert_true(H5Fclose(file) >= 0);
    H5Pclose(access);
    restate(folder);
}

static void test_tables_and_statistics(void **state)
{
    static const struct {
        const char *dataset;
        hsize_t row;
        int64_t value;
        const char *message;
    } rows[] = {
        {"all/rows/sequence", 3, 7, "all/rows/sequence[4] is 1 and its position"},
        {"all/rows/sequence", 3, -1, "all/rows/sequence[3] is -1"},
        {"all/rows/sequence", 52, 9, "all/rows/sequence[52] is 9"},
        {"all/rows/position", 4, 2, "all/rows/sequence[4]"},
        {"all/rows/position", 0, 1, "all/rows/sequence[0]"},
        {"some/rows/input_ids", 1, -2, "some/rows/input_ids[1] is -2"},
        {"sequences/length", 2, 0, "sequences/length[2] is 0"},
        {"sequences/length", 2, 3, "its sequences have"},
        {"sequences/document", 5, -1, "sequences/document[5] is -1"},
        {"statistics/all/layers/0/layer_output/count", 2, 52, "counts by column"},
        {"statistics/all/layers/0/layer_output/count", 2, 54, "count[2] is 54 for 53 rows"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct report r;
        char folder[PATH_BYTES];
        copy_store(folder);
        rewrite(folder, rows[i].dataset, H5T_NATIVE_INT64, rows[i].row, &rows[i].value);
        assert_true(verify(folder, &r) >= 1);
        assert_says(&r, rows[i].message);
        assert_says(&r, "segments/000000.h5");
        remove_store(folder);
    }
    static const char *const arrays[][2] = {{"statistics/all/layers/0/layer_output/mean", "means"},
                                            {"statistics/all/layers/0/layer_output/m2", "variances"}};
    for (size_t i = 0; i < 2; i++) {
        struct report r;
        double value = 0.5;
        char folder[PATH_BYTES];
        copy_store(folder);
        rewrite(folder, arrays[i][0], H5T_NATIVE_DOUBLE, 1, &value);
        assert_true(verify(folder, &r) >= 1);
        assert_says(&r, arrays[i][1]);
        remove_store(folder);
    }
}

/* A value that store.json does not know of, and one that has gone. */
static void test_datasets_too_many_and_too_few(void **state)
{
    struct report r;
    char folder[PATH_BYTES], path[2 * PATH_BYTES];
    (void)state;
    copy_store(folder);
    snprintf(path, sizeof path, "%s/segments/000000.h5", folder);
    hid_t access = hdf5_access_create(), file = H5Fopen(path, H5F_ACC_RDWR, access);
    assert_true(H5Lmove(file, "all/layers/0/layer_output", file, "all/layers/0/layer_oddity", H5P_DEFAULT,
                        H5P_DEFAULT) >= 0);
    H5Fclose(file);
    H5Pclose(access);
    assert_true(verify(folder, &r) >= 3);
    assert_says(&r, "segments/000000.h5: dataset all/layers/0/layer_output is missing");
    assert_says(&r, "segments/000000.h5: dataset all/layers/0/layer_oddity is not in store.json");
    remove_store(folder);
}

/* store.h5 of a store that then changed. */
static void test_stale_index(void **state)
{
    struct store *store;
    struct report r;
    char folder[PATH_BYTES];
    (void)state;
    copy_store(folder);
    assert_int_equal(store_open(folder, &store, NULL), STATUS_OK);
    run(folder, "rm $STORE/segments/000004.h5");
    store->segments[4].bytes = 0;
    store->complete = false;
    assert_int_equal(store_write(store, NULL, NULL), STATUS_OK);
    assert_int_equal(verify(folder, &r), 0); /* while it grows, an old index is no fault */
    assert_says(&r, "note: store.json: the store is not complete: 4 of 5 units are done");
    assert_says(&r, "note: store.h5");
    assert_int_equal(index_build(folder, NULL), STATUS_OK);
    assert_int_equal(verify(folder, &r), 0);
    assert_int_equal(r.n, 1);
    store_close(store);
    remove_store(folder);
}

static void test_everything_at_once(void **state)
{
    struct report r;
    char folder[PATH_BYTES], path[2 * PATH_BYTES];
    (void)state;
    copy_store(folder);
    run(folder, "rm $STORE/segments/000000.h5 $STORE/segments/000002.h5");
    run(folder, "truncate -s -1 $STORE/segments/000001.h5");
    snprintf(path, sizeof path, "%s/segments/000003.h5", folder);
    flip(path, find_chunk(path, "all/layers/0/layer_output", 8));
    edit(folder, "\"unit\": 4, \"file\": \"segments/000004.h5\", \"first_sequence\": 14",
         "\"unit\": 4, \"file\": \"segments/000004.h5\", \"first_sequence\": 15");
    assert_true(verify(folder, &r) >= 5);
    assert_says(&r, "segments/000000.h5: it is missing");
    assert_says(&r, "segments/000001.h5: it has");
    assert_says(&r, "segments/000002.h5: it is missing");
    assert_says(&r, "segments/000003.h5: dataset all/layers/0/layer_output: chunk 1");
    assert_says(&r, "segments/000004.h5: attribute first_sequence is 14, expected 15");
    remove_store(folder);
}

static void test_index_without_a_segment(void **state)
{
    char folder[PATH_BYTES];
    struct store *store;
    struct error error = {0};
    (void)state;
    copy_store(folder);
    run(folder, "rm $STORE/segments/000003.h5");
    if (index_build(folder, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    assert_int_equal(store_open(folder, &store, NULL), STATUS_OK);
    const cJSON *statistics = cJSON_GetObjectItemCaseSensitive(store->tree, "statistics");
    const cJSON *one = cJSON_GetObjectItemCaseSensitive(statistics, "all/layers/0/layer_output");
    int64_t n = 0, all = 0;
    assert_true(json_get_integer(cJSON_GetObjectItemCaseSensitive(one, "n_rows"), &n));
    for (int64_t u = 0; u < N_UNITS; u++)
        all += store->segments[u].n_rows[0];
    assert_int_equal(n, all - store->segments[3].n_rows[0]);
    store_close(store);
    run(folder, "truncate -s 2000 $STORE/segments/000001.h5");
    assert_int_equal(index_build(folder, &error), STATUS_INPUT);
    assert_non_null(strstr(error.text, "segments/000001.h5"));
    remove_store(folder);
}

static int make_original(void **state)
{
    struct made_up m;
    struct error error = {0};
    (void)state;
    hdf5_start();
    snprintf(original, sizeof original, "/tmp/actdump-store-XXXXXX");
    if (mkdtemp(original) == NULL)
        return 1;
    setenv("ORIGINAL", original, 1);
    made_up_init(&m, 1);
    if (made_up_store(&m, original, 2, N_UNITS, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    return 0;
}

static int remove_original(void **state)
{
    (void)state;
    remove_store(original);
    return 0;
}

/* HDF5 forgets what it had read of a damaged file. */
const char *__lsan_default_suppressions(void)
{
    return "leak:libhdf5";
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_written_again),
        cmocka_unit_test(test_names_and_folders),
        cmocka_unit_test(test_read_segment),
        cmocka_unit_test(test_broken_store_json),
        cmocka_unit_test(test_cut_store_json),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_a_whole_store),
        cmocka_unit_test(test_disagreeing_store_json),
        cmocka_unit_test(test_flipped_bytes),
        cmocka_unit_test(test_flipped_anywhere),
        cmocka_unit_test(test_flipped_anywhere_in_the_index),
        cmocka_unit_test(test_faults_of_the_folder),
        cmocka_unit_test(test_tables_and_statistics),
        cmocka_unit_test(test_datasets_too_many_and_too_few),
        cmocka_unit_test(test_stale_index),
        cmocka_unit_test(test_everything_at_once),
        cmocka_unit_test(test_index_without_a_segment),
    };
    return cmocka_run_group_tests(tests, make_original, remove_original);
}
