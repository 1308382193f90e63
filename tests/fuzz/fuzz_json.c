/* engine/json.h: any bytes as a text. What is accepted must survive being printed and read again. */
#include "engine/json.h"
#include "fuzz.h"
#include "kernels/base/memory.h"

#include <math.h>
#include <string.h>

static void read_values(const cJSON *tree)
{
    static const char *const known[] = {"a", "dtype", "checkpoint", NULL};
    struct json_object o = {tree, "x.json", "x", STATUS_INPUT};
    struct error error = {0};
    fuzz_check_error(json_check_keys(&o, known, &error), STATUS_INPUT, &error);
    const cJSON *item;
    cJSON_ArrayForEach(item, tree)
    {
        char text[64];
        double number = 0;
        int64_t whole = 0;
        CHECK(json_describe(item, text, sizeof text)[0] != '\0');
        CHECK(!json_get_integer(item, &whole) || (json_get_number(item, &number) && (double)whole == number));
        if (item->string == NULL)
            continue;
        const char *string = NULL;
        CHECK(json_nearest(item->string, known) != NULL);
        error_clear(&error);
        fuzz_check_error(json_get_string(&o, item->string, true, &string, &error), STATUS_INPUT, &error);
        CHECK(!cJSON_IsString(item) || string == item->valuestring);
        error_clear(&error);
        enum status status = json_get_double(&o, item->string, true, -1, 1, &number, &error);
        fuzz_check_error(status, STATUS_INPUT, &error);
        CHECK(status != STATUS_OK || fabs(number) <= 1);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t before = memory_in_use();
    cJSON *tree = NULL;
    struct error error = {0};
    enum status status = json_parse((const char *)data, size, "x.json", STATUS_INPUT, &tree, &error);
    fuzz_check_error(status, STATUS_INPUT, &error);
    CHECK(strchr(error.text, '\n') == NULL);
    CHECK(memory_in_use() == before);
    CHECK((tree != NULL) == (status == STATUS_OK));
    if (tree == NULL)
        return 0;
    read_values(tree);
    char *printed = cJSON_PrintUnformatted(tree);
    cJSON *again = NULL;
    /* 1e999 reads as an infinity, which cJSON prints as null; so the trees may differ, but never fail. */
    CHECK(printed != NULL);
    CHECK(json_parse(printed, strlen(printed), "again", STATUS_INPUT, &again, NULL) == STATUS_OK);
    cJSON_free(printed);
    cJSON_Delete(again);
    cJSON_Delete(tree);
    return 0;
}
