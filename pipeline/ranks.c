#include "pipeline/ranks.h"

#include "kernels/base/log.h"
#include "kernels/base/memory.h"
#include "kernels/base/processors.h"
#include "pipeline/clock.h"

#include <math.h>
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Between looks for a message. Short against a batch, long against the cost of a look. */
#define POLL_SECONDS 0.001
/* Rank 0's, while nothing comes: each look takes a moment from a thread that computes, and units are asked
 * for a batch before they are needed. */
#define POLL_SECONDS_IDLE 0.008
/* Between reports of a rank's tokens, which only the progress line reads: 10,000 ranks with batches of 10 ms
 * would send a million a second. */
#define TOKENS_SECONDS 1.0

enum tag { TAG_REQUEST = 1, TAG_ASSIGN, TAG_RECORD, TAG_TOKENS, TAG_FAILURE, TAG_STOP_PLEASE, TAG_STOP };

/* A record on the wire: these, then n_captures row counts. */
enum { RECORD_WORDS = 8 };

struct ranks {
    int rank, n, node_rank, node_n;
    MPI_Comm comm; /* our own: nobody else's messages */
    pthread_mutex_t lock;
    struct schedule *schedule; /* rank 0 */
    int64_t n_captures;
    int64_t
        *wire; /* [RECORD_WORDS + n_captures] of the answering thread on rank 0, of the caller elsewhere */
    enum status stopped; /* others: what rank 0 said */
    /* others: a unit that was asked for ahead of time; the caller's */
    bool has_asked;
    MPI_Request answered;
    struct assignment assignment;
    /* others: not reported yet; the caller's */
    int64_t tokens;
    double tokens_reported_s;
    bool told_others; /* rank 0 */
    bool answering;   /* rank 0; under lock */
    pthread_t thread;
};

static void check(int code, const char *what)
{
    if (code == MPI_SUCCESS)
        return;
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, text, &length);
    log_error("%s failed: %.*s", what, length, text);
    MPI_Abort(MPI_COMM_WORLD, STATUS_BUG);
}

/* ---------------------------------------------------------------- start and end */

static void find_node(struct ranks *ranks)
{
    MPI_Comm node;
    check(MPI_Comm_split_type(ranks->comm, MPI_COMM_TYPE_SHARED, ranks->rank, MPI_INFO_NULL, &node),
          "MPI_Comm_split_type");
    MPI_Comm_rank(node, &ranks->node_rank);
    MPI_Comm_size(node, &ranks->node_n);
    MPI_Comm_free(&node);
}

