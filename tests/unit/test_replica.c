/* Replicas against the golden files of all families, and against themselves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/replica_check.h"

#include <unistd.h>

#define FIXTURES TEST_DATA "/fixtures/"

/* ---- the golden files ---- */

/* The documents of a case, from its golden file. */
struct corpus {
    int32_t *ids;
    int32_t lengths[16];
    int n_documents;
    int32_t n_tokens;
};

static struct corpus read_corpus(hid_t golden)
{
    struct corpus c = {.ids = malloc(4096 * sizeof(int32_t))};
    char path[64];
    for (int k = 0; k < 16; k++) {
        hsize_t dims[4];
        int n_dims;
        snprintf(path, sizeof path, "sequences/%d", k);
        if (H5Lexists(golden, path, H5P_DEFAULT) <= 0)
            break;
        snprintf(path, sizeof path, "sequences/%d/input_ids", k);
        float *ids = golden_read(golden, path, dims, &n_dims);
        assert_in_range(c.n_tokens + (int32_t)dims[0], 1, 4096);
        for (hsize_t i = 0; i < dims[0]; i++)
            c.ids[c.n_tokens + (int32_t)i] = (int32_t)ids[i];
        free(ids);
        c.lengths[c.n_documents++] = (int32_t)dims[0];
        c.n_tokens += (int32_t)dims[0];
    }
    assert_true(c.n_documents > 0);
    return c;
}

/* A case at work: what was kept, the golden file, and for a bfloat16 load the float32 one beside it. */
struct comparison {
    struct keeper *k;
    hid_t golden, exact; /* exact: -1 without one */
    struct corpus corpus;
    char *rerouted; /* [n_tokens] tokens that some run sends to another expert than float32 does */
    int n_compared;
};

static void site_path(char path[160], enum value_id value, int layer)
{
    if (layer < 0)
        snprintf(path, 160, "%s", catalogue_path(value));
    else
        snprintf(path, 160, "layers/%d/%s", layer, catalogue_path(value));
}

static bool is_heads_first(enum value_id value)
{
    return value == VALUE_ATTN_QUERIES || value == VALUE_ATTN_KEYS || value == VALUE_ATTN_VALUES ||
           value == VALUE_ATTN_SCORES || value == VALUE_ATTN_PROBABILITIES;
}

/* What a golden file says of one document, laid out as our rows are: key axes as wide as ours. False where it
 * has none. */
static bool read_document(const struct comparison *c, hid_t file, enum value_id value, int layer,
                          int document, float *out)
{
    const struct kept *site = keeper_get(c->k, value, layer);
    char path[160], full[200];
    hsize_t dims[4];
    int n_dims;
    int64_t T = c->corpus.lengths[document], width = site->width;
    site_path(path, value == VALUE_LINEAR_STATE ? VALUE_LINEAR_STATES : value, layer);
    if (value == VALUE_INPUT_SIZE || value == VALUE_ATTENTION_MASK || value == VALUE_LINEAR_STATE_INPUT) {
        for (int64_t i = 0; i < T * width; i++)
            out[i] = value == VALUE_ATTENTION_MASK ? 1 : 0;
        if (value == VALUE_INPUT_SIZE) {
            out[0] = 1;
            out[1] = (float)T;
        }
        return true;
    }
    snprintf(full, sizeof full, "sequences/%d/%s", document, path);
    float *data = golden_read(file, full, dims, &n_dims);
    if (data == NULL)
        return false;
    if (!is_heads_first(value) || layer < 0) {
        int64_t n = 1;
        for (int i = 0; i < n_dims; i++)
            n *= (int64_t)dims[i];
        assert_int_equal(n, catalogue_get(value)->per == PER_SEQUENCE ? width : T * width);
        memcpy(out, data, (size_t)n * sizeof *out);
    } else {
        int64_t heads = (int64_t)dims[0], last = (int64_t)dims[2], ours = width / heads;
        for (int64_t t = 0; t < T; t++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t i = 0; i < ours; i++)
                    out[t * width + h * ours + i] = i < last ? data[(h * T + t) * last + i]
                                                    : value == VALUE_ATTN_SCORES ? -INFINITY
                                                                                 : 0;
    }
    free(data);
    return true;
}

/* All documents' rows of a site, not-a-number where the golden file leaves out a document's; NULL where it
 * has none. */
static float *read_site(const struct comparison *c, hid_t file, enum value_id value, int layer)
{
    const struct kept *site = keeper_get(c->k, value, layer);
    float *all = malloc((size_t)(c->corpus.n_tokens * site->width) * sizeof *all), *at = all;
    bool found = false;
    for (int d = 0; d < c->corpus.n_documents; d++) {
        int64_t n = site->width * (catalogue_get(value)->per == PER_SEQUENCE ? 1 : c->corpus.lengths[d]);
        bool has = read_document(c, file, value, layer, d, at);
        for (int64_t i = 0; !has && i < n; i++)
            at[i] = NAN;
        found = found || has;
        at += n;
    }
    if (found)
        return all;
    free(all);
    return NULL;
}

/* Rows that count: those of tokens, or of windows without such tokens, that no run reroutes. */
static bool row_counts(const struct comparison *c, enum value_id value, int64_t row)
{
    if (catalogue_get(value)->per == PER_TOKEN)
        return !c->rerouted[row];
    int32_t start = 0;
    for (int64_t d = 0; d < row; d++)
        start += c->corpus.lengths[d];
    return memchr(c->rerouted + start, 1, (size_t)c->corpus.lengths[row]) == NULL;
}

static void compare_exactly(const struct comparison *c, enum value_id value, int layer, const float *golden)
{
    const struct kept *site = keeper_get(c->k, value, layer);
    for (int64_t i = 0; i < site->n_rows * site->width; i++) {
        double ours = site->data[i], theirs = golden[i];
        if (isnan(theirs))
            continue;
        bool agrees = isfinite(theirs) ? fabs(ours - theirs) <= 1e-4 + 1e-4 * fabs(theirs) : ours == theirs;
        if (!agrees)
            fail_msg("layer %d %s row %lld column %lld: %g, expected %g", layer, catalogue_path(value),
                     (long long)(i / site->width), (long long)(i % site->width), ours, theirs);
    }
}

