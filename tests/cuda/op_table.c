/* Every operation over a table of shapes and dtypes: the CUDA backend against the CPU's.
 *
 * Built twice. With ACTDUMP_EMULATED the same kernel sources run on the emulated device, with threads
 * forwards, backwards and shuffled, and small transfer buffers; else on the machine's first GPU, and without
 * one the test skips. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/cuda/cuda_backend.h"
#include "tests/cuda/op_pair.h"
#ifdef ACTDUMP_EMULATED
#include "kernels/cuda/internal.h"
#include "tests/emulation/emulation.h"
#endif

static struct pair pair;

/* Loads: what x and w are, and what comes out. */
struct dtypes {
    enum dtype in, out;
};
static const struct dtypes all_dtypes[] = {
    {DTYPE_F32, DTYPE_F32}, {DTYPE_BF16, DTYPE_BF16}, {DTYPE_BF16, DTYPE_F32}, {DTYPE_F32, DTYPE_BF16}};

struct shape {
    int64_t rows, cols;
};
/* One row and column, below and above a warp, above a block, widths that allow 16-byte moves and that do not.
 */
static const struct shape shapes[] = {{1, 1},   {3, 8},   {5, 33},   {2, 64},
                                      {7, 100}, {4, 264}, {3, 1100}, {2, 2056}};

static struct backend *backend_of(int side)
{
    return side == 0 ? pair.reference : pair.tested;
}

static struct tensor tensor_of(const struct twin *twin, int side)
{
    return side == 0 ? twin->reference : twin->tested;
}

static float *floats_of(const struct twin *twin, int side)
{
    return tensor_of(twin, side).data;
}

static struct twin random_twin(enum dtype dtype, int64_t rows, int64_t cols, double deviation)
{
    /* Gaps of 8 keep rows wide, those of 5 do not. */
    int64_t gap = pair_uniform(&pair) < 0.5 ? 8 : 5;
    return twin_random(&pair, (struct twin_shape){dtype, rows, cols, gap, 0}, 0, deviation);
}

static struct twin output_twin(enum dtype dtype, int64_t rows, int64_t cols)
{
    int64_t gap = pair_uniform(&pair) < 0.5 ? 8 : 3;
    return twin_create(&pair, (struct twin_shape){dtype, rows, cols, gap, 0});
}

/* Vectors and other arrays without gaps. */
static struct twin random_floats(int64_t rows, int64_t cols, double mean, double deviation)
{
    return twin_random(&pair, (struct twin_shape){DTYPE_F32, rows, cols, 0, 0}, mean, deviation);
}

static struct twin absent(void)
{
    return (struct twin){0};
}

static void destroy_all(struct twin *const *twins, size_t n)
{
    for (size_t i = 0; i < n; i++)
        twin_destroy(twins[i]);
}
#define DESTROY(...)                                                                                         \
    destroy_all((struct twin *const[]){__VA_ARGS__},                                                         \
                sizeof((struct twin *const[]){__VA_ARGS__}) / sizeof(struct twin *))

/* A copy of runs or rows that is scribbled over after the operation. */
struct lent {
    void *memory;
    size_t bytes;
};

static struct lent lend(const void *from, size_t bytes)
{
    struct lent lent = {malloc(bytes + 1), bytes};
    assert_non_null(lent.memory);
    if (bytes > 0)
        memcpy(lent.memory, from, bytes);
    return lent;
}

static void take_back(struct lent *lent)
{
    scribble(lent->memory, lent->bytes);
}

static void free_lent(struct lent *lent)
{
    free(lent->memory);
}

/* ---- element-wise ---- */

static void test_add(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(shapes); i++) {
        for (size_t d = 0; d < COUNT(all_dtypes); d++) {
            struct shape s = shapes[i];
            pair_note(&pair, "add [%d, %d] dtypes %d", (int)s.rows, (int)s.cols, (int)d);
            struct twin x = random_twin(all_dtypes[d].in, s.rows, s.cols, 1);
            struct twin y = random_twin(all_dtypes[d].out, s.rows, s.cols, 1);
            struct twin out = output_twin(all_dtypes[d].out, s.rows, s.cols);
            struct twin scaled = output_twin(all_dtypes[d].in, s.rows, s.cols);
            for (int side = 0; side < 2; side++) {
                struct backend *b = backend_of(side);
                b->ops->add(b, tensor_of(&x, side), tensor_of(&y, side), tensor_of(&out, side));
                b->ops->add_scaled(b, tensor_of(&x, side), tensor_of(&y, side), 2.5f,
                                   tensor_of(&scaled, side));
                b->ops->add(b, tensor_of(&x, side), tensor_of(&y, side), tensor_of(&x, side)); /* in place */
            }
            twin_check(&out, "out", 0, 1e-6);
            twin_check(&scaled, "scaled", 1e-6, 1e-6);
            twin_check(&x, "in place", 0, 1e-6);
            DESTROY(&x, &y, &out, &scaled);
        }
    }
}

static void test_silu_mul(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(shapes); i++) {
        for (size_t d = 0; d < COUNT(all_dtypes); d++) {
            struct shape s = shapes[i];
            pair_note(&pair, "silu_mul [%d, %d] dtypes %d", (int)s.rows, (int)s.cols, (int)d);
            struct twin gate = random_twin(all_dtypes[d].in, s.rows, s.cols, 3);
            struct twin up = random_twin(all_dtypes[d].in, s.rows, s.cols, 1);
            struct twin y = output_twin(all_dtypes[d].out, s.rows, s.cols);
            struct twin activation = i % 2 == 0 ? output_twin(all_dtypes[d].out, s.rows, s.cols) : absent();
            for (int side = 0; side < 2; side++) {
                struct backend *b = backend_of(side);
                b->ops->silu_mul(b, tensor_of(&gate, side), tensor_of(&up, side),
                                 tensor_of(&activation, side), tensor_of(&y, side));
            }
            twin_check(&y, "y", 1e-6, 1e-5);
            if (activation.pair != NULL)
                twin_check(&activation, "activation", 1e-6, 1e-5);
            DESTROY(&gate, &up, &y, &activation);
        }
    }
}

static void test_softplus_gate(void **state)
{
    static const struct {
        int64_t rows;
        int heads, head_dim;
    } table[] = {{1, 1, 1}, {3, 2, 16}, {5, 3, 5}, {2, 40, 8}};
    (void)state;
    for (size_t i = 0; i < COUNT(table); i++) {
        for (size_t d = 0; d < 2 * COUNT(all_dtypes); d++) {
            struct dtypes t = all_dtypes[d / 2];
            int64_t width = (int64_t)table[i].heads * table[i].head_dim;
            bool per_head = d % 2 == 0;
            pair_note(&pair, "softplus_gate row %d dtypes %d", (int)i, (int)d);
            struct twin x = random_twin(t.in, table[i].rows, width, 1);
            struct twin gate = random_twin(t.in, table[i].rows, per_head ? table[i].heads : width, 8);
            struct twin y = output_twin(t.out, table[i].rows, width);
            for (int side = 0; side < 2; side++) {
                struct backend *b = backend_of(side);
                b->ops->softplus_gate(b, tensor_of(&x, side), tensor_of(&gate, side), table[i].head_dim,
                                      tensor_of(&y, side));
            }
            twin_check(&y, "y", 1e-6, 1e-5);
            DESTROY(&x, &gate, &y);
        }
    }
}

