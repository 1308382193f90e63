#include "engine/safetensors.h"

#include "engine/json.h"
#include "kernels/base/log.h"
#include "kernels/base/memory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define SUFFIX ".safetensors"
#define SINGLE_FILE "model.safetensors"
#define INDEX_FILE "model.safetensors.index.json"
#define METADATA_KEY "__metadata__"
#define MAX_HEADER_BYTES 100000000 /* the reference implementation's limit */
#define READ_BYTES ((size_t)4 << 20)

/* ---- lists of file names ---- */

struct names {
    char **items;
    size_t n, capacity;
};

static void names_fini(struct names *names)
{
    for (size_t i = 0; i < names->n; i++)
        memory_free(names->items[i]);
    memory_free(names->items);
    *names = (struct names){0};
}

static enum status names_add(struct names *names, const char *name, struct error *error)
{
    if (names->n == names->capacity) {
        size_t capacity = names->capacity == 0 ? 16 : 2 * names->capacity;
        void *items;
        TRY(memory_allocate_array(&items, capacity, sizeof *names->items, "file names", error));
        if (names->n > 0)
            memcpy(items, names->items, names->n * sizeof *names->items);
        memory_free(names->items);
        names->items = items;
        names->capacity = capacity;
    }
    void *copy;
    size_t bytes = strlen(name) + 1;
    TRY(memory_allocate(&copy, bytes, "a file name", error));
    memcpy(copy, name, bytes);
    names->items[names->n++] = copy;
    return STATUS_OK;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void names_sort(struct names *names)
{
    if (names->n > 0)
        qsort(names->items, names->n, sizeof *names->items, compare_names);
}

static bool names_has(const struct names *names, const char *name)
{
    return names->n > 0 &&
           bsearch(&name, names->items, names->n, sizeof *names->items, compare_names) != NULL;
}

/* ---- which files a checkpoint is made of ---- */

/* A folder's files. `index` is NULL where model.safetensors is the only one. */
struct files {
    const char *folder;
    cJSON *index;
    const cJSON *weight_map;
    char index_path[PATH_MAX];
    struct names present; /* *.safetensors in the folder, sorted */
    struct names shards;  /* those that the checkpoint is made of, sorted */
};

static void files_fini(struct files *files)
{
    cJSON_Delete(files->index);
    names_fini(&files->present);
    names_fini(&files->shards);
}

static bool has_suffix(const char *name)
{
    size_t length = strlen(name), n = strlen(SUFFIX);
    return length > n && strcmp(name + length - n, SUFFIX) == 0;
}

static enum status join_path(char path[PATH_MAX], const char *folder, const char *name, struct error *error)
{
    if (snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX)
        return STATUS_OK;
    return error_set_errno(error, STATUS_INPUT, ENAMETOOLONG, "cannot open %s in %s", name, folder);
}

/* Hidden files are left out: copying tools leave some (._model.safetensors), and nobody loads them. */
static enum status list_folder(struct files *files, bool *has_index, struct error *error)
{
    DIR *directory = opendir(files->folder);
    if (directory == NULL)
        return error_set_errno(error, STATUS_INPUT, errno, "cannot open the checkpoint's folder %s",
                               files->folder);
    enum status status = STATUS_OK;
    *has_index = false;
    errno = 0;
    for (struct dirent *entry = readdir(directory); entry != NULL; entry = readdir(directory)) {
        if (strcmp(entry->d_name, INDEX_FILE) == 0)
            *has_index = true;
        if (entry->d_name[0] != '.' && has_suffix(entry->d_name))
            TRY_ELSE(names_add(&files->present, entry->d_name, error), close_folder);
        errno = 0;
    }
    if (errno != 0)
        status = error_set_errno(error, STATUS_INPUT, errno, "cannot list %s", files->folder);
    names_sort(&files->present);
close_folder:
    closedir(directory);
    return status;
}

/* A shard's name comes from a file and is opened: it must not lead out of the folder. */
static enum status check_shard_name(const struct files *files, const cJSON *entry, struct error *error)
{
    char tensor[128], shard[128], found[128];
    json_quote(entry->string, tensor, sizeof tensor);
    const char *name = cJSON_GetStringValue(entry);
    if (name == NULL)
        return error_set(error, STATUS_INPUT, "%s: weight_map gives %s for tensor %s, expected a file name",
                         files->index_path, json_describe(entry, found, sizeof found), tensor);
    if (name[0] == '.' || strchr(name, '/') != NULL || !has_suffix(name))
        return error_set(error, STATUS_INPUT,
                         "%s: weight_map gives %s for tensor %s, expected the plain name of a *" SUFFIX
                         " file",
                         files->index_path, json_quote(name, shard, sizeof shard), tensor);
    if (!names_has(&files->present, name))
        return error_set(error, STATUS_INPUT,
                         "%s names %s for tensor %s, but there is no such file in the folder",
                         files->index_path, json_quote(name, shard, sizeof shard), tensor);
    return STATUS_OK;
}

/* Every file that the index names: marked in the list of what is present, which is short. */
static enum status list_shards(struct files *files, struct error *error)
{
    void *used;
    TRY(memory_allocate(&used, files->present.n, "file names", error));
    char *const *items = files->present.items;
    enum status status = STATUS_OK;
    const cJSON *entry;
    cJSON_ArrayForEach(entry, files->weight_map)
    {
        TRY_ELSE(check_shard_name(files, entry, error), free_used);
        char *const *item =
            bsearch(&entry->valuestring, items, files->present.n, sizeof *items, compare_names);
        ((char *)used)[item - items] = 1;
    }
    for (size_t i = 0; i < files->present.n; i++)
        if (((char *)used)[i])
            TRY_ELSE(names_add(&files->shards, items[i], error), free_used);
free_used:
    memory_free(used);
    return status;
}

static enum status read_index(struct files *files, struct error *error)
{
    TRY(json_read_file(files->index_path, STATUS_INPUT, &files->index, error));
    char found[128];
    if (!cJSON_IsObject(files->index))
        return error_set(error, STATUS_INPUT, "%s holds %s, expected an object", files->index_path,
                         json_describe(files->index, found, sizeof found));
    files->weight_map = cJSON_GetObjectItemCaseSensitive(files->index, "weight_map");
    if (!cJSON_IsObject(files->weight_map))
        return error_set(error, STATUS_INPUT,
                         "%s: weight_map is %s, expected an object of tensor names and files",
                         files->index_path, json_describe(files->weight_map, found, sizeof found));
    if (files->weight_map->child == NULL)
        return error_set(error, STATUS_INPUT, "%s: weight_map is empty, expected tensor names and files",
                         files->index_path);
    return list_shards(files, error);
}

/* A file that nobody refers to is often half of another checkpoint, or the whole of a merged one. */
static enum status check_strays(const struct files *files, struct error *error)
{
    for (size_t i = 0; i < files->present.n; i++) {
        const char *name = files->present.items[i];
        char quoted[128];
        if (!names_has(&files->shards, name))
            return error_set(
                error, STATUS_INPUT,
                "%s holds %s, which is no part of the checkpoint that %s describes; move it elsewhere",
                files->folder, json_quote(name, quoted, sizeof quoted),
                files->index == NULL ? SINGLE_FILE : INDEX_FILE);
    }
    return STATUS_OK;
}

static enum status fail_no_files(const struct files *files, struct error *error)
{
    char quoted[128] = "";
    if (files->present.n > 0)
        json_quote(files->present.items[0], quoted, sizeof quoted);
    return error_set(error, STATUS_INPUT, "%s holds neither " SINGLE_FILE " nor " INDEX_FILE "%s%s",
                     files->folder, quoted[0] == '\0' ? "" : ", only ", quoted);
}

/* On failure too, *files is to be finished by files_fini. */
static enum status find_files(const char *folder, struct files *files, struct error *error)
{
    files->folder = folder;
    bool has_index = false;
    TRY(list_folder(files, &has_index, error));
    if (names_has(&files->present, SINGLE_FILE)) {
        TRY(names_add(&files->shards, SINGLE_FILE, error));
        if (has_index)
            log_warning("%s: " SINGLE_FILE " is read, " INDEX_FILE " beside it is not used", folder);
    } else if (has_index) {
        TRY(join_path(files->index_path, folder, INDEX_FILE, error));
        TRY(read_index(files, error));
    } else {
        return fail_no_files(files, error);
    }
    return check_strays(files, error);
}

/* ---- one file ---- */

struct shard {
    char *path;
    const char *name;           /* in path */
    int fd;                     /* for prefetching; -1 where there is none */
    const unsigned char *bytes; /* the mapping */
    size_t size;
    char *tensor_names; /* one block */
    struct checkpoint_tensor *tensors;
    size_t n_tensors;
};

static void shard_close(struct shard *shard)
{
    memory_free(shard->tensors);
    memory_free(shard->tensor_names);
    if (shard->bytes != NULL)
        munmap((void *)(uintptr_t)shard->bytes, shard->size);
    if (shard->fd >= 0)
        close(shard->fd);
    memory_free(shard->path);
    *shard = (struct shard){.fd = -1};
}

struct format_dtype {
    const char *name;
    unsigned bits;
    enum dtype dtype;
};

/* All types of the format (safetensors 0.8), with ours where a weight may have it. */
static const struct format_dtype format_dtypes[] = {
    {"F32", 32, DTYPE_F32},          {"BF16", 16, DTYPE_BF16},    {"F16", 16, DTYPE_F16},
    {"I32", 32, DTYPE_I32},          {"I64", 64, DTYPE_I64},      {"F64", 64, DTYPE_COUNT},
    {"C64", 64, DTYPE_COUNT},        {"I16", 16, DTYPE_COUNT},    {"I8", 8, DTYPE_COUNT},
    {"U64", 64, DTYPE_COUNT},        {"U32", 32, DTYPE_COUNT},    {"U16", 16, DTYPE_COUNT},
    {"U8", 8, DTYPE_COUNT},          {"BOOL", 8, DTYPE_COUNT},    {"F8_E4M3", 8, DTYPE_COUNT},
    {"F8_E5M2", 8, DTYPE_COUNT},     {"F8_E8M0", 8, DTYPE_COUNT}, {"F8_E4M3FNUZ", 8, DTYPE_COUNT},
    {"F8_E5M2FNUZ", 8, DTYPE_COUNT}, {"F6_E2M3", 6, DTYPE_COUNT}, {"F6_E3M2", 6, DTYPE_COUNT},
    {"F4", 4, DTYPE_COUNT},
};

static const struct format_dtype *find_dtype(const char *name)
{
    for (size_t i = 0; i < sizeof format_dtypes / sizeof *format_dtypes; i++)
        if (strcmp(format_dtypes[i].name, name) == 0)
            return &format_dtypes[i];
    return NULL;
}

/* One entry of a header while it is checked. */
struct entry {
    const struct shard *shard;
    const cJSON *json;
    size_t data_start; /* of the file's data, in the file */
    struct error *error;
};

/* "FILE: tensor "NAME": WHAT is FOUND, expected EXPECTED" */
static enum status fail_entry(const struct entry *e, const char *what, const cJSON *found,
                              const char *expected)
{
    char name[128], text[128];
    return error_set(e->error, STATUS_INPUT, "%s: tensor %s: %s is %s, expected %s", e->shard->path,
                     json_quote(e->json->string, name, sizeof name), what,
                     json_describe(found, text, sizeof text), expected);
}

static enum status read_shape(const struct entry *e, struct checkpoint_tensor *t)
{
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(e->json, "shape"), *item;
    if (!cJSON_IsArray(shape))
        return fail_entry(e, "shape", shape, "a list of whole numbers");
    cJSON_ArrayForEach(item, shape)
    {
        int64_t size;
        if (t->n_dims == SAFETENSORS_MAX_DIMS)
            return fail_entry(e, "shape", shape, "8 axes at most");
        if (!json_get_integer(item, &size) || size < 0)
            return fail_entry(e, "an axis of shape", item, "a whole number of at least 0");
        t->dims[t->n_dims++] = size;
    }
    return STATUS_OK;
}

/* Bytes that shape and dtype ask for. */
static enum status count_bytes(const struct entry *e, const struct checkpoint_tensor *t, unsigned bits,
                               size_t *bytes)
{
    char name[128];
    json_quote(e->json->string, name, sizeof name);
    uint64_t total = bits;
    bool is_empty = false;
    for (int i = 0; i < t->n_dims; i++)
        is_empty = is_empty || t->dims[i] == 0;
    for (int i = 0; i < t->n_dims && !is_empty; i++)
        if (__builtin_mul_overflow(total, (uint64_t)t->dims[i], &total))
            return error_set(e->error, STATUS_INPUT,
                             "%s: tensor %s: its shape has more bits than 64-bit sizes can count",
                             e->shard->path, name);
    total = is_empty ? 0 : total;
    if (total % 8 != 0)
        return error_set(e->error, STATUS_INPUT, "%s: tensor %s of %s has %llu bits, expected whole bytes",
                         e->shard->path, name, t->dtype_name, (unsigned long long)total);
    *bytes = total / 8;
    return STATUS_OK;
}

static enum status read_offsets(const struct entry *e, struct checkpoint_tensor *t)
{
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(e->json, "data_offsets");
    int64_t begin, end, available = (int64_t)(e->shard->size - e->data_start);
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2)
        return fail_entry(e, "data_offsets", offsets, "a list of two whole numbers");
    if (!json_get_integer(offsets->child, &begin) || begin < 0)
        return fail_entry(e, "the first of data_offsets", offsets->child, "a whole number of at least 0");
    if (!json_get_integer(offsets->child->next, &end) || end < begin)
        return fail_entry(e, "the second of data_offsets", offsets->child->next,
                          "a whole number of at least the first");
    if (end > available) {
        char expected[96];
        snprintf(expected, sizeof expected, "%lld at most, where the file ends", (long long)available);
        return fail_entry(e, "the second of data_offsets", offsets->child->next, expected);
    }
    t->data = e->shard->bytes + e->data_start + begin;
    t->bytes = (size_t)(end - begin);
    return STATUS_OK;
}

