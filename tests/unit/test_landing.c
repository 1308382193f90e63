/* Rows by way of a landing: the same segments as by the writer alone, whoever is faster, and failures that
 * end it. The device is made up: its ring is small, so that posts wait, and its rows come late. */
#include "tests/tools/made_up.h"

#include "pipeline/clock.h"
#include "pipeline/landing.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/tools/store_folder.h"

enum { N_UNITS = 5 };

/* ---------------------------------------------------------------- a device */

struct device {
    struct backend base; /* first */
    pthread_mutex_t lock;
    char *ring;
    size_t capacity, used, first; /* bytes in use, and where they begin */
    int64_t n_posts, n_takes, fail_take_at;
    bool is_slow;
};

static struct device *device_of(struct backend *b)
{
    return (struct device *)(void *)b;
}

static enum status reserve(struct backend *b, size_t bytes, struct error *error)
{
    struct device *d = device_of(b);
    (void)error;
    free(d->ring);
    d->ring = malloc(bytes);
    d->capacity = bytes;
    return d->ring == NULL ? STATUS_RESOURCE : STATUS_OK;
}

static void put(struct device *d, const char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        d->ring[(d->first + d->used++) % d->capacity] = bytes[i];
}

static bool post(struct backend *b, struct tensor x, const int32_t *rows, int64_t n, enum dtype dtype)
{
    struct device *d = device_of(b);
    size_t row_bytes = (size_t)x.cols * dtype_size(dtype);
    assert_int_equal(x.dtype, dtype);
    assert_true((size_t)n * row_bytes <= d->capacity / 4 && n >= 1);
    pthread_mutex_lock(&d->lock);
    bool fits = d->used + (size_t)n * row_bytes <= d->capacity;
    for (int64_t i = 0; i < n && fits; i++)
        put(d, tensor_row(&x, rows[i]), row_bytes);
    d->n_posts += fits;
    pthread_mutex_unlock(&d->lock);
    return fits;
}

static enum status take(struct backend *b, void *host, size_t bytes, int64_t *n_overflow, struct error *error)
{
    struct device *d = device_of(b);
    (void)n_overflow;
    if (d->is_slow)
        clock_sleep(0.0002);
    if (d->n_takes++ == d->fail_take_at)
        return error_set(error, STATUS_DEVICE, "the device is lost");
    pthread_mutex_lock(&d->lock);
    assert_true(bytes <= d->used);
    for (size_t i = 0; i < bytes; i++)
        ((char *)host)[i] = d->ring[(d->first + i) % d->capacity];
    d->first = (d->first + bytes) % d->capacity;
    d->used -= bytes;
    pthread_mutex_unlock(&d->lock);
    return STATUS_OK;
}

static void drop(struct backend *b)
{
    device_of(b)->used = 0;
}

static const struct backend_captures captures = {reserve, post, take, drop};

/* ---------------------------------------------------------------- a flight */

struct flight {
    struct made_up m;
    struct device device;
    char folder[PATH_BYTES];
    struct writer *writer;
    struct landing *landing;
    int64_t slots[2]; /* the sequence whose tables each holds */
    int64_t n_sequences;
};

static enum status write_tables(void *context, int slot, struct error *error)
{
    struct flight *flight = context;
    return made_up_append_tables(flight->writer, flight->slots[slot], error);
}

static void start(struct flight *flight)
{
    struct error error = {0};
    *flight = (struct flight){.device = {.base = {.captures = &captures}, .fail_take_at = -1}};
    pthread_mutex_init(&flight->device.lock, NULL);
    made_up_init(&flight->m, 1);
    make_folder(flight->folder);
    struct writer_options writer = {.folder = flight->folder, .n_threads = 2};
    assert_int_equal(writer_create(&flight->m.layout, &writer, &flight->writer, &error), STATUS_OK);
    struct landing_options options = {.layout = &flight->m.layout,
                                      .backend = &flight->device.base,
                                      .writer = flight->writer,
                                      .tables = {.context = flight, .write = write_tables},
                                      .batch_bytes = 4096};
    assert_int_equal(landing_create(&options, &flight->landing, &error), STATUS_OK);
}

