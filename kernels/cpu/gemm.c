#include "kernels/cpu/gemm.h"
#include "kernels/base/log.h"
#include "kernels/base/memory.h"

#include <assert.h>
#include <dnnl.h>
#include <omp.h>
#include <stdlib.h>

/* inner_product rather than matmul: the same kernels for full tiles, and up to twice as fast for small ones
 * (oneDNN 2.6, AVX2). */

struct shape {
    int64_t rows, n, k;
    enum dtype kept, y_dtype;
    bool has_bias, accumulate;
    bool alone; /* one thread runs it, while others run theirs */
};

/* A thread's, pointed at the call's data before each run. NULL before its first. */
struct views {
    dnnl_memory_t x, bias, y, scratch;
};

struct primitive {
    struct shape shape;
    dnnl_primitive_t run;
    size_t scratch_bytes;
    struct views *views;    /* [threads], the first alone where not shape.alone */
    struct primitive *next; /* in its bucket */
};

#define N_BUCKETS 256

/* What a thread runs products with. The library's own scratch memory belongs to the thread that made a
 * primitive, and here threads share primitives. */
struct lane {
    dnnl_stream_t stream;
    void *scratch;
    size_t scratch_bytes;
};

struct gemm {
    dnnl_engine_t engine;
    struct lane *lanes; /* [n_threads] */
    int n_threads;
    bool native_bf16;
    struct primitive *buckets[N_BUCKETS];
};

static enum status check(dnnl_status_t result, const char *what, struct error *error)
{
    if (result == dnnl_success)
        return STATUS_OK;
    enum status status = result == dnnl_out_of_memory ? STATUS_RESOURCE : STATUS_BUG;
    return error_set(error, status, "oneDNN: %s failed with status %d%s", what, (int)result,
                     status == STATUS_RESOURCE ? " (out of memory)" : "");
}

static dnnl_data_type_t library_type(enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? dnnl_bf16 : dnnl_f32;
}

static dnnl_memory_desc_t describe_rows(int64_t rows, int64_t cols, enum dtype dtype, dnnl_format_tag_t tag)
{
    dnnl_memory_desc_t md;
    dnnl_dims_t dims = {rows, cols};
    dnnl_status_t result = dnnl_memory_desc_init_by_tag(&md, 2, dims, library_type(dtype), tag);
    assert(result == dnnl_success);
    (void)result;
    return md;
}

/* The library plans for the threads that OpenMP would give it, on this thread, now. */
static void use_threads(const struct gemm *gemm, bool alone)
{
    omp_set_num_threads(alone ? 1 : gemm->n_threads);
}

static dnnl_status_t plan_with_attributes(const struct gemm *gemm, const dnnl_inner_product_desc_t *operation,
                                          bool accumulate, dnnl_primitive_desc_t *out)
{
    dnnl_primitive_attr_t attributes;
    dnnl_status_t result = dnnl_primitive_attr_create(&attributes);
    if (result != dnnl_success)
        return result;
    result = dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user);
    dnnl_post_ops_t post_ops = NULL;
    if (result == dnnl_success && accumulate) {
        result = dnnl_post_ops_create(&post_ops);
        if (result == dnnl_success)
            result = dnnl_post_ops_append_sum(post_ops, 1.0f);
        if (result == dnnl_success)
            result = dnnl_primitive_attr_set_post_ops(attributes, post_ops);
    }
    if (result == dnnl_success)
        result = dnnl_primitive_desc_create(out, operation, attributes, gemm->engine, NULL);
    dnnl_post_ops_destroy(post_ops);
    dnnl_primitive_attr_destroy(attributes);
    return result;
}

