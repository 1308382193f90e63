#include "engine/replica.h"

#include "engine/families/family.h"
#include "engine/rope.h"

#include <string.h>

#define DEFAULT_PIECE_BYTES ((size_t)64 << 20)
#define MAX_TOKENS ((int64_t)1 << 30)
#define MAX_BYTES 4e18 /* more than any machine has, and few enough to count in 63 bits */

struct replica {
    struct forward forward;
    struct weights weights;
    struct layer *layers;      /* [n_layers], owned */
    struct tensor embedding;   /* [vocab_size, hidden_size] */
    const float *final_norm;   /* [hidden_size] */
    struct matrix *lm_head;    /* [vocab_size, hidden_size] */
    int depth;                 /* of struct loader: how far the forward goes */
    double multiply_adds;      /* a token */
    int32_t *ids;              /* [max_tokens] on the backend */
    struct tensor mask, sizes; /* [max_tokens, 1] and [max_windows, 2] int32 on the backend, where wanted */
    struct tensor scan_state;  /* without carry, the state between a scan's pieces */
    void *workspace, *carry;   /* on the backend, owned */
    struct arena host;         /* owned */
    struct run *runs;          /* [max_windows] host */
    int32_t *host_sizes;       /* [max_windows, 2] host, where wanted */
};

/* ---- what is wanted ---- */

/* The step of a block after which the value is known. */
static enum loader_step find_step(const struct block *block, enum value_id value)
{
    switch (catalogue_get(value)->host) {
    case HOST_LINEAR_ATTN:
    case HOST_SELF_ATTN:
        return STEP_MIXER;
    case HOST_MLP:
    case HOST_SHARED_EXPERTS:
        return STEP_MLP;
    default:
        break;
    }
    switch (value) {
    case VALUE_LAYER_INPUT:
        return STEP_INPUT;
    case VALUE_ATTENTION_NORM_OUTPUT:
        return STEP_MIXER_NORM;
    case VALUE_LAYER_MID:
        return STEP_MIXER;
    case VALUE_MLP_NORM_OUTPUT:
    case VALUE_MLP_INPUT:
        return STEP_MLP_NORM;
    default:
        return block->feed_forward == FEED_FORWARD_NONE ? STEP_MIXER : STEP_MLP;
    }
}

/* The final norm stands as the first step of one more block, lm_head as its second. */
static int find_model_depth(const struct model *m, enum value_id value)
{
    int past = LOADER_STEPS * m->n_layers;
    if (value == VALUE_FINAL_NORM_OUTPUT)
        return past;
    if (value == VALUE_LOGITS || value == VALUE_LM_HEAD_OUTPUT || value == VALUE_NEXT_TOKEN_PROBS)
        return past + 1;
    return -1;
}

static void ask_one(struct replica *r, enum value_id value, int layer)
{
    struct forward *f = &r->forward;
    struct value_description d;
    model_describe_value(f->model, value, layer, f->limits.max_position, &d);
    if (!d.available || !f->observer->wants(f->observer->context, value, layer))
        return;
    int depth = layer < 0 ? find_model_depth(f->model, value)
                          : LOADER_STEPS * layer + (int)find_step(&f->model->blocks[layer], value);
    f->wanted[layer + 1] |= (uint64_t)1 << value;
    f->n_wanted++;
    r->depth = depth > r->depth ? depth : r->depth;
}

static void ask_observer(struct replica *r)
{
    _Static_assert(VALUE_COUNT <= 64, "a layer's wanted values are bits of one word");
    r->depth = -1;
    for (int layer = -1; layer < r->forward.model->n_layers; layer++) {
        for (int value = 0; value < VALUE_COUNT; value++) {
            if (value_is_per_layer((enum value_id)value) == (layer >= 0))
                ask_one(r, (enum value_id)value, layer);
        }
    }
}

static bool is_wanted(const struct replica *r, int layer, enum value_id value)
{
    return (r->forward.wanted[layer + 1] >> value & 1) != 0;
}

