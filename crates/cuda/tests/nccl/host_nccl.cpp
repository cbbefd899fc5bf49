// An NCCL for the driver whose device is the host. DRIVER is that driver's library, VERSION the version that it
// claims to be; with REFUSES it refuses two ranks of one host on one device, as NCCL does. It refuses more ranks than MOST.
//
// Ranks are threads or processes: what they send goes through memory that they share, a ring of bytes for each pair.
// A group of messages is work of a stream, which waits there for the other ranks, and for ever if they are gone, unless
// it is aborted. A group is submitted by another thread, and until that is done the communicator is good for nothing
// else; one that blocks waits for it.
//
// After FAKE_NCCL_GROUPS groups, the network of the rank FAKE_NCCL_RANK is broken.

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { FLOAT32 = 7, FLOAT64 = 8, SUM = 0, AVERAGE = 4 };

constexpr int RANKS = 8;
constexpr uint64_t RING = 16 << 10;

struct Mailbox {
    std::atomic<uint64_t> written, read;
    char bytes[RING];
};

struct Shared {
    std::atomic<int> arrived;
    uint64_t hosts[RANKS];
    Mailbox boxes[RANKS][RANKS];
};

std::atomic<int> living{0};
// Of a rank, which is a thread here: while another writes its own, this one reads.
thread_local char last_error[256] = "";

struct Comm {
    Shared *shared = nullptr;
    int rank = 0, ranks = 0, groups = 0;
    std::atomic<int> status{IN_PROGRESS};
    std::atomic<int> under_way{0};
    std::atomic<bool> aborted{false}, formed{false};
    bool blocking = false;
    std::thread launcher;

    Comm() { ++living; }
    ~Comm() {
        if (shared)
            munmap(shared, sizeof(Shared));
        --living;
    }
    void join() {
        if (launcher.joinable())
            launcher.join();
    }
    // Looks whether all ranks are there.
    void form() {
        if (formed || shared->arrived.load() < ranks)
            return;
        formed = true;
        if (ranks > MOST) {
            snprintf(last_error, sizeof last_error, "%d ranks are too many", ranks);
            status = INVALID_USAGE;
            return;
        }
#ifdef REFUSES
        for (int other = 0; other < ranks; ++other)
            if (other != rank && shared->hosts[other] == shared->hosts[rank]) {
                snprintf(last_error, sizeof last_error, "Duplicate GPU detected : rank %d and rank %d both on CUDA device 1000", rank, other);
                status = INVALID_USAGE;
                return;
            }
#endif
        status = SUCCESS;
    }
};

using Handle = std::shared_ptr<Comm> *;

struct Message {
    bool sends;
    int peer;
    char *at;
    size_t bytes, done;
};

struct Group {
    Handle comm = nullptr;
    void *stream = nullptr;
    std::vector<Message> messages;
    std::function<void()> afterwards = [] {};
};

thread_local int depth = 0;
thread_local Group current;

// Moves what can be moved of a message; whether anything was.
bool progress(Comm &comm, Message &message) {
    Mailbox &box = message.sends ? comm.shared->boxes[comm.rank][message.peer] : comm.shared->boxes[message.peer][comm.rank];
    const uint64_t written = box.written.load(), read = box.read.load();
    const uint64_t room = message.sends ? RING - (written - read) : written - read;
    const uint64_t place = (message.sends ? written : read) % RING;
    size_t bytes = message.bytes - message.done;
    bytes = bytes < room ? bytes : room;
    bytes = bytes < RING - place ? bytes : RING - place;
    if (message.sends)
        memcpy(box.bytes + place, message.at + message.done, bytes);
    else
        memcpy(message.at + message.done, box.bytes + place, bytes);
    (message.sends ? box.written : box.read).fetch_add(bytes);
    message.done += bytes;
    return bytes > 0;
}

// All messages of a group at once, those between two ranks one after the other.
void exchange(Comm &comm, std::vector<Message> &messages) {
    for (int idle = 0;;) {
        bool moved = false, is_done = true, busy[2][RANKS] = {};
        for (Message &message : messages) {
            if (message.done == message.bytes)
                continue;
            is_done = false;
            bool &before = busy[message.sends][message.peer];
            if (!before)
                moved |= progress(comm, message);
            before = true;
        }
        if (is_done || comm.aborted)
            return;
        idle = moved ? 0 : idle + 1;
        if (idle > 100)
            usleep(50);
        else if (idle > 0)
            sched_yield();
    }
}