static enum status read_entry(const struct entry *e, struct checkpoint_tensor *t)
{
    if (!cJSON_IsObject(e->json))
        return fail_entry(e, "it", e->json, "an object of dtype, shape and data_offsets");
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(e->json, "dtype");
    const struct format_dtype *known = cJSON_IsString(dtype) ? find_dtype(dtype->valuestring) : NULL;
    if (known == NULL)
        return fail_entry(e, "dtype", dtype, "a type of the safetensors format (F32, BF16, F16, ...)");
    *t = (struct checkpoint_tensor){.dtype = known->dtype, .file = e->shard->name};
    snprintf(t->dtype_name, sizeof t->dtype_name, "%s", known->name);
    size_t bytes = 0;
    TRY(read_shape(e, t));
    TRY(read_offsets(e, t));
    TRY(count_bytes(e, t, known->bits, &bytes));
    char name[128];
    if (bytes != t->bytes)
        return error_set(e->error, STATUS_INPUT,
                         "%s: tensor %s: data_offsets span %zu bytes, its dtype and shape make %zu",
                         e->shard->path, json_quote(e->json->string, name, sizeof name), t->bytes, bytes);
    return STATUS_OK;
}

/* Free text by people; only its form is checked. */
static enum status check_metadata(const struct shard *shard, const cJSON *metadata, struct error *error)
{
    const cJSON *item;
    char found[128], name[128];
    if (!cJSON_IsObject(metadata))
        return error_set(error, STATUS_INPUT, "%s: " METADATA_KEY " is %s, expected an object of strings",
                         shard->path, json_describe(metadata, found, sizeof found));
    cJSON_ArrayForEach(item, metadata)
    {
        if (!cJSON_IsString(item))
            return error_set(error, STATUS_INPUT, "%s: " METADATA_KEY ": %s is %s, expected a string",
                             shard->path, json_quote(item->string, name, sizeof name),
                             json_describe(item, found, sizeof found));
    }
    return STATUS_OK;
}

