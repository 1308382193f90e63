/* What the datasets of a store are: the one description that segments, store.h5, store.json, verify and info share. */
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
    char path[224];  /* in the file, without the first slash: "sequences/length", "residuals/layers/3/layer_output" */
    int capture;     /* index of its capture; -1: of the /sequences group */
    enum dataset_rows rows;
    bool is_value;   /* a captured value: has attributes and, where it is a float, statistics */
    enum value_id value;
    int layer;       /* -1: of the model */
    enum dtype dtype;        /* stored */
    enum dtype source_dtype; /* as handed to the writer: DTYPE_F32 where float16 is stored, so that overflow is seen */
    enum dtype load_dtype;   /* of the model */
    int n_axes;              /* after the first */
    const char *axis_names[VALUE_MAX_AXES];
    int64_t axis_sizes[VALUE_MAX_AXES];
    int64_t width;     /* elements a row */
    int64_t row_bytes; /* stored */
    int64_t chunk_rows;
};

struct layout {
    struct dataset *datasets; /* first the four of /sequences (document, start, length, continues), then each capture's rows/ three, then its values */
    int64_t n_datasets;
    const char **capture_names; /* [n_captures], borrowed */
    int64_t n_captures;
    int compression; /* zstd level; 0: datasets are chunked and unfiltered */
};

#endif
