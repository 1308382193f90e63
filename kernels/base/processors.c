#include "kernels/base/processors.h"

#include <omp.h>
#include <sched.h>
#include <stdlib.h>
#include <strings.h>

int processors_count(void)
{
    int n = omp_get_num_procs();
    return n > 1 ? n : 1;
}

/* The largest number among all places' processors, and how many the largest place has. */
static int find_extent(int n_places, int *ids, int *largest_place)
{
    int highest = 0;
    *largest_place = 0;
    for (int place = 0; place < n_places; place++) {
        int n = omp_get_place_num_procs(place);
        *largest_place = n > *largest_place ? n : *largest_place;
        if (ids == NULL)
            continue;
        omp_get_place_proc_ids(place, ids);
        for (int i = 0; i < n; i++)
            highest = ids[i] > highest ? ids[i] : highest;
    }
    return highest + 1;
}

void processors_release_thread(void)
{
    int n_places = omp_get_num_places(), largest_place;
    if (n_places < 1)
        return;
    find_extent(n_places, NULL, &largest_place);
    int *ids = malloc(((size_t)largest_place + 1) * sizeof *ids);
    if (ids == NULL)
        return; /* only slower */
    int n = find_extent(n_places, ids, &largest_place);
    cpu_set_t *set = CPU_ALLOC(n);
    if (set != NULL) {
        CPU_ZERO_S(CPU_ALLOC_SIZE(n), set);
        for (int place = 0; place < n_places; place++) {
            omp_get_place_proc_ids(place, ids);
            for (int i = 0; i < omp_get_place_num_procs(place); i++)
                CPU_SET_S(ids[i], CPU_ALLOC_SIZE(n), set);
        }
        sched_setaffinity(0, CPU_ALLOC_SIZE(n), set);
        CPU_FREE(set);
    }
    free(ids);
}

bool processors_have_avx2(void)
{
    const char *wanted = getenv("ACTDUMP_ISA");
    return __builtin_cpu_supports("avx2") && (wanted == NULL || strcasecmp(wanted, "baseline") != 0);
}
