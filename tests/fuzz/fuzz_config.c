/* A checkpoint's config.json. */
#include "engine/model.h"
#include "fuzz.h"
#include "kernels/base/memory.h"

static void check_model(const struct model *model)
{
    CHECK(model->family != NULL && model->n_layers > 0 && model->blocks != NULL);
    CHECK(model->hidden_size > 0 && model->vocab_size > 0);
    CHECK(model->load_dtype == DTYPE_F32 || model->load_dtype == DTYPE_BF16);
    for (int i = 0; i < model->n_layers; i++) {
        const struct block *block = &model->blocks[i];
        if (block->mixer == MIXER_ATTENTION)
            CHECK(block->n_heads > 0 && model->n_kv_heads > 0 && model->head_dim > 0);
        else
            CHECK(model->mamba_width > 0 && model->state_dim > 0 && model->conv_kernel > 0);
        if (block->feed_forward == FEED_FORWARD_MIXTURE)
            CHECK(model->n_experts > 0 && model->top_k > 0 && model->top_k <= model->n_experts);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t before = memory_in_use();
    fuzz_write_file("config.json", data, size);
    struct model *model = NULL;
    struct error error = {0};
    enum status status = model_open(fuzz_folder(), LOAD_DTYPE_OWN, &model, &error);
    fuzz_check_error(status, STATUS_INPUT, &error);
    CHECK((model != NULL) == (status == STATUS_OK));
    if (model != NULL)
        check_model(model);
    model_close(model);
    CHECK(memory_in_use() == before);
    return 0;
}