static void test_softmax(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(shapes); i++) {
        for (size_t d = 0; d < COUNT(all_dtypes); d++) {
            struct shape s = shapes[i];
            pair_note(&pair, "softmax [%d, %d] dtypes %d", (int)s.rows, (int)s.cols, (int)d);
            struct twin x = random_twin(all_dtypes[d].in, s.rows, s.cols, 6);
            if (s.cols > 2) {
                twin_set(&x, 0, 1, -INFINITY);
                twin_set(&x, s.rows - 1, s.cols - 1, 300);
                twin_upload(&x);
            }
            struct twin y = output_twin(all_dtypes[d].out, s.rows, s.cols);
            for (int side = 0; side < 2; side++) {
                struct backend *b = backend_of(side);
                b->ops->softmax(b, tensor_of(&x, side), tensor_of(&y, side));
            }
            twin_check(&y, "y", 1e-7, 2e-5);
            DESTROY(&x, &y);
        }
    }
}

static void check_norm(struct shape s, int64_t group, struct dtypes t, bool gated, bool weight_per_group,
                       bool in_place)
{
    struct twin x = random_twin(t.in, s.rows, s.cols, 2);
    struct twin gate = gated ? random_twin(t.in, s.rows, s.cols, 2) : absent();
    struct twin weight = random_floats(1, weight_per_group ? group : s.cols, 1, 0.2);
    struct twin y = output_twin(t.out, s.rows, s.cols);
    for (int side = 0; side < 2; side++) {
        struct backend *b = backend_of(side);
        struct norm_args args = {.x = tensor_of(&x, side),
                                 .gate = tensor_of(&gate, side),
                                 .weight = floats_of(&weight, side),
                                 .group = group,
                                 .weight_per_group = weight_per_group,
                                 .epsilon = 1e-5f,
                                 .y = tensor_of(in_place ? &x : &y, side)};
        b->ops->rms_norm(b, &args);
    }
    twin_check(in_place ? &x : &y, "y", 1e-5, 1e-5);
    DESTROY(&x, &gate, &weight, &y);
}

static void test_rms_norm(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (size_t d = 0; d < COUNT(all_dtypes); d++)
            for (int variant = 0; variant < 4; variant++) {
                struct shape s = shapes[i];
                pair_note(&pair, "rms_norm [%d, %d] dtypes %d variant %d", (int)s.rows, (int)s.cols, (int)d,
                          variant);
                check_norm(s, s.cols, all_dtypes[d], variant % 2 == 1, false, variant >= 2);
            }
    pair_note(&pair, "rms_norm in groups");
    check_norm((struct shape){5, 96}, 32, all_dtypes[1], true, false, false);
    check_norm((struct shape){5, 96}, 32, all_dtypes[0], false, true, true);
    check_norm((struct shape){3, 60}, 20, all_dtypes[2], false, true, false);
}

/* ---- rows ---- */

static struct twin random_ids(int64_t n, int limit)
{
    struct twin ids = twin_create(&pair, (struct twin_shape){DTYPE_I32, 1, n, 0, 0});
    for (int64_t i = 0; i < n; i++)
        twin_set(&ids, 0, i, (float)(int)(pair_uniform(&pair) * limit));
    twin_upload(&ids);
    return ids;
}

static void test_embed(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(shapes); i++) {
        for (size_t d = 0; d < COUNT(all_dtypes); d++) {
            struct shape s = shapes[i];
            pair_note(&pair, "embed [%d, %d] dtypes %d", (int)s.rows, (int)s.cols, (int)d);
            struct twin table = random_twin(all_dtypes[d].in, 11, s.cols, 1), ids = random_ids(s.rows, 11);
            struct twin out = output_twin(all_dtypes[d].out, s.rows, s.cols);
            for (int side = 0; side < 2; side++) {
                struct backend *b = backend_of(side);
                b->ops->embed(b, tensor_of(&table, side), tensor_of(&ids, side).data, tensor_of(&out, side));
            }
            twin_check_same(&out, "out");
            DESTROY(&table, &ids, &out);
        }
    }
}

static void test_gather_rows(void **state)
{
    static const enum dtype from[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I32};
    static const enum dtype to[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I32};
    (void)state;
    for (size_t i = 0; i < COUNT(from) * COUNT(to) * COUNT(shapes); i++) {
        enum dtype in = from[i % COUNT(from)], out_dtype = to[i / COUNT(from) % COUNT(to)];
        struct shape s = shapes[i / (COUNT(from) * COUNT(to))];
        if ((in == DTYPE_I32) != (out_dtype == DTYPE_I32))
            continue;
        pair_note(&pair, "gather_rows [%d, %d] %s to %s", (int)s.rows, (int)s.cols, dtype_name(in),
                  dtype_name(out_dtype));
        struct twin x = random_twin(in, s.rows + 20, s.cols, 100);
        struct row_list rows = rows_make(s.rows + 20, 3, 2);
        struct twin out = output_twin(out_dtype, rows.n, s.cols);
        for (int side = 0; side < 2; side++) {
            struct lent lent = lend(rows.index, (size_t)rows.n * sizeof(int32_t));
            struct backend *b = backend_of(side);
            b->ops->gather_rows(b, tensor_of(&x, side), (struct row_list){lent.memory, rows.n},
                                tensor_of(&out, side));
            take_back(&lent);
            pair_synchronize(&pair);
            free_lent(&lent);
        }
        twin_check_same(&out, "out");
        free((void *)(uintptr_t)rows.index);
        DESTROY(&x, &out);
    }
}

/* Many lists on their way at once: more than the ring that they go up through holds. */
/* What the captures' way out is asked for, one post after the other, is what `collect` of the CPU's gives,
 * whatever the pieces in which it is taken: posts go out as long as there is room, so the ring comes round
 * many times. */
struct way {
    struct backend *b;
    const unsigned char *expected;
    size_t n_posted, n_taken; /* bytes */
    int64_t n_overflow;
};

static void take_some(struct way *way, size_t bytes)
{
    struct error error = {0};
    unsigned char *host = malloc(bytes + 16);
    memset(host, GUARD_BYTE, bytes + 16);
    if (way->b->captures->take(way->b, host, bytes, &way->n_overflow, &error) != STATUS_OK)
        fail_msg("%s: %s", pair.row, error.text);
    if (memcmp(host, way->expected + way->n_taken, bytes) != 0)
        fail_msg("%s: bytes %zu to %zu differ", pair.row, way->n_taken, way->n_taken + bytes);
    for (int i = 0; i < 16; i++)
        assert_int_equal(host[bytes + (size_t)i], GUARD_BYTE);
    way->n_taken += bytes;
    free(host);
}