/* Our root-mean-square error against float32 may be 1.5 times that of the reference's bfloat16 run. */
static void compare_rounding(const struct comparison *c, enum value_id value, int layer, const float *golden,
                             const float *exact)
{
    const struct kept *site = keeper_get(c->k, value, layer);
    double ours = 0, theirs = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < site->n_rows * site->width; i++) {
        if (!row_counts(c, value, i / site->width) || isnan(exact[i]))
            continue;
        if (!isfinite(exact[i])) {
            if (site->data[i] != exact[i])
                fail_msg("layer %d %s: %g, expected %g", layer, catalogue_path(value), (double)site->data[i],
                         (double)exact[i]);
            continue;
        }
        ours += pow((double)site->data[i] - exact[i], 2);
        theirs += pow((double)golden[i] - exact[i], 2);
        n++;
    }
    ours = n > 0 ? sqrt(ours / (double)n) : 0;
    theirs = n > 0 ? sqrt(theirs / (double)n) : 0;
    if (!(ours <= 1.5 * theirs + 1e-6))
        fail_msg("layer %d %s: rms error %g, the reference's %g", layer, catalogue_path(value), ours, theirs);
}

/* Notes the tokens that take another way than in float32, and holds their number against the reference's. */
static void note_rerouted(struct comparison *c, int layer)
{
    const struct kept *site = keeper_get(c->k, VALUE_EXPERT_INDICES, layer);
    if (site->data == NULL || c->exact < 0)
        return;
    float *golden = read_site(c, c->golden, VALUE_EXPERT_INDICES, layer);
    float *exact = read_site(c, c->exact, VALUE_EXPERT_INDICES, layer);
    int ours = 0, theirs = 0;
    size_t bytes = (size_t)site->width * sizeof *exact;
    for (int64_t r = 0; r < site->n_rows; r++) {
        bool we = memcmp(site->data + r * site->width, exact + r * site->width, bytes) != 0;
        bool they = memcmp(golden + r * site->width, exact + r * site->width, bytes) != 0;
        ours += we;
        theirs += they;
        c->rerouted[r] |= we || they;
    }
    int spare = (int)site->n_rows / 20 > 2 ? (int)site->n_rows / 20 : 2;
    if (ours > theirs + spare)
        fail_msg("layer %d: %d tokens rerouted, the reference has %d", layer, ours, theirs);
    free(golden);
    free(exact);
}

static void compare_site(struct comparison *c, enum value_id value, int layer)
{
    if (keeper_get(c->k, value, layer)->data == NULL || (value == VALUE_EXPERT_INDICES && c->exact >= 0))
        return;
    float *golden = read_site(c, c->golden, value, layer);
    if (golden == NULL)
        fail_msg("layer %d %s: no golden value", layer, catalogue_path(value));
    if (c->exact < 0) {
        compare_exactly(c, value, layer, golden);
    } else {
        float *exact = read_site(c, c->exact, value, layer);
        compare_rounding(c, value, layer, golden, exact);
        free(exact);
    }
    free(golden);
    c->n_compared++;
}

static void compare_all(struct comparison *c)
{
    c->rerouted = calloc((size_t)c->corpus.n_tokens, 1);
    for (int layer = 0; layer < c->k->model->n_layers; layer++) {
        note_rerouted(c, layer);
        for (int v = VALUE_LAYER_INPUT; v < VALUE_COUNT; v++)
            compare_site(c, (enum value_id)v, layer);
    }
    for (int v = 0; v < VALUE_LAYER_INPUT; v++)
        compare_site(c, (enum value_id)v, -1);
    free(c->rerouted);
}

/* group: "fixtures" or "options", the folders of tests/data. */
static hid_t open_golden(const char *group, const char *case_name, const char *file)
{
    char path[512];
    hid_t id = -1;
    snprintf(path, sizeof path, TEST_DATA "/%s/%s/%s", group, case_name, file);
    if (access(path, R_OK) == 0)
        id = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    return id;
}

/* A small piece_bytes cuts everything large into many pieces. */
static void check_case(const char *group, const char *case_name, int load_dtype, size_t piece_bytes)
{
    char folder[512];
    snprintf(folder, sizeof folder, TEST_DATA "/%s/%s", group, case_name);
    struct comparison c = {.golden = open_golden(group, case_name, "golden.h5"),
                           .exact = open_golden(group, case_name, "golden_float32.h5")};
    assert_true(c.golden >= 0);
    c.corpus = read_corpus(c.golden);
    if (load_dtype == DTYPE_F32 && c.exact >= 0) { /* a bfloat16 case loaded in float32 */
        H5Fclose(c.golden);
        c.golden = c.exact;
        c.exact = -1;
    }
    struct keeper k = {.wants = want_everything,
                       .limits = {.max_tokens = c.corpus.n_tokens + 3,
                                  .max_windows = c.corpus.n_documents + 1,
                                  .max_position = c.corpus.lengths[0] + 2,
                                  .piece_bytes = piece_bytes}};
    for (int d = 1; d < c.corpus.n_documents; d++) {
        if (k.limits.max_position < c.corpus.lengths[d] + 2)
            k.limits.max_position = c.corpus.lengths[d] + 2;
    }
    keeper_open(&k, folder, load_dtype, c.corpus.n_tokens, c.corpus.n_documents);
    keeper_run_packed(&k, c.corpus.ids, c.corpus.lengths, c.corpus.n_documents);
    c.k = &k;
    compare_all(&c);
    assert_true(c.n_compared > 20);
    keeper_close(&k);
    H5Fclose(c.golden);
    if (c.exact >= 0)
        H5Fclose(c.exact);
    free(c.corpus.ids);
}

static const char *const cases[] = {
    "mamba", "mamba-bf16", "mamba-untied-nobias", "jamba",  "jamba-bf16",  "jamba-dense-tied",
    "bamba", "bamba-bf16", "bamba-groups-limit",  "laguna", "laguna-bf16", "laguna-channel-softcap"};

static void test_golden_values(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        print_message("  %s\n", cases[i]);
        check_case("fixtures", cases[i], LOAD_DTYPE_OWN, 0);
    }
}

static void test_golden_values_in_small_pieces(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++)
        check_case("fixtures", cases[i], LOAD_DTYPE_OWN, 5000);
}

static void test_bfloat16_files_in_float32(void **state)
{
    (void)state;
    check_case("fixtures", "mamba-bf16", DTYPE_F32, 0);
    check_case("fixtures", "jamba-bf16", DTYPE_F32, 0);
    check_case("fixtures", "bamba-bf16", DTYPE_F32, 0);
    check_case("fixtures", "laguna-bf16", DTYPE_F32, 0);
}

