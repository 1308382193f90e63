/* What is said of jobs that do not fit, and what the machine says of its memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "pipeline/fit.h"

#include <string.h>

#define GIB 1073741824.0

static const struct fit on_cpu = {.is_host = true,
                                  .replica = {.weights = (size_t)4 << 30, .workspace = (size_t)1 << 30},
                                  .writer = 0.5 * GIB,
                                  .program = 0.5 * GIB,
                                  .host = 6 * GIB,
                                  .host_available = 14 * GIB,
                                  .host_total = 16 * GIB};
static const struct fit on_gpu = {.replica = {.weights = (size_t)18 << 30, .workspace = (size_t)3 << 30},
                                  .ring = 0.25 * GIB,
                                  .device = 22 * GIB,
                                  .on_device = {.free_bytes = (size_t)23 << 30,
                                                .total_bytes = (size_t)24 << 30,
                                                .operations = (size_t)3 << 28},
                                  .host = 1 * GIB,
                                  .host_available = 14 * GIB,
                                  .host_total = 16 * GIB};

/* A row: a fit, a change of it, and what comes of it. */
struct row {
    const struct fit *fit;
    int node_count;
    double host_available, host_total; /* 0: the fit's own */
    size_t free_bytes;                 /* 0: the fit's own */
    enum status status;
    const char *warning, *error; /* in the sentence; NULL: none */
};

static const struct row rows[] = {
    {.fit = &on_cpu, .node_count = 1},
    {.fit = &on_cpu, .node_count = 2},
    {.fit = &on_cpu,
     .node_count = 1,
     .host_available = 5 * GIB,
     .warning = "may not fit into the host's memory: 1 rank"},
    {.fit = &on_cpu,
     .node_count = 3,
     .status = STATUS_RESOURCE,
     .error =
         "does not fit into the host's memory: 3 ranks on this machine of 6.00 GiB each (weights 4.00 GiB"},
    {.fit = &on_cpu,
     .node_count = 3,
     .status = STATUS_RESOURCE,
     .error = "make 18.00 GiB; 14.00 GiB are free of 16.00 GiB that this process may have"},
    {.fit = &on_cpu, .node_count = 3, .host_total = -1}, /* not known */
    {.fit = &on_gpu, .node_count = 8},
    {.fit = &on_gpu, .node_count = 17, .status = STATUS_RESOURCE, .error = "weights 0.00 GiB"},
    {.fit = &on_gpu,
     .node_count = 1,
     .free_bytes = (size_t)21 << 30,
     .status = STATUS_DEVICE,
     .error =
         "a device: the job does not fit: weights 18.00 GiB, workspace 3.00 GiB for batches of 4096 tokens"},
    {.fit = &on_gpu,
     .node_count = 1,
     .free_bytes = (size_t)21 << 30,
     .status = STATUS_DEVICE,
     .error = "captured rows 0.25 GiB and operations 0.75 GiB make 22.00 GiB, and 21.00 GiB of 24.00 GiB are "
              "free"},
};

static void expect(const struct error *error, const char *said, size_t row)
{
    if (said == NULL)
        assert_int_equal(error->status, STATUS_OK);
    else if (strstr(error->text, said) == NULL)
        fail_msg("row %zu: expected \"%s\" in \"%s\"", row, said, error->text);
}

static void test_what_does_not_fit(void **state)
{
    struct plan plan = {.batch_tokens = 4096};
    struct backend backend = {.name = "a device"};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct fit fit = *rows[i].fit;
        struct error warning = {0}, error = {0};
        struct fit_request request = {.plan = &plan, .backend = &backend, .node_count = rows[i].node_count};
        if (rows[i].host_available != 0)
            fit.host_available = rows[i].host_available;
        if (rows[i].host_total != 0)
            fit.host_total = rows[i].host_total > 0 ? rows[i].host_total : 0;
        if (rows[i].free_bytes != 0)
            fit.on_device.free_bytes = rows[i].free_bytes;
        assert_int_equal(fit_check(&request, &fit, &warning, &error), rows[i].status);
        expect(&warning, rows[i].warning, i);
        expect(&error, rows[i].error, i);
    }
}

static void test_host_memory(void **state)
{
    double available = -1, total = -1;
    (void)state;
    fit_host_memory(&available, &total);
    assert_true(total > 64 * 1048576.0 && available > 0 && available <= total);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_does_not_fit),
        cmocka_unit_test(test_host_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