/* How many blocks run, if only in part. */
static int n_run_layers(const struct replica *r)
{
    int n = r->depth < 0 ? 0 : r->depth / LOADER_STEPS + 1;
    return n < r->forward.model->n_layers ? n : r->forward.model->n_layers;
}

/* Whether the block's mixer, or its feed-forward part, runs. */
static bool runs_step(const struct replica *r, int layer, enum loader_step step)
{
    return LOADER_STEPS * layer + (int)step <= r->depth;
}

/* ---- weights ---- */

static enum status load_ends(struct replica *r, struct loader *l, struct error *error)
{
    const struct model *m = r->forward.model;
    const struct family *family = m->family;
    const char *embedding = family->embedding;
    if (l->checkpoint != NULL && family->old_embedding != NULL &&
        checkpoint_find(l->checkpoint, embedding) == NULL &&
        checkpoint_find(l->checkpoint, family->old_embedding) != NULL)
        embedding = family->old_embedding;
    loader_enter(l, m->n_layers, STEP_INPUT, "%s", "");
    TRY(loader_table(l, embedding, m->vocab_size, m->hidden_size, &r->embedding, error));
    TRY(loader_vector(l, family->final_norm, m->hidden_size, &r->final_norm, error));
    loader_enter(l, m->n_layers, STEP_MIXER_NORM, "%s", "");
    if (m->tied_lm_head)
        loader_ignore(l, "lm_head.weight");
    return loader_matrix(l, m->tied_lm_head ? embedding : "lm_head.weight", m->vocab_size, m->hidden_size,
                         &r->lm_head, error);
}

static enum status walk_weights(struct replica *r, struct loader *l, struct error *error)
{
    const struct model *m = r->forward.model;
    TRY(load_ends(r, l, error));
    for (int i = 0; i < m->n_layers; i++)
        TRY(m->family->load_block(l, m, i, &r->layers[i], error));
    return STATUS_OK;
}

static struct loader start_walk(struct replica *r)
{
    return (struct loader){.backend = r->forward.backend,
                           .compute = r->forward.model->load_dtype,
                           .depth = r->depth,
                           .share = 1};
}

static enum status count_weights(struct replica *r, struct loader *l, struct error *error)
{
    *l = start_walk(r);
    return walk_weights(r, l, error);
}

static enum status load_from(struct replica *r, const struct loader *counted,
                             const struct checkpoint *checkpoint, struct error *error)
{
    struct loader l = start_walk(r);
    void *used;
    l.checkpoint = checkpoint;
    l.weights = &r->weights;
    TRY(memory_allocate_array(&used, (size_t)counted->n_tensors, sizeof *l.used, "the list of tensors",
                              error));
    l.used = used;
    enum status status = walk_weights(r, &l, error);
    if (status == STATUS_OK)
        status = loader_check_leftovers(&l, error);
    memory_free(used);
    return status;
}

static enum status load_weights(struct replica *r, struct error *error)
{
    struct loader counted;
    struct checkpoint *checkpoint;
    void *matrices, *vectors;
    TRY(count_weights(r, &counted, error));
    r->multiply_adds = counted.multiply_adds;
    TRY(memory_allocate_array(&matrices, (size_t)counted.n_matrices, sizeof *r->weights.matrices,
                              "the list of matrices", error));
    r->weights.matrices = matrices;
    TRY(memory_allocate_array(&vectors, (size_t)counted.n_vectors, sizeof *r->weights.vectors,
                              "the list of vectors", error));
    r->weights.vectors = vectors;
    TRY(checkpoint_open(r->forward.model->checkpoint, &checkpoint, error));
    enum status status = load_from(r, &counted, checkpoint, error);
    checkpoint_close(checkpoint);
    if (status == STATUS_OK)
        status = r->forward.backend->ops->synchronize(r->forward.backend, error);
    return status;
}

/* ---- the head: final norm, lm_head, and what follows from it ---- */

struct head {
    struct tensor normed;   /* [T, hidden_size] */
    struct tensor gathered; /* [rows of a slab, hidden_size] in the load's dtype */
    int64_t slab_rows;      /* whole tiles of the product */
};

