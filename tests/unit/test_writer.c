#include "tests/tools/made_up.h"

#include "pipeline/chunk.h"
#include "pipeline/segment.h"

#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include <cmocka.h>

#include "tests/tools/store_folder.h"

/* ---------------------------------------------------------------- folders */

/* Names in segments/ that are neither "." nor ".."; how many are hidden. */
static int count_files(const char *folder, int *n_hidden)
{
    char path[PATH_BYTES + 16];
    int n = 0;
    snprintf(path, sizeof path, "%s/segments", folder);
    DIR *dir = opendir(path);
    assert_non_null(dir);
    *n_hidden = 0;
    for (const struct dirent *e = readdir(dir); e != NULL; e = readdir(dir)) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        n++;
        *n_hidden += e->d_name[0] == '.';
    }
    closedir(dir);
    return n;
}

static char *read_file(const char *folder, int64_t unit, size_t *length)
{
    char name[64], path[PATH_BYTES + 80];
    store_segment_name(unit, name);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return NULL;
    fseek(file, 0, SEEK_END);
    *length = (size_t)ftell(file);
    rewind(file);
    char *bytes = malloc(*length + 1);
    assert_int_equal(fread(bytes, 1, *length, file), *length);
    fclose(file);
    return bytes;
}

static void assert_same_segment(const char *a, const char *b, int64_t unit)
{
    size_t n = 0, m = 0;
    char *x = read_file(a, unit, &n), *y = read_file(b, unit, &m);
    assert_non_null(x);
    assert_non_null(y);
    assert_int_equal(n, m);
    assert_memory_equal(x, y, n);
    free(x);
    free(y);
}

/* Writes n_units into a new folder and drops their records. */
static enum status write_units(struct made_up *m, const char *folder, int n_threads, int64_t n_units,
                               struct error *error)
{
    struct writer_options options = {.folder = folder, .n_threads = n_threads};
    struct writer *writer = NULL;
    struct segment_record record;
    bool have = true;
    TRY(writer_create(&m->layout, &options, &writer, error));
    enum status status = STATUS_OK;
    for (int64_t u = 0; u < n_units && status == STATUS_OK; u++)
        status = made_up_unit(m, writer, u, made_up_unit_sequences(u), error);
    while (status == STATUS_OK && have) {
        status = writer_collect(writer, true, &record, &have, error);
        if (status == STATUS_OK && have)
            segment_record_fini(&record);
    }
    writer_destroy(writer);
    return status;
}

/* ---------------------------------------------------------------- chunks */

static void test_shuffle_by_hand(void **state)
{
    static const char in[] = "abcdABCD1234xyz";
    char out[16], back[16];
    (void)state;
    chunk_shuffle(out, in, 4, 15); /* three whole elements and three bytes over */
    assert_memory_equal(out, "aA1bB2cC3dD4xyz", 15);
    chunk_unshuffle(back, out, 4, 15);
    assert_memory_equal(back, in, 15);
}

