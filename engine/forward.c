#include "engine/forward.h"

#include <assert.h>
#include <string.h>

/* ---- sites ---- */

bool forward_wants(const struct forward *f, enum value_id value)
{
    return (f->wanted[value_is_per_layer(value) ? 1 + f->layer : 0] >> value & 1) != 0;
}

static int site_layer(const struct forward *f, enum value_id value)
{
    return value_is_per_layer(value) ? f->layer : -1;
}

struct row_list forward_rows(const struct forward *f, enum value_id value)
{
    if (!forward_wants(f, value))
        return (struct row_list){NULL, 0};
    return f->observer->rows(f->observer->context, value, site_layer(f, value));
}

void forward_offer_piece(struct forward *f, enum value_id value, struct tensor data, const int32_t *rows,
                         int64_t n)
{
    if (n == 0 || !forward_wants(f, value))
        return;
    struct piece piece = {.data = data, .rows = rows, .n = n};
    f->observer->offer(f->observer->context, value, site_layer(f, value), &piece);
}

void forward_close(struct forward *f, enum value_id value)
{
    if (!forward_wants(f, value))
        return;
    f->n_left--;
    f->done = f->n_left == 0;
}

void forward_offer(struct forward *f, enum value_id value, struct tensor data)
{
    if (f->done)
        return;
    forward_offer_piece(f, value, data, NULL, data.rows);
    forward_close(f, value);
}

/* ---- steps ---- */

void forward_norm(struct forward *f, const float *weight, enum value_id value)
{
    if (f->done)
        return;
    struct norm_args args = {.x = forward_tokens(f, f->stream),
                             .weight = weight,
                             .group = f->model->hidden_size,
                             .epsilon = f->model->norm_epsilon,
                             .y = forward_tokens(f, f->normed)};
    f->backend->ops->rms_norm(f->backend, &args);
    forward_offer(f, value, args.y);
}

void forward_project(struct forward *f, struct tensor x, const struct matrix *matrix, const float *bias,
                     enum value_id value)
{
    if (f->done)
        return;
    const struct backend_ops *ops = f->backend->ops;
    struct tensor stream = forward_tokens(f, f->stream), out = forward_tokens(f, f->out);
    if (!forward_wants(f, value)) {
        ops->linear(f->backend, x, matrix, bias, stream, stream);
        return;
    }
    ops->linear(f->backend, x, matrix, bias, (struct tensor){0}, out);
    forward_offer(f, value, out);
    if (!f->done)
        ops->add(f->backend, stream, out, stream);
}

/* ---- buffers ---- */

int64_t forward_round_rows(int64_t rows)
{
    return (rows + BACKEND_ROW_PADDING - 1) / BACKEND_ROW_PADDING * BACKEND_ROW_PADDING;
}

struct tensor forward_take(struct forward *f, int64_t rows, int64_t cols, enum dtype dtype)
{
    size_t bytes = (size_t)(forward_round_rows(rows) * cols) * dtype_size(dtype);
    return tensor_make(arena_take(&f->scratch, bytes), dtype, 0, cols);
}

struct tensor forward_take_if(struct forward *f, bool is_wanted, int64_t cols, enum dtype dtype)
{
    return is_wanted ? forward_take(f, f->limits.max_tokens, cols, dtype) : (struct tensor){0};
}

int64_t forward_piece_rows(const struct forward *f, size_t row_bytes, int share)
{
    int64_t rows = (int64_t)(f->piece_bytes / (size_t)share / row_bytes);
    return rows < 1 ? 1 : rows;
}

/* ---- pieces ---- */

/* The runs of the piece, and whether a state enters and leaves it. */
static void clip_runs(struct forward *f, struct cut *cut)
{
    int64_t end = cut->first + cut->n, i = cut->run, kept = 0;
    const struct runs *all = &f->runs;
    while (all->list[i].start + all->list[i].length <= cut->first)
        i++;
    cut->run = i;
    bool starts_inside = all->list[i].start < cut->first, ends_inside = false;
    for (; i < all->n && all->list[i].start < end; i++) {
        struct run r = all->list[i];
        int64_t from = r.start < cut->first ? cut->first : r.start;
        int64_t to = r.start + r.length > end ? end : r.start + r.length;
        ends_inside = to < r.start + r.length;
        f->clipped[kept++] = (struct run){.start = (int32_t)(from - cut->first),
                                          .length = (int32_t)(to - from),
                                          .position = (int32_t)(r.position + from - r.start)};
    }
    cut->runs = (struct runs){.list = f->clipped,
                              .n = kept,
                              .carry_in = starts_inside || (cut->first == 0 && all->carry_in),
                              .carry_out = ends_inside || (end == f->n_tokens && all->carry_out)};
}

/* Moves on over the wanted rows that lie before `end`. */
static void take_rows(struct forward *f, struct cut *cut, int list, int64_t end)
{
    const int32_t *index = cut->absolute[list].index;
    int64_t left = cut->wanted[list].index + cut->wanted[list].n - index, n = 0;
    for (; n < left && index[n] < end; n++)
        f->relative[list][n] = (int32_t)(index[n] - cut->first);
    cut->absolute[list].n = n;
    cut->relative[list] = (struct row_list){f->relative[list], n};
}

bool forward_cut(struct forward *f, struct cut *cut)
{
    int64_t first = cut->first + cut->n, end = f->n_tokens;
    if (first >= f->n_tokens)
        return false;
    if (cut->stop > first)
        end = cut->stop;
    cut->first = first;
    for (int i = 0; i < 2; i++) {
        struct row_list *done = &cut->absolute[i];
        done->index = first == 0 ? cut->wanted[i].index : done->index + done->n;
        int64_t left = cut->wanted[i].n == 0 ? 0 : cut->wanted[i].index + cut->wanted[i].n - done->index;
        if (left > cut->max_rows[i] && done->index[cut->max_rows[i]] < end)
            end = done->index[cut->max_rows[i]];
        done->n = 0;
    }
    assert(end > first);
    for (int i = 0; i < 2; i++) {
        if (cut->wanted[i].n > 0)
            take_rows(f, cut, i, end);
        else
            cut->relative[i] = (struct row_list){NULL, 0};
    }
    cut->n = end - first;
    clip_runs(f, cut);
    return true;
}

void forward_mark(struct forward *f, int64_t row)
{
    assert(row >= 0 && row < f->n_tokens);
    f->marks[row] = 1;
}

void forward_mark_all(struct forward *f, struct row_list rows)
{
    for (int64_t i = 0; i < rows.n; i++)
        forward_mark(f, rows.index[i]);
}

struct row_list forward_collect(struct forward *f)
{
    int64_t n = 0;
    for (int64_t row = 0; row < f->n_tokens; row++) {
        if (f->marks[row])
            f->marked[n++] = (int32_t)row;
    }
    memset(f->marks, 0, (size_t)f->n_tokens);
    return (struct row_list){f->marked, n};
}