/* Options that the fixtures do not have, and documents longer than every chunk and window. */
static const char *const options[] = {"mamba-odd",  "mamba-bf16-stream", "mamba-f16",    "jamba-mixed",
                                      "bamba-bias", "bamba-yarn",        "laguna-turned"};

static void test_options(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(options); i++) {
        print_message("  %s\n", options[i]);
        check_case("options", options[i], LOAD_DTYPE_OWN, 0);
        check_case("options", options[i], LOAD_DTYPE_OWN, 30000);
    }
}

/* ---- documents of our own ---- */

static void fill_ids(int32_t *ids, int32_t n, uint32_t seed)
{
    for (int32_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)((seed >> 8) % 97); /* the fixtures' vocabulary */
    }
}

static void fixture_path(char path[512], const char *case_name)
{
    snprintf(path, 512, FIXTURES "%s", case_name);
}

/* One batch of documents through a fresh replica. */
static void open_packed(struct keeper *k, const char *case_name, const int32_t *ids, const int32_t *lengths,
                        int n_documents)
{
    char folder[512];
    int32_t n_tokens = 0;
    for (int i = 0; i < n_documents; i++)
        n_tokens += lengths[i];
    fixture_path(folder, case_name);
    *k = (struct keeper){.wants = k->wants != NULL ? k->wants : want_everything,
                         .limits = {.max_tokens = n_tokens, .max_windows = n_documents, .max_position = 64}};
    keeper_open(k, folder, LOAD_DTYPE_OWN, n_tokens, n_documents);
    keeper_run_packed(k, ids, lengths, n_documents);
}

static const char *const float32_cases[] = {
    "mamba", "mamba-untied-nobias", "jamba",  "jamba-dense-tied",
    "bamba", "bamba-groups-limit",  "laguna", "laguna-channel-softcap"};

static double row_scale(const float *row, int64_t n)
{
    double sum = 0;
    int64_t finite = 0;
    for (int64_t i = 0; i < n; i++) {
        if (isfinite(row[i])) {
            sum += (double)row[i] * row[i];
            finite++;
        }
    }
    return finite > 0 ? sqrt(sum / (double)finite) : 0;
}

/* n rows of a site against n rows of another replica's, each difference within `bound` of the row's size. */
static void check_close(const struct keeper *a, int64_t first, const struct keeper *b, int64_t other_first,
                        int64_t n, enum value_id value, int layer, double bound)
{
    const struct kept *x = keeper_get(a, value, layer), *y = keeper_get(b, value, layer);
    for (int64_t r = 0; x->data != NULL && r < n; r++) {
        const float *ours = x->data + (first + r) * x->width,
                    *theirs = y->data + (other_first + r) * y->width;
        double scale = row_scale(theirs, y->width);
        for (int64_t i = 0; i < x->width; i++) {
            bool same = ours[i] == theirs[i] ||
                        fabs((double)ours[i] - theirs[i]) <= bound * (fabs((double)theirs[i]) + scale);
            if (!same)
                fail_msg("%s layer %d %s row %lld column %lld: %g, expected %g", a->model->name, layer,
                         catalogue_path(value), (long long)(first + r), (long long)i, (double)ours[i],
                         (double)theirs[i]);
        }
    }
}

/* Rows [first, first + n) of a site must be the same bits in both replicas. */
static void check_same_bits(const struct keeper *a, const struct keeper *b, int64_t first, int64_t n,
                            enum value_id value, int layer)
{
    const struct kept *x = keeper_get(a, value, layer), *y = keeper_get(b, value, layer);
    size_t bytes = (size_t)(n * x->width) * sizeof(float);
    if (x->data != NULL && memcmp(x->data + first * x->width, y->data + first * y->width, bytes) != 0)
        fail_msg("%s layer %d %s: rows from %lld differ", a->model->name, layer, catalogue_path(value),
                 (long long)first);
}

/* In a mixture, what other documents choose moves a token among its expert's rows, and with it the rounding
 * of the products: from the first mixture on, values are the same but for that. */
static bool is_past_mixture(const struct model *m, int layer)
{
    for (int i = 0; i < (layer < 0 ? m->n_layers : layer + 1); i++) {
        if (m->blocks[i].feed_forward == FEED_FORWARD_MIXTURE)
            return true;
    }
    return false;
}

static void check_neighbours(const char *case_name)
{
    const int32_t lengths[] = {9, 17, 21}, starts[] = {0, 26};
    int32_t ids[47], changed[47];
    struct keeper before = {0}, after = {0};
    fill_ids(ids, 47, 1);
    memcpy(changed, ids, sizeof ids);
    for (int i = 9; i < 26; i += 5)
        changed[i] = (ids[i] + 31) % 97; /* in the document in the middle */
    open_packed(&before, case_name, ids, lengths, 3);
    open_packed(&after, case_name, changed, lengths, 3);
    for (int layer = -1; layer < before.model->n_layers; layer++) {
        for (int v = 0; v < VALUE_COUNT; v++) {
            enum value_id value = (enum value_id)v;
            bool by_window = catalogue_get(value)->per == PER_SEQUENCE;
            if (value_is_per_layer(value) != (layer >= 0))
                continue;
            for (int side = 0; side < 2; side++) {
                int64_t first = by_window ? 2 * side : starts[side], n = by_window ? 1 : lengths[2 * side];
                if (is_past_mixture(before.model, layer))
                    check_close(&before, first, &after, first, n, value, layer, 1e-5);
                else
                    check_same_bits(&before, &after, first, n, value, layer);
            }
        }
    }
    keeper_close(&before);
    keeper_close(&after);
}

static void test_neighbours_do_not_touch(void **state)
{
    (void)state;
    const char *const bf16_cases[] = {"mamba-bf16", "bamba-bf16"};
    for (size_t i = 0; i < COUNT(float32_cases); i++)
        check_neighbours(float32_cases[i]);
    for (size_t i = 0; i < COUNT(bf16_cases); i++)
        check_neighbours(bf16_cases[i]);
}

static void check_document_close(const struct keeper *a, int64_t row, int64_t window, const struct keeper *b,
                                 int64_t n)
{
    for (int layer = -1; layer < a->model->n_layers; layer++) {
        for (int v = 0; v < VALUE_COUNT; v++) {
            enum value_id value = (enum value_id)v;
            bool by_window = catalogue_get(value)->per == PER_SEQUENCE;
            if (value_is_per_layer(value) == (layer >= 0))
                check_close(a, by_window ? window : row, b, 0, by_window ? 1 : n, value, layer, 1e-5);
        }
    }
}

