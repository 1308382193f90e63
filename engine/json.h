/* Reading JSON files that others wrote: cJSON with what it lacks.
 *
 * Accepts bare NaN, Infinity and -Infinity (older Hugging Face configs have them) and {"__float__":
 * "Infinity"} (newer ones) where a number is read, and a byte order mark. Refuses everything else that is not
 * JSON (RFC 8259), duplicate keys, \u0000, trailing text, files over a limit and nesting that cJSON refuses,
 * with line and column. Numbers are read from cJSON's double, exact for integers up to 2^53. Look keys up
 * with cJSON_GetObjectItemCaseSensitive only. Thread safety: all functions may be called from any thread; a
 * tree belongs to one thread at a time. */
#ifndef ACTDUMP_ENGINE_JSON_H
#define ACTDUMP_ENGINE_JSON_H

#include "kernels/base/error.h"

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#define JSON_MAX_BYTES ((size_t)256 << 20) /* of a file that json_read_file takes */
#define JSON_MAX_VALUES 16000000           /* of one text; cJSON spends 64 bytes on each */

/* Parses `length` bytes. `source` names them in errors; `status` is what a fault in them is (STATUS_USAGE for
 * a job file, STATUS_INPUT for a checkpoint's). Returns owned at *out (cJSON_Delete). */
enum status json_parse(const char *text, size_t length, const char *source, enum status status, cJSON **out,
                       struct error *error);
enum status json_read_file(const char *path, enum status status, cJSON **out, struct error *error);
/* The whole file, NUL-terminated, owned by the caller (memory_free). Refuses more than max_bytes. */
enum status json_read_text(const char *path, size_t max_bytes, enum status status, char **text,
                           size_t *length, struct error *error);

/* A number, bare or as {"__float__": ...}. Returns false where the item is neither. */
bool json_get_number(const cJSON *item, double *out);
/* A number that is a whole one within +-2^53. */
bool json_get_integer(const cJSON *item, int64_t *out);

/* One object being read: what every complaint names. */
struct json_object {
    const cJSON *object;
    const char *source; /* the file */
    const char *where;  /* "captures.residuals", "" at the top */
    enum status status; /* of a fault */
};

/* Fetches a key of the wanted type. A missing key or a null gives the default, unless `required`. A wrong
 * type or a number outside [min, max] is an error that names file, key, what was found and what was expected.
 */
enum status json_get_int(const struct json_object *o, const char *key, bool required, int64_t min,
                         int64_t max, int64_t *inout, struct error *error);
enum status json_get_double(const struct json_object *o, const char *key, bool required, double min,
                            double max, double *inout, struct error *error);
enum status json_get_bool(const struct json_object *o, const char *key, bool required, bool *inout,
                          struct error *error);
/* Borrows the string from the object. */
enum status json_get_string(const struct json_object *o, const char *key, bool required, const char **inout,
                            struct error *error);
/* Fails on the first key that is not in the NULL-terminated list, naming the nearest that is. */
enum status json_check_keys(const struct json_object *o, const char *const *known, struct error *error);
/* "a number (3)", "a string (\"x\")", "null": what was found, for messages. Writes to and returns `buffer`.
 */
const char *json_describe(const cJSON *item, char *buffer, size_t size);
/* `text` in double quotes, fit for one line of a message: control characters become '?', a long one is cut
 * ("..."). Writes to and returns `buffer` (size at least 8). */
const char *json_quote(const char *text, char *buffer, size_t size);
/* The candidate nearest to `word` by edit distance; NULL for an empty list. */
const char *json_nearest(const char *word, const char *const *candidates);

#endif