/* weights NULL: the library chooses their layout. */
static dnnl_status_t plan_product(const struct gemm *gemm, const struct shape *s,
                                  const dnnl_memory_desc_t *weights, dnnl_primitive_desc_t *out)
{
    dnnl_memory_desc_t x = describe_rows(s->rows, s->k, s->kept, dnnl_ab);
    dnnl_memory_desc_t y = describe_rows(s->rows, s->n, s->y_dtype, dnnl_ab);
    dnnl_memory_desc_t any = describe_rows(s->n, s->k, s->kept, dnnl_format_tag_any);
    dnnl_memory_desc_t bias;
    dnnl_dims_t bias_dims = {s->n};
    dnnl_status_t result = dnnl_memory_desc_init_by_tag(&bias, 1, bias_dims, dnnl_f32, dnnl_a);
    if (result != dnnl_success)
        return result;
    dnnl_inner_product_desc_t operation;
    use_threads(gemm, s->alone);
    result = dnnl_inner_product_forward_desc_init(&operation, dnnl_forward_inference, &x,
                                                  weights != NULL ? weights : &any,
                                                  s->has_bias ? &bias : NULL, &y);
    return result == dnnl_success ? plan_with_attributes(gemm, &operation, s->accumulate, out) : result;
}

static enum status open_library(struct gemm *gemm, struct error *error)
{
    TRY(check(dnnl_engine_create(&gemm->engine, dnnl_cpu, 0), "making an engine", error));
    void *lanes;
    TRY(memory_allocate_array(&lanes, (size_t)gemm->n_threads, sizeof *gemm->lanes,
                              "the matrix products' threads", error));
    gemm->lanes = lanes;
    for (int i = 0; i < gemm->n_threads; i++)
        TRY(check(dnnl_stream_create(&gemm->lanes[i].stream, gemm->engine, dnnl_stream_default_flags),
                  "making a stream", error));
    return STATUS_OK;
}

/* The library may be held down to less than the CPU has (DNNL_MAX_CPU_ISA). It then emulates products of
 * bfloat16, or has none. */
static bool library_has_bf16(void)
{
    return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_bf16) == dnnl_cpu_isa_avx512_core_bf16;
}

enum status gemm_create(int n_threads, bool native_bf16, struct gemm **out, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct gemm), "the matrix products' state", error));
    struct gemm *gemm = memory;
    gemm->n_threads = n_threads;
    gemm->native_bf16 = native_bf16 && library_has_bf16();
    enum status status = open_library(gemm, error);
    if (status != STATUS_OK) {
        gemm_destroy(gemm);
        return status;
    }
    *out = gemm;
    return STATUS_OK;
}

static int count_views(const struct gemm *gemm, const struct shape *s)
{
    return s->alone ? gemm->n_threads : 1;
}

static void destroy_primitive(const struct gemm *gemm, struct primitive *p)
{
    if (p == NULL)
        return;
    for (int i = 0; p->views != NULL && i < count_views(gemm, &p->shape); i++) {
        dnnl_memory_destroy(p->views[i].x);
        dnnl_memory_destroy(p->views[i].bias);
        dnnl_memory_destroy(p->views[i].y);
        dnnl_memory_destroy(p->views[i].scratch);
    }
    free(p->views);
    dnnl_primitive_destroy(p->run);
    free(p);
}

void gemm_destroy(struct gemm *gemm)
{
    if (gemm == NULL)
        return;
    for (int i = 0; i < N_BUCKETS; i++) {
        for (struct primitive *p = gemm->buckets[i], *next; p != NULL; p = next) {
            next = p->next;
            destroy_primitive(gemm, p);
        }
    }
    for (int i = 0; gemm->lanes != NULL && i < gemm->n_threads; i++) {
        dnnl_stream_destroy(gemm->lanes[i].stream);
        free(gemm->lanes[i].scratch);
    }
    memory_free(gemm->lanes);
    dnnl_engine_destroy(gemm->engine);
    memory_free(gemm);
}

static enum dtype kept_dtype(const struct gemm *gemm, enum dtype compute)
{
    return compute == DTYPE_BF16 && gemm->native_bf16 ? DTYPE_BF16 : DTYPE_F32;
}

static int64_t full_rows(int64_t n)
{
    return n > GEMM_WIDE ? GEMM_ROWS_WIDE : GEMM_ROWS;
}