/* What HDF5's own filter 2 leaves in a chunk of `bytes`. */
static void shuffle_by_hdf5(const uint8_t *in, size_t size, size_t bytes, uint8_t *out)
{
    hsize_t n = bytes / size, offset = 0;
    uint32_t mask;
    hid_t access = H5Pcreate(H5P_FILE_ACCESS), creation = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_fapl_core(access, 1 << 16, 0);
    H5Pset_chunk(creation, 1, &n);
    H5Pset_shuffle(creation);
    hid_t file = H5Fcreate("unused", H5F_ACC_TRUNC, H5P_DEFAULT, access),
          space = H5Screate_simple(1, &n, NULL);
    hid_t type = H5Tcreate(H5T_OPAQUE, size);
    hid_t id = H5Dcreate2(file, "x", type, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    assert_true(H5Dwrite(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, in) >= 0);
    assert_true(H5Fflush(file, H5F_SCOPE_LOCAL) >= 0);
    assert_true(H5Dread_chunk(id, H5P_DEFAULT, &offset, &mask, out) >= 0);
    H5Dclose(id);
    H5Tclose(type);
    H5Sclose(space);
    H5Fclose(file);
    H5Pclose(creation);
    H5Pclose(access);
}

static void test_shuffle_is_hdf5s(void **state)
{
    static const size_t sizes[] = {2, 4, 8}, counts[] = {2, 15, 16, 17, 64, 1001};
    uint8_t in[8 * 1001], ours[8 * 1001], theirs[8 * 1001], back[8 * 1001];
    (void)state;
    for (size_t i = 0; i < sizeof in; i++)
        in[i] = (uint8_t)(made_up_mix(1, (int64_t)i, 2) >> 8);
    for (size_t s = 0; s < 3; s++)
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            size_t bytes = sizes[s] * counts[c];
            chunk_shuffle(ours, in, sizes[s], bytes);
            shuffle_by_hdf5(in, sizes[s], bytes, theirs);
            assert_memory_equal(ours, theirs, bytes);
            chunk_unshuffle(back, ours, sizes[s], bytes);
            assert_memory_equal(back, in, bytes);
        }
}

static void test_frames(void **state)
{
    struct chunk_compressor *compressor = NULL;
    struct error error = {0};
    uint8_t in[5000], packed[6000], out[5000];
    size_t n = 0, n_any = 0;
    (void)state;
    for (size_t i = 0; i < sizeof in; i++)
        in[i] = (uint8_t)(made_up_mix(3, (int64_t)i, 1) & 15);
    assert_int_equal(chunk_compressor_create(1, &compressor, NULL), STATUS_OK);
    assert_int_equal(
        chunk_compress(compressor, CHUNK_ANYTHING, packed, sizeof packed, in, sizeof in, &n, NULL),
        STATUS_OK);
    assert_int_equal(chunk_decompress(out, sizeof out, packed, n, NULL), STATUS_OK);
    assert_memory_equal(in, out, sizeof in);
    void *any = chunk_unpack_any(packed, n, &n_any);
    assert_int_equal(n_any, sizeof in);
    assert_memory_equal(any, in, sizeof in);
    free(any);
    for (size_t i = 0; i < n; i++) { /* no flipped bit goes unseen, and none does harm */
        packed[i] ^= 0x10;
        error_clear(&error);
        if (chunk_decompress(out, sizeof out, packed, n, &error) == STATUS_OK)
            fail_msg("byte %zu flipped, and it unpacks", i);
        assert_int_equal(error.status, STATUS_INPUT);
        packed[i] ^= 0x10;
    }
    assert_int_equal(chunk_decompress(out, sizeof out, packed, n - 1, NULL), STATUS_INPUT);
    assert_int_equal(chunk_decompress(out, sizeof out - 1, packed, n, NULL), STATUS_INPUT);
    assert_null(chunk_unpack_any(packed, 3, &n_any));
    chunk_compressor_destroy(compressor);
    chunk_compressor_destroy(NULL);
}

/* zstd's own level 1, as its plain interface has it, with a checksum. */
static size_t pack_plain(int level, const void *from, size_t bytes, void *to, size_t room)
{
    ZSTD_CCtx *context = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, level);
    ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
    size_t n = ZSTD_compress2(context, to, room, from, bytes);
    ZSTD_freeCCtx(context);
    assert_false(ZSTD_isError(n));
    return n;
}

/* Floats of noise take no more than zstd's level 1 makes of them, and a tenth less than they are, which only
 * their exponents' frequencies give; zeros take next to nothing; integers, and floats at other levels, are
 * what zstd makes of them by itself, whatever the same compressor did before. */