static size_t logits_row_bytes(const struct replica *r)
{
    const struct model *m = r->forward.model;
    size_t row = (size_t)m->vocab_size * dtype_size(m->load_dtype),
           probs = 2 * (size_t)m->vocab_size * sizeof(float);
    bool logits = is_wanted(r, -1, VALUE_LOGITS) || is_wanted(r, -1, VALUE_LM_HEAD_OUTPUT);
    if (is_wanted(r, -1, VALUE_NEXT_TOKEN_PROBS))
        return probs;
    return logits ? row : 0;
}

static struct head take_head(struct replica *r)
{
    struct forward *f = &r->forward;
    const struct model *m = f->model;
    struct head h = {0};
    f->scratch.used = 0;
    h.normed =
        forward_take(f, f->limits.max_tokens, m->hidden_size, m->residual_f32 ? DTYPE_F32 : m->load_dtype);
    if (logits_row_bytes(r) > 0) {
        h.slab_rows =
            forward_piece_rows(f, logits_row_bytes(r), 1) / BACKEND_ROW_PADDING * BACKEND_ROW_PADDING;
        if (h.slab_rows > f->token_rows)
            h.slab_rows = f->token_rows;
        h.gathered = forward_take(f, h.slab_rows, m->hidden_size, m->load_dtype);
    }
    return h;
}

/* lm_head of the given rows of the normed stream, at the start of the buffer for pieces. */
static struct tensor run_lm_head(struct replica *r, struct head *h, struct row_list rows, enum dtype dtype)
{
    struct forward *f = &r->forward;
    const struct backend_ops *ops = f->backend->ops;
    struct tensor logits = tensor_make(f->piece, dtype, rows.n, f->model->vocab_size);
    h->gathered.rows = rows.n;
    ops->gather_rows(f->backend, h->normed, rows, h->gathered);
    ops->linear(f->backend, h->gathered, r->lm_head, NULL, (struct tensor){0}, logits);
    return logits;
}

static void offer_logits(struct replica *r, struct head *h)
{
    struct forward *f = &r->forward;
    forward_mark_all(f, forward_rows(f, VALUE_LM_HEAD_OUTPUT));
    forward_mark_all(f, forward_rows(f, VALUE_LOGITS));
    struct row_list rows = forward_collect(f);
    for (int64_t at = 0; at < rows.n; at += h->slab_rows) {
        struct row_list part = {rows.index + at, rows.n - at < h->slab_rows ? rows.n - at : h->slab_rows};
        struct tensor logits = run_lm_head(r, h, part, f->model->load_dtype);
        /* None of the families does anything past lm_head. */
        forward_offer_piece(f, VALUE_LM_HEAD_OUTPUT, logits, part.index, part.n);
        forward_offer_piece(f, VALUE_LOGITS, logits, part.index, part.n);
    }
    forward_close(f, VALUE_LM_HEAD_OUTPUT);
    forward_close(f, VALUE_LOGITS);
}

static void offer_next_token_probs(struct replica *r, struct head *h)
{
    struct forward *f = &r->forward;
    struct row_list windows = forward_rows(f, VALUE_NEXT_TOKEN_PROBS);
    struct tensor probs = tensor_make(NULL, DTYPE_F32, 0, f->model->vocab_size);
    if (f->done)
        return;
    /* The second half of the buffer, behind as many rows of logits. */
    probs.data = (char *)f->piece + (size_t)(h->slab_rows * probs.cols) * sizeof(float);
    for (int64_t at = 0; at < windows.n; at += h->slab_rows) {
        int64_t n = windows.n - at < h->slab_rows ? windows.n - at : h->slab_rows;
        for (int64_t i = 0; i < n; i++)
            f->marked[i] = f->batch->window_start[windows.index[at + i] + 1] - 1;
        struct tensor logits = run_lm_head(r, h, (struct row_list){f->marked, n}, DTYPE_F32);
        probs.rows = n;
        f->backend->ops->softmax(f->backend, logits, probs);
        forward_offer_piece(f, VALUE_NEXT_TOKEN_PROBS, probs, windows.index + at, n);
    }
    forward_close(f, VALUE_NEXT_TOKEN_PROBS);
}

