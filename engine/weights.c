#include "engine/weights.h"

#include "kernels/base/memory.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PARTS = 4, TABLE_ROWS = 1024 };

void weights_fini(struct weights *weights)
{
    for (int64_t i = 0; i < weights->n_matrices; i++)
        weights->backend->ops->matrix_destroy(weights->backend, weights->matrices[i]);
    for (int64_t i = 0; i < weights->n_vectors; i++)
        weights->backend->ops->release(weights->backend, weights->vectors[i]);
    memory_free(weights->matrices);
    memory_free(weights->vectors);
    *weights = (struct weights){0};
}

void loader_enter(struct loader *l, int layer, enum loader_step step, const char *scope, ...)
{
    va_list args;
    va_start(args, scope);
    vsnprintf(l->scope, sizeof l->scope, scope, args);
    va_end(args);
    l->is_needed = LOADER_STEPS * layer + (int)step <= l->depth;
    l->share = 1;
}

/* The tensor, or NULL at *out while counting. */
static enum status find(struct loader *l, const char *name, const int64_t *dims, int n_dims,
                        const struct checkpoint_tensor **out, struct error *error)
{
    char full[256];
    l->n_tensors++;
    *out = NULL;
    if (l->checkpoint == NULL)
        return STATUS_OK;
    snprintf(full, sizeof full, "%s%s", l->scope, name);
    TRY(checkpoint_require(l->checkpoint, full, dims, n_dims, out, error));
    l->used[l->n_tensors - 1] = *out;
    if (l->is_needed)
        checkpoint_prefetch(l->checkpoint, *out);
    return STATUS_OK;
}

/* ---- vectors ---- */

/* Takes `values` to the backend. */
static enum status put_vector(struct loader *l, const float *values, int64_t n, const float **out,
                              struct error *error)
{
    void *memory;
    size_t bytes = (size_t)n * sizeof(float);
    TRY(l->backend->ops->allocate(l->backend, &memory, bytes, "a weight vector", error));
    l->weights->vectors[l->weights->n_vectors++] = memory;
    l->backend->ops->upload(l->backend, memory, values, bytes);
    *out = memory;
    return STATUS_OK;
}

static void count_vector(struct loader *l, int64_t n)
{
    l->n_vectors++;
    l->bytes += (size_t)n * sizeof(float);
}

/* Reads one tensor as float32 into host memory that the caller frees; NULL at *out where it is not loaded. */
static enum status read_floats(struct loader *l, const char *name, const int64_t *dims, int n_dims,
                               float **out, struct error *error)
{
    const struct checkpoint_tensor *t;
    void *memory;
    *out = NULL;
    TRY(find(l, name, dims, n_dims, &t, error));
    if (t == NULL || !l->is_needed)
        return STATUS_OK;
    size_t n = 1;
    for (int i = 0; i < n_dims; i++)
        n *= (size_t)dims[i];
    TRY(memory_allocate_array(&memory, n, sizeof(float), name, error));
    dtype_convert(memory, DTYPE_F32, t->data, t->dtype, n);
    checkpoint_release(l->checkpoint, t);
    *out = memory;
    return STATUS_OK;
}

static void release(struct loader *l, const struct checkpoint_tensor *const *tensors, int n)
{
    for (int i = 0; i < n; i++)
        checkpoint_release(l->checkpoint, tensors[i]);
}

enum status loader_fused_vector(struct loader *l, const struct loader_part *parts, int n_parts,
                                const float **out, struct error *error)
{
    const struct checkpoint_tensor *tensors[MAX_PARTS] = {NULL};
    int64_t n = 0;
    void *memory;
    assert(n_parts <= MAX_PARTS);
    *out = NULL;
    for (int i = 0; i < n_parts; i++) {
        TRY(find(l, parts[i].name, &parts[i].rows, 1, &tensors[i], error));
        n += parts[i].rows;
    }
    if (!l->is_needed)
        return STATUS_OK;
    count_vector(l, n);
    if (l->checkpoint == NULL)
        return STATUS_OK;
    TRY(memory_allocate_array(&memory, (size_t)n, sizeof(float), parts[0].name, error));
    float *at = memory;
    for (int i = 0; i < n_parts; at += parts[i++].rows)
        dtype_convert(at, DTYPE_F32, tensors[i]->data, tensors[i]->dtype, (size_t)parts[i].rows);
    enum status status = put_vector(l, memory, n, out, error);
    memory_free(memory);
    release(l, tensors, n_parts);
    return status;
}