int launch_on(void *stream, std::function<void()> task) {
    using Launch = int (*)(void *, void (*)(void *), void *);
    static const auto launch = reinterpret_cast<Launch>(dlsym(dlopen(DRIVER, RTLD_NOW), "cuLaunchHostFunc"));
    auto *kept = new std::function<void()>(std::move(task));
    return launch(stream, [](void *data) {
        auto *task = static_cast<std::function<void()> *>(data);
        (*task)();
        delete task;
    }, kept);
}

// What every call on a communicator begins with.
int check(Handle handle) {
    if (!handle || !*handle)
        return INVALID_ARGUMENT;
    if ((*handle)->status == IN_PROGRESS) {
        snprintf(last_error, sizeof last_error, "Attempt to use communicator before the previous operation returned ncclSuccess");
        return INVALID_ARGUMENT;
    }
    return (*handle)->status;
}

int finish_group() {
    Group group = std::move(current);
    current = Group();
    if (!group.comm)
        return SUCCESS;
    std::shared_ptr<Comm> comm = *group.comm;
    comm->join();
    const char *most = getenv("FAKE_NCCL_GROUPS"), *broken = getenv("FAKE_NCCL_RANK");
    if (most && broken && atoi(broken) == comm->rank && comm->groups++ >= atoi(most)) {
        snprintf(last_error, sizeof last_error, "socketProgress: Connection closed by remote peer");
        comm->status = SYSTEM_ERROR;
        return IN_PROGRESS;
    }
    comm->status = IN_PROGRESS;
    comm->launcher = std::thread([comm, group]() mutable {
        ++comm->under_way;
        launch_on(group.stream, [comm, group]() mutable {
            exchange(*comm, group.messages);
            if (!comm->aborted)
                group.afterwards();
            --comm->under_way;
        });
        comm->status = SUCCESS;
    });
    if (!comm->blocking)
        return IN_PROGRESS;
    comm->join();
    return SUCCESS;
}

int add(Handle handle, void *stream, Message message) {
    if (const int wrong = check(handle))
        return wrong;
    if (current.comm && (current.comm != handle || current.stream != stream))
        return INVALID_USAGE;
    current.comm = handle;
    current.stream = stream;
    current.messages.push_back(message);
    return depth ? SUCCESS : finish_group();
}

size_t size_of(int type) {
    constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[type];
}

// The sum of all inputs, from the last to the first: an order that is none of ours.
template <typename Float> void add_up(const std::vector<char> &inputs, int ranks, void *into, size_t count, int reduction) {
    const Float *from = reinterpret_cast<const Float *>(inputs.data());
    for (size_t i = 0; i < count; ++i) {
        Float sum = from[(ranks - 1) * count + i];
        for (int rank = ranks - 2; rank >= 0; --rank)
            sum += from[rank * count + i];
        static_cast<Float *>(into)[i] = reduction == AVERAGE ? sum / ranks : sum;
    }
}

} // namespace

