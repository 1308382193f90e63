#include "pipeline/corpus.h"

#include "kernels/base/memory.h"
#include "pipeline/corpus_source.h"
#include "pipeline/permutation.h"

#include <assert.h>
#include <endian.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#define MOST_MARKS 65536          /* while a mark for every MOST_BLOCK_DOCUMENTS documents gives fewer */
#define MOST_BLOCK_DOCUMENTS 1024 /* between two marks */
#define PIECE_TOKENS 1024         /* read at a time */
#define DIGEST_SEQUENCES 256

/* What is left of a document without its padding. */
struct extent {
    int64_t lead; /* tokens of padding in front */
    int64_t length;
    int64_t stored; /* with its padding */
};

/* Documents in the order in which their windows are numbered are ranks: rank r is document r or, where
 * documents are shuffled, the r-th of the permutation. Windows are numbered before start and limit. */
struct corpus {
    struct corpus_source *source;
    int64_t n_ids;
    int64_t context, window; /* window: tokens of a sequence that are not prepended, at most */
    int32_t *prepend;
    int64_t n_prepend;
    bool has_pad, carry, has_shuffle;
    int64_t pad;
    struct permutation order; /* of windows or, with carry, of ranks */
    int64_t n_windows, start, n_sequences;
    int64_t n_empty, n_tokens, longest_document;

    /* All documents alike: nothing more is needed. Else marks[b] is the number of the first window of rank
     * b * block_documents, and one block is at hand in full. */
    bool is_uniform;
    int64_t *marks; /* [n_blocks + 1] */
    int64_t n_blocks, block_documents;
    int64_t block;          /* -1: none */
    struct extent *extents; /* [block_documents] */
    int64_t *first_window;  /* [block_documents + 1] counted from the block's first */
};

/* Where a sequence's tokens lie. */
struct place {
    int64_t document;
    int64_t start;  /* in the document as stored */
    int64_t length; /* without prepended ids */
    bool continues;
};

/* ---- documents ---- */

/* How many ids at the start (step 1) or the end (step -1) of n are the padding. */
static enum status count_padding(struct corpus *c, int64_t document, int64_t n, int step, int64_t *count,
                                 struct error *error)
{
    int64_t ids[PIECE_TOKENS];
    /* One id first: most rows have no padding, and then nothing else is read. */
    for (int64_t done = 0, piece = 1; done < n; done += piece, piece = PIECE_TOKENS) {
        if (piece > n - done)
            piece = n - done;
        int64_t from = step > 0 ? done : n - done - piece;
        TRY(c->source->functions->read(c->source, document, from, piece, ids, error));
        for (int64_t i = 0; i < piece; i++) {
            if (ids[step > 0 ? i : piece - 1 - i] != c->pad) {
                *count = done + i;
                return STATUS_OK;
            }
        }
    }
    *count = n;
    return STATUS_OK;
}

static enum status measure(struct corpus *c, int64_t document, struct extent *extent, struct error *error)
{
    int64_t length = c->source->width, lead = 0, tail = 0;
    if (length < 0)
        TRY(c->source->functions->length(c->source, document, &length, error));
    if (c->has_pad && length > 0) {
        TRY(count_padding(c, document, length, -1, &tail, error));
        if (tail == 0)
            TRY(count_padding(c, document, length, 1, &lead, error));
    }
    *extent = (struct extent){.lead = lead, .length = length - lead - tail, .stored = length};
    return STATUS_OK;
}

static int64_t count_windows(const struct corpus *c, int64_t length)
{
    return length == 0 ? 0 : (length - 1) / c->window + 1;
}

