/* Inside job*.c: the parts that reading a job file is made of. All faults are STATUS_USAGE. */
#ifndef ACTDUMP_PIPELINE_JOB_PARTS_H
#define ACTDUMP_PIPELINE_JOB_PARTS_H

#include "engine/json.h"
#include "pipeline/job.h"

/* The largest whole number of a job file: all up to it are exact in a double, and none beyond rounds to it.
 */
#define JOB_MAX_INTEGER 9007199254740991
/* Layers are numbered from 0 to this, and from -1 to minus this from the end. */
#define JOB_MAX_LAYER 999999
/* Token ids are int32. */
#define JOB_MAX_ID 2147483647

/* Writes "file: where.key is <item>, expected <expected>". */
enum status job_fault(const struct json_object *o, const char *key, const cJSON *item, const char *expected,
                      struct error *error);
/* A list of whole numbers within [min, max]. An absent key leaves *out and *n alone. `noun` is what each of
 * them is: "a token id". Returns owned at *out (memory_free). */
enum status job_read_integers(const struct json_object *o, const char *key, int64_t min, int64_t max,
                              const char *noun, int64_t **out, int64_t *n, struct error *error);
/* The same for token ids, from 0. */
enum status job_read_ids(const struct json_object *o, const char *key, int32_t **out, int64_t *n,
                         struct error *error);

/* Applies "a.b=VALUE" settings in order to an object; null removes the key. `source` is the file's name. */
enum status job_apply_sets(cJSON *tree, const char *source, const char *const *sets, int64_t n_sets,
                           struct error *error);

/* The keys "layers", "positions", "skip_first" and "skip_ids" of a capture. What they allocate belongs to the
 * job, after a failure too. */
enum status job_read_layers(const struct json_object *capture, struct layer_selector *out,
                            struct error *error);
enum status job_read_positions(const struct json_object *capture, struct positions *out, struct error *error);

/* Seconds from a number, "S", "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM" or "D-HH:MM:SS". False where it is none.
 */
bool job_parse_duration(const char *text, double *seconds);

#endif
