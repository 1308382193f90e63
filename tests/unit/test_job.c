/* pipeline/job.h: the table of good and bad files in tests/data/jobs, what the fields become, --set, memory.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "engine/model.h"
#include "kernels/base/memory.h"
#include "pipeline/job.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- the table ---- */

static int is_json(const struct dirent *entry)
{
    const char *suffix = strrchr(entry->d_name, '.');
    return suffix != NULL && strcmp(suffix, ".json") == 0;
}

/* The first line of the .txt beside a .json. */
static void read_message(const char *json, char *message, size_t size)
{
    char path[512];
    snprintf(path, sizeof path, "%.*stxt", (int)(strlen(json) - strlen("json")), json);
    FILE *file = fopen(path, "r");
    if (file == NULL || fgets(message, (int)size, file) == NULL)
        fail_msg("%s cannot be read", path);
    else
        fclose(file);
    message[strcspn(message, "\n")] = '\0';
}

static int check_good(const char *path)
{
    struct job *job = NULL;
    struct error error = {0};
    enum status status = job_read(path, NULL, 0, &job, &error);
    job_free(job);
    if (status == STATUS_OK && memory_in_use() == 0)
        return 0;
    print_error("%s: status %d, %zu bytes in use: %s\n", path, status, memory_in_use(), error.text);
    return 1;
}

static int check_bad(const char *path)
{
    struct job *job = NULL;
    struct error error = {0};
    char message[512];
    read_message(path, message, sizeof message);
    enum status status = job_read(path, NULL, 0, &job, &error);
    if (status == STATUS_USAGE && error.status == status && job == NULL && memory_in_use() == 0 &&
        strncmp(error.text, path, strlen(path)) == 0 && strstr(error.text, message) != NULL)
        return 0;
    print_error("%s: status %d, %zu bytes in use: %s\n    expected: %s\n", path, status, memory_in_use(),
                status == STATUS_OK ? "accepted" : error.text, message);
    job_free(job);
    return 1;
}

static void check_folder(const char *folder, int least, int (*check)(const char *))
{
    struct dirent **entries;
    int n = scandir(folder, &entries, is_json, alphasort), faults = 0;
    assert_true(n >= least);
    for (int i = 0; i < n; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        faults += check(path);
        free(entries[i]);
    }
    free(entries);
    assert_int_equal(faults, 0);
}

static void test_good_files(void **state)
{
    (void)state;
    check_folder(TEST_DATA "/jobs/good", 60, check_good);
}

static void test_bad_files(void **state)
{
    (void)state;
    check_folder(TEST_DATA "/jobs/bad", 130, check_bad);
}

/* ---- fields ---- */

#define CORPUS "\"corpus\": {\"format\": \"megatron\", \"path\": \"c\", \"context\": 8}, "
#define CAPTURES "\"captures\": {\"a\": {\"values\": [\"layer_output\"]}}, "
#define STORE "\"store\": {\"path\": \"s\"}"
#define LEAST "{\"model\": {\"checkpoint\": \"m\"}, " CORPUS CAPTURES STORE "}"

static struct job *parse_with(const char *text, const char *folder, const char *const *sets, int64_t n_sets)
{
    struct job *job = NULL;
    struct error error = {0};
    if (job_parse(text, strlen(text), "job.json", folder, sets, n_sets, &job, &error) != STATUS_OK)
        fail_msg("%s: %s", text, error.text);
    return job;
}

