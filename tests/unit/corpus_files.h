/* Files for tests of the corpus, written byte by byte: nothing here knows how they are read. */
#ifndef ACTDUMP_TESTS_CORPUS_FILES_H
#define ACTDUMP_TESTS_CORPUS_FILES_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <ftw.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

struct bytes {
    unsigned char *data;
    size_t n, capacity;
};

static inline void put_bytes(struct bytes *b, const void *data, size_t n)
{
    if (b->n + n > b->capacity) {
        b->capacity = 2 * (b->n + n) + 64;
        b->data = realloc(b->data, b->capacity);
        assert_non_null(b->data);
    }
    memcpy(b->data + b->n, data, n);
    b->n += n;
}

static inline void put_integer(struct bytes *b, uint64_t value, int width, bool is_big_endian)
{
    for (int i = 0; i < width; i++) {
        unsigned char byte = (unsigned char)(value >> 8 * (is_big_endian ? width - 1 - i : i));
        put_bytes(b, &byte, 1);
    }
}

/* ---- the folder of a test ---- */

static char folder[64];

/* The path of a name in the folder; valid until the test ends. */
static inline const char *file_path(const char *name)
{
    static char paths[64][256];
    char wanted[256];
    snprintf(wanted, sizeof wanted, "%s/%s", folder, name);
    for (size_t i = 0; i < COUNT(paths); i++) {
        bool is_free = strncmp(paths[i], folder, strlen(folder)) != 0; /* or of another test */
        if (is_free)
            memcpy(paths[i], wanted, sizeof wanted);
        if (strcmp(paths[i], wanted) == 0)
            return paths[i];
    }
    fail_msg("too many files in one test");
    return NULL;
}

static inline int make_folder(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/test_corpus_XXXXXX");
    return mkdtemp(folder) == NULL;
}

static inline int remove_one(const char *path, const struct stat *info, int kind, struct FTW *where)
{
    (void)info;
    (void)kind;
    (void)where;
    return remove(path);
}

static inline int remove_folder(void **state)
{
    (void)state;
    return nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* Frees the bytes. */
static inline const char *write_file(const char *name, struct bytes *b)
{
    const char *path = file_path(name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    if (b->n > 0)
        assert_int_equal(fwrite(b->data, 1, b->n, file), b->n);
    assert_int_equal(fclose(file), 0);
    free(b->data);
    *b = (struct bytes){0};
    return path;
}

/* ---- formats ---- */

struct megatron_files {
    uint64_t version; /* 0: 1 */
    int dtype;
    int64_t n_sequences;
    const int32_t *lengths;
    const int64_t *pointers; /* bytes; NULL: end to end */
    int64_t n_bounds;
    const int64_t *bounds;
    const void *magic;                         /* NULL: the right one */
    int64_t claimed_sequences, claimed_bounds; /* 0: as they are */
    size_t extra_bytes;                        /* behind the index */
};

static inline int megatron_width(int dtype)
{
    static const int widths[] = {0, 1, 1, 2, 4, 8, 8, 4, 2};
    return dtype >= 1 && dtype <= 8 ? widths[dtype] : 4;
}

/* The index's bytes. */
static inline struct bytes make_index(const struct megatron_files *m)
{
    struct bytes b = {0};
    put_bytes(&b, m->magic == NULL ? "MMIDIDX\0\0" : m->magic, 9);
    put_integer(&b, m->version == 0 ? 1 : m->version, 8, false);
    put_integer(&b, (uint64_t)m->dtype, 1, false);
    put_integer(&b, (uint64_t)(m->claimed_sequences == 0 ? m->n_sequences : m->claimed_sequences), 8, false);
    put_integer(&b, (uint64_t)(m->claimed_bounds == 0 ? m->n_bounds : m->claimed_bounds), 8, false);
    for (int64_t i = 0; i < m->n_sequences; i++)
        put_integer(&b, (uint64_t)m->lengths[i], 4, false);
    int64_t pointer = 0;
    for (int64_t i = 0; i < m->n_sequences; i++) {
        put_integer(&b, (uint64_t)(m->pointers == NULL ? pointer : m->pointers[i]), 8, false);
        pointer += (int64_t)m->lengths[i] * megatron_width(m->dtype);
    }
    for (int64_t i = 0; i < m->n_bounds; i++)
        put_integer(&b, (uint64_t)m->bounds[i], 8, false);
    for (size_t i = 0; i < m->extra_bytes; i++)
        put_integer(&b, 0, 1, false);
    return b;
}

/* name.idx and name.bin with the ids; the path without suffix. */
static inline const char *write_megatron(const char *name, const struct megatron_files *m, const int64_t *ids,
                                         int64_t n_ids)
{
    char file[80];
    struct bytes index = make_index(m), data = {0};
    for (int64_t i = 0; i < n_ids; i++)
        put_integer(&data, (uint64_t)ids[i], megatron_width(m->dtype), false);
    snprintf(file, sizeof file, "%s.bin", name);
    write_file(file, &data);
    snprintf(file, sizeof file, "%s.idx", name);
    write_file(file, &index);
    return file_path(name);
}

/* A .npy file with that header text, padded as numpy pads it, and then the ids. */
static inline struct bytes make_npy(int major, const char *header, int width, bool is_big_endian,
                                    const int64_t *ids, int64_t n_ids)
{
    struct bytes b = {0};
    size_t start = major == 1 ? 10 : 12, length = strlen(header) + 1;
    length += (64 - (start + length) % 64) % 64;
    put_bytes(&b, "\x93NUMPY", 6);
    put_integer(&b, (uint64_t)major, 2, false);
    put_integer(&b, length, major == 1 ? 2 : 4, false);
    put_bytes(&b, header, strlen(header));
    for (size_t i = strlen(header); i < length - 1; i++)
        put_bytes(&b, " ", 1);
    put_bytes(&b, "\n", 1);
    for (int64_t i = 0; i < n_ids; i++)
        put_integer(&b, (uint64_t)ids[i], width, is_big_endian);
    return b;
}

/* A [rows, width] array of little-endian int64, or [width] where rows is 0. */
static inline const char *write_npy(const char *name, int64_t rows, int64_t width, const int64_t *ids)
{
    char header[128];
    int used = snprintf(header, sizeof header, "{'descr': '<i8', 'fortran_order': False, 'shape': (");
    if (rows == 0)
        snprintf(header + used, sizeof header - (size_t)used, "%lld,), }", (long long)width);
    else
        snprintf(header + used, sizeof header - (size_t)used, "%lld, %lld), }", (long long)rows,
                 (long long)width);
    struct bytes b = make_npy(1, header, 8, false, ids, rows == 0 ? width : rows * width);
    return write_file(name, &b);
}

#endif