static void end(struct flight *flight)
{
    landing_destroy(flight->landing);
    writer_destroy(flight->writer);
    pthread_mutex_destroy(&flight->device.lock);
    free(flight->device.ring);
    remove_folder(flight->folder);
}

/* Posts rows [first, first + n) of a dataset, out of a tensor in which they lie in reverse. */
static enum status post_value(struct flight *flight, int64_t dataset, int64_t first, int64_t n,
                              struct error *error)
{
    const struct dataset *d = &flight->m.datasets[dataset];
    size_t size = dtype_size(d->source_dtype);
    char *memory = malloc((size_t)(n * d->width) * size);
    int32_t rows[64];
    assert_non_null(memory);
    assert_true(n <= 64);
    for (int64_t r = 0; r < n; r++) {
        rows[r] = (int32_t)(n - 1 - r);
        for (int64_t c = 0; c < d->width; c++) {
            char *to = memory + (size_t)(rows[r] * d->width + c) * size;
            float x = made_up_value(&flight->m, dataset, first + r, c);
            int32_t integer = (int32_t)(made_up_mix(dataset, first + r, c) % 1000);
            uint16_t half = f32_to_bf16(x);
            memcpy(to,
                   d->source_dtype == DTYPE_F32    ? (void *)&x
                   : d->source_dtype == DTYPE_BF16 ? (void *)&half
                                                   : (void *)&integer,
                   size);
        }
    }
    enum status status = landing_post(flight->landing, dataset,
                                      tensor_make(memory, d->source_dtype, n, d->width), rows, n, error);
    free(memory); /* a post has copied */
    return status;
}

/* A sequence as a batch of its own. */
static enum status note_sequence(struct flight *flight, struct error *error)
{
    struct made_up *m = &flight->m;
    int64_t s = m->n_sequences, length = made_up_length(s), n[] = {length, (length + 2) / 3, 0};
    int slot = (int)(flight->n_sequences++ % 2);
    flight->slots[slot] = s;
    TRY(landing_note_tables(flight->landing, slot, error));
    for (int64_t i = 0; i < m->layout.n_datasets; i++) {
        const struct dataset *d = &m->datasets[i];
        bool per_sequence = d->rows == ROWS_OF_SEQUENCES;
        if (d->is_value && (per_sequence || n[d->capture] > 0))
            TRY(post_value(flight, i, per_sequence ? s : m->n_rows[d->capture],
                           per_sequence ? 1 : n[d->capture], error));
    }
    for (int c = 0; c < MADE_UP_CAPTURES; c++)
        m->n_rows[c] += n[c];
    m->n_sequences++;
    m->n_tokens += length;
    return STATUS_OK;
}

static enum status note_unit(struct flight *flight, int64_t unit, struct error *error)
{
    int64_t tokens = flight->m.n_tokens;
    TRY(landing_begin(flight->landing, unit, flight->m.n_sequences, error));
    for (int64_t i = 0; i < made_up_unit_sequences(unit); i++)
        TRY(note_sequence(flight, error));
    return landing_finish(flight->landing, flight->m.n_tokens - tokens, error);
}

static int64_t collect_all(struct flight *flight, struct error *error)
{
    struct segment_record record;
    int64_t n = 0;
    for (bool have = true; writer_collect(flight->writer, true, &record, &have, error) == STATUS_OK && have;
         n++)
        segment_record_fini(&record);
    return n;
}

/* ---------------------------------------------------------------- the tests */

static void assert_same_file(const char *a, const char *b, int64_t unit)
{
    char name[64], command[3 * PATH_BYTES];
    store_segment_name(unit, name);
    snprintf(command, sizeof command, "cmp '%.400s/%s' '%.400s/%s'", a, name, b, name);
    assert_int_equal(system(command), 0);
}