static void test_place_in_the_batch_does_not_matter(void **state)
{
    (void)state;
    const int32_t alone = 21, lengths[3][3] = {{21, 9, 17}, {9, 21, 17}, {9, 17, 21}}, starts[] = {0, 9, 26};
    int32_t document[21], others[26], ids[47];
    fill_ids(document, 21, 2);
    fill_ids(others, 26, 3);
    for (size_t i = 0; i < COUNT(float32_cases); i++) {
        struct keeper single = {0};
        open_packed(&single, float32_cases[i], document, &alone, 1);
        for (int place = 0; place < 3; place++) {
            struct keeper packed = {0};
            int32_t from = starts[place];
            memcpy(ids, others, (size_t)from * sizeof *ids);
            memcpy(ids + from, document, sizeof document);
            memcpy(ids + from + 21, others + from, (size_t)(26 - from) * sizeof *ids);
            open_packed(&packed, float32_cases[i], ids, lengths[place], 3);
            check_document_close(&packed, from, place, &single, 21);
            keeper_close(&packed);
        }
        keeper_close(&single);
    }
}

/* ---- carry ---- */

static bool want_all_but_patterns(enum value_id value, int layer)
{
    (void)layer;
    return value != VALUE_ATTN_SCORES && value != VALUE_ATTN_PROBABILITIES;
}

/* Documents cut into windows, so many tokens a batch, each document's windows one run. */
static void run_windows(struct keeper *k, const int32_t *ids, const int32_t *lengths, int n_documents,
                        int32_t window, int64_t batch_tokens)
{
    int32_t starts[2048], positions[2048], at = 0;
    int document = 0;
    int32_t position = 0;
    while (document < n_documents) {
        struct batch batch = {.ids = ids + at, .window_start = starts, .window_position = positions};
        batch.carry_in = position > 0;
        starts[0] = 0;
        while (document < n_documents) {
            int32_t left = lengths[document] - position, n = left < window ? left : window;
            if (batch.n_windows > 0 && batch.n_tokens + n > batch_tokens)
                break;
            positions[batch.n_windows] = position;
            batch.n_tokens += n;
            starts[++batch.n_windows] = (int32_t)batch.n_tokens;
            position += n;
            if (position == lengths[document]) {
                document++;
                position = 0;
            }
        }
        batch.carry_out = position > 0;
        at += (int32_t)batch.n_tokens;
        keeper_run(k, &batch);
    }
}

/* The state after token `row` of a whole run, against a row of state_input or state_output; row -1: zeros. */
static void check_state(const struct keeper *k, enum value_id value, int layer, int64_t window,
                        const struct keeper *whole, int64_t row)
{
    const struct kept *ours = keeper_get(k, value, layer),
                      *states = keeper_get(whole, VALUE_LINEAR_STATES, layer);
    for (int64_t i = 0; ours->data != NULL && i < ours->width; i++) {
        double expected = row < 0 ? 0 : states->data[row * states->width + i];
        double found = ours->data[window * ours->width + i];
        if (!(fabs(found - expected) <= 1e-4 + 1e-4 * fabs(expected)))
            fail_msg("%s layer %d %s of window %lld: %g, expected %g", k->model->name, layer,
                     catalogue_path(value), (long long)window, found, expected);
    }
}

static void check_windows(const struct keeper *k, const struct keeper *whole, const int32_t *lengths,
                          int n_documents, int32_t window)
{
    int64_t row = 0, at = 0;
    for (int d = 0; d < n_documents; d++) {
        for (int32_t position = 0; position < lengths[d]; position += window, at++) {
            int32_t n = lengths[d] - position < window ? lengths[d] - position : window;
            for (int layer = 0; layer < k->model->n_layers; layer++) {
                check_state(k, VALUE_LINEAR_STATE_INPUT, layer, at, whole, position == 0 ? -1 : row - 1);
                check_state(k, VALUE_LINEAR_STATE_OUTPUT, layer, at, whole, row + n - 1);
            }
            row += n;
        }
    }
}

/* The same documents in one batch without carry and in windows with it must give the same rows. */
static void check_carry(const char *case_name, bool (*wants)(enum value_id, int), const int32_t *lengths,
                        int n_documents, const int32_t windows[2], int n_kinds)
{
    int32_t ids[2048], n_tokens = 0, longest = 0;
    char folder[512];
    fixture_path(folder, case_name);
    for (int d = 0; d < n_documents; d++) {
        n_tokens += lengths[d];
        longest = lengths[d] > longest ? lengths[d] : longest;
    }
    fill_ids(ids, n_tokens, 4);
    struct keeper whole = {
        .wants = wants,
        .limits = {.max_tokens = n_tokens, .max_windows = n_documents, .max_position = longest}};
    keeper_open(&whole, folder, LOAD_DTYPE_OWN, n_tokens, n_documents);
    keeper_run_packed(&whole, ids, lengths, n_documents);
    for (int kind = 0; kind < n_kinds; kind++) {
        int32_t window = windows[kind], batch_tokens = window > 400 ? window : 3 * window + 2;
        int64_t n_windows = 0;
        for (int d = 0; d < n_documents; d++)
            n_windows += (lengths[d] + window - 1) / window;
        struct keeper k = {.wants = wants,
                           .limits = {.max_tokens = batch_tokens,
                                      .max_windows = batch_tokens,
                                      .max_position = longest,
                                      .carry = true,
                                      .piece_bytes = 20000}};
        keeper_open(&k, folder, LOAD_DTYPE_OWN, n_tokens, n_windows);
        run_windows(&k, ids, lengths, n_documents, window, batch_tokens);
        for (int layer = -1; layer < k.model->n_layers; layer++) {
            for (int v = 0; v < VALUE_COUNT; v++) {
                enum value_id value = (enum value_id)v;
                if (value_is_per_layer(value) == (layer >= 0) && catalogue_get(value)->per == PER_TOKEN)
                    check_close(&k, 0, &whole, 0, n_tokens, value, layer, 1e-4);
            }
        }
        check_windows(&k, &whole, lengths, n_documents, window);
        keeper_close(&k);
    }
    keeper_close(&whole);
}

static void test_carry_over_long_documents(void **state)
{
    (void)state;
    const int32_t lengths[] = {1030, 40}, windows[] = {64, 1000};
    const char *const families[] = {"mamba", "jamba", "bamba", "laguna"};
    for (size_t i = 0; i < COUNT(families); i++)
        check_carry(families[i], want_all_but_patterns, lengths, 2, windows, 2);
}