static void test_defaults(void **state)
{
    (void)state;
    struct job *job = parse_with(LEAST, "/jobs", NULL, 0);
    assert_string_equal(job->source, "job.json");
    assert_string_equal(job->checkpoint, "/jobs/m");
    assert_string_equal(job->corpus.path, "/jobs/c");
    assert_string_equal(job->store_path, "/jobs/s");
    assert_int_equal(job->load_dtype, LOAD_DTYPE_OWN);
    assert_int_equal(job->device, DEVICE_AUTO);
    assert_false(job->tf32);
    assert_int_equal(job->corpus.format, CORPUS_MEGATRON);
    assert_int_equal(job->corpus.context, 8);
    assert_int_equal(job->corpus.n_prepend, 0);
    assert_int_equal(job->corpus.start, 0);
    assert_int_equal(job->corpus.limit, -1);
    assert_false(job->corpus.has_pad || job->corpus.has_shuffle || job->corpus.carry);
    assert_int_equal(job->n_captures, 1);
    assert_string_equal(job->captures[0].name, "a");
    assert_int_equal(job->captures[0].n_values, 1);
    assert_string_equal(job->captures[0].values[0], "layer_output");
    assert_true(job->captures[0].layers.all);
    assert_int_equal(job->captures[0].positions.kind, POSITIONS_ALL);
    assert_int_equal(job->captures[0].dtype, -1);
    assert_int_equal(job->chunk_rows, 1024);
    assert_int_equal(job->compression, 1);
    assert_int_equal(job->unit_tokens, 65536);
    assert_int_equal(job->batch_tokens, 0);
    assert_int_equal(job->n_threads, 0);
    assert_float_equal(job->grace_seconds, 30, 0);
    assert_float_equal(job->time_limit_seconds, 0, 0);
    assert_false(job->stop_on_nonfinite);
    job_free(job);
}

static void test_model_and_corpus(void **state)
{
    (void)state;
    struct job *job =
        parse_with("{\"model\": {\"checkpoint\": \"/m\", \"dtype\": \"bfloat16\", \"device\": \"cuda\","
                   " \"tf32\": true}, \"corpus\": {\"format\": \"hdf5\", \"path\": \"/c\", \"dataset\":"
                   " \"ids\", \"context\": 8, \"prepend\": [0, 2147483647], \"start\": 3, \"limit\": 4,"
                   " \"pad\": -1, \"shuffle_seed\": 0, \"carry\": true}, " CAPTURES STORE "}",
                   "", NULL, 0);
    assert_string_equal(job->checkpoint, "/m");
    assert_string_equal(job->store_path, "s");
    assert_int_equal(job->load_dtype, DTYPE_BF16);
    assert_int_equal(job->device, DEVICE_CUDA);
    assert_true(job->tf32);
    const struct corpus_options *c = &job->corpus;
    assert_int_equal(c->format, CORPUS_HDF5);
    assert_string_equal(c->dataset, "ids");
    assert_int_equal(c->n_prepend, 2);
    assert_int_equal(c->prepend[0], 0); /* an id like any other, not "none" */
    assert_int_equal(c->prepend[1], INT32_MAX);
    assert_int_equal(c->start, 3);
    assert_int_equal(c->limit, 4);
    assert_true(c->has_pad);
    assert_int_equal(c->pad, -1);
    assert_true(c->has_shuffle);
    assert_int_equal(c->shuffle_seed, 0);
    assert_true(c->carry);
    job_free(job);
}

static void test_raw_width(void **state)
{
    (void)state;
    static const struct {
        const char *set;
        int bytes;
    } rows[] = {{"corpus.dtype=uint16", 2}, {"corpus.dtype=uint32", 4}};
    for (size_t i = 0; i < COUNT(rows); i++) {
        const char *const sets[] = {"corpus.format=raw", rows[i].set};
        struct job *job = parse_with(LEAST, "", sets, 2);
        assert_int_equal(job->corpus.format, CORPUS_RAW);
        assert_int_equal(job->corpus.raw_bytes, rows[i].bytes);
        job_free(job);
    }
}

static struct job *parse_set(const char *set)
{
    return parse_with(LEAST, "/jobs", &set, 1);
}

