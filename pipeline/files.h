/* Files that are whole or not there: temporary names, sync, rename, checksums. */
#ifndef ACTDUMP_PIPELINE_FILES_H
#define ACTDUMP_PIPELINE_FILES_H

#include "kernels/base/error.h"

#include <stdint.h>

enum { FILES_PATH_BYTES = 4608, FILES_HASH_BYTES = 1 << 20 };

/* folder/.name.<host>.<pid>.tmp: hidden, and nobody else's. STATUS_USAGE where it is too long. */
enum status files_name_temporary(const char *folder, const char *name, char path[FILES_PATH_BYTES],
                                 struct error *error);
/* True for a name (without folder) that files_name_temporary makes. */
int files_is_temporary(const char *name);

/* Bytes that folder's temporary files whose names begin with a number below `before` lack of `whole` each. */
double files_temporary_missing(const char *folder, int64_t before, double whole);

/* Opens, fsyncs and closes a file or a folder. 0 or an errno. */
int files_sync(const char *path);
/* XXH3-64 and size of a file, read through `buffer` of FILES_HASH_BYTES. 0 or an errno. */
int files_hash(const char *path, void *buffer, int64_t *bytes, uint64_t *checksum);
/* Syncs the temporary file, renames it to folder/name and syncs the folder. On failure the temporary file is
 * removed. */
enum status files_publish(const char *temporary, const char *folder, const char *name, struct error *error);
/* Writes `length` bytes as folder/name, whole or not at all. */
enum status files_write(const char *folder, const char *name, const char *text, size_t length,
                        struct error *error);

#endif
