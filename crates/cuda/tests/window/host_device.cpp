// A CUDA driver whose device is the host. KERNELS is the folder of its kernels, compiled for the host.
//
// Device memory is memory that other processes can map, and so can be opened by them. A stream is a thread
// that does what it is given in order, now and then after a moment of its own choosing; an event is a number
// that it counts. So work is under way while its caller goes on, as on a device, and what is not
// ordered happens in any order.
//
// FAKE_DEVICE is the last byte of the device's UUID, and after FAKE_LAUNCHES kernels no more are launched. With FAKE_NO_IPC
// no memory of another process can be opened, and with FAKE_NO_REGISTER none of the host registered.

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600, LAUNCH_FAILED = 719 };

// A stream that records for a graph, and is good for nothing else.
constexpr uintptr_t RECORDING = 2;

// In which parameters a kernel takes up to 480 addresses.
constexpr size_t ANY = 16 + 480 * 8, CALL = 40;

class Stream {
    std::mutex mutex;
    std::condition_variable change;
    std::deque<std::function<void()>> tasks;
    bool busy = false, ending = false;
    std::thread thread;

    void serve() {
        unsigned seed = static_cast<unsigned>(reinterpret_cast<uintptr_t>(this) ^ getpid() * 2654435761u);
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            change.wait(lock, [&] { return ending || !tasks.empty(); });
            if (tasks.empty())
                return;
            auto task = std::move(tasks.front());
            tasks.pop_front();
            busy = true;
            lock.unlock();
            seed = seed * 1664525u + 1013904223u;
            if (seed >> 30 == 0)
                usleep(seed >> 20 & 255);
            task();
            lock.lock();
            busy = false;
            change.notify_all();
        }
    }

  public:
    Stream() : thread([this] { serve(); }) {}
    ~Stream() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            ending = true;
            change.notify_all();
        }
        thread.join();
    }
    void submit(std::function<void()> task) {
        std::lock_guard<std::mutex> lock(mutex);
        tasks.push_back(std::move(task));
        change.notify_all();
    }
    bool done() {
        std::lock_guard<std::mutex> lock(mutex);
        return tasks.empty() && !busy;
    }
    void synchronize() {
        std::unique_lock<std::mutex> lock(mutex);
        change.wait(lock, [&] { return tasks.empty() && !busy; });
    }
};

struct Event {
    std::mutex mutex;
    std::condition_variable change;
    uint64_t recorded = 0, happened = 0;

    void happen(uint64_t number) {
        std::lock_guard<std::mutex> lock(mutex);
        // One that was recorded again on a stream that was quicker has happened already.
        happened = std::max(happened, number);
        change.notify_all();
    }
    void wait(uint64_t number) {
        std::unique_lock<std::mutex> lock(mutex);
        change.wait(lock, [&] { return happened >= number; });
    }
};

struct Allocation {
    int file;
    size_t bytes;
};

struct Handle {
    int process, file;
    uint64_t bytes;
};

struct Kernel {
    std::string name;
    int (*launch)(const char *, void **, unsigned, unsigned);
    // Of the one parameter that kernels other than folds take.
    size_t bytes;
};

std::mutex all;
std::map<uint64_t, Allocation> allocations, imports;
// Memory of the host that stays in its place: bytes, by the address of the first.
std::map<uint64_t, size_t> pinned;
std::map<Stream *, std::shared_ptr<Stream>> streams;

Stream &stream_of(void *raw) {
    static Stream *standard = new Stream;
    return raw ? *static_cast<Stream *>(raw) : *standard;
}

std::shared_ptr<Event> &event_of(void *raw) { return *static_cast<std::shared_ptr<Event> *>(raw); }

// As the driver does before it takes memory away.
void finish_everything() {
    // Another thread may destroy them meanwhile.
    std::vector<std::shared_ptr<Stream>> running;
    {
        std::lock_guard<std::mutex> lock(all);
        for (auto &entry : streams)
            running.push_back(entry.second);
    }
    stream_of(nullptr).synchronize();
    for (auto &stream : running)
        stream->synchronize();
}

