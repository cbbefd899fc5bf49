// Folds: the elements of several inputs become one, in the order of the canonical tree, with one pass
// over memory.
//
// This file is compiled once for each type: NAME is the type's name in the names of kernels, FORMAT
// its format, and FLOATS is 1 for floats. Bits depend on the tree alone, which is
//
//     sum(0, n) = sum(0, k) + sum(k, n), where k is the largest power of two that is smaller than n.
//
// For up to eight inputs, and for sixteen, the compiler writes the tree out and nothing of it is left
// at run time (`fold_few`). For any other number (`fold_any`) leaves are read in order, eight at a time,
// and merged as a binary counter counts: `stack` holds the subtrees that are complete, largest first,
// one for each bit of the number of leaves read. A new subtree of eight leaves is the lowest bit added
// to the counter: as long as the top of the stack has the same size, both become one subtree of twice
// the size, the left one being the older. A subtree that is made this way begins at a multiple of its
// size, which is a power of two, and so is the canonical tree over its leaves: each of its halves is.
// At the end the stack holds, from left to right, the subtrees of the bits of n, from the highest to the
// lowest. The canonical tree splits off the highest bit, then, on its right side, the next, and so
// on: it is the merge of what is left from right to left. The last n mod 8 leaves are such bits as well.
//
// A thread reads each byte of its own elements from every input before it writes any of them, and no
// other thread reads them. So the output may be one of the inputs. Where the result is wanted in two
// places, both are written while it is in registers, which saves reading it again.

#include "element.cuh"

// Threads of a block; the launcher has the same number.
constexpr u32 BLOCK = 256;
// Inputs of `fold_any` that fit a launch's parameters, of which there may be 4 KiB.
constexpr u32 LISTED = 480;
// Leaves that `fold_any` reads at a time: as many reads under way.
constexpr int LEAVES = 8;
// Subtrees that the largest number of inputs, 65535, leaves: one for each bit.
constexpr int LEVELS = 16;

// The call. The first `head` elements and the last few are single ones; those between are vectors of 16
// bytes, which are aligned in the output and in every input. Where these are not aligned alike, all
// elements are single; so it is with the second output `also`, unless that is null. The root is divided
// unless `divisor` is zero.
struct Call {
    char *output;
    char *also;
    u64 count;
    u64 head;
    u64 divisor;
};

template <int N> struct Few {
    const char *at[N];
};

// Any number of inputs: in `table`, or if that is null, in `listed`.
struct Any {
    const char *const *table;
    u64 count;
    const char *listed[LISTED];

    __device__ const char *at(u32 input) const { return table ? table[input] : listed[input]; }
};

// What one thread reads of an input at a time: 16 bytes, or one element.
template <class Format> struct Vector {
    static constexpr int WORDS = 16 / sizeof(typename Format::Word);
    static constexpr u32 ELEMENTS = 16 / sizeof(typename Format::Element);
    typename Format::Word words[WORDS];

    static __device__ Vector read(const char *address) {
        Vector vector;
        load(vector.words, address);
        return vector;
    }
    __device__ void write(char *address) const { store(address, words); }
};

template <class Format> struct Single {
    static constexpr int WORDS = 1;
    typename Format::Word words[1];

    static __device__ Single read(const char *address) {
        return Single{{*reinterpret_cast<const typename Format::Element *>(address)}};
    }
    __device__ void write(char *address) const {
        *reinterpret_cast<typename Format::Element *>(address) =
            static_cast<typename Format::Element>(words[0]);
    }
};

