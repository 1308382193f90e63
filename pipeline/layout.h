/* What the datasets of a store are: the one description that segments, store.h5, store.json, verify and info
 * share. */
#ifndef ACTDUMP_PIPELINE_LAYOUT_H
#define ACTDUMP_PIPELINE_LAYOUT_H

#include "engine/model.h"
#include "kernels/base/dtype.h"

/* Version of store.json and of the layout of segments; a reader refuses a newer one. */
#define STORE_VERSION 1
/* Registered HDF5 filter ids: 2 is HDF5's own byte shuffle, 32015 zstd. */
#define STORE_FILTER_ZSTD 32015

enum dataset_rows { ROWS_OF_SEQUENCES, ROWS_OF_CAPTURE }; /* what the first axis counts */

struct dataset {
    char path[224]; /* in the file, without the first slash: "sequences/length",
                       "residuals/layers/3/layer_output" */
    int capture;    /* index of its capture; -1: of the /sequences group */
    enum dataset_rows rows;
    bool is_value; /* a captured value: has attributes and, where it is a float, statistics */
    enum value_id value;
    int layer;               /* -1: of the model */
    enum dtype dtype;        /* stored */
    enum dtype source_dtype; /* as handed to the writer: DTYPE_F32 where float16 is stored, so that overflow
                                is seen */
    enum dtype load_dtype;   /* of the model */
    int n_axes;              /* after the first */
    const char *axis_names[VALUE_MAX_AXES];
    int64_t axis_sizes[VALUE_MAX_AXES];
    int64_t width;     /* elements a row */
    int64_t row_bytes; /* stored */
    int64_t chunk_rows;
};

struct layout {
    struct dataset *datasets; /* first the four of /sequences (document, start, length, continues), then each
                                 capture's rows/ three, then its values */
    int64_t n_datasets;
    const char **capture_names; /* [n_captures], borrowed */
    int64_t n_captures;
    int compression; /* zstd level; 0: datasets are chunked and unfiltered */
};

enum { LAYOUT_TEXT_BYTES = 160 };
/* "row num_heads head_dim", "sequence vocab_size": the names of all axes. */
void layout_describe(const struct dataset *dataset, char text[LAYOUT_TEXT_BYTES]);
/* The names one by one, the first axis included; returns how many. */
int layout_get_axes(const struct dataset *dataset, const char *names[VALUE_MAX_AXES + 1]);
/* What the attributes value, host and description say: of the catalogue, or of the tables. Static storage or
 * inside `dataset`. */
const char *layout_get_value(const struct dataset *dataset);
const char *layout_get_host(const struct dataset *dataset);
const char *layout_get_description(const struct dataset *dataset);
/* Captured values that are floats have statistics. */
bool layout_has_statistics(const struct dataset *dataset);
/* -inf is what hides an entry of attention scores. */
bool layout_is_masked(const struct dataset *dataset);
/* Rows a chunk of a segment's dataset that has n_rows: chunk_rows, or n_rows where that is less, but 1 at
 * least. */
int64_t layout_chunk_rows(const struct dataset *dataset, int64_t n_rows);
/* Index of the dataset of that path; -1: none. */
int64_t layout_find(const struct layout *layout, const char *path);
/* Rows of a dataset in a segment of so many sequences and, by capture, rows. */
int64_t layout_count_rows(const struct dataset *dataset, int64_t n_sequences, const int64_t *n_rows);

#endif
