/* A tokenized corpus as a list of sequences.
 *
 * Formats: a Megatron indexed dataset, .npy, bare ids, an HDF5 dataset. A document becomes one sequence, or
 * several windows where it is longer than the context; sources without document bounds are cut every context
 * tokens. Sequences are numbered from 0 after shuffle_seed, start and limit have been applied (in that
 * order): that number is what units, segments and rows/sequence are counted in. Empty documents give no
 * sequence and are counted. A window holds context - n_prepend tokens of its document, whether or not
 * anything is put in front of it, so that where windows lie does not depend on what the tokens are.
 *
 * Files are read with pread into buffers of fixed size, never mapped: a file that shrinks gives an error, not
 * a signal, and memory does not grow with the corpus (half a MiB of marks in it, or 8 bytes for every 1,024
 * documents where that is more). What is read of an index is checked each time. Opening reads a Megatron
 * index once; with pad it reads the ends of every row. Threads: a corpus belongs to one thread. */
#ifndef ACTDUMP_PIPELINE_CORPUS_H
#define ACTDUMP_PIPELINE_CORPUS_H

#include "kernels/base/error.h"

#include <stdbool.h>
#include <stdint.h>

enum corpus_format { CORPUS_MEGATRON, CORPUS_NPY, CORPUS_RAW, CORPUS_HDF5 };

struct corpus_options {
    enum corpus_format format;
    const char *path;    /* absolute or relative to the working directory; megatron: without suffix */
    const char *dataset; /* hdf5: path of the dataset inside the file */
    int raw_bytes;       /* raw: 2 (uint16) or 4 (uint32) */
    int64_t context;     /* tokens of the longest sequence, prepended ones included */
    /* Ids put in front of each sequence, except where its tokens already begin with them. */
    const int32_t *prepend;
    int64_t n_prepend;
    int64_t start; /* sequences skipped; 0: none */
    int64_t limit; /* sequences kept; -1: all */
    /* The id that fills the end or the start of [sequence, context] rows (or of documents): that run is cut
     * off, never a pad id inside. One side only: the end where the row ends with it, else the start. */
    bool has_pad;
    int64_t pad;
    bool has_shuffle;
    uint64_t
        shuffle_seed; /* permutes sequences (with carry: documents), in constant memory (permutation.h) */
    /* Windows of a document go on from one another; nothing is prepended to those that do. Where start falls
     * inside a document, a run begins there: sequence 0 goes on from nothing. */
    bool carry;
};

struct corpus;

struct sequence {
    int64_t index;    /* its number */
    int64_t document; /* in the corpus file, from 0: a document, or a row of a 2-D source, or 0 for an
                         unbounded one */
    int64_t start;    /* token offset in the document of its first token that is not prepended */
    int64_t length;   /* tokens to run, prepended ones included */
    int64_t n_prepended;
    bool continues; /* with carry: goes on from sequence index - 1 (then nothing is prepended) */
};

/* n_ids: rows of the embedding; every id must lie in [0, n_ids). A file that cannot be used is STATUS_INPUT;
 * options that do not fit each other, the embedding or the file (pad where there are no rows) are
 * STATUS_USAGE. No sequences at all is no error here. Returns owned at *out; borrows nothing. */
enum status corpus_open(const struct corpus_options *options, int64_t n_ids, struct corpus **out,
                        struct error *error);
void corpus_close(struct corpus *corpus); /* NULL is fine */

int64_t corpus_n_sequences(const struct corpus *corpus);
int64_t corpus_n_documents(const struct corpus *corpus);
int64_t corpus_n_empty(const struct corpus *corpus);  /* documents without tokens, in the whole file */
int64_t corpus_n_tokens(const struct corpus *corpus); /* in the whole file, padding included */
/* No sequence is longer than this; with carry, no run of a document's windows. Of the whole file, prepended
 * ids included. */
int64_t corpus_longest_run(const struct corpus *corpus);

/* Describes sequence `index`, which must be below corpus_n_sequences. Reads no tokens but the first n_prepend
 * and, with pad, the ends of the row. */
enum status corpus_describe(struct corpus *corpus, int64_t index, struct sequence *out, struct error *error);
/* The same, and its ids, into ids[context]. An id out of range names file, document, position, id and bound.
 */
enum status corpus_read(struct corpus *corpus, int64_t index, struct sequence *out, int32_t *ids,
                        struct error *error);

/* XXH3-128 as hexadecimal digits over the bounds of sequences [0, n) and over the tokens of 256 of them
 * spread evenly (the first and the last included): equal for two corpora of which one is the other grown at
 * its end. Not a full content hash: that would cost a read of the corpus at every start. */
enum status corpus_digest(struct corpus *corpus, int64_t n, char digest[33], struct error *error);

#endif