/* By where the data begins; the empty ones before the one that begins there too. */
static int compare_places(const void *left, const void *right)
{
    const struct checkpoint_tensor *a = left, *b = right;
    uintptr_t begin_a = (uintptr_t)a->data, begin_b = (uintptr_t)b->data;
    if (begin_a != begin_b)
        return begin_a < begin_b ? -1 : 1;
    return a->bytes < b->bytes ? -1 : a->bytes > b->bytes;
}

/* The tensors must cover the data exactly: a gap or an overlap is what a damaged or hand-made file has, and
 * bytes that nobody names can hide anything. */
static enum status check_cover(const struct shard *shard, size_t data_start, struct error *error)
{
    if (shard->n_tensors > 0)
        qsort(shard->tensors, shard->n_tensors, sizeof *shard->tensors, compare_places);
    const unsigned char *data = shard->bytes + data_start;
    size_t covered = 0, available = shard->size - data_start;
    char name[128], before[128] = "the start";
    for (size_t i = 0; i < shard->n_tensors; i++) {
        const struct checkpoint_tensor *t = &shard->tensors[i];
        size_t begin = (size_t)((const unsigned char *)t->data - data);
        json_quote(t->name, name, sizeof name);
        if (begin < covered)
            return error_set(error, STATUS_INPUT,
                             "%s: tensor %s begins at %zu, inside tensor %s, which ends at %zu", shard->path,
                             name, begin, before, covered);
        if (begin > covered)
            return error_set(error, STATUS_INPUT,
                             "%s: no tensor covers bytes %zu to %zu of the data, between %s and %s",
                             shard->path, covered, begin, before, name);
        covered = begin + t->bytes;
        memcpy(before, name, sizeof before);
    }
    if (covered == available)
        return STATUS_OK;
    return error_set(error, STATUS_INPUT, "%s has %zu bytes of data, expected %zu: its tensors end there",
                     shard->path, available, covered);
}