/* Where the library packs nothing (oneDNN 2.6 without AVX-512) it may keep the weights transposed, k rows of
 * n. With few rows of x it then multiplies them as they lie; and rows that are a multiple of 2 KiB apart fall
 * on the same two groups of the first cache's sets: 42 to 68 of 94 GFLOP/s for n of 512, 1,024, 1,536 and
 * 2,048, against 82 to 92 as [n, k] (Zen 3, one thread; with many rows both are alike within 2 %). */
#define ALIASING_FLOATS 512

static bool is_transposed(const dnnl_memory_desc_t *md)
{
    const dnnl_blocking_desc_t *blocking = &md->format_desc.blocking;
    return md->format_kind == dnnl_blocked && blocking->inner_nblks == 0 && blocking->strides[0] == 1 &&
           blocking->strides[1] == md->dims[0];
}

static bool is_packed(const dnnl_memory_desc_t *md)
{
    return md->format_kind != dnnl_blocked || md->format_desc.blocking.inner_nblks > 0;
}

/* The layout that products of full tiles want. The library's products for other row counts take it too: its
 * blocked layouts are told apart by n and k alone. */
static dnnl_status_t choose_layout(const struct gemm *gemm, int64_t n, int64_t k, enum dtype kept,
                                   dnnl_memory_desc_t *out)
{
    struct shape s = {.rows = full_rows(n), .n = n, .k = k, .kept = kept, .y_dtype = kept};
    dnnl_primitive_desc_t plan;
    dnnl_status_t result = plan_product(gemm, &s, NULL, &plan);
    if (result != dnnl_success)
        return result;
    *out = *dnnl_primitive_desc_query_md(plan, dnnl_query_weights_md, 0);
    if (is_transposed(out) && n % ALIASING_FLOATS == 0)
        *out = describe_rows(n, k, kept, dnnl_ab);
    return dnnl_primitive_desc_destroy(plan);
}

/* Beyond this the library is not asked: no machine holds such a matrix, and its own arithmetic might
 * overflow. */
#define MAX_ELEMENTS ((int64_t)1 << 44)

size_t gemm_bytes(struct gemm *gemm, int64_t n, int64_t k, enum dtype compute)
{
    enum dtype kept = kept_dtype(gemm, compute);
    if (n < 1 || k < 1)
        return 0;
    if (k > MAX_ELEMENTS / n) {
        size_t bytes;
        return __builtin_mul_overflow((size_t)n, (size_t)k, &bytes) ||
                       __builtin_mul_overflow(bytes, dtype_size(kept), &bytes)
                   ? SIZE_MAX
                   : bytes;
    }
    dnnl_memory_desc_t layout;
    if (choose_layout(gemm, n, k, kept, &layout) != dnnl_success)
        return (size_t)n * (size_t)k * dtype_size(kept);
    return dnnl_memory_desc_get_size(&layout);
}

/* One row of w as it is multiplied: rounded to the load's dtype, then widened to the kept one where they
 * differ. Goes through an aligned buffer, as a mapped file aligns nothing. */
static void convert_row(const struct tensor *w, int64_t row, enum dtype compute, enum dtype kept, void *to)
{
    enum { PIECE = 1024 };
    float raw[PIECE], rounded[PIECE];
    const char *from = (const char *)w->data + (size_t)(row * w->stride) * dtype_size(w->dtype);
    for (int64_t i = 0; i < w->cols; i += PIECE) {
        size_t n = (size_t)(w->cols - i < PIECE ? w->cols - i : PIECE);
        memcpy(raw, from + (size_t)i * dtype_size(w->dtype), n * dtype_size(w->dtype));
        dtype_convert(rounded, compute, raw, w->dtype, n);
        dtype_convert((char *)to + (size_t)i * dtype_size(kept), kept, rounded, compute, n);
    }
}

static void convert_rows(const struct gemm *gemm, const struct tensor *w, enum dtype compute, enum dtype kept,
                         void *to)
{
    size_t row_bytes = (size_t)w->cols * dtype_size(kept);
#pragma omp parallel for num_threads(gemm->n_threads)
    for (int64_t row = 0; row < w->rows; row++)
        convert_row(w, row, compute, kept, (char *)to + (size_t)row * row_bytes);
}

