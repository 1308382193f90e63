/* The job file, from text. What follows a NUL, if there is one, is a --set. */
#include "fuzz.h"
#include "kernels/base/memory.h"
#include "pipeline/job.h"

#include <math.h>
#include <string.h>

/* What the rest of the program takes for granted of a job that was accepted. */
static void check_job(const struct job *job)
{
    CHECK(job->checkpoint != NULL && job->corpus_path != NULL && job->store_path != NULL);
    CHECK(job->n_captures > 0 && job->captures != NULL);
    CHECK(job->corpus.context > 0 && job->corpus.start >= 0 && job->corpus.limit >= -1);
    CHECK(job->chunk_rows > 0 && job->unit_tokens > 0 && job->compression >= 0);
    CHECK(job->batch_tokens >= 0 && job->n_threads >= 0);
    CHECK(isfinite(job->grace_seconds) && job->grace_seconds >= 0);
    for (int64_t i = 0; i < job->n_captures; i++) {
        const struct job_capture *capture = &job->captures[i];
        CHECK(capture->name != NULL && capture->n_values > 0);
        const struct positions *p = &capture->positions;
        CHECK(p->kind != POSITIONS_EVERY || (p->n > 0 && p->offset >= 0));
        CHECK(p->kind != POSITIONS_FIRST || p->n > 0);
        CHECK(p->kind != POSITIONS_SAMPLE || (p->fraction >= 0 && p->fraction <= 1));
        CHECK(p->skip_first >= 0);
        for (int64_t k = 1; k < p->n_list; k++)
            CHECK(p->list[k - 1] != p->list[k]);
        for (int64_t k = 0; k < capture->layers.n_ranges; k++)
            CHECK(capture->layers.ranges[k].step > 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t before = memory_in_use();
    const uint8_t *end = size == 0 ? NULL : memchr(data, 0, size);
    size_t length = end == NULL ? size : (size_t)(end - data);
    size_t n_set = end == NULL ? 0 : size - length - 1;
    char *set = malloc(n_set + 1);
    CHECK(set != NULL);
    memcpy(set, data + size - n_set, n_set);
    set[n_set] = '\0';
    const char *const sets[] = {set};
    struct job *job = NULL;
    struct error error = {0};
    enum status status = job_parse((const char *)data, length, "job.json", "/nowhere", sets,
                                   end == NULL ? 0 : 1, &job, &error);
    fuzz_check_error(status, STATUS_USAGE, &error);
    CHECK((job != NULL) == (status == STATUS_OK));
    if (job != NULL)
        check_job(job);
    job_free(job);
    free(set);
    CHECK(memory_in_use() == before);
    return 0;
}
