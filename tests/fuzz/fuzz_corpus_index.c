/* A Megatron corpus whose .idx is the input; its .bin always has 256 bytes of small ids. */
#include "fuzz_corpus.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char path[256];
    if (path[0] == '\0') {
        uint8_t tokens[256];
        for (size_t i = 0; i < sizeof tokens; i++)
            tokens[i] = i % 2 == 0 ? (uint8_t)(i / 2 % FUZZ_N_IDS) : 0;
        fuzz_write_file("corpus.bin", tokens, sizeof tokens);
        snprintf(path, sizeof path, "%s/corpus", fuzz_folder());
    }
    fuzz_write_file("corpus.idx", data, size);
    struct corpus_options options = {
        .format = CORPUS_MEGATRON, .path = path, .context = FUZZ_CONTEXT, .limit = -1};
    fuzz_read_corpus(&options);
    static const int32_t prepend[] = {7};
    options.prepend = prepend;
    options.n_prepend = 1;
    options.has_shuffle = true;
    options.carry = true;
    fuzz_read_corpus(&options);
    return 0;
}
