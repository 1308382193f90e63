/* Runs a fuzz target over a folder of inputs and over a number of mutations of each, the same ones every
 * time.
 *
 *   fuzz_<target> FOLDER [mutations of each file, default 200]
 *   fuzz_<target> FILE
 *
 * On a crash the input is in the file that the last line names. */
#include "fuzz.h"

#include <dirent.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct bytes {
    uint8_t *data;
    size_t size;
};

static const struct bytes *running; /* for the signal's handler */
static const char crash_file[] = "fuzz-crash.bin";

static void keep_input(int number)
{
    FILE *file = fopen(crash_file, "wb");
    if (file != NULL && running != NULL) {
        fwrite(running->data, 1, running->size, file);
        fclose(file);
        fprintf(stderr, "signal %d: the input is in %s\n", number, crash_file);
    }
    signal(number, SIG_DFL);
    raise(number);
}

/* On a copy of exactly its size, so that a sanitizer sees a read past its end. */
static void run(const uint8_t *data, size_t size)
{
    struct bytes copy = {malloc(size + (size == 0)), size};
    CHECK(copy.data != NULL);
    if (size > 0)
        memcpy(copy.data, data, size);
    running = &copy;
    LLVMFuzzerTestOneInput(copy.data, copy.size);
    running = NULL;
    free(copy.data);
}

/* xorshift64 (Marsaglia, 2003): the same numbers everywhere. */
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Values at the edges of what parsers count with, and bytes that structure JSON. */
static const uint64_t edges[] = {
    0,          1,          0x7f,       0x80,      0xff,       0x7fff,         0xffff,
    0x7fffffff, 0x80000000, 0xffffffff, INT64_MAX, UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 53};
static const char marks[] = "{}[]\",:-+.eE0919 \\u\n\t";

static size_t below(uint64_t *random, size_t n)
{
    return n == 0 ? 0 : (size_t)(next_random(random) % n);
}

/* One change; `capacity` is what the buffer holds. */
static void mutate(struct bytes *b, size_t capacity, uint64_t *random)
{
    size_t at = below(random, b->size), n = 1 + below(random, 8);
    switch (next_random(random) % 7) {
    case 0: /* a bit */
        if (b->size > 0)
            b->data[at] ^= (uint8_t)(1u << below(random, 8));
        return;
    case 1: /* a byte */
        if (b->size > 0)
            b->data[at] = (uint8_t)next_random(random);
        return;
    case 2: /* an edge value of 1, 2, 4 or 8 bytes */
        n = (size_t)1 << below(random, 4);
        if (b->size >= n)
            memcpy(b->data + below(random, b->size - n + 1),
                   &edges[below(random, sizeof edges / sizeof *edges)], n);
        return;
    case 3: /* fewer bytes inside */
        n = n < b->size - at ? n : b->size - at;
        memmove(b->data + at, b->data + at + n, b->size - at - n);
        b->size -= n;
        return;
    case 4: /* a mark more */
        if (b->size == capacity)
            return;
        memmove(b->data + at + 1, b->data + at, b->size - at);
        b->data[at] = (uint8_t)marks[below(random, sizeof marks - 1)];
        b->size++;
        return;
    case 5: /* a piece twice */
        n = n * 4 < b->size - at ? n * 4 : b->size - at;
        if (b->size + n > capacity)
            return;
        memmove(b->data + at + n, b->data + at, b->size - at);
        b->size += n;
        return;
    default: /* cut off, now and then */
        if (below(random, 4) == 0)
            b->size = at;
    }
}

static void run_mutations(const struct bytes *seed, long n_mutations, uint64_t *random)
{
    size_t capacity = seed->size + 4096;
    uint8_t *data = malloc(capacity);
    CHECK(data != NULL);
    for (long i = 0; i < n_mutations; i++) {
        struct bytes b = {data, seed->size};
        if (seed->size > 0)
            memcpy(data, seed->data, seed->size);
        for (size_t changes = 1 + below(random, 4); changes > 0; changes--)
            mutate(&b, capacity, random);
        run(b.data, b.size);
    }
    free(data);
}

static struct bytes read_file(const char *path)
{
    struct stat info;
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL && fstat(fileno(file), &info) == 0);
    struct bytes b = {malloc((size_t)info.st_size + 1), (size_t)info.st_size};
    CHECK(b.data != NULL && fread(b.data, 1, b.size, file) == b.size);
    fclose(file);
    return b;
}

static void replay_file(const char *path, long n_mutations)
{
    struct bytes seed = read_file(path);
    uint64_t random =
        0x9e3779b97f4a7c15u ^ seed.size; /* of each file its own, so that a new file moves no other */
    run(seed.data, seed.size);
    run_mutations(&seed, n_mutations, &random);
    free(seed.data);
}

static int is_shown(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

static int replay_folder(const char *folder, long n_mutations)
{
    struct dirent **entries;
    int n = scandir(folder, &entries, is_shown, alphasort);
    for (int i = 0; i < n; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        replay_file(path, n_mutations);
        free(entries[i]);
    }
    if (n >= 0)
        free(entries);
    return n;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s FOLDER|FILE [mutations of each file]\n", argv[0]);
        return 2;
    }
    signal(SIGABRT, keep_input);
    signal(SIGSEGV, keep_input);
    signal(SIGBUS, keep_input);
    struct stat info;
    if (stat(argv[1], &info) == 0 && S_ISREG(info.st_mode)) {
        replay_file(argv[1], 0);
        return 0;
    }
    long n_mutations = argc > 2 ? strtol(argv[2], NULL, 10) : 200;
    int n = replay_folder(argv[1], n_mutations);
    printf("%d files of %s, and %ld mutations of each\n", n, argv[1], n_mutations);
    return n > 0 ? 0 : 1; /* an empty corpus tests nothing */
}