enum status ranks_init(int *argc, char ***argv, struct ranks **out, struct error *error)
{
    int provided = 0;
    void *memory;
    if (MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS)
        return error_set(error, STATUS_BUG, "MPI does not start");
    if (provided < MPI_THREAD_SERIALIZED)
        return error_set(error, STATUS_USAGE,
                         "this MPI library gives thread level %d; actdump needs "
                         "MPI_THREAD_SERIALIZED (%d)",
                         provided, MPI_THREAD_SERIALIZED);
    TRY(memory_allocate(&memory, sizeof(struct ranks), "ranks", error));
    struct ranks *ranks = memory;
    check(MPI_Comm_dup(MPI_COMM_WORLD, &ranks->comm), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(ranks->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(ranks->comm, &ranks->rank);
    MPI_Comm_size(ranks->comm, &ranks->n);
    find_node(ranks);
    pthread_mutex_init(&ranks->lock, NULL);
    *out = ranks;
    return STATUS_OK;
}

void ranks_finish(struct ranks *ranks)
{
    if (ranks == NULL)
        return;
    MPI_Comm_free(&ranks->comm);
    pthread_mutex_destroy(&ranks->lock);
    memory_free(ranks->wire);
    memory_free(ranks);
    MPI_Finalize();
}

int ranks_rank(const struct ranks *ranks)
{
    return ranks->rank;
}

int ranks_count(const struct ranks *ranks)
{
    return ranks->n;
}

int ranks_node_rank(const struct ranks *ranks)
{
    return ranks->node_rank;
}

int ranks_node_count(const struct ranks *ranks)
{
    return ranks->node_n;
}

/* ---------------------------------------------------------------- agreement */

/* Higher is worse; a stop is the mildest of failures, a bug says most. */
static int severity(enum status status)
{
    static const enum status order[] = {STATUS_OK,     STATUS_STOPPED,  STATUS_USAGE, STATUS_INPUT,
                                        STATUS_DEVICE, STATUS_RESOURCE, STATUS_BUG};
    for (int i = 0; i < (int)(sizeof order / sizeof *order); i++) {
        if (order[i] == status)
            return i;
    }
    return 0;
}

/* Waits for a request without spinning. */
static void wait_politely(struct ranks *ranks, MPI_Request *request)
{
    int done = 0;
    while (!done) {
        pthread_mutex_lock(&ranks->lock);
        check(MPI_Test(request, &done, MPI_STATUS_IGNORE), "MPI_Test");
        pthread_mutex_unlock(&ranks->lock);
        if (!done)
            clock_sleep(POLL_SECONDS);
    }
}

enum status ranks_agree(struct ranks *ranks, struct error *error)
{
    struct {
        int badness, rank;
    } mine = {.badness = severity(error->status), .rank = ranks->rank}, worst;
    MPI_Request request;
    pthread_mutex_lock(&ranks->lock);
    check(MPI_Iallreduce(&mine, &worst, 1, MPI_2INT, MPI_MAXLOC, ranks->comm, &request), "MPI_Iallreduce");
    pthread_mutex_unlock(&ranks->lock);
    wait_politely(ranks, &request);
    if (worst.badness == 0)
        return STATUS_OK;
    pthread_mutex_lock(&ranks->lock);
    check(MPI_Bcast(error, (int)sizeof *error, MPI_BYTE, worst.rank, ranks->comm), "MPI_Bcast");
    pthread_mutex_unlock(&ranks->lock);
    return error->status;
}

void ranks_broadcast(struct ranks *ranks, void *bytes, size_t n)
{
    const size_t most = 1 << 30; /* MPI counts are ints */
    for (size_t at = 0; at < n; at += most) {
        size_t length = n - at < most ? n - at : most;
        MPI_Request request;
        pthread_mutex_lock(&ranks->lock);
        check(MPI_Ibcast((char *)bytes + at, (int)length, MPI_BYTE, 0, ranks->comm, &request), "MPI_Ibcast");
        pthread_mutex_unlock(&ranks->lock);
        wait_politely(ranks, &request);
    }
}

/* ---------------------------------------------------------------- rank 0 answers */

static void take_record(struct ranks *ranks, int source)
{
    int64_t *wire = ranks->wire;
    check(MPI_Recv(wire, (int)(RECORD_WORDS + ranks->n_captures), MPI_INT64_T, source, TAG_RECORD,
                   ranks->comm, MPI_STATUS_IGNORE),
          "MPI_Recv");
    struct segment_record record = {.unit = wire[0],
                                    .first_sequence = wire[1],
                                    .n_sequences = wire[2],
                                    .n_tokens = wire[3],
                                    .bytes = wire[4],
                                    .raw_bytes = wire[5],
                                    .checksum = (uint64_t)wire[6]};
    schedule_add_tokens(ranks->schedule, wire[7]);
    void *rows;
    struct error error = {0};
    if (memory_allocate_array(&rows, (size_t)ranks->n_captures, sizeof(int64_t), "a record", &error) !=
        STATUS_OK) {
        schedule_fail(ranks->schedule, &error);
        return;
    }
    record.n_rows = rows;
    memcpy(record.n_rows, wire + RECORD_WORDS, (size_t)ranks->n_captures * sizeof(int64_t));
    schedule_record(ranks->schedule, &record);
}

static void answer(struct ranks *ranks, const MPI_Status *message)
{
    int source = message->MPI_SOURCE;
    int64_t number;
    struct assignment assignment;
    struct error error;
    switch (message->MPI_TAG) {
    case TAG_REQUEST:
        check(MPI_Recv(NULL, 0, MPI_BYTE, source, TAG_REQUEST, ranks->comm, MPI_STATUS_IGNORE), "MPI_Recv");
        schedule_next(ranks->schedule, &assignment);
        check(MPI_Send(&assignment, sizeof assignment, MPI_BYTE, source, TAG_ASSIGN, ranks->comm),
              "MPI_Send");
        break;
    case TAG_RECORD:
        take_record(ranks, source);
        break;
    case TAG_TOKENS:
        check(MPI_Recv(&number, 1, MPI_INT64_T, source, TAG_TOKENS, ranks->comm, MPI_STATUS_IGNORE),
              "MPI_Recv");
        schedule_add_tokens(ranks->schedule, number);
        break;
    case TAG_FAILURE:
        check(MPI_Recv(&error, (int)sizeof error, MPI_BYTE, source, TAG_FAILURE, ranks->comm,
                       MPI_STATUS_IGNORE),
              "MPI_Recv");
        schedule_fail(ranks->schedule, &error);
        break;
    case TAG_STOP_PLEASE:
        check(MPI_Recv(&error, (int)sizeof error, MPI_BYTE, source, TAG_STOP_PLEASE, ranks->comm,
                       MPI_STATUS_IGNORE),
              "MPI_Recv");
        schedule_stop(ranks->schedule, error.text);
        break;
    default:
        break;
    }
}

/* Tells the others once that all stop. */
static void spread_stop(struct ranks *ranks)
{
    int32_t status = (int32_t)schedule_status(ranks->schedule, NULL);
    if (status == STATUS_OK || ranks->told_others)
        return;
    ranks->told_others = true;
    for (int rank = 1; rank < ranks->n; rank++)
        check(MPI_Send(&status, 1, MPI_INT32_T, rank, TAG_STOP, ranks->comm), "MPI_Send");
}

/* Answers what has come in; called under the lock. Returns how many messages that were. */
static int64_t answer_all(struct ranks *ranks)
{
    int64_t n = 0;
    /* Messages of the schedule only: collectives are not matched by a probe on point-to-point tags. */
    for (int found = 1; found != 0;) {
        MPI_Status message;
        check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, ranks->comm, &found, &message), "MPI_Iprobe");
        if (found)
            answer(ranks, &message);
        n += found;
    }
    spread_stop(ranks);
    return n;
}

