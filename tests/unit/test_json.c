/* engine/json.h: what is accepted, what is refused and where, numbers, keys, files. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "engine/json.h"
#include "kernels/base/memory.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static cJSON *parse(const char *text)
{
    cJSON *tree = NULL;
    struct error error = {0};
    if (json_parse(text, strlen(text), "x.json", STATUS_INPUT, &tree, &error) != STATUS_OK)
        fail_msg("%s: %s", text, error.text);
    return tree;
}

/* Texts that are accepted, and how cJSON prints what it got. */
static void test_accepts(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"null", "null"},
        {" \t\r\n true \n", "true"},
        {"\xef\xbb\xbf{}", "{}"},
        {"[]", "[]"},
        {"[ ]", "[]"},
        {"{ }", "{}"},
        {"-0.5e+2", "-50"},
        {"[0,-0,10,1E2,1.25]", "[0,-0,10,100,1.25]"},
        {"{\"a\":{\"a\":[{\"a\":1},{\"a\":2}]}}", "{\"a\":{\"a\":[{\"a\":1},{\"a\":2}]}}"},
        {"{\"a\":1,\"A\":2,\"\":3}", "{\"a\":1,\"A\":2,\"\":3}"},
        {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\\"\\\\/\\b\\f\\n\\r\\t\""},
        {"\"\\u00e9\\ud83d\\ude00\"", "\"\xc3\xa9\xf0\x9f\x98\x80\""},
        {"\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"", "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\""},
        {"NaN", "{\"__float__\":\"NaN\"}"},
        {"[0.0, Infinity]", "[0,{\"__float__\":\"Infinity\"}]"},
        {"{\"a\":-Infinity ,\"b\":[NaN]}",
         "{\"a\":{\"__float__\":\"-Infinity\"},\"b\":[{\"__float__\":\"NaN\"}]}"},
        {"\"Infinity NaN\"", "\"Infinity NaN\""},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        cJSON *tree = parse(rows[i][0]);
        char *printed = cJSON_PrintUnformatted(tree);
        assert_string_equal(printed, rows[i][1]);
        cJSON_free(printed);
        cJSON_Delete(tree);
    }
}

/* Texts that are refused: the place and the complaint. */
struct refusal {
    const char *text;
    size_t length; /* 0: strlen */
    const char *message;
};

