/* Errors: one status and one sentence, written where the fault is seen.
 *
 * A fallible function returns an enum status and takes a struct error * as its last parameter (NULL is
 * allowed: the status is returned, the sentence dropped). Who finds the fault writes the sentence: which
 * file, tensor, key or line, what was found, what was expected. Callers may put context in front
 * (error_prefix), never replace it. The first error wins: error_set leaves a struct that already holds one
 * alone. Out-parameters are written only on success.
 *
 * The values of enum status are the program's exit statuses, so that nothing is ever translated twice.
 * Thread safety: a struct error belongs to one thread at a time. */
#ifndef ACTDUMP_BASE_ERROR_H
#define ACTDUMP_BASE_ERROR_H

#include <stdarg.h>
#include <stddef.h>

enum status {
    STATUS_OK = 0,
    STATUS_USAGE = 2,    /* the command line or the job file is wrong */
    STATUS_INPUT = 3,    /* a checkpoint, corpus or store cannot be used */
    STATUS_RESOURCE = 4, /* out of memory, disk, quota */
    STATUS_DEVICE = 5,   /* the accelerator failed or is not there */
    STATUS_BUG = 6,      /* actdump broke its own promise */
    STATUS_STOPPED = 75  /* a signal or a time limit; the job can be resumed (EX_TEMPFAIL of sysexits.h) */
};

struct error {
    enum status status; /* STATUS_OK while there is none */
    char text[2048];    /* one sentence, no newline at its end */
};

/* Records the first error and returns `status`, so that `return error_set(...)` reads well. */
enum status error_set(struct error *error, enum status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same for a failed system call: appends strerror(errnum). Out of memory, disk, quota, descriptors or a
 * file-size limit give STATUS_RESOURCE whatever `status` says. */
enum status error_set_errno(struct error *error, enum status status, int errnum, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Puts "context: " in front of the recorded sentence. Returns the recorded status. */
enum status error_prefix(struct error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

void error_clear(struct error *error);

/* "bad usage", "bad input", ...: for logs and store.json. */
const char *status_name(enum status status);

/* Returns from the calling function when `call` fails. */
#define TRY(call)                                                                                            \
    do {                                                                                                     \
        enum status try_status_ = (call);                                                                    \
        if (try_status_ != STATUS_OK)                                                                        \
            return try_status_;                                                                              \
    } while (0)

/* Goes to `label` when `call` fails, with the status in the local variable `status`. */
#define TRY_ELSE(call, label)                                                                                \
    do {                                                                                                     \
        status = (call);                                                                                     \
        if (status != STATUS_OK)                                                                             \
            goto label;                                                                                      \
    } while (0)

#endif