static void *answer_in_thread(void *context)
{
    struct ranks *ranks = context;
    double pause_s = POLL_SECONDS;
    processors_release_thread();
    for (bool answering = true; answering;) {
        pthread_mutex_lock(&ranks->lock);
        answering = ranks->answering;
        int64_t n = answer_all(ranks);
        pthread_mutex_unlock(&ranks->lock);
        pause_s = n > 0 ? POLL_SECONDS : fmin(2 * pause_s, POLL_SECONDS_IDLE);
        if (answering)
            clock_sleep(pause_s);
    }
    return NULL;
}

static void stop_answering(struct ranks *ranks)
{
    pthread_mutex_lock(&ranks->lock);
    bool answering = ranks->answering;
    ranks->answering = false;
    pthread_mutex_unlock(&ranks->lock);
    if (answering)
        pthread_join(ranks->thread, NULL);
}

enum status ranks_start(struct ranks *ranks, struct schedule *schedule, int64_t n_captures,
                        struct error *error)
{
    void *wire;
    ranks->schedule = schedule;
    ranks->n_captures = n_captures;
    struct error mine = {0};
    if (memory_allocate_array(&wire, (size_t)(RECORD_WORDS + n_captures), sizeof(int64_t), "records",
                              &mine) == STATUS_OK)
        ranks->wire = wire;
    if (mine.status == STATUS_OK && ranks->rank == 0 && ranks->n > 1) {
        ranks->answering = true;
        int code = pthread_create(&ranks->thread, NULL, answer_in_thread, ranks);
        if (code != 0) {
            ranks->answering = false;
            error_set_errno(&mine, STATUS_RESOURCE, code, "the thread that answers ranks does not start");
        }
    }
    if (ranks_agree(ranks, &mine) == STATUS_OK)
        return STATUS_OK;
    stop_answering(ranks);
    return error_set(error, mine.status, "%s", mine.text);
}

/* ---------------------------------------------------------------- every rank */

static void send(struct ranks *ranks, const void *data, int count, MPI_Datatype type, enum tag tag)
{
    pthread_mutex_lock(&ranks->lock);
    check(MPI_Send(data, count, type, 0, tag, ranks->comm), "MPI_Send");
    pthread_mutex_unlock(&ranks->lock);
}

void ranks_ask_ahead(struct ranks *ranks)
{
    if (ranks->rank == 0 || ranks->has_asked)
        return;
    pthread_mutex_lock(&ranks->lock);
    check(MPI_Irecv(&ranks->assignment, sizeof ranks->assignment, MPI_BYTE, 0, TAG_ASSIGN, ranks->comm,
                    &ranks->answered),
          "MPI_Irecv");
    check(MPI_Send(NULL, 0, MPI_BYTE, 0, TAG_REQUEST, ranks->comm), "MPI_Send");
    pthread_mutex_unlock(&ranks->lock);
    ranks->has_asked = true;
}

