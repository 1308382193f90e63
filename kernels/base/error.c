#include "kernels/base/error.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

__attribute__((format(printf, 4, 0))) static enum status
record(struct error *error, enum status status, const char *tail, const char *format, va_list args)
{
    if (error == NULL || error->status != STATUS_OK)
        return status;
    error->status = status;
    int length = vsnprintf(error->text, sizeof error->text, format, args);
    /* What a message quotes from a broken file may hold anything; a sentence stays one line. */
    for (char *c = error->text; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    }
    if (tail != NULL && length >= 0 && (size_t)length < sizeof error->text)
        snprintf(error->text + length, sizeof error->text - (size_t)length, ": %s", tail);
    return status;
}

enum status error_set(struct error *error, enum status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    record(error, status, NULL, format, args);
    va_end(args);
    return status;
}

enum status error_set_errno(struct error *error, enum status status, int errnum, const char *format, ...)
{
    if (errnum == ENOMEM || errnum == ENOSPC || errnum == EDQUOT || errnum == EFBIG || errnum == EMFILE ||
        errnum == ENFILE)
        status = STATUS_RESOURCE;
    char reason[128];
    /* The XSI strerror_r is not what glibc gives under _GNU_SOURCE; %m would read errno, which cleanup may
     * have set. */
    snprintf(reason, sizeof reason, "%s", strerror(errnum));
    va_list args;
    va_start(args, format);
    record(error, status, reason, format, args);
    va_end(args);
    return status;
}

enum status error_prefix(struct error *error, const char *format, ...)
{
    if (error == NULL)
        return STATUS_BUG;
    char text[sizeof error->text], context[512];
    va_list args;
    va_start(args, format);
    vsnprintf(context, sizeof context, format, args);
    va_end(args);
    snprintf(text, sizeof text, "%s: ", context);
    size_t used = strlen(text);
    snprintf(text + used, sizeof text - used, "%s", error->text);
    memcpy(error->text, text, sizeof text);
    return error->status;
}

void error_clear(struct error *error)
{
    if (error == NULL)
        return;
    error->status = STATUS_OK;
    error->text[0] = '\0';
}

const char *status_name(enum status status)
{
    switch (status) {
    case STATUS_OK:
        return "done";
    case STATUS_USAGE:
        return "bad usage or job file";
    case STATUS_INPUT:
        return "bad input";
    case STATUS_RESOURCE:
        return "out of memory or disk";
    case STATUS_DEVICE:
        return "device error";
    case STATUS_BUG:
        return "internal error";
    case STATUS_STOPPED:
        return "stopped, resumable";
    }
    return "unknown status";
}