int release(std::map<uint64_t, Allocation> &list, uint64_t pointer) {
    finish_everything();
    std::lock_guard<std::mutex> lock(all);
    auto found = list.find(pointer);
    if (found == list.end())
        return INVALID_VALUE;
    munmap(reinterpret_cast<void *>(pointer), found->second.bytes);
    if (found->second.file >= 0)
        close(found->second.file);
    list.erase(found);
    return 0;
}

int copy(void *into, const void *from, size_t bytes, void *stream) {
    stream_of(stream).submit([=] { memmove(into, from, bytes); });
    return 0;
}

bool is_pinned(const void *pointer, size_t bytes) {
    std::lock_guard<std::mutex> lock(all);
    const uint64_t first = reinterpret_cast<uint64_t>(pointer);
    auto after = pinned.upper_bound(first);
    return after != pinned.begin() && (--after, first + bytes <= after->first + after->second);
}

void *at(uint64_t pointer) { return reinterpret_cast<void *>(pointer); }

} // namespace

extern "C" {

// How much of the device is in use, for tests.
int host_device_allocations() {
    std::lock_guard<std::mutex> lock(all);
    return static_cast<int>(allocations.size() + imports.size() + pinned.size());
}

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int length, int) { return snprintf(name, length, "the host"), 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int) {
    const char *number = getenv("FAKE_DEVICE");
    memset(uuid, 0, 16);
    uuid[15] = number ? atoi(number) : 1;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int) {
    return *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : 1, 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = size_t(1) << 40, 0; }
int cuDeviceGetPCIBusId(char *id, int length, int) { return snprintf(id, length, "0000:00:00.0"), 0; }
int cuDeviceCanAccessPeer(int *can, int, int) { return *can = 1, 0; }
int cuDevicePrimaryCtxRetain(void **context, int) { return *context = &all, 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxGetCurrent(void **context) { return *context = nullptr, 0; }
int cuCtxPushCurrent_v2(void *) { return 0; }
int cuCtxPopCurrent_v2(void **) { return 0; }
int cuCtxSynchronize() { return finish_everything(), 0; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
int cuCtxEnablePeerAccess(void *, unsigned) { return 0; }

int cuModuleLoadDataEx(void **module, const char *image, unsigned, int *, void **) {
    const char *fold = strstr(image, ".entry fold_"), *entry = fold ? fold : strstr(image, ".entry ");
    if (!entry)
        return INVALID_VALUE;
    // The name of a kernel begins with that of its family, and of folds, their type comes next.
    const std::string rest = entry + strlen(fold ? ".entry fold_" : ".entry ");
    const std::string path = std::string(KERNELS) + (fold ? "/fold_" : "/") + rest.substr(0, rest.find('_')) + ".so";
    *module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    return *module ? 0 : NOT_FOUND;
}
int cuModuleUnload(void *) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    auto launch = reinterpret_cast<int (*)(const char *, void **, unsigned, unsigned)>(dlsym(module, "launch"));
    auto bytes = reinterpret_cast<size_t (*)(const char *)>(dlsym(module, "parameter_bytes"));
    *function = new Kernel{name, launch, bytes ? bytes(name) : 0};
    if (bytes && !bytes(name))
        return NOT_FOUND;
    return launch ? 0 : NOT_FOUND;
}
int cuLaunchKernel(Kernel *kernel, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned, void *stream, void **parameters, void **) {
    static const char *most = getenv("FAKE_LAUNCHES");
    static std::mutex counting;
    static int launches = 0;
    {
        std::lock_guard<std::mutex> lock(counting);
        if (most && launches++ >= atoi(most))
            return LAUNCH_FAILED;
    }
    std::vector<size_t> sizes;
    const std::string inputs = kernel->name.substr(kernel->name.rfind('_') + 1);
    if (kernel->bytes)
        sizes = {kernel->bytes};
    else if (kernel->name == "list_inputs")
        sizes = {8, 8, ANY};
    else
        sizes = {CALL, inputs == "any" ? ANY : 8 * static_cast<size_t>(atoi(inputs.c_str()))};
    std::vector<std::vector<char>> copies;
    for (size_t i = 0; i < sizes.size(); ++i)
        copies.emplace_back(static_cast<char *>(parameters[i]), static_cast<char *>(parameters[i]) + sizes[i]);
    stream_of(stream).submit([=] {
        std::vector<void *> pointers;
        for (auto &copy : copies)
            pointers.push_back(const_cast<char *>(copy.data()));
        if (!kernel->launch(kernel->name.c_str(), pointers.data(), grid, block))
            abort();
    });
    return 0;
}

int cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = *total = size_t(1) << 40, 0; }
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
    const int file = memfd_create("device", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes))
        return OUT_OF_MEMORY;
    void *mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED)
        return OUT_OF_MEMORY;
    // What is in it is not defined.
    memset(mapped, 0xa5, bytes);
    std::lock_guard<std::mutex> lock(all);
    *pointer = reinterpret_cast<uint64_t>(mapped);
    allocations[*pointer] = {file, bytes};
    return 0;
}
int cuMemFree_v2(uint64_t pointer) { return release(allocations, pointer); }
int cuMemAllocAsync(uint64_t *pointer, size_t bytes, void *) { return cuMemAlloc_v2(pointer, bytes); }
int cuMemFreeAsync(uint64_t pointer, void *) { return cuMemFree_v2(pointer); }
int cuPointerGetAttribute(void *, int, uint64_t) { return INVALID_VALUE; }
int pin(void *pointer, size_t bytes) {
    std::lock_guard<std::mutex> lock(all);
    pinned[reinterpret_cast<uint64_t>(pointer)] = bytes;
    return 0;
}
int cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned) { return getenv("FAKE_NO_REGISTER") ? OUT_OF_MEMORY : pin(pointer, bytes); }
int cuMemHostUnregister(void *pointer) {
    finish_everything();
    std::lock_guard<std::mutex> lock(all);
    return pinned.erase(reinterpret_cast<uint64_t>(pointer)) ? 0 : INVALID_VALUE;
}
int cuMemHostAlloc(void **pointer, size_t bytes, unsigned) { return *pointer = malloc(bytes), pin(*pointer, bytes); }
int cuMemFreeHost(void *pointer) {
    const int status = cuMemHostUnregister(pointer);
    return free(pointer), status;
}
int cuMemHostGetDevicePointer_v2(uint64_t *pointer, void *host, unsigned) { return *pointer = reinterpret_cast<uint64_t>(host), 0; }

