/* What the op table's rows share: two backends, the CPU's and the one under test, that get the same bytes and
 * are asked for the same operation.
 *
 * Tensors lie between guard zones in the backends' own memory; guards, and the gaps between columns and
 * stride, must be as they were after the operation. Host-side lists (runs, row lists) are scribbled over as
 * soon as an operation has returned, since a backend may not go on reading them.
 *
 * Include after cmocka.h. */
#ifndef ACTDUMP_TESTS_OP_PAIR_H
#define ACTDUMP_TESTS_OP_PAIR_H

#include "kernels/backend.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])
#define GUARD_BYTES 256
#define GUARD_BYTE 0x5a

struct pair {
    struct backend *reference, *tested;
    uint64_t random;
    char row[160]; /* of the table, for messages */
};

/* The same tensor in both backends. */
struct twin {
    struct pair *pair;
    struct tensor reference, tested;
    unsigned char *before, *after; /* host copies of the whole block: as uploaded, and as downloaded last */
    void *block[2];
    size_t bytes; /* of a block, guards included */
    size_t data_at;
};

/* gap: elements between rows. shift: elements that the first one lies away from a 256-byte boundary, so that
 * wide loads are and are not possible. */
struct twin_shape {
    enum dtype dtype;
    int64_t rows, cols, gap, shift;
};

struct twin twin_create(struct pair *pair, struct twin_shape shape); /* data filled with not-a-numbers */
struct twin twin_random(struct pair *pair, struct twin_shape shape, double mean, double deviation);
void twin_upload(struct twin *twin); /* after a change of `before` */
void twin_destroy(struct twin *twin);
float twin_get(const struct twin *twin, const unsigned char *block, int64_t row, int64_t col);
void twin_set(struct twin *twin, int64_t row, int64_t col, float value);

/* Downloads both and compares: |tested - reference| within absolute + relative * |reference|, half a unit in
 * the last place of bfloat16 on top where that is the dtype (twice, since both round), and the mean square
 * error within 1e-6 of the mean square (1e-4 for bfloat16). Not-a-numbers and infinities must be the same. */
void twin_check(struct twin *twin, const char *what, double absolute, double relative);
/* Bit for bit. */
void twin_check_same(struct twin *twin, const char *what);

double pair_uniform(struct pair *pair);
double pair_normal(struct pair *pair);
void pair_synchronize(struct pair *pair);
void pair_note(struct pair *pair, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Runs of the given lengths (0 ends the list), end to end. */
struct run_table {
    struct run list[16];
    struct runs runs;
    int64_t n_tokens;
};
void run_table_make(struct run_table *table, const int *lengths, bool carry_in, bool carry_out);
/* Every `every`-th row from `first` on. Owned: free(list.index). */
struct row_list rows_make(int64_t n_tokens, int64_t first, int64_t every);
/* Overwrites what an operation may no longer read. */
void scribble(void *memory, size_t bytes);

#endif
