/* The checks of one safetensors file. The input is taken twice: as a whole file, and as a header alone, whose
 * length is put in front and whose last byte says how many bytes of data follow; so that a mutation is not
 * mostly stopped by the length. */
#include "engine/safetensors.h"
#include "fuzz.h"
#include "kernels/base/memory.h"

#include <string.h>

static void check(const uint8_t *bytes, size_t size)
{
    size_t before = memory_in_use();
    struct error error = {0};
    int64_t n_tensors = -1;
    enum status status = checkpoint_check_bytes(bytes, size, "x.safetensors", &n_tensors, &error);
    fuzz_check_error(status, STATUS_INPUT, &error);
    CHECK(strchr(error.text, '\n') == NULL);
    CHECK((n_tensors >= 0) == (status == STATUS_OK));
    CHECK(memory_in_use() == before);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    check(data, size);
    if (size == 0)
        return 0;
    size_t header = size - 1, n_data = data[size - 1];
    uint8_t *file = malloc(8 + header + n_data);
    CHECK(file != NULL);
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)(header >> 8 * i);
    memcpy(file + 8, data, header);
    memset(file + 8 + header, 0x55, n_data);
    check(file, 8 + header + n_data);
    free(file);
    return 0;
}