static void test_layers(void **state)
{
    (void)state;
    static const struct {
        const char *set;
        bool all;
        int n_ranges, n_kinds;
        struct layer_range ranges[3];
        const char *kinds[2];
    } rows[] = {
        {"captures.a.layers=all", true, 0, 0, {{0}}, {0}},
        {"captures.a.layers=7", false, 1, 0, {{7, 7, 1}}, {0}},
        {"captures.a.layers=-1", false, 1, 0, {{-1, -1, 1}}, {0}},
        {"captures.a.layers=0-31:4", false, 1, 0, {{0, 31, 4}}, {0}},
        {"captures.a.layers=-4--1", false, 1, 0, {{-4, -1, 1}}, {0}},
        {"captures.a.layers=2--2:3", false, 1, 0, {{2, -2, 3}}, {0}},
        {"captures.a.layers=0,4, 8-11", false, 3, 0, {{0, 0, 1}, {4, 4, 1}, {8, 11, 1}}, {0}},
        {"captures.a.layers=[3, \"-2\", \"moe,1-2\"]",
         false,
         3,
         1,
         {{3, 3, 1}, {-2, -2, 1}, {1, 2, 1}},
         {"moe"}},
        {"captures.a.layers=[\"mamba\", \"attention\"]", false, 0, 2, {{0}}, {"mamba", "attention"}},
        {"captures.a.layers=[0, \"all\"]", true, 1, 0, {{0, 0, 1}}, {0}},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        struct job *job = parse_set(rows[i].set);
        const struct layer_selector *s = &job->captures[0].layers;
        assert_int_equal(s->all, rows[i].all);
        assert_int_equal(s->n_ranges, rows[i].n_ranges);
        assert_int_equal(s->n_kinds, rows[i].n_kinds);
        for (int64_t r = 0; r < s->n_ranges; r++) {
            assert_int_equal(s->ranges[r].first, rows[i].ranges[r].first);
            assert_int_equal(s->ranges[r].last, rows[i].ranges[r].last);
            assert_int_equal(s->ranges[r].step, rows[i].ranges[r].step);
        }
        for (int64_t k = 0; k < s->n_kinds; k++)
            assert_string_equal(s->kinds[k], rows[i].kinds[k]);
        job_free(job);
    }
}

static void test_positions(void **state)
{
    (void)state;
    static const struct {
        const char *set;
        struct positions expected;
    } rows[] = {
        {"captures.a.positions=all", {.kind = POSITIONS_ALL}},
        {"captures.a.positions=last", {.kind = POSITIONS_LAST}},
        {"captures.a.positions.first=5", {.kind = POSITIONS_FIRST, .n = 5}},
        {"captures.a.positions={\"every\": 4, \"offset\": 3}",
         {.kind = POSITIONS_EVERY, .n = 4, .offset = 3}},
        {"captures.a.positions={\"sample\": 0.25, \"seed\": 9}",
         {.kind = POSITIONS_SAMPLE, .fraction = 0.25, .seed = 9}},
        {"captures.a.positions.skip_first=2", {.kind = POSITIONS_ALL, .skip_first = 2}},
        {"captures.a.skip_first=3", {.kind = POSITIONS_ALL, .skip_first = 3}},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        struct job *job = parse_set(rows[i].set);
        const struct positions *p = &job->captures[0].positions, *e = &rows[i].expected;
        assert_int_equal(p->kind, e->kind);
        assert_int_equal(p->n, e->n);
        assert_int_equal(p->offset, e->offset);
        assert_float_equal(p->fraction, e->fraction, 0);
        assert_int_equal(p->seed, e->seed);
        assert_int_equal(p->skip_first, e->skip_first);
        assert_int_equal(p->n_skip_ids, 0);
        job_free(job);
    }
}

/* Ascending, each once; and both places of skips at once. */
static void test_position_lists(void **state)
{
    (void)state;
    const char *const sets[] = {"captures.a.positions.list=[5, 3, -1, 3, 0]",
                                "captures.a.positions.skip_ids=[0, 7]", "captures.a.skip_first=1"};
    struct job *job = parse_with(LEAST, "", sets, 3);
    const struct positions *p = &job->captures[0].positions;
    static const int64_t expected[] = {-1, 0, 3, 5};
    assert_int_equal(p->kind, POSITIONS_LIST);
    assert_int_equal(p->n_list, COUNT(expected));
    assert_memory_equal(p->list, expected, sizeof expected);
    assert_int_equal(p->n_skip_ids, 2);
    assert_int_equal(p->skip_ids[0], 0);
    assert_int_equal(p->skip_ids[1], 7);
    assert_int_equal(p->skip_first, 1);
    job_free(job);
}

static void test_store_and_run(void **state)
{
    (void)state;
    const char *const sets[] = {"store.chunk_rows=16",   "store.compression=0",     "store.unit_tokens=1000",
                                "run.batch_tokens=2048", "run.threads=3",           "run.grace_seconds=1.5",
                                "run.on_nonfinite=stop", "captures.a.dtype=float16"};
    struct job *job = parse_with(LEAST, "", sets, COUNT(sets));
    assert_int_equal(job->chunk_rows, 16);
    assert_int_equal(job->compression, 0);
    assert_int_equal(job->unit_tokens, 1000);
    assert_int_equal(job->batch_tokens, 2048);
    assert_int_equal(job->n_threads, 3);
    assert_float_equal(job->grace_seconds, 1.5, 0);
    assert_true(job->stop_on_nonfinite);
    assert_int_equal(job->captures[0].dtype, DTYPE_F16);
    job_free(job);
}