static dnnl_status_t reorder(const struct gemm *gemm, dnnl_memory_t from, dnnl_memory_t to)
{
    const dnnl_memory_desc_t *from_md, *to_md;
    dnnl_memory_get_memory_desc(from, &from_md);
    dnnl_memory_get_memory_desc(to, &to_md);
    dnnl_primitive_desc_t plan;
    dnnl_status_t result =
        dnnl_reorder_primitive_desc_create(&plan, from_md, gemm->engine, to_md, gemm->engine, NULL);
    if (result != dnnl_success)
        return result;
    dnnl_primitive_t primitive;
    result = dnnl_primitive_create(&primitive, plan);
    dnnl_primitive_desc_destroy(plan);
    if (result != dnnl_success)
        return result;
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}};
    result = dnnl_primitive_execute(primitive, gemm->lanes[0].stream, 2, arguments);
    if (result == dnnl_success)
        result = dnnl_stream_wait(gemm->lanes[0].stream);
    dnnl_primitive_destroy(primitive);
    return result;
}

/* Converts into a second, plain copy and lets the library reorder that one into the matrix. */
static enum status pack_through_copy(struct gemm *gemm, const struct tensor *w, struct matrix *matrix,
                                     const dnnl_memory_desc_t *plain, struct error *error)
{
    void *copy;
    TRY(memory_allocate(&copy, dnnl_memory_desc_get_size(plain), "a weight matrix being packed", error));
    convert_rows(gemm, w, matrix->compute, matrix->kept, copy);
    dnnl_memory_t from;
    enum status status =
        check(dnnl_memory_create(&from, plain, gemm->engine, copy), "viewing weights", error);
    if (status == STATUS_OK) {
        use_threads(gemm, false);
        status = check(reorder(gemm, from, matrix->memory), "packing weights", error);
        dnnl_memory_destroy(from);
    }
    memory_free(copy);
    return status;
}

static enum status fill_matrix(struct gemm *gemm, const struct tensor *w, struct matrix *matrix,
                               struct error *error)
{
    dnnl_memory_desc_t layout, plain = describe_rows(w->rows, w->cols, matrix->kept, dnnl_ab);
    TRY(check(choose_layout(gemm, w->rows, w->cols, matrix->kept, &layout), "choosing a layout for weights",
              error));
    TRY(memory_allocate(&matrix->data, dnnl_memory_desc_get_size(&layout), "a weight matrix", error));
    dnnl_memory_t memory;
    TRY(check(dnnl_memory_create(&memory, &layout, gemm->engine, matrix->data), "viewing weights", error));
    matrix->memory = memory;
    matrix->packed = is_packed(&layout);
    if (!dnnl_memory_desc_equal(&layout, &plain))
        return pack_through_copy(gemm, w, matrix, &plain, error);
    convert_rows(gemm, w, matrix->compute, matrix->kept, matrix->data);
    return STATUS_OK;
}

enum status gemm_pack(struct gemm *gemm, const struct tensor *w, enum dtype compute, const char *name,
                      struct matrix **out, struct error *error)
{
    assert(compute == DTYPE_F32 || compute == DTYPE_BF16);
    if (w->rows < 1 || w->cols < 1 || w->cols > MAX_ELEMENTS / w->rows || !dtype_is_float(w->dtype))
        return error_set(
            error, STATUS_INPUT,
            "%s: a weight matrix of %lld x %lld elements of %s cannot be used; expected float32, bfloat16 "
            "or float16, at least 1 x 1 and at most 2^44 elements",
            name, (long long)w->rows, (long long)w->cols, dtype_name(w->dtype));
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct matrix), "a weight matrix", error));
    struct matrix *matrix = memory;
    *matrix =
        (struct matrix){.n = w->rows, .k = w->cols, .compute = compute, .kept = kept_dtype(gemm, compute)};
    enum status status = fill_matrix(gemm, w, matrix, error);
    if (status != STATUS_OK) {
        gemm_unpack(matrix);
        error_prefix(error, "%s", name);
        return status;
    }
    *out = matrix;
    return STATUS_OK;
}