void ranks_next_unit(struct ranks *ranks, struct assignment *out)
{
    if (ranks->rank == 0) {
        schedule_next(ranks->schedule, out);
        return;
    }
    ranks_ask_ahead(ranks);
    wait_politely(ranks, &ranks->answered);
    ranks->has_asked = false;
    *out = ranks->assignment;
}

/* What has not been reported yet; it is from now on. */
static int64_t take_tokens(struct ranks *ranks)
{
    int64_t tokens = ranks->tokens;
    ranks->tokens = 0;
    ranks->tokens_reported_s = clock_seconds();
    return tokens;
}

void ranks_report(struct ranks *ranks, struct segment_record *record)
{
    if (ranks->rank == 0) {
        schedule_record(ranks->schedule, record);
        return;
    }
    int64_t words[RECORD_WORDS] = {
        record->unit,  record->first_sequence, record->n_sequences,       record->n_tokens,
        record->bytes, record->raw_bytes,      (int64_t)record->checksum, take_tokens(ranks)};
    memcpy(ranks->wire, words, sizeof words);
    memcpy(ranks->wire + RECORD_WORDS, record->n_rows, (size_t)ranks->n_captures * sizeof(int64_t));
    send(ranks, ranks->wire, (int)(RECORD_WORDS + ranks->n_captures), MPI_INT64_T, TAG_RECORD);
    segment_record_fini(record);
}

void ranks_report_tokens(struct ranks *ranks, int64_t tokens)
{
    if (ranks->rank == 0) {
        schedule_add_tokens(ranks->schedule, tokens);
        return;
    }
    ranks->tokens += tokens;
    if (clock_seconds() - ranks->tokens_reported_s < TOKENS_SECONDS)
        return;
    tokens = take_tokens(ranks);
    send(ranks, &tokens, 1, MPI_INT64_T, TAG_TOKENS);
}

void ranks_report_failure(struct ranks *ranks, const struct error *error)
{
    if (ranks->rank == 0)
        schedule_fail(ranks->schedule, error);
    else
        send(ranks, error, (int)sizeof *error, MPI_BYTE, TAG_FAILURE);
}

void ranks_report_stop(struct ranks *ranks, const char *why)
{
    if (ranks->rank == 0) {
        schedule_stop(ranks->schedule, why);
        return;
    }
    struct error reason = {0};
    error_set(&reason, STATUS_STOPPED, "%s", why);
    send(ranks, &reason, (int)sizeof reason, MPI_BYTE, TAG_STOP_PLEASE);
}

enum status ranks_poll(struct ranks *ranks)
{
    if (ranks->rank == 0)
        return schedule_status(ranks->schedule, NULL);
    int found = 0;
    pthread_mutex_lock(&ranks->lock);
    check(MPI_Iprobe(0, TAG_STOP, ranks->comm, &found, MPI_STATUS_IGNORE), "MPI_Iprobe");
    if (found) {
        int32_t said;
        check(MPI_Recv(&said, 1, MPI_INT32_T, 0, TAG_STOP, ranks->comm, MPI_STATUS_IGNORE), "MPI_Recv");
        ranks->stopped = (enum status)said;
    }
    enum status stopped = ranks->stopped;
    pthread_mutex_unlock(&ranks->lock);
    return stopped;
}

void ranks_sum(struct ranks *ranks, double *values, int n)
{
    MPI_Request request;
    pthread_mutex_lock(&ranks->lock);
    check(MPI_Iallreduce(MPI_IN_PLACE, values, n, MPI_DOUBLE, MPI_SUM, ranks->comm, &request),
          "MPI_Iallreduce");
    pthread_mutex_unlock(&ranks->lock);
    wait_politely(ranks, &request);
}

void ranks_join(struct ranks *ranks)
{
    MPI_Request request;
    if (ranks->has_asked) { /* and failed or stopped before it took the answer */
        wait_politely(ranks, &ranks->answered);
        ranks->has_asked = false;
    }
    pthread_mutex_lock(&ranks->lock);
    check(MPI_Ibarrier(ranks->comm, &request), "MPI_Ibarrier");
    pthread_mutex_unlock(&ranks->lock);
    wait_politely(ranks, &request);
    stop_answering(ranks);
    /* A stop that was sent while this rank was on its way here must not be left in the queue. */
    pthread_mutex_lock(&ranks->lock);
    check(MPI_Barrier(ranks->comm), "MPI_Barrier");
    pthread_mutex_unlock(&ranks->lock);
    ranks_poll(ranks);
}
