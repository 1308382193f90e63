/* Processors that this process may use, whatever OpenMP made of them.
 *
 * Where OMP_PROC_BIND or OMP_PLACES is set, as on many clusters, OpenMP binds the program's first thread to
 * one processor before main begins. Asked for the processors that it may run on, that thread then says one;
 * and threads that it starts stay on that one, together. */
#ifndef ACTDUMP_BASE_PROCESSORS_H
#define ACTDUMP_BASE_PROCESSORS_H

#include <stdbool.h>

/* At least 1. */
int processors_count(void);

/* For a thread that is not OpenMP's, when it starts: lets it run wherever the process may. Nothing where
 * threads are not bound. */
void processors_release_thread(void);

/* Whether code that is compiled for AVX2 may run: false, too, where the environment variable ACTDUMP_ISA is
 * "baseline". */
bool processors_have_avx2(void);

#endif
