/* The parts of verify_store (declared in store.h): what they share. */
#ifndef ACTDUMP_PIPELINE_VERIFY_H
#define ACTDUMP_PIPELINE_VERIFY_H

#include "pipeline/files.h"
#include "pipeline/index.h"

struct verify {
    const struct store *store;
    verify_report *report;
    void *context;
    int64_t n_faults;
    bool only_notes; /* what is found now is said and not counted */

    /* every segment so far could be merged, so that the whole's statistics can be compared */
    bool is_merged;
    struct index_merge merge;

    /* room for one chunk: as in the file, unpacked, unshuffled */
    char *packed, *shuffled, *plain;
    size_t packed_bytes, plain_bytes;
    void *hash_buffer;
    void *chunk_memory, *total_memory; /* statistics of a chunk and of a dataset */
};

/* Says what is wrong with `where` ("segments/000001.h5"). */
void verify_fault(struct verify *v, const char *where, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The same from a recorded error, which it clears. */
void verify_error(struct verify *v, const char *where, struct error *error);
void verify_note(struct verify *v, const char *where, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Two sums of the same numbers, added in another order perhaps. */
bool verify_is_close(double a, double b);

/* Holds a committed unit's file against store.json and against itself. Fails only where memory does. */
enum status verify_segment(struct verify *v, int64_t unit, struct error *error);
/* Holds store.h5, and store.json's statistics, against the segments. */
void verify_index(struct verify *v);

#endif