static const struct refusal refusals[] = {
    {"", 0, "x.json is empty, expected JSON"},
    {" \n\t", 0, "x.json is empty"},
    {"\xef\xbb\xbf", 0, "x.json is empty"},
    {"{", 0, "line 1, column 2: expected a key in double quotes, found the end"},
    {"[", 0, "line 1, column 2: expected a value, found the end"},
    {"[1,2", 0, "line 1, column 5: expected ',' or ']', found the end"},
    {"[1,]", 0, "line 1, column 4: expected a value, found ']'"},
    {"[1 2]", 0, "line 1, column 4: expected ',' or ']', found '2]'"},
    {"[1}", 0, "line 1, column 3: expected ',' or ']', found '}'"},
    {"{\"a\":1]", 0, "line 1, column 7: expected ',' or '}', found ']'"},
    {"{\"a\":1,}", 0, "line 1, column 8: expected a key in double quotes, found '}'"},
    {"{\"a\" 1}", 0, "line 1, column 6: expected ':' after the key, found '1}'"},
    {"{\"a\":}", 0, "line 1, column 6: expected a value, found '}'"},
    {"{a:1}", 0, "line 1, column 2: expected a key in double quotes, found 'a:1}'"},
    {"{'a':1}", 0, "line 1, column 2: expected a key in double quotes"},
    {"{1:2}", 0, "line 1, column 2: expected a key in double quotes"},
    {"{}x", 0, "line 1, column 3: expected nothing after the end of the JSON value, found 'x'"},
    {"{}\n\n {}", 0, "line 3, column 2: expected nothing after the end"},
    {"{}\0", 3, "line 1, column 3: expected nothing after the end"},
    {"\0{}", 3, "line 1, column 1: expected a value, found '?{}'"},
    {"nul", 0, "line 1, column 1: expected a value, found 'nul'"},
    {"True", 0, "expected a value, found 'True'"},
    {"// c\n1", 0, "expected a value, found '// c'"},
    {"01", 0, "line 1, column 2: expected nothing after"},
    {"+1", 0, "expected a value, found '+1'"},
    {".5", 0, "expected a value, found '.5'"},
    {"-", 0, "line 1, column 2: expected a digit, found the end"},
    {"-Inf", 0, "line 1, column 2: expected a digit, found 'Inf'"},
    {"[1.]", 0, "line 1, column 4: expected a digit, found ']'"},
    {"[1e]", 0, "line 1, column 4: expected a digit"},
    {"[1e+]", 0, "line 1, column 5: expected a digit"},
    {"0x10", 0, "line 1, column 2: expected nothing after"},
    {"[1,\n \"a\nb\"]", 0, "line 2, column 4: a control character or line end in a string"},
    {"\"a\0b\"", 5, "line 1, column 3: a NUL byte in a string"},
    {"[\"abc]", 0, "line 1, column 2: this string has no closing quote"},
    {"\"\\x\"", 0, "line 1, column 2: expected an escape such as \\n or \\u00e9, found '\\x\"'"},
    {"\"\\", 0, "expected an escape"},
    {"\"\\u12g4\"", 0, "expected four hexadecimal digits"},
    {"\"\\u12", 0, "expected four hexadecimal digits"},
    {"\"\\u0000\"", 0, "line 1, column 2: the character \\u0000"},
    {"\"\\ud800\"", 0, "expected a pair of surrogates"},
    {"\"\\ud800\\u0041\"", 0, "expected a pair of surrogates"},
    {"\"\\ud83d\\u", 0, "expected a pair of surrogates"},
    {"\"\\udc00\\ud800\"", 0, "expected a pair of surrogates"},
    {"\"\xff\"", 0, "line 1, column 2: a string's bytes are not UTF-8"},
    {"\"\xc3\"", 0, "not UTF-8"},
    {"\"\xc0\xaf\"", 0, "not UTF-8"},
    {"\"\xe0\x80\x80\"", 0, "not UTF-8"},
    {"\"\xed\xa0\x80\"", 0, "not UTF-8"},
    {"\"\xf0\x80\x80\x80\"", 0, "not UTF-8"},
    {"\"\xf4\x90\x80\x80\"", 0, "not UTF-8"},
    {"\"\xf5\x80\x80\x80\"", 0, "not UTF-8"},
    {"\"\xe2\x82", 0, "not UTF-8"},
    {"1000000000000000000000000000000000000000000000000000000000000000", 0,
     "a number of more than 63 characters"},
    {"{\"a\":1,\"b\":{\"a\":2},\"a\":3}", 0, "line 1, column 20: the key \"a\" occurs twice"},
    {"{\"a\":1,\n\"\\u0061\":3}", 0, "line 2, column 1: the key \"a\" occurs twice"},
    {"[{\"c\":NaN,\"b\":1,\"b\":NaN,\"c\":2}]", 0, "line 1, column 17: the key \"b\" occurs twice"},
    {"{\"__float__\":NaN,\"__float__\":NaN}", 0, "line 1, column 18: the key \"__float__\" occurs twice"},
    /* Columns count characters, and the byte order mark is none. */
    {"\xef\xbb\xbf[\"\xc3\xa9\", x]", 0, "line 1, column 7: expected a value, found 'x]'"},
    /* The copy with its replacements does not move the places. */
    {"[NaN,Infinity,\n-Infinity,x]", 0, "line 2, column 11: expected a value, found 'x]'"},
};

