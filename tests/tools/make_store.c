/* make_store FOLDER THREADS UNITS COMPRESSION [nonfinite]: writes tests/tools/made_up.h's store. */
#include "tests/tools/made_up.h"

int main(int argc, char **argv)
{
    struct made_up m;
    struct error error = {0};
    if (argc < 5)
        return STATUS_USAGE;
    made_up_init(&m, atoi(argv[4]));
    m.with_nonfinite = argc > 5;
    enum status status = made_up_store(&m, argv[1], atoi(argv[2]), atoi(argv[3]), &error);
    if (status != STATUS_OK)
        fprintf(stderr, "%s\n", error.text);
    return (int)status;
}
