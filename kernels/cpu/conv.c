/* Depthwise causal convolution along each run, with silu. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

/* One token's place in its run. Taps before `first_tap` reach back over the run's start. */
struct conv_token {
    int64_t row;
    int first_tap;
    const float *before; /* [first_tap, C]: what they find there, oldest first; NULL: zeros */
};

static struct conv_token place_token(const struct conv_args *args, int64_t run, int64_t row)
{
    int64_t age = row - args->runs.list[run].start; /* tokens of the run before this one */
    struct conv_token token = {.row = row};
    if (age >= args->kernel - 1)
        return token;
    token.first_tap = args->kernel - 1 - (int)age;
    if (run == 0 && args->runs.carry_in)
        token.before = args->tail + age * args->x.cols;
    return token;
}

/* A row's pointers: in registers, since a store through them might change a struct for all that the compiler
 * knows. */
struct conv_row {
    const float *weight, *bias, *before;
    const char *x;
    char *y;
    int64_t n, back; /* bytes from a token to the one before it */
};

/* Channels [i, i + SIMD_WIDTH), or, where not `is_whole`, what the row has of them. */
SIMD_INLINE void conv_lanes(const struct conv_row row, int64_t i, const int first_tap, const int kernel,
                            const enum dtype x_dtype, const enum dtype y_dtype, const bool is_whole)
{
    int64_t n = row.n, end = is_whole ? i + SIMD_WIDTH : n;
    vfloat sum = row.bias == NULL ? (vfloat){0} : simd_read(row.bias, DTYPE_F32, i, end);
    for (int tap = 0; tap < first_tap && row.before != NULL; tap++)
        sum = simd_fma(simd_read(row.weight + tap * n, DTYPE_F32, i, end),
                       simd_read(row.before + tap * n, DTYPE_F32, i, end), sum);
    for (int tap = first_tap; tap < kernel; tap++)
        sum = simd_fma(simd_read(row.weight + tap * n, DTYPE_F32, i, end),
                       simd_read(row.x - (kernel - 1 - tap) * row.back, x_dtype, i, end), sum);
    simd_write(row.y, y_dtype, i, end, simd_silu(sum));
}

SIMD_INLINE void conv_channels(const struct conv_args *args, const struct conv_token *token,
                               const int first_tap, const int kernel, const enum dtype x_dtype,
                               const enum dtype y_dtype)
{
    const struct conv_row row = {.weight = args->weight,
                                 .bias = args->bias,
                                 .before = token->before,
                                 .x = simd_row(&args->x, token->row),
                                 .y = simd_row(&args->y, token->row),
                                 .n = args->x.cols,
                                 .back = args->x.stride * (x_dtype == DTYPE_F32 ? 4 : 2)};
    int64_t whole = row.n / SIMD_WIDTH * SIMD_WIDTH;
    for (int64_t i = 0; i < whole; i += SIMD_WIDTH)
        conv_lanes(row, i, first_tap, kernel, x_dtype, y_dtype, true);
    if (whole < row.n)
        conv_lanes(row, whole, first_tap, kernel, x_dtype, y_dtype, false);
}

/* Four taps, all models that we know, have loops of their own. */
static void conv_token(const struct conv_args *args, const struct conv_token *token)
{
    bool is_usual = args->kernel == 4 && token->first_tap == 0 && args->x.dtype == args->y.dtype;
    if (is_usual && args->x.dtype == DTYPE_F32)
        conv_channels(args, token, 0, 4, DTYPE_F32, DTYPE_F32);
    else if (is_usual)
        conv_channels(args, token, 0, 4, DTYPE_BF16, DTYPE_BF16);
    else
        conv_channels(args, token, token->first_tap, args->kernel, args->x.dtype, args->y.dtype);
}

/* Rows [first, end), which may span runs. */
static void conv_rows(const struct conv_args *args, int64_t first, int64_t end)
{
    int64_t run = cpu_find_run(&args->runs, first);
    for (int64_t row = first; row < end; row++) {
        if (run + 1 < args->runs.n && args->runs.list[run + 1].start <= row)
            run++;
        struct conv_token token = place_token(args, run, row);
        conv_token(args, &token);
    }
}

/* The last kernel - 1 inputs of the last run. Rows of a run shorter than that move up from the tail that came
 * in, whose rows are read before they are written. */
static void keep_tail(const struct conv_args *args)
{
    int64_t n = args->x.cols, last = args->runs.n - 1;
    const struct run *run = &args->runs.list[last];
    bool was_carried = last == 0 && args->runs.carry_in;
    for (int j = 0; j < args->kernel - 1; j++) {
        float *to = args->tail + j * n;
        int64_t age = run->length - (args->kernel - 1) + j; /* of the input in its run */
        if (age >= 0)
            dtype_convert(to, DTYPE_F32, simd_row(&args->x, run->start + age), args->x.dtype, (size_t)n);
        else if (was_carried)
            memcpy(to, args->tail + (j + run->length) * n, (size_t)n * sizeof *to);
        else
            memset(to, 0, (size_t)n * sizeof *to);
    }
}

static void cpu_conv_silu(struct backend *b, const struct conv_args *args)
{
    if (cpu_has_failed(b) || args->runs.n == 0)
        return;
    enum { BLOCK = 32 };
    const struct run *last = &args->runs.list[args->runs.n - 1];
    int64_t n_rows = (int64_t)last->start + last->length;
#pragma omp parallel for num_threads(b->n_threads)
    for (int64_t first = 0; first < n_rows; first += BLOCK)
        conv_rows(args, first, first + BLOCK < n_rows ? first + BLOCK : n_rows);
    if (args->runs.carry_out && args->kernel > 1)
        keep_tail(args);
}

void CPU_NAME(cpu_fill_conv)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_conv)(struct backend_ops *ops)
{
    ops->conv_silu = cpu_conv_silu;
}