static size_t at_most(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Every third post has its rows the other way round, so that posts which lie four apart differ. */
static void turn_rows(const struct row_list *rows, int post, int32_t *out)
{
    for (int64_t i = 0; i < rows->n; i++)
        out[i] = rows->index[post % 3 == 0 ? rows->n - 1 - i : i];
}

static void check_captures(enum dtype in, enum dtype to, int64_t n_rows, int64_t cols)
{
    enum { POSTS = 9 };
    struct twin x = random_twin(in, n_rows, cols, in == DTYPE_I32 ? 50 : 50000);
    if (in != DTYPE_I32) {
        twin_set(&x, 0, 0, INFINITY);
        twin_set(&x, n_rows - 1, cols - 1, -INFINITY);
        twin_set(&x, n_rows / 2, cols / 2, 65520); /* the least that rounds to infinity */
        twin_upload(&x);
    }
    struct row_list rows = rows_make(n_rows, n_rows > 1, 2);
    int32_t *turned = malloc((size_t)rows.n * sizeof *turned);
    size_t bytes = (size_t)(rows.n * cols) * dtype_size(to);
    unsigned char *expected = malloc(POSTS * bytes);
    float *wide = malloc((size_t)(rows.n * cols) * sizeof *wide);
    int64_t n_overflow = 0;
    for (int i = 0; i < POSTS; i++) {
        turn_rows(&rows, i, turned);
        pair.reference->ops->collect(pair.reference, x.reference, turned, rows.n, to,
                                     expected + (size_t)i * bytes);
    }
    if (to == DTYPE_F16) {
        pair.reference->ops->collect(pair.reference, x.reference, rows.index, rows.n, DTYPE_F32, wide);
        for (int64_t i = 0; i < rows.n * cols; i++)
            n_overflow += isfinite(wide[i]) && fabsf(wide[i]) >= 65520;
    }
    struct way way = {.b = pair.tested, .expected = expected};
    for (int i = 0; i < POSTS; i++) {
        turn_rows(&rows, i, turned);
        struct lent lent = lend(turned, (size_t)rows.n * sizeof(int32_t));
        while (!way.b->captures->post(way.b, x.tested, lent.memory, rows.n, to)) {
            assert_int_equal(way.b->error.status, STATUS_OK);
            assert_true(way.n_taken < way.n_posted);
            take_some(&way, at_most(bytes / 2 + 1, way.n_posted - way.n_taken));
        }
        take_back(&lent);
        free_lent(&lent);
        way.n_posted += bytes;
    }
    while (way.n_taken < way.n_posted)
        take_some(&way, at_most(1000, way.n_posted - way.n_taken));
    if (way.n_overflow != POSTS * n_overflow)
        fail_msg("%s: %lld elements overflowed instead of %lld", pair.row, (long long)way.n_overflow,
                 (long long)(POSTS * n_overflow));
    pair_synchronize(&pair);
    free(wide);
    free(turned);
    free(expected);
    free((void *)(uintptr_t)rows.index);
    DESTROY(&x);
}

static void test_captures(void **state)
{
    static const struct dtypes table[] = {
        {DTYPE_F32, DTYPE_F32},   {DTYPE_F32, DTYPE_BF16}, {DTYPE_F32, DTYPE_F16}, {DTYPE_BF16, DTYPE_F32},
        {DTYPE_BF16, DTYPE_BF16}, {DTYPE_BF16, DTYPE_F16}, {DTYPE_I32, DTYPE_I32}, {DTYPE_I32, DTYPE_I64}};
    struct error error = {0};
    (void)state;
    /* four of the largest of these posts, so that nine of it do not fit */
    assert_int_equal(pair.tested->captures->reserve(pair.tested, 4 * (2 * 1100 * 8 + 512), &error),
                     STATUS_OK);
    for (size_t i = 0; i < COUNT(table); i++) {
        for (size_t k = 0; k < COUNT(shapes); k++) {
            pair_note(&pair, "capture %s to %s shape %d", dtype_name(table[i].in), dtype_name(table[i].out),
                      (int)k);
            check_captures(table[i].in, table[i].out, shapes[k].rows + 1, shapes[k].cols);
        }
    }
    /* what nobody took is forgotten */
    struct twin x = random_twin(DTYPE_F32, 2, 3, 1);
    int32_t row = 1;
    assert_true(pair.tested->captures->post(pair.tested, x.tested, &row, 1, DTYPE_F32));
    pair.tested->captures->drop(pair.tested);
    check_captures(DTYPE_F32, DTYPE_F32, 3, 5);
    twin_destroy(&x);
}

static void test_many_lists(void **state)
{
    enum { LISTS = 40, ROWS = 37 };
    struct twin x = random_twin(DTYPE_F32, 100, 16, 1), out[LISTS];
    int32_t index[ROWS];
    (void)state;
    pair_note(&pair, "many lists");
    for (int i = 0; i < LISTS; i++)
        out[i] = output_twin(DTYPE_F32, ROWS, 16);
    for (int side = 0; side < 2; side++) {
        struct backend *b = backend_of(side);
        for (int i = 0; i < LISTS; i++) {
            for (int r = 0; r < ROWS; r++)
                index[r] = r + i;
            b->ops->gather_rows(b, tensor_of(&x, side), (struct row_list){index, ROWS},
                                tensor_of(&out[i], side));
            scribble(index, sizeof index);
        }
    }
    for (int i = 0; i < LISTS; i++) {
        twin_check_same(&out[i], "out");
        twin_destroy(&out[i]);
    }
    twin_destroy(&x);
}

/* collect's answers come to the host: kept for both sides and compared byte for byte. */
static void check_collect(enum dtype in, enum dtype to, int64_t n_rows, int64_t cols, bool all)
{
    struct twin x = random_twin(in, n_rows, cols, 50);
    struct row_list rows = rows_make(n_rows, all ? 0 : 1, all ? 1 : 3);
    size_t bytes = (size_t)(rows.n * cols) * dtype_size(to), n_calls = 3;
    unsigned char *host[2];
    for (int side = 0; side < 2; side++) {
        struct backend *b = backend_of(side);
        struct lent lent = lend(rows.index, (size_t)rows.n * sizeof(int32_t));
        host[side] = malloc(n_calls * bytes + 16);
        memset(host[side], GUARD_BYTE, n_calls * bytes + 16);
        for (size_t call = 0; call < n_calls; call++)
            b->ops->collect(b, tensor_of(&x, side), all ? NULL : lent.memory, rows.n, to,
                            host[side] + call * bytes);
        take_back(&lent);
        pair_synchronize(&pair);
        free_lent(&lent);
    }
    if (memcmp(host[0], host[1], n_calls * bytes + 16) != 0)
        fail_msg("%s: the host's copies differ", pair.row);
    for (int side = 0; side < 2; side++)
        free(host[side]);
    free((void *)(uintptr_t)rows.index);
    DESTROY(&x);
}

static void test_collect(void **state)
{
    static const enum dtype from[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I32};
    static const enum dtype to[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I32, DTYPE_I64};
    (void)state;
    for (size_t i = 0; i < COUNT(from); i++) {
        for (size_t j = 0; j < COUNT(to); j++) {
            if ((from[i] == DTYPE_I32) == dtype_is_float(to[j]))
                continue;
            for (size_t k = 0; k < 2 * COUNT(shapes); k++) {
                pair_note(&pair, "collect %s to %s shape %d", dtype_name(from[i]), dtype_name(to[j]), (int)k);
                check_collect(from[i], to[j], shapes[k / 2].rows + 9, shapes[k / 2].cols, k % 2 == 0);
            }
        }
    }
}

static void test_copies(void **state)
{
    (void)state;
    for (size_t bytes = 0; bytes < 200000; bytes = bytes * 3 + 1) {
        struct backend *b = pair.tested;
        unsigned char *sent = malloc(bytes + 1), *got = malloc(bytes + 1);
        void *memory;
        struct error error = {0};
        pair_note(&pair, "copies of %d bytes", (int)bytes);
        assert_int_equal(b->ops->allocate(b, &memory, bytes, "a test", &error), STATUS_OK);
        b->ops->download(b, got, memory, bytes);
        for (size_t i = 0; i < bytes; i++) {
            assert_int_equal(got[i], 0);
            sent[i] = (unsigned char)(i * 31 + i / 256);
        }
        b->ops->upload(b, memory, sent, bytes);
        memset(got, 0, bytes + 1);
        b->ops->download(b, got, memory, bytes);
        assert_memory_equal(sent, got, bytes);
        b->ops->release(b, memory);
        b->ops->release(b, NULL);
        pair_synchronize(&pair);
        free(sent);
        free(got);
    }
}

/* ---- matrix products ---- */

static struct matrix *make_matrix(struct backend *b, const struct tensor *w, enum dtype compute)
{
    struct matrix *matrix = NULL;
    struct error error = {0};
    if (b->ops->matrix_create(b, w, compute, "a test's matrix", &matrix, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    return matrix;
}

struct linear_case {
    int64_t rows, n, k;
    enum dtype file, compute, x, y;
    int bias, addend; /* addend: 0 none, 1 of y's dtype, 2 y itself, 3 of the other dtype */
};

static const struct linear_case linear_cases[] = {
    {1, 1, 1, DTYPE_F32, DTYPE_F32, DTYPE_F32, DTYPE_F32, 0, 0},
    {5, 33, 17, DTYPE_F32, DTYPE_F32, DTYPE_F32, DTYPE_F32, 1, 0},
    {7, 64, 48, DTYPE_BF16, DTYPE_F32, DTYPE_F32, DTYPE_F32, 0, 1},
    {7, 40, 96, DTYPE_F16, DTYPE_F32, DTYPE_F32, DTYPE_F32, 1, 2},
    {9, 72, 64, DTYPE_F32, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, 0, 0},
    {9, 72, 64, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, 0, 1},
    {9, 30, 65, DTYPE_F16, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, 1, 2},
    {9, 32, 64, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, DTYPE_F32, 0, 2},
    {9, 32, 64, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, DTYPE_F32, 0, 3},
    {70, 24, 40, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, 0, 3},
};

static void check_linear(const struct linear_case *c)
{
    struct tensor host_w;
    struct twin w = twin_random(&pair, (struct twin_shape){c->file, c->n, c->k, 3, 0}, 0, 0.2);
    struct twin x = random_twin(c->x, c->rows, c->k, 1), bias = random_floats(1, c->n, 0, 1);
    enum dtype other = c->y == DTYPE_F32 ? DTYPE_BF16 : DTYPE_F32;
    struct twin y = c->addend == 2 ? random_twin(c->y, c->rows, c->n, 1) : output_twin(c->y, c->rows, c->n);
    struct twin addend = c->addend == 1 || c->addend == 3
                             ? random_twin(c->addend == 1 ? c->y : other, c->rows, c->n, 1)
                             : absent();
    host_w = w.tested;
    host_w.data = w.before + w.data_at;
    for (int side = 0; side < 2; side++) {
        struct backend *b = backend_of(side);
        struct matrix *matrix = make_matrix(b, &host_w, c->compute);
        b->ops->linear(b, tensor_of(&x, side), matrix, c->bias ? floats_of(&bias, side) : NULL,
                       tensor_of(c->addend == 2 ? &y : &addend, side), tensor_of(&y, side));
        pair_synchronize(&pair);
        b->ops->matrix_destroy(b, matrix);
    }
    twin_check(&y, "y", 2e-5, 2e-5);
    DESTROY(&w, &x, &bias, &y, &addend);
}

static void test_linear(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(linear_cases); i++) {
        pair_note(&pair, "linear row %d", (int)i);
        check_linear(&linear_cases[i]);
    }
}

/* ---- convolution and scans ---- */

#define MAX_RUNS 16
/* Lengths of runs; together with chunks, tiles and stretches they end before, at and behind boundaries. */
static const int run_lengths[][MAX_RUNS] = {
    {1}, {5}, {1, 1, 2, 3}, {32, 33, 1, 31}, {64, 65, 3}, {130, 2}, {200}, {17, 90, 40},
};

static void check_conv(const int *lengths, int64_t channels, int kernel, struct dtypes t, int carry)
{
    struct run_table table;
    run_table_make(&table, lengths, carry & 1, carry & 2);
    struct twin x = random_twin(t.in, table.n_tokens, channels, 1);
    struct twin weight = random_floats(kernel, channels, 0, 0.5), bias = random_floats(1, channels, 0, 0.5);
    struct twin tail = random_floats(kernel > 1 ? kernel - 1 : 1, channels, 0, 1);
    struct twin y = output_twin(t.out, table.n_tokens, channels);
    for (int side = 0; side < 2; side++) {
        struct backend *b = backend_of(side);
        struct lent lent = lend(table.list, sizeof table.list);
        struct conv_args args = {.x = tensor_of(&x, side),
                                 .weight = floats_of(&weight, side),
                                 .bias = channels % 2 == 0 ? floats_of(&bias, side) : NULL,
                                 .kernel = kernel,
                                 .runs = table.runs,
                                 .tail = carry ? floats_of(&tail, side) : NULL,
                                 .y = tensor_of(&y, side)};
        args.runs.list = lent.memory;
        b->ops->conv_silu(b, &args);
        take_back(&lent);
        pair_synchronize(&pair);
        free_lent(&lent);
    }
    twin_check(&y, "y", 1e-5, 1e-5);
    twin_check_same(&tail, "tail");
    DESTROY(&x, &weight, &bias, &tail, &y);
}

static void test_conv_silu(void **state)
{
    static const int64_t channels[] = {1, 40, 130};
    static const int kernels[] = {1, 2, 3, 4, 6};
    (void)state;
    for (size_t r = 0; r < COUNT(run_lengths); r++)
        for (size_t c = 0; c < COUNT(channels); c++)
            for (size_t k = 0; k < COUNT(kernels); k++) {
                int carry = (int)((r + c + k) % 4);
                struct dtypes t = all_dtypes[(r + 2 * c + k) % COUNT(all_dtypes)];
                pair_note(&pair, "conv_silu runs %d channels %d kernel %d carry %d", (int)r, (int)channels[c],
                          kernels[k], carry);
                check_conv(run_lengths[r], channels[c], kernels[k], t, carry);
            }
}

struct scan_case {
    int runs; /* index in run_lengths */
    int64_t channels;
    int state_dim;
    struct dtypes dtypes;
    bool gated, captured;
    int carry;
    bool in_place; /* y is x */
};

static const struct scan_case scan_cases[] = {
    {0, 1, 1, {DTYPE_F32, DTYPE_F32}, false, false, 0, false},
    {1, 5, 4, {DTYPE_F32, DTYPE_F32}, true, true, 0, false},
    {2, 130, 8, {DTYPE_F32, DTYPE_F32}, true, true, 3, false},
    {3, 32, 16, {DTYPE_F32, DTYPE_F32}, true, true, 3, false},
    {4, 20, 16, {DTYPE_BF16, DTYPE_BF16}, true, true, 0, false},
    {5, 140, 16, {DTYPE_BF16, DTYPE_BF16}, true, false, 2, false},
    {6, 33, 17, {DTYPE_BF16, DTYPE_BF16}, false, true, 1, false},
    {7, 12, 40, {DTYPE_F32, DTYPE_F32}, true, true, 3, false},
    {6, 2000, 16, {DTYPE_BF16, DTYPE_BF16}, true, false, 0, false},
    {7, 9, 100, {DTYPE_F32, DTYPE_BF16}, true, true, 2, false},
    {6, 10, 16, {DTYPE_F32, DTYPE_F32}, true, true, 3, false},
    {6, 130, 16, {DTYPE_F32, DTYPE_F32}, true, true, 3, true},
    {7, 9, 40, {DTYPE_BF16, DTYPE_BF16}, true, true, 0, true},
    {6, 2000, 16, {DTYPE_BF16, DTYPE_BF16}, true, false, 0, true},
};

static void check_scan(const struct scan_case *c)
{
    struct run_table table;
    run_table_make(&table, run_lengths[c->runs], c->carry & 1, c->carry & 2);
    int64_t T = table.n_tokens, C = c->channels, N = c->state_dim;
    struct row_list states = rows_make(c->captured ? T : 0, 2, 7),
                    decays = rows_make(c->captured ? T : 0, 0, 31);
    struct twin x = random_twin(c->dtypes.in, T, C, 1), dt = random_twin(c->dtypes.in, T, C, 1);
    struct twin B = random_twin(c->dtypes.in, T, N, 1), Cs = random_twin(c->dtypes.in, T, N, 1);
    struct twin z = c->gated ? random_twin(c->dtypes.in, T, C, 1) : absent();
    struct twin bias = random_floats(1, C, -2, 1), A = random_floats(N, C, -2, 0.5),
                D = random_floats(1, C, 1, 0.2);
    struct twin carry = random_floats(N, C, 0, 1), y = output_twin(c->dtypes.out, T, C);
    struct twin betas = c->captured ? output_twin(DTYPE_F32, T, C) : absent();
    struct twin outputs = c->captured ? output_twin(DTYPE_F32, T, C) : absent();
    struct twin state_out = c->captured ? output_twin(DTYPE_F32, states.n, C * N) : absent();
    struct twin decay_out = c->captured ? output_twin(DTYPE_F32, decays.n, C * N) : absent();
    for (int side = 0; side < 2; side++) {
        struct backend *b = backend_of(side);
        struct lent runs = lend(table.list, sizeof table.list);
        struct lent s_rows = lend(states.index, (size_t)states.n * sizeof(int32_t));
        struct lent d_rows = lend(decays.index, (size_t)decays.n * sizeof(int32_t));
        struct selective_scan_args args = {.x = tensor_of(&x, side),
                                           .dt = tensor_of(&dt, side),
                                           .B = tensor_of(&B, side),
                                           .C = tensor_of(&Cs, side),
                                           .z = tensor_of(&z, side),
                                           .dt_bias = floats_of(&bias, side),
                                           .A = floats_of(&A, side),
                                           .D = floats_of(&D, side),
                                           .state_dim = c->state_dim,
                                           .runs = table.runs,
                                           .carry = c->carry ? floats_of(&carry, side) : NULL,
                                           .y = tensor_of(c->in_place ? &x : &y, side),
                                           .betas = tensor_of(&betas, side),
                                           .outputs = tensor_of(&outputs, side),
                                           .state_rows = {s_rows.memory, states.n},
                                           .states = tensor_of(&state_out, side),
                                           .decay_rows = {d_rows.memory, decays.n},
                                           .decays = tensor_of(&decay_out, side)};
        args.runs.list = runs.memory;
        b->ops->selective_scan(b, &args);
        take_back(&runs);
        take_back(&s_rows);
        take_back(&d_rows);
        pair_synchronize(&pair);
        free_lent(&runs);
        free_lent(&s_rows);
        free_lent(&d_rows);
    }
    twin_check(c->in_place ? &x : &y, "y", 5e-5, 2e-5);
    twin_check(&carry, "carry", 2e-5, 2e-5);
    if (c->captured) {
        twin_check(&betas, "betas", 1e-6, 1e-5);
        twin_check(&outputs, "outputs", 5e-5, 2e-5);
        twin_check(&state_out, "states", 2e-5, 2e-5);
        twin_check(&decay_out, "decays", 1e-6, 1e-5);
    }
    free((void *)(uintptr_t)states.index);
    free((void *)(uintptr_t)decays.index);
    DESTROY(&x, &dt, &B, &Cs, &z, &bias, &A, &D, &carry, &y, &betas, &outputs, &state_out, &decay_out);
}

static void test_selective_scan(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(scan_cases); i++) {
        pair_note(&pair, "selective_scan row %d", (int)i);
        check_scan(&scan_cases[i]);
    }
}

struct ssd_case {
    int runs, n_heads, head_dim, state_dim, n_groups, chunk;
    struct dtypes dtypes;
    bool captured;
    int carry;
    float dt_min, dt_max;
};

static const struct ssd_case ssd_cases[] = {
    {0, 1, 1, 1, 1, 4, {DTYPE_F32, DTYPE_F32}, true, 0, 0, INFINITY},
    {2, 4, 8, 16, 2, 4, {DTYPE_F32, DTYPE_F32}, true, 3, 0, INFINITY},
    {3, 2, 16, 8, 1, 16, {DTYPE_F32, DTYPE_F32}, true, 0, 0.01f, 0.5f},
    {4, 3, 20, 70, 3, 64, {DTYPE_F32, DTYPE_F32}, true, 1, 0, INFINITY},
    {5, 2, 70, 24, 1, 128, {DTYPE_F32, DTYPE_F32}, false, 2, 0, INFINITY},
    {6, 2, 32, 16, 2, 256, {DTYPE_BF16, DTYPE_BF16}, true, 3, 0, INFINITY},
    {7, 4, 16, 40, 2, 32, {DTYPE_BF16, DTYPE_BF16}, true, 3, 0, INFINITY},
    {4, 2, 64, 64, 1, 64, {DTYPE_BF16, DTYPE_BF16}, false, 0, 0.001f, 0.1f},
    {6, 1, 8, 8, 1, 100, {DTYPE_BF16, DTYPE_F32}, true, 3, 0, INFINITY},
};

static void check_ssd(const struct ssd_case *c)
{
    struct run_table table;
    run_table_make(&table, run_lengths[c->runs], c->carry & 1, c->carry & 2);
    int64_t T = table.n_tokens, H = c->n_heads, P = c->head_dim, N = c->state_dim, G = c->n_groups;
    struct row_list states = rows_make(c->captured ? T : 0, 1, 9);
    struct twin x = random_twin(c->dtypes.in, T, H * P, 1), dt = random_twin(c->dtypes.in, T, H, 1);
    struct twin B = random_twin(c->dtypes.in, T, G * N, 1), C = random_twin(c->dtypes.in, T, G * N, 1);
    struct twin bias = random_floats(1, H, -2, 1), A = random_floats(1, H, -2, 0.5),
                D = random_floats(1, H, 1, 0.2);
    struct twin carry = random_floats(H * N, P, 0, 1), y = output_twin(c->dtypes.out, T, H * P);
    struct twin betas = c->captured ? output_twin(DTYPE_F32, T, H) : absent();
    struct twin state_out = c->captured ? output_twin(DTYPE_F32, states.n, H * N * P) : absent();
    for (int side = 0; side < 2; side++) {
        struct backend *b = backend_of(side);
        struct lent runs = lend(table.list, sizeof table.list);
        struct lent s_rows = lend(states.index, (size_t)states.n * sizeof(int32_t));
        struct ssd_scan_args args = {.x = tensor_of(&x, side),
                                     .dt = tensor_of(&dt, side),
                                     .B = tensor_of(&B, side),
                                     .C = tensor_of(&C, side),
                                     .dt_bias = floats_of(&bias, side),
                                     .A = floats_of(&A, side),
                                     .D = floats_of(&D, side),
                                     .n_heads = c->n_heads,
                                     .head_dim = c->head_dim,
                                     .state_dim = c->state_dim,
                                     .n_groups = c->n_groups,
                                     .dt_min = c->dt_min,
                                     .dt_max = c->dt_max,
                                     .chunk = c->chunk,
                                     .runs = table.runs,
                                     .carry = c->carry ? floats_of(&carry, side) : NULL,
                                     .y = tensor_of(&y, side),
                                     .betas = tensor_of(&betas, side),
                                     .state_rows = {s_rows.memory, states.n},
                                     .states = tensor_of(&state_out, side)};
        args.runs.list = runs.memory;
        b->ops->ssd_scan(b, &args);
        take_back(&runs);
        take_back(&s_rows);
        pair_synchronize(&pair);
        free_lent(&runs);
        free_lent(&s_rows);
    }
    /* Two bfloat16 terms of a float32 factor: 2^-17 of each product. */
    double loose = c->dtypes.in == DTYPE_BF16 ? 1e-3 : 1e-4;
    twin_check(&y, "y", loose, 5e-5);
    twin_check(&carry, "carry", loose / 5, 5e-5);
    if (c->captured) {
        twin_check(&betas, "betas", 1e-6, 1e-5);
        twin_check(&state_out, "states", loose / 5, 5e-5);
    }
    free((void *)(uintptr_t)states.index);
    DESTROY(&x, &dt, &B, &C, &bias, &A, &D, &carry, &y, &betas, &state_out);
}

static void test_ssd_scan(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(ssd_cases); i++) {
        pair_note(&pair, "ssd_scan row %d", (int)i);
        check_ssd(&ssd_cases[i]);
    }
}