static void test_refuses(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(refusals); i++) {
        const struct refusal *r = &refusals[i];
        size_t length = r->length > 0 ? r->length : strlen(r->text);
        /* On the heap and without a NUL, so that a sanitizer sees a byte too many. */
        char *text = malloc(length + (length == 0));
        memcpy(text, r->text, length);
        cJSON *tree = NULL;
        struct error error = {0};
        assert_int_equal(json_parse(text, length, "x.json", STATUS_USAGE, &tree, &error), STATUS_USAGE);
        assert_null(tree);
        if (strstr(error.text, r->message) == NULL)
            fail_msg("row %zu: \"%s\" does not say \"%s\"", i, error.text, r->message);
        free(text);
    }
}

static void test_depth(void **state)
{
    (void)state;
    enum { DEEPEST = CJSON_NESTING_LIMIT - 1 };
    char text[2 * (DEEPEST + 1) + 9];
    for (int extra = 0; extra < 2; extra++) {
        int depth = DEEPEST + extra;
        memset(text, '[', (size_t)depth);
        memcpy(text + depth, "Infinity", 8);
        memset(text + depth + 8, ']', (size_t)depth);
        cJSON *tree = NULL;
        struct error error = {0};
        enum status status = json_parse(text, (size_t)(2 * depth + 8), "x.json", STATUS_INPUT, &tree, &error);
        assert_int_equal(status, extra == 0 ? STATUS_OK : STATUS_INPUT);
        if (extra == 1)
            assert_non_null(
                strstr(error.text, "line 1, column 1000: objects and lists are nested too deeply"));
        cJSON_Delete(tree);
    }
}

/* 50,000 keys in an order that a naive check would take 10^9 steps for; the last one repeats the first. */
static void test_many_keys(void **state)
{
    (void)state;
    enum { N = 50000 };
    size_t size = N * 24, used = 0;
    char *text = malloc(size);
    text[used++] = '{';
    for (int i = 0; i < N; i++)
        used += (size_t)snprintf(text + used, size - used, "\"model.%d\":\"f\",\n", i * 7919 % N);
    size_t unique = used - 2;
    used += (size_t)snprintf(text + used, size - used, "\"model.0\":1}");
    clock_t start = clock();
    cJSON *tree = NULL;
    struct error error = {0};
    assert_int_equal(json_parse(text, used, "x.json", STATUS_INPUT, &tree, &error), STATUS_INPUT);
    assert_string_equal(error.text, "x.json, line 50001, column 1: the key \"model.0\" occurs twice");
    text[unique] = '}';
    assert_int_equal(json_parse(text, unique + 1, "x.json", STATUS_INPUT, &tree, NULL), STATUS_OK);
    assert_int_equal(cJSON_GetArraySize(tree), N);
    assert_true((double)(clock() - start) / CLOCKS_PER_SEC < 5);
    cJSON_Delete(tree);
    free(text);
}

static void test_numbers(void **state)
{
    (void)state;
    cJSON *tree =
        parse("[1, -2.5, 9007199254740992, 9007199254740994, 1e999, NaN, {\"__float__\": \"-Infinity\"},"
              " {\"__float__\": \"1\"}, {\"__float__\": 1}, {\"__float__\": \"NaN\", \"x\": 1}, \"1\", true, "
              "null, {}, []]");
    static const double numbers[] = {1, -2.5, 9007199254740992, 9007199254740994, INFINITY, NAN, -INFINITY};
    int64_t whole;
    double number;
    for (int i = 0; i < cJSON_GetArraySize(tree); i++) {
        const cJSON *item = cJSON_GetArrayItem(tree, i);
        bool is_number = i < (int)COUNT(numbers);
        assert_int_equal(json_get_number(item, &number), is_number);
        if (is_number)
            assert_true(isnan(numbers[i]) ? isnan(number) : number == numbers[i]);
        assert_int_equal(json_get_integer(item, &whole), i == 0 || i == 2);
    }
    assert_true(json_get_integer(cJSON_GetArrayItem(tree, 2), &whole) && whole == INT64_C(9007199254740992));
    assert_false(json_get_number(NULL, &number));
    assert_false(json_get_integer(NULL, &whole));
    cJSON_Delete(tree);
}