// A reduction of a type: how two values are combined, and how the root is finished. Only sums are
// divided; a branch that all threads take alike costs less than a kernel of its own.
template <class Format_, class Operation, bool DIVIDES> struct Reduction {
    typedef Format_ Format;

    template <class Value> static __device__ Value combine(const Value &left, const Value &right) {
        Value value;
#pragma unroll
        for (int i = 0; i < Value::WORDS; ++i)
            value.words[i] = Format::combine(Operation(), left.words[i], right.words[i]);
        return value;
    }

    // Divides the root and writes it.
    template <class Value> static __device__ void finish(Value root, const Call &call, u64 offset) {
        if (DIVIDES && call.divisor) {
#pragma unroll
            for (int i = 0; i < Value::WORDS; ++i)
                root.words[i] = Format::divide(root.words[i], static_cast<u32>(call.divisor));
        }
        root.write(call.output + offset);
        if (call.also)
            root.write(call.also + offset);
    }
};

__device__ constexpr int split(int n) {
    int half = 1;
    while (2 * half < n)
        half *= 2;
    return half;
}

// The canonical tree over N values in registers.
template <class R, int N, class Value> __device__ Value canonical(const Value *values) {
    if constexpr (N == 1) {
        return values[0];
    } else {
        constexpr int HALF = split(N);
        return R::combine(canonical<R, HALF>(values), canonical<R, N - HALF>(values + HALF));
    }
}

// Reads N neighbouring inputs.
template <int N, class Value>
__device__ void read(Value (&values)[N], const Any &inputs, u32 first, u64 offset) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        values[i] = Value::read(inputs.at(first + i) + offset);
}

// The tree over any number of inputs at an offset, by the binary counter.
template <class R, class Value> __device__ Value tree(const Any &inputs, u64 offset) {
    Value stack[LEVELS];
    int top = 0;
    const u32 groups = static_cast<u32>(inputs.count) / LEAVES;
#pragma unroll 1
    for (u32 group = 0; group < groups; ++group) {
        Value leaves[LEAVES];
        read(leaves, inputs, group * LEAVES, offset);
        Value subtree = canonical<R, LEAVES>(leaves);
#pragma unroll 1
        for (u32 counter = group; counter & 1; counter >>= 1)
            subtree = R::combine(stack[--top], subtree);
        stack[top++] = subtree;
    }

    const u32 rest = static_cast<u32>(inputs.count) % LEAVES;
    u32 next = groups * LEAVES;
    Value four[4], pair[2], one[1];
    if (rest & 4) {
        read(four, inputs, next, offset);
        next += 4;
    }
    if (rest & 2) {
        read(pair, inputs, next, offset);
        next += 2;
    }
    if (rest & 1)
        read(one, inputs, next, offset);

    // These subtrees go onto the stack as well, which then is merged from its top, the right side.
    if (rest & 4)
        stack[top++] = canonical<R, 4>(four);
    if (rest & 2)
        stack[top++] = canonical<R, 2>(pair);
    if (rest & 1)
        stack[top++] = one[0];
    Value root = stack[--top];
#pragma unroll 1
    while (top > 0)
        root = R::combine(stack[--top], root);
    return root;
}

// The number of vectors of a call.
template <class Format> __device__ u64 vectors(const Call &call) {
    return (call.count - call.head) / Vector<Format>::ELEMENTS;
}

// Runs `one` with the place in memory of each single element, before and after the vectors.
template <class Format, class One> __device__ void singles(const Call &call, One one) {
    const u64 within = vectors<Format>(call) * Vector<Format>::ELEMENTS;
#pragma unroll 1
    for (u64 i = blockIdx.x * u64(BLOCK) + threadIdx.x; i < call.count - within; i += gridDim.x * u64(BLOCK))
        one((i < call.head ? i : i + within) * sizeof(typename Format::Element));
}