static void test_time_limits(void **state)
{
    (void)state;
    static const struct {
        const char *set;
        double seconds;
    } rows[] = {
        {"run.time_limit=90", 90},
        {"run.time_limit=\"90\"", 90},
        {"run.time_limit=0.5", 0.5},
        {"run.time_limit=10:30", 630},
        {"run.time_limit=8:00:00", 28800},
        {"run.time_limit=100:00:01", 360001},
        {"run.time_limit=2-00", 172800},
        {"run.time_limit=2-01:30", 178200},
        {"run.time_limit=2-23:59:59", 259199},
        {"run.time_limit=0", 0},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        struct job *job = parse_set(rows[i].set);
        assert_float_equal(job->time_limit_seconds, rows[i].seconds, 0);
        job_free(job);
    }
}

/* ---- --set ---- */

static void test_sets(void **state)
{
    (void)state;
    const char *const sets[] = {
        "corpus.limit=3",
        "corpus.limit=4", /* the later one wins */
        "corpus.start=2",
        "corpus.start=null",      /* and null takes it away again */
        "run.time_limit=1:00:00", /* a missing object is made; a bare word is a string */
        "store.path=../out",      /* relative to the job file too */
        "model.checkpoint=\"a=b\"",
        "captures.b={\"values\": [\"*\"]}",
        "captures.b.c={\"values\": [\"logits\"]}", /* a dot is in the names of captures only as below */
    };
    struct job *job = parse_with(LEAST, "/jobs", sets, COUNT(sets) - 1);
    assert_int_equal(job->corpus.limit, 4);
    assert_int_equal(job->corpus.start, 0);
    assert_float_equal(job->time_limit_seconds, 3600, 0);
    assert_string_equal(job->store_path, "/jobs/../out");
    assert_string_equal(job->checkpoint, "/jobs/a=b");
    assert_int_equal(job->n_captures, 2);
    const cJSON *store = cJSON_GetObjectItemCaseSensitive(job->tree, "store");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(store, "path")), "../out");
    job_free(job);

    struct error error = {0};
    assert_int_equal(job_parse(LEAST, strlen(LEAST), "job.json", "", sets, COUNT(sets), &job, &error),
                     STATUS_USAGE);
    assert_non_null(strstr(error.text, "captures.b: unknown key \"c\""));
}

static void test_set_of_dotted_capture(void **state)
{
    (void)state;
    static const char text[] =
        "{\"model\": {\"checkpoint\": \"m\"}, " CORPUS
        "\"captures\": {\"a\": {\"values\": [\"*\"]}, \"a.b\": {\"values\": [\"*\"]}}, " STORE "}";
    const char *const sets[] = {"captures.a.b.layers=3"};
    struct job *job = parse_with(text, "", sets, 1);
    assert_true(job->captures[0].layers.all);
    assert_string_equal(job->captures[1].name, "a.b");
    assert_int_equal(job->captures[1].layers.n_ranges, 1);
    job_free(job);
}