static const char object_text[] = "{\"int\": 7, \"big\": 1e15, \"half\": 0.5, \"inf\": Infinity, \"nan\": "
                                  "NaN, \"yes\": true, \"text\": \"a\\nb\","
                                  " \"none\": null, \"list\": [1], \"object\": {}}";

enum getter { GET_INT, GET_DOUBLE, GET_BOOL, GET_STRING };

static enum status get(enum getter getter, const struct json_object *o, const char *key, bool required,
                       struct error *error)
{
    int64_t whole = -1;
    double number = -1;
    bool flag = false;
    const char *text = NULL;
    switch (getter) {
    case GET_INT:
        return json_get_int(o, key, required, 1, 10, &whole, error);
    case GET_DOUBLE:
        return json_get_double(o, key, required, 0, 1, &number, error);
    case GET_BOOL:
        return json_get_bool(o, key, required, &flag, error);
    case GET_STRING:
        return json_get_string(o, key, required, &text, error);
    }
    return STATUS_BUG;
}

struct wrong {
    enum getter getter;
    const char *key;
    const char *message;
};

static const struct wrong wrongs[] = {
    {GET_INT, "big",
     "j.json: model.big is a number (1000000000000000), expected a whole number from 1 to 10"},
    {GET_INT, "half", "model.half is a number (0.5), expected a whole number"},
    {GET_INT, "inf", "model.inf is a number (inf), expected a whole number"},
    {GET_INT, "nan", "model.nan is a number (nan), expected"},
    {GET_INT, "text", "model.text is a string (\"a?b\"), expected a whole number"},
    {GET_INT, "yes", "model.yes is true, expected a whole number"},
    {GET_INT, "gone", "model.gone is missing, expected a whole number from 1 to 10"},
    {GET_INT, "none", "model.none is null, expected a whole number"},
    {GET_DOUBLE, "int", "model.int is a number (7), expected a number from 0 to 1"},
    {GET_DOUBLE, "nan", "model.nan is a number (nan), expected a number from 0 to 1"},
    {GET_DOUBLE, "list", "model.list is a list, expected a number"},
    {GET_DOUBLE, "gone", "model.gone is missing, expected a number from 0 to 1"},
    {GET_BOOL, "int", "model.int is a number (7), expected true or false"},
    {GET_BOOL, "object", "model.object is an object, expected true or false"},
    {GET_BOOL, "none", "model.none is null, expected true or false"},
    {GET_STRING, "yes", "model.yes is true, expected a string"},
    {GET_STRING, "gone", "model.gone is missing, expected a string"},
};

static void test_wrong_values(void **state)
{
    (void)state;
    cJSON *tree = parse(object_text);
    struct json_object o = {tree, "j.json", "model", STATUS_USAGE};
    for (size_t i = 0; i < COUNT(wrongs); i++) {
        struct error error = {0};
        assert_int_equal(get(wrongs[i].getter, &o, wrongs[i].key, true, &error), STATUS_USAGE);
        if (strstr(error.text, wrongs[i].message) == NULL)
            fail_msg("row %zu: \"%s\" does not say \"%s\"", i, error.text, wrongs[i].message);
    }
    cJSON_Delete(tree);
}