/* ---- attention ---- */

static void test_rotary(void **state)
{
    static const struct {
        int runs, n_heads, head_dim, rotary_dim;
    } table[] = {{0, 1, 2, 2}, {2, 3, 16, 16}, {3, 2, 24, 8}, {7, 5, 8, 4}};
    (void)state;
    for (size_t i = 0; i < 2 * COUNT(table); i++) {
        struct run_table runs;
        int half = table[i / 2].rotary_dim / 2;
        run_table_make(&runs, run_lengths[table[i / 2].runs], false, false);
        runs.list[0].position = 3;
        pair_note(&pair, "rotary row %d", (int)i);
        struct twin x = random_twin(i % 2 == 0 ? DTYPE_F32 : DTYPE_BF16, runs.n_tokens,
                                    (int64_t)table[i / 2].n_heads * table[i / 2].head_dim, 1);
        struct twin cosine = random_floats(300, half, 0, 1), sine = random_floats(300, half, 0, 1);
        for (int side = 0; side < 2; side++) {
            struct backend *b = backend_of(side);
            struct lent lent = lend(runs.list, sizeof runs.list);
            struct rotary_args args = {.x = tensor_of(&x, side),
                                       .n_heads = table[i / 2].n_heads,
                                       .head_dim = table[i / 2].head_dim,
                                       .rotary_dim = table[i / 2].rotary_dim,
                                       .cosine = floats_of(&cosine, side),
                                       .sine = floats_of(&sine, side),
                                       .runs = runs.runs};
            args.runs.list = lent.memory;
            b->ops->rotary(b, &args);
            take_back(&lent);
            pair_synchronize(&pair);
            free_lent(&lent);
        }
        twin_check(&x, "x", 1e-6, 1e-6);
        DESTROY(&x, &cosine, &sine);
    }
}