int cuIpcGetMemHandle(char *handle, uint64_t pointer) {
    std::lock_guard<std::mutex> lock(all);
    auto found = allocations.find(pointer);
    if (found == allocations.end())
        return INVALID_VALUE;
    const Handle made = {getpid(), found->second.file, found->second.bytes};
    memcpy(handle, &made, sizeof made);
    return 0;
}
struct RawHandle {
    char bytes[64];
};
int cuIpcOpenMemHandle_v2(uint64_t *pointer, RawHandle raw, unsigned) {
    Handle handle;
    memcpy(&handle, raw.bytes, sizeof handle);
    if (handle.process == getpid() || getenv("FAKE_NO_IPC"))
        return INVALID_CONTEXT;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return INVALID_VALUE;
    void *mapped = mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED)
        return OUT_OF_MEMORY;
    std::lock_guard<std::mutex> lock(all);
    *pointer = reinterpret_cast<uint64_t>(mapped);
    imports[*pointer] = {-1, handle.bytes};
    return 0;
}
int cuIpcCloseMemHandle(uint64_t pointer) { return release(imports, pointer); }

int cuMemcpyAsync(uint64_t into, uint64_t from, size_t bytes, void *stream) { return copy(at(into), at(from), bytes, stream); }
int cuMemcpyHtoDAsync_v2(uint64_t into, const void *from, size_t bytes, void *stream) {
    if (is_pinned(from, bytes))
        return copy(at(into), from, bytes, stream);
    // What is not pinned is read before the call returns.
    std::vector<char> read(static_cast<const char *>(from), static_cast<const char *>(from) + bytes);
    stream_of(stream).submit([=] { memcpy(at(into), read.data(), bytes); });
    return 0;
}
struct Place {
    size_t x, y;
    unsigned memory;
    const void *host;
    uint64_t device;
    void *array;
    size_t pitch;
};
struct Rows {
    Place from, into;
    size_t width, height;
};
int cuMemcpy2DAsync_v2(const Rows *rows, void *stream) {
    constexpr unsigned HOST = 1, DEVICE = 2;
    const Place &from = rows->from, &into = rows->into;
    if (from.memory != HOST || into.memory != DEVICE || from.x || from.y || into.x || into.y)
        return INVALID_VALUE;
    for (size_t row = 0; row < rows->height; ++row) {
        const char *source = static_cast<const char *>(from.host) + row * from.pitch;
        if (!is_pinned(source, rows->width))
            return INVALID_VALUE;
        copy(at(into.device + row * into.pitch), source, rows->width, stream);
    }
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *into, uint64_t from, size_t bytes, void *stream) {
    copy(into, at(from), bytes, stream);
    if (!is_pinned(into, bytes))
        stream_of(stream).synchronize();
    return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t into, uint64_t from, size_t bytes, void *stream) { return copy(at(into), at(from), bytes, stream); }