static enum status allocate_tensors(struct shard *shard, const cJSON *header, struct error *error)
{
    size_t n = 0, name_bytes = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, header)
    {
        n++;
        name_bytes += strlen(item->string) + 1;
    }
    void *block;
    TRY(memory_allocate_array(&block, n, sizeof *shard->tensors, "the list of tensors", error));
    shard->tensors = block;
    TRY(memory_allocate(&block, name_bytes, "names of tensors", error));
    shard->tensor_names = block;
    return STATUS_OK;
}

static enum status read_entries(struct shard *shard, const cJSON *header, size_t data_start,
                                struct error *error)
{
    TRY(allocate_tensors(shard, header, error));
    char *name = shard->tensor_names;
    const cJSON *item;
    cJSON_ArrayForEach(item, header)
    {
        if (strcmp(item->string, METADATA_KEY) == 0) {
            TRY(check_metadata(shard, item, error));
            continue;
        }
        struct checkpoint_tensor *t = &shard->tensors[shard->n_tensors];
        TRY(read_entry(&(struct entry){shard, item, data_start, error}, t));
        size_t bytes = strlen(item->string) + 1;
        t->name = memcpy(name, item->string, bytes);
        name += bytes;
        shard->n_tensors++;
    }
    return check_cover(shard, data_start, error);
}