static void test_frames_by_content(void **state)
{
    enum { N = 65536, BYTES = N * 4 };
    static float floats[N];
    static uint8_t shuffled[BYTES], packed[BYTES + 8192], plain[BYTES + 8192], out[BYTES];
    size_t n = 0;
    (void)state;
    for (int i = 0; i < N; i++) { /* a sum of four uniform numbers is nearly normal */
        double sum = 0;
        for (int k = 0; k < 4; k++)
            sum += (double)made_up_mix(17, i, k) * 0x1p-24 - 0.5;
        floats[i] = (float)sum;
    }
    for (int level = 1; level <= 3; level += 2) {
        struct chunk_compressor *compressor = NULL;
        assert_int_equal(chunk_compressor_create(level, &compressor, NULL), STATUS_OK);
        for (int round = 0; round < 2; round++) {
            chunk_shuffle(shuffled, floats, 4, BYTES);
            assert_int_equal(
                chunk_compress(compressor, CHUNK_FLOATS, packed, sizeof packed, shuffled, BYTES, &n, NULL),
                STATUS_OK);
            assert_int_equal(chunk_decompress(out, BYTES, packed, n, NULL), STATUS_OK);
            assert_memory_equal(out, shuffled, BYTES);
            size_t n_plain = pack_plain(level, shuffled, BYTES, plain, sizeof plain);
            if (level == 1)
                assert_true(n <= n_plain && n < BYTES * 9 / 10);
            else
                assert_true(n == n_plain && memcmp(packed, plain, n) == 0);

            for (int i = 0; i < N; i++)
                ((uint32_t *)(void *)out)[i] = (uint32_t)(i / 3);
            chunk_shuffle(shuffled, out, 4, BYTES);
            assert_int_equal(
                chunk_compress(compressor, CHUNK_ANYTHING, packed, sizeof packed, shuffled, BYTES, &n, NULL),
                STATUS_OK);
            n_plain = pack_plain(level, shuffled, BYTES, plain, sizeof plain);
            assert_int_equal(n, n_plain);
            assert_memory_equal(packed, plain, n);
        }
        memset(shuffled, 0, BYTES);
        assert_int_equal(
            chunk_compress(compressor, CHUNK_FLOATS, packed, sizeof packed, shuffled, BYTES, &n, NULL),
            STATUS_OK);
        assert_true(n < 200);
        chunk_compressor_destroy(compressor);
    }
}

/* ---------------------------------------------------------------- what is written */

/* One row of a dataset as stored, from the formula. */
static void assert_row(const struct made_up *m, int64_t dataset, int64_t row, const void *found)
{
    const struct dataset *d = &m->datasets[dataset];
    for (int64_t c = 0; c < d->width; c++) {
        float x = made_up_value(m, dataset, row, c), y;
        if (d->dtype == DTYPE_I32) {
            assert_int_equal(((const int32_t *)found)[c], made_up_mix(dataset, row, c) % 1000);
        } else if (d->dtype == DTYPE_F32) {
            memcpy(&y, (const char *)found + c * 4, 4);
            assert_true(x == y || (isnan(x) && isnan(y)));
        } else {
            uint16_t wanted = d->dtype == DTYPE_BF16 ? f32_to_bf16(x) : f32_to_f16(x);
            assert_int_equal(((const uint16_t *)found)[c], wanted);
        }
    }
}

