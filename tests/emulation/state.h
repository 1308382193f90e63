/* What the emulation's files share. */
#ifndef ACTDUMP_EMULATION_STATE_H
#define ACTDUMP_EMULATION_STATE_H

#include "cuda_runtime_api.h"
#include "emulation.h"

#include <functional>

namespace emulation
{

extern emulation_order thread_order;
extern emulation_counts counts;
extern bool knows_grouped;

/* Puts work at a stream's end. */
void stream_push(cudaStream_t stream, std::function<void()> work);
/* Keeps the first sentence, and makes the next wait fail. */
void report_fault(const char *text);
/* True where this kernel was chosen to fail (emulation_fail_kernel). */
bool take_kernel_failure();

} // namespace emulation

#endif
