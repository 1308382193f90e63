/* What a capture chooses: layers and positions; and durations. */
#include "pipeline/job_parts.h"

#include "kernels/base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- small grammars ---- */

/* 1 to max_digits digits. Moves *text behind them. */
static bool take_digits(const char **text, int max_digits, int64_t *value)
{
    int n = 0;
    for (*value = 0; n < max_digits && **text >= '0' && **text <= '9'; n++)
        *value = *value * 10 + (*(*text)++ - '0');
    return n > 0 && (**text < '0' || **text > '9');
}

static bool take(const char **text, char wanted)
{
    if (**text != wanted)
        return false;
    (*text)++;
    return true;
}

/* ":MM" or ":SS", below 60. */
static bool take_sixtieth(const char **text, int64_t *value)
{
    return take(text, ':') && take_digits(text, 2, value) && *value < 60;
}

/* Behind "D-": "HH", "HH:MM" or "HH:MM:SS". */
static bool take_time_of_day(const char **text, int64_t *seconds)
{
    int64_t hours, minutes = 0, rest = 0;
    if (!take_digits(text, 2, &hours) || hours > 23)
        return false;
    if (**text != '\0' && !take_sixtieth(text, &minutes))
        return false;
    if (**text != '\0' && !take_sixtieth(text, &rest))
        return false;
    *seconds = hours * 3600 + minutes * 60 + rest;
    return true;
}

bool job_parse_duration(const char *text, double *seconds)
{
    int64_t first, second, third, total;
    if (!take_digits(&text, 9, &first))
        return false;
    if (take(&text, '-')) {
        if (!take_time_of_day(&text, &total))
            return false;
        total += first * 86400;
    } else if (*text == '\0') {
        total = first;
    } else if (!take_sixtieth(&text, &second)) {
        return false;
    } else if (*text == '\0') {
        total = first * 60 + second;
    } else {
        if (!take_sixtieth(&text, &third))
            return false;
        total = first * 3600 + second * 60 + third;
    }
    if (*text != '\0')
        return false;
    *seconds = (double)total;
    return true;
}

/* ---- layers ---- */

static const char *const kinds[] = {"mamba", "attention", "moe", "dense", "sliding", "full", NULL};

#define LAYERS_EXPECTED                                                                                      \
    "\"all\", a layer such as 3 or -1, a range such as \"0-31:4\", a kind such as \"attention\", or a list " \
    "of them"

/* What is being read, for messages. */
struct layer_reader {
    const struct json_object *o;
    const char *place; /* "layers" or "layers[2]" */
    const cJSON *item;
    struct layer_selector *out; /* with room for one range and one kind more */
    struct error *error;
};

static bool take_layer(const char **text, int64_t *layer)
{
    bool is_negative = take(text, '-');
    if (!take_digits(text, 6, layer))
        return false;
    if (is_negative)
        *layer = -*layer;
    return true;
}

/* "3", "-1", "0-31", "-4--1:2". */
static bool parse_range(const char *text, struct layer_range *range)
{
    *range = (struct layer_range){.step = 1};
    if (!take_layer(&text, &range->first))
        return false;
    range->last = range->first;
    if (*text == '\0')
        return true;
    if (!take(&text, '-') || !take_layer(&text, &range->last))
        return false;
    if (*text == '\0')
        return true;
    return take(&text, ':') && *text != '0' && take_digits(&text, 6, &range->step) && *text == '\0';
}

static enum status add_range(struct layer_reader *r, const struct layer_range *range)
{
    bool is_same_end = (range->first < 0) == (range->last < 0);
    if (is_same_end && range->first > range->last)
        return error_set(r->error, r->o->status,
                         "%s: %s.%s has the range %lld-%lld, which ends before it begins", r->o->source,
                         r->o->where, r->place, (long long)range->first, (long long)range->last);
    r->out->ranges[r->out->n_ranges++] = *range;
    return STATUS_OK;
}

/* One part of a comma list. */
static enum status add_word(struct layer_reader *r, const char *word)
{
    struct layer_range range;
    if (parse_range(word, &range))
        return add_range(r, &range);
    if (strcmp(word, "all") == 0) {
        r->out->all = true;
        return STATUS_OK;
    }
    for (int i = 0; kinds[i] != NULL; i++) {
        if (strcmp(word, kinds[i]) == 0) {
            r->out->kinds[r->out->n_kinds++] = kinds[i];
            return STATUS_OK;
        }
    }
    char quoted[96];
    const char *nearest = word[strspn(word, "-0123456789:")] == '\0' ? NULL : json_nearest(word, kinds);
    return error_set(r->error, r->o->status, "%s: %s.%s has %s%s%s%s, expected " LAYERS_EXPECTED,
                     r->o->source, r->o->where, r->place, json_quote(word, quoted, sizeof quoted),
                     nearest == NULL ? "" : " (the nearest kind is \"", nearest == NULL ? "" : nearest,
                     nearest == NULL ? "" : "\")");
}

