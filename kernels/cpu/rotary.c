/* Rotary position embedding (Su et al. 2021), the halves of the turned part paired. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

/* One head: pairs (i, i + half) turn by the position's angle i. */
static void turn_head(void *head, enum dtype dtype, int64_t half, const float *cosine, const float *sine)
{
    void *second = (char *)head + (size_t)half * dtype_size(dtype);

    for (int64_t i = 0; i < half; i += SIMD_WIDTH) {
        vfloat a = simd_read(head, dtype, i, half), b = simd_read(second, dtype, i, half);
        vfloat c = simd_read(cosine, DTYPE_F32, i, half), s = simd_read(sine, DTYPE_F32, i, half);
        simd_write(head, dtype, i, half, a * c - b * s);
        simd_write(second, dtype, i, half, b * c + a * s);
    }
}

static void turn_token(const struct rotary_args *args, int64_t token, int64_t position)
{
    int64_t half = args->rotary_dim / 2;
    char *row = tensor_row(&args->x, token);

    for (int head = 0; head < args->n_heads; head++)
        turn_head(row + (size_t)head * (size_t)args->head_dim * dtype_size(args->x.dtype), args->x.dtype,
                  half, args->cosine + position * half, args->sine + position * half);
}

static void cpu_rotary(struct backend *b, const struct rotary_args *args)
{
    const struct run *list = args->runs.list;

    if (cpu_has_failed(b) || args->runs.n == 0)
        return;
    int64_t n_tokens = list[args->runs.n - 1].start + (int64_t)list[args->runs.n - 1].length;
#pragma omp parallel num_threads(b->n_threads)
    {
        int64_t run = 0; /* each thread's tokens ascend */
#pragma omp for schedule(static)
        for (int64_t token = 0; token < n_tokens; token++) {
            while (token >= list[run].start + (int64_t)list[run].length)
                run++;
            turn_token(args, token, token - list[run].start + list[run].position);
        }
    }
}

void CPU_NAME(cpu_fill_rotary)(struct backend_ops *ops);
void CPU_NAME(cpu_fill_rotary)(struct backend_ops *ops)
{
    ops->rotary = cpu_rotary;
}
