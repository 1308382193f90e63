/* What is in a store's HDF5 files: datasets with all their attributes, and statistics. Shared by who writes
 * segments, who builds store.h5, and who checks both. */
#ifndef ACTDUMP_PIPELINE_SEGMENT_H
#define ACTDUMP_PIPELINE_SEGMENT_H

#include "pipeline/hdf5_util.h"
#include "pipeline/layout.h"
#include "pipeline/statistics.h"

/* Creates a dataset with its attributes and the groups above it. `creation` says how it is stored; `space`
 * how large it is. Returns owned at *out (H5Dclose). */
enum status segment_create_dataset(hid_t file, const struct dataset *dataset, hid_t space, hid_t creation,
                                   hid_t *out, struct error *error);
/* The same for a segment: no rows yet, growing along the first axis, in chunks of chunk_rows, shuffled and
 * compressed at `level` (0: neither). */
enum status segment_create_chunked(hid_t file, const struct dataset *dataset, int64_t chunk_rows, int level,
                                   hid_t *out, struct error *error);
/* The dataset's shape with n_rows rows; returns the rank. */
int segment_get_shape(const struct dataset *dataset, int64_t n_rows, hsize_t shape[VALUE_MAX_AXES + 1]);

/* Opens a dataset and holds it against its description: type, rank, axes. Returns owned at *out, and its
 * rows. A fault is STATUS_INPUT. */
enum status segment_open_dataset(hid_t file, const struct dataset *dataset, hid_t *out, int64_t *n_rows,
                                 struct error *error);
/* Holds its attributes against the description. Only for files whose checksum is right: strings of variable
 * length lie in the one part of HDF5's metadata that has no checksum, and 1.10.8 crashes where it is damaged.
 */
enum status segment_check_attributes(hid_t id, const struct dataset *dataset, struct error *error);

/* Under /statistics/<path>: arrays mean, count and `spread_name` (what m2 holds: "m2", or "variance"), and
 * the scalars as attributes. Wide arrays are filtered as chunks are. *group, where wanted, is left open for
 * more attributes. */
enum status segment_write_statistics(hid_t file, const struct dataset *dataset, const struct statistics *s,
                                     const char *spread_name, int level, hid_t *group, struct error *error);
/* Fills s, which has been initialised for the dataset. */
enum status segment_read_statistics(hid_t file, const struct dataset *dataset, const char *spread_name,
                                    struct statistics *s, struct error *error);

#endif