/* Grows both arrays by the most that one item can add. */
static enum status reserve_layers(struct layer_reader *r, int64_t n)
{
    struct layer_selector *s = r->out;
    void *ranges = NULL, *names = NULL;
    enum status status;
    TRY_ELSE(memory_allocate_array(&ranges, (size_t)(s->n_ranges + n), sizeof *s->ranges,
                                   "layers of a capture", r->error),
             fail);
    TRY_ELSE(memory_allocate_array(&names, (size_t)(s->n_kinds + n), sizeof *s->kinds, "layers of a capture",
                                   r->error),
             fail);
    if (s->n_ranges > 0)
        memcpy(ranges, s->ranges, (size_t)s->n_ranges * sizeof *s->ranges);
    if (s->n_kinds > 0)
        memcpy(names, s->kinds, (size_t)s->n_kinds * sizeof *s->kinds);
    memory_free(s->ranges);
    memory_free(s->kinds);
    s->ranges = ranges;
    s->kinds = names;
    return STATUS_OK;
fail:
    memory_free(ranges);
    memory_free(names);
    return status;
}

/* A string's parts, between commas; spaces around them do not count. */
static enum status add_words(struct layer_reader *r, const char *text)
{
    for (;;) {
        text += strspn(text, " ");
        size_t length = strcspn(text, ","), end = length;
        while (end > 0 && text[end - 1] == ' ')
            end--;
        char word[64];
        if (end >= sizeof word)
            return job_fault(r->o, r->place, r->item, LAYERS_EXPECTED, r->error);
        memcpy(word, text, end);
        word[end] = '\0';
        TRY(add_word(r, word));
        if (text[length] == '\0')
            return STATUS_OK;
        text += length + 1;
    }
}

static int64_t count_parts(const cJSON *item)
{
    int64_t n = 1;
    for (const char *c = cJSON_IsString(item) ? item->valuestring : ""; *c != '\0'; c++)
        n += *c == ',';
    return n;
}

static enum status add_item(struct layer_reader *r)
{
    int64_t layer;
    if (cJSON_IsString(r->item))
        return add_words(r, r->item->valuestring);
    if (!json_get_integer(r->item, &layer) || layer < -JOB_MAX_LAYER || layer > JOB_MAX_LAYER)
        return job_fault(r->o, r->place, r->item, LAYERS_EXPECTED, r->error);
    return add_range(r, &(struct layer_range){.first = layer, .last = layer, .step = 1});
}

enum status job_read_layers(const struct json_object *o, struct layer_selector *out, struct error *error)
{
    const cJSON *layers = cJSON_GetObjectItemCaseSensitive(o->object, "layers"), *item;
    struct layer_reader r = {.o = o, .place = "layers", .item = layers, .out = out, .error = error};
    if (layers == NULL) {
        out->all = true;
        return STATUS_OK;
    }
    if (!cJSON_IsArray(layers)) {
        TRY(reserve_layers(&r, count_parts(layers)));
        return add_item(&r);
    }
    int64_t n_parts = 0, index = 0;
    cJSON_ArrayForEach(item, layers) n_parts += count_parts(item);
    if (n_parts == 0)
        return error_set(error, o->status, "%s: %s.layers is empty, expected " LAYERS_EXPECTED, o->source,
                         o->where);
    TRY(reserve_layers(&r, n_parts));
    cJSON_ArrayForEach(item, layers)
    {
        char place[48];
        snprintf(place, sizeof place, "layers[%lld]", (long long)index++);
        r.place = place;
        r.item = item;
        TRY(add_item(&r));
    }
    return STATUS_OK;
}

/* ---- positions ---- */

#define POSITIONS_EXPECTED                                                                                   \
    "\"all\", \"last\", {\"first\": n}, {\"every\": n, \"offset\": k}, {\"list\": [...]} or "                \
    "{\"sample\": fraction, \"seed\": n}"

static int compare_int64(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return a < b ? -1 : a > b;
}

static enum status read_list(const struct json_object *o, struct positions *p, struct error *error)
{
    TRY(job_read_integers(o, "list", -INT32_MAX, INT32_MAX, "a position", &p->list, &p->n_list, error));
    if (p->n_list == 0)
        return error_set(error, o->status, "%s: %s.list is empty, expected positions", o->source, o->where);
    qsort(p->list, (size_t)p->n_list, sizeof *p->list, compare_int64);
    int64_t kept = 1;
    for (int64_t i = 1; i < p->n_list; i++)
        if (p->list[i] != p->list[kept - 1])
            p->list[kept++] = p->list[i];
    p->n_list = kept;
    return STATUS_OK;
}

