#include "kernels/cuda/blas.h"
#include "kernels/base/memory.h"

/* Products of one grouped launch at most; more go in several. */
#define MAX_GROUPS 512

/* One entry a group: what cuBLAS wants of each. */
struct groups {
    cublasOperation_t transpose_w[MAX_GROUPS], transpose_x[MAX_GROUPS];
    int m[MAX_GROUPS], n[MAX_GROUPS], k[MAX_GROUPS];
    int w_stride[MAX_GROUPS], x_stride[MAX_GROUPS], y_stride[MAX_GROUPS], size[MAX_GROUPS];
    float alpha[MAX_GROUPS], beta[MAX_GROUPS];
};

struct blas {
    const struct blas_library *library;
    cublasHandle_t handle;
    void *workspace;
    struct groups groups;
};

/* The one place where cuBLAS's errors become ours. */
static enum status translate(struct cuda_backend *cuda, const struct blas_library *library,
                             cublasStatus_t code, const char *what, struct error *error)
{
    if (code == CUBLAS_STATUS_SUCCESS)
        return STATUS_OK;
    /* A fault of the device shows here first; CUDA knows more about it. */
    TRY(cuda_translate(cuda, cudaGetLastError(), what, error));
    return error_set(error, STATUS_DEVICE, "GPU %d (%s): %s failed: %s", cuda->options.ordinal,
                     cuda->device_name, what, library->get_status_name(code));
}

static bool check(struct cuda_backend *cuda, cublasStatus_t code, const char *what)
{
    return translate(cuda, cuda->blas->library, code, what, &cuda->base.error) == STATUS_OK;
}

static enum status configure(struct cuda_backend *cuda, struct blas *blas, struct error *error)
{
    const struct blas_library *library = blas->library;
    /* Sums of split products stay float32; TF32 only where it was asked for, and then by the compute type. */
    cublasMath_t mode =
        (cublasMath_t)(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    TRY(translate(cuda, library, library->create(&blas->handle), "starting cuBLAS", error));
    TRY(translate(cuda, library, library->set_stream(blas->handle, cuda->compute), "setting cuBLAS's stream",
                  error));
    TRY(cuda_translate(cuda, cudaMalloc(&blas->workspace, BLAS_WORKSPACE_BYTES),
                       "allocating cuBLAS's workspace", error));
    TRY(translate(cuda, library, library->set_workspace(blas->handle, blas->workspace, BLAS_WORKSPACE_BYTES),
                  "setting cuBLAS's workspace", error));
    return translate(cuda, library, library->set_math_mode(blas->handle, mode), "setting cuBLAS's mode",
                     error);
}

enum status blas_create(struct cuda_backend *cuda, struct blas **out, struct error *error)
{
    const struct blas_library *library;
    void *memory;
    TRY(blas_library_open(&library, error));
    TRY(memory_allocate(&memory, sizeof(struct blas), "cuBLAS's state", error));
    struct blas *blas = memory;
    blas->library = library;
    enum status status = configure(cuda, blas, error);
    if (status != STATUS_OK) {
        blas_destroy(blas);
        return status;
    }
    *out = blas;
    return STATUS_OK;
}

void blas_destroy(struct blas *blas)
{
    if (blas == NULL)
        return;
    if (blas->handle != NULL)
        blas->library->destroy(blas->handle);
    cudaFree(blas->workspace);
    memory_free(blas);
}

static cudaDataType_t type_of(enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

static cublasComputeType_t compute_of(const struct cuda_backend *cuda, enum dtype in)
{
    return in == DTYPE_F32 && cuda->options.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

/* cuBLAS is column-major: a row-major y[m, n] is its y'[n, m], and y' = w x' with w stored transposed. */
void blas_run(struct cuda_backend *cuda, const struct blas_product *p)
{
    const float one = 1;
    if (cuda->base.error.status != STATUS_OK || p->m == 0 || p->n == 0)
        return;
    check(cuda,
          cuda->blas->library->gemm(cuda->blas->handle, CUBLAS_OP_T, CUBLAS_OP_N, (int)p->n, (int)p->m,
                                    (int)p->k, &one, p->w, type_of(p->in), (int)p->k, p->x, type_of(p->in),
                                    (int)p->x_stride, &p->beta, p->y, type_of(p->out), (int)p->y_stride,
                                    compute_of(cuda, p->in), CUBLAS_GEMM_DEFAULT),
          "a matrix product");
}

static void fill_groups(struct groups *groups, const struct blas_product *products, int n)
{
    for (int i = 0; i < n; i++) {
        groups->transpose_w[i] = CUBLAS_OP_T;
        groups->transpose_x[i] = CUBLAS_OP_N;
        groups->m[i] = (int)products[i].n;
        groups->n[i] = (int)products[i].m;
        groups->k[i] = groups->w_stride[i] = (int)products[i].k;
        groups->x_stride[i] = (int)products[i].x_stride;
        groups->y_stride[i] = (int)products[i].y_stride;
        groups->size[i] = 1;
        groups->alpha[i] = 1;
        groups->beta[i] = products[i].beta;
    }
}

/* Three arrays of n pointers, one behind the other, on the device. */
static const void *const *upload_pointers(struct cuda_backend *cuda, const struct blas_product *products,
                                          int n)
{
    size_t bytes = 3 * (size_t)n * sizeof(void *);
    const void **list = staging_begin(cuda, bytes);
    if (list == NULL)
        return NULL;
    for (int i = 0; i < n; i++) {
        list[i] = products[i].w;
        list[n + i] = products[i].x;
        list[2 * n + i] = products[i].y;
    }
    return staging_end(cuda, bytes);
}

static void run_group(struct cuda_backend *cuda, const struct blas_product *products, int n)
{
    struct groups *g = &cuda->blas->groups;
    cudaDataType_t in = type_of(products->in), out = type_of(products->out);
    const void *const *pointers = upload_pointers(cuda, products, n);
    void *const *outputs;
    if (pointers == NULL)
        return;
    memcpy(&outputs, &(const void *const *){pointers + 2 * n},
           sizeof outputs); /* written to, unlike the others */
    fill_groups(g, products, n);
    check(cuda,
          cuda->blas->library->group_gemm(cuda->blas->handle, g->transpose_w, g->transpose_x, g->m, g->n,
                                          g->k, g->alpha, pointers, in, g->w_stride, pointers + n, in,
                                          g->x_stride, g->beta, outputs, out, g->y_stride, n, g->size,
                                          compute_of(cuda, products->in)),
          "a grouped matrix product");
}

/* cuBLAS cannot look at pointers that lie on the device: it takes them as aligned to 16 bytes where sizes
 * suggest so. */
static bool are_aligned(const struct blas_product *products, int n)
{
    for (int i = 0; i < n; i++)
        if (((uintptr_t)products[i].w | (uintptr_t)products[i].x | (uintptr_t)products[i].y) % 16 != 0)
            return false;
    return true;
}

void blas_run_many(struct cuda_backend *cuda, const struct blas_product *products, int n_products)
{
    bool grouped = cuda->blas->library->group_gemm != NULL && n_products > 0 &&
                   products->in == products->out && are_aligned(products, n_products);
    if (!grouped) {
        for (int i = 0; i < n_products; i++)
            blas_run(cuda, &products[i]);
        return;
    }
    for (int i = 0; i < n_products && cuda->base.error.status == STATUS_OK; i += MAX_GROUPS)
        run_group(cuda, products + i, (int)min64(MAX_GROUPS, n_products - i));
}
