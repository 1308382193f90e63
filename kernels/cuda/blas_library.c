/* Finds cuBLAS at run time. */
#include "kernels/cuda/blas.h"

#include <dlfcn.h>
#include <pthread.h>

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static struct blas_library library;
static struct error failure;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Functions and data pointers have the same size on every system that CUDA runs on; POSIX promises it. */
static void find(void *handle, const char *name, void *function_pointer)
{
    void *symbol = dlsym(handle, name);
    memcpy(function_pointer, &symbol, sizeof symbol);
    if (symbol == NULL && strcmp(name, "cublasGemmGroupedBatchedEx") != 0)
        error_set(&failure, STATUS_DEVICE, "libcublas.so." TEXT(CUBLAS_VER_MAJOR) " has no function %s",
                  name);
}

static void open_library(void)
{
    const char *name = "libcublas.so." TEXT(CUBLAS_VER_MAJOR);
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        error_set(&failure, STATUS_DEVICE,
                  "%s, cuBLAS of CUDA " TEXT(
                      CUBLAS_VER_MAJOR) ", cannot be opened (%s); load the CUDA module or set "
                                        "LD_LIBRARY_PATH to where it lies",
                  name, dlerror());
        return;
    }
    find(handle, "cublasCreate_v2", &library.create);
    find(handle, "cublasDestroy_v2", &library.destroy);
    find(handle, "cublasSetStream_v2", &library.set_stream);
    find(handle, "cublasSetWorkspace_v2", &library.set_workspace);
    find(handle, "cublasSetMathMode", &library.set_math_mode);
    find(handle, "cublasGetStatusName", &library.get_status_name);
    find(handle, "cublasGemmEx", &library.gemm);
    find(handle, "cublasGemmGroupedBatchedEx", &library.group_gemm);
}

enum status blas_library_open(const struct blas_library **out, struct error *error)
{
    pthread_once(&once, open_library);
    if (failure.status != STATUS_OK)
        return error_set(error, failure.status, "%s", failure.text);
    *out = &library;
    return STATUS_OK;
}
