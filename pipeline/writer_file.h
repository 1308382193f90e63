/* Inside writer*.c: a segment's file but for what is in it: where it lies, what its failures say, and how one
 * that is closed gets its name.
 *
 * It is written as segments/.NNNNNN.h5.<host>.<pid>.tmp, flushed, closed, synced, checksummed, renamed, and
 * its folder synced; a file under its final name is whole. Failures of the disk are STATUS_RESOURCE and say
 * which segment it was and how much room is left. What writer_fail_at asks for happens here.
 *
 * Threads: none is shared between calls but the folder, which nothing here writes after its init. */
#ifndef ACTDUMP_PIPELINE_WRITER_FILE_H
#define ACTDUMP_PIPELINE_WRITER_FILE_H

#include "pipeline/files.h"
#include "pipeline/writer.h"

enum { WRITER_FOLDER_BYTES = 4096 };

struct writer_folder {
    char store[WRITER_FOLDER_BYTES], segments[WRITER_FOLDER_BYTES + sizeof "/segments"];
};

/* A file that has no name yet, or none at all. */
struct writer_file {
    int64_t unit;
    char temporary[FILES_PATH_BYTES]; /* empty: none */
    int sync_fd;                      /* the same file, to sync it by; negative: none */
};

#define WRITER_NO_FILE                                                                                       \
    (struct writer_file)                                                                                     \
    {                                                                                                        \
        .sync_fd = -1                                                                                        \
    }

/* store: the store's folder; segments/ is in it and exists. Copies it. STATUS_USAGE where it is too long. */
enum status writer_folder_init(struct writer_folder *folder, const char *store, struct error *error);

/* Gives a file of the unit its temporary name, under which nothing is made yet. */
enum status writer_file_name(const struct writer_folder *folder, int64_t unit, struct writer_file *file,
                             struct error *error);
/* Opens what was made under that name, to sync it by. 0 or an errno. */
int writer_file_open_sync(struct writer_file *file);
/* Syncs a closed file, gives it its name, syncs the folder; record's bytes and checksum are filled, by way of
 * `buffer` of FILES_HASH_BYTES. After a failure the file is still the caller's to remove. */
enum status writer_file_publish(const struct writer_folder *folder, struct writer_file *file, void *buffer,
                                struct segment_record *record, struct error *error);
/* Fine where there is none. */
void writer_file_remove(struct writer_file *file);

/* The unit's segment cannot be written, for the system's reason or, where errnum is 0, one that only HDF5
 * knows. extra: what the brackets say first, with a comma behind it; "": nothing. */
enum status writer_file_error(const struct writer_folder *folder, int64_t unit, int errnum, const char *extra,
                              struct error *error);
/* Puts the segment and the room left in front of what `call` said. */
enum status writer_file_with_place(const struct writer_folder *folder, int64_t unit, enum status call,
                                   struct error *error);

/* True where this call is to fail; errno says as what. */
bool writer_fault_is_due(enum writer_fault fault);

#endif
