/* Reading a corpus of whatever bytes, to its end or its first fault. */
#ifndef ACTDUMP_TESTS_FUZZ_CORPUS_H
#define ACTDUMP_TESTS_FUZZ_CORPUS_H

#include "fuzz.h"
#include "kernels/base/memory.h"
#include "pipeline/corpus.h"

#define FUZZ_CONTEXT 8
#define FUZZ_N_IDS 100

static inline void fuzz_check_sequence(struct corpus *corpus, int64_t index)
{
    struct error error = {0};
    struct sequence described = {0}, read = {0};
    int32_t ids[FUZZ_CONTEXT];
    enum status status = corpus_describe(corpus, index, &described, &error);
    fuzz_check_error(status, STATUS_INPUT, &error);
    if (status != STATUS_OK)
        return;
    CHECK(described.index == index && described.length >= 1 && described.length <= FUZZ_CONTEXT);
    CHECK(described.document >= 0 && described.document < corpus_n_documents(corpus));
    CHECK(described.start >= 0 && described.start < corpus_n_tokens(corpus));
    CHECK(described.n_prepended >= 0 && described.n_prepended < described.length);
    status = corpus_read(corpus, index, &read, ids, &error);
    fuzz_check_error(status, STATUS_INPUT, &error);
    if (status != STATUS_OK)
        return;
    CHECK(read.length == described.length && read.start == described.start);
    for (int64_t i = 0; i < read.length; i++)
        CHECK(ids[i] >= 0 && ids[i] < FUZZ_N_IDS);
}

static inline void fuzz_read_corpus(const struct corpus_options *options)
{
    size_t before = memory_in_use();
    struct corpus *corpus = NULL;
    struct error error = {0};
    enum status status = corpus_open(options, FUZZ_N_IDS, &corpus, &error);
    /* Padding asked for where the file has no rows is the job's fault. */
    bool is_usage = status == STATUS_USAGE && options->has_pad;
    fuzz_check_error(status, is_usage ? STATUS_USAGE : STATUS_INPUT, &error);
    CHECK((corpus != NULL) == (status == STATUS_OK));
    if (corpus != NULL) {
        int64_t n = corpus_n_sequences(corpus);
        CHECK(n >= 0 && corpus_n_documents(corpus) >= 0 && corpus_n_tokens(corpus) >= 0);
        for (int64_t i = 0; i < n && i < 32; i++)
            fuzz_check_sequence(corpus, i);
        if (n > 0)
            fuzz_check_sequence(corpus, n - 1);
        char digest[33];
        fuzz_check_error(corpus_digest(corpus, n < 64 ? n : 64, digest, &error), STATUS_INPUT, &error);
    }
    corpus_close(corpus);
    CHECK(memory_in_use() == before);
}

#endif
