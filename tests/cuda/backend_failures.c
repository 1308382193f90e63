/* What the CUDA backend says and keeps when the device is not there, is too small, or fails. On the emulated
 * device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/base/memory.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/internal.h"
#include "tests/emulation/emulation.h"

#define GIB ((size_t)1 << 30)

static const struct cuda_options tiny = {
    .piece_bytes = 4096, .n_pieces = 2, .table_bytes = 512, .scratch_bytes = 40000};

static void expect(const struct error *error, enum status status, const char *said)
{
    assert_int_equal(error->status, status);
    if (strstr(error->text, said) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", said, error->text);
}

static struct backend *create(void)
{
    struct backend *b = NULL;
    struct error error = {0};
    if (cuda_backend_create(&tiny, &b, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    return b;
}

static void test_no_device(void **state)
{
    struct backend *b = NULL;
    struct error error = {0}, reason = {0};
    size_t free_bytes = 7, total_bytes = 7;
    (void)state;
    emulation_set_devices(0, 8 * GIB);
    assert_int_equal(backend_cuda_device_count(&reason), 0);
    assert_int_equal(backend_cuda_device_count(NULL), 0);
    expect(&reason, STATUS_DEVICE, "no NVIDIA driver");
    assert_int_equal(backend_create_cuda(0, false, &b, &error), STATUS_DEVICE);
    expect(&error, STATUS_DEVICE, "set model.device to cpu");
    assert_int_equal(backend_cuda_memory(0, &free_bytes, &total_bytes, NULL), STATUS_DEVICE);
    assert_true(b == NULL && free_bytes == 7);
    emulation_set_devices(1, 8 * GIB);
}

static void test_devices(void **state)
{
    struct backend *b = NULL;
    struct error error = {0};
    struct cuda_options options = tiny;
    size_t free_bytes = 0, total_bytes = 0;
    (void)state;
    emulation_set_devices(2, 8 * GIB);
    assert_int_equal(backend_cuda_device_count(&error), 2);
    assert_int_equal(error.status, STATUS_OK);
    assert_int_equal(backend_create_cuda(2, false, &b, &error), STATUS_DEVICE);
    expect(&error, STATUS_DEVICE, "GPU 2 was asked for, but only 2 GPUs");
    error_clear(&error);
    assert_int_equal(backend_create_cuda(-1, false, &b, &error), STATUS_DEVICE);
    options.ordinal = 1;
    assert_int_equal(cuda_backend_create(&options, &b, NULL), STATUS_OK);
    assert_string_equal(b->name, "cuda:1 (emulated GPU 1)");
    assert_false(b->is_host);
    assert_int_equal(backend_cuda_memory(1, &free_bytes, &total_bytes, NULL), STATUS_OK);
    assert_true(total_bytes == 8 * GIB && free_bytes < total_bytes);
    assert_true(backend_cuda_scratch_bytes() > (size_t)100 << 20);
    assert_int_equal(b->ops->matrix_bytes(b, 3, 5, DTYPE_BF16), 30);
    backend_destroy(b);
    emulation_set_devices(1, 8 * GIB);
}

/* Every allocation that creating makes, on the device and on the host, fails once. */
static void test_creating_may_fail(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        int n = 0;
        for (;; n++) {
            struct backend *b = NULL;
            struct error error = {0};
            size_t in_use = memory_in_use();
            if (kind == 0)
                emulation_fail_allocation(n);
            else
                memory_fail_at(n);
            enum status status = cuda_backend_create(&tiny, &b, &error);
            emulation_fail_allocation(-1);
            memory_fail_at(-1);
            if (status == STATUS_OK) {
                backend_destroy(b);
                break;
            }
            assert_true(b == NULL);
            expect(&error, kind == 0 ? STATUS_DEVICE : STATUS_RESOURCE,
                   kind == 0 ? "MiB of 8192 are free" : "");
            assert_int_equal(memory_in_use(), in_use);
            assert_int_equal(emulation_get_counts().live_allocations, 0);
        }
        assert_in_range(n, 3, 50);
    }
}

static void test_too_large(void **state)
{
    struct backend *b = create();
    struct error error = {0};
    struct matrix *matrix = NULL;
    float one = 1;
    struct tensor w = tensor_make(&one, DTYPE_F32, 1, 1);
    void *memory = &one;
    (void)state;
    assert_int_equal(b->ops->allocate(b, &memory, 100 * GIB, "a whole lot", &error), STATUS_DEVICE);
    expect(&error, STATUS_DEVICE, "a whole lot");
    expect(&error, STATUS_DEVICE, "not enough free memory");
    assert_ptr_equal(memory, &one);
    error_clear(&error);
    int64_t before = emulation_get_counts().live_allocations;
    emulation_fail_allocation(0);
    assert_int_equal(b->ops->matrix_create(b, &w, DTYPE_F32, "model.embed", &matrix, &error), STATUS_DEVICE);
    expect(&error, STATUS_DEVICE, "model.embed");
    assert_true(matrix == NULL);
    memory_fail_at(0);
    error_clear(&error);
    assert_int_equal(b->ops->matrix_create(b, &w, DTYPE_F32, "model.embed", &matrix, &error),
                     STATUS_RESOURCE);
    memory_fail_at(-1);
    assert_int_equal(emulation_get_counts().live_allocations, before);
    assert_int_equal(b->ops->synchronize(b, &error), STATUS_OK);
    b->ops->matrix_destroy(b, NULL);
    backend_destroy(b);
}

