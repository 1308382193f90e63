/* The runtime's memory, streams and events. */
#include "state.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include <sys/mman.h>

using emulation::counts;

/* Around whatever a host thread calls: the emulation itself is one thread's. */
static std::recursive_mutex &the_lock = *new std::recursive_mutex;
#define ONE_AT_A_TIME std::lock_guard<std::recursive_mutex> one_at_a_time(the_lock)

struct event_state {
    emulated_stream *stream;
    uint64_t recorded, done;
};

struct emulated_event {
    std::shared_ptr<event_state> state;
};

struct emulated_stream {
    std::deque<std::function<void()>> work;
};

namespace emulation
{

emulation_order thread_order = EMULATION_FORWARDS;
emulation_counts counts;
bool knows_grouped = true;

static const size_t heap_bytes = (size_t)64 << 30, fence_bytes = 512, granularity = 256,
                    fill_limit = (size_t)1 << 20;
static const unsigned char fence_byte = 0xc3, fill_byte = 0xff;

static char *heap;
static size_t heap_high; /* bytes of the heap that were ever used */
static bool is_guarded = true;
static int heap_open;                   /* depth of device work */
static std::map<size_t, size_t> blocks; /* place in the heap -> bytes asked for */
static size_t bytes_in_use, memory_limit = (size_t)8 << 30;
static int n_devices = 1;
static int64_t allocation_to_fail = -1, kernel_to_fail = -1;
static cudaError_t kernel_failure, sticky;
static bool is_lost_for_good; /* a failure is never forgotten, as of a real device */
static char fault_text[512];

void report_fault(const char *text)
{
    if (fault_text[0] == '\0')
        snprintf(fault_text, sizeof fault_text, "%s", text);
    sticky = cudaErrorLaunchFailure;
}

bool take_kernel_failure()
{
    if (kernel_to_fail < 0 || kernel_to_fail-- > 0)
        return false;
    sticky = kernel_failure;
    return true;
}

static void protect(int how)
{
    if (heap != nullptr && is_guarded && heap_high > 0 && mprotect(heap, heap_high, how) != 0) {
        perror("emulation: protecting device memory");
        abort();
    }
}

static void open_heap()
{
    if (heap_open++ == 0)
        protect(PROT_READ | PROT_WRITE);
}

static void close_heap()
{
    if (--heap_open == 0)
        protect(PROT_NONE);
}

/* Fills what a test can be expected to use; the middle of a large block stays untouched, so that it costs
 * nothing. */
static void fill_block(char *data, size_t bytes)
{
    size_t part = std::min(bytes, fill_limit);
    memset(data, fill_byte, part);
    memset(data + bytes - part, fill_byte, part);
}

static size_t block_span(size_t bytes)
{
    return (bytes + granularity - 1) / granularity * granularity + 2 * fence_bytes;
}

/* First fit. */
static size_t find_place(size_t bytes)
{
    size_t at = 0, span = block_span(bytes);
    for (const auto &block : blocks) {
        if (at + span <= block.first)
            return at;
        at = block.first + block_span(block.second);
    }
    return at;
}

static void check_fence(size_t place, size_t bytes, size_t from, size_t to, const char *side)
{
    for (size_t i = from; i < to; i++) {
        if ((unsigned char)heap[place + i] == fence_byte)
            continue;
        char text[256];
        snprintf(text, sizeof text, "a kernel wrote %s a block of %zu bytes of device memory", side, bytes);
        report_fault(text);
        heap[place + i] = (char)fence_byte;
    }
}

static void check_block(size_t place, size_t bytes)
{
    check_fence(place, bytes, 0, fence_bytes, "before");
    check_fence(place, bytes, fence_bytes + bytes, block_span(bytes), "behind");
}

static cudaError_t take_sticky()
{
    cudaError_t code = sticky;
    if (!is_lost_for_good)
        sticky = cudaSuccess;
    return code;
}

/* What is to go wrong in a program that is not a test itself: numbers in the environment, as the functions of
 * emulation.h take them. A kernel that fails takes the device with it. */
static int64_t setting(const char *name, int64_t otherwise)
{
    const char *text = getenv(name);
    return text == nullptr ? otherwise : strtoll(text, nullptr, 10);
}

static struct settings {
    settings()
    {
        n_devices = (int)setting("EMULATION_DEVICES", n_devices);
        memory_limit = (size_t)setting("EMULATION_MEMORY", (int64_t)memory_limit);
        allocation_to_fail = setting("EMULATION_FAIL_ALLOCATION", -1);
        kernel_to_fail = setting("EMULATION_FAIL_KERNEL", -1);
        kernel_failure = (cudaError_t)setting("EMULATION_FAIL_CODE", cudaErrorLaunchFailure);
        is_lost_for_good = kernel_to_fail >= 0;
    }
} from_environment;

void stream_push(cudaStream_t stream, std::function<void()> work)
{
    ONE_AT_A_TIME;
    stream->work.push_back(std::move(work));
}

static void run_one(emulated_stream *stream)
{
    std::function<void()> work = std::move(stream->work.front());
    stream->work.pop_front();
    work();
}

static void run_until(const std::shared_ptr<event_state> &event, uint64_t ticket)
{
    if (event->done >= ticket)
        return;
    open_heap();
    while (event->done < ticket && !event->stream->work.empty())
        run_one(event->stream);
    close_heap();
}

static void drain(emulated_stream *stream)
{
    open_heap();
    while (!stream->work.empty())
        run_one(stream);
    for (const auto &block : blocks)
        check_block(block.first, block.second);
    close_heap();
}

} // namespace emulation

using namespace emulation;