static void test_right_values(void **state)
{
    (void)state;
    cJSON *tree = parse(object_text);
    struct json_object o = {tree, "j.json", "", STATUS_INPUT};
    int64_t whole = 3;
    double number = 3;
    bool flag = false;
    const char *text = "default";
    assert_int_equal(json_get_int(&o, "int", true, 7, 7, &whole, NULL), STATUS_OK);
    assert_int_equal(whole, 7);
    assert_int_equal(json_get_int(&o, "gone", false, 0, 1, &whole, NULL), STATUS_OK);
    assert_int_equal(json_get_int(&o, "none", false, 0, 1, &whole, NULL), STATUS_OK);
    assert_int_equal(whole, 7);
    assert_int_equal(json_get_double(&o, "inf", true, -INFINITY, INFINITY, &number, NULL), STATUS_OK);
    assert_true(isinf(number) && number > 0);
    assert_int_equal(json_get_double(&o, "half", true, 0.5, 0.5, &number, NULL), STATUS_OK);
    assert_true(number == 0.5);
    assert_int_equal(json_get_bool(&o, "yes", true, &flag, NULL), STATUS_OK);
    assert_true(flag);
    assert_int_equal(json_get_string(&o, "none", false, &text, NULL), STATUS_OK);
    assert_string_equal(text, "default");
    assert_int_equal(json_get_string(&o, "text", true, &text, NULL), STATUS_OK);
    assert_string_equal(text, "a\nb");
    struct error error = {0};
    assert_int_equal(json_get_int(&o, "INT", true, 0, 9, &whole, &error), STATUS_INPUT);
    assert_string_equal(error.text, "j.json: INT is missing, expected a whole number from 0 to 9");
    error_clear(&error);
    assert_int_equal(json_get_int(&o, "half", true, 1, INT64_MAX, &whole, &error), STATUS_INPUT);
    assert_string_equal(error.text, "j.json: half is a number (0.5), expected a whole number of at least 1");
    cJSON_Delete(tree);
}

static void test_keys(void **state)
{
    (void)state;
    static const char *const known[] = {"checkpoint", "dtype", "device", NULL}, *const nothing[] = {NULL};
    cJSON *tree = parse("{\"dtype\": 1, \"chekpiont\": 2, \"x\": 3}"), *good = parse("{\"device\": 1}");
    struct json_object o = {tree, "j.json", "model", STATUS_USAGE},
                       right = {good, "j.json", "", STATUS_USAGE};
    struct error error = {0};
    assert_int_equal(json_check_keys(&o, known, &error), STATUS_USAGE);
    assert_string_equal(error.text,
                        "j.json: model: unknown key \"chekpiont\", the nearest known one is \"checkpoint\"");
    assert_int_equal(json_check_keys(&right, known, NULL), STATUS_OK);
    error_clear(&error);
    assert_int_equal(json_check_keys(&right, nothing, &error), STATUS_USAGE);
    assert_string_equal(error.text, "j.json: unknown key \"device\"");
    /* Names on the way to a key are the user's: whatever they hold, the message is one line. */
    struct json_object odd = {good, "j.json", "captures.a\nb", STATUS_USAGE};
    int64_t number = 0;
    error_clear(&error);
    assert_int_equal(json_get_int(&odd, "layers", true, 0, 1, &number, &error), STATUS_USAGE);
    assert_string_equal(error.text,
                        "j.json: captures.a?b.layers is missing, expected a whole number from 0 to 1");
    error_clear(&error);
    assert_int_equal(json_check_keys(&odd, nothing, &error), STATUS_USAGE);
    assert_string_equal(error.text, "j.json: captures.a?b: unknown key \"device\"");
    cJSON_Delete(tree);
    cJSON_Delete(good);
}

