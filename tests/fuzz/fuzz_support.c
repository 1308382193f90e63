#include "fuzz.h"

#include <dirent.h>
#include <string.h>
#include <unistd.h>

void fuzz_check_error(enum status status, enum status expected, const struct error *error)
{
    if (status == STATUS_OK) {
        CHECK(error->status == STATUS_OK && error->text[0] == '\0');
        return;
    }
    if (status != expected && status != STATUS_RESOURCE)
        fprintf(stderr, "status %d: %s\n", (int)status, error->text);
    CHECK(status == expected || status == STATUS_RESOURCE);
    CHECK(error->status == status && error->text[0] != '\0');
}

static char folder[64];

static void remove_folder(void)
{
    DIR *directory = opendir(folder);
    if (directory == NULL)
        return;
    for (struct dirent *entry = readdir(directory); entry != NULL; entry = readdir(directory))
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlinkat(dirfd(directory), entry->d_name, 0);
    closedir(directory);
    rmdir(folder);
}

const char *fuzz_folder(void)
{
    if (folder[0] == '\0') {
        /* In memory where possible: thousands of files are written. */
        const char *root = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        snprintf(folder, sizeof folder, "%s/actdump_fuzz.XXXXXX", root);
        CHECK(mkdtemp(folder) != NULL);
        atexit(remove_folder);
    }
    return folder;
}

const char *fuzz_write_file(const char *name, const uint8_t *data, size_t size)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", fuzz_folder(), name);
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    CHECK(size == 0 || fwrite(data, 1, size, file) == size);
    CHECK(fclose(file) == 0);
    return path;
}
