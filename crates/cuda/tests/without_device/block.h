// What the device brings in warp.cuh, on the host: blocks whose threads work together.
//
// Every thread of a block is a context of its own on one thread of the host. It runs until it waits for its
// warp or its block, and goes on when all others that still run wait for the same; a block in which some wait
// for what others never reach is an error of the kernel, and ends the process. Warps take turns from the
// first or from the last, so that a kernel that lacks a wait is likely to read what is not there yet.

#ifndef UNISONO_WARP
#define UNISONO_WARP

#include "host.h"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

constexpr u32 WARP = 32;

// A kernel knows itself by its name, and how many bytes it takes.
struct Registered {
    const char *name;
    std::size_t bytes;
    void (*run)(const void *call);
    Registered *next;
};
static Registered *registered_kernels = nullptr;

#define KERNEL(name, Call, threads) \
    static void name(const Call &call); \
    static Registered registered_##name{#name, sizeof(Call), \
                                        [](const void *call) { name(*static_cast<const Call *>(call)); }, \
                                        std::exchange(registered_kernels, &registered_##name)}; \
    static void name(const Call &call)

#define KERNEL_OF(name, Call, threads, blocks) KERNEL(name, Call, threads)

#define SHARED static thread_local

namespace threads {

enum class Waits { No, ForWarp, ForBlock, Never };

// Bytes of a stack: kernels have few variables, and call nothing.
constexpr std::size_t STACK = 64 << 10;

// Switches by jumps, which unlike those between contexts ask nothing of the system.
struct Thread {
    ucontext_t context;
    jmp_buf place;
    bool started = false;
    std::unique_ptr<char[]> stack{new char[STACK]};
    Waits waits = Waits::No;
    // What it shows the others of its warp, by turns in two places: one may still be read when the other is
    // written.
    u32 shown[2] = {0, 0};
    u32 turn = 0;
};

struct Block {
    ucontext_t unused;
    jmp_buf scheduler;
    std::vector<std::unique_ptr<Thread>> all;
    u32 count = 0, current = 0;
    std::function<void()> body;
};
inline thread_local Block block;

inline Thread &self() { return *block.all[block.current]; }

inline void wait(Waits what) {
    Thread &thread = self();
    thread.waits = what;
    if (!_setjmp(thread.place))
        _longjmp(block.scheduler, 1);
}

// Runs a thread until it waits.
__attribute__((noinline)) inline void resume(Thread &thread) {
    if (_setjmp(block.scheduler))
        return;
    if (thread.started)
        _longjmp(thread.place, 1);
    thread.started = true;
    swapcontext(&block.unused, &thread.context);
}

inline void start() {
    block.body();
    wait(Waits::Never);
}

// Whether all of these threads wait for this, but for those that are done; then they go on.
inline bool release(u32 from, u32 to, Waits what) {
    bool some = false;
    for (u32 i = from; i < to; ++i) {
        const Waits waits = block.all[i]->waits;
        if (waits != what && waits != Waits::Never)
            return false;
        some |= waits == what;
    }
    for (u32 i = from; some && i < to; ++i)
        if (block.all[i]->waits == what)
            block.all[i]->waits = Waits::No;
    return some;
}

// Runs a block of so many threads.
inline void run(u32 number, u32 grid, u32 count, std::function<void()> body) {
    block.count = count;
    block.body = std::move(body);
    while (block.all.size() < count)
        block.all.push_back(std::make_unique<Thread>());
    for (u32 i = 0; i < count; ++i) {
        Thread &thread = *block.all[i];
        thread.waits = Waits::No;
        thread.turn = 0;
        thread.started = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, start, 0);
    }
    blockIdx.x = number;
    gridDim.x = grid;
    for (;;) {
        for (u32 turn = 0; turn < count; ++turn) {
            const u32 i = number % 2 ? count - 1 - turn : turn;
            if (block.all[i]->waits != Waits::No)
                continue;
            block.current = i;
            threadIdx.x = i;
            resume(*block.all[i]);
        }
        bool moved = false, over = true;
        for (u32 first = 0; first < count; first += WARP)
            moved |= release(first, first + WARP < count ? first + WARP : count, Waits::ForWarp);
        moved = moved || release(0, count, Waits::ForBlock);
        for (u32 i = 0; i < count; ++i)
            over &= block.all[i]->waits == Waits::Never;
        if (over)
            return;
        if (!moved) {
            std::fprintf(stderr, "threads of block %u wait for each other forever\n", number);
            std::abort();
        }
    }
}

} // namespace threads

