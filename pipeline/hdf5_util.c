#include "pipeline/hdf5_util.h"

#include "pipeline/chunk.h"
#include "pipeline/layout.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* ---------------------------------------------------------------- errors */

/* Why HDF5 failed, kept from the first failure of this thread until somebody asks: the next call of any HDF5
 * function, such as one that cleans up, empties the library's own stack. */
struct reason {
    int errnum;
    char text[256];
};

static _Thread_local struct reason reason;

static herr_t take_reason(unsigned n, const H5E_error2_t *entry, void *context)
{
    (void)context;
    if (entry->desc == NULL)
        return 0;
    if (n == 0) {
        snprintf(reason.text, sizeof reason.text, "%s", entry->desc);
        /* what follows is the time and addresses, of no use to who reads it */
        char *cut = strstr(reason.text, ": time = ");
        if (cut != NULL)
            *cut = '\0';
    }
    const char *number = strstr(entry->desc, "errno = ");
    if (number != NULL && reason.errnum == 0)
        reason.errnum = (int)strtol(number + strlen("errno = "), NULL, 10);
    return 0;
}

/* HDF5 calls this at the end of every function that fails. */
static herr_t note_failure(hid_t stack, void *context)
{
    if (reason.errnum == 0 && reason.text[0] == '\0')
        H5Ewalk2(stack, H5E_WALK_UPWARD, take_reason, context);
    return 0;
}

int hdf5_errno(void)
{
    return reason.errnum;
}

void hdf5_forget(void)
{
    reason = (struct reason){0};
}

enum status hdf5_error(struct error *error, enum status status, const char *format, ...)
{
    struct reason why = reason;
    char sentence[1536];
    hdf5_forget();
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    if (why.errnum != 0)
        return error_set_errno(error, status, why.errnum, "%s", sentence);
    if (why.text[0] == '\0')
        return error_set(error, status, "%s", sentence);
    return error_set(error, status, "%s: HDF5 says \"%s\"", sentence, why.text);
}

/* ---------------------------------------------------------------- start */

/* HDF5 hands over a malloc'ed buffer and takes one back in its place; 0 is failure. */
static size_t zstd_filter(unsigned flags, size_t n_values, const unsigned values[], size_t bytes,
                          size_t *room, void **buffer)
{
    if ((flags & H5Z_FLAG_REVERSE) == 0) {
        struct chunk_compressor *compressor = NULL;
        size_t bound = chunk_bound(bytes), packed = 0;
        void *out = malloc(bound);
        int level = n_values > 0 ? (int)values[0] : 1;
        if (out == NULL || chunk_compressor_create(level, &compressor, NULL) != STATUS_OK ||
            chunk_compress(compressor, CHUNK_ANYTHING, out, bound, *buffer, bytes, &packed, NULL) !=
                STATUS_OK) {
            free(out);
            packed = 0;
        } else {
            free(*buffer);
            *buffer = out;
            *room = bound;
        }
        chunk_compressor_destroy(compressor);
        return packed;
    }
    size_t size = 0;
    void *out = chunk_unpack_any(*buffer, bytes, &size);
    if (out == NULL)
        return 0;
    free(*buffer);
    *buffer = out;
    *room = size;
    return size;
}

static const H5Z_class2_t zstd_class = {.version = H5Z_CLASS_T_VERS,
                                        .id = STORE_FILTER_ZSTD,
                                        .encoder_present = 1,
                                        .decoder_present = 1,
                                        .name = "zstd",
                                        .filter = zstd_filter};

static void start_library(void)
{
    H5dont_atexit();
    H5Zregister(&zstd_class);
}

void hdf5_start(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start_library);
    H5Eset_auto2(H5E_DEFAULT, note_failure, NULL); /* the stack is the thread's own */
}

/* ---------------------------------------------------------------- types */

