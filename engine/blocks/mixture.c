#include "engine/blocks/mixture.h"

#include <stdio.h>

static const struct mlp_values shared_values = {VALUE_SHARED_ACTIVATION, VALUE_SHARED_NEURONS};

/* ---- weights ---- */

static enum status load_expert_inputs(struct loader *l, const struct model *m, int expert,
                                      struct error *error)
{
    char gate[64], up[64];
    struct matrix *matrix;
    snprintf(gate, sizeof gate, "experts.%d.gate_proj.weight", expert);
    snprintf(up, sizeof up, "experts.%d.up_proj.weight", expert);
    const struct loader_part parts[] = {{gate, m->moe_intermediate_size}, {up, m->moe_intermediate_size}};
    return loader_fused(l, parts, 2, m->hidden_size, &matrix, error);
}

static enum status load_expert_output(struct loader *l, const struct model *m, int expert,
                                      struct error *error)
{
    char down[64];
    struct matrix *matrix;
    snprintf(down, sizeof down, "experts.%d.down_proj.weight", expert);
    return loader_matrix(l, down, m->hidden_size, m->moe_intermediate_size, &matrix, error);
}

static enum status load_experts(struct loader *l, const struct model *m, struct mixture *out,
                                struct error *error)
{
    l->share = (double)m->top_k / m->n_experts;
    out->gate_ups = loader_next(l);
    for (int e = 0; e < m->n_experts; e++)
        TRY(load_expert_inputs(l, m, e, error));
    out->downs = loader_next(l);
    for (int e = 0; e < m->n_experts; e++)
        TRY(load_expert_output(l, m, e, error));
    l->share = 1;
    return STATUS_OK;
}

enum status mixture_load(struct loader *l, const struct model *m, const char *router, struct mixture *out,
                         struct error *error)
{
    TRY(loader_matrix(l, router, m->n_experts, m->hidden_size, &out->router, error));
    if (m->router_sigmoid)
        TRY(loader_vector(l, "experts.e_score_correction_bias", m->n_experts, &out->selection_bias, error));
    TRY(load_experts(l, m, out, error));
    if (m->shared_intermediate_size == 0)
        return STATUS_OK;
    return mlp_load(l, m, "shared_expert.", m->shared_intermediate_size, &out->shared, error);
}

/* ---- a run at work, and its scratch ---- */

struct run_state {
    const struct mixture *mixture;
    struct tensor logits; /* [T, n_experts]; the load's, also where the reference widens them afterwards */
    struct tensor weights, indices; /* [T, top_k] */
    struct expert_groups groups;
    struct tensor
        slots; /* [T * top_k, hidden_size] by expert: outputs; before that gathered_linear's memory */
    struct tensor gate_up; /* [T * top_k, 2 * width] */
    struct tensor neurons; /* [T * top_k, width] */
    struct tensor shared_out;
    struct mlp_scratch shared;
};

static int32_t *take_places(struct forward *f, int64_t n)
{
    return arena_take(&f->scratch, (size_t)n * sizeof(int32_t));
}

static struct run_state take_scratch(struct forward *f)
{
    const struct model *m = f->model;
    int64_t T = f->limits.max_tokens, slots = T * m->top_k;
    f->scratch.used = 0;
    struct run_state s = {
        .logits = forward_take(f, T, m->n_experts, m->load_dtype),
        .weights = forward_take(f, T, m->top_k, m->load_dtype),
        .indices = forward_take(f, T, m->top_k, DTYPE_I32),
        .slots = forward_take(f, slots, m->hidden_size, m->load_dtype),
        .gate_up = forward_take(f, slots, 2 * m->moe_intermediate_size, m->load_dtype),
        .neurons = forward_take(f, slots, m->moe_intermediate_size, m->load_dtype),
        .groups = {.order = take_places(f, slots),
                   .places = take_places(f, slots),
                   .offsets = take_places(f, m->n_experts + 1),
                   .n_experts = m->n_experts,
                   .top_k = m->top_k},
    };
    if (m->shared_intermediate_size > 0) {
        s.shared = mlp_take_scratch(f, m->shared_intermediate_size, &shared_values);
        s.shared_out =
            forward_take_if(f, forward_wants(f, VALUE_SHARED_EXPERT_OUTPUT), m->hidden_size, m->load_dtype);
    }
    return s;
}

void mixture_plan(struct forward *f)
{
    take_scratch(f);
}

static int64_t value_width(const struct forward *f, enum value_id value)
{
    return f->model->top_k *
           (value == VALUE_EXPERT_OUTPUTS ? f->model->hidden_size : f->model->moe_intermediate_size);
}

size_t mixture_row_bytes(const struct forward *f)
{
    int64_t outputs = forward_wants(f, VALUE_EXPERT_OUTPUTS) ? value_width(f, VALUE_EXPERT_OUTPUTS) : 0;
    int64_t neurons = forward_wants(f, VALUE_EXPERT_NEURONS) ? value_width(f, VALUE_EXPERT_NEURONS) : 0;
    return (size_t)(outputs > neurons ? outputs : neurons) * dtype_size(f->model->load_dtype);
}

