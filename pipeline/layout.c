#include "pipeline/layout.h"

#include <stdio.h>
#include <string.h>

int layout_get_axes(const struct dataset *dataset, const char *names[VALUE_MAX_AXES + 1])
{
    names[0] = dataset->rows == ROWS_OF_CAPTURE ? "row" : "sequence";
    for (int i = 0; i < dataset->n_axes; i++)
        names[i + 1] = dataset->axis_names[i];
    return dataset->n_axes + 1;
}

void layout_describe(const struct dataset *dataset, char text[LAYOUT_TEXT_BYTES])
{
    const char *names[VALUE_MAX_AXES + 1];
    int n = layout_get_axes(dataset, names);
    size_t used = 0;
    for (int i = 0; i < n && used < LAYOUT_TEXT_BYTES; i++)
        used += (size_t)snprintf(text + used, LAYOUT_TEXT_BYTES - used, "%s%s", i == 0 ? "" : " ", names[i]);
}

const char *layout_get_value(const struct dataset *dataset)
{
    if (dataset->is_value)
        return catalogue_get(dataset->value)->name;
    const char *slash = strrchr(dataset->path, '/');
    return slash == NULL ? dataset->path : slash + 1;
}

const char *layout_get_host(const struct dataset *dataset)
{
    return dataset->is_value ? catalogue_host_path(catalogue_get(dataset->value)->host) : "";
}

const char *layout_get_description(const struct dataset *dataset)
{
    static const char *const tables[][2] = {
        {"document", "document of the corpus, counted from 0 in its file"},
        {"start", "token offset in the document of the first token that is not prepended"},
        {"length", "tokens of the sequence, prepended ones included"},
        {"continues", "1 where states are carried over from the sequence before, else 0"},
        {"sequence", "number of the row's sequence, an index into store.h5's /sequences"},
        {"position", "position of the row's token in its sequence"},
        {"input_ids", "token id"},
    };
    if (dataset->is_value)
        return catalogue_get(dataset->value)->description;
    const char *name = layout_get_value(dataset);
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++)
        if (strcmp(name, tables[i][0]) == 0)
            return tables[i][1];
    return "";
}

bool layout_has_statistics(const struct dataset *dataset)
{
    return dataset->is_value && dtype_is_float(dataset->dtype);
}

bool layout_is_masked(const struct dataset *dataset)
{
    return dataset->is_value && dataset->value == VALUE_ATTN_SCORES;
}

int64_t layout_chunk_rows(const struct dataset *dataset, int64_t n_rows)
{
    if (n_rows >= dataset->chunk_rows)
        return dataset->chunk_rows;
    return n_rows > 1 ? n_rows : 1;
}

int64_t layout_find(const struct layout *layout, const char *path)
{
    for (int64_t i = 0; i < layout->n_datasets; i++)
        if (strcmp(layout->datasets[i].path, path) == 0)
            return i;
    return -1;
}

int64_t layout_count_rows(const struct dataset *dataset, int64_t n_sequences, const int64_t *n_rows)
{
    return dataset->rows == ROWS_OF_SEQUENCES ? n_sequences : n_rows[dataset->capture];
}