static void run_head(struct replica *r)
{
    struct forward *f = &r->forward;
    if (f->done)
        return;
    struct head h = take_head(r);
    h.normed.rows = f->n_tokens;
    struct norm_args norm = {.x = forward_tokens(f, f->stream),
                             .weight = r->final_norm,
                             .group = f->model->hidden_size,
                             .epsilon = f->model->norm_epsilon,
                             .y = h.normed};
    f->backend->ops->rms_norm(f->backend, &norm);
    forward_offer(f, VALUE_FINAL_NORM_OUTPUT, h.normed);
    offer_logits(r, &h);
    offer_next_token_probs(r, &h);
}

/* ---- memory ---- */

static size_t large_row_bytes(struct forward *f)
{
    const struct block *block = forward_block(f);
    size_t mixer =
        block->mixer == MIXER_ATTENTION
            ? attention_row_bytes(f)
            : scan_row_bytes(f, f->model->mamba_width * f->model->state_dim, block->mixer == MIXER_MAMBA1);
    size_t mixture = block->feed_forward == FEED_FORWARD_MIXTURE ? mixture_row_bytes(f) : 0;
    return mixer > mixture ? mixer : mixture;
}

/* Room for at least `least` rows, and for the whole batch's where the limit allows. */
static void widen_piece(struct forward *f, size_t row_bytes, int64_t least, size_t limit)
{
    if (row_bytes == 0)
        return;
    size_t needed = row_bytes > limit / (size_t)f->token_rows ? limit : row_bytes * (size_t)f->token_rows;
    if (needed < row_bytes * (size_t)least)
        needed = row_bytes * (size_t)least;
    f->piece_bytes = needed > f->piece_bytes ? needed : f->piece_bytes;
}

static void plan_piece(struct replica *r)
{
    struct forward *f = &r->forward;
    size_t limit = f->limits.piece_bytes != 0 ? f->limits.piece_bytes : DEFAULT_PIECE_BYTES;
    f->piece_bytes = 0;
    for (f->layer = 0; f->layer < n_run_layers(r); f->layer++)
        widen_piece(f, large_row_bytes(f), 1, limit);
    f->layer = -1;
    widen_piece(f, logits_row_bytes(r), BACKEND_ROW_PADDING, limit);
}

static void plan_block(struct replica *r)
{
    struct forward *f = &r->forward;
    const struct block *block = forward_block(f);
    if (runs_step(r, f->layer, STEP_MIXER)) {
        if (block->mixer == MIXER_ATTENTION)
            attention_plan(f);
        else if (block->mixer == MIXER_MAMBA1)
            mamba1_plan(f);
        else
            mamba2_plan(f);
        f->scratch_peak = f->scratch.used > f->scratch_peak ? f->scratch.used : f->scratch_peak;
    }
    if (runs_step(r, f->layer, STEP_MLP) && block->feed_forward != FEED_FORWARD_NONE) {
        if (block->feed_forward == FEED_FORWARD_MIXTURE)
            mixture_plan(f);
        else
            mlp_plan(f);
        f->scratch_peak = f->scratch.used > f->scratch_peak ? f->scratch.used : f->scratch_peak;
    }
}

/* The most scratch that any sublayer takes. */
static void plan_scratch(struct replica *r)
{
    struct forward *f = &r->forward;
    f->scratch = (struct arena){0};
    f->scratch_peak = 0;
    for (f->layer = 0; f->layer < n_run_layers(r); f->layer++)
        plan_block(r);
    f->layer = -1;
    if (r->depth >= LOADER_STEPS * f->model->n_layers) {
        take_head(r);
        f->scratch_peak = f->scratch.used > f->scratch_peak ? f->scratch.used : f->scratch_peak;
    }
}

