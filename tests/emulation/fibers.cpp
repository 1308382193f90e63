#include "fibers.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif

#ifdef WITH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulation
{

static const size_t stack_bytes = 256 * 1024;

struct fiber {
    char *stack;
    void (*run)(void *);
    void *argument;
    bool ended;
#ifdef __x86_64__
    void *sp;
#else
    ucontext_t context;
#endif
};

/* Never destroyed: a leak check after the destructors would find fibers that nothing points to any more. */
static std::vector<fiber *> &idle = *new std::vector<fiber *>;
static fiber *current;

#ifdef __x86_64__
/* Saves what a call must preserve on the old stack, and takes it from the new one. */
extern "C" void emulation_switch(void **save_sp, void *sp);
__asm__(".text\n"
        ".globl emulation_switch\n"
        ".type emulation_switch, @function\n"
        "emulation_switch:\n"
        "  pushq %rbp\n"
        "  pushq %rbx\n"
        "  pushq %r12\n"
        "  pushq %r13\n"
        "  pushq %r14\n"
        "  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n"
        "  popq %r14\n"
        "  popq %r13\n"
        "  popq %r12\n"
        "  popq %rbx\n"
        "  popq %rbp\n"
        "  ret\n"
        ".size emulation_switch, .-emulation_switch\n");
static void *main_sp;
#else
static ucontext_t main_context;
#endif

#ifdef WITH_ASAN
static const void *main_stack;
static size_t main_stack_bytes;
#endif

static void switch_in(fiber *f)
{
#ifdef WITH_ASAN
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, f->stack, stack_bytes);
#endif
#ifdef __x86_64__
    emulation_switch(&main_sp, f->sp);
#else
    swapcontext(&main_context, &f->context);
#endif
#ifdef WITH_ASAN
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

static void switch_out(fiber *f)
{
#ifdef WITH_ASAN
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(f->ended ? nullptr : &fake, main_stack, main_stack_bytes);
#endif
#ifdef __x86_64__
    emulation_switch(&f->sp, main_sp);
#else
    swapcontext(&f->context, &main_context);
#endif
#ifdef WITH_ASAN
    __sanitizer_finish_switch_fiber(fake, &main_stack, &main_stack_bytes);
#endif
}

static void fiber_main()
{
#ifdef WITH_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_bytes);
#endif
    fiber *f = current;
    f->run(f->argument);
    f->ended = true;
    switch_out(f);
    abort();
}

static fiber *make_fiber()
{
    fiber *f = new fiber();
    void *stack = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) {
        perror("emulation: a thread's stack");
        abort();
    }
    f->stack = static_cast<char *>(stack);
    return f;
}

fiber *fiber_start(void (*run)(void *), void *argument)
{
    fiber *f = idle.empty() ? make_fiber() : idle.back();
    if (!idle.empty())
        idle.pop_back();
    f->run = run;
    f->argument = argument;
    f->ended = false;
#ifdef __x86_64__
    /* What emulation_switch takes: six registers, then where to go; the entry finds the stack as a call
     * leaves it. */
    void **top = reinterpret_cast<void **>(f->stack + stack_bytes) - 1;
    *top = nullptr;
    *--top = reinterpret_cast<void *>(fiber_main);
    for (int i = 0; i < 6; i++)
        *--top = nullptr;
    f->sp = top;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = stack_bytes;
    f->context.uc_link = nullptr;
    makecontext(&f->context, fiber_main, 0);
#endif
    return f;
}

bool fiber_resume(fiber *f)
{
    fiber *before = current;
    current = f;
    switch_in(f);
    current = before;
    if (!f->ended)
        return false;
    idle.push_back(f);
    return true;
}

void fiber_yield()
{
    switch_out(current);
}

void fiber_abandon(fiber *f)
{
#ifdef WITH_ASAN
    ASAN_UNPOISON_MEMORY_REGION(f->stack, stack_bytes);
#endif
    idle.push_back(f);
}

} // namespace emulation