static void test_nearest(void **state)
{
    (void)state;
    static const char *const names[] = {"", "kitten", "sitting", "self_attn/scores", NULL}, *const nothing[] =
                                                                                                {NULL};
    assert_string_equal(json_nearest("sittin", names), "sitting"); /* 1 against 2 from kitten */
    assert_string_equal(json_nearest("kiten", names), "kitten");
    assert_string_equal(json_nearest("attn/score", names), "self_attn/scores"); /* 6, against 8 and more */
    assert_string_equal(json_nearest("", names), "");
    assert_null(json_nearest("x", nothing));
    char longest[1000];
    memset(longest, 'k', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    assert_non_null(json_nearest(longest, names));
}

static void test_quote(void **state)
{
    (void)state;
    char buffer[12];
    assert_string_equal(json_quote("a\n\x7f", buffer, sizeof buffer), "\"a??\"");
    assert_string_equal(json_quote("abcdef", buffer, sizeof buffer), "\"abcdef\"");
    assert_string_equal(json_quote("abcdefg", buffer, sizeof buffer), "\"abcdef...\"");
    /* Never half a character. */
    assert_string_equal(json_quote("abcde\xe2\x82\xac", buffer, sizeof buffer), "\"abcde...\"");
}

static void write_file(const char *path, const void *bytes, size_t n)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

static void expect_file_error(const char *path, const char *message)
{
    cJSON *tree = NULL;
    struct error error = {0};
    assert_int_equal(json_read_file(path, STATUS_INPUT, &tree, &error), STATUS_INPUT);
    if (strstr(error.text, message) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", error.text, message);
}

static void test_files(void **state)
{
    (void)state;
    char folder[] = "/tmp/test_json.XXXXXX", path[64], fifo[64], missing[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/a.json", folder);
    snprintf(fifo, sizeof fifo, "%s/fifo", folder);
    snprintf(missing, sizeof missing, "%s/missing", folder);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    write_file(path, "{\"a\": [1,\n x]}", 14);
    expect_file_error(path, "a.json, line 2, column 2: expected a value, found 'x]}'");
    expect_file_error(folder, "is a folder, expected a file");
    expect_file_error(fifo, "is not a regular file, expected a file");
    expect_file_error(missing, "No such file or directory");
    write_file(path, "[1, 2]", 6);
    cJSON *tree = NULL;
    assert_int_equal(json_read_file(path, STATUS_INPUT, &tree, NULL), STATUS_OK);
    assert_int_equal(cJSON_GetArraySize(tree), 2);
    cJSON_Delete(tree);
    char *text = NULL;
    size_t length = 0;
    struct error error = {0};
    assert_int_equal(json_read_text(path, 5, STATUS_USAGE, &text, &length, &error), STATUS_USAGE);
    assert_non_null(strstr(error.text, "a.json has 6 bytes, expected 5 at most"));
    assert_null(text);
    assert_int_equal(json_read_text(path, 6, STATUS_USAGE, &text, &length, NULL), STATUS_OK);
    assert_int_equal(length, 6);
    assert_string_equal(text, "[1, 2]");
    memory_free(text);
    unlink(path);
    unlink(fifo);
    rmdir(folder);
}

/* The n-th allocation fails, for every n: a clean STATUS_RESOURCE and nothing left allocated. */
static void test_out_of_memory(void **state)
{
    (void)state;
    static const char text[] = "{\"a\": [1, Infinity], \"b\": {\"c\": NaN}}";
    size_t before = memory_in_use();
    for (int n = 0;; n++) {
        cJSON *tree = NULL;
        struct error error = {0};
        memory_fail_at(n);
        enum status status = json_parse(text, sizeof text - 1, "x.json", STATUS_INPUT, &tree, &error);
        memory_fail_at(-1);
        assert_int_equal(memory_in_use(), before);
        if (status == STATUS_OK) {
            assert_true(n >= 3);
            cJSON_Delete(tree);
            return;
        }
        assert_int_equal(status, STATUS_RESOURCE);
        assert_int_equal(error.status, STATUS_RESOURCE);
        assert_null(tree);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepts),      cmocka_unit_test(test_refuses),
        cmocka_unit_test(test_depth),        cmocka_unit_test(test_many_keys),
        cmocka_unit_test(test_numbers),      cmocka_unit_test(test_wrong_values),
        cmocka_unit_test(test_right_values), cmocka_unit_test(test_keys),
        cmocka_unit_test(test_nearest),      cmocka_unit_test(test_quote),
        cmocka_unit_test(test_files),        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
