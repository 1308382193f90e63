/* Inside corpus*.c: what a file format gives, and reading files piece by piece.
 *
 * A source is a list of documents of tokens as the file holds them; windows, padding, order and the check of
 * ids are corpus.c's. All faults of files are STATUS_INPUT and name the file and the entry. */
#ifndef ACTDUMP_PIPELINE_CORPUS_SOURCE_H
#define ACTDUMP_PIPELINE_CORPUS_SOURCE_H

#include "pipeline/corpus.h"

#include <stddef.h>

/* ---- files ---- */

/* A regular file, open for reading. */
struct corpus_file {
    int fd; /* -1: none */
    char *path;
    int64_t size; /* when it was opened */
};

enum status corpus_file_open(const char *path, struct corpus_file *file, struct error *error);
void corpus_file_close(struct corpus_file *file); /* one that was never opened must have fd -1 or path NULL */

/* A place in a file that is read from mostly forwards: it reads ahead, by more and more as long as it is
 * followed, and by little where it is sent elsewhere. Several may read one file. */
struct corpus_stream {
    const struct corpus_file *file; /* borrowed */
    unsigned char *buffer;
    int64_t at, held; /* bytes [at, at + held) of the file are in the buffer */
    int64_t ahead;    /* how much to read next */
};

enum status corpus_stream_init(struct corpus_stream *stream, const struct corpus_file *file,
                               struct error *error);
void corpus_stream_fini(struct corpus_stream *stream); /* a zeroed one is fine */
/* n bytes from `offset`. A file that ends before them is an error that names both. */
enum status corpus_stream_read(struct corpus_stream *stream, int64_t offset, int64_t n, void *to,
                               struct error *error);

/* How a file spells an integer. */
struct integer_type {
    int bytes; /* 1, 2, 4 or 8 */
    bool is_signed, is_big_endian;
};

/* n integers from `offset`, as int64; unsigned ones above INT64_MAX come out negative. */
enum status corpus_stream_read_integers(struct corpus_stream *stream, struct integer_type type,
                                        int64_t offset, int64_t n, int64_t *to, struct error *error);

/* ---- sources ---- */

struct corpus_source;

struct corpus_source_functions {
    /* Tokens of a document; not called where width says it. What it reads of an index, it checks. */
    enum status (*length)(struct corpus_source *source, int64_t document, int64_t *length,
                          struct error *error);
    /* Tokens [offset, offset + n) of a document, which has them. */
    enum status (*read)(struct corpus_source *source, int64_t document, int64_t offset, int64_t n,
                        int64_t *ids, struct error *error);
    void (*close)(struct corpus_source *source);
};

/* The first member of each format's own struct. */
struct corpus_source {
    const struct corpus_source_functions *functions;
    const char *path; /* of the file that holds the tokens, for messages */
    int64_t n_documents;
    int64_t width;    /* tokens of every document where all have as many; -1: they differ */
    bool is_bounded;  /* documents are documents or rows; false: one run of tokens */
    bool is_unsigned; /* a negative id is one above INT64_MAX */
};

/* Each returns owned at *out (functions->close). */
enum status corpus_open_megatron(const char *path, struct corpus_source **out, struct error *error);
enum status corpus_open_npy(const char *path, struct corpus_source **out, struct error *error);
enum status corpus_open_raw(const char *path, int token_bytes, struct corpus_source **out,
                            struct error *error);
enum status corpus_open_hdf5(const char *path, const char *dataset, struct corpus_source **out,
                             struct error *error);

#endif