int cuMemcpyPeerAsync(uint64_t into, void *, uint64_t from, void *, size_t bytes, void *stream) { return copy(at(into), at(from), bytes, stream); }
int cuMemsetD8Async(uint64_t into, unsigned char byte, size_t bytes, void *stream) {
    stream_of(stream).submit([=] { memset(at(into), byte, bytes); });
    return 0;
}
int cuMemsetD32Async(uint64_t into, unsigned word, size_t count, void *stream) {
    stream_of(stream).submit([=] {
        for (size_t i = 0; i < count; ++i)
            static_cast<unsigned *>(at(into))[i] = word;
    });
    return 0;
}

int cuStreamCreateWithPriority(void **stream, unsigned, int) {
    auto made = std::make_shared<Stream>();
    std::lock_guard<std::mutex> lock(all);
    *stream = made.get();
    streams[made.get()] = std::move(made);
    return 0;
}
int cuStreamDestroy_v2(void *stream) {
    std::shared_ptr<Stream> ended;
    std::lock_guard<std::mutex> lock(all);
    ended = std::move(streams[static_cast<Stream *>(stream)]);
    streams.erase(static_cast<Stream *>(stream));
    return 0;
}
int cuStreamQuery(void *stream) { return stream_of(stream).done() ? 0 : NOT_READY; }
int cuStreamSynchronize(void *stream) { return stream_of(stream).synchronize(), 0; }
int cuStreamWaitEvent(void *stream, void *raw, unsigned) {
    auto event = event_of(raw);
    uint64_t number;
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        number = event->recorded;
    }
    stream_of(stream).submit([=] { event->wait(number); });
    return 0;
}
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    stream_of(stream).submit([=] { function(data); });
    return 0;
}
int cuStreamIsCapturing(void *stream, int *status) { return *status = reinterpret_cast<uintptr_t>(stream) == RECORDING, 0; }

int cuEventCreate(void **event, unsigned) { return *event = new std::shared_ptr<Event>(new Event), 0; }
int cuEventDestroy_v2(void *event) { return delete static_cast<std::shared_ptr<Event> *>(event), 0; }
int cuEventRecord(void *raw, void *stream) {
    auto event = event_of(raw);
    uint64_t number;
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        number = ++event->recorded;
    }
    stream_of(stream).submit([=] { event->happen(number); });
    return 0;
}
int cuEventQuery(void *raw) {
    auto &event = event_of(raw);
    std::lock_guard<std::mutex> lock(event->mutex);
    return event->happened == event->recorded ? 0 : NOT_READY;
}
int cuEventSynchronize(void *raw) {
    auto event = event_of(raw);
    event->wait(event->recorded);
    return 0;
}
int cuEventElapsedTime(float *milliseconds, void *, void *) { return *milliseconds = 1, 0; }
int cuIpcGetEventHandle(char *, void *) { return INVALID_VALUE; }
int cuIpcOpenEventHandle(void **, RawHandle) { return INVALID_VALUE; }

int cuGetErrorName(int code, const char **name) { return *name = code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr, *name ? 0 : 1; }
int cuGetErrorString(int, const char **text) { return *text = nullptr, 1; }
}
