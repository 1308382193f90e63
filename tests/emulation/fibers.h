/* Stacks that hand-over to each other on one CPU thread. */
#ifndef ACTDUMP_EMULATION_FIBERS_H
#define ACTDUMP_EMULATION_FIBERS_H

#include <cstddef>

namespace emulation
{

struct fiber;

/* A fiber that will call run(argument). Stacks of ended fibers are used again. */
fiber *fiber_start(void (*run)(void *), void *argument);
/* From outside: lets it run until it yields or returns; true once it has returned (and is gone). */
bool fiber_resume(fiber *f);
/* From within the running fiber: back to who resumed it. */
void fiber_yield();
/* Drops a fiber that will not be resumed. */
void fiber_abandon(fiber *f);

} // namespace emulation

#endif