static void test_carry_over_short_windows(void **state)
{
    (void)state;
    const int32_t lengths[] = {75, 7, 1, 33, 14}, windows[] = {7, 1};
    for (size_t i = 0; i < COUNT(float32_cases); i++)
        check_carry(float32_cases[i], want_everything, lengths, 5, windows, 2);
}

/* ---- identities, in float64 over what was captured ---- */

static const float *row_of(const struct keeper *k, enum value_id value, int layer, int64_t row)
{
    const struct kept *site = keeper_get(k, value, layer);
    return site->data == NULL ? NULL : site->data + row * site->width;
}

static double element(const float *row, int64_t i)
{
    return row == NULL ? 0 : (double)row[i];
}

static void check_number(const char *what, int layer, int64_t row, double found, double expected,
                         double scale)
{
    if (!(fabs(found - expected) <= 2e-5 * (scale + fabs(expected))))
        fail_msg("layer %d row %lld: %s %.9g, expected %.9g", layer, (long long)row, what, found, expected);
}

/* layer_input + attention_output + mlp_output == layer_output; layer_mid in between. */
static void check_stream(const struct keeper *k, int layer, int64_t row)
{
    const float *in = row_of(k, VALUE_LAYER_INPUT, layer, row),
                *out = row_of(k, VALUE_LAYER_OUTPUT, layer, row);
    const float *mid = row_of(k, VALUE_LAYER_MID, layer, row), *mlp = row_of(k, VALUE_MLP_OUTPUT, layer, row);
    const float *linear = row_of(k, VALUE_LINEAR_OUTPUT, layer, row);
    const float *attention = row_of(k, VALUE_ATTN_OUTPUT, layer, row);
    double scale = row_scale(out, k->model->hidden_size);
    for (int64_t i = 0; i < k->model->hidden_size; i++) {
        double sum = (double)in[i] + element(linear, i) + element(attention, i);
        if (mid != NULL)
            check_number("layer_mid", layer, row, (double)mid[i], sum, scale);
        check_number("layer_output", layer, row, (double)out[i], sum + element(mlp, i), scale);
        if (layer + 1 < k->model->n_layers)
            check_number("the next layer_input", layer, row,
                         (double)row_of(k, VALUE_LAYER_INPUT, layer + 1, row)[i], (double)out[i], 0);
    }
}

static void check_mixture(const struct keeper *k, int layer, int64_t row)
{
    const struct model *m = k->model;
    const float *slots = row_of(k, VALUE_EXPERT_OUTPUTS, layer, row),
                *sum = row_of(k, VALUE_ROUTED_OUTPUT, layer, row);
    const float *shared = row_of(k, VALUE_SHARED_EXPERT_OUTPUT, layer, row);
    const float *mlp = row_of(k, VALUE_MLP_OUTPUT, layer, row);
    const float *weights = row_of(k, VALUE_EXPERT_WEIGHTS, layer, row);
    const float *indices = row_of(k, VALUE_EXPERT_INDICES, layer, row);
    const float *logits = row_of(k, VALUE_ROUTER_LOGITS, layer, row);
    double scale = row_scale(mlp, m->hidden_size), total = 0;
    for (int64_t i = 0; i < m->hidden_size; i++) {
        double routed = 0;
        for (int j = 0; j < m->top_k; j++)
            routed += (double)slots[j * m->hidden_size + i];
        check_number("routed_output", layer, row, (double)sum[i], routed * (double)m->routed_scale, scale);
        check_number("mlp_output", layer, row, (double)mlp[i], (double)sum[i] + element(shared, i), scale);
    }
    for (int j = 0; j < m->top_k; j++) {
        total += (double)weights[j];
        assert_in_range((int)indices[j], 0, m->n_experts - 1);
        for (int other = 0; other < j; other++)
            assert_true(indices[j] != indices[other]);
    }
    if (m->router_sigmoid) {
        check_number("the weights' sum", layer, row, total, 1, 0);
    } else { /* the softmax's share of the chosen, in falling order */
        double all = 0, chosen = 0;
        for (int e = 0; e < m->n_experts; e++)
            all += exp((double)logits[e]);
        for (int j = 0; j < m->top_k; j++)
            chosen += exp((double)logits[(int)indices[j]]);
        check_number("the weights' sum", layer, row, total, chosen / all, 0);
        assert_true(m->top_k < 2 || weights[0] >= weights[1]);
    }
}

static void check_probabilities(const struct keeper *k, int layer, int64_t row, int64_t position)
{
    int heads = k->model->blocks[layer].n_heads;
    int64_t n_keys = k->limits.max_position;
    const float *scores = row_of(k, VALUE_ATTN_SCORES, layer, row);
    const float *probabilities = row_of(k, VALUE_ATTN_PROBABILITIES, layer, row);
    int64_t window = k->model->blocks[layer].sliding ? k->model->window : n_keys;
    for (int h = 0; h < heads; h++) {
        double sum = 0, denominator = 0;
        for (int64_t key = 0; key < n_keys; key++)
            denominator += exp((double)scores[h * n_keys + key]);
        for (int64_t key = 0; key < n_keys; key++) {
            double p = (double)probabilities[h * n_keys + key];
            bool hidden = key > position || key <= position - window;
            sum += p;
            if (hidden)
                assert_true(isinf(scores[h * n_keys + key]) && scores[h * n_keys + key] < 0 && p == 0);
            check_number("a probability", layer, row, p, exp((double)scores[h * n_keys + key]) / denominator,
                         1e-2);
        }
        check_number("probabilities", layer, row, sum, 1, 0);
    }
}

/* The state rebuilt from keys, values, betas and decays, and what queries read of it. `state` goes from token
 * to token. D is not among the values: it is what is left of the first token, and must be the same for all
 * others. */