static struct tensor take(struct arena *arena, int64_t rows, int64_t cols, enum dtype dtype)
{
    return tensor_make(arena_take(arena, (size_t)(rows * cols) * dtype_size(dtype)), dtype, rows, cols);
}

static bool any_layer_wants(const struct replica *r, enum value_id value)
{
    for (int i = 0; i < r->forward.model->n_layers; i++) {
        if (is_wanted(r, i, value))
            return true;
    }
    return false;
}

static void take_rotary(struct forward *f, struct arena *arena)
{
    const struct rope *ropes[] = {&f->model->rope_full, &f->model->rope_sliding};
    for (int i = 0; i < 2; i++) {
        int64_t half = ropes[i]->rotary_dim / 2;
        if (half == 0)
            continue;
        f->rotary[i].cosine = take(arena, f->limits.max_position, half, DTYPE_F32).data;
        f->rotary[i].sine = take(arena, f->limits.max_position, half, DTYPE_F32).data;
    }
}

/* All of the backend's memory but weights and carry, from an arena that measures or has memory. */
static void take_workspace(struct replica *r, struct arena *arena)
{
    struct forward *f = &r->forward;
    const struct model *m = f->model;
    int64_t rows = f->token_rows, state = m->mamba_width * m->state_dim;
    f->stream = take(arena, rows, m->hidden_size, m->residual_f32 ? DTYPE_F32 : m->load_dtype);
    f->normed = take(arena, rows, m->hidden_size, m->load_dtype);
    f->out = take(arena, rows, m->hidden_size, m->load_dtype);
    r->ids = take(arena, rows, 1, DTYPE_I32).data;
    if (is_wanted(r, -1, VALUE_ATTENTION_MASK))
        r->mask = take(arena, rows, 1, DTYPE_I32);
    if (is_wanted(r, -1, VALUE_INPUT_SIZE))
        r->sizes = take(arena, f->limits.max_windows, 2, DTYPE_I32);
    if (any_layer_wants(r, VALUE_LINEAR_STATE_INPUT))
        f->zeros = take(arena, 1, state, DTYPE_F32);
    if (!f->limits.carry && state > 0)
        r->scan_state = take(arena, 1, state, DTYPE_F32);
    take_rotary(f, arena);
    f->piece = arena_take(arena, f->piece_bytes);
    f->scratch = (struct arena){.base = arena_take(arena, f->scratch_peak), .capacity = f->scratch_peak};
}

/* What each layer keeps from batch to batch. */
static void take_carry(struct replica *r, struct arena *arena)
{
    struct forward *f = &r->forward;
    if (!f->limits.carry)
        return;
    for (f->layer = 0; f->layer < n_run_layers(r); f->layer++) {
        struct layer *layer = &r->layers[f->layer];
        if (!runs_step(r, f->layer, STEP_MIXER))
            break;
        if (forward_block(f)->mixer == MIXER_ATTENTION)
            attention_take_cache(f, arena, &layer->attention.cache);
        else if (forward_block(f)->mixer == MIXER_MAMBA1)
            mamba1_take_carry(f, arena, &layer->mamba1.carry);
        else
            mamba2_take_carry(f, arena, &layer->mamba2.carry);
    }
    f->layer = -1;
}

static void take_host(struct replica *r, struct arena *arena)
{
    struct forward *f = &r->forward;
    size_t tokens = (size_t)f->limits.max_tokens, windows = (size_t)f->limits.max_windows;
    f->marks = arena_take(arena, tokens);
    f->identity = arena_take(arena, (tokens > windows ? tokens : windows) * sizeof *f->identity);
    f->marked = arena_take(arena, tokens * sizeof *f->marked);
    for (int i = 0; i < 2; i++)
        f->relative[i] = arena_take(arena, tokens * sizeof *f->relative[i]);
    f->clipped = arena_take(arena, windows * sizeof *f->clipped);
    r->runs = arena_take(arena, windows * sizeof *r->runs);
    if (is_wanted(r, -1, VALUE_INPUT_SIZE))
        r->host_sizes = arena_take(arena, windows * 2 * sizeof *r->host_sizes);
    if (f->model->n_mamba_heads > 0 && any_layer_wants(r, VALUE_LINEAR_DECAYS))
        f->host_floats = arena_take(arena, (tokens + 1) * (size_t)f->model->n_mamba_heads * sizeof(float));
}