struct attention_case {
    int runs, n_heads, n_kv_heads, head_dim;
    int64_t past, window;
    struct dtypes dtypes;
    bool captured;
    enum dtype pattern;
};

static const struct attention_case attention_cases[] = {
    {0, 1, 1, 1, 0, 0, {DTYPE_F32, DTYPE_F32}, true, DTYPE_F32},
    {2, 4, 2, 8, 0, 0, {DTYPE_F32, DTYPE_F32}, true, DTYPE_F32},
    {3, 2, 1, 16, 0, 5, {DTYPE_F32, DTYPE_F32}, true, DTYPE_BF16},
    {4, 2, 2, 72, 0, 0, {DTYPE_F32, DTYPE_F32}, false, DTYPE_F32},
    {5, 1, 1, 200, 0, 64, {DTYPE_F32, DTYPE_BF16}, false, DTYPE_F32},
    {1, 2, 1, 12, 9, 0, {DTYPE_F32, DTYPE_F32}, true, DTYPE_F32},
    {4, 3, 1, 32, 70, 40, {DTYPE_F32, DTYPE_F32}, true, DTYPE_F32},
    {6, 2, 1, 64, 0, 0, {DTYPE_BF16, DTYPE_BF16}, true, DTYPE_F32},
    {3, 4, 2, 16, 0, 33, {DTYPE_BF16, DTYPE_BF16}, true, DTYPE_BF16},
    {5, 2, 2, 128, 33, 0, {DTYPE_BF16, DTYPE_BF16}, false, DTYPE_F32},
    {7, 1, 1, 256, 0, 70, {DTYPE_BF16, DTYPE_BF16}, false, DTYPE_F32},
    {1, 2, 1, 24, 3, 1, {DTYPE_BF16, DTYPE_F32}, true, DTYPE_F32},
};

