/* model.safetensors.index.json beside two good shards, with tensors a and b in the first and c in the second.
 */
#include "engine/safetensors.h"
#include "fuzz.h"
#include "kernels/base/log.h"
#include "kernels/base/memory.h"

#include <string.h>

static void write_shard(const char *name, const char *header)
{
    uint8_t bytes[256] = {0};
    size_t length = strlen(header);
    bytes[0] = (uint8_t)length;
    memcpy(bytes + 8, header, length); /* the data, two bytes, are zeros */
    fuzz_write_file(name, bytes, 8 + length + 2);
}

static void write_shards(void)
{
    log_configure(&(struct log_options){.level = LOG_ERROR, .n_ranks = 1}); /* total_size is warned of */
    write_shard("m-1.safetensors", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                                   "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}");
    write_shard("m-2.safetensors", "{\"c\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int is_ready;
    if (!is_ready)
        write_shards();
    is_ready = 1;
    size_t before = memory_in_use();
    fuzz_write_file("model.safetensors.index.json", data, size);
    struct checkpoint *checkpoint = NULL;
    struct error error = {0};
    enum status status = checkpoint_open(fuzz_folder(), &checkpoint, &error);
    fuzz_check_error(status, STATUS_INPUT, &error);
    if (status == STATUS_OK) {
        CHECK(checkpoint_n_tensors(checkpoint) == 3);
        CHECK(strcmp(checkpoint_find(checkpoint, "b")->file, "m-1.safetensors") == 0);
    }
    checkpoint_close(checkpoint);
    CHECK(memory_in_use() == before);
    return 0;
}
