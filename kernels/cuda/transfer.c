#include "kernels/cuda/transfer.h"
#include "kernels/base/memory.h"

struct piece {
    char *host; /* pinned */
    char *device;
    cudaEvent_t filled; /* on compute: the device side holds what is to be copied */
    cudaEvent_t done;   /* the last copy from or to the host side is over */
    bool busy;          /* `done` has been recorded and not been waited for */
    void *out;          /* where the host side's bytes belong; NULL: nowhere */
    size_t bytes;
};

struct transfer {
    size_t piece_bytes;
    int n_pieces, next;
    struct piece pieces[];
};

static enum status create_piece(struct cuda_backend *cuda, struct piece *piece, size_t bytes,
                                struct error *error)
{
    TRY(cuda_allocate_pinned(cuda, (void **)&piece->host, bytes, "transfers", error));
    TRY(cuda_translate(cuda, cudaMalloc((void **)&piece->device, bytes),
                       "allocating device memory for transfers", error));
    TRY(cuda_translate(cuda, cudaEventCreateWithFlags(&piece->filled, cudaEventDisableTiming),
                       "making an event", error));
    return cuda_translate(cuda, cudaEventCreateWithFlags(&piece->done, cudaEventDisableTiming),
                          "making an event", error);
}

enum status transfer_create(struct cuda_backend *cuda, size_t piece_bytes, int n_pieces, struct error *error)
{
    void *memory;
    TRY(memory_allocate(&memory, sizeof(struct transfer) + (size_t)n_pieces * sizeof(struct piece),
                        "the transfers' state", error));
    cuda->transfer = memory;
    cuda->transfer->piece_bytes = piece_bytes;
    cuda->transfer->n_pieces = n_pieces;
    for (int i = 0; i < n_pieces; i++)
        TRY(create_piece(cuda, &cuda->transfer->pieces[i], piece_bytes, error));
    return STATUS_OK;
}

void transfer_destroy(struct cuda_backend *cuda)
{
    struct transfer *transfer = cuda->transfer;
    if (transfer == NULL)
        return;
    for (int i = 0; i < transfer->n_pieces; i++) {
        struct piece *piece = &transfer->pieces[i];
        cudaFreeHost(piece->host);
        cudaFree(piece->device);
        if (piece->filled != NULL)
            cudaEventDestroy(piece->filled);
        if (piece->done != NULL)
            cudaEventDestroy(piece->done);
    }
    memory_free(transfer);
    cuda->transfer = NULL;
}

/* Waits until the piece is free; what it carried out is delivered. */
static bool finish_piece(struct cuda_backend *cuda, struct piece *piece)
{
    if (!piece->busy)
        return true;
    void *out = piece->out;
    piece->busy = false;
    piece->out = NULL;
    if (!cuda_check(cuda, cudaEventSynchronize(piece->done), "waiting for a transfer"))
        return false;
    if (out != NULL)
        memcpy(out, piece->host, piece->bytes);
    return true;
}

/* The piece whose turn it is, free; NULL after a failure. Turns follow each other, so what was sent first is
 * first waited for. */
static struct piece *take_piece(struct cuda_backend *cuda)
{
    struct transfer *transfer = cuda->transfer;
    struct piece *piece = &transfer->pieces[transfer->next];
    transfer->next = (transfer->next + 1) % transfer->n_pieces;
    return finish_piece(cuda, piece) ? piece : NULL;
}

static bool mark_busy(struct cuda_backend *cuda, struct piece *piece, cudaStream_t stream)
{
    piece->busy = cuda_check(cuda, cudaEventRecord(piece->done, stream), "recording an event");
    return piece->busy;
}

void transfer_finish(struct cuda_backend *cuda)
{
    struct transfer *transfer = cuda->transfer;
    for (int i = 0; i < transfer->n_pieces; i++)
        finish_piece(cuda, &transfer->pieces[(transfer->next + i) % transfer->n_pieces]);
}

void transfer_upload(struct cuda_backend *cuda, void *to, const void *from_host, size_t bytes)
{
    size_t limit = cuda->transfer->piece_bytes;
    for (size_t at = 0; at < bytes; at += limit) {
        size_t n = bytes - at < limit ? bytes - at : limit;
        struct piece *piece = take_piece(cuda);
        if (piece == NULL)
            return;
        memcpy(piece->host, (const char *)from_host + at, n);
        if (!cuda_check(
                cuda, cudaMemcpyAsync((char *)to + at, piece->host, n, cudaMemcpyHostToDevice, cuda->compute),
                "copying to the device") ||
            !mark_busy(cuda, piece, cuda->compute))
            return;
    }
}

