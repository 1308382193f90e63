/* Runs grids: the turns of a block's threads, barriers, and warp operations. */
#include "cuda_runtime.h"
#include "emulation.h"
#include "fibers.h"
#include "state.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <numeric>
#include <vector>

dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace emulation
{

static const unsigned warp_size = 32;
static const size_t shared_limit = 227 * 1024, shared_fence = 256;
static const unsigned char fence_byte = 0xa5;

enum thread_state { THREAD_NEW, THREAD_READY, THREAD_AT_BARRIER, THREAD_AT_WARP, THREAD_DONE };

struct thread {
    thread_state state;
    fiber *stack;
    const char *file; /* where it waits */
    int line;
    unsigned mask; /* of the warp operation that it waits in */
};

/* A warp operation that some of its lanes have come to. */
struct warp_pending {
    unsigned warp, arrived;
    warp_call *calls[warp_size];
    warp_call *first;
};

static std::vector<thread> threads;
static std::vector<uint32_t> gone; /* of each warp: the lanes that have ended or are past the block's end */
static std::vector<warp_pending> pending;
static unsigned running; /* index of the thread whose turn it is */
static bool faulted;
static const std::function<void()> *body;
alignas(256) static unsigned char shared[shared_limit + shared_fence];

unsigned char *shared_memory()
{
    return shared;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == nullptr ? path : slash + 1;
}

static void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void fault(const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    faulted = true;
    report_fault(text);
}

void warp_fault(const char *text)
{
    fault("%s", text);
}

/* Stops the running thread for good. */
static void stop_here()
{
    for (;;)
        fiber_yield();
}

static void wait_turn(thread_state state, const char *file, int line)
{
    thread &self = threads[running];
    self.state = state;
    self.file = file;
    self.line = line;
    fiber_yield();
}

void block_barrier(const char *file, int line)
{
    counts.barriers++;
    wait_turn(THREAD_AT_BARRIER, file, line);
}

/* The lane whose value a lane gets. */
static int source_lane(const warp_call &call, int lane)
{
    int base = lane / call.width * call.width;
    int source = lane;
    switch (call.kind) {
    case WARP_SHUFFLE:
        return base + (call.operand & (call.width - 1));
    case WARP_SHUFFLE_XOR:
        source = lane ^ call.operand;
        break;
    case WARP_SHUFFLE_UP:
        source = lane - call.operand;
        break;
    case WARP_SHUFFLE_DOWN:
        source = lane + call.operand;
        break;
    default:
        break;
    }
    return source < base || source >= base + call.width ? lane : source;
}

static void exchange(warp_pending &p)
{
    uint64_t values[warp_size] = {0}, votes = 0;
    for (unsigned lane = 0; lane < warp_size; lane++) {
        if (p.calls[lane] == nullptr)
            continue;
        values[lane] = p.calls[lane]->value;
        votes |= (uint64_t)(p.calls[lane]->value != 0) << lane;
    }
    for (unsigned lane = 0; lane < warp_size; lane++) {
        warp_call *call = p.calls[lane];
        if (call == nullptr)
            continue;
        if (call->kind == WARP_BALLOT) {
            call->value = votes;
        } else if (call->kind <= WARP_SHUFFLE_DOWN) {
            int source = source_lane(*call, (int)lane);
            if ((call->mask >> source & 1) == 0) {
                fault("%s:%d: lane %u shuffles from lane %d, which mask %08x does not name",
                      base_name(call->file), call->line, lane, source, call->mask);
                return;
            }
            call->value = values[source];
        }
    }
}

static void complete(warp_pending &p)
{
    if (p.first->kind == WARP_CALL) {
        void *arguments[warp_size];
        for (unsigned lane = 0; lane < warp_size; lane++)
            arguments[lane] = p.calls[lane]->argument;
        p.first->run(arguments);
    } else if (p.first->kind != WARP_SYNC) {
        exchange(p);
    }
    for (unsigned lane = 0; lane < warp_size; lane++)
        if (p.calls[lane] != nullptr && p.warp * warp_size + lane != running)
            threads[p.warp * warp_size + lane].state = THREAD_READY;
}

/* The operation that this call belongs to, begun where it is the first to come. Lanes that were to meet and
 * come to different ones wait for ever, which open_barrier finds. */
static warp_pending *join(warp_call &call, unsigned warp)
{
    for (warp_pending &p : pending)
        if (p.warp == warp && p.first->mask == call.mask && p.first->kind == call.kind &&
            p.first->line == call.line && p.first->file == call.file)
            return &p;
    pending.emplace_back();
    pending.back().warp = warp;
    pending.back().first = &call;
    return &pending.back();
}

static bool check_mask(const warp_call &call, unsigned warp, unsigned lane)
{
    if ((call.mask >> lane & 1) == 0) {
        fault("%s:%d: lane %u comes to a warp operation whose mask %08x does not name it",
              base_name(call.file), call.line, lane, call.mask);
        return false;
    }
    uint32_t missing = (uint32_t)call.mask & gone[warp];
    if (missing != 0)
        fault("%s:%d: mask %08x names lane %d of warp %u, which has ended", base_name(call.file), call.line,
              call.mask, __builtin_ctz(missing), warp);
    return missing == 0;
}

void warp_arrive(warp_call &call)
{
    unsigned warp = running / warp_size, lane = running % warp_size;
    counts.warp_operations++;
    warp_pending *p = check_mask(call, warp, lane) ? join(call, warp) : nullptr;
    if (p == nullptr)
        stop_here();
    p->calls[lane] = &call;
    p->arrived |= 1u << lane;
    if (p->arrived != call.mask) {
        threads[running].mask = call.mask;
        wait_turn(THREAD_AT_WARP, call.file, call.line);
        return;
    }
    complete(*p);
    pending.erase(pending.begin() + (p - pending.data()));
    if (faulted)
        stop_here();
}

static void make_current(unsigned index)
{
    running = index;
    threadIdx = dim3(index % blockDim.x, index / blockDim.x % blockDim.y, index / (blockDim.x * blockDim.y));
}

/* Threads that may still begin in this pass, in their order. */
static const unsigned *next_turn, *last_turn;

/* What a fiber runs: the thread whose turn it is and, without leaving the fiber, those that follow and have
 * not begun. Whoever waits keeps the fiber; most kernels never wait, and one fiber then serves a whole block.
 */
static void run_bodies(void *)
{
    for (;;) {
        (*body)();
        threads[running].state = THREAD_DONE;
        gone[running / warp_size] |= 1u << running % warp_size;
        threads[running].stack = nullptr;
        if (next_turn == last_turn || threads[*next_turn].state != THREAD_NEW)
            return;
        make_current(*next_turn++);
        threads[running].state = THREAD_READY;
    }
}

static void take_turn(unsigned index)
{
    thread &t = threads[index];
    fiber *f = t.state == THREAD_NEW ? fiber_start(run_bodies, nullptr) : t.stack;
    t.state = THREAD_READY;
    t.stack = nullptr;
    make_current(index);
    if (!fiber_resume(f))
        threads[running].stack = f;
}

/* Nobody can go on: opens the barrier that all have come to, or says why they wait for ever. */
static void open_barrier()
{
    const thread *first = nullptr;
    for (const thread &t : threads) {
        if (t.state == THREAD_AT_WARP) {
            fault("%s:%d: a warp operation with mask %08x waits for a lane that does not come (it waits "
                  "elsewhere or "
                  "has ended)",
                  base_name(t.file), t.line, t.mask);
            return;
        }
        if (t.state == THREAD_AT_BARRIER && first == nullptr)
            first = &t;
    }
    for (const thread &t : threads) {
        if (t.state == THREAD_DONE) {
            fault("%s:%d: thread %zu of block %u ended while others wait at this barrier",
                  base_name(first->file), first->line, (size_t)(&t - threads.data()), blockIdx.x);
            return;
        }
        if (t.line != first->line || strcmp(t.file, first->file) != 0) {
            fault("threads of one block wait at different barriers, %s:%d and %s:%d", base_name(first->file),
                  first->line, base_name(t.file), t.line);
            return;
        }
    }
    for (thread &t : threads)
        t.state = THREAD_READY;
}

static void abandon_block()
{
    for (thread &t : threads)
        if (t.stack != nullptr)
            fiber_abandon(t.stack);
    pending.clear();
}

/* One turn for each thread of order[first, last) that can go on; true where one could. */
static bool take_turns(const std::vector<unsigned> &order, size_t first, size_t last)
{
    bool progress = false;
    next_turn = order.data() + first;
    last_turn = order.data() + last;
    while (next_turn != last_turn && !faulted) {
        unsigned index = *next_turn++;
        if (threads[index].state == THREAD_NEW || threads[index].state == THREAD_READY) {
            take_turn(index);
            progress = true;
        }
    }
    return progress;
}

/* Runs until nobody can go on. Shuffled threads take turns all round; else a warp goes as far as it can
 * before the next one begins, so that warps run as far apart as barriers let them. */
static void run_until_blocked(const std::vector<unsigned> &order)
{
    size_t step = thread_order == EMULATION_SHUFFLED ? order.size() : warp_size;
    for (size_t first = 0; first < order.size(); first += step)
        while (!faulted && take_turns(order, first, std::min(first + step, order.size())))
            ;
}

static bool is_done()
{
    for (const thread &t : threads)
        if (t.state != THREAD_DONE)
            return false;
    return true;
}

static void check_shared_fence(size_t shared_bytes)
{
    for (size_t i = 0; i < shared_fence; i++) {
        if (shared[shared_bytes + i] != fence_byte) {
            fault("block %u wrote past its %zu bytes of shared memory", blockIdx.x, shared_bytes);
            return;
        }
    }
}

static void run_block(size_t shared_bytes, const std::vector<unsigned> &order)
{
    threads.assign(order.size(), thread{THREAD_NEW, nullptr, nullptr, 0, 0});
    gone.assign((order.size() + warp_size - 1) / warp_size, 0);
    if (order.size() % warp_size != 0)
        gone.back() = ~0u << order.size() % warp_size;
    memset(shared, 0xff, shared_bytes);
    memset(shared + shared_bytes, fence_byte, shared_fence);
    faulted = false;
    for (;;) {
        run_until_blocked(order);
        if (!faulted && is_done())
            break;
        if (!faulted)
            open_barrier();
        if (faulted)
            return abandon_block();
    }
    check_shared_fence(shared_bytes);
}

static std::vector<unsigned> make_order(size_t n)
{
    static uint64_t random = 88172645463325252ull;
    std::vector<unsigned> order(n);
    std::iota(order.begin(), order.end(), 0u);
    if (thread_order == EMULATION_BACKWARDS)
        std::reverse(order.begin(), order.end());
    for (size_t i = n; thread_order == EMULATION_SHUFFLED && i > 1; i--) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        std::swap(order[i - 1], order[random % i]);
    }
    return order;
}

static void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &kernel)
{
    std::vector<unsigned> order = make_order((size_t)block.x * block.y * block.z);
    std::vector<unsigned> blocks = make_order((size_t)grid.x * grid.y * grid.z);
    counts.kernels++;
    gridDim = grid;
    blockDim = block;
    body = &kernel;
    for (unsigned index : blocks) {
        blockIdx = dim3(index % grid.x, index / grid.x % grid.y, index / (grid.x * grid.y));
        counts.blocks++;
        run_block(shared_bytes, order);
        if (faulted)
            return;
    }
}

cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> kernel)
{
    size_t n_threads = (size_t)block.x * block.y * block.z;
    if (n_threads == 0 || n_threads > 1024 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 ||
        shared_bytes > shared_limit)
        return cudaErrorInvalidValue;
    stream_push(stream, [=]() {
        if (take_kernel_failure())
            return;
        run_grid(grid, block, shared_bytes, kernel);
    });
    return cudaSuccess;
}

} // namespace emulation