extern "C" {

void emulation_set_order(enum emulation_order order)
{
    thread_order = order;
}

void emulation_set_devices(int n, size_t memory_bytes)
{
    n_devices = n;
    memory_limit = memory_bytes;
}

void emulation_set_guarded(bool guarded)
{
    if (heap != nullptr && mprotect(heap, heap_bytes, guarded ? PROT_NONE : PROT_READ | PROT_WRITE) != 0)
        abort();
    is_guarded = guarded;
}

void emulation_set_grouped(bool known)
{
    knows_grouped = known;
}

void emulation_fail_allocation(int64_t n)
{
    allocation_to_fail = n;
}

void emulation_fail_kernel(int64_t n, int code)
{
    kernel_to_fail = n;
    kernel_failure = (cudaError_t)code;
}

const char *emulation_fault(void)
{
    static char text[sizeof fault_text];
    memcpy(text, fault_text, sizeof text);
    fault_text[0] = '\0';
    return text;
}

struct emulation_counts emulation_get_counts(void)
{
    counts.live_allocations = (int64_t)blocks.size();
    return counts;
}

const char *cudaGetErrorName(cudaError_t code)
{
    switch (code) {
    case cudaSuccess:
        return "cudaSuccess";
    case cudaErrorMemoryAllocation:
        return "cudaErrorMemoryAllocation";
    case cudaErrorECCUncorrectable:
        return "cudaErrorECCUncorrectable";
    case cudaErrorLaunchFailure:
        return "cudaErrorLaunchFailure";
    default:
        return "cudaErrorOther";
    }
}

const char *cudaGetErrorString(cudaError_t code)
{
    return cudaGetErrorName(code);
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = n_devices;
    return n_devices > 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = n_devices > 0 ? 13000 : 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int ordinal)
{
    return ordinal >= 0 && ordinal < n_devices ? cudaSuccess : cudaErrorInvalidDevice;
}

/* Few processors, so that the choices that depend on them are made for small problems too. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int ordinal)
{
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "emulated GPU %d", ordinal);
    properties->major = 9;
    properties->multiProcessorCount = 4;
    properties->sharedMemPerBlockOptin = 227 * 1024;
    properties->totalGlobalMem = memory_limit;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    ONE_AT_A_TIME;
    *free_bytes = memory_limit - bytes_in_use;
    *total_bytes = memory_limit;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    ONE_AT_A_TIME;
    counts.allocations++;
    bool chosen = allocation_to_fail >= 0 && allocation_to_fail-- == 0;
    if (heap == nullptr) {
        void *region =
            mmap(nullptr, heap_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (region == MAP_FAILED)
            return cudaErrorMemoryAllocation;
        heap = static_cast<char *>(region);
        emulation_set_guarded(is_guarded);
    }
    if (is_lost_for_good && sticky != cudaSuccess)
        return sticky;
    if (chosen || bytes > memory_limit - bytes_in_use)
        return cudaErrorMemoryAllocation;
    size_t place = find_place(bytes), span = block_span(bytes);
    if (place + span > heap_bytes)
        return cudaErrorMemoryAllocation;
    heap_high = std::max(heap_high, (place + span + 4095) / 4096 * 4096);
    open_heap();
    memset(heap + place, fence_byte, fence_bytes);
    fill_block(heap + place + fence_bytes, bytes);
    memset(heap + place + fence_bytes + bytes, fence_byte, span - fence_bytes - bytes);
    close_heap();
    blocks[place] = bytes;
    bytes_in_use += bytes;
    *out = heap + place + fence_bytes;
    return cudaSuccess;
}

/* Waits for nothing, unlike the real one: memory that is still in use must not be freed, and is filled to
 * show it. */
cudaError_t cudaFree(void *memory)
{
    ONE_AT_A_TIME;
    if (memory == nullptr)
        return cudaSuccess;
    auto block = blocks.find((size_t)((char *)memory - heap) - fence_bytes);
    if (block == blocks.end())
        return cudaErrorInvalidValue;
    open_heap();
    check_block(block->first, block->second);
    fill_block(static_cast<char *>(memory), block->second);
    close_heap();
    bytes_in_use -= block->second;
    blocks.erase(block);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned)
{
    *out = malloc(bytes);
    return *out == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFreeHost(void *memory)
{
    free(memory);
    return cudaSuccess;
}

static bool is_device(const void *memory)
{
    return heap != nullptr && (const char *)memory >= heap && (const char *)memory < heap + heap_bytes;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    bool to_device = kind != cudaMemcpyDeviceToHost, from_device = kind != cudaMemcpyHostToDevice;
    if (is_device(to) != to_device || is_device(from) != from_device)
        return cudaErrorInvalidValue;
    stream_push(stream, [=]() { memcpy(to, from, bytes); });
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    if (!is_device(to))
        return cudaErrorInvalidValue;
    stream_push(stream, [=]() { memset(to, value, bytes); });
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    *out = new emulated_stream();
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    ONE_AT_A_TIME;
    drain(stream);
    return take_sticky();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    ONE_AT_A_TIME;
    std::shared_ptr<event_state> state = event->state;
    uint64_t ticket = state->recorded;
    stream_push(stream, [=]() { run_until(state, ticket); });
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    *out = new emulated_event{std::make_shared<event_state>()};
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    ONE_AT_A_TIME;
    std::shared_ptr<event_state> state = event->state;
    uint64_t ticket = ++state->recorded;
    state->stream = stream;
    stream_push(stream, [=]() { state->done = ticket; });
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    ONE_AT_A_TIME;
    run_until(event->state, event->state->recorded);
    return take_sticky();
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t)
{
    *milliseconds = 0;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *, enum cudaFuncAttribute, int value)
{
    return value <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidValue;
}

} /* extern "C" */
