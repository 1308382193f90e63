/* A corpus in a .npy file, with padding and without. */
#include "fuzz_corpus.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *path = fuzz_write_file("corpus.npy", data, size);
    struct corpus_options options = {
        .format = CORPUS_NPY, .path = path, .context = FUZZ_CONTEXT, .limit = -1, .start = 1};
    fuzz_read_corpus(&options);
    options.has_pad = true;
    options.start = 0;
    fuzz_read_corpus(&options);
    return 0;
}