/* A fault of the device is kept, the first one wins, later operations do nothing, and synchronize forgets it.
 */
static void test_device_faults(void **state)
{
    static const struct {
        cudaError_t code;
        const char *said;
    } table[] = {{cudaErrorECCUncorrectable, "ECC"},
                 {cudaErrorLaunchFailure, "a kernel faulted"},
                 {cudaErrorIllegalAddress, "a kernel faulted"}};
    (void)state;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        struct backend *b = create();
        struct error error = {0};
        void *memory;
        float host[4] = {1, 2, 3, 4};
        assert_int_equal(b->ops->allocate(b, &memory, sizeof host, "a test", &error), STATUS_OK);
        struct tensor x = tensor_make(memory, DTYPE_F32, 1, 4);
        b->ops->upload(b, memory, host, sizeof host);
        emulation_fail_kernel(0, table[i].code);
        b->ops->add(b, x, x, x);
        b->ops->download(b, host, memory, sizeof host);
        assert_int_equal(b->error.status, STATUS_DEVICE);
        int64_t kernels = emulation_get_counts().kernels;
        b->ops->add(b, x, x, x);
        b->ops->collect(b, x, NULL, 1, DTYPE_F32, host);
        assert_int_equal(b->ops->synchronize(b, &error), STATUS_DEVICE);
        assert_int_equal(emulation_get_counts().kernels, kernels);
        expect(&error, STATUS_DEVICE, table[i].said);
        expect(&error, STATUS_DEVICE, "emulated GPU 0");
        error_clear(&error);
        b->ops->add(b, x, x, x);
        b->ops->download(b, host, memory, sizeof host);
        assert_int_equal(b->ops->synchronize(b, &error), STATUS_OK);
        assert_true(host[0] == 2 && host[3] == 8);
        b->ops->release(b, memory);
        backend_destroy(b);
        assert_int_equal(emulation_get_counts().live_allocations, 0);
        emulation_fault();
    }
}

/* Scratch that cannot be had in the middle of an operation. */
static void test_operations_may_fail(void **state)
{
    struct backend *b = create();
    struct error error = {0};
    void *memory;
    (void)state;
    assert_int_equal(b->ops->allocate(b, &memory, 4096, "a test", &error), STATUS_OK);
    struct run run = {.length = 8};
    struct ssd_scan_args args = {.x = tensor_make(memory, DTYPE_F32, 8, 4),
                                 .dt = tensor_make(memory, DTYPE_F32, 8, 1),
                                 .B = tensor_make(memory, DTYPE_F32, 8, 4),
                                 .C = tensor_make(memory, DTYPE_F32, 8, 4),
                                 .dt_bias = memory,
                                 .A = memory,
                                 .D = memory,
                                 .n_heads = 1,
                                 .head_dim = 4,
                                 .state_dim = 4,
                                 .n_groups = 1,
                                 .dt_max = INFINITY,
                                 .chunk = 4,
                                 .runs = {.list = &run, .n = 1},
                                 .y = tensor_make((char *)memory + 2048, DTYPE_F32, 8, 4)};
    int n = 0;
    for (;; n++) {
        emulation_fail_allocation(n);
        b->ops->ssd_scan(b, &args);
        emulation_fail_allocation(-1);
        if (b->ops->synchronize(b, &error) == STATUS_OK)
            break;
        expect(&error, STATUS_DEVICE, "not enough free memory");
        error_clear(&error);
    }
    assert_in_range(n, 1, 10);
    b->ops->release(b, memory);
    backend_destroy(b);
    assert_int_equal(emulation_get_counts().live_allocations, 0);
}

/* A scan whose second list, the tiles, makes the ring of tables grow after the first, the rows whose states
 * are wanted, was put there. With A = 0 and B = x = 1 the state after token t is t + 1 times the step. */