enum status loader_vector(struct loader *l, const char *name, int64_t n, const float **out,
                          struct error *error)
{
    return loader_fused_vector(l, &(struct loader_part){name, n}, 1, out, error);
}

/* values [rows, cols] to the backend as [cols, rows]. Frees values. */
static enum status put_transposed(struct loader *l, float *values, int64_t rows, int64_t cols,
                                  const float **out, struct error *error)
{
    void *memory;
    enum status status =
        memory_allocate_array(&memory, (size_t)(rows * cols), sizeof(float), "a weight", error);
    if (status == STATUS_OK) {
        float *turned = memory;
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t c = 0; c < cols; c++)
                turned[c * rows + r] = values[r * cols + c];
        }
        status = put_vector(l, turned, rows * cols, out, error);
        memory_free(memory);
    }
    memory_free(values);
    return status;
}

enum status loader_conv(struct loader *l, const char *name, int64_t channels, int64_t kernel,
                        const float **out, struct error *error)
{
    float *values;
    *out = NULL;
    TRY(read_floats(l, name, (int64_t[]){channels, 1, kernel}, 3, &values, error));
    if (l->is_needed)
        count_vector(l, channels * kernel);
    return values == NULL ? STATUS_OK : put_transposed(l, values, channels, kernel, out, error);
}

enum status loader_decay(struct loader *l, const char *name, int64_t channels, int64_t state_dim,
                         const float **out, struct error *error)
{
    float *values;
    int64_t cols = state_dim == 0 ? 1 : state_dim;
    *out = NULL;
    TRY(read_floats(l, name, (int64_t[]){channels, state_dim}, state_dim == 0 ? 1 : 2, &values, error));
    if (l->is_needed)
        count_vector(l, channels * cols);
    if (values == NULL)
        return STATUS_OK;
    for (int64_t i = 0; i < channels * cols; i++)
        values[i] = (float)-exp((double)values[i]);
    return put_transposed(l, values, channels, cols, out, error);
}

/* ---- matrices ---- */

static enum status put_matrix(struct loader *l, const struct tensor *w, const char *name, struct matrix **out,
                              struct error *error)
{
    struct matrix *matrix;
    TRY(l->backend->ops->matrix_create(l->backend, w, l->compute, name, &matrix, error));
    l->weights->matrices[l->weights->n_matrices++] = matrix;
    *out = matrix;
    return STATUS_OK;
}

/* The parts' rows end to end in host memory that the caller frees, in their dtype, or in float32 where they
 * differ. */
static enum status join(const struct checkpoint_tensor *const *tensors, int n_parts, int64_t rows, int64_t k,
                        struct tensor *out, struct error *error)
{
    enum dtype dtype = tensors[0]->dtype;
    void *memory;
    for (int i = 1; i < n_parts; i++)
        dtype = tensors[i]->dtype == dtype ? dtype : DTYPE_F32;
    TRY(memory_allocate_array(&memory, (size_t)(rows * k), dtype_size(dtype), tensors[0]->name, error));
    char *at = memory;
    for (int i = 0; i < n_parts; i++) {
        size_t n = (size_t)(tensors[i]->dims[0] * k);
        dtype_convert(at, dtype, tensors[i]->data, tensors[i]->dtype, n);
        at += n * dtype_size(dtype);
    }
    *out = tensor_make(memory, dtype, rows, k);
    return STATUS_OK;
}

enum status loader_fused(struct loader *l, const struct loader_part *parts, int n_parts, int64_t k,
                         struct matrix **out, struct error *error)
{
    const struct checkpoint_tensor *tensors[MAX_PARTS] = {NULL};
    int64_t rows = 0;
    assert(n_parts <= MAX_PARTS);
    *out = NULL;
    for (int i = 0; i < n_parts; i++) {
        TRY(find(l, parts[i].name, (int64_t[]){parts[i].rows, k}, 2, &tensors[i], error));
        rows += parts[i].rows;
    }
    if (!l->is_needed)
        return STATUS_OK;
    l->n_matrices++;
    l->bytes += l->backend->ops->matrix_bytes(l->backend, rows, k, l->compute);
    l->multiply_adds += l->share * (double)rows * (double)k;
    if (l->checkpoint == NULL)
        return STATUS_OK;
    if (n_parts == 1) {
        struct tensor as_it_lies = {.dtype = tensors[0]->dtype, .rows = rows, .cols = k, .stride = k};
        memcpy(&as_it_lies.data, &tensors[0]->data,
               sizeof as_it_lies.data); /* only read, though a view cannot say so */
        enum status alone = put_matrix(l, &as_it_lies, tensors[0]->name, out, error);
        release(l, tensors, 1);
        return alone;
    }
    struct tensor joined;
    TRY(join(tensors, n_parts, rows, k, &joined, error));
    release(l, tensors, n_parts);
    enum status status = put_matrix(l, &joined, tensors[0]->name, out, error);
    memory_free(joined.data);
    return status;
}