void gemm_unpack(struct matrix *matrix)
{
    if (matrix == NULL)
        return;
    dnnl_memory_destroy(matrix->memory);
    memory_free(matrix->data);
    memory_free(matrix);
}

static bool shapes_equal(const struct shape *a, const struct shape *b)
{
    return a->rows == b->rows && a->n == b->n && a->k == b->k && a->kept == b->kept &&
           a->y_dtype == b->y_dtype && a->has_bias == b->has_bias && a->accumulate == b->accumulate &&
           a->alone == b->alone;
}

static struct primitive **find_bucket(struct gemm *gemm, const struct shape *s)
{
    uint64_t hash = (uint64_t)s->rows * 31 + (uint64_t)s->n;
    hash = hash * 1000003 + (uint64_t)s->k;
    hash = hash * 16 +
           (uint64_t)(s->has_bias + 2 * s->accumulate + 4 * (s->y_dtype == DTYPE_BF16) + 8 * s->alone);
    return &gemm->buckets[(hash * 0x9e3779b97f4a7c15u) >> 56];
}

/* Nothing would be wrong but the speed: say so. */
static void warn_if_slow(const struct shape *s, dnnl_primitive_desc_t plan)
{
    const char *implementation = "";
    dnnl_primitive_desc_query(plan, dnnl_query_impl_info_str, 0, (void *)&implementation);
    if (strncmp(implementation, "ref", 3) == 0)
        log_warning("oneDNN has only its slow reference product for %lld rows of %lld x %lld %s weights",
                    (long long)s->rows, (long long)s->n, (long long)s->k, dtype_name(s->kept));
}

static dnnl_status_t make_primitive(const struct gemm *gemm, const struct matrix *w, struct primitive *p)
{
    const dnnl_memory_desc_t *layout;
    dnnl_memory_get_memory_desc(w->memory, &layout);
    dnnl_primitive_desc_t plan;
    dnnl_status_t result = plan_product(gemm, &p->shape, layout, &plan);
    if (result != dnnl_success)
        return result;
    warn_if_slow(&p->shape, plan);
    p->scratch_bytes =
        dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(plan, dnnl_query_scratchpad_md, 0));
    result = dnnl_primitive_create(&p->run, plan);
    dnnl_primitive_desc_destroy(plan);
    return result;
}

static enum status add_primitive(struct gemm *gemm, const struct matrix *w, const struct shape *s,
                                 struct primitive **bucket, struct error *error)
{
    /* Not through memory.h: a batch with a new tail may come here, and its count must stand still in the
     * loop. */
    struct primitive *p = calloc(1, sizeof *p);
    if (p == NULL)
        return error_set(error, STATUS_RESOURCE, "out of memory for a matrix product");
    p->shape = *s;
    p->views = calloc((size_t)count_views(gemm, s), sizeof *p->views);
    enum status status = STATUS_OK;
    if (p->views == NULL)
        status = error_set(error, STATUS_RESOURCE, "out of memory for a matrix product");
    if (status == STATUS_OK)
        status = check(make_primitive(gemm, w, p), "making a matrix product", error);
    if (status != STATUS_OK) {
        destroy_primitive(gemm, p);
        return status;
    }
    p->next = *bucket;
    *bucket = p;
    return STATUS_OK;
}

/* The primitive of a shape, made where it is new. By one thread at a time. */
static enum status get_primitive(struct gemm *gemm, const struct matrix *w, const struct shape *s,
                                 struct primitive **out, struct error *error)
{
    struct primitive **bucket = find_bucket(gemm, s);
    for (struct primitive *p = *bucket; p != NULL; p = p->next) {
        if (shapes_equal(&p->shape, s)) {
            *out = p;
            return STATUS_OK;
        }
    }
    TRY(add_primitive(gemm, w, s, bucket, error));
    *out = *bucket;
    return STATUS_OK;
}