/* The writer by itself, in another folder. */
static void write_directly(const char *folder)
{
    struct made_up m;
    struct writer *writer = NULL;
    struct error error = {0};
    struct segment_record record;
    bool have = true;
    made_up_init(&m, 1);
    struct writer_options options = {.folder = folder, .n_threads = 1};
    assert_int_equal(writer_create(&m.layout, &options, &writer, &error), STATUS_OK);
    for (int64_t u = 0; u < N_UNITS; u++)
        assert_int_equal(made_up_unit(&m, writer, u, made_up_unit_sequences(u), &error), STATUS_OK);
    while (writer_collect(writer, true, &record, &have, &error) == STATUS_OK && have)
        segment_record_fini(&record);
    writer_destroy(writer);
}

static void test_segments_are_the_writers(void **state)
{
    char directly[PATH_BYTES];
    (void)state;
    make_folder(directly);
    write_directly(directly);
    for (int slow = 0; slow < 2; slow++) {
        struct flight flight;
        struct error error = {0};
        start(&flight);
        flight.device.is_slow = slow;
        for (int64_t u = 0; u < N_UNITS; u++)
            assert_int_equal(note_unit(&flight, u, &error), STATUS_OK);
        assert_int_equal(landing_settle(flight.landing, &error), STATUS_OK);
        assert_int_equal(collect_all(&flight, &error), N_UNITS);
        for (int64_t u = 0; u < N_UNITS; u++)
            assert_same_file(flight.folder, directly, u);
        end(&flight);
    }
    remove_folder(directly);
}

/* A unit begun and given up leaves the next one as if it had not been. */
static void test_a_unit_given_up(void **state)
{
    char directly[PATH_BYTES];
    struct flight flight;
    struct error error = {0};
    (void)state;
    make_folder(directly);
    write_directly(directly);
    start(&flight);
    assert_int_equal(landing_begin(flight.landing, 3, 0, &error), STATUS_OK);
    assert_int_equal(note_sequence(&flight, &error), STATUS_OK);
    assert_int_equal(landing_abandon(flight.landing, &error), STATUS_OK);
    made_up_restart(&flight.m);
    assert_int_equal(note_unit(&flight, 0, &error), STATUS_OK);
    assert_int_equal(landing_settle(flight.landing, &error), STATUS_OK);
    assert_int_equal(collect_all(&flight, &error), 1);
    assert_same_file(flight.folder, directly, 0);
    end(&flight);
    remove_folder(directly);
}

/* Rows that do not come end everything, whoever waits for what; units before them are committed. */
static void test_a_device_that_is_lost(void **state)
{
    (void)state;
    for (int64_t at = 0; at < 400; at += 133) {
        struct flight flight;
        struct error error = {0};
        start(&flight);
        flight.device.fail_take_at = at;
        enum status status = STATUS_OK;
        for (int64_t u = 0; u < N_UNITS && status == STATUS_OK; u++)
            status = note_unit(&flight, u, &error);
        if (status == STATUS_OK)
            status = landing_settle(flight.landing, &error);
        assert_int_equal(status, STATUS_DEVICE);
        assert_string_equal(error.text, "the device is lost");
        error_clear(&error);
        assert_int_equal(landing_begin(flight.landing, 9, 0, &error), STATUS_DEVICE);
        end(&flight);
    }
}

/* With all noted and nothing taken. */
static void test_an_end_in_the_middle(void **state)
{
    struct flight flight;
    struct error error = {0};
    (void)state;
    start(&flight);
    flight.device.is_slow = true;
    assert_int_equal(note_unit(&flight, 0, &error), STATUS_OK);
    end(&flight);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_segments_are_the_writers), cmocka_unit_test(test_a_unit_given_up),
        cmocka_unit_test(test_a_device_that_is_lost), cmocka_unit_test(test_an_end_in_the_middle)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