/* Of a shard whose bytes are there. On failure too, the shard is to be closed. */
static enum status read_header(struct shard *shard, struct error *error)
{
    uint64_t length = 0;
    if (shard->size < 8)
        return error_set(error, STATUS_INPUT, "%s has %zu bytes, expected at least 8 for the header's length",
                         shard->path, shard->size);
    for (int i = 7; i >= 0; i--)
        length = length << 8 | shard->bytes[i];
    if (length > MAX_HEADER_BYTES)
        return error_set(error, STATUS_INPUT, "%s: its header's length is %llu, expected %d at most",
                         shard->path, (unsigned long long)length, MAX_HEADER_BYTES);
    if (length > shard->size - 8)
        return error_set(error, STATUS_INPUT, "%s: its header's length is %llu, but only %zu bytes follow",
                         shard->path, (unsigned long long)length, shard->size - 8);
    if (length == 0 || shard->bytes[8] != '{')
        return error_set(error, STATUS_INPUT, "%s: its header does not begin with '{'", shard->path);
    char source[PATH_MAX + 16];
    snprintf(source, sizeof source, "%s (header)", shard->path);
    cJSON *header;
    TRY(json_parse((const char *)shard->bytes + 8, length, source, STATUS_INPUT, &header, error));
    enum status status = read_entries(shard, header, 8 + length, error);
    cJSON_Delete(header);
    return status;
}

static enum status set_path(struct shard *shard, const char *folder, const char *name, struct error *error)
{
    void *path;
    size_t bytes = strlen(folder) + strlen(name) + 2;
    TRY(memory_allocate(&path, bytes, "a path", error));
    snprintf(path, bytes, "%s/%s", folder, name);
    shard->path = path;
    shard->name = shard->path + strlen(folder) + 1;
    return STATUS_OK;
}

/* Opens a regular file; what open would wait for (a FIFO) is refused. */
static enum status open_file(const char *path, int *fd, size_t *size, struct error *error)
{
    struct stat info;
    int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened < 0)
        return error_set_errno(error, STATUS_INPUT, errno, "cannot open %s", path);
    enum status status = STATUS_OK;
    if (fstat(opened, &info) != 0)
        status = error_set_errno(error, STATUS_INPUT, errno, "cannot read the size of %s", path);
    else if (!S_ISREG(info.st_mode))
        status = error_set(error, STATUS_INPUT, "%s is not a regular file", path);
    if (status != STATUS_OK) {
        close(opened);
        return status;
    }
    posix_fadvise(opened, 0, 0, POSIX_FADV_SEQUENTIAL);
    *fd = opened;
    *size = (size_t)info.st_size;
    return STATUS_OK;
}

static enum status shard_open(struct shard *shard, const char *folder, const char *name, struct error *error)
{
    TRY(set_path(shard, folder, name, error));
    TRY(open_file(shard->path, &shard->fd, &shard->size, error));
    if (shard->size > 0) {
        void *mapping = mmap(NULL, shard->size, PROT_READ, MAP_PRIVATE, shard->fd, 0);
        if (mapping == MAP_FAILED)
            return error_set_errno(error, STATUS_INPUT, errno, "cannot map %s", shard->path);
        shard->bytes = mapping;
    }
    return read_header(shard, error);
}

