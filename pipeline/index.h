/* Statistics of a whole store, merged from its segments in the order of units: what index_build writes and
 * verify_store compares. (index_build itself is declared in store.h.) */
#ifndef ACTDUMP_PIPELINE_INDEX_H
#define ACTDUMP_PIPELINE_INDEX_H

#include "pipeline/segment.h"
#include "pipeline/store.h"

struct index_entry {
    struct statistics statistics;         /* zeroed where the dataset has none */
    int64_t sequence, document, position; /* of the first row that is not finite; -1: none, or no position */
};

struct index_merge {
    const struct layout *layout;
    struct index_entry *entries; /* [n_datasets] */
    void *scratch;               /* statistics of the widest dataset */
};

/* Borrows layout. */
enum status index_merge_create(const struct layout *layout, struct index_merge *out, struct error *error);
void index_merge_destroy(struct index_merge *merge); /* a zeroed one is fine */
/* Adds what an open segment says of one dataset; segments in the order of units. */
enum status index_merge_dataset(struct index_merge *merge, hid_t file, int64_t dataset,
                                const struct segment_record *r, struct error *error);
/* store.json's "statistics": an object by dataset path. Returns owned. */
cJSON *index_statistics_json(const struct index_merge *merge);

#endif