/* Decodes every chunk of one value of a segment without HDF5's filters. */
static int64_t check_chunks(const struct made_up *m, hid_t file, int64_t dataset, int64_t first)
{
    const struct dataset *d = &m->datasets[dataset];
    struct error error = {0};
    int64_t n_rows;
    hid_t id;
    if (segment_open_dataset(file, d, &id, &n_rows, &error) != STATUS_OK)
        fail_msg("%s", error.text);
    int64_t chunk_rows = layout_chunk_rows(d, n_rows);
    size_t bytes = (size_t)(chunk_rows * d->row_bytes);
    char *packed = malloc(chunk_bound(bytes)), *shuffled = malloc(bytes), *plain = malloc(bytes);
    for (int64_t k = 0; k * chunk_rows < n_rows; k++) {
        hsize_t offset[4] = {(hsize_t)(k * chunk_rows)}, size;
        uint32_t mask = 1;
        assert_true(H5Dget_chunk_storage_size(id, offset, &size) >= 0);
        assert_true(H5Dread_chunk(id, H5P_DEFAULT, offset, &mask, packed) >= 0);
        assert_int_equal(mask, 0);
        if (m->layout.compression > 0) {
            assert_int_equal(chunk_decompress(shuffled, bytes, packed, size, NULL), STATUS_OK);
            chunk_unshuffle(plain, shuffled, dtype_size(d->dtype), bytes);
        } else {
            assert_int_equal(size, bytes);
            memcpy(plain, packed, bytes);
        }
        for (int64_t r = 0; r < chunk_rows && k * chunk_rows + r < n_rows; r++)
            assert_row(m, dataset, first + k * chunk_rows + r, plain + r * d->row_bytes);
        for (int64_t i = n_rows - k * chunk_rows; i < chunk_rows; i++) /* padding is zeros */
            for (int64_t b = 0; b < d->row_bytes; b++)
                assert_int_equal(plain[i * d->row_bytes + b], 0);
    }
    free(packed);
    free(shuffled);
    free(plain);
    H5Dclose(id);
    return n_rows;
}

static void check_store(const struct made_up *m, const char *folder, int64_t n_units)
{
    int64_t next[MADE_UP_DATASETS] = {0};
    for (int64_t u = 0; u < n_units; u++) {
        char name[64], path[PATH_BYTES + 80];
        hid_t file;
        store_segment_name(u, name);
        snprintf(path, sizeof path, "%s/%s", folder, name);
        assert_int_equal(hdf5_open(path, &file, NULL), STATUS_OK);
        for (int64_t i = 0; i < MADE_UP_DATASETS; i++)
            if (m->datasets[i].is_value)
                next[i] += check_chunks(m, file, i, next[i]);
        H5Fclose(file);
    }
    for (int64_t i = 0; i < MADE_UP_DATASETS; i++)
        if (m->datasets[i].is_value)
            assert_int_equal(next[i], layout_count_rows(&m->datasets[i], m->n_sequences, m->n_rows));
}

static void test_round_trip(void **state)
{
    (void)state;
    for (int level = 0; level <= 3; level += 3) {
        struct made_up m;
        struct error error = {0};
        char folder[PATH_BYTES];
        make_folder(folder);
        made_up_init(&m, level);
        m.with_nonfinite = true;
        if (write_units(&m, folder, 2, 6, &error) != STATUS_OK)
            fail_msg("%s", error.text);
        check_store(&m, folder, 6);
        remove_folder(folder);
    }
}

static void test_bytes_do_not_depend_on_threads(void **state)
{
    char folders[3][PATH_BYTES];
    (void)state;
    for (int i = 0; i < 3; i++) {
        struct made_up m;
        make_folder(folders[i]);
        made_up_init(&m, 1);
        assert_int_equal(write_units(&m, folders[i], 1 << i, 5, NULL), STATUS_OK);
    }
    for (int i = 1; i < 3; i++)
        for (int64_t u = 0; u < 5; u++)
            assert_same_segment(folders[0], folders[i], u);
    for (int i = 0; i < 3; i++)
        remove_folder(folders[i]);
}

