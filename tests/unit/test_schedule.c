/* The coordinator's book: every unit once, nothing after a stop, failures over stops. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <unistd.h>

#include "kernels/base/log.h"
#include "pipeline/lock.h"
#include "pipeline/schedule.h"

enum { N = 40 };
static const int64_t tokens[N] = {[0] = 10, [1] = 20, [2] = 30};
static int n_records;

static void count_record(void *context, struct segment_record *record)
{
    (void)record;
    ++*(int *)context;
}

static struct schedule *make(const bool *done)
{
    struct schedule *schedule;
    struct error error = {0};
    struct schedule_options options = {
        .n_units = N, .unit_tokens = tokens, .done = done, .on_record = count_record, .context = &n_records};
    n_records = 0;
    assert_int_equal(schedule_create(&options, &schedule, &error), STATUS_OK);
    return schedule;
}

static void test_hands_out_what_is_not_done_in_order(void **state)
{
    (void)state;
    bool done[N] = {false};
    done[0] = done[2] = done[N - 1] = true;
    struct schedule *schedule = make(done);
    int64_t expected = 1, n_handed_out = 0;
    for (struct assignment a; schedule_next(schedule, &a), a.unit >= 0; expected++) {
        int64_t unit = a.unit;
        assert_int_equal(a.in_flight, n_handed_out++);
        expected += expected == 2;
        assert_int_equal(unit, expected);
    }
    assert_int_equal(expected, N - 1);
    struct schedule_progress p;
    schedule_get_progress(schedule, &p);
    assert_int_equal(p.units_done, 3);
    assert_int_equal(p.tokens_done, 40);
    assert_int_equal(p.tokens_total, 60);
    schedule_record(schedule, &(struct segment_record){.unit = 1});
    schedule_get_progress(schedule, &p);
    assert_int_equal(p.tokens_done, 60);
    assert_int_equal(n_records, 1);
    schedule_destroy(schedule);
}

static void test_units_in_flight_are_those_without_a_record(void **state)
{
    (void)state;
    const bool done[N] = {[0] = true};
    struct schedule *schedule = make(done);
    struct assignment a;
    const int64_t records_before[] = {0, 0, 2, 1}, expected[] = {0, 1, 0, 0};
    int64_t recorded = 1;
    for (int i = 0; i < 4; i++) {
        for (int64_t j = 0; j < records_before[i]; j++)
            schedule_record(schedule, &(struct segment_record){.unit = recorded++});
        schedule_next(schedule, &a);
        assert_int_equal(a.unit, i + 1);
        assert_int_equal(a.in_flight, expected[i]);
    }
    schedule_destroy(schedule);
}

static void test_nothing_after_a_stop_and_a_failure_says_more(void **state)
{
    (void)state;
    const bool done[N] = {false};
    struct schedule *schedule = make(done);
    struct error error = {0}, failure = {0};
    assert_int_equal(schedule_status(schedule, &error), STATUS_OK);
    schedule_stop(schedule, "first reason");
    schedule_stop(schedule, "second reason");
    struct assignment none;
    schedule_next(schedule, &none);
    assert_int_equal(none.unit, -1);
    assert_int_equal(schedule_status(schedule, &error), STATUS_STOPPED);
    assert_string_equal(error.text, "first reason");
    error_set(&failure, STATUS_RESOURCE, "the disk is full");
    schedule_fail(schedule, &failure);
    schedule_stop(schedule, "third reason");
    error_clear(&error);
    assert_int_equal(schedule_status(schedule, &error), STATUS_RESOURCE);
    assert_string_equal(error.text, "the disk is full");
    schedule_destroy(schedule);
}

struct taker {
    struct schedule *schedule;
    int taken[N];
};

static void *take_all(void *context)
{
    struct taker *taker = context;
    for (struct assignment a; schedule_next(taker->schedule, &a), a.unit >= 0;) {
        taker->taken[a.unit]++;
        schedule_record(taker->schedule, &(struct segment_record){.unit = a.unit});
    }
    return NULL;
}

static void test_each_unit_goes_to_one_of_many_takers(void **state)
{
    (void)state;
    const bool done[N] = {false};
    struct taker takers[4] = {{0}};
    pthread_t threads[4];
    struct schedule *schedule = make(done);
    for (int i = 0; i < 4; i++) {
        takers[i].schedule = schedule;
        assert_int_equal(pthread_create(&threads[i], NULL, take_all, &takers[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int unit = 0; unit < N; unit++)
        assert_int_equal(
            takers[0].taken[unit] + takers[1].taken[unit] + takers[2].taken[unit] + takers[3].taken[unit], 1);
    assert_int_equal(n_records, N);
    schedule_destroy(schedule);
}

static void test_a_store_is_locked_once(void **state)
{
    (void)state;
    char folder[] = "/tmp/actdump-lock-XXXXXX", path[64];
    struct error error = {0};
    int first = -1, second = -1;
    assert_non_null(mkdtemp(folder));
    assert_int_equal(lock_acquire(folder, &first, &error), STATUS_OK);
    /* the lock belongs to the open file, so this process conflicts with itself like any other */
    assert_int_equal(lock_acquire(folder, &second, &error), STATUS_USAGE);
    assert_non_null(strstr(error.text, "another job is writing this store (process "));
    lock_release(first);
    error_clear(&error);
    assert_int_equal(lock_acquire(folder, &second, &error), STATUS_OK);
    lock_release(second);
    error_clear(&error);
    assert_int_equal(lock_acquire("/nonexistent", &second, &error), STATUS_USAGE);
    snprintf(path, sizeof path, "%s/store.lock", folder);
    unlink(path);
    rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hands_out_what_is_not_done_in_order),
        cmocka_unit_test(test_units_in_flight_are_those_without_a_record),
        cmocka_unit_test(test_nothing_after_a_stop_and_a_failure_says_more),
        cmocka_unit_test(test_each_unit_goes_to_one_of_many_takers),
        cmocka_unit_test(test_a_store_is_locked_once),
    };
    log_configure(&(struct log_options){.level = LOG_ERROR, .n_ranks = 1});
    return cmocka_run_group_tests(tests, NULL, NULL);
}