/* ---- planning ---- */

/* Batches and caches whose bytes could not even be counted. Every other size is limited by the config's
 * reader. */
static enum status check_limits(const struct model *m, const struct replica_limits *limits,
                                struct error *error)
{
    const struct replica_limits *l = limits;
    double cache =
        (double)m->n_layers * (double)l->max_position * m->n_kv_heads * m->head_dim * 2 * sizeof(float);
    if (l->max_tokens < 1 || l->max_windows < 1 || l->max_position < 1)
        return error_set(error, STATUS_BUG, "a replica for batches of %lld tokens in %lld windows of %lld",
                         (long long)l->max_tokens, (long long)l->max_windows, (long long)l->max_position);
    if (l->max_tokens > MAX_TOKENS || l->max_windows > l->max_tokens || l->max_position > INT32_MAX ||
        (m->n_experts > 1 && l->max_tokens > INT32_MAX / m->top_k))
        return error_set(error, STATUS_RESOURCE,
                         "a batch of %lld tokens in %lld windows is too large, expected at most %lld tokens",
                         (long long)l->max_tokens, (long long)l->max_windows,
                         (long long)(m->n_experts > 1 ? INT32_MAX / m->top_k : MAX_TOKENS));
    if (l->carry && cache > MAX_BYTES)
        return error_set(error, STATUS_RESOURCE, "keys and values of documents of %lld tokens fit no memory",
                         (long long)l->max_position);
    return STATUS_OK;
}

static enum status init(struct replica *r, const struct model *model, struct backend *backend,
                        const struct observer *observer, const struct replica_limits *limits,
                        struct error *error)
{
    struct forward *f = &r->forward;
    void *wanted, *layers;
    TRY(check_limits(model, limits, error));
    *f = (struct forward){.model = model,
                          .backend = backend,
                          .observer = observer,
                          .limits = *limits,
                          .token_rows = forward_round_rows(limits->max_tokens),
                          .layer = -1};
    r->weights.backend = backend;
    TRY(memory_allocate_array(&wanted, (size_t)model->n_layers + 1, sizeof *f->wanted, "the wanted values",
                              error));
    f->wanted = wanted;
    TRY(memory_allocate_array(&layers, (size_t)model->n_layers, sizeof *r->layers, "the layers", error));
    r->layers = layers;
    ask_observer(r);
    plan_piece(r);
    plan_scratch(r);
    return STATUS_OK;
}

static void fini(struct replica *r)
{
    struct backend *b = r->weights.backend;
    if (b != NULL) {
        b->ops->release(b, r->workspace);
        b->ops->release(b, r->carry);
        weights_fini(&r->weights);
    }
    arena_free(&r->host);
    memory_free(r->layers);
    memory_free(r->forward.wanted);
}

static enum status plan(struct replica *r, struct replica_memory *out, struct error *error)
{
    struct arena workspace = {0}, carry = {0};
    struct loader counted;
    TRY(count_weights(r, &counted, error));
    take_workspace(r, &workspace);
    take_carry(r, &carry);
    *out =
        (struct replica_memory){.weights = counted.bytes, .workspace = workspace.used, .carry = carry.used};
    return STATUS_OK;
}

enum status replica_plan(const struct model *model, struct backend *backend, const struct observer *observer,
                         const struct replica_limits *limits, struct replica_memory *out, struct error *error)
{
    struct replica r = {0};
    enum status status = init(&r, model, backend, observer, limits, error);
    if (status == STATUS_OK)
        status = plan(&r, out, error);
    fini(&r);
    return status;
}

/* ---- creation ---- */