enum status loader_matrix(struct loader *l, const char *name, int64_t n, int64_t k, struct matrix **out,
                          struct error *error)
{
    return loader_fused(l, &(struct loader_part){name, n}, 1, k, out, error);
}

struct matrix *const *loader_next(const struct loader *l)
{
    return l->checkpoint == NULL ? NULL : &l->weights->matrices[l->weights->n_matrices];
}

/* ---- the embedding ---- */

/* Converts and uploads some rows at a time: the table may be a large part of memory. */
static enum status put_table(struct loader *l, const struct checkpoint_tensor *t, struct tensor *table,
                             struct error *error)
{
    void *memory;
    size_t row = (size_t)table->cols * dtype_size(table->dtype);
    TRY(memory_allocate_array(&memory, TABLE_ROWS, row, "rows of the embedding", error));
    for (int64_t r = 0; r < table->rows; r += TABLE_ROWS) {
        int64_t n = table->rows - r < TABLE_ROWS ? table->rows - r : TABLE_ROWS;
        const char *from = (const char *)t->data + (size_t)(r * table->cols) * dtype_size(t->dtype);
        dtype_convert(memory, table->dtype, from, t->dtype, (size_t)(n * table->cols));
        l->backend->ops->upload(l->backend, tensor_row(table, r), memory, (size_t)n * row);
    }
    memory_free(memory);
    checkpoint_release(l->checkpoint, t);
    return STATUS_OK;
}

enum status loader_table(struct loader *l, const char *name, int64_t rows, int64_t cols, struct tensor *out,
                         struct error *error)
{
    const struct checkpoint_tensor *t;
    size_t bytes = (size_t)(rows * cols) * dtype_size(l->compute);
    void *memory;
    TRY(find(l, name, (int64_t[]){rows, cols}, 2, &t, error));
    l->n_vectors++;
    l->bytes += bytes;
    *out = tensor_make(NULL, l->compute, rows, cols);
    if (t == NULL)
        return STATUS_OK;
    TRY(l->backend->ops->allocate(l->backend, &memory, bytes, "the embedding", error));
    l->weights->vectors[l->weights->n_vectors++] = memory;
    out->data = memory;
    return put_table(l, t, out, error);
}

/* ---- leftovers ---- */

void loader_ignore(struct loader *l, const char *name)
{
    l->n_tensors++;
    if (l->checkpoint != NULL)
        l->used[l->n_tensors - 1] = checkpoint_find(l->checkpoint, name);
}

static int compare_pointers(const void *a, const void *b)
{
    const struct checkpoint_tensor *x = *(const struct checkpoint_tensor *const *)a;
    const struct checkpoint_tensor *y = *(const struct checkpoint_tensor *const *)b;
    return x < y ? -1 : x > y;
}

/* Buffers that old releases saved among the weights, though they follow from the config. */
static bool is_harmless(const char *name)
{
    static const char ending[] = "rotary_emb.inv_freq";
    size_t n = strlen(name);
    return n >= sizeof ending - 1 && strcmp(name + n - (sizeof ending - 1), ending) == 0;
}

enum status loader_check_leftovers(const struct loader *l, struct error *error)
{
    qsort(l->used, (size_t)l->n_tensors, sizeof *l->used, compare_pointers);
    for (int64_t i = 0; i < checkpoint_n_tensors(l->checkpoint); i++) {
        const struct checkpoint_tensor *t = checkpoint_get(l->checkpoint, i);
        if (!is_harmless(t->name) &&
            bsearch(&t, l->used, (size_t)l->n_tensors, sizeof *l->used, compare_pointers) == NULL)
            return error_set(error, STATUS_INPUT,
                             "%s: tensor %s has no place in the model that config.json describes", t->file,
                             t->name);
    }
    return STATUS_OK;
}