/* A float16 or bfloat16: IEEE's layout with other widths. */
static hid_t create_half(size_t exponent_bits, size_t bias)
{
    hid_t type = H5Tcopy(H5T_IEEE_F32LE);
    size_t fraction_bits = 15 - exponent_bits;
    /* fields first, then the size: a type may not be cut below its fields */
    if (type >= 0 && H5Tset_fields(type, 15, fraction_bits, exponent_bits, 0, fraction_bits) >= 0 &&
        H5Tset_ebias(type, bias) >= 0 && H5Tset_precision(type, 16) >= 0 && H5Tset_size(type, 2) >= 0)
        return type;
    if (type >= 0)
        H5Tclose(type);
    return H5I_INVALID_HID;
}

hid_t hdf5_type_create(enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_F32:
        return H5Tcopy(H5T_IEEE_F32LE);
    case DTYPE_BF16:
        return create_half(8, 127);
    case DTYPE_F16:
        return create_half(5, 15);
    case DTYPE_I32:
        return H5Tcopy(H5T_STD_I32LE);
    case DTYPE_I64:
        return H5Tcopy(H5T_STD_I64LE);
    case DTYPE_COUNT:
        break;
    }
    return H5I_INVALID_HID;
}

bool hdf5_type_match(hid_t type, enum dtype *out)
{
    for (int i = 0; i < DTYPE_COUNT; i++) {
        hid_t ours = hdf5_type_create((enum dtype)i);
        htri_t equal = H5Tequal(type, ours);
        H5Tclose(ours);
        if (equal > 0) {
            *out = (enum dtype)i;
            return true;
        }
    }
    return false;
}

/* ---------------------------------------------------------------- files and groups */

hid_t hdf5_access_create(void)
{
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    if (access < 0)
        return access;
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
    H5Pset_file_locking(access, 0, 1);
    H5Pset_meta_block_size(access, 64 * 1024);
    return access;
}

enum status hdf5_open(const char *path, hid_t *file, struct error *error)
{
    hid_t access = hdf5_access_create();
    hid_t id = H5Fopen(path, H5F_ACC_RDONLY, access);
    H5Pclose(access);
    if (id < 0)
        return hdf5_error(error, STATUS_INPUT, "%s cannot be opened as an HDF5 file", path);
    *file = id;
    return STATUS_OK;
}

enum status hdf5_create(const char *path, hid_t *file, struct error *error)
{
    hid_t access = hdf5_access_create(), creation = H5Pcreate(H5P_FILE_CREATE);
    H5Pset_obj_track_times(creation, 0);
    hid_t id = H5Fcreate(path, H5F_ACC_TRUNC, creation, access);
    H5Pclose(access);
    H5Pclose(creation);
    if (id < 0)
        return hdf5_error(error, STATUS_RESOURCE, "%s cannot be created", path);
    *file = id;
    return STATUS_OK;
}

static enum status make_one_group(hid_t file, const char *path, struct error *error)
{
    htri_t there = H5Lexists(file, path, H5P_DEFAULT);
    if (there > 0)
        return STATUS_OK;
    hid_t creation = H5Pcreate(H5P_GROUP_CREATE);
    H5Pset_obj_track_times(creation, 0);
    hid_t group = there < 0 ? H5I_INVALID_HID : H5Gcreate2(file, path, H5P_DEFAULT, creation, H5P_DEFAULT);
    H5Pclose(creation);
    if (group < 0 || H5Gclose(group) < 0)
        return hdf5_error(error, STATUS_RESOURCE, "group %s cannot be made", path);
    return STATUS_OK;
}

enum status hdf5_make_group(hid_t file, const char *path, struct error *error)
{
    char prefix[512];
    for (size_t i = 1; i <= strlen(path); i++) {
        if (path[i] != '/' && path[i] != '\0')
            continue;
        if (i >= sizeof prefix)
            return error_set(error, STATUS_BUG, "the group name %.64s... is too long", path);
        memcpy(prefix, path, i);
        prefix[i] = '\0';
        TRY(make_one_group(file, prefix, error));
    }
    return STATUS_OK;
}

/* ---------------------------------------------------------------- attributes */

static enum status set_attribute(hid_t object, const char *name, hid_t type, hid_t space, const void *value,
                                 struct error *error)
{
    hid_t attribute = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    bool good = attribute >= 0 && H5Awrite(attribute, type, value) >= 0;
    good = (attribute < 0 || H5Aclose(attribute) >= 0) && good;
    return good ? STATUS_OK : hdf5_error(error, STATUS_RESOURCE, "attribute %s cannot be written", name);
}