static void check_attention(const struct attention_case *c)
{
    struct run_table table;
    run_table_make(&table, run_lengths[c->runs], c->past > 0, false);
    table.list[0].position = (int32_t)c->past;
    int64_t T = table.n_tokens, H = c->n_heads, P = c->head_dim, n_keys = T + c->past;
    struct row_list rows = rows_make(c->captured ? T : 0, 0, 5);
    struct twin q = random_twin(c->dtypes.in, T, H * P, 1);
    struct twin k = random_twin(c->dtypes.in, c->past + T, c->n_kv_heads * P, 1);
    struct twin v = random_twin(c->dtypes.in, c->past + T, c->n_kv_heads * P, 1);
    struct twin y = output_twin(c->dtypes.out, T, H * P);
    struct twin scores = c->captured ? output_twin(c->pattern, rows.n, H * n_keys) : absent();
    struct twin probabilities = c->captured ? output_twin(c->pattern, rows.n, H * n_keys) : absent();
    for (int side = 0; side < 2; side++) {
        struct backend *b = backend_of(side);
        struct lent runs = lend(table.list, sizeof table.list);
        struct lent p_rows = lend(rows.index, (size_t)rows.n * sizeof(int32_t));
        struct attention_args args = {.q = tensor_of(&q, side),
                                      .k = tensor_of(&k, side),
                                      .v = tensor_of(&v, side),
                                      .n_heads = c->n_heads,
                                      .n_kv_heads = c->n_kv_heads,
                                      .head_dim = c->head_dim,
                                      .past = c->past,
                                      .window = c->window,
                                      .scale = 0.3f,
                                      .runs = table.runs,
                                      .y = tensor_of(&y, side),
                                      .pattern_rows = {p_rows.memory, rows.n},
                                      .n_keys = n_keys,
                                      .scores = tensor_of(&scores, side),
                                      .probabilities = tensor_of(&probabilities, side)};
        args.runs.list = runs.memory;
        b->ops->attention(b, &args);
        take_back(&runs);
        take_back(&p_rows);
        pair_synchronize(&pair);
        free_lent(&runs);
        free_lent(&p_rows);
    }
    /* Exponentials are rounded to bfloat16 before they meet the values. */
    twin_check(&y, "y", c->dtypes.in == DTYPE_BF16 ? 4e-3 : 2e-5, 5e-5);
    if (c->captured) {
        twin_check(&scores, "scores", 2e-5, 2e-5);
        twin_check(&probabilities, "probabilities", 1e-6, 5e-5);
    }
    free((void *)(uintptr_t)rows.index);
    DESTROY(&q, &k, &v, &y, &scores, &probabilities);
}