static void check_recurrence(const struct keeper *k, int layer, int64_t row, double *state, double *D,
                             bool has_D)
{
    const struct model *m = k->model;
    bool by_head = m->n_mamba_heads > 0;
    int64_t N = m->state_dim, P = by_head ? m->mamba_head_dim : 1,
            H = by_head ? m->n_mamba_heads : m->mamba_width;
    const float *x = row_of(k, VALUE_LINEAR_VALUES, layer, row),
                *B = row_of(k, VALUE_LINEAR_KEYS, layer, row);
    const float *C = row_of(k, VALUE_LINEAR_QUERIES, layer, row),
                *beta = row_of(k, VALUE_LINEAR_BETAS, layer, row);
    const float *decay = row_of(k, VALUE_LINEAR_DECAYS, layer, row),
                *y = row_of(k, VALUE_LINEAR_HEAD_OUTPUTS, layer, row);
    const float *states = row_of(k, VALUE_LINEAR_STATES, layer, row);
    double scale = row_scale(states, H * N * P), y_scale = row_scale(y, H * P);
    for (int64_t h = 0; h < H; h++) {
        int64_t group = by_head ? h / (H / m->n_groups) : 0;
        for (int64_t p = 0; p < P; p++) {
            double read = 0;
            for (int64_t n = 0; n < N; n++) {
                double *s = &state[(h * N + n) * P + p];
                *s = exp((double)decay[by_head ? h : h * N + n]) * *s +
                     (double)beta[h] * (double)B[group * N + n] * (double)x[h * P + p];
                check_number("a state", layer, row, (double)states[(h * N + n) * P + p], *s, scale);
                read += (double)C[group * N + n] * *s;
            }
            double rest = (double)y[h * P + p] - read;
            if (!has_D &&
                fabs((double)x[h * P + p]) > fabs(D[H + h])) { /* from the largest x of the first token */
                D[H + h] = (double)x[h * P + p];
                D[h] = rest / D[H + h];
            } else if (has_D) {
                check_number("y", layer, row, (double)y[h * P + p], read + D[h] * (double)x[h * P + p],
                             y_scale);
            }
        }
    }
}

static void check_layer_identities(const struct keeper *k, int layer, const int32_t *lengths, int n_documents)
{
    const struct model *m = k->model;
    int64_t row = 0;
    size_t width = (size_t)(m->mamba_width * m->state_dim), heads = 2 * (size_t)(m->mamba_width + 1);
    double *state = malloc((width + 1) * sizeof *state), *D = calloc(heads, sizeof *D);
    for (int d = 0; d < n_documents; d++) {
        memset(state, 0, width * sizeof *state);
        for (int32_t t = 0; t < lengths[d]; t++, row++) {
            check_stream(k, layer, row);
            if (m->blocks[layer].feed_forward == FEED_FORWARD_MIXTURE)
                check_mixture(k, layer, row);
            if (m->blocks[layer].mixer == MIXER_ATTENTION)
                check_probabilities(k, layer, row, t);
            else
                check_recurrence(k, layer, row, state, D, row > 0);
        }
    }
    free(state);
    free(D);
}

static void test_identities(void **state)
{
    (void)state;
    const int32_t lengths[] = {30, 1, 17};
    int32_t ids[48];
    fill_ids(ids, 48, 7);
    for (size_t i = 0; i < COUNT(float32_cases); i++) {
        struct keeper k = {0};
        open_packed(&k, float32_cases[i], ids, lengths, 3);
        for (int layer = 0; layer < k.model->n_layers; layer++)
            check_layer_identities(&k, layer, lengths, 3);
        keeper_close(&k);
    }
}

/* ---- editing ---- */

static int edited_layer;

/* Doubles the stream that leaves a block: what comes after has to see it. */
static void editing_offer(void *context, enum value_id value, int layer, const struct piece *piece)
{
    if (value == VALUE_LAYER_OUTPUT && layer == edited_layer) {
        struct keeper *k = context;
        k->backend->ops->add(k->backend, piece->data, piece->data, piece->data);
    }
    keeper_offer(context, value, layer, piece);
}

static void test_an_edited_stream_is_what_goes_on(void **state)
{
    (void)state;
    const int32_t length = 12;
    int32_t ids[12];
    const char *const families[] = {"mamba", "jamba", "bamba", "laguna"};
    fill_ids(ids, 12, 8);
    for (size_t i = 0; i < COUNT(families); i++) {
        char folder[512];
        struct keeper plain = {0}, k = {.wants = want_everything,
                                        .limits = {.max_tokens = 12, .max_windows = 1, .max_position = 64}};
        fixture_path(folder, families[i]);
        open_packed(&plain, families[i], ids, &length, 1);
        keeper_open(&k, folder, LOAD_DTYPE_OWN, 12, 1);
        k.observer.offer = editing_offer;
        edited_layer = 1;
        keeper_run_packed(&k, ids, &length, 1);
        check_close(&k, 0, &plain, 0, 12, VALUE_LAYER_OUTPUT, 0, 1e-6);
        const float *before = keeper_get(&plain, VALUE_LAYER_OUTPUT, 1)->data;
        const float *after = keeper_get(&k, VALUE_LAYER_INPUT, 2)->data;
        for (int64_t e = 0; e < 12 * k.model->hidden_size; e++)
            assert_true(fabs((double)after[e] - 2 * (double)before[e]) <=
                        1e-5 * (1 + fabs((double)before[e])));
        keeper_close(&plain);
        keeper_close(&k);
    }
}

/* ---- checkpoints that do not fit their config ---- */

struct misfit {
    const char *case_name;
    const char *from, *to; /* in config.json */
    const char *message;
};