static void test_bad_sets(void **state)
{
    (void)state;
    static char deep[80], wide[700];
    for (size_t i = 0; i < 34; i++)
        deep[i] = i % 2 == 0 ? 'a' : '.';
    snprintf(deep + 33, sizeof deep - 33, "=1");
    memset(wide, 'a', sizeof wide - 3);
    snprintf(wide + sizeof wide - 3, 3, "=1");
    static const struct {
        const char *set, *message;
    } rows[] = {
        {"corpus.limit", "expected a.b=VALUE"},
        {"=3", "expected a.b=VALUE"},
        {"", "expected a.b=VALUE"},
        {".limit=3", "a part of the key is empty"},
        {"corpus.=3", "a part of the key is empty"},
        {"corpus..limit=3", "a part of the key is empty"},
        {"corpus.limit.x=3", "corpus.limit is an object, expected a whole number"},
        {"store.path.x=3",
         "--set store.path.x=3: in job.json, \"path\" is a string (\"s\"), expected an object"},
        {"captures.a.values.0=x", "\"values\" is a list, expected an object"},
        {"corpus.limit=[1", "--set corpus.limit=[1: VALUE, line 1"},
        {"corpus.limit=\"3", "--set corpus.limit=\"3: VALUE, line 1"},
        {"corpus.limit={\"a\":1,\"a\":2}", "the key \"a\" occurs twice"},
        {"corpus.limit=3x", "corpus.limit is a string (\"3x\")"},
        {"corpus.limit=", "corpus.limit is a string (\"\")"},
        {"corpus={\"limit\":null}", "corpus.limit is null"},
        {"corpus.context=null", "corpus.context is missing"},
        {"corpus.contxt=3", "unknown key \"contxt\", the nearest known one is \"context\""},
        {"corpus.limit=NaN", "corpus.limit is a number (nan)"},
        {deep, "the key has more than 16 parts"},
        {wide, "with a key of 1 to 511 characters"},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        struct job *job = NULL;
        struct error error = {0};
        enum status status = job_parse(LEAST, strlen(LEAST), "job.json", "", &rows[i].set, 1, &job, &error);
        if (status != STATUS_USAGE || strstr(error.text, rows[i].message) == NULL)
            fail_msg("--set %s: status %d, %s; expected %s", rows[i].set, status, error.text,
                     rows[i].message);
        assert_int_equal(memory_in_use(), 0);
    }
}

/* ---- files and memory ---- */

static void test_paths_follow_the_file(void **state)
{
    (void)state;
    char folder[] = "/tmp/test_job_XXXXXX", path[64], expected[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/job.json", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(LEAST, file);
    fclose(file);
    struct job *job = NULL;
    assert_int_equal(job_read(path, NULL, 0, &job, NULL), STATUS_OK);
    snprintf(expected, sizeof expected, "%s/m", folder);
    assert_string_equal(job->checkpoint, expected);
    job_free(job);

    assert_int_equal(chdir(folder), 0);
    assert_int_equal(job_read("job.json", NULL, 0, &job, NULL), STATUS_OK);
    assert_string_equal(job->checkpoint, "m");
    job_free(job);
    unlink(path);
    assert_int_equal(chdir("/"), 0);
    rmdir(folder);
}

static void test_files_that_cannot_be_read(void **state)
{
    (void)state;
    struct job *job = NULL;
    struct error error = {0};
    assert_int_equal(job_read("/nonexistent/job.json", NULL, 0, &job, &error), STATUS_USAGE);
    assert_non_null(strstr(error.text, "/nonexistent/job.json"));
    error_clear(&error);
    assert_int_equal(job_read("/tmp", NULL, 0, &job, &error), STATUS_USAGE);
    assert_non_null(strstr(error.text, "/tmp is a folder"));
}

/* Each allocation fails once: STATUS_RESOURCE, nothing kept. */
static void test_out_of_memory(void **state)
{
    (void)state;
    const char *const sets[] = {"captures.a.layers=[\"moe,0-3\", 4]",
                                "captures.a.positions={\"list\": [1, 2]}", "captures.a.skip_ids=[4]",
                                "corpus.prepend=[1]"};
    enum status status = STATUS_RESOURCE;
    int n = 0;
    for (; status != STATUS_OK && n < 200; n++) {
        struct job *job = NULL;
        struct error error = {0};
        memory_fail_at(n);
        status = job_parse(LEAST, strlen(LEAST), "job.json", "/jobs", sets, COUNT(sets), &job, &error);
        memory_fail_at(-1);
        assert_true(status == STATUS_OK || (status == STATUS_RESOURCE && error.status == status));
        job_free(job);
        assert_int_equal(memory_in_use(), 0);
    }
    assert_true(status == STATUS_OK && n > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good_files),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_model_and_corpus),
        cmocka_unit_test(test_raw_width),
        cmocka_unit_test(test_layers),
        cmocka_unit_test(test_positions),
        cmocka_unit_test(test_position_lists),
        cmocka_unit_test(test_store_and_run),
        cmocka_unit_test(test_time_limits),
        cmocka_unit_test(test_sets),
        cmocka_unit_test(test_set_of_dotted_capture),
        cmocka_unit_test(test_bad_sets),
        cmocka_unit_test(test_paths_follow_the_file),
        cmocka_unit_test(test_files_that_cannot_be_read),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