void transfer_download(struct cuda_backend *cuda, void *to_host, const void *from, size_t bytes)
{
    size_t limit = cuda->transfer->piece_bytes;
    for (size_t at = 0; at < bytes; at += limit) {
        size_t n = bytes - at < limit ? bytes - at : limit;
        struct piece *piece = take_piece(cuda);
        if (piece == NULL)
            return;
        if (!cuda_check(cuda,
                        cudaMemcpyAsync(piece->host, (const char *)from + at, n, cudaMemcpyDeviceToHost,
                                        cuda->compute),
                        "copying from the device") ||
            !mark_busy(cuda, piece, cuda->compute))
            return;
        piece->out = (char *)to_host + at;
        piece->bytes = n;
    }
    transfer_finish(cuda);
}

/* Sends n rows of w as they are, end to end, to `to` (device memory of w's own dtype). */
static bool send_rows(struct cuda_backend *cuda, struct piece *piece, const struct tensor *w, void *to)
{
    size_t row_bytes = (size_t)w->cols * dtype_size(w->dtype);
    if (w->stride == w->cols) {
        memcpy(piece->host, w->data, row_bytes * (size_t)w->rows);
    } else {
        for (int64_t r = 0; r < w->rows; r++)
            memcpy(piece->host + (size_t)r * row_bytes, tensor_row(w, r), row_bytes);
    }
    return cuda_check(
        cuda,
        cudaMemcpyAsync(to, piece->host, row_bytes * (size_t)w->rows, cudaMemcpyHostToDevice, cuda->compute),
        "copying weights to the device");
}

void transfer_matrix(struct cuda_backend *cuda, const struct tensor *w, const struct tensor *to)
{
    int64_t limit = (int64_t)(cuda->transfer->piece_bytes / dtype_size(w->dtype));
    int64_t cols_at_once = min64(w->cols, limit), rows_at_once = max64(1, limit / max64(1, w->cols));
    for (int64_t row = 0; row < w->rows; row += rows_at_once) {
        for (int64_t col = 0; col < w->cols; col += cols_at_once) {
            struct tensor part = tensor_rows(*w, row, min64(rows_at_once, w->rows - row));
            part = tensor_cols(part, col, min64(cols_at_once, w->cols - col));
            struct tensor target = tensor_cols(tensor_rows(*to, row, part.rows), col, part.cols);
            struct piece *piece = take_piece(cuda);
            if (piece == NULL)
                return;
            bool as_is = w->dtype == to->dtype;
            if (!send_rows(cuda, piece, &part, as_is ? target.data : piece->device))
                return;
            struct tensor raw = tensor_make(piece->device, w->dtype, part.rows, part.cols);
            if (!as_is)
                convert_launch(cuda, &raw, &target);
            if (!mark_busy(cuda, piece, cuda->compute))
                return;
        }
    }
}

static bool collect_piece(struct cuda_backend *cuda, struct piece *piece, void *out)
{
    if (!cuda_check(cuda, cudaEventRecord(piece->filled, cuda->compute), "recording an event") ||
        !cuda_check(cuda, cudaStreamWaitEvent(cuda->copy, piece->filled, 0), "ordering streams") ||
        !cuda_check(
            cuda,
            cudaMemcpyAsync(piece->host, piece->device, piece->bytes, cudaMemcpyDeviceToHost, cuda->copy),
            "copying captured rows to the host") ||
        !mark_busy(cuda, piece, cuda->copy))
        return false;
    piece->out = out;
    return true;
}

void transfer_collect(struct cuda_backend *cuda, const struct tensor *x, const int32_t *rows, int64_t n,
                      enum dtype dtype, void *host)
{
    size_t element = dtype_size(dtype);
    int64_t total = n * x->cols, limit = (int64_t)(cuda->transfer->piece_bytes / element);
    const int32_t *rows_there = NULL;
    if (rows != NULL) {
        rows_there = staging_upload(cuda, rows, (size_t)n * sizeof *rows);
        if (rows_there == NULL)
            return;
    }
    for (int64_t first = 0; first < total; first += limit) {
        int64_t count = min64(limit, total - first);
        struct piece *piece = take_piece(cuda);
        if (piece == NULL)
            return;
        collect_launch(cuda, &(struct collection){*x, rows_there, first, count, dtype, piece->device, NULL});
        piece->bytes = (size_t)count * element;
        if (cuda->base.error.status != STATUS_OK ||
            !collect_piece(cuda, piece, (char *)host + (size_t)first * element))
            return;
    }
}