enum status checkpoint_check_bytes(const void *bytes, size_t length, const char *file, int64_t *n_tensors,
                                   struct error *error)
{
    struct shard shard = {.fd = -1};
    TRY(set_path(&shard, ".", file, error));
    shard.bytes = bytes;
    shard.size = length;
    enum status status = read_header(&shard, error);
    if (status == STATUS_OK)
        *n_tensors = (int64_t)shard.n_tensors;
    shard.bytes = NULL; /* not ours to unmap */
    shard_close(&shard);
    return status;
}

/* ---- all files ---- */

struct checkpoint {
    struct shard *shards;
    size_t n_shards;
    struct checkpoint_tensor *tensors; /* of all shards, by name */
    size_t n_tensors;
    void *read_buffer; /* READ_BYTES, for prefetching */
};

void checkpoint_close(struct checkpoint *checkpoint)
{
    if (checkpoint == NULL)
        return;
    for (size_t i = 0; i < checkpoint->n_shards; i++)
        shard_close(&checkpoint->shards[i]);
    memory_free(checkpoint->read_buffer);
    memory_free(checkpoint->shards);
    memory_free(checkpoint->tensors);
    memory_free(checkpoint);
}

static enum status open_shards(struct checkpoint *c, const struct files *files, struct error *error)
{
    void *shards;
    TRY(memory_allocate_array(&shards, files->shards.n, sizeof *c->shards, "the list of shards", error));
    c->shards = shards;
    for (size_t i = 0; i < files->shards.n; i++) {
        c->shards[i].fd = -1;
        c->n_shards++;
        TRY(shard_open(&c->shards[i], files->folder, files->shards.items[i], error));
        c->n_tensors += c->shards[i].n_tensors;
    }
    return STATUS_OK;
}

static int compare_tensors(const void *a, const void *b)
{
    return strcmp(((const struct checkpoint_tensor *)a)->name, ((const struct checkpoint_tensor *)b)->name);
}

/* Moves the shards' lists into one, by name. */
static enum status merge_tensors(struct checkpoint *c, const char *folder, struct error *error)
{
    void *tensors;
    TRY(memory_allocate_array(&tensors, c->n_tensors, sizeof *c->tensors, "the list of tensors", error));
    c->tensors = tensors;
    size_t n = 0;
    for (size_t i = 0; i < c->n_shards; i++) {
        struct shard *shard = &c->shards[i];
        memcpy(c->tensors + n, shard->tensors, shard->n_tensors * sizeof *c->tensors);
        n += shard->n_tensors;
        memory_free(shard->tensors);
        shard->tensors = NULL;
    }
    qsort(c->tensors, n, sizeof *c->tensors, compare_tensors);
    for (size_t i = 1; i < n; i++) {
        char name[128];
        if (compare_tensors(&c->tensors[i - 1], &c->tensors[i]) == 0)
            return error_set(error, STATUS_INPUT, "%s: tensor %s is both in %s and in %s", folder,
                             json_quote(c->tensors[i].name, name, sizeof name), c->tensors[i - 1].file,
                             c->tensors[i].file);
    }
    return STATUS_OK;
}

/* Each entry of the index lies where it says. */
static enum status check_index_entries(const struct checkpoint *c, const struct files *files,
                                       struct error *error)
{
    const cJSON *entry;
    cJSON_ArrayForEach(entry, files->weight_map)
    {
        char name[128];
        const struct checkpoint_tensor *t = checkpoint_find(c, entry->string);
        json_quote(entry->string, name, sizeof name);
        if (t == NULL)
            return error_set(error, STATUS_INPUT, "%s says that tensor %s is in %s, which does not have it",
                             files->index_path, name, entry->valuestring);
        if (strcmp(t->file, entry->valuestring) != 0)
            return error_set(error, STATUS_INPUT, "%s says that tensor %s is in %s, but it is in %s",
                             files->index_path, name, entry->valuestring, t->file);
    }
    return STATUS_OK;
}

static int compare_entries(const void *a, const void *b)
{
    return strcmp((*(const cJSON *const *)a)->string, (*(const cJSON *const *)b)->string);
}

/* After check_index_entries: every tensor is in the index. Both lists are walked by name. */
static enum status check_all_indexed(const struct checkpoint *c, const struct files *files,
                                     struct error *error)
{
    size_t n = (size_t)cJSON_GetArraySize(files->weight_map), i = 0;
    if (n == c->n_tensors) /* no name is twice in either, so these are the same */
        return STATUS_OK;
    void *block;
    TRY(memory_allocate_array(&block, n, sizeof(cJSON *), "the index", error));
    const cJSON **entries = block, *entry;
    cJSON_ArrayForEach(entry, files->weight_map) entries[i++] = entry;
    qsort(entries, n, sizeof *entries, compare_entries);
    for (i = 0; i < n && strcmp(entries[i]->string, c->tensors[i].name) == 0;)
        i++;
    memory_free(block);
    char name[128];
    return error_set(error, STATUS_INPUT, "%s: tensor %s of %s is not in weight_map", files->index_path,
                     json_quote(c->tensors[i].name, name, sizeof name), c->tensors[i].file);
}