static void test_records(void **state)
{
    struct made_up m;
    struct writer *writer;
    struct segment_record record;
    char folder[PATH_BYTES];
    bool have = true;
    size_t length = 0;
    int n_hidden;
    double waited, compressed, wrote;
    (void)state;
    make_folder(folder);
    made_up_init(&m, 1);
    struct writer_options options = {.folder = folder, .n_threads = 1};
    size_t before = memory_in_use();
    assert_int_equal(writer_create(&m.layout, &options, &writer, NULL), STATUS_OK);
    size_t took = memory_in_use() - before, said = writer_bytes(&m.layout, &options);
    assert_in_range(took, said, said + 1024); /* the headers of two blocks */
    assert_int_equal(writer_collect(writer, true, &record, &have, NULL), STATUS_OK);
    assert_false(have);
    assert_int_equal(made_up_unit(&m, writer, 7, 9, NULL), STATUS_OK);
    assert_int_equal(writer_collect(writer, true, &record, &have, NULL), STATUS_OK);
    assert_true(have);
    free(read_file(folder, 7, &length));
    assert_int_equal(record.unit, 7);
    assert_int_equal(record.first_sequence, 0);
    assert_int_equal(record.n_sequences, 9);
    assert_int_equal(record.n_tokens, m.n_tokens);
    assert_int_equal(record.n_rows[0], m.n_tokens);
    assert_int_equal(record.n_rows[1], m.n_rows[1]);
    assert_int_equal(record.n_rows[2], 0);
    assert_int_equal(record.bytes, length);
    int64_t raw = 0;
    for (int i = 0; i < MADE_UP_DATASETS; i++)
        raw += layout_count_rows(&m.datasets[i], 9, m.n_rows) * m.datasets[i].row_bytes;
    assert_int_equal(record.raw_bytes, raw);
    segment_record_fini(&record);
    writer_times(writer, &waited, &compressed, &wrote);
    assert_true(waited >= 0 && compressed > 0 && wrote > 0);
    writer_destroy(writer);
    assert_int_equal(count_files(folder, &n_hidden), 1);
    assert_int_equal(memory_in_use(), before);
    remove_folder(folder);
}

/* Rows that a caller computes in place, in pieces that cross chunks. */
static void test_reserve(void **state)
{
    struct made_up m;
    struct writer *writer;
    char folder[PATH_BYTES], other[PATH_BYTES];
    (void)state;
    make_folder(folder);
    make_folder(other);
    made_up_init(&m, 1);
    struct writer_options options = {.folder = folder, .n_threads = 2};
    assert_int_equal(writer_create(&m.layout, &options, &writer, NULL), STATUS_OK);
    assert_int_equal(writer_begin(writer, 0, 0, NULL), STATUS_OK);
    uint64_t n_allocated = 0;
    for (int64_t s = 0; s < 9; s++) {
        assert_int_equal(made_up_append_tables(writer, s, NULL), STATUS_OK);
        for (int64_t i = 0; i < MADE_UP_DATASETS; i++) {
            const struct dataset *d = &m.datasets[i];
            int64_t length = made_up_length(s), left = d->rows == ROWS_OF_SEQUENCES ? 1 : length, at = 0;
            if (!d->is_value || d->capture == 2)
                continue;
            if (d->rows == ROWS_OF_CAPTURE && d->capture == 1)
                left = (length + 2) / 3;
            int64_t first = d->rows == ROWS_OF_SEQUENCES ? s : m.n_rows[d->capture];
            n_allocated = memory_allocation_count();
            while (at < left) {
                void *room;
                int64_t n;
                assert_int_equal(writer_reserve(writer, i, left - at, &room, &n, NULL), STATUS_OK);
                assert_in_range(n, 1, left - at);
                for (int64_t k = 0; k < n * d->width; k++) {
                    float x = made_up_value(&m, i, first + at + k / d->width, k % d->width);
                    if (d->source_dtype == DTYPE_F32)
                        ((float *)room)[k] = x;
                    else if (d->source_dtype == DTYPE_BF16)
                        ((uint16_t *)room)[k] = f32_to_bf16(x);
                    else
                        ((int32_t *)room)[k] =
                            (int32_t)(made_up_mix(i, first + at + k / d->width, k % d->width) % 1000);
                }
                assert_int_equal(writer_advance(writer, i, n, NULL), STATUS_OK);
                at += n;
            }
            assert_int_equal(memory_allocation_count(), n_allocated);
        }
        m.n_rows[0] += made_up_length(s);
        m.n_rows[1] += (made_up_length(s) + 2) / 3;
        m.n_tokens += made_up_length(s);
    }
    assert_int_equal(writer_finish(writer, m.n_tokens, NULL), STATUS_OK);
    struct segment_record record;
    bool have;
    assert_int_equal(writer_collect(writer, true, &record, &have, NULL), STATUS_OK);
    segment_record_fini(&record);
    writer_destroy(writer);
    made_up_init(&m, 1);
    assert_int_equal(write_units(&m, other, 1, 1, NULL), STATUS_OK);
    assert_same_segment(folder, other, 0);
    remove_folder(folder);
    remove_folder(other);
}

