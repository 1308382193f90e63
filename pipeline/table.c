#include "pipeline/table.h"

const char *table_ranges(const bool *marked, int n, char *buffer, size_t size)
{
    size_t used = 0;
    buffer[0] = '\0';
    for (int i = 0; i < n; i++) {
        if (!marked[i])
            continue;
        int last = i;
        while (last + 1 < n && marked[last + 1])
            last++;
        if (used < size) {
            const char *comma = used > 0 ? "," : "";
            if (last > i)
                used += (size_t)snprintf(buffer + used, size - used, "%s%d-%d", comma, i, last);
            else
                used += (size_t)snprintf(buffer + used, size - used, "%s%d", comma, i);
        }
        i = last;
    }
    return buffer;
}

const char *table_bytes(double bytes, char *buffer, size_t size)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
    int unit = 0;
    while (bytes >= 1000 && unit < 5) {
        bytes /= 1000;
        unit++;
    }
    snprintf(buffer, size, bytes < 10 && unit > 0 ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return buffer;
}

const char *table_shape(const struct value_description *d, char *buffer, size_t size)
{
    size_t used = (size_t)snprintf(buffer, size, "[");
    for (int i = 0; i < d->n_axes && used < size; i++)
        used += (size_t)snprintf(buffer + used, size - used, "%s%s %lld", i > 0 ? ", " : "", d->axis_names[i],
                                 (long long)d->axis_sizes[i]);
    if (used < size)
        snprintf(buffer + used, size - used, "]");
    return buffer;
}
