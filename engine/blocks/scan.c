#include "engine/blocks/scan.h"

#include <assert.h>

static bool wants_states(const struct forward *f)
{
    return forward_wants(f, VALUE_LINEAR_STATES) || forward_wants(f, VALUE_LINEAR_STATE) ||
           forward_wants(f, VALUE_LINEAR_STATE_INPUT) || forward_wants(f, VALUE_LINEAR_STATE_OUTPUT);
}

size_t scan_row_bytes(const struct forward *f, int64_t state_width, bool has_decay_rows)
{
    int rows = wants_states(f) + (has_decay_rows && forward_wants(f, VALUE_LINEAR_DECAYS));
    return (size_t)rows * (size_t)state_width * sizeof(float);
}

static bool starts_run(const struct forward *f, int32_t window)
{
    return f->batch->window_position[window] == 0;
}

/* Every row whose state someone reads. */
static struct row_list find_state_rows(struct forward *f)
{
    const struct batch *b = f->batch;
    struct row_list ends = forward_rows(f, VALUE_LINEAR_STATE_OUTPUT);
    struct row_list starts = forward_rows(f, VALUE_LINEAR_STATE_INPUT);
    forward_mark_all(f, forward_rows(f, VALUE_LINEAR_STATES));
    forward_mark_all(f, forward_rows(f, VALUE_LINEAR_STATE));
    for (int64_t i = 0; i < ends.n; i++)
        forward_mark(f, b->window_start[ends.index[i] + 1] - 1);
    for (int64_t i = 0; i < starts.n; i++) {
        if (starts.index[i] > 0 && !starts_run(f, starts.index[i]))
            forward_mark(f, b->window_start[starts.index[i]] - 1);
    }
    if (b->carry_out && forward_wants(f, VALUE_LINEAR_STATE_INPUT))
        forward_mark(f, b->n_tokens - 1);
    return forward_collect(f);
}

/* The row of the piece's states that holds batch row `row`. */
static struct tensor find_state(const struct cut *cut, struct tensor states, int64_t row)
{
    int64_t low = 0, high = cut->absolute[0].n;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (cut->absolute[0].index[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    assert(low < cut->absolute[0].n && cut->absolute[0].index[low] == row);
    return tensor_rows(states, low, 1);
}

/* Windows wanted of a value, and how far they have been offered. */
struct windows {
    enum value_id value;
    struct row_list wanted;
    int64_t at;
};

/* Offers the windows whose state has been reached, in order. */
static void offer_windows(struct forward *f, const struct scan *scan, const struct cut *cut,
                          struct tensor states, struct windows *w)
{
    for (; w->at < w->wanted.n; w->at++) {
        int32_t window = w->wanted.index[w->at];
        bool is_input = w->value == VALUE_LINEAR_STATE_INPUT;
        struct tensor state;
        if (is_input && starts_run(f, window)) {
            state = f->zeros;
            state.cols = state.stride = scan->state_width;
        } else if (is_input && window == 0) {
            state = tensor_make(scan->carry->last_state, DTYPE_F32, 1, scan->state_width);
        } else {
            int64_t row = f->batch->window_start[window + (is_input ? 0 : 1)] - 1;
            if (row >= cut->first + cut->n)
                return;
            state = find_state(cut, states, row);
        }
        forward_offer_piece(f, w->value, state, &w->wanted.index[w->at], 1);
    }
}

/* Keeps the last token's state for the next batch's state_input. */
static void keep_last_state(struct forward *f, const struct scan *scan, const struct cut *cut,
                            struct tensor states)
{
    if (!f->batch->carry_out || cut->first + cut->n < f->n_tokens ||
        !forward_wants(f, VALUE_LINEAR_STATE_INPUT))
        return;
    struct tensor state = find_state(cut, states, f->n_tokens - 1);
    struct tensor kept = tensor_make(scan->carry->last_state, DTYPE_F32, 1, scan->state_width);
    f->backend->ops->gather_rows(f->backend, state, (struct row_list){f->identity, 1}, kept);
}

/* The buffer for pieces, shared out between states and decays. */
static void plan_cut(struct forward *f, const struct scan *scan, struct cut *cut, struct tensor *states,
                     struct tensor *decays)
{
    size_t row = (size_t)scan->state_width * sizeof(float);
    *cut = (struct cut){0};
    *states = *decays = (struct tensor){0};
    if (wants_states(f))
        cut->wanted[0] = find_state_rows(f);
    if (scan->has_decay_rows)
        cut->wanted[1] = forward_rows(f, VALUE_LINEAR_DECAYS);
    int shares = (cut->wanted[0].n > 0) + (cut->wanted[1].n > 0);
    if (shares == 0)
        return;
    cut->max_rows[0] = cut->max_rows[1] = forward_piece_rows(f, row, shares);
    *states = tensor_make(f->piece, DTYPE_F32, 0, scan->state_width);
    *decays = *states;
    if (shares == 2)
        decays->data = (char *)f->piece + (size_t)cut->max_rows[0] * row;
}

static void run_piece(struct forward *f, const struct scan *scan, const struct cut *cut,
                      struct tensor *states, struct tensor *decays)
{
    struct scan_piece piece = {.first = cut->first,
                               .n = cut->n,
                               .runs = cut->runs,
                               .state = scan->carry->state,
                               .state_rows = cut->relative[0],
                               .decay_rows = cut->relative[1]};
    states->rows = cut->relative[0].n;
    decays->rows = cut->relative[1].n;
    if (states->rows > 0)
        piece.states = *states;
    if (decays->rows > 0)
        piece.decays = *decays;
    scan->run(f, scan->mixer, &piece);
}

void scan_run(struct forward *f, const struct scan *scan)
{
    struct cut cut;
    struct tensor states, decays;
    plan_cut(f, scan, &cut, &states, &decays);
    struct windows inputs = {VALUE_LINEAR_STATE_INPUT, forward_rows(f, VALUE_LINEAR_STATE_INPUT), 0};
    struct windows outputs = {VALUE_LINEAR_STATE_OUTPUT, forward_rows(f, VALUE_LINEAR_STATE_OUTPUT), 0};
    while (forward_cut(f, &cut)) {
        run_piece(f, scan, &cut, &states, &decays);
        forward_offer_piece(f, VALUE_LINEAR_STATES, states, cut.absolute[0].index, states.rows);
        forward_offer_piece(f, VALUE_LINEAR_STATE, states, cut.absolute[0].index, states.rows);
        if (scan->has_decay_rows)
            forward_offer_piece(f, VALUE_LINEAR_DECAYS, decays, cut.absolute[1].index, decays.rows);
        offer_windows(f, scan, &cut, states, &inputs);
        offer_windows(f, scan, &cut, states, &outputs);
        keep_last_state(f, scan, &cut, states);
    }
    forward_close(f, VALUE_LINEAR_STATES);
    forward_close(f, VALUE_LINEAR_STATE);
    if (scan->has_decay_rows)
        forward_close(f, VALUE_LINEAR_DECAYS);
    forward_close(f, VALUE_LINEAR_STATE_INPUT);
    forward_close(f, VALUE_LINEAR_STATE_OUTPUT);
}
