/* One job at a time on a store. */
#ifndef ACTDUMP_PIPELINE_LOCK_H
#define ACTDUMP_PIPELINE_LOCK_H

#include "kernels/base/error.h"

/* Takes <folder>/store.lock, and says in it who has it. The lock is the kernel's (an open-file-description
 * lock, which NFS passes on to its server), so a job that dies leaves none behind; the file itself stays and
 * means nothing. Refused (STATUS_USAGE) where another process holds it, naming it. *descriptor is what
 * lock_release takes. */
enum status lock_acquire(const char *folder, int *descriptor, struct error *error);
void lock_release(int descriptor); /* -1 is fine */

#endif
