#include "pipeline/batches.h"

#include "kernels/base/memory.h"

struct batches {
    const struct plan *plan;
    struct corpus *corpus;
    int64_t next, end; /* sequences still to come of the unit */
    bool carry;        /* the last batch's last window goes on */
    int64_t carried_position;
    int32_t *ids;             /* [max_tokens] */
    int32_t *window_start;    /* [max_windows + 1] */
    int32_t *window_position; /* [max_windows] */
    struct sequence *sequences;
};

enum status batches_create(const struct plan *plan, struct corpus *corpus, struct batches **out,
                           struct error *error)
{
    const struct replica_limits *limits = &plan->limits;
    void *memory = NULL, *ids = NULL, *starts = NULL, *positions = NULL, *sequences = NULL;
    enum status status;
    TRY_ELSE(memory_allocate(&memory, sizeof(struct batches), "batches", error), failed);
    TRY_ELSE(memory_allocate_array(&ids, (size_t)limits->max_tokens, sizeof(int32_t), "batches", error),
             failed);
    TRY_ELSE(
        memory_allocate_array(&starts, (size_t)limits->max_windows + 1, sizeof(int32_t), "batches", error),
        failed);
    TRY_ELSE(
        memory_allocate_array(&positions, (size_t)limits->max_windows, sizeof(int32_t), "batches", error),
        failed);
    TRY_ELSE(memory_allocate_array(&sequences, (size_t)limits->max_windows, sizeof(struct sequence),
                                   "batches", error),
             failed);
    struct batches *batches = memory;
    *batches = (struct batches){.plan = plan,
                                .corpus = corpus,
                                .ids = ids,
                                .window_start = starts,
                                .window_position = positions,
                                .sequences = sequences};
    *out = batches;
    return STATUS_OK;
failed:
    memory_free(memory);
    memory_free(ids);
    memory_free(starts);
    memory_free(positions);
    memory_free(sequences);
    return status;
}

void batches_destroy(struct batches *batches)
{
    if (batches == NULL)
        return;
    memory_free(batches->ids);
    memory_free(batches->window_start);
    memory_free(batches->window_position);
    memory_free(batches->sequences);
    memory_free(batches);
}

void batches_begin(struct batches *batches, int64_t unit)
{
    batches->next = batches->plan->unit_start[unit];
    batches->end = batches->plan->unit_start[unit + 1];
    batches->carry = false;
}

/* Appends sequence batches->next to the batch. */
static enum status take(struct batches *batches, struct batch *batch, struct error *error)
{
    struct sequence *s = &batches->sequences[batch->n_windows];
    TRY(corpus_read(batches->corpus, batches->next, s, batches->ids + batch->n_tokens, error));
    int64_t position = 0;
    if (s->continues)
        position = batch->n_windows > 0 ? batches->window_position[batch->n_windows - 1] +
                                              batches->sequences[batch->n_windows - 1].length
                                        : batches->carried_position;
    batches->window_position[batch->n_windows] = (int32_t)position;
    batches->window_start[batch->n_windows++] = (int32_t)batch->n_tokens;
    batch->n_tokens += s->length;
    batches->window_start[batch->n_windows] = (int32_t)batch->n_tokens;
    batches->carried_position = position + s->length;
    batches->next++;
    return STATUS_OK;
}

enum status batches_next(struct batches *batches, struct batch *batch, const struct sequence **sequences,
                         bool *have, struct error *error)
{
    struct batch next = {.ids = batches->ids,
                         .window_start = batches->window_start,
                         .window_position = batches->window_position,
                         .carry_in = batches->carry};
    batches->carry = false;
    while (batches->next < batches->end) {
        struct sequence s;
        TRY(corpus_describe(batches->corpus, batches->next, &s, error));
        if (next.n_windows > 0 && next.n_tokens + s.length > batches->plan->batch_tokens) {
            batches->carry = s.continues;
            break;
        }
        TRY(take(batches, &next, error));
    }
    next.carry_out = batches->carry;
    *have = next.n_windows > 0;
    *batch = next;
    *sequences = batches->sequences;
    return STATUS_OK;
}