static void test_abandon(void **state)
{
    struct made_up m;
    struct writer *writer;
    struct segment_record record;
    char folder[PATH_BYTES], other[PATH_BYTES];
    int n_hidden;
    bool have;
    (void)state;
    make_folder(folder);
    make_folder(other);
    made_up_init(&m, 1);
    struct writer_options options = {.folder = folder, .n_threads = 2};
    assert_int_equal(writer_create(&m.layout, &options, &writer, NULL), STATUS_OK);
    assert_int_equal(writer_begin(writer, 3, 0, NULL), STATUS_OK);
    assert_int_equal(made_up_append_sequence(&m, writer, 5, NULL), STATUS_OK);
    writer_abandon(writer);
    writer_abandon(writer); /* nothing to drop */
    made_up_restart(&m);
    assert_int_equal(made_up_unit(&m, writer, 0, 9, NULL), STATUS_OK);
    assert_int_equal(writer_collect(writer, true, &record, &have, NULL), STATUS_OK);
    assert_true(have);
    segment_record_fini(&record);
    assert_int_equal(writer_begin(writer, 1, 9, NULL), STATUS_OK);
    assert_int_equal(made_up_append_sequence(&m, writer, 9, NULL), STATUS_OK);
    writer_destroy(writer); /* in the middle of a unit */
    assert_int_equal(count_files(folder, &n_hidden), 1);
    assert_int_equal(n_hidden, 0);
    made_up_init(&m, 1);
    assert_int_equal(write_units(&m, other, 1, 1, NULL), STATUS_OK);
    assert_same_segment(folder, other, 0);
    remove_folder(folder);
    remove_folder(other);
}

/* ---------------------------------------------------------------- what goes wrong */

static void test_misuse(void **state)
{
    struct made_up m;
    struct writer *writer;
    struct error error = {0};
    char folder[PATH_BYTES];
    int64_t value = 1;
    (void)state;
    make_folder(folder);
    made_up_init(&m, 1);
    struct writer_options options = {.folder = folder, .n_threads = 1};
    assert_int_equal(writer_create(&m.layout, &options, &writer, NULL), STATUS_OK);
    assert_int_equal(writer_finish(writer, 0, NULL), STATUS_BUG);
    assert_int_equal(writer_append(writer, 0, &value, 1, NULL), STATUS_BUG);
    assert_int_equal(writer_begin(writer, 0, 0, NULL), STATUS_OK);
    assert_int_equal(writer_begin(writer, 1, 0, NULL), STATUS_BUG);
    assert_int_equal(writer_append(writer, 0, &value, 1, NULL), STATUS_OK);
    assert_int_equal(writer_finish(writer, 0, &error), STATUS_BUG);
    assert_non_null(strstr(error.text, "sequences/start got 0 rows, sequences/document got 1"));
    writer_destroy(writer);
    writer_destroy(NULL);
    remove_folder(folder);
}

static void test_no_folder(void **state)
{
    struct made_up m;
    struct error error = {0};
    (void)state;
    made_up_init(&m, 1);
    assert_int_equal(write_units(&m, "/tmp/actdump-writer-nowhere", 1, 1, &error), STATUS_RESOURCE);
    assert_non_null(strstr(error.text, "/tmp/actdump-writer-nowhere"));
}