static enum status allocate_backend(struct replica *r, void (*take_all)(struct replica *, struct arena *),
                                    const char *what, void **out, struct error *error)
{
    struct backend *b = r->forward.backend;
    struct arena arena = {0};
    take_all(r, &arena);
    TRY(b->ops->allocate(b, out, arena.used, what, error));
    arena = (struct arena){.base = *out, .capacity = arena.used};
    take_all(r, &arena);
    return STATUS_OK;
}

static enum status allocate_memory(struct replica *r, struct error *error)
{
    TRY(allocate_backend(r, take_workspace, "the forward's workspace", &r->workspace, error));
    if (r->forward.limits.carry)
        TRY(allocate_backend(r, take_carry, "what documents carry from batch to batch", &r->carry, error));
    take_host(r, &r->host);
    TRY(arena_allocate(&r->host, "lists of rows", error));
    take_host(r, &r->host);
    for (int i = 0; i < r->forward.model->n_layers && !r->forward.limits.carry; i++)
        r->layers[i].mamba1.carry.state = r->layers[i].mamba2.carry.state = r->scan_state.data;
    return STATUS_OK;
}

static enum status fill_rotary(struct forward *f, const struct rope *rope, const struct rotary_table *table,
                               struct error *error)
{
    size_t n = (size_t)f->limits.max_position * (size_t)(rope->rotary_dim / 2);
    void *memory;
    if (n == 0)
        return STATUS_OK;
    TRY(memory_allocate_array(&memory, n, 2 * sizeof(float), "a rotary table", error));
    float *cosine = memory, *sine = cosine + n;
    rope_fill(rope, f->limits.max_position, cosine, sine);
    f->backend->ops->upload(f->backend, table->cosine, cosine, n * sizeof(float));
    f->backend->ops->upload(f->backend, table->sine, sine, n * sizeof(float));
    memory_free(memory);
    return STATUS_OK;
}

static enum status fill_constants(struct replica *r, struct error *error)
{
    struct forward *f = &r->forward;
    int64_t tokens = f->limits.max_tokens;
    for (int64_t i = 0; i < tokens; i++)
        f->identity[i] = 1; /* for a moment, the mask */
    if (r->mask.data != NULL)
        f->backend->ops->upload(f->backend, r->mask.data, f->identity, (size_t)tokens * sizeof(int32_t));
    for (int64_t i = 0; i < tokens; i++)
        f->identity[i] = (int32_t)i;
    TRY(fill_rotary(f, &f->model->rope_full, &f->rotary[0], error));
    return fill_rotary(f, &f->model->rope_sliding, &f->rotary[1], error);
}

static enum status create_into(struct replica *r, const struct model *model, struct backend *backend,
                               const struct observer *observer, const struct replica_limits *limits,
                               struct error *error)
{
    TRY(init(r, model, backend, observer, limits, error));
    TRY(load_weights(r, error));
    TRY(allocate_memory(r, error));
    TRY(fill_constants(r, error));
    return backend->ops->synchronize(backend, error);
}

enum status replica_create(const struct model *model, struct backend *backend,
                           const struct observer *observer, const struct replica_limits *limits,
                           struct replica **out, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct replica), "a replica", error));
    enum status status = create_into(memory, model, backend, observer, limits, error);
    if (status != STATUS_OK) {
        replica_destroy(memory);
        return status;
    }
    *out = memory;
    return STATUS_OK;
}

void replica_destroy(struct replica *replica)
{
    if (replica == NULL)
        return;
    fini(replica);
    memory_free(replica);
}

/* ---- one batch ---- */

