#include "pipeline/resume.h"

#include "kernels/base/log.h"
#include "kernels/base/memory.h"
#include "pipeline/files.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void segment_path(const struct store *store, int64_t unit, char path[4096])
{
    char name[64];
    store_segment_name(unit, name);
    snprintf(path, 4096, "%s/%s", store->folder, name);
}

/* Size of a unit's segment file, -1 where there is none. */
static int64_t segment_size(const struct store *store, int64_t unit)
{
    char path[4096];
    struct stat info;
    segment_path(store, unit, path);
    return stat(path, &info) == 0 ? (int64_t)info.st_size : -1;
}

static enum status remove_segment(const struct store *store, int64_t unit, const char *why,
                                  struct error *error)
{
    char path[4096];
    segment_path(store, unit, path);
    log_warning("%s: %s; the unit is done anew", path, why);
    if (unlink(path) != 0 && errno != ENOENT)
        return error_set_errno(error, STATUS_INPUT, errno, "%s cannot be removed", path);
    return STATUS_OK;
}

/* Takes over one unit of the earlier store, or removes what is left of it. */
static enum status adopt(struct store *now, struct store *then, int64_t unit, bool keep, bool *done,
                         struct error *error)
{
    int64_t size = segment_size(now, unit);
    if (size < 0)
        return STATUS_OK;
    if (!keep)
        return remove_segment(now, unit, "its sequences changed at the corpus' end", error);
    struct segment_record *record = &then->segments[unit];
    if (record->bytes == size) {
        now->segments[unit] = *record;
        *record = (struct segment_record){.unit = unit};
        done[unit] = true;
        return STATUS_OK;
    }
    if (record->bytes > 0)
        return remove_segment(now, unit, "its size is not the recorded one", error);
    /* Renamed into place, but the job died before store.json said so. */
    struct error why = {0};
    if (store_read_segment(now, unit, &now->segments[unit], &why) != STATUS_OK)
        return remove_segment(now, unit, why.text, error);
    done[unit] = true;
    return STATUS_OK;
}

static enum status go_on(struct store *now, struct corpus *corpus, bool *done, struct error *error)
{
    struct store *then = NULL;
    void *keep = NULL;
    enum status status;
    TRY_ELSE(store_open(now->folder, &then, error), done);
    TRY_ELSE(memory_allocate_array(&keep, (size_t)now->n_units, sizeof(bool), "resuming", error), done);
    TRY_ELSE(manifest_compare(then, now, corpus, keep, error), done);
    now->complete = then->complete;
    for (int64_t u = 0; u < now->n_units || u < then->n_units; u++) {
        if (u < now->n_units)
            TRY_ELSE(adopt(now, then, u, ((bool *)keep)[u], done, error), done);
        else if (segment_size(now, u) >= 0)
            TRY_ELSE(remove_segment(now, u, "the job has no such unit any more", error), done);
    }
done:
    memory_free(keep);
    store_close(then);
    return status;
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

/* Looks through a folder of the store: removes temporary files, and counts segments. */
static enum status sweep(const char *folder, int64_t *n_segments, struct error *error)
{
    char path[FILES_PATH_BYTES];
    DIR *listing = opendir(folder);
    if (listing == NULL)
        return error_set_errno(error, STATUS_INPUT, errno, "%s cannot be read", folder);
    for (struct dirent *entry; (entry = readdir(listing)) != NULL;) {
        *n_segments += entry->d_name[0] != '.' && ends_with(entry->d_name, ".h5");
        if (!files_is_temporary(entry->d_name))
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        log_info("removing %s, which an earlier job left", path);
        unlink(path);
    }
    closedir(listing);
    return STATUS_OK;
}

enum status resume_prepare(struct store *now, struct corpus *corpus, bool *done, struct error *error)
{
    int64_t n_segments = 0, n_done = 0;
    char segments[FILES_PATH_BYTES];
    snprintf(segments, sizeof segments, "%s/segments", now->folder);
    TRY(sweep(now->folder, &n_segments, error));
    n_segments = 0; /* store.h5 is none */
    TRY(sweep(segments, &n_segments, error));
    if (store_exists(now->folder)) {
        TRY(go_on(now, corpus, done, error));
    } else if (n_segments > 0) {
        return error_set(
            error, STATUS_INPUT,
            "%s: %lld segments lie there, but no store.json says what they are; remove them or give the job "
            "another store.path",
            now->folder, (long long)n_segments);
    }
    for (int64_t u = 0; u < now->n_units; u++)
        n_done += done[u];
    if (n_done > 0 && n_done < now->n_units)
        log_info("going on: %lld of %lld units are done", (long long)n_done, (long long)now->n_units);
    now->complete &= n_done == now->n_units;
    return n_done == now->n_units ? STATUS_OK : store_write(now, NULL, error);
}