static void test_out_of_memory(void **state)
{
    struct made_up m;
    struct writer *writer = NULL;
    char folder[PATH_BYTES];
    (void)state;
    make_folder(folder);
    made_up_init(&m, 1);
    struct writer_options options = {.folder = folder, .n_threads = 2};
    int64_t n = 0;
    for (enum status status = STATUS_RESOURCE; status != STATUS_OK; n++) {
        memory_fail_at(n);
        status = writer_create(&m.layout, &options, &writer, NULL);
        assert_true(status == STATUS_OK || status == STATUS_RESOURCE);
    }
    memory_fail_at(-1);
    assert_true(n > 2);
    writer_destroy(writer);
    remove_folder(folder);
}

/* Whatever fails, and whenever: what stands under a final name is whole, nothing else is left, and the reason
 * is told. */
static void check_fault(enum writer_fault fault, const char *good)
{
    enum { N_UNITS = 4 };
    enum status status = STATUS_RESOURCE;
    for (int64_t n = 0; status != STATUS_OK; n += fault == WRITER_FAULT_CHUNK && n > 3 ? 23 : 1) {
        struct made_up m;
        struct error error = {0};
        char folder[PATH_BYTES];
        int n_hidden, n_files = 0;
        make_folder(folder);
        made_up_init(&m, 1);
        writer_fail_at(fault, n);
        status = write_units(&m, folder, 2, N_UNITS, &error);
        writer_fail_at(fault, -1);
        if (status != STATUS_OK) {
            assert_int_equal(status, STATUS_RESOURCE);
            assert_non_null(strstr(error.text, folder));
            assert_non_null(
                strstr(error.text, fault == WRITER_FAULT_CHUNK ? "No space left" : "Input/output error"));
        }
        for (int64_t u = 0; u < N_UNITS; u++) {
            size_t length = 0;
            char *bytes = read_file(folder, u, &length);
            n_files += bytes != NULL;
            if (bytes != NULL)
                assert_same_segment(folder, good, u);
            free(bytes);
        }
        assert_int_equal(count_files(folder, &n_hidden), n_files);
        assert_int_equal(n_hidden, 0);
        if (status == STATUS_OK)
            assert_int_equal(n_files, N_UNITS);
        remove_folder(folder);
    }
}

static void test_every_failure(void **state)
{
    struct made_up m;
    char good[PATH_BYTES];
    (void)state;
    make_folder(good);
    made_up_init(&m, 1);
    assert_int_equal(write_units(&m, good, 1, 4, NULL), STATUS_OK);
    for (int fault = 0; fault < WRITER_FAULT_COUNT; fault++)
        check_fault((enum writer_fault)fault, good);
    remove_folder(good);
}

/* The first failure is what every later call says. */
static void test_failure_stays(void **state)
{
    struct made_up m;
    struct writer *writer;
    struct segment_record record;
    struct error error = {0}, again = {0};
    char folder[PATH_BYTES];
    bool have;
    (void)state;
    make_folder(folder);
    made_up_init(&m, 1);
    struct writer_options options = {.folder = folder, .n_threads = 1};
    assert_int_equal(writer_create(&m.layout, &options, &writer, NULL), STATUS_OK);
    writer_fail_at(WRITER_FAULT_SYNC, 0);
    assert_int_equal(made_up_unit(&m, writer, 0, 1, NULL), STATUS_OK);
    assert_int_equal(writer_collect(writer, true, &record, &have, &error), STATUS_RESOURCE);
    assert_non_null(strstr(error.text, "segments/000000.h5"));
    assert_int_equal(writer_begin(writer, 1, 1, &again), STATUS_RESOURCE);
    assert_string_equal(error.text, again.text);
    assert_int_equal(writer_collect(writer, false, &record, &have, NULL), STATUS_RESOURCE);
    writer_destroy(writer);
    writer_fail_at(WRITER_FAULT_SYNC, -1);
    remove_folder(folder);
}