// Folds N inputs, DEPTH vectors of each at a time, all read before the first is combined.
template <class R, int N, int DEPTH> __device__ void fold_few(const Call &call, const Few<N> &inputs) {
    typedef typename R::Format Format;
    typedef Vector<Format> V;
    constexpr u64 TILE = BLOCK * DEPTH;
    const u64 end = vectors<Format>(call);
#pragma unroll 1
    for (u64 tile = blockIdx.x * TILE; tile < end; tile += gridDim.x * TILE) {
        const u64 first = tile + threadIdx.x;
        const u64 offset = call.head * sizeof(typename Format::Element) + first * 16;
        V values[DEPTH][N];
#pragma unroll
        for (int depth = 0; depth < DEPTH; ++depth)
            if (first + depth * BLOCK < end)
#pragma unroll
                for (int input = 0; input < N; ++input)
                    values[depth][input] = V::read(inputs.at[input] + offset + depth * BLOCK * 16);
#pragma unroll
        for (int depth = 0; depth < DEPTH; ++depth)
            if (first + depth * BLOCK < end)
                R::finish(canonical<R, N>(values[depth]), call, offset + depth * BLOCK * 16);
    }
    singles<Format>(call, [&](u64 offset) {
        Single<Format> values[N];
#pragma unroll
        for (int input = 0; input < N; ++input)
            values[input] = Single<Format>::read(inputs.at[input] + offset);
        R::finish(canonical<R, N>(values), call, offset);
    });
}

// Folds any number of inputs, a vector at a time.
template <class R> __device__ void fold_any(const Call &call, const Any &inputs) {
    typedef typename R::Format Format;
    const u64 end = vectors<Format>(call);
#pragma unroll 1
    for (u64 i = blockIdx.x * u64(BLOCK) + threadIdx.x; i < end; i += gridDim.x * u64(BLOCK)) {
        const u64 offset = call.head * sizeof(typename Format::Element) + i * 16;
        R::finish(tree<R, Vector<Format>>(inputs, offset), call, offset);
    }
    singles<Format>(call, [&](u64 offset) {
        R::finish(tree<R, Single<Format>>(inputs, offset), call, offset);
    });
}

#define JOIN_(a, b, c, d) a##_##b##_##c##_##d
#define JOIN(a, b, c, d) JOIN_(a, b, c, d)
#define KERNEL(reduction, inputs) \
    extern "C" __global__ void __launch_bounds__(BLOCK) JOIN(fold, NAME, reduction, inputs)

#define FOLD_ANY(reduction, Operation, DIVIDES) \
    KERNEL(reduction, any)(const __grid_constant__ Call call, const __grid_constant__ Any inputs) { \
        fold_any<Reduction<FORMAT, Operation, DIVIDES>>(call, inputs); \
    }

#define SUM_FEW(n, depth) \
    KERNEL(sum, n)(const __grid_constant__ Call call, const __grid_constant__ Few<n> inputs) { \
        fold_few<Reduction<FORMAT, Sum, true>, n, depth>(call, inputs); \
    }

FOLD_ANY(sum, Sum, true)
FOLD_ANY(min, Min, false)
FOLD_ANY(max, Max, false)
FOLD_ANY(product, Product, false)
#if FLOATS
// Gradients are floats, and are summed. For all else `fold_any` is quick enough, and every kernel costs
// time when its module is loaded. A depth of eight reads in all: with fewer, memory waits for threads; with
// more, registers run out, and there are fewer threads.
SUM_FEW(1, 8)
SUM_FEW(2, 4)
SUM_FEW(3, 2)
SUM_FEW(4, 2)
SUM_FEW(5, 1)
SUM_FEW(6, 1)
SUM_FEW(7, 1)
SUM_FEW(8, 1)
SUM_FEW(16, 1)
#else
FOLD_ANY(and, And, false)
FOLD_ANY(or, Or, false)
FOLD_ANY(xor, Xor, false)
#endif

// Writes the addresses of inputs into a table, for folds of more than fit the parameters of a launch.
// They come as parameters themselves, so that no memory of the host has to outlive the call.
extern "C" __global__ void __launch_bounds__(BLOCK)
    list_inputs(const char **table, u64 first, const __grid_constant__ Any inputs) {
    for (u64 i = threadIdx.x; i < inputs.count; i += BLOCK)
        table[first + i] = inputs.listed[i];
}