static void test_attention(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(attention_cases); i++) {
        pair_note(&pair, "attention row %d", (int)i);
        check_attention(&attention_cases[i]);
    }
}

/* ---- mixtures ---- */

struct route_case {
    int64_t tokens;
    int n_experts, top_k;
    enum router router;
    float softcap;
    bool biased;
    enum dtype logits, weights;
};

static const struct route_case route_cases[] = {
    {1, 1, 1, ROUTER_SOFTMAX, 0, false, DTYPE_F32, DTYPE_F32},
    {9, 8, 2, ROUTER_SOFTMAX, 0, false, DTYPE_F32, DTYPE_F32},
    {9, 16, 2, ROUTER_SOFTMAX, 0, false, DTYPE_BF16, DTYPE_BF16},
    {7, 33, 4, ROUTER_SIGMOID, 0, true, DTYPE_F32, DTYPE_F32},
    {6, 64, 8, ROUTER_SIGMOID, 5, true, DTYPE_F32, DTYPE_BF16},
    {5, 256, 10, ROUTER_SIGMOID, 0, false, DTYPE_F32, DTYPE_F32},
    {3, 40, 40, ROUTER_SIGMOID, 2, true, DTYPE_F32, DTYPE_F32},
};

static void test_route(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(route_cases); i++) {
        const struct route_case *c = &route_cases[i];
        pair_note(&pair, "route row %d", (int)i);
        struct twin logits = random_twin(c->logits, c->tokens, c->n_experts, 2);
        struct twin bias = random_floats(1, c->n_experts, 0, 0.1);
        if (c->n_experts > 4) { /* ties go to the lower index */
            twin_set(&logits, 0, 3, 9);
            twin_set(&logits, 0, 1, 9);
            twin_set(&bias, 0, 3, 0.05f);
            twin_set(&bias, 0, 1, 0.05f);
            twin_upload(&logits);
            twin_upload(&bias);
        }
        struct twin weights = output_twin(c->weights, c->tokens, c->top_k);
        struct twin indices = output_twin(DTYPE_I32, c->tokens, c->top_k);
        for (int side = 0; side < 2; side++) {
            struct backend *b = backend_of(side);
            struct route_args args = {.logits = tensor_of(&logits, side),
                                      .router = c->router,
                                      .top_k = c->top_k,
                                      .softcap = c->softcap,
                                      .selection_bias = c->biased ? floats_of(&bias, side) : NULL,
                                      .weights = tensor_of(&weights, side),
                                      .indices = tensor_of(&indices, side)};
            b->ops->route(b, &args);
        }
        twin_check(&weights, "weights", 1e-6, 1e-5);
        twin_check_same(&indices, "indices");
        DESTROY(&logits, &bias, &weights, &indices);
    }
}

struct mixture_case {
    int64_t tokens;
    int n_experts, top_k;
    int64_t width, inner;
    struct dtypes dtypes;
    bool skewed; /* all tokens choose the first experts */
};

static const struct mixture_case mixture_cases[] = {
    {1, 1, 1, 8, 8, {DTYPE_F32, DTYPE_F32}, false},
    {9, 4, 2, 16, 24, {DTYPE_F32, DTYPE_F32}, false},
    {50, 8, 3, 40, 33, {DTYPE_F32, DTYPE_F32}, true},
    {300, 32, 4, 24, 16, {DTYPE_BF16, DTYPE_BF16}, false},
    {40, 600, 2, 16, 8, {DTYPE_BF16, DTYPE_BF16}, false},
    {17, 5, 2, 16, 20, {DTYPE_BF16, DTYPE_F32}, false},
};

static struct twin random_choices(const struct mixture_case *c)
{
    struct twin indices = twin_create(&pair, (struct twin_shape){DTYPE_I32, c->tokens, c->top_k, 1, 0});
    for (int64_t t = 0; t < c->tokens; t++) {
        int first = c->skewed ? 0 : (int)(pair_uniform(&pair) * c->n_experts);
        for (int j = 0; j < c->top_k; j++)
            twin_set(&indices, t, j, (float)((first + j * 3) % c->n_experts));
    }
    twin_upload(&indices);
    return indices;
}

static void run_mixture(const struct mixture_case *c, int side, struct expert_groups *groups,
                        const struct twin *x, const struct twin *xg, const struct twin *yg,
                        const struct twin *w)
{
    struct backend *b = backend_of(side);
    struct matrix **experts = malloc((size_t)c->n_experts * sizeof(struct matrix *));
    for (int e = 0; e < c->n_experts; e++) {
        struct tensor expert = tensor_make(w->before + w->data_at, DTYPE_F32, c->inner, c->width);
        expert = tensor_rows(expert, e % 7, c->inner); /* every expert another stretch of the same numbers */
        experts[e] = make_matrix(b, &expert, c->dtypes.in);
    }
    b->ops->gathered_linear(b, tensor_of(x, side), groups, experts, tensor_of(xg, side), tensor_of(yg, side));
    pair_synchronize(&pair);
    for (int e = 0; e < c->n_experts; e++)
        b->ops->matrix_destroy(b, experts[e]);
    free(experts);
}