/* Only a warning: older files give the size of the model in memory, where tied weights count twice. */
static void compare_total_size(const struct checkpoint *c, const struct files *files)
{
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(files->index, "metadata");
    int64_t stated, total = 0;
    if (!json_get_integer(cJSON_GetObjectItemCaseSensitive(metadata, "total_size"), &stated))
        return;
    for (size_t i = 0; i < c->n_tensors; i++)
        total += (int64_t)c->tensors[i].bytes;
    if (stated != total)
        log_warning("%s: metadata.total_size is %lld, the tensors have %lld bytes", files->index_path,
                    (long long)stated, (long long)total);
}

static enum status open_files(struct checkpoint *c, const struct files *files, struct error *error)
{
    TRY(open_shards(c, files, error));
    TRY(merge_tensors(c, files->folder, error));
    if (files->index == NULL)
        return STATUS_OK;
    TRY(check_index_entries(c, files, error));
    TRY(check_all_indexed(c, files, error));
    compare_total_size(c, files);
    return STATUS_OK;
}

enum status checkpoint_open(const char *folder, struct checkpoint **out, struct error *error)
{
    struct files files = {0};
    struct checkpoint *checkpoint = NULL;
    void *block;
    enum status status;
    TRY_ELSE(find_files(folder, &files, error), finish);
    TRY_ELSE(memory_allocate(&block, sizeof *checkpoint, "a checkpoint", error), finish);
    checkpoint = block;
    TRY_ELSE(open_files(checkpoint, &files, error), finish);
    TRY_ELSE(memory_allocate(&checkpoint->read_buffer, READ_BYTES, "reading ahead", error), finish);
    *out = checkpoint;
    checkpoint = NULL;
finish:
    checkpoint_close(checkpoint);
    files_fini(&files);
    return status;
}

/* ---- tensors ---- */

const struct checkpoint_tensor *checkpoint_find(const struct checkpoint *checkpoint, const char *name)
{
    if (checkpoint->n_tensors == 0)
        return NULL;
    struct checkpoint_tensor key = {.name = name};
    return bsearch(&key, checkpoint->tensors, checkpoint->n_tensors, sizeof key, compare_tensors);
}

int64_t checkpoint_n_tensors(const struct checkpoint *checkpoint)
{
    return (int64_t)checkpoint->n_tensors;
}

const struct checkpoint_tensor *checkpoint_get(const struct checkpoint *checkpoint, int64_t i)
{
    return i < 0 || (size_t)i >= checkpoint->n_tensors ? NULL : &checkpoint->tensors[i];
}

/* "[4, 1, 16]" */
static const char *describe_shape(const int64_t *dims, int n_dims, char *buffer, size_t size)
{
    size_t used = (size_t)snprintf(buffer, size, "[");
    for (int i = 0; i < n_dims && used < size; i++)
        used +=
            (size_t)snprintf(buffer + used, size - used, "%s%lld", i == 0 ? "" : ", ", (long long)dims[i]);
    if (used < size)
        snprintf(buffer + used, size - used, "]");
    return buffer;
}

enum status checkpoint_require(const struct checkpoint *checkpoint, const char *name, const int64_t *dims,
                               int n_dims, const struct checkpoint_tensor **out, struct error *error)
{
    char expected[192], found[192];
    describe_shape(dims, n_dims, expected, sizeof expected);
    const struct checkpoint_tensor *t = checkpoint_find(checkpoint, name);
    if (t == NULL)
        return error_set(error, STATUS_INPUT, "the checkpoint has no tensor %s, expected one of shape %s",
                         name, expected);
    if (t->n_dims != n_dims || (n_dims > 0 && memcmp(t->dims, dims, (size_t)n_dims * sizeof *dims) != 0))
        return error_set(error, STATUS_INPUT, "tensor %s in %s has shape %s, the config's sizes make %s",
                         name, t->file, describe_shape(t->dims, t->n_dims, found, sizeof found), expected);
    if (t->dtype == DTYPE_COUNT || !dtype_is_float(t->dtype))
        return error_set(error, STATUS_INPUT, "tensor %s in %s has dtype %s, expected F32, F16 or BF16", name,
                         t->file, t->dtype_name);
    *out = t;
    return STATUS_OK;
}