static enum status read_sample(const struct json_object *o, struct positions *p, struct error *error)
{
    int64_t seed = 0;
    TRY(json_get_double(o, "sample", true, 0, 1, &p->fraction, error));
    if (p->fraction == 0)
        return job_fault(o, "sample", cJSON_GetObjectItemCaseSensitive(o->object, "sample"),
                         "a fraction above 0, of at most 1", error);
    TRY(json_get_int(o, "seed", false, 0, JOB_MAX_INTEGER, &seed, error));
    p->seed = (uint64_t)seed;
    return STATUS_OK;
}

/* Which of the four kinds an object is; `all` where it names none. */
static enum status find_kind(const struct json_object *o, enum positions_kind *kind, struct error *error)
{
    static const struct {
        const char *key;
        enum positions_kind kind;
        const char *option; /* a key that goes only with it */
    } table[] = {{"first", POSITIONS_FIRST, NULL},
                 {"every", POSITIONS_EVERY, "offset"},
                 {"list", POSITIONS_LIST, NULL},
                 {"sample", POSITIONS_SAMPLE, "seed"}};
    const char *found = NULL;
    *kind = POSITIONS_ALL;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const cJSON *option =
            table[i].option == NULL ? NULL : cJSON_GetObjectItemCaseSensitive(o->object, table[i].option);
        if (cJSON_GetObjectItemCaseSensitive(o->object, table[i].key) == NULL) {
            if (option != NULL)
                return error_set(error, o->status, "%s: %s has the key \"%s\", which goes with \"%s\" only",
                                 o->source, o->where, table[i].option, table[i].key);
            continue;
        }
        if (found != NULL)
            return error_set(error, o->status, "%s: %s has both \"%s\" and \"%s\", expected one of them",
                             o->source, o->where, found, table[i].key);
        found = table[i].key;
        *kind = table[i].kind;
    }
    return STATUS_OK;
}

/* skip_first and skip_ids of the capture or of its positions. */
static enum status read_skips(const struct json_object *o, struct positions *p, struct error *error)
{
    TRY(json_get_int(o, "skip_first", false, 0, INT32_MAX, &p->skip_first, error));
    return job_read_ids(o, "skip_ids", &p->skip_ids, &p->n_skip_ids, error);
}

static enum status check_one_place(const struct json_object *capture, const struct json_object *inner,
                                   struct error *error)
{
    static const char *const keys[] = {"skip_first", "skip_ids"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (cJSON_GetObjectItemCaseSensitive(capture->object, keys[i]) != NULL &&
            cJSON_GetObjectItemCaseSensitive(inner->object, keys[i]) != NULL)
            return error_set(error, capture->status,
                             "%s: %s.%s stands in positions too, expected it in one place", capture->source,
                             capture->where, keys[i]);
    return STATUS_OK;
}

static enum status read_positions_object(const struct json_object *o, struct positions *p,
                                         struct error *error)
{
    static const char *const keys[] = {"first", "every",      "offset",   "list", "sample",
                                       "seed",  "skip_first", "skip_ids", NULL};
    TRY(json_check_keys(o, keys, error));
    if (o->object->child == NULL)
        return error_set(error, o->status, "%s: %s is empty, expected " POSITIONS_EXPECTED, o->source,
                         o->where);
    TRY(find_kind(o, &p->kind, error));
    TRY(read_skips(o, p, error));
    switch (p->kind) {
    case POSITIONS_FIRST:
        return json_get_int(o, "first", true, 1, INT32_MAX, &p->n, error);
    case POSITIONS_EVERY:
        TRY(json_get_int(o, "offset", false, 0, INT32_MAX, &p->offset, error));
        return json_get_int(o, "every", true, 1, INT32_MAX, &p->n, error);
    case POSITIONS_LIST:
        return read_list(o, p, error);
    case POSITIONS_SAMPLE:
        return read_sample(o, p, error);
    case POSITIONS_ALL:
    case POSITIONS_LAST:
        break;
    }
    return STATUS_OK;
}

enum status job_read_positions(const struct json_object *capture, struct positions *out, struct error *error)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(capture->object, "positions");
    const char *word = cJSON_IsString(item) ? item->valuestring : "";
    if (cJSON_IsObject(item)) {
        char where[128];
        snprintf(where, sizeof where, "%s.positions", capture->where);
        struct json_object inner = {
            .object = item, .source = capture->source, .where = where, .status = capture->status};
        TRY(check_one_place(capture, &inner, error));
        TRY(read_positions_object(&inner, out, error));
    } else if (item == NULL || strcmp(word, "all") == 0) {
        out->kind = POSITIONS_ALL;
    } else if (strcmp(word, "last") == 0) {
        out->kind = POSITIONS_LAST;
    } else {
        return job_fault(capture, "positions", item, POSITIONS_EXPECTED, error);
    }
    return read_skips(capture, out, error);
}