static enum status check_batch(const struct replica *r, const struct batch *b, struct error *error)
{
    const struct replica_limits *l = &r->forward.limits;
    if (b->n_tokens < 1 || b->n_tokens > l->max_tokens || b->n_windows < 1 || b->n_windows > l->max_windows ||
        b->window_start[0] != 0 || b->window_start[b->n_windows] != b->n_tokens)
        return error_set(error, STATUS_BUG, "a batch of %lld tokens in %lld windows was not planned for",
                         (long long)b->n_tokens, (long long)b->n_windows);
    if ((b->carry_in || b->carry_out) && !l->carry)
        return error_set(error, STATUS_BUG, "a batch that carries was not planned for");
    for (int64_t w = 0; w < b->n_windows; w++) {
        int64_t length = b->window_start[w + 1] - b->window_start[w], position = b->window_position[w];
        bool goes_on = position > 0, may_go_on = w > 0 ? l->carry : b->carry_in;
        int64_t expected =
            w > 0 ? b->window_position[w - 1] + b->window_start[w] - b->window_start[w - 1] : position;
        if (length < 1 || position < 0 || position + length > l->max_position || (goes_on && !may_go_on) ||
            (goes_on && position != expected) || (w == 0 && b->carry_in && !goes_on))
            return error_set(error, STATUS_BUG, "window %lld of a batch: %lld tokens from position %lld",
                             (long long)w, (long long)length, (long long)position);
    }
    return STATUS_OK;
}

/* Windows that go on from one another are one run. */
static void join_windows(struct replica *r, const struct batch *b)
{
    int64_t n = 0;
    for (int64_t w = 0; w < b->n_windows; w++) {
        int32_t length = b->window_start[w + 1] - b->window_start[w];
        if (w > 0 && b->window_position[w] > 0)
            r->runs[n - 1].length += length;
        else
            r->runs[n++] = (struct run){b->window_start[w], length, b->window_position[w]};
    }
    r->forward.runs =
        (struct runs){.list = r->runs, .n = n, .carry_in = b->carry_in, .carry_out = b->carry_out};
}

static void offer_sizes(struct replica *r)
{
    struct forward *f = &r->forward;
    if (!forward_wants(f, VALUE_INPUT_SIZE))
        return;
    for (int64_t w = 0; w < f->batch->n_windows; w++) {
        r->host_sizes[2 * w] = 1;
        r->host_sizes[2 * w + 1] = f->batch->window_start[w + 1] - f->batch->window_start[w];
    }
    r->sizes.rows = f->batch->n_windows;
    f->backend->ops->upload(f->backend, r->sizes.data, r->host_sizes,
                            (size_t)f->batch->n_windows * 2 * sizeof *r->host_sizes);
    forward_offer(f, VALUE_INPUT_SIZE, r->sizes);
}

static void run_embedding(struct replica *r)
{
    struct forward *f = &r->forward;
    const struct backend_ops *ops = f->backend->ops;
    ops->upload(f->backend, r->ids, f->batch->ids, (size_t)f->n_tokens * sizeof *r->ids);
    forward_offer(f, VALUE_INPUT_IDS, tensor_make(r->ids, DTYPE_I32, f->n_tokens, 1));
    forward_offer(f, VALUE_ATTENTION_MASK, forward_tokens(f, r->mask));
    offer_sizes(r);
    if (f->done)
        return;
    ops->embed(f->backend, r->embedding, r->ids, forward_tokens(f, f->stream));
    forward_offer(f, VALUE_TOKEN_EMBEDDINGS, forward_tokens(f, f->stream));
}

enum status replica_start(struct replica *replica, const struct batch *batch, struct error *error)
{
    struct forward *f = &replica->forward;
    TRY(check_batch(replica, batch, error));
    join_windows(replica, batch);
    f->batch = batch;
    f->n_tokens = batch->n_tokens;
    f->n_left = f->n_wanted;
    f->done = f->n_wanted == 0;
    run_embedding(replica);
    for (f->layer = 0; f->layer < f->model->n_layers && !f->done; f->layer++)
        f->model->family->run_block(f, &replica->layers[f->layer]);
    f->layer = -1;
    run_head(replica);
    if (!f->backend->is_host && f->backend->error.status == STATUS_OK)
        return STATUS_OK;
    return f->backend->ops->synchronize(f->backend, error);
}

enum status replica_forward(struct replica *replica, const struct batch *batch, struct error *error)
{
    struct backend *backend = replica->forward.backend;
    TRY(replica_start(replica, batch, error));
    return backend->ops->synchronize(backend, error);
}

double replica_gemm_flops_per_token(const struct replica *replica)
{
    return replica->multiply_adds;
}