static ssize_t read_at(int fd, void *buffer, size_t bytes, size_t offset)
{
    for (;;) {
        ssize_t n = pread(fd, buffer, bytes, (off_t)offset);
        if (n >= 0 || errno != EINTR)
            return n;
    }
}

static const struct shard *find_shard(const struct checkpoint *checkpoint,
                                      const struct checkpoint_tensor *tensor)
{
    for (size_t i = 0; i < checkpoint->n_shards; i++)
        if (checkpoint->shards[i].name == tensor->file)
            return &checkpoint->shards[i];
    return NULL;
}

void checkpoint_prefetch(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor)
{
    const struct shard *shard = find_shard(checkpoint, tensor);
    if (shard == NULL)
        return;
    size_t at = (size_t)((const unsigned char *)tensor->data - shard->bytes), end = at + tensor->bytes;
    while (at < end) {
        ssize_t n =
            read_at(shard->fd, checkpoint->read_buffer, end - at < READ_BYTES ? end - at : READ_BYTES, at);
        if (n <= 0)
            break;
        at += (size_t)n;
    }
}

void checkpoint_release(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor)
{
    const struct shard *shard = find_shard(checkpoint, tensor);
    if (shard == NULL)
        return;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)tensor->data,
              end = begin + tensor->bytes;
    /* Whole pages only: the ones at the ends may hold a neighbour that is still to come. */
    begin = (begin + page - 1) / page * page;
    end = end / page * page;
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_DONTNEED);
}

/* ---- identity ---- */

/* What goes into the digest for each file: its name with the NUL, its size as 8 bytes little-endian, its
 * contents. So no two different sets of files make the same stream. */
struct identity {
    const char *folder;
    XXH3_state_t *state;
    void *buffer; /* READ_BYTES */
    int64_t bytes;
    struct error *error;
};

static enum status hash_contents(struct identity *id, int fd, size_t size, const char *path)
{
    for (size_t at = 0; at < size;) {
        ssize_t n = read_at(fd, id->buffer, size - at < READ_BYTES ? size - at : READ_BYTES, at);
        if (n < 0)
            return error_set_errno(id->error, STATUS_INPUT, errno, "cannot read %s", path);
        if (n == 0)
            return error_set(id->error, STATUS_INPUT,
                             "%s ended at byte %zu, expected %zu: it changed while it was read", path, at,
                             size);
        XXH3_128bits_update(id->state, id->buffer, (size_t)n);
        at += (size_t)n;
    }
    return STATUS_OK;
}

static enum status hash_file(struct identity *id, const char *name)
{
    char path[PATH_MAX];
    int fd;
    size_t size;
    TRY(join_path(path, id->folder, name, id->error));
    TRY(open_file(path, &fd, &size, id->error));
    unsigned char size_bytes[8];
    for (int i = 0; i < 8; i++)
        size_bytes[i] = (unsigned char)(size >> 8 * i);
    XXH3_128bits_update(id->state, name, strlen(name) + 1);
    XXH3_128bits_update(id->state, size_bytes, sizeof size_bytes);
    enum status status = hash_contents(id, fd, size, path);
    close(fd);
    id->bytes += (int64_t)size;
    return status;
}

static enum status hash_files(struct identity *id, const struct files *files)
{
    XXH3_128bits_reset(id->state);
    TRY(hash_file(id, "config.json"));
    if (files->index != NULL)
        TRY(hash_file(id, INDEX_FILE));
    for (size_t i = 0; i < files->shards.n; i++)
        TRY(hash_file(id, files->shards.items[i]));
    return STATUS_OK;
}

static void write_digest(const XXH3_state_t *state, char digest[33])
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
    for (size_t i = 0; i < sizeof canonical.digest; i++)
        snprintf(digest + 2 * i, 3, "%02x", canonical.digest[i]);
}

enum status checkpoint_identify(const char *folder, char digest[33], int64_t *bytes, struct error *error)
{
    struct files files = {0};
    struct identity id = {.folder = folder, .error = error};
    enum status status;
    TRY_ELSE(find_files(folder, &files, error), finish);
    TRY_ELSE(memory_allocate(&id.buffer, READ_BYTES, "reading the checkpoint", error), finish);
    id.state = XXH3_createState();
    if (id.state == NULL)
        TRY_ELSE(error_set(error, STATUS_RESOURCE, "out of memory: the state of a checksum"), finish);
    TRY_ELSE(hash_files(&id, &files), finish);
    write_digest(id.state, digest);
    *bytes = id.bytes;
finish:
    XXH3_freeState(id.state);
    memory_free(id.buffer);
    files_fini(&files);
    return status;
}