extern "C" {

struct UniqueId {
    char internal[128];
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

// Communicators that are neither destroyed nor aborted, for tests.
int host_nccl_living() { return living; }

int ncclGetVersion(int *version) { return *version = VERSION, SUCCESS; }
const char *ncclGetErrorString(int code) {
    const char *texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
    return texts[code];
}
const char *ncclGetLastError(void *) { return last_error; }

#if VERSION >= 21400
int ncclGetUniqueId(UniqueId *id) {
    static std::atomic<unsigned> number{0};
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/unisono-host-nccl-%d-%u", getpid(), number++);
    return SUCCESS;
}

int ncclCommInitRankConfig(Handle *made, int ranks, UniqueId id, int rank, Config *config) {
    *made = nullptr;
    if (config->size < 20 || config->magic != 0xcafebeef || config->version < 21400 || (config->blocking | 1) != 1 || ranks > RANKS)
        return INVALID_ARGUMENT;
    const int file = shm_open(id.internal, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared)))
        return SYSTEM_ERROR;
    void *mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED)
        return SYSTEM_ERROR;
    auto comm = std::make_shared<Comm>();
    comm->shared = static_cast<Shared *>(mapped);
    comm->rank = rank;
    comm->ranks = ranks;
    const char *host = getenv("NCCL_HOSTID");
    comm->shared->hosts[rank] = std::hash<std::string>()(host ? host : "");
    // All have opened it.
    if (comm->shared->arrived.fetch_add(1) == ranks - 1)
        shm_unlink(id.internal);
    *made = new std::shared_ptr<Comm>(comm);
    if (!config->blocking)
        return IN_PROGRESS;
    comm->blocking = true;
    for (comm->form(); !comm->formed; comm->form())
        usleep(50);
    return comm->status;
}
int ncclCommInitRank(Handle *made, int ranks, UniqueId id, int rank) {
    Config config = {sizeof(Config), 0xcafebeef, 21400, 1};
    return ncclCommInitRankConfig(made, ranks, id, rank, &config);
}
int ncclCommGetAsyncError(Handle comm, int *status) {
    (*comm)->form();
    *status = (*comm)->status;
    return SUCCESS;
}
int ncclCommFinalize(Handle comm) {
    if (const int wrong = check(comm))
        return wrong;
    (*comm)->join();
    return (*comm)->under_way ? INVALID_USAGE : SUCCESS;
}
int ncclCommDestroy(Handle comm) { return (*comm)->join(), delete comm, SUCCESS; }
int ncclCommAbort(Handle comm) {
    (*comm)->aborted = true;
    (*comm)->join();
    while ((*comm)->under_way)
        usleep(50);
    delete comm;
    return SUCCESS;
}

int ncclGroupStart() { return ++depth, SUCCESS; }
int ncclGroupEnd() { return --depth ? SUCCESS : finish_group(); }
int ncclSend(char *from, size_t count, int type, int peer, Handle comm, void *stream) { return add(comm, stream, {true, peer, from, count * size_of(type), 0}); }
int ncclRecv(char *into, size_t count, int type, int peer, Handle comm, void *stream) { return add(comm, stream, {false, peer, into, count * size_of(type), 0}); }
int ncclAllGather(char *from, char *into, size_t count, int type, Handle handle, void *stream) {
    if (const int wrong = check(handle))
        return wrong;
    const Comm &comm = **handle;
    const size_t bytes = count * size_of(type);
    if (from != into + comm.rank * bytes)
        return INVALID_ARGUMENT; // Not in place, which is all that is tried here.
    ++depth;
    for (int peer = 0; peer < comm.ranks; ++peer)
        if (peer != comm.rank) {
            ncclSend(from, bytes, 1, peer, handle, stream);
            ncclRecv(into + peer * bytes, bytes, 1, peer, handle, stream);
        }
    --depth;
    return finish_group();
}
int ncclAllReduce(char *from, void *into, size_t count, int type, int reduction, Handle handle, void *stream) {
    if (const int wrong = check(handle))
        return wrong;
    if ((type != FLOAT32 && type != FLOAT64) || (reduction != SUM && reduction != AVERAGE))
        return INVALID_ARGUMENT;
    const Comm &comm = **handle;
    const size_t bytes = count * size_of(type);
    auto inputs = std::make_shared<std::vector<char>>(bytes * comm.ranks);
    ++depth;
    for (int peer = 0; peer < comm.ranks; ++peer)
        if (peer != comm.rank) {
            ncclSend(from, bytes, 1, peer, handle, stream);
            ncclRecv(inputs->data() + peer * bytes, bytes, 1, peer, handle, stream);
        }
    const int ranks = comm.ranks, rank = comm.rank;
    current.afterwards = [=] {
        memcpy(inputs->data() + rank * bytes, from, bytes);
        if (type == FLOAT32)
            add_up<float>(*inputs, ranks, into, count, reduction);
        else
            add_up<double>(*inputs, ranks, into, count, reduction);
    };
    --depth;
    return finish_group();
}
#endif
}