static dnnl_status_t view(const struct gemm *gemm, const struct primitive *p, dnnl_query_t what, int index,
                          dnnl_memory_t *out)
{
    const_dnnl_primitive_desc_t plan;
    dnnl_status_t result = dnnl_primitive_get_primitive_desc(p->run, &plan);
    if (result != dnnl_success)
        return result;
    return dnnl_memory_create(out, dnnl_primitive_desc_query_md(plan, what, index), gemm->engine,
                              DNNL_MEMORY_NONE);
}

static dnnl_status_t make_views(const struct gemm *gemm, const struct primitive *p, struct views *v)
{
    dnnl_status_t result = dnnl_success;
    if (p->scratch_bytes > 0 && v->scratch == NULL)
        result = view(gemm, p, dnnl_query_scratchpad_md, 0, &v->scratch);
    if (result == dnnl_success && p->shape.has_bias && v->bias == NULL)
        result = view(gemm, p, dnnl_query_weights_md, 1, &v->bias);
    if (result == dnnl_success && v->y == NULL)
        result = view(gemm, p, dnnl_query_dst_md, 0, &v->y);
    if (result == dnnl_success && v->x == NULL) /* the last: it says that the others are there */
        result = view(gemm, p, dnnl_query_src_md, 0, &v->x);
    return result;
}

static enum status get_scratch(struct lane *lane, size_t bytes, struct error *error)
{
    if (bytes <= lane->scratch_bytes)
        return STATUS_OK;
    free(lane->scratch);
    size_t padded = (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
    lane->scratch = aligned_alloc(MEMORY_ALIGNMENT, padded);
    lane->scratch_bytes = lane->scratch == NULL ? 0 : padded;
    return lane->scratch != NULL
               ? STATUS_OK
               : error_set(error, STATUS_RESOURCE, "out of memory: %zu bytes for matrix products to work in",
                           padded);
}

static dnnl_status_t execute(const struct lane *lane, const struct primitive *p, const struct views *v,
                             const struct matrix *w, const struct gemm_call *call)
{
    /* The library takes its inputs through pointers to what is not const, and only reads them. */
    union {
        const void *in;
        void *out;
    } x = {.in = call->x}, bias = {.in = call->bias};
    dnnl_memory_set_data_handle(v->x, x.out);
    dnnl_memory_set_data_handle(v->y, call->y);
    dnnl_exec_arg_t arguments[5] = {
        {DNNL_ARG_SRC, v->x}, {DNNL_ARG_WEIGHTS, w->memory}, {DNNL_ARG_DST, v->y}};
    int n_arguments = 3;
    if (p->shape.has_bias) {
        dnnl_memory_set_data_handle(v->bias, bias.out);
        arguments[n_arguments++] = (dnnl_exec_arg_t){DNNL_ARG_BIAS, v->bias};
    }
    if (p->scratch_bytes > 0) {
        dnnl_memory_set_data_handle(v->scratch, lane->scratch);
        arguments[n_arguments++] = (dnnl_exec_arg_t){DNNL_ARG_SCRATCHPAD, v->scratch};
    }
    dnnl_status_t result = dnnl_primitive_execute(p->run, lane->stream, n_arguments, arguments);
    return result == dnnl_success ? dnnl_stream_wait(lane->stream) : result;
}

enum status gemm_run(struct gemm *gemm, const struct matrix *w, const struct gemm_call *call,
                     struct error *error)
{
    const struct shape s = {.rows = call->rows,
                            .n = w->n,
                            .k = w->k,
                            .kept = w->kept,
                            .y_dtype = call->y_dtype,
                            .has_bias = call->bias != NULL,
                            .accumulate = call->accumulate,
                            .alone = call->alone};
    struct primitive *p = NULL;
    enum status status;
#pragma omp critical(gemm_primitives)
    status = get_primitive(gemm, w, &s, &p, error);
    if (status != STATUS_OK)
        return status;
    int place = call->alone ? call->thread : 0;
    struct lane *lane = &gemm->lanes[place];
    struct views *views = &p->views[place];
    TRY(get_scratch(lane, p->scratch_bytes, error));
    if (views->x == NULL)
        TRY(check(make_views(gemm, p, views), "viewing a matrix product", error));
    use_threads(gemm, call->alone);
    return check(execute(lane, p, views, w, call), "a matrix product", error);
}