/* ---- the steps ---- */

static void route(struct forward *f, struct run_state *s)
{
    const struct model *m = f->model;
    const struct backend_ops *ops = f->backend->ops;
    ops->linear(f->backend, forward_tokens(f, f->normed), s->mixture->router, NULL, (struct tensor){0},
                s->logits);
    forward_offer(f, VALUE_ROUTER_LOGITS, s->logits);
    struct route_args args = {.logits = s->logits,
                              .router = m->router_sigmoid ? ROUTER_SIGMOID : ROUTER_SOFTMAX,
                              .top_k = m->top_k,
                              .softcap = m->router_softcap,
                              .selection_bias = s->mixture->selection_bias,
                              .weights = s->weights,
                              .indices = s->indices};
    if (f->done)
        return;
    ops->route(f->backend, &args);
    forward_offer(f, VALUE_EXPERT_WEIGHTS, s->weights);
    forward_offer(f, VALUE_EXPERT_INDICES, s->indices);
}

/* Writes out the slots of the wanted tokens, as many at a time as the buffer holds. */
static void offer_slots(struct forward *f, const struct run_state *s, enum value_id value,
                        struct tensor by_expert, struct tensor weights)
{
    struct row_list rows = forward_rows(f, value);
    int64_t width = value_width(f, value), most;
    struct tensor piece = tensor_make(f->piece, f->model->load_dtype, 0, width);
    most = forward_piece_rows(f, (size_t)width * dtype_size(piece.dtype), 1);
    for (int64_t at = 0; at < rows.n; at += most) {
        struct row_list part = {rows.index + at, rows.n - at < most ? rows.n - at : most};
        piece.rows = part.n;
        f->backend->ops->ungroup_slots(f->backend, by_expert, &s->groups, weights, part, piece);
        forward_offer_piece(f, value, piece, part.index, part.n);
    }
    forward_close(f, value);
}

/* Leaves the routed sum in f->out. */
static void run_experts(struct forward *f, struct run_state *s)
{
    const struct backend_ops *ops = f->backend->ops;
    int64_t width = f->model->moe_intermediate_size;
    struct tensor gate = tensor_cols(s->gate_up, 0, width), up = tensor_cols(s->gate_up, width, width);
    struct tensor out = forward_tokens(f, f->out);
    if (f->done)
        return;
    ops->group_experts(f->backend, s->indices, &s->groups);
    ops->gathered_linear(f->backend, forward_tokens(f, f->normed), &s->groups, s->mixture->gate_ups, s->slots,
                         s->gate_up);
    ops->silu_mul(f->backend, gate, up, (struct tensor){0}, s->neurons);
    offer_slots(f, s, VALUE_EXPERT_NEURONS, s->neurons, (struct tensor){0});
    if (f->done)
        return;
    ops->grouped_linear(f->backend, s->neurons, &s->groups, s->mixture->downs, s->slots);
    offer_slots(f, s, VALUE_EXPERT_OUTPUTS, s->slots, s->weights);
    if (f->done)
        return;
    ops->combine_slots(f->backend, s->slots, &s->groups, s->weights, f->model->routed_scale, out);
    forward_offer(f, VALUE_ROUTED_OUTPUT, out);
}

/* Adds the shared expert's output to f->out. */
static void run_shared(struct forward *f, struct run_state *s)
{
    const struct mlp *shared = &s->mixture->shared;
    const struct backend_ops *ops = f->backend->ops;
    struct tensor out = forward_tokens(f, f->out);
    if (f->done || f->model->shared_intermediate_size == 0)
        return;
    struct tensor neurons = mlp_run_neurons(f, shared, &s->shared, &shared_values);
    if (!forward_wants(f, VALUE_SHARED_EXPERT_OUTPUT)) {
        ops->linear(f->backend, neurons, shared->down, shared->down_bias, out, out);
        return;
    }
    ops->linear(f->backend, neurons, shared->down, shared->down_bias, (struct tensor){0}, s->shared_out);
    forward_offer(f, VALUE_SHARED_EXPERT_OUTPUT, s->shared_out);
    ops->add(f->backend, out, s->shared_out, out);
}

void mixture_run(struct forward *f, const struct mixture *mixture)
{
    if (f->done)
        return;
    struct run_state s = take_scratch(f);
    struct tensor stream = forward_tokens(f, f->stream), out = forward_tokens(f, f->out);
    s.mixture = mixture;
    s.logits.rows = s.weights.rows = s.indices.rows = s.shared_out.rows = f->n_tokens;
    s.groups.n_tokens = f->n_tokens;
    s.slots.rows = s.gate_up.rows = s.neurons.rows = f->n_tokens * f->model->top_k;
    route(f, &s);
    run_experts(f, &s);
    run_shared(f, &s);
    forward_offer(f, VALUE_MLP_OUTPUT, out);
    if (!f->done)
        f->backend->ops->add(f->backend, stream, out, stream);
}
