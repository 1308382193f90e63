/* Safetensors checkpoints: model.safetensors, or shards under model.safetensors.index.json, mapped read-only.
 *
 * Format: 8 bytes little-endian header length, a JSON object of tensor name -> {dtype, shape, data_offsets},
 * then the data (https://github.com/huggingface/safetensors, "Format"). Checked before anything is used:
 * header length, JSON, dtypes, shapes, that offsets lie in the file, agree with shape and dtype, do not
 * overlap and leave no gap; for shards, that the index and the headers name the same tensors in the same
 * files, both ways, and that no stray *.safetensors file lies beside them.
 *
 * Where model.safetensors and an index are both there, model.safetensors is read, as transformers does. Files
 * must not change while a checkpoint is open: a mapping of a file that has become shorter ends in SIGBUS.
 * Thread safety: an open checkpoint is only read, by any number of threads. */
#ifndef ACTDUMP_ENGINE_SAFETENSORS_H
#define ACTDUMP_ENGINE_SAFETENSORS_H

#include "kernels/base/dtype.h"
#include "kernels/base/error.h"

#define SAFETENSORS_MAX_DIMS 8

struct checkpoint;

struct checkpoint_tensor {
    const char *name;
    enum dtype dtype;    /* DTYPE_COUNT where it is a type that no weight of ours has (I8, F8_E4M3, ...) */
    char dtype_name[16]; /* as the file spells it */
    int n_dims;
    int64_t dims[SAFETENSORS_MAX_DIMS];
    const void *data; /* in the mapping, aligned to nothing in particular */
    size_t bytes;
    const char *file; /* the shard's name, for messages */
};

/* Opens and checks all files of the folder. Returns owned at *out. */
enum status checkpoint_open(const char *folder, struct checkpoint **out, struct error *error);
/* The checks of one file, for its bytes in memory; `file` names them in errors. Nothing is kept. */
enum status checkpoint_check_bytes(const void *bytes, size_t length, const char *file, int64_t *n_tensors,
                                   struct error *error);
void checkpoint_close(struct checkpoint *checkpoint); /* NULL is fine; views of tensors end here */

/* NULL where there is no such tensor. Borrows until checkpoint_close. */
const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint, const char *name);
int64_t checkpoint_n_tensors(const struct checkpoint *checkpoint);
const struct checkpoint_tensor *checkpoint_get(const struct checkpoint *checkpoint, int64_t i); /* by name */
/* The tensor of exactly that shape and of a float type of ours (F32, F16, BF16); an error naming tensor, file
 * and what differs otherwise. A trailing or middle axis of 1 counts (conv1d weights are [channels, 1,
 * kernel]). */
enum status checkpoint_require(const struct checkpoint *checkpoint, const char *name, const int64_t *dims,
                               int n_dims, const struct checkpoint_tensor **out, struct error *error);

/* Brings the tensor's bytes into the page cache with plain reads of 4 MiB, before they are used through the
 * mapping: faulting a mapping in page by page is many times slower than that on NFS and Lustre. Best called
 * in the order of the files (checkpoint_get's is by name). Only a matter of speed: nothing depends on it, and
 * nothing fails. */
void checkpoint_prefetch(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor);

/* The tensor's bytes have been used: their pages leave this process (they stay in the page cache), so that
 * what is resident does not count a checkpoint twice. Using them again only reads them again. */
void checkpoint_release(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor);

/* What makes two checkpoints the same: XXH3-128 over names, sizes and contents of config.json, the index and
 * all shards, as 32 hexadecimal digits. Reads every byte once. */
enum status checkpoint_identify(const char *folder, char digest[33], int64_t *bytes, struct error *error);

#endif
