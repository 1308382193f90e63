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

/* All documents' rows of a site; NULL where the golden file has no such value. */
static float *read_site(const struct comparison *c, hid_t file, enum value_id value, int layer)
{
    const struct kept *site = keeper_get(c->k, value, layer);
    float *all = malloc((size_t)(c->corpus.n_tokens * site->width) * sizeof *all), *at = all;
    for (int d = 0; d < c->corpus.n_documents; d++) {
        if (!read_document(c, file, value, layer, d, at)) {
            free(all);
            return NULL;
        }
        at += site->width * (catalogue_get(value)->per == PER_SEQUENCE ? 1 : c->corpus.lengths[d]);
    }
    return all;
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
        if (!row_counts(c, value, i / site->width))
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

static hid_t open_golden(const char *case_name, const char *file)
{
    char path[512];
    hid_t id = -1;
    snprintf(path, sizeof path, FIXTURES "%s/%s", case_name, file);
    if (access(path, R_OK) == 0)
        id = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    return id;
}

/* A small piece_bytes cuts everything large into many pieces. */
static void check_case(const char *case_name, int load_dtype, size_t piece_bytes)
{
    char folder[512];
    snprintf(folder, sizeof folder, FIXTURES "%s", case_name);
    struct comparison c = {.golden = open_golden(case_name, "golden.h5"),
                           .exact = open_golden(case_name, "golden_float32.h5")};
    assert_true(c.golden >= 0);
    c.corpus = read_corpus(c.golden);
    if (load_dtype == DTYPE_F32 && c.exact >= 0) { /* a bfloat16 case loaded in float32 */
        H5Fclose(c.golden);
        c.golden = c.exact;
        c.exact = -1;
    }
    struct keeper k = {
        .wants = want_everything,
        .limits = {.max_tokens = 50, .max_windows = 5, .max_position = 24, .piece_bytes = piece_bytes}};
    keeper_open(&k, folder, load_dtype, c.corpus.n_tokens, c.corpus.n_documents);
    keeper_run_packed(&k, c.corpus.ids, c.corpus.lengths, c.corpus.n_documents);
    c.k = &k;
    compare_all(&c);
    assert_true(c.n_compared > 30);
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
        check_case(cases[i], LOAD_DTYPE_OWN, 0);
    }
}

static void test_golden_values_in_small_pieces(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++)
        check_case(cases[i], LOAD_DTYPE_OWN, 5000);
}

static void test_bfloat16_files_in_float32(void **state)
{
    (void)state;
    check_case("mamba-bf16", DTYPE_F32, 0);
    check_case("jamba-bf16", DTYPE_F32, 0);
    check_case("bamba-bf16", DTYPE_F32, 0);
    check_case("laguna-bf16", DTYPE_F32, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_values),
        cmocka_unit_test(test_golden_values_in_small_pieces),
        cmocka_unit_test(test_bfloat16_files_in_float32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