static void wait_for_block() { threads::wait(threads::Waits::ForBlock); }
static void wait_for_warp() { threads::wait(threads::Waits::ForWarp); }

// Shows a value to the warp, and gives what every lane shows.
template <class Choose> static u32 exchange(u32 value, Choose lane_of) {
    const u32 me = threads::block.current, lane = me % WARP, turn = threads::self().turn++ % 2;
    threads::self().shown[turn] = value;
    wait_for_warp();
    const u32 other = me - lane + lane_of(lane);
    return other < threads::block.count ? threads::block.all[other]->shown[turn] : value;
}
static u32 from_across(u32 value, u32 bits) {
    return exchange(value, [=](u32 lane) { return lane ^ bits; });
}
static u32 from_above(u32 value, u32 lanes) {
    return exchange(value, [=](u32 lane) { return lane + lanes < WARP ? lane + lanes : lane; });
}
static u32 from_below(u32 value, u32 lanes) {
    return exchange(value, [=](u32 lane) { return lane >= lanes ? lane - lanes : lane; });
}
static u32 from_lane(u32 value, u32 which) {
    return exchange(value, [=](u32) { return which; });
}
static u32 votes(bool predicate) {
    const u32 me = threads::block.current, turn = threads::self().turn++ % 2;
    threads::self().shown[turn] = predicate;
    wait_for_warp();
    u32 bits = 0;
    for (u32 lane = 0, first = me - me % WARP; lane < WARP; ++lane)
        if (first + lane < threads::block.count)
            bits |= threads::block.all[first + lane]->shown[turn] << lane;
    return bits;
}

static u32 count_bits(u32 bits) { return __builtin_popcount(bits); }
static u32 lowest_bit(u32 bits) { return bits ? __builtin_ctz(bits) : 32; }
static u32 leading_zeros(u32 bits) { return bits ? __builtin_clz(bits) : 32; }
static u64 upper_product(u64 a, u64 b) { return static_cast<unsigned __int128>(a) * b >> 64; }

// Blocks run one after the other, and so do their threads.
static void atomic_min(u64 *at, u64 value) { *at = value < *at ? value : *at; }
static u32 atomic_add(u32 *at, u32 value) { return std::exchange(*at, *at + value); }
static u32 fresh(const u32 *at) { return *at; }
static void order_writes() {}
static void atomic_or(u32 *at, u32 value) { *at |= value; }

static u32 pick_bytes(u32 low, u32 high, u32 which) {
    const u64 bytes = static_cast<u64>(high) << 32 | low;
    u32 picked = 0;
    for (int i = 0; i < 4; ++i)
        picked |= static_cast<u32>(bytes >> (8 * (which >> (4 * i) & 7)) & 0xff) << (8 * i);
    return picked;
}

// As the driver's functions: what a kernel takes, 0 if there is none of this name; and a launch of it.
extern "C" std::size_t parameter_bytes(const char *name) {
    for (Registered *kernel = registered_kernels; kernel; kernel = kernel->next)
        if (!std::strcmp(kernel->name, name))
            return kernel->bytes;
    return 0;
}

extern "C" int launch(const char *name, void **parameters, u32 grid, u32 count) {
    for (Registered *kernel = registered_kernels; kernel; kernel = kernel->next)
        if (!std::strcmp(kernel->name, name)) {
            for (u32 number = 0; number < grid; ++number)
                threads::run(number, grid, count, [&] { kernel->run(parameters[0]); });
            return 1;
        }
    return 0;
}

#endif