static int64_t document_of(const struct corpus *c, int64_t rank)
{
    return c->carry && c->has_shuffle ? permutation_get(&c->order, rank) : rank;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Measures all documents in the file's order: counts, and marks for that order. */
static enum status survey(struct corpus *c, struct error *error)
{
    for (int64_t document = 0; document < c->source->n_documents; document++) {
        struct extent extent;
        TRY(measure(c, document, &extent, error));
        if (document % c->block_documents == 0)
            c->marks[document / c->block_documents] = c->n_windows;
        if (__builtin_add_overflow(c->n_windows, count_windows(c, extent.length), &c->n_windows) ||
            __builtin_add_overflow(c->n_tokens, extent.stored, &c->n_tokens))
            return error_set(error, STATUS_INPUT, "%s: its documents have more than 2^63 tokens",
                             c->source->path);
        c->n_empty += extent.length == 0;
        if (extent.length > c->longest_document)
            c->longest_document = extent.length;
    }
    c->marks[c->n_blocks] = c->n_windows;
    return STATUS_OK;
}

/* Marks again, for the order of ranks. */
static enum status mark_ranks(struct corpus *c, struct error *error)
{
    int64_t n_windows = 0;
    for (int64_t rank = 0; rank < c->source->n_documents; rank++) {
        struct extent extent;
        if (rank % c->block_documents == 0)
            c->marks[rank / c->block_documents] = n_windows;
        TRY(measure(c, document_of(c, rank), &extent, error));
        n_windows += count_windows(c, extent.length);
    }
    if (n_windows != c->n_windows)
        return error_set(error, STATUS_INPUT, "%s was changed while it was read", c->source->path);
    return STATUS_OK;
}

static void count_uniform(struct corpus *c)
{
    const struct corpus_source *s = c->source;
    c->n_windows = s->n_documents * count_windows(c, s->width);
    c->n_tokens = s->n_documents * s->width;
    c->n_empty = s->width == 0 ? s->n_documents : 0;
    c->longest_document = s->n_documents == 0 ? 0 : s->width;
}

static enum status prepare_blocks(struct corpus *c, struct error *error)
{
    void *marks, *extents, *first_window;
    int64_t n_documents = c->source->n_documents;
    for (c->block_documents = 1;
         n_documents / c->block_documents > MOST_MARKS && c->block_documents < MOST_BLOCK_DOCUMENTS;)
        c->block_documents *= 2;
    c->n_blocks = n_documents / c->block_documents + (n_documents % c->block_documents != 0);
    TRY(memory_allocate_array(&marks, (size_t)c->n_blocks + 1, sizeof *c->marks, "marks in the corpus",
                              error));
    c->marks = marks;
    TRY(memory_allocate_array(&extents, (size_t)c->block_documents, sizeof *c->extents,
                              "a block of documents", error));
    c->extents = extents;
    TRY(memory_allocate_array(&first_window, (size_t)c->block_documents + 1, sizeof *c->first_window,
                              "a block of documents", error));
    c->first_window = first_window;
    return survey(c, error);
}

/* ---- from a number to a place ---- */

static enum status load_block(struct corpus *c, int64_t block, struct error *error)
{
    if (c->block == block)
        return STATUS_OK;
    int64_t first = block * c->block_documents, n = least(c->block_documents, c->source->n_documents - first);
    c->block = -1;
    c->first_window[0] = 0;
    for (int64_t i = 0; i < n; i++) {
        TRY(measure(c, document_of(c, first + i), &c->extents[i], error));
        c->first_window[i + 1] = c->first_window[i] + count_windows(c, c->extents[i].length);
    }
    if (c->first_window[n] != c->marks[block + 1] - c->marks[block])
        return error_set(error, STATUS_INPUT,
                         "%s was changed while in use: documents %" PRId64 " to %" PRId64
                         " have other lengths than at the start",
                         c->source->path, first, first + n - 1);
    c->block = block;
    return STATUS_OK;
}

/* The last i in [0, n) with bounds[i] <= value, for ascending bounds with bounds[0] <= value. */
static int64_t search(const int64_t *bounds, int64_t n, int64_t value)
{
    int64_t low = 0, high = n;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (bounds[middle] <= value)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The document of a window, which window of it that is, and what the document has. */
static enum status find_window(struct corpus *c, int64_t window, int64_t *document, int64_t *within,
                               struct extent *extent, struct error *error)
{
    if (c->is_uniform) {
        int64_t each = count_windows(c, c->source->width);
        *document = document_of(c, window / each);
        *within = window % each;
        *extent = (struct extent){.length = c->source->width};
        return STATUS_OK;
    }
    int64_t block = search(c->marks, c->n_blocks, window), rest = window - c->marks[block];
    int64_t first = block * c->block_documents, n = least(c->block_documents, c->source->n_documents - first);
    if (c->block != block && c->longest_document <= c->window && c->marks[block + 1] - c->marks[block] == n) {
        /* Each of the block's documents has one window: only one need be measured. */
        *document = document_of(c, first + rest);
        *within = 0;
        return measure(c, *document, extent, error);
    }
    TRY(load_block(c, block, error));
    int64_t i = search(c->first_window, n, rest);
    *document = document_of(c, first + i);
    *within = rest - c->first_window[i];
    *extent = c->extents[i];
    return STATUS_OK;
}

static enum status locate(struct corpus *c, int64_t index, struct place *place, struct error *error)
{
    assert(index >= 0 && index < c->n_sequences);
    int64_t window = c->start + index, within;
    if (c->has_shuffle && !c->carry)
        window = permutation_get(&c->order, window);
    struct extent extent;
    TRY(find_window(c, window, &place->document, &within, &extent, error));
    int64_t offset = within * c->window;
    if (offset >= extent.length)
        return error_set(error, STATUS_INPUT,
                         "%s was changed while in use: document %" PRId64 " is shorter than at"
                         " the start",
                         c->source->path, place->document);
    place->start = extent.lead + offset;
    place->length = least(c->window, extent.length - offset);
    place->continues = c->carry && within > 0 && index > 0;
    return STATUS_OK;
}

/* ---- sequences ---- */

static void describe(const struct corpus *c, int64_t index, const struct place *place, bool is_doubled,
                     struct sequence *out)
{
    int64_t n_prepended = place->continues || is_doubled ? 0 : c->n_prepend;
    *out = (struct sequence){.index = index,
                             .document = place->document,
                             .start = place->start,
                             .length = n_prepended + place->length,
                             .n_prepended = n_prepended,
                             .continues = place->continues};
}

/* Whether the sequence already begins with the ids to be prepended. */
static enum status check_doubled(struct corpus *c, const struct place *place, bool *is_doubled,
                                 struct error *error)
{
    *is_doubled = false;
    if (place->continues || c->n_prepend == 0 || place->length < c->n_prepend)
        return STATUS_OK;
    for (int64_t done = 0, n; done < c->n_prepend; done += n) {
        int64_t ids[64];
        n = least(c->n_prepend - done, 64);
        TRY(c->source->functions->read(c->source, place->document, place->start + done, n, ids, error));
        for (int64_t i = 0; i < n; i++)
            if (ids[i] != c->prepend[done + i])
                return STATUS_OK;
    }
    *is_doubled = true;
    return STATUS_OK;
}

enum status corpus_describe(struct corpus *c, int64_t index, struct sequence *out, struct error *error)
{
    struct place place;
    bool is_doubled;
    TRY(locate(c, index, &place, error));
    TRY(check_doubled(c, &place, &is_doubled, error));
    describe(c, index, &place, is_doubled, out);
    return STATUS_OK;
}

static enum status fail_id(const struct corpus *c, const struct place *place, int64_t offset, int64_t id,
                           struct error *error)
{
    char number[32];
    if (c->source->is_unsigned)
        snprintf(number, sizeof number, "%" PRIu64, (uint64_t)id);
    else
        snprintf(number, sizeof number, "%" PRId64, id);
    return error_set(error, STATUS_INPUT,
                     "%s: document %" PRId64 ", token %" PRId64 " is id %s, expected 0 to %" PRId64
                     " (the embedding has %" PRId64 " rows)",
                     c->source->path, place->document, place->start + offset, number, c->n_ids - 1, c->n_ids);
}

/* The tokens of a place, each checked. */
static enum status read_tokens(struct corpus *c, const struct place *place, int32_t *ids, struct error *error)
{
    int64_t wide[PIECE_TOKENS];
    for (int64_t done = 0, n; done < place->length; done += n) {
        n = least(PIECE_TOKENS, place->length - done);
        TRY(c->source->functions->read(c->source, place->document, place->start + done, n, wide, error));
        for (int64_t i = 0; i < n; i++) {
            if (wide[i] < 0 || wide[i] >= c->n_ids)
                return fail_id(c, place, done + i, wide[i], error);
            ids[done + i] = (int32_t)wide[i];
        }
    }
    return STATUS_OK;
}

enum status corpus_read(struct corpus *c, int64_t index, struct sequence *out, int32_t *ids,
                        struct error *error)
{
    struct place place;
    bool is_doubled;
    struct sequence sequence;
    TRY(locate(c, index, &place, error));
    TRY(check_doubled(c, &place, &is_doubled, error));
    describe(c, index, &place, is_doubled, &sequence);
    if (sequence.n_prepended > 0)
        memcpy(ids, c->prepend, (size_t)sequence.n_prepended * sizeof *ids);
    TRY(read_tokens(c, &place, ids + sequence.n_prepended, error));
    *out = sequence;
    return STATUS_OK;
}

/* ---- opening ---- */

static enum status check_options(const struct corpus_options *o, int64_t n_ids, struct error *error)
{
    assert(n_ids >= 1);
    if (o->n_prepend < 0 || o->context < 1 || o->n_prepend >= o->context)
        return error_set(error, STATUS_USAGE,
                         "%s: a context of %" PRId64 " leaves no room behind %" PRId64 " prepended ids",
                         o->path, o->context, o->n_prepend);
    for (int64_t i = 0; i < o->n_prepend; i++)
        if (o->prepend[i] < 0 || o->prepend[i] >= n_ids)
            return error_set(error, STATUS_USAGE,
                             "corpus.prepend[%" PRId64 "] is %" PRId32 ", expected 0 to %" PRId64
                             " (the embedding has %" PRId64 " rows)",
                             i, o->prepend[i], n_ids - 1, n_ids);
    if (o->start < 0 || o->limit < -1)
        return error_set(error, STATUS_USAGE, "%s: start %" PRId64 " or limit %" PRId64 " is negative",
                         o->path, o->start, o->limit);
    return STATUS_OK;
}

static enum status open_source(struct corpus *c, const struct corpus_options *o, struct error *error)
{
    switch (o->format) {
    case CORPUS_MEGATRON:
        return corpus_open_megatron(o->path, &c->source, error);
    case CORPUS_NPY:
        return corpus_open_npy(o->path, &c->source, error);
    case CORPUS_RAW:
        return corpus_open_raw(o->path, o->raw_bytes, &c->source, error);
    case CORPUS_HDF5:
        return corpus_open_hdf5(o->path, o->dataset, &c->source, error);
    }
    return error_set(error, STATUS_BUG, "corpus format %d", (int)o->format);
}

static enum status copy_prepend(struct corpus *c, const struct corpus_options *o, struct error *error)
{
    void *prepend;
    TRY(memory_allocate_array(&prepend, (size_t)o->n_prepend, sizeof *c->prepend, "prepended ids", error));
    c->prepend = prepend;
    c->n_prepend = o->n_prepend;
    if (o->n_prepend > 0)
        memcpy(c->prepend, o->prepend, (size_t)o->n_prepend * sizeof *c->prepend);
    return STATUS_OK;
}

/* Counts windows and makes them findable. */
static enum status number_windows(struct corpus *c, const struct corpus_options *o, struct error *error)
{
    c->is_uniform = c->source->width == 0 || (c->source->width > 0 && !c->has_pad);
    if (c->is_uniform)
        count_uniform(c);
    else
        TRY(prepare_blocks(c, error));
    if (c->n_windows > INT64_C(1) << 62)
        return error_set(error, STATUS_INPUT, "%s: its documents have more than 2^62 tokens",
                         c->source->path);
    int64_t n_ordered = c->carry ? c->source->n_documents : c->n_windows;
    c->has_shuffle = o->has_shuffle && n_ordered > 0;
    if (c->has_shuffle) {
        permutation_init(&c->order, n_ordered, o->shuffle_seed);
        if (c->carry && !c->is_uniform)
            TRY(mark_ranks(c, error));
    }
    c->start = least(o->start, c->n_windows);
    c->n_sequences = c->n_windows - c->start;
    if (o->limit >= 0)
        c->n_sequences = least(c->n_sequences, o->limit);
    return STATUS_OK;
}

static enum status open_corpus(struct corpus *c, const struct corpus_options *o, struct error *error)
{
    TRY(open_source(c, o, error));
    if (o->has_pad && !c->source->is_bounded)
        return error_set(error, STATUS_USAGE,
                         "%s has no rows, only one run of tokens: corpus.pad needs [sequence, context] rows",
                         c->source->path);
    TRY(copy_prepend(c, o, error));
    return number_windows(c, o, error);
}

enum status corpus_open(const struct corpus_options *o, int64_t n_ids, struct corpus **out,
                        struct error *error)
{
    void *memory;
    TRY(check_options(o, n_ids, error));
    TRY(memory_allocate(&memory, sizeof(struct corpus), "the corpus", error));
    struct corpus *c = memory;
    *c = (struct corpus){.n_ids = least(n_ids, INT64_C(1) << 31), /* ids are int32 */
                         .context = o->context,
                         .window = o->context - o->n_prepend,
                         .has_pad = o->has_pad,
                         .pad = o->pad,
                         .carry = o->carry,
                         .block = -1};
    enum status status = open_corpus(c, o, error);
    if (status != STATUS_OK)
        corpus_close(c);
    else
        *out = c;
    return status;
}

void corpus_close(struct corpus *c)
{
    if (c == NULL)
        return;
    if (c->source != NULL)
        c->source->functions->close(c->source);
    memory_free(c->prepend);
    memory_free(c->marks);
    memory_free(c->extents);
    memory_free(c->first_window);
    memory_free(c);
}

/* ---- what it holds ---- */

int64_t corpus_n_sequences(const struct corpus *c)
{
    return c->n_sequences;
}

int64_t corpus_n_documents(const struct corpus *c)
{
    return c->source->n_documents;
}

int64_t corpus_n_empty(const struct corpus *c)
{
    return c->n_empty;
}

int64_t corpus_n_tokens(const struct corpus *c)
{
    return c->n_tokens;
}

int64_t corpus_longest_run(const struct corpus *c)
{
    if (c->longest_document == 0)
        return 0;
    return c->n_prepend + (c->carry ? c->longest_document : least(c->window, c->longest_document));
}

/* ---- digest ---- */

static void hash_integers(XXH3_state_t *state, const int64_t *values, int n)
{
    for (int i = 0; i < n; i++) {
        uint64_t bytes = htole64((uint64_t)values[i]);
        XXH3_128bits_update(state, &bytes, sizeof bytes);
    }
}

static enum status hash_bounds(struct corpus *c, int64_t n, XXH3_state_t *state, struct error *error)
{
    for (int64_t i = 0; i < n; i++) {
        struct place place;
        TRY(locate(c, i, &place, error));
        hash_integers(state, (int64_t[]){place.document, place.start, place.length, place.continues}, 4);
    }
    return STATUS_OK;
}

static enum status hash_tokens(struct corpus *c, int64_t n, int32_t *ids, XXH3_state_t *state,
                               struct error *error)
{
    int64_t n_read = least(n, DIGEST_SEQUENCES);
    for (int64_t i = 0; i < n_read; i++) {
        /* i (n - 1) / (n_read - 1), without its product overflowing */
        int64_t steps = n_read > 1 ? n_read - 1 : 1;
        int64_t index = (n - 1) / steps * i + (n - 1) % steps * i / steps;
        struct sequence s;
        TRY(corpus_read(c, index, &s, ids, error));
        hash_integers(state, &s.length, 1);
        for (int64_t t = 0; t < s.length; t++)
            ids[t] = (int32_t)htole32((uint32_t)ids[t]);
        XXH3_128bits_update(state, ids, (size_t)s.length * sizeof *ids);
    }
    return STATUS_OK;
}

enum status corpus_digest(struct corpus *c, int64_t n, char digest[33], struct error *error)
{
    if (n > c->n_sequences)
        return error_set(error, STATUS_INPUT, "%s gives %" PRId64 " sequences, expected at least %" PRId64,
                         c->source->path, c->n_sequences, n);
    void *ids;
    int64_t longest = least(c->context, c->n_prepend + c->longest_document);
    TRY(memory_allocate_array(&ids, (size_t)longest, sizeof(int32_t), "a sequence", error));
    XXH3_state_t *state = XXH3_createState();
    enum status status = STATUS_OK;
    if (state == NULL)
        TRY_ELSE(error_set(error, STATUS_RESOURCE, "out of memory: the state of a digest"), done);
    XXH3_128bits_reset(state);
    hash_integers(state, &n, 1);
    TRY_ELSE(hash_bounds(c, n, state, error), done);
    TRY_ELSE(hash_tokens(c, n, ids, state, error), done);
    XXH128_hash_t hash = XXH3_128bits_digest(state);
    snprintf(digest, 33, "%016" PRIx64 "%016" PRIx64, (uint64_t)hash.high64, (uint64_t)hash.low64);
done:
    XXH3_freeState(state);
    memory_free(ids);
    return status;
}