static const struct misfit misfits[] = {
    {"mamba", "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2",
     "backbone.layers.2.mixer.A_log has no place in the model that config.json describes"},
    {"mamba", "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4", "backbone.layers.3."},
    {"mamba", "\"vocab_size\": 97", "\"vocab_size\": 98", "backbone.embeddings.weight"},
    {"mamba", "\"state_size\": 8", "\"state_size\": 9", "mixer.x_proj.weight"},
    {"mamba", "\"conv_kernel\": 4", "\"conv_kernel\": 3", "mixer.conv1d.weight"},
    {"mamba", "\"use_bias\": false", "\"use_bias\": true", "mixer.in_proj.bias"},
    {"mamba", "\"use_conv_bias\": true", "\"use_conv_bias\": false", "conv1d.bias has no place"},
    {"mamba", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false", "lm_head.weight"},
    {"mamba", "\"intermediate_size\": 48", "\"intermediate_size\": 46", "mixer.in_proj.weight"},
    {"jamba", "\"attn_layer_offset\": 2", "\"attn_layer_offset\": 1",
     "model.layers.1.self_attn.q_proj.weight"},
    {"jamba", "\"expert_layer_offset\": 1", "\"expert_layer_offset\": 0",
     "model.layers.0.feed_forward.router.weight"},
    {"jamba", "\"num_experts\": 4", "\"num_experts\": 3", "feed_forward.router.weight"},
    {"jamba", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4", "self_attn.k_proj.weight"},
    {"bamba", "\"mamba_n_groups\": 1", "\"mamba_n_groups\": 2", "mamba.in_proj.weight"},
    {"bamba", "\"intermediate_size\": 56", "\"intermediate_size\": 64", "feed_forward.gate_proj.weight"},
    {"bamba", "\"mlp_bias\": false", "\"mlp_bias\": true", "feed_forward.gate_proj.bias"},
    {"bamba", "\"attention_bias\": false", "\"attention_bias\": true", "self_attn.q_proj.bias"},
    {"laguna", "\"gating\": \"per-head\"", "\"gating\": \"per-element\"", "self_attn.g_proj.weight"},
    {"laguna", "\"gating\": \"per-head\"", "\"gating\": false", "self_attn.g_proj.weight has no place"},
    {"laguna", "\"num_experts\": 8", "\"num_experts\": 7", "mlp.gate.weight"},
    {"laguna", "\"shared_expert_intermediate_size\": 20", "\"shared_expert_intermediate_size\": 24",
     "mlp.shared_expert.gate_proj.weight"},
    {"laguna", "\"head_dim\": 16", "\"head_dim\": 8", "self_attn."},
};

/* A folder of links to a case's files, but for its config, in which one text has been replaced. */
static void make_misfit(const struct misfit *row, char folder[64])
{
    char command[2048], path[512], text[8192] = "", *at;
    snprintf(folder, 64, "/tmp/test_replica.XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(command, sizeof command, "ln -s " FIXTURES "%s/*.safetensors* %s/", row->case_name, folder);
    assert_int_equal(system(command), 0);
    snprintf(path, sizeof path, FIXTURES "%s/config.json", row->case_name);
    FILE *from = fopen(path, "r");
    assert_non_null(from);
    text[fread(text, 1, sizeof text - 1, from)] = '\0';
    fclose(from);
    at = strstr(text, row->from);
    if (at == NULL)
        fail_msg("%s has no %s", row->case_name, row->from);
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *to = fopen(path, "w");
    assert_non_null(to);
    fprintf(to, "%.*s%s%s", (int)(at - text), text, row->to, at + strlen(row->from));
    assert_int_equal(fclose(to), 0);
}

static bool want_first_input(enum value_id value, int layer)
{
    return value == VALUE_LAYER_INPUT && layer == 0;
}

/* Whatever is wanted, all tensors are held against the config, also those that no wanted site needs. */
static void test_checkpoints_that_do_not_fit(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(misfits) * 2; i++) {
        const struct misfit *row = &misfits[i / 2];
        char folder[64], command[128];
        struct error error = {0};
        struct keeper k = {.wants = i % 2 == 0 ? want_everything : want_first_input,
                           .limits = {.max_tokens = 12, .max_windows = 1, .max_position = 64}};
        make_misfit(row, folder);
        assert_int_equal(model_open(folder, LOAD_DTYPE_OWN, &k.model, &error), STATUS_OK);
        assert_int_equal(backend_create_cpu(1, &k.backend, &error), STATUS_OK);
        keeper_take_sites(&k, 12, 1);
        k.observer = (struct observer){&k, keeper_wants, keeper_rows, keeper_offer};
        enum status status = replica_create(k.model, k.backend, &k.observer, &k.limits, &k.replica, &error);
        if (status != STATUS_INPUT || strstr(error.text, row->message) == NULL)
            fail_msg("%s %s: status %d, \"%s\"", row->case_name, row->to, status, error.text);
        keeper_close(&k);
        snprintf(command, sizeof command, "rm -r %s", folder);
        assert_int_equal(system(command), 0);
    }
}

/* ---- what is not wanted is not done ---- */

/* Counts what a replica asks of its backend. */
static const struct backend_ops *real_ops;
static int n_linear, n_scans, n_attention, n_norms;

static void counting_linear(struct backend *b, struct tensor x, const struct matrix *w, const float *bias,
                            struct tensor addend, struct tensor y)
{
    n_linear++;
    real_ops->linear(b, x, w, bias, addend, y);
}

static void counting_scan(struct backend *b, const struct selective_scan_args *args)
{
    n_scans++;
    real_ops->selective_scan(b, args);
}

static void counting_attention(struct backend *b, const struct attention_args *args)
{
    n_attention++;
    real_ops->attention(b, args);
}

static void counting_norm(struct backend *b, const struct norm_args *args)
{
    n_norms++;
    real_ops->rms_norm(b, args);
}

static enum value_id only_value;
static int only_layer;

static bool want_only(enum value_id value, int layer)
{
    return value == only_value && layer == only_layer;
}

struct early_stop {
    const char *case_name;
    enum value_id value;
    int layer;
    int n_linear, n_scans, n_attention, n_norms;
};

static const struct early_stop early_stops[] = {
    {"mamba", VALUE_INPUT_IDS, -1, 0, 0, 0, 0},
    {"mamba", VALUE_TOKEN_EMBEDDINGS, -1, 0, 0, 0, 0},
    {"mamba", VALUE_LAYER_INPUT, 0, 0, 0, 0, 0},
    {"mamba", VALUE_ATTENTION_NORM_OUTPUT, 1, 4, 1, 0, 2}, /* in, x, dt and out of layer 0 */
    {"mamba", VALUE_LINEAR_VALUES, 0, 1, 0, 0, 1},
    {"mamba", VALUE_LINEAR_QUERIES, 0, 2, 0, 0, 1},
    {"mamba", VALUE_LAYER_OUTPUT, 1, 8, 2, 0, 2},
    {"mamba", VALUE_FINAL_NORM_OUTPUT, -1, 12, 3, 0, 4},
    {"mamba", VALUE_LOGITS, -1, 13, 3, 0, 4},
    {"laguna", VALUE_ATTN_VALUES, 0, 1, 0, 0, 3},
    {"laguna", VALUE_ATTN_PROBABILITIES, 0, 1, 0, 1, 3},
    {"laguna", VALUE_ATTN_HEAD_OUTPUTS, 0, 1, 0, 1, 3},
    {"laguna", VALUE_ATTN_PREMIX, 0, 2, 0, 1, 3},
    {"laguna", VALUE_LAYER_MID, 0, 3, 0, 1, 3},
    {"laguna", VALUE_MLP_INPUT, 0, 3, 0, 1, 4},
    {"laguna", VALUE_MLP_NEURONS, 0, 4, 0, 1, 4},
    {"laguna", VALUE_LAYER_OUTPUT, 0, 5, 0, 1, 4},
    {"laguna", VALUE_ROUTER_LOGITS, 1, 9, 0, 2, 8}, /* 5 of layer 0, 3 of attention, the router */
};

static void check_early_stop(const struct early_stop *row, const struct keeper *all, const int32_t *ids,
                             const int32_t *lengths)
{
    char folder[512];
    struct keeper k = {.wants = want_only,
                       .limits = {.max_tokens = 30, .max_windows = 2, .max_position = 64}};
    fixture_path(folder, row->case_name);
    only_value = row->value;
    only_layer = row->layer;
    keeper_open(&k, folder, LOAD_DTYPE_OWN, 30, 2);
    struct backend_ops counting = *k.backend->ops;
    real_ops = k.backend->ops;
    counting.linear = counting_linear;
    counting.selective_scan = counting_scan;
    counting.attention = counting_attention;
    counting.rms_norm = counting_norm;
    k.backend->ops = &counting;
    n_linear = n_scans = n_attention = n_norms = 0;
    keeper_run_packed(&k, ids, lengths, 2);
    k.backend->ops = real_ops;
    if (n_linear != row->n_linear || n_scans != row->n_scans || n_attention != row->n_attention ||
        n_norms != row->n_norms)
        fail_msg("%s %s of layer %d: %d products, %d scans, %d attentions, %d norms", row->case_name,
                 catalogue_path(row->value), row->layer, n_linear, n_scans, n_attention, n_norms);
    check_close(&k, 0, all, 0, 30, row->value, row->layer, 1e-5);
    keeper_close(&k);
}

static void test_forward_ends_after_the_last_wanted_site(void **state)
{
    (void)state;
    const int32_t lengths[] = {13, 17};
    int32_t ids[30];
    struct keeper all = {0};
    fill_ids(ids, 30, 5);
    for (size_t i = 0; i < COUNT(early_stops); i++) {
        if (i == 0 || strcmp(early_stops[i].case_name, early_stops[i - 1].case_name) != 0) {
            if (i > 0)
                keeper_close(&all);
            open_packed(&all, early_stops[i].case_name, ids, lengths, 2);
        }
        check_early_stop(&early_stops[i], &all, ids, lengths);
    }
    keeper_close(&all);
}

/* ---- memory ---- */

static bool want_first_mixer(enum value_id value, int layer)
{
    return value == VALUE_LAYER_MID && layer == 0;
}

static bool wants_of_keeper_less(void *context, enum value_id value, int layer)
{
    (void)context;
    return want_first_mixer(value, layer);
}

static void test_no_allocation_in_a_forward(void **state)
{
    (void)state;
    const int32_t lengths[] = {13, 17};
    int32_t ids[30];
    fill_ids(ids, 30, 6);
    for (size_t i = 0; i < COUNT(cases); i++) {
        char folder[512];
        struct keeper k = {.wants = want_everything,
                           .limits = {.max_tokens = 30, .max_windows = 2, .max_position = 64}};
        fixture_path(folder, cases[i]);
        keeper_open(&k, folder, LOAD_DTYPE_OWN, 60, 4);
        uint64_t before = memory_allocation_count();
        keeper_run_packed(&k, ids, lengths, 2);
        keeper_run_packed(&k, ids, lengths, 2);
        assert_int_equal(memory_allocation_count(), before);
        keeper_close(&k);
    }
}

static void test_plan_says_what_is_used(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        char folder[512];
        struct error error = {0};
        struct replica_memory all, less;
        struct keeper k = {
            .wants = want_everything,
            .limits = {.max_tokens = 200, .max_windows = 7, .max_position = 300, .carry = true}};
        fixture_path(folder, cases[i]);
        keeper_open(&k, folder, LOAD_DTYPE_OWN, 200, 7);
        struct observer observer = {&k, wants_of_keeper_less, keeper_rows, keeper_offer};
        assert_int_equal(replica_plan(k.model, k.backend, &k.observer, &k.limits, &all, &error), STATUS_OK);
        assert_int_equal(replica_plan(k.model, k.backend, &observer, &k.limits, &less, &error), STATUS_OK);
        assert_true(less.weights < all.weights && less.workspace < all.workspace && less.carry < all.carry);
        size_t used = memory_in_use();
        replica_destroy(k.replica);
        k.replica = NULL;
        size_t freed = used - memory_in_use(), planned = all.weights + all.workspace + all.carry;
        /* The lists of rows on the host and of the weights come on top, and whatever the library counts
         * itself. */
        if (planned > freed + all.weights || freed > planned + 200 * 64 + 65536)
            fail_msg("%s: %zu bytes planned, %zu freed", cases[i], planned, freed);
        keeper_close(&k);
    }
}

static void test_every_allocation_may_fail(void **state)
{
    (void)state;
    const char *const families[] = {"mamba", "jamba", "bamba", "laguna"};
    for (size_t i = 0; i < COUNT(families); i++) {
        char folder[512];
        struct keeper k = {.wants = want_everything,
                           .limits = {.max_tokens = 30, .max_windows = 2, .max_position = 64, .carry = true}};
        fixture_path(folder, families[i]);
        keeper_open(&k, folder, LOAD_DTYPE_OWN, 30, 2);
        replica_destroy(k.replica);
        k.replica = NULL;
        size_t used = memory_in_use();
        int n = 0;
        for (;; n++) {
            struct error error = {0};
            memory_fail_at(n);
            enum status status =
                replica_create(k.model, k.backend, &k.observer, &k.limits, &k.replica, &error);
            memory_fail_at(-1);
            if (status == STATUS_OK)
                break;
            assert_int_equal(status, STATUS_RESOURCE);
            assert_int_equal(error.status, STATUS_RESOURCE);
            assert_int_equal(memory_in_use(), used);
        }
        assert_true(n > 20);
        keeper_close(&k);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_values),
        cmocka_unit_test(test_golden_values_in_small_pieces),
        cmocka_unit_test(test_bfloat16_files_in_float32),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_neighbours_do_not_touch),
        cmocka_unit_test(test_place_in_the_batch_does_not_matter),
        cmocka_unit_test(test_carry_over_long_documents),
        cmocka_unit_test(test_carry_over_short_windows),
        cmocka_unit_test(test_identities),
        cmocka_unit_test(test_an_edited_stream_is_what_goes_on),
        cmocka_unit_test(test_checkpoints_that_do_not_fit),
        cmocka_unit_test(test_forward_ends_after_the_last_wanted_site),
        cmocka_unit_test(test_no_allocation_in_a_forward),
        cmocka_unit_test(test_plan_says_what_is_used),
        cmocka_unit_test(test_every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