static void check_mixture(const struct mixture_case *c)
{
    int64_t slots = c->tokens * c->top_k;
    struct row_list rows = rows_make(c->tokens, 0, 3);
    struct twin indices = random_choices(c), x = random_twin(c->dtypes.in, c->tokens, c->width, 1);
    struct twin w = random_floats(c->inner + 7, c->width, 0, 0.3);
    struct twin order = twin_create(&pair, (struct twin_shape){DTYPE_I32, 1, slots, 0, 0});
    struct twin places = twin_create(&pair, (struct twin_shape){DTYPE_I32, 1, slots, 0, 0});
    struct twin offsets = twin_create(&pair, (struct twin_shape){DTYPE_I32, 1, c->n_experts + 1, 0, 0});
    struct twin xg = output_twin(c->dtypes.in, slots, c->width),
                yg = output_twin(c->dtypes.out, slots, c->inner);
    struct twin weights = random_twin(c->dtypes.out, c->tokens, c->top_k, 1);
    struct twin out = output_twin(c->dtypes.out, c->tokens, c->inner);
    struct twin each = output_twin(c->dtypes.out, rows.n, c->top_k * c->inner);
    struct twin plain = output_twin(DTYPE_F32, rows.n, c->top_k * c->inner);
    for (int side = 0; side < 2; side++) {
        struct backend *b = backend_of(side);
        struct lent lent = lend(rows.index, (size_t)rows.n * sizeof(int32_t));
        struct row_list lent_rows = {lent.memory, rows.n};
        struct expert_groups groups = {.order = tensor_of(&order, side).data,
                                       .places = tensor_of(&places, side).data,
                                       .offsets = tensor_of(&offsets, side).data,
                                       .n_experts = c->n_experts,
                                       .top_k = c->top_k,
                                       .n_tokens = c->tokens};
        b->ops->group_experts(b, tensor_of(&indices, side), &groups);
        run_mixture(c, side, &groups, &x, &xg, &yg, &w);
        b->ops->combine_slots(b, tensor_of(&yg, side), &groups, tensor_of(&weights, side), 1.5f,
                              tensor_of(&out, side));
        b->ops->ungroup_slots(b, tensor_of(&yg, side), &groups, tensor_of(&weights, side), lent_rows,
                              tensor_of(&each, side));
        b->ops->ungroup_slots(b, tensor_of(&yg, side), &groups, (struct tensor){0}, lent_rows,
                              tensor_of(&plain, side));
        take_back(&lent);
        pair_synchronize(&pair);
        free_lent(&lent);
    }
    twin_check_same(&order, "order");
    twin_check_same(&places, "places");
    twin_check_same(&offsets, "offsets");
    /* What follows from rounded products may differ by their last bits too. */
    double loose = c->dtypes.out == DTYPE_BF16 ? 0.03 : 2e-5;
    twin_check(&yg, "yg", 2e-5, 2e-5);
    twin_check(&out, "out", loose, 2e-5);
    twin_check(&each, "each", loose, 2e-5);
    twin_check(&plain, "plain", loose, 2e-5);
    free((void *)(uintptr_t)rows.index);
    DESTROY(&indices, &x, &w, &order, &places, &offsets, &xg, &yg, &weights, &out, &each, &plain);
}

static void test_mixture(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(mixture_cases); i++) {
        pair_note(&pair, "mixture row %d", (int)i);
        check_mixture(&mixture_cases[i]);
    }
}

/* ---- main ---- */

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_copies),     cmocka_unit_test(test_add),
    cmocka_unit_test(test_silu_mul),   cmocka_unit_test(test_softplus_gate),
    cmocka_unit_test(test_softmax),    cmocka_unit_test(test_rms_norm),
    cmocka_unit_test(test_embed),      cmocka_unit_test(test_gather_rows),
    cmocka_unit_test(test_collect),    cmocka_unit_test(test_captures),
    cmocka_unit_test(test_many_lists), cmocka_unit_test(test_linear),
    cmocka_unit_test(test_conv_silu),  cmocka_unit_test(test_selective_scan),
    cmocka_unit_test(test_ssd_scan),   cmocka_unit_test(test_rotary),
    cmocka_unit_test(test_attention),  cmocka_unit_test(test_route),
    cmocka_unit_test(test_mixture),
};

static int run_on(struct backend *tested, const char *name)
{
    struct error error = {0};
    pair = (struct pair){.tested = tested, .random = 88172645463325252ull};
    if (backend_create_cpu(1, &pair.reference, &error) != STATUS_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    printf("on %s, %s\n", tested->name, name);
    int failed = cmocka_run_group_tests_name(name, tests, NULL, NULL);
    backend_destroy(pair.reference);
    backend_destroy(tested);
    return failed;
}

#ifdef ACTDUMP_EMULATED

/* Tiny buffers: transfers in many pieces, rings that come round, problems that go in groups; and some that
 * hold everything, but are not so large that the emulated device is slow to open and close. */
static const struct cuda_options tiny = {
    .piece_bytes = 4096, .n_pieces = 2, .table_bytes = 512, .scratch_bytes = 40000};
static const struct cuda_options ample = {
    .piece_bytes = 1 << 18, .n_pieces = 4, .table_bytes = 1 << 16, .scratch_bytes = 1 << 26};

int main(void)
{
    static const char *const names[] = {"threads forwards", "threads backwards", "threads shuffled"};
    int failed = 0;
    for (int order = EMULATION_FORWARDS; order <= EMULATION_SHUFFLED; order++) {
        struct backend *tested = NULL;
        struct error error = {0};
        emulation_set_order((enum emulation_order)order);
        emulation_set_guarded(order == EMULATION_FORWARDS);
        emulation_set_grouped(order != EMULATION_BACKWARDS);
        if (cuda_backend_create(order == EMULATION_FORWARDS ? &ample : &tiny, &tested, &error) != STATUS_OK) {
            fprintf(stderr, "%s\n", error.text);
            return 1;
        }
        failed += run_on(tested, names[order]);
        const char *fault = emulation_fault();
        if (fault[0] != '\0') {
            printf("the emulated device's first fault: %s\n", fault);
            failed++;
        }
        if (emulation_get_counts().live_allocations != 0) {
            printf("%lld blocks of device memory were never freed\n",
                   (long long)emulation_get_counts().live_allocations);
            failed++;
        }
    }
    return failed == 0 ? 0 : 1;
}

#else

int main(void)
{
    struct error error = {0};
    struct backend *tested = NULL;
    if (backend_cuda_device_count(&error) == 0) {
        printf("skipped: %s\n", error.text);
        return 77;
    }
    if (backend_create_cuda(0, false, &tested, &error) != STATUS_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    return run_on(tested, "GPU") == 0 ? 0 : 1;
}

#endif
