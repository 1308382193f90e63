/* A store's folder and its store.json.
 *
 *   <folder>/store.json            the manifest, written atomically: temporary name, fsync, rename, fsync of
 *                                  the folder
 *   <folder>/store.h5              virtual datasets over the segments, made by index_build
 *   <folder>/segments/000000.h5    one for each unit
 *   <folder>/store.lock            of the running job
 *
 * The layout in words, for those who write a reader, is schemas/store.md; store.json's schema is
 * schemas/store.schema.json. Every field read back is checked as hostile input (STATUS_INPUT). */
#ifndef ACTDUMP_PIPELINE_STORE_H
#define ACTDUMP_PIPELINE_STORE_H

#include "pipeline/writer.h"

#include <cjson/cJSON.h>

/* Everything that store.json says. As written by `run`: borrowed members belong to the caller. As read by
 * store_open: all belong to the struct (store_close). */
struct store {
    char *folder;
    bool complete; /* every unit is committed */
    cJSON *job;    /* the job file with --set applied */
    cJSON *model;  /* {"family", "architecture", "checkpoint", "digest", "bytes", "load_dtype", "n_layers",
                      "hidden_size", "vocab_size", "blocks": [...]} */
    cJSON *corpus; /* {"format", "path", "digest", "n_documents", "n_empty_documents", "n_sequences",
                      "n_tokens", "isolation": how sequences are kept apart, "prepend", ...} */
    cJSON *run;    /* {"actdump", "backend", "threads", "batch_tokens", "libraries": {...}}: what may change a
                      bit */
    cJSON *summary; /* of the last run that ended; NULL before */
    struct layout layout;
    int64_t n_units;
    int64_t *unit_start;             /* [n_units + 1] first sequence of each unit; the last is n_sequences */
    struct segment_record *segments; /* [n_units]; bytes 0: not committed */
    int64_t index_bytes; /* of store.h5 as index_build made it for these segments; 0: not made since */
    uint64_t index_checksum;
    cJSON *tree;      /* store_open: the whole of store.json, which the parts above are of */
    char *axis_names; /* store_open: what the layout's axis names point into */
};

/* Creates the folder and segments/ where missing. */
enum status store_make_folders(const char *folder, struct error *error);
/* Whether store.json is there. */
bool store_exists(const char *folder);
/* Writes store.json; statistics of datasets (see index_build) are kept from `statistics`, a JSON object by
 * dataset path, where not NULL. */
enum status store_write(const struct store *store, const cJSON *statistics, struct error *error);
/* Reads store.json and checks that it can be used: types, ranges, names, paths that stay inside the folder.
 * Whether it agrees with the segments is for verify_store. Returns owned at *out. */
enum status store_open(const char *folder, struct store **out, struct error *error);
void store_close(struct store *store); /* NULL is fine */

/* "segments/000012.h5" into name. */
void store_segment_name(int64_t unit, char name[64]);
/* Reads a committed segment's own record back from the file (rows, sequences) and computes its checksum. */
enum status store_read_segment(const struct store *store, int64_t unit, struct segment_record *out,
                               struct error *error);

/* Builds store.h5 from store.json and the segments: virtual datasets with relative source paths, NaN where a
 * segment is missing (integers: -1), attributes and dimension labels as in the segments, merged /statistics.
 * Then rewrites store.json with the statistics' scalars, and with complete where every unit is committed: a
 * store calls itself complete only when store.h5 is there. Atomic like all else. */
enum status index_build(const char *folder, struct error *error);

/* What verify calls for each fault it finds: which file, what was found, what was expected. */
typedef void verify_report(void *context, const char *sentence);
/* Checks every checksum, count and identity: store.json against the segments' files, sizes, checksums,
 * datasets, shapes, dtypes, attributes, chunks (each decompressed), row tables against sequences, statistics,
 * and store.h5 against all. Reports every fault, goes on after each; *n_faults counts them. Returns other
 * than STATUS_OK only where store.json itself cannot be read. */
enum status verify_store(const char *folder, verify_report *report, void *context, int64_t *n_faults,
                         struct error *error);

/* Prints what the store holds and how to read it. */
enum status info_print(const char *folder, struct error *error);

#endif