/* The next unit's failure, which comes while this one is synced and named, costs this one nothing. */
static void test_a_failure_spares_the_unit_before(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        struct made_up m;
        struct writer *writer;
        struct segment_record record = {0};
        struct error error = {0};
        char folder[PATH_BYTES];
        bool have = false;
        int n_hidden;
        make_folder(folder);
        made_up_init(&m, 1);
        struct writer_options options = {.folder = folder, .n_threads = 1};
        assert_int_equal(writer_create(&m.layout, &options, &writer, NULL), STATUS_OK);
        writer_fail_at(WRITER_FAULT_CREATE, 1);
        assert_int_equal(made_up_unit(&m, writer, 0, 1, NULL), STATUS_OK);
        made_up_unit(&m, writer, 1, 1, NULL);
        assert_int_equal(writer_collect(writer, true, &record, &have, &error), STATUS_OK);
        assert_true(have);
        assert_int_equal(record.unit, 0);
        segment_record_fini(&record);
        assert_int_equal(writer_collect(writer, true, &record, &have, &error), STATUS_RESOURCE);
        writer_fail_at(WRITER_FAULT_CREATE, -1);
        writer_destroy(writer);
        assert_int_equal(count_files(folder, &n_hidden), 1);
        assert_int_equal(n_hidden, 0);
        remove_folder(folder);
    }
}

/* A real limit on a file's size: HDF5 cannot close the file, and the process goes on all the same. */
static void test_file_size_limit(void **state)
{
    struct rlimit before, limit;
    struct made_up m;
    char good[PATH_BYTES];
    (void)state;
    make_folder(good);
    made_up_init(&m, 1);
    assert_int_equal(write_units(&m, good, 1, 1, NULL), STATUS_OK);
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before);
    size_t length = 0;
    free(read_file(good, 0, &length));
    for (size_t at = 1; at < length; at += length / 9) { /* in chunks, in what follows them, at the close */
        struct error error = {0};
        char folder[PATH_BYTES];
        int n_hidden;
        make_folder(folder);
        made_up_init(&m, 1);
        limit = before;
        limit.rlim_cur = at;
        setrlimit(RLIMIT_FSIZE, &limit);
        enum status status = write_units(&m, folder, 2, 1, &error);
        setrlimit(RLIMIT_FSIZE, &before);
        assert_int_equal(status, STATUS_RESOURCE);
        if (strstr(error.text, "File too large") == NULL)
            fail_msg("at %zu bytes: %s", at, error.text);
        assert_int_equal(count_files(folder, &n_hidden), 0);
        remove_folder(folder);
    }
    signal(SIGXFSZ, SIG_DFL);
    char after[PATH_BYTES];
    make_folder(after);
    made_up_init(&m, 1);
    assert_int_equal(write_units(&m, after, 1, 1, NULL), STATUS_OK);
    assert_same_segment(good, after, 0);
    remove_folder(after);
    remove_folder(good);
}

/* HDF5 keeps what belongs to a file that it could not close. */
const char *__lsan_default_suppressions(void)
{
    return "leak:libhdf5";
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shuffle_by_hand),
        cmocka_unit_test(test_shuffle_is_hdf5s),
        cmocka_unit_test(test_frames),
        cmocka_unit_test(test_frames_by_content),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_records),
        cmocka_unit_test(test_bytes_do_not_depend_on_threads),
        cmocka_unit_test(test_reserve),
        cmocka_unit_test(test_abandon),
        cmocka_unit_test(test_misuse),
        cmocka_unit_test(test_no_folder),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_every_failure),
        cmocka_unit_test(test_failure_stays),
        cmocka_unit_test(test_file_size_limit),
        cmocka_unit_test(test_a_failure_spares_the_unit_before),
    };
    hdf5_start();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
