/* Tables and numbers for people: aligned columns, layer ranges, byte counts. */
#ifndef ACTDUMP_PIPELINE_TABLE_H
#define ACTDUMP_PIPELINE_TABLE_H

#include "engine/model.h"

#include <stdint.h>
#include <stdio.h>

/* "0-3,5,7-23" of the marked ones among n. Writes to and returns `buffer`. */
const char *table_ranges(const bool *marked, int n, char *buffer, size_t size);
/* "1.5 GB", "12 kB", "300 B": decimal units. */
const char *table_bytes(double bytes, char *buffer, size_t size);
/* "[num_heads 12, head_dim 64]", "[]" for none. */
const char *table_shape(const struct value_description *d, char *buffer, size_t size);

#endif