static enum status set_scalar(hid_t object, const char *name, hid_t type, const void *value,
                              struct error *error)
{
    hid_t space = H5Screate(H5S_SCALAR);
    enum status status = set_attribute(object, name, type, space, value, error);
    H5Sclose(space);
    return status;
}

static hid_t create_string_type(H5T_cset_t charset)
{
    hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, H5T_VARIABLE);
    H5Tset_cset(type, charset);
    return type;
}

enum status hdf5_set_string(hid_t object, const char *name, const char *text, struct error *error)
{
    hid_t type = create_string_type(H5T_CSET_UTF8);
    enum status status = set_scalar(object, name, type, &text, error);
    H5Tclose(type);
    return status;
}

enum status hdf5_set_int(hid_t object, const char *name, int64_t value, struct error *error)
{
    return set_scalar(object, name, H5T_STD_I64LE, &value, error);
}

enum status hdf5_set_double(hid_t object, const char *name, double value, struct error *error)
{
    return set_scalar(object, name, H5T_IEEE_F64LE, &value, error);
}

enum status hdf5_set_labels(hid_t dataset, const char *const *labels, int n, struct error *error)
{
    hsize_t size = (hsize_t)n;
    hid_t type = create_string_type(H5T_CSET_ASCII), space = H5Screate_simple(1, &size, NULL);
    enum status status = set_attribute(dataset, "DIMENSION_LABELS", type, space, labels, error);
    H5Sclose(space);
    H5Tclose(type);
    return status;
}

/* Opens a scalar attribute of the class wanted; negative where there is none such. */
static hid_t open_scalar(hid_t object, const char *name, H5T_class_t wanted, struct error *error)
{
    hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
    if (attribute < 0) {
        hdf5_error(error, STATUS_INPUT, "attribute %s is missing", name);
        return attribute;
    }
    hid_t type = H5Aget_type(attribute), space = H5Aget_space(attribute);
    bool good = H5Tget_class(type) == wanted && H5Sget_simple_extent_npoints(space) == 1;
    H5Tclose(type);
    H5Sclose(space);
    if (good)
        return attribute;
    H5Aclose(attribute);
    error_set(error, STATUS_INPUT, "attribute %s is not one %s", name,
              wanted == H5T_INTEGER ? "integer" : (wanted == H5T_FLOAT ? "float" : "string"));
    return H5I_INVALID_HID;
}

static enum status get_scalar(hid_t object, const char *name, H5T_class_t wanted, hid_t type, void *out,
                              struct error *error)
{
    hid_t attribute = open_scalar(object, name, wanted, error);
    if (attribute < 0)
        return STATUS_INPUT;
    herr_t code = H5Aread(attribute, type, out);
    H5Aclose(attribute);
    return code < 0 ? hdf5_error(error, STATUS_INPUT, "attribute %s cannot be read", name) : STATUS_OK;
}

enum status hdf5_get_int(hid_t object, const char *name, int64_t *out, struct error *error)
{
    return get_scalar(object, name, H5T_INTEGER, H5T_NATIVE_INT64, out, error);
}

enum status hdf5_get_double(hid_t object, const char *name, double *out, struct error *error)
{
    return get_scalar(object, name, H5T_FLOAT, H5T_NATIVE_DOUBLE, out, error);
}

enum status hdf5_get_string(hid_t object, const char *name, char *out, size_t size, struct error *error)
{
    hid_t attribute = open_scalar(object, name, H5T_STRING, error);
    if (attribute < 0)
        return STATUS_INPUT;
    hid_t stored = H5Aget_type(attribute), type = create_string_type(H5Tget_cset(stored));
    char *text = NULL;
    bool variable = H5Tis_variable_str(stored) > 0;
    bool good = variable && H5Aread(attribute, type, &text) >= 0 && text != NULL;
    if (good)
        snprintf(out, size, "%s", text);
    H5free_memory(text);
    H5Tclose(type);
    H5Tclose(stored);
    H5Aclose(attribute);
    return good ? STATUS_OK : hdf5_error(error, STATUS_INPUT, "attribute %s cannot be read", name);
}
