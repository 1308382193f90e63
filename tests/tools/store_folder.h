/* A folder of a test's own that segments can be written into. Included after cmocka.h. */
#ifndef ACTDUMP_TESTS_STORE_FOLDER_H
#define ACTDUMP_TESTS_STORE_FOLDER_H

#include "pipeline/store.h"

#include <stdio.h>
#include <stdlib.h>

enum { PATH_BYTES = 512 };

static inline void make_folder(char path[PATH_BYTES])
{
    snprintf(path, PATH_BYTES, "/tmp/actdump-test-XXXXXX");
    assert_non_null(mkdtemp(path));
    assert_int_equal(store_make_folders(path, NULL), STATUS_OK);
}

static inline void remove_folder(const char *path)
{
    char command[PATH_BYTES + 16];
    snprintf(command, sizeof command, "rm -rf '%.500s'", path);
    assert_int_equal(system(command), 0);
}

#endif
