#include "engine/json.h"

#include "kernels/base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_DEPTH (CJSON_NESTING_LIMIT - 1) /* one less, for the object that a bare Infinity becomes */
#define MAX_NUMBER 63                       /* characters that cJSON reads of a number */
#define MAX_EXACT 9007199254740992.0        /* 2^53 */
#define FLOAT_KEY "__float__"

/* One walk over the text. It checks the whole grammar, because cJSON is laxer than JSON and does not say
 * where it stopped, and it writes the copy that cJSON parses, in which a bare Infinity is
 * {"__float__":"Infinity"}. It runs twice: first with `copy` NULL to check and count, then to fill. */
struct scanner {
    const char *source;
    enum status status;
    struct error *error;
    const unsigned char *text;
    size_t length, at;
    int depth;
    char closers[MAX_DEPTH]; /* of the objects and lists that are open */
    size_t n_values, n_keys, n_copied;
    char *copy;         /* NULL while counting */
    size_t *key_places; /* [n_keys] where in the text each key of the copy stands, in the copy's order */
    size_t copied_to;   /* the text before it is in the copy */
};

/* ---- places and messages ---- */

struct place {
    size_t line, column; /* from 1; columns count characters */
};

static struct place find_place(const struct scanner *s, size_t at)
{
    struct place place = {1, 1};
    size_t first = s->length >= 3 && memcmp(s->text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    for (size_t i = first; i < at; i++) {
        if (s->text[i] == '\n')
            place = (struct place){place.line + 1, 1};
        else if ((s->text[i] & 0xc0) != 0x80)
            place.column++;
    }
    return place;
}

/* Up to 24 characters of the text, for "found ...". */
static const char *describe_near(const struct scanner *s, char *buffer, size_t size)
{
    if (s->at >= s->length) {
        snprintf(buffer, size, "the end");
        return buffer;
    }
    char near[25];
    size_t n = 0;
    for (; n < sizeof near - 1 && s->at + n < s->length && s->text[s->at + n] != '\n'; n++) {
        unsigned char c = s->text[s->at + n];
        near[n] = c < 0x20 || c >= 0x7f ? '?' : (char)c;
    }
    near[n] = '\0';
    snprintf(buffer, size, n == 0 ? "the end of the line" : "'%s'", near);
    return buffer;
}

static enum status fail_expected(const struct scanner *s, const char *expected)
{
    char near[40];
    struct place place = find_place(s, s->at);
    return error_set(s->error, s->status, "%s, line %zu, column %zu: expected %s, found %s", s->source,
                     place.line, place.column, expected, describe_near(s, near, sizeof near));
}

static enum status fail_at(const struct scanner *s, size_t at, const char *what)
{
    struct place place = find_place(s, at);
    return error_set(s->error, s->status, "%s, line %zu, column %zu: %s", s->source, place.line, place.column,
                     what);
}

static void replace_controls(char *text)
{
    for (; *text != '\0'; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f)
            *text = '?';
}

const char *json_quote(const char *text, char *buffer, size_t size)
{
    size_t length = strlen(text), room = size - 6; /* two quotes, three dots, NUL */
    bool cut = length > room;
    if (cut)
        for (length = room; length > 0 && ((unsigned char)text[length] & 0xc0) == 0x80;)
            length--;
    snprintf(buffer, size, cut ? "\"%.*s...\"" : "\"%.*s\"", (int)length, text);
    replace_controls(buffer);
    return buffer;
}

/* ---- the grammar ---- */

static int peek(const struct scanner *s)
{
    return s->at < s->length ? s->text[s->at] : -1;
}

static void skip_space(struct scanner *s)
{
    while (s->at < s->length && memchr(" \t\r\n", s->text[s->at], 4) != NULL)
        s->at++;
}

static bool is_digit(int c)
{
    return c >= '0' && c <= '9';
}

static void skip_digits(struct scanner *s)
{
    while (is_digit(peek(s)))
        s->at++;
}

/* Four hexadecimal digits after \u; -1 where they are not. */
static int32_t read_hex(const struct scanner *s, size_t at)
{
    int32_t value = 0;
    for (size_t i = at; i < at + 4; i++) {
        int c = i < s->length ? s->text[i] : -1;
        int digit = is_digit(c)            ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* At the backslash. \u0000 is refused since C strings end there: two keys could look like one. */
static enum status scan_escape(struct scanner *s)
{
    int kind = s->at + 1 < s->length ? s->text[s->at + 1] : -1;
    if (kind != 'u') {
        if (kind <= 0 || strchr("\"\\/bfnrt", kind) == NULL)
            return fail_expected(s, "an escape such as \\n or \\u00e9");
        s->at += 2;
        return STATUS_OK;
    }
    int32_t unit = read_hex(s, s->at + 2);
    if (unit < 0)
        return fail_expected(s, "four hexadecimal digits after \\u");
    if (unit == 0)
        return fail_at(s, s->at, "the character \\u0000 is not supported in a string");
    if (unit < 0xd800 || unit > 0xdfff) {
        s->at += 6;
        return STATUS_OK;
    }
    bool is_pair =
        unit < 0xdc00 && s->at + 8 <= s->length && s->text[s->at + 6] == '\\' && s->text[s->at + 7] == 'u';
    int32_t low = is_pair ? read_hex(s, s->at + 8) : -1;
    if (low < 0xdc00 || low > 0xdfff)
        return fail_expected(s, "a pair of surrogates \\ud800-\\udbff \\udc00-\\udfff");
    s->at += 12;
    return STATUS_OK;
}

/* Bytes of the UTF-8 character at `at`, 0 where it is none (RFC 3629: no overlong forms, no surrogates). */
static size_t utf8_length(const struct scanner *s, size_t at)
{
    unsigned char lead = s->text[at];
    size_t n = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    if (n > s->length - at)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((s->text[at + i] & 0xc0) != 0x80)
            return 0;
    unsigned char next = n > 1 ? s->text[at + 1] : 0;
    bool is_bad = (lead == 0xe0 && next < 0xa0) || (lead == 0xed && next > 0x9f) ||
                  (lead == 0xf0 && next < 0x90) || (lead == 0xf4 && next > 0x8f);
    return is_bad ? 0 : n;
}

/* At the opening quote. */
static enum status scan_string(struct scanner *s)
{
    size_t start = s->at++;
    for (int c = peek(s); c != '"'; c = peek(s)) {
        if (c == -1)
            return fail_at(s, start, "this string has no closing quote");
        if (c < 0x20)
            return fail_at(s, s->at,
                           c == 0 ? "a NUL byte in a string" : "a control character or line end in a string");
        if (c == '\\') {
            TRY(scan_escape(s));
            continue;
        }
        size_t n = utf8_length(s, s->at);
        if (n == 0)
            return fail_at(s, s->at, "a string's bytes are not UTF-8");
        s->at += n;
    }
    s->at++;
    return STATUS_OK;
}

static enum status scan_number(struct scanner *s)
{
    size_t start = s->at;
    if (peek(s) == '-')
        s->at++;
    if (!is_digit(peek(s)))
        return fail_expected(s, "a digit");
    if (peek(s) == '0')
        s->at++;
    else
        skip_digits(s);
    if (peek(s) == '.') {
        s->at++;
        if (!is_digit(peek(s)))
            return fail_expected(s, "a digit");
        skip_digits(s);
    }
    if (peek(s) == 'e' || peek(s) == 'E') {
        s->at++;
        if (peek(s) == '+' || peek(s) == '-')
            s->at++;
        if (!is_digit(peek(s)))
            return fail_expected(s, "a digit");
        skip_digits(s);
    }
    if (s->at - start > MAX_NUMBER)
        return fail_at(s, start, "a number of more than 63 characters");
    return STATUS_OK;
}

static bool skip_word(struct scanner *s, const char *word)
{
    size_t n = strlen(word);
    if (s->length - s->at < n || memcmp(s->text + s->at, word, n) != 0)
        return false;
    s->at += n;
    return true;
}

/* Brings the copy up to `to`. */
static void copy_until(struct scanner *s, size_t to)
{
    if (s->copy != NULL)
        memcpy(s->copy + s->n_copied, s->text + s->copied_to, to - s->copied_to);
    s->n_copied += to - s->copied_to;
    s->copied_to = to;
}

static void copy_replacement(struct scanner *s, const char *text)
{
    size_t n = strlen(text);
    if (s->copy != NULL)
        memcpy(s->copy + s->n_copied, text, n);
    s->n_copied += n;
    s->copied_to = s->at;
}

static void record_key(struct scanner *s, size_t at)
{
    if (s->key_places != NULL)
        s->key_places[s->n_keys] = at;
    s->n_keys++;
}

/* True where a bare word that stands for a number was at hand: it is replaced in the copy. */
static bool scan_special_number(struct scanner *s)
{
    static const char *const words[] = {"NaN", "Infinity", "-Infinity"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        size_t start = s->at;
        if (!skip_word(s, words[i]))
            continue;
        char object[40];
        snprintf(object, sizeof object, "{\"" FLOAT_KEY "\":\"%s\"}", words[i]);
        copy_until(s, start);
        copy_replacement(s, object);
        record_key(s, start);
        return true;
    }
    return false;
}

static enum status scan_scalar(struct scanner *s)
{
    int c = peek(s);
    if (c == '"')
        return scan_string(s);
    if (scan_special_number(s) || skip_word(s, "true") || skip_word(s, "false") || skip_word(s, "null"))
        return STATUS_OK;
    if (c == '-' || is_digit(c))
        return scan_number(s);
    return fail_expected(s, "a value");
}

/* A key and its colon. */
static enum status scan_key(struct scanner *s)
{
    skip_space(s);
    if (peek(s) != '"')
        return fail_expected(s, "a key in double quotes");
    record_key(s, s->at);
    TRY(scan_string(s));
    skip_space(s);
    if (peek(s) != ':')
        return fail_expected(s, "':' after the key");
    s->at++;
    return STATUS_OK;
}

static char innermost(const struct scanner *s)
{
    return s->depth == 0 ? '\0' : s->closers[s->depth - 1];
}

/* A scalar, or the opening of an object or list up to where its first value begins. *is_whole where nothing
 * more of the value follows. */
static enum status scan_value_start(struct scanner *s, bool *is_whole)
{
    skip_space(s);
    if (++s->n_values > JSON_MAX_VALUES)
        return fail_at(s, s->at, "more than 16,000,000 values in one file");
    int c = peek(s);
    *is_whole = c != '{' && c != '[';
    if (*is_whole)
        return scan_scalar(s);
    if (s->depth == MAX_DEPTH)
        return fail_at(s, s->at, "objects and lists are nested too deeply");
    s->closers[s->depth++] = c == '{' ? '}' : ']';
    s->at++;
    skip_space(s);
    *is_whole = peek(s) == innermost(s);
    if (!*is_whole)
        return c == '{' ? scan_key(s) : STATUS_OK;
    s->at++;
    s->depth--;
    return STATUS_OK;
}

/* After a value: closes what ends here, up to where the next value begins. *is_end after the outermost. */
static enum status scan_value_end(struct scanner *s, bool *is_end)
{
    while (s->depth > 0) {
        skip_space(s);
        char closer = innermost(s);
        if (peek(s) == ',') {
            s->at++;
            *is_end = false;
            return closer == '}' ? scan_key(s) : STATUS_OK;
        }
        if (peek(s) != closer)
            return fail_expected(s, closer == '}' ? "',' or '}'" : "',' or ']'");
        s->at++;
        s->depth--;
    }
    *is_end = true;
    return STATUS_OK;
}

static enum status scan_text(struct scanner *s)
{
    skip_word(s, "\xef\xbb\xbf");
    s->copied_to = s->at;
    skip_space(s);
    if (s->at == s->length)
        return error_set(s->error, s->status, "%s is empty, expected JSON", s->source);
    for (bool is_end = false; !is_end;) {
        bool is_whole;
        TRY(scan_value_start(s, &is_whole));
        if (is_whole)
            TRY(scan_value_end(s, &is_end));
    }
    copy_until(s, s->at);
    skip_space(s);
    return s->at == s->length ? STATUS_OK : fail_expected(s, "nothing after the end of the JSON value");
}

/* ---- duplicate keys ---- */

struct key {
    const char *name; /* decoded, in the tree */
    size_t object;    /* number of the object that it is in */
    size_t place;     /* in the text */
};

struct key_list {
    struct key *keys;
    size_t n_keys, n_objects;
    const size_t *places;
};

/* Depth-first, which is the order of the text; so the k-th key met here is the k-th that the scanner met.
 * Recursion is bounded by MAX_DEPTH. */
static void list_keys(struct key_list *list, const cJSON *parent)
{
    size_t object = list->n_objects++;
    const cJSON *child;
    cJSON_ArrayForEach(child, parent)
    {
        if (cJSON_IsObject(parent)) {
            list->keys[list->n_keys] = (struct key){child->string, object, list->places[list->n_keys]};
            list->n_keys++;
        }
        if (child->child != NULL)
            list_keys(list, child);
    }
}

static int compare_keys(const void *left, const void *right)
{
    const struct key *a = left, *b = right;
    if (a->object != b->object)
        return a->object < b->object ? -1 : 1;
    int order = strcmp(a->name, b->name);
    return order != 0 ? order : a->place < b->place ? -1 : a->place > b->place;
}

static enum status check_duplicates(const struct scanner *s, const cJSON *tree)
{
    struct key_list list = {.places = s->key_places};
    void *keys;
    TRY(memory_allocate_array(&keys, s->n_keys, sizeof *list.keys, "keys of a JSON file", s->error));
    list.keys = keys;
    list_keys(&list, tree);
    qsort(list.keys, list.n_keys, sizeof *list.keys, compare_keys);
    const struct key *found = NULL;
    for (size_t i = 1; i < list.n_keys; i++) {
        const struct key *a = &list.keys[i - 1], *b = &list.keys[i];
        if (a->object == b->object && strcmp(a->name, b->name) == 0 &&
            (found == NULL || b->place < found->place))
            found = b;
    }
    enum status status = STATUS_OK;
    if (found != NULL) {
        char text[128], quoted[96];
        snprintf(text, sizeof text, "the key %s occurs twice",
                 json_quote(found->name, quoted, sizeof quoted));
        status = fail_at(s, found->place, text);
    }
    memory_free(keys);
    return status;
}

/* ---- parsing ---- */

static enum status parse_copy(struct scanner *s, cJSON **out)
{
    cJSON *tree = cJSON_ParseWithLength(s->copy, s->n_copied);
    if (tree == NULL) /* the grammar was right, so nothing else can have failed */
        return error_set(s->error, STATUS_RESOURCE, "%s: out of memory while parsing %zu bytes of JSON",
                         s->source, s->length);
    enum status status = check_duplicates(s, tree);
    if (status != STATUS_OK)
        cJSON_Delete(tree);
    else
        *out = tree;
    return status;
}

enum status json_parse(const char *text, size_t length, const char *source, enum status fault, cJSON **out,
                       struct error *error)
{
    struct scanner s = {.source = source,
                        .status = fault,
                        .error = error,
                        .text = (const unsigned char *)text,
                        .length = length};
    TRY(scan_text(&s));
    enum status status;
    void *copy, *places;
    TRY(memory_allocate(&copy, s.n_copied + 1, "a JSON text", error));
    TRY_ELSE(memory_allocate_array(&places, s.n_keys, sizeof *s.key_places, "keys of a JSON file", error),
             free_copy);
    s.at = s.n_values = s.n_keys = s.n_copied = 0;
    s.copy = copy;
    s.key_places = places;
    TRY_ELSE(scan_text(&s), free_places);
    status = parse_copy(&s, out);
free_places:
    memory_free(places);
free_copy:
    memory_free(copy);
    return status;
}

/* ---- files ---- */

/* A file being read, and what a fault in it is. */
struct reading {
    const char *path;
    enum status fault;
    struct error *error;
    int fd;
    size_t size;
};

static enum status open_regular(struct reading *r)
{
    /* Without O_NONBLOCK the open of a FIFO would wait for a writer. */
    r->fd = open(r->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (r->fd < 0)
        return error_set_errno(r->error, r->fault, errno, "cannot open %s", r->path);
    struct stat info = {0};
    enum status status = STATUS_OK;
    if (fstat(r->fd, &info) != 0)
        status = error_set_errno(r->error, r->fault, errno, "cannot read the size of %s", r->path);
    else if (!S_ISREG(info.st_mode))
        status = error_set(r->error, r->fault, "%s is %s, expected a file", r->path,
                           S_ISDIR(info.st_mode) ? "a folder" : "not a regular file");
    if (status != STATUS_OK)
        close(r->fd);
    r->size = (size_t)info.st_size;
    return status;
}

/* Reads until the end of the file or until r->size bytes, which may be more than there are by now. */
static enum status read_whole(const struct reading *r, char *buffer, size_t *n_read)
{
    size_t done = 0;
    while (done < r->size) {
        ssize_t n = read(r->fd, buffer + done, r->size - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_set_errno(r->error, r->fault, errno, "cannot read %s", r->path);
        if (n == 0)
            break;
        done += (size_t)n;
    }
    *n_read = done;
    return STATUS_OK;
}

enum status json_read_text(const char *path, size_t max_bytes, enum status fault, char **text, size_t *length,
                           struct error *error)
{
    struct reading r = {.path = path, .fault = fault, .error = error, .fd = -1};
    void *buffer = NULL;
    TRY(open_regular(&r));
    enum status status = STATUS_OK;
    if (r.size > max_bytes)
        TRY_ELSE(error_set(error, fault, "%s has %zu bytes, expected %zu at most", path, r.size, max_bytes),
                 close_file);
    TRY_ELSE(memory_allocate(&buffer, r.size + 1, path, error), close_file);
    TRY_ELSE(read_whole(&r, buffer, length), close_file);
    *text = buffer;
    buffer = NULL;
close_file:
    memory_free(buffer);
    close(r.fd);
    return status;
}

enum status json_read_file(const char *path, enum status status, cJSON **out, struct error *error)
{
    char *text;
    size_t length;
    TRY(json_read_text(path, JSON_MAX_BYTES, status, &text, &length, error));
    status = json_parse(text, length, path, status, out, error);
    memory_free(text);
    return status;
}

/* ---- values ---- */

bool json_get_number(const cJSON *item, double *out)
{
    if (cJSON_IsNumber(item)) {
        *out = item->valuedouble;
        return true;
    }
    const cJSON *special = cJSON_IsObject(item) ? item->child : NULL;
    if (special == NULL || special->next != NULL || strcmp(special->string, FLOAT_KEY) != 0)
        return false;
    const char *word = cJSON_GetStringValue(special);
    if (word == NULL)
        return false;
    double value = strcmp(word, "Infinity") == 0    ? (double)INFINITY
                   : strcmp(word, "-Infinity") == 0 ? -(double)INFINITY
                   : strcmp(word, "NaN") == 0       ? (double)NAN
                                                    : 0;
    if (value == 0)
        return false;
    *out = value;
    return true;
}

bool json_get_integer(const cJSON *item, int64_t *out)
{
    double value;
    if (!json_get_number(item, &value) || !(fabs(value) <= MAX_EXACT) || value != floor(value))
        return false;
    *out = (int64_t)value;
    return true;
}

const char *json_describe(const cJSON *item, char *buffer, size_t size)
{
    double number;
    char quoted[64];
    if (item == NULL)
        snprintf(buffer, size, "missing");
    else if (json_get_number(item, &number))
        snprintf(buffer, size, "a number (%.17g)", number);
    else if (cJSON_IsString(item))
        snprintf(buffer, size, "a string (%s)", json_quote(item->valuestring, quoted, sizeof quoted));
    else if (cJSON_IsBool(item))
        snprintf(buffer, size, cJSON_IsTrue(item) ? "true" : "false");
    else if (cJSON_IsNull(item))
        snprintf(buffer, size, "null");
    else
        snprintf(buffer, size, cJSON_IsArray(item) ? "a list" : "an object");
    return buffer;
}

/* "captures.residuals.layers", fit for one line: a capture's name is the user's. */
static const char *name_key(const struct json_object *o, const char *key, char *buffer, size_t size)
{
    snprintf(buffer, size, "%s%s%s", o->where, o->where[0] == '\0' || key[0] == '\0' ? "" : ".", key);
    replace_controls(buffer);
    return buffer;
}

/* The item, or NULL at *out where it is missing or null and need not be there. */
static enum status fetch(const struct json_object *o, const char *key, bool required, const char *expected,
                         const cJSON **out, struct error *error)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(o->object, key);
    *out = cJSON_IsNull(item) ? NULL : item;
    if (*out != NULL || !required)
        return STATUS_OK;
    char name[256];
    return error_set(error, o->status, "%s: %s is %s, expected %s", o->source,
                     name_key(o, key, name, sizeof name), item == NULL ? "missing" : "null", expected);
}

static enum status fail_type(const struct json_object *o, const char *key, const cJSON *item,
                             const char *expected, struct error *error)
{
    char found[128], name[256];
    return error_set(error, o->status, "%s: %s is %s, expected %s", o->source,
                     name_key(o, key, name, sizeof name), json_describe(item, found, sizeof found), expected);
}

enum status json_get_int(const struct json_object *o, const char *key, bool required, int64_t min,
                         int64_t max, int64_t *inout, struct error *error)
{
    char expected[96];
    if (max >= (int64_t)MAX_EXACT && min <= -(int64_t)MAX_EXACT)
        snprintf(expected, sizeof expected, "a whole number");
    else if (max >= (int64_t)MAX_EXACT)
        snprintf(expected, sizeof expected, "a whole number of at least %lld", (long long)min);
    else
        snprintf(expected, sizeof expected, "a whole number from %lld to %lld", (long long)min,
                 (long long)max);
    const cJSON *item;
    int64_t value;
    TRY(fetch(o, key, required, expected, &item, error));
    if (item == NULL)
        return STATUS_OK;
    if (!json_get_integer(item, &value) || value < min || value > max)
        return fail_type(o, key, item, expected, error);
    *inout = value;
    return STATUS_OK;
}

enum status json_get_double(const struct json_object *o, const char *key, bool required, double min,
                            double max, double *inout, struct error *error)
{
    char expected[96];
    if (isinf(min) && isinf(max))
        snprintf(expected, sizeof expected, "a number");
    else
        snprintf(expected, sizeof expected, "a number from %.17g to %.17g", min, max);
    const cJSON *item;
    double value;
    TRY(fetch(o, key, required, expected, &item, error));
    if (item == NULL)
        return STATUS_OK;
    if (!json_get_number(item, &value) || !(value >= min && value <= max)) /* a NaN is within nothing */
        return fail_type(o, key, item, expected, error);
    *inout = value;
    return STATUS_OK;
}

enum status json_get_bool(const struct json_object *o, const char *key, bool required, bool *inout,
                          struct error *error)
{
    const cJSON *item;
    TRY(fetch(o, key, required, "true or false", &item, error));
    if (item == NULL)
        return STATUS_OK;
    if (!cJSON_IsBool(item))
        return fail_type(o, key, item, "true or false", error);
    *inout = cJSON_IsTrue(item);
    return STATUS_OK;
}

enum status json_get_string(const struct json_object *o, const char *key, bool required, const char **inout,
                            struct error *error)
{
    const cJSON *item;
    TRY(fetch(o, key, required, "a string", &item, error));
    if (item == NULL)
        return STATUS_OK;
    if (!cJSON_IsString(item))
        return fail_type(o, key, item, "a string", error);
    *inout = item->valuestring;
    return STATUS_OK;
}

/* ---- keys ---- */

static size_t min3(size_t a, size_t b, size_t c)
{
    size_t ab = a < b ? a : b;
    return ab < c ? ab : c;
}

#define MAX_WORD 128 /* characters that are compared; names of ours are shorter */

/* Levenshtein's distance: insertions, deletions and replacements of one byte. */
static size_t edit_distance(const char *a, const char *b)
{
    size_t n = strnlen(a, MAX_WORD), m = strnlen(b, MAX_WORD), row[MAX_WORD + 1];
    for (size_t j = 0; j <= m; j++)
        row[j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = row[0]; /* the distance of a's first i - 1 from b's first j - 1 */
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = min3(replaced, row[j] + 1, row[j - 1] + 1);
        }
    }
    return row[m];
}

const char *json_nearest(const char *word, const char *const *candidates)
{
    const char *nearest = NULL;
    size_t least = SIZE_MAX;
    for (; *candidates != NULL; candidates++) {
        size_t distance = edit_distance(word, *candidates);
        if (distance >= least)
            continue;
        least = distance;
        nearest = *candidates;
    }
    return nearest;
}

static bool is_known(const char *key, const char *const *known)
{
    for (; *known != NULL; known++)
        if (strcmp(key, *known) == 0)
            return true;
    return false;
}

enum status json_check_keys(const struct json_object *o, const char *const *known, struct error *error)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, o->object)
    {
        if (item->string == NULL || is_known(item->string, known))
            continue;
        char quoted[96], where[256];
        const char *nearest = json_nearest(item->string, known);
        return error_set(error, o->status, "%s: %s%sunknown key %s%s%s%s", o->source,
                         name_key(o, "", where, sizeof where), o->where[0] == '\0' ? "" : ": ",
                         json_quote(item->string, quoted, sizeof quoted),
                         nearest == NULL ? "" : ", the nearest known one is \"",
                         nearest == NULL ? "" : nearest, nearest == NULL ? "" : "\"");
    }
    return STATUS_OK;
}
