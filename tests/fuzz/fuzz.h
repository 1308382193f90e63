/* What the fuzz targets share. Each target is one LLVMFuzzerTestOneInput: linked with replay.c it runs over
 * its corpus in ctest; built by clang with ACTDUMP_LIBFUZZER it is a libFuzzer program.
 *
 * A target asks more than not to crash: see CHECK. */
#ifndef ACTDUMP_TESTS_FUZZ_H
#define ACTDUMP_TESTS_FUZZ_H

#include "kernels/base/error.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What must hold for any input; aborts, which both drivers report with the input. */
#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);                   \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

/* A refusal is the status that bad input of this kind has (or no memory), and a sentence. */
void fuzz_check_error(enum status status, enum status expected, const struct error *error);

/* A folder of this process, removed at its end. Writes one file into it and returns its path, which the next
 * call for the same name returns too. */
const char *fuzz_folder(void);
const char *fuzz_write_file(const char *name, const uint8_t *data, size_t size);

#endif
