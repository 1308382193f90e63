/* HDF5 made to fit: one start, our types, attributes, and errors as sentences.
 *
 * The library is Debian's 1.10 (serial, thread-safe). H5close is never called, neither by us nor at exit:
 * after a write that met a full disk or a file-size limit the library cannot close the file and would crash
 * there. Its filter 32015 (zstd) is ours, registered here, so that nothing depends on plugins being
 * installed. Threads: every function may be called from any thread that has called hdf5_start. */
#ifndef ACTDUMP_PIPELINE_HDF5_UTIL_H
#define ACTDUMP_PIPELINE_HDF5_UTIL_H

#include "kernels/base/dtype.h"
#include "kernels/base/error.h"

#include <hdf5.h>

/* Before a thread's first call of HDF5; any number of times. From then on a failure in this
 * thread is kept for hdf5_error instead of being printed. */
void hdf5_start(void);

/* A file type of our own making, little-endian: floats as IEEE (bfloat16: sign 15, exponent 7-14, bias 127).
 * Returns owned (H5Tclose); negative where the library fails. */
hid_t hdf5_type_create(enum dtype dtype);
/* Which of ours a type is; false where it is none. */
bool hdf5_type_match(hid_t type, enum dtype *out);

/* For opening and creating files: newest format, no file locks, metadata in blocks of 64 KiB. Returns owned
 * (H5Pclose).
 */
hid_t hdf5_access_create(void);
/* Opens for reading. On failure names the file. */
enum status hdf5_open(const char *path, hid_t *file, struct error *error);
/* Creates (or empties) a file whose bytes hold no times. */
enum status hdf5_create(const char *path, hid_t *file, struct error *error);
/* Makes a group and those above it where missing. */
enum status hdf5_make_group(hid_t file, const char *path, struct error *error);

/* The sentence, then the innermost reason of the first failure since this thread last asked. An errno in it
 * is translated as by error_set_errno, so that a full disk is STATUS_RESOURCE. */
enum status hdf5_error(struct error *error, enum status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* errno of that failure; 0: it tells of none. */
int hdf5_errno(void);
/* Drops it: the failure was expected. */
void hdf5_forget(void);

/* Attributes. Strings are of variable length and UTF-8, so that every reader gets them as text. */
enum status hdf5_set_string(hid_t object, const char *name, const char *text, struct error *error);
enum status hdf5_set_int(hid_t object, const char *name, int64_t value, struct error *error);
enum status hdf5_set_double(hid_t object, const char *name, double value, struct error *error);
/* Names the axes of a dataset as HDF5's dimension scales do (attribute DIMENSION_LABELS). */
enum status hdf5_set_labels(hid_t dataset, const char *const *labels, int n, struct error *error);
enum status hdf5_get_int(hid_t object, const char *name, int64_t *out, struct error *error);
enum status hdf5_get_double(hid_t object, const char *name, double *out, struct error *error);
/* Cut to `size` bytes. */
enum status hdf5_get_string(hid_t object, const char *name, char *out, size_t size, struct error *error);

#endif