static void test_lists_survive_a_longer_one(void **state)
{
    enum { T = 1600 };
    static float ones[T], zeros[T];
    struct backend *b = create();
    char *memory;
    const int32_t rows[3] = {0, 700, T - 1};
    float states[3];
    (void)state;
    for (int i = 0; i < T; i++)
        ones[i] = 1;
    assert_int_equal(b->ops->allocate(b, (void **)&memory, 4 * sizeof ones, "a test", NULL), STATUS_OK);
    float *one = (float *)(void *)memory, *zero = one + T, *y = zero + T, *out = y + T;
    b->ops->upload(b, one, ones, sizeof ones);
    b->ops->upload(b, zero, zeros, sizeof zeros);
    struct run run = {.length = T};
    struct selective_scan_args args = {.x = tensor_make(one, DTYPE_F32, T, 1),
                                       .dt = tensor_make(zero, DTYPE_F32, T, 1),
                                       .B = tensor_make(one, DTYPE_F32, T, 1),
                                       .C = tensor_make(one, DTYPE_F32, T, 1),
                                       .dt_bias = zero,
                                       .A = zero,
                                       .D = zero,
                                       .state_dim = 1,
                                       .runs = {.list = &run, .n = 1},
                                       .y = tensor_make(y, DTYPE_F32, T, 1),
                                       .state_rows = {rows, 3},
                                       .states = tensor_make(out, DTYPE_F32, 3, 1)};
    b->ops->selective_scan(b, &args);
    b->ops->download(b, states, out, sizeof states);
    assert_int_equal(b->ops->synchronize(b, NULL), STATUS_OK);
    for (int i = 0; i < 3; i++) {
        float wanted = (float)(rows[i] + 1) * logf(2);
        assert_true(fabsf(states[i] - wanted) <= 1e-4f * wanted);
    }
    b->ops->release(b, memory);
    backend_destroy(b);
    assert_int_equal(emulation_get_counts().live_allocations, 0);
}

/* The ring of captured rows cannot be had: on the device, and in the host's memory. */
static void test_captures_need_memory(void **state)
{
    struct backend *b = create();
    struct error error = {0};
    int32_t row = 0;
    void *memory;
    (void)state;
    assert_int_equal(b->captures->reserve(b, 100 * GIB, &error), STATUS_DEVICE);
    expect(&error, STATUS_DEVICE, "for captured rows");
    assert_int_equal(b->ops->allocate(b, &memory, 64, "a test", NULL), STATUS_OK);
    assert_false(b->captures->post(b, tensor_make(memory, DTYPE_F32, 1, 4), &row, 1, DTYPE_F32));
    assert_int_equal(b->error.status, STATUS_OK);
    error_clear(&error);
    assert_int_equal(b->captures->reserve(b, 4096, &error), STATUS_OK);
    emulation_fail_kernel(0, cudaErrorECCUncorrectable);
    assert_true(b->captures->post(b, tensor_make(memory, DTYPE_F32, 1, 4), &row, 1, DTYPE_F32));
    float host[4];
    int64_t n_overflow = 0;
    assert_int_equal(b->captures->take(b, host, sizeof host, &n_overflow, &error), STATUS_DEVICE);
    expect(&error, STATUS_DEVICE, "ECC");
    b->captures->drop(b);
    b->ops->release(b, memory);
    backend_destroy(b);
    assert_int_equal(emulation_get_counts().live_allocations, 0);
    emulation_fault();
}

/* Sums of products whose factors have more than ten bits. */
static void test_tf32_is_asked_for(void **state)
{
    float w[64], x[64], y[2], exact = 0;
    (void)state;
    for (int i = 0; i < 64; i++) {
        w[i] = 1 + 3.0f / 8192; /* 1 in ten bits */
        x[i] = 1 + (float)(i % 4) / 4;
        exact += w[i] * x[i];
    }
    for (int tf32 = 0; tf32 < 2; tf32++) {
        struct cuda_options options = tiny;
        struct backend *b = NULL;
        struct matrix *matrix = NULL;
        void *memory;
        options.tf32 = tf32 == 1;
        assert_int_equal(cuda_backend_create(&options, &b, NULL), STATUS_OK);
        struct tensor host = tensor_make(w, DTYPE_F32, 1, 64);
        assert_int_equal(b->ops->matrix_create(b, &host, DTYPE_F32, "w", &matrix, NULL), STATUS_OK);
        assert_int_equal(b->ops->allocate(b, &memory, 512, "a test", NULL), STATUS_OK);
        b->ops->upload(b, memory, x, sizeof x);
        b->ops->linear(b, tensor_make(memory, DTYPE_F32, 1, 64), matrix, NULL, (struct tensor){0},
                       tensor_make((char *)memory + 256, DTYPE_F32, 1, 1));
        b->ops->download(b, &y[tf32], (char *)memory + 256, sizeof(float));
        b->ops->matrix_destroy(b, matrix);
        b->ops->release(b, memory);
        assert_int_equal(b->ops->synchronize(b, NULL), STATUS_OK);
        backend_destroy(b);
    }
    assert_true(fabsf(y[0] - exact) <= 1e-5f * exact);
    assert_true(fabsf(y[1] - exact) > 1e-5f * exact && fabsf(y[1] - exact) < 1e-3f * exact);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_device),
        cmocka_unit_test(test_devices),
        cmocka_unit_test(test_creating_may_fail),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_device_faults),
        cmocka_unit_test(test_operations_may_fail),
        cmocka_unit_test(test_tf32_is_asked_for),
        cmocka_unit_test(test_lists_survive_a_longer_one),
        cmocka_unit_test(test_captures_need_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
