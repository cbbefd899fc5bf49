// The kernels, compiled for the host: what stands in for the device, and then their source.
//
// One thread of the device at a time: the test calls a kernel for each thread of each block, and says
// before which one it is; or `launch` does, for a driver whose device is the host.

#include "host.h"

extern "C" void stand_at(u32 block, u32 thread, u32 grid) {
    blockIdx.x = block;
    threadIdx.x = thread;
    gridDim.x = grid;
}

#include "../../kernels/fold.cu"

template <class... Parameters, int... I>
static void run(void (*kernel)(Parameters...), void **parameters, u32 grid, u32 block, std::integer_sequence<int, I...>) {
    for (u32 at = 0; at < grid; ++at)
        for (u32 thread = 0; thread < block; ++thread) {
            stand_at(at, thread, grid);
            kernel(*static_cast<Parameters *>(parameters[I])...);
        }
}

template <class... Parameters>
static int run(void (*kernel)(Parameters...), void **parameters, u32 grid, u32 block) {
    run(kernel, parameters, grid, block, std::make_integer_sequence<int, sizeof...(Parameters)>());
    return 1;
}

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)
#define IF_NAMED(kernel) \
    if (!std::strcmp(name, TEXT(kernel))) \
    return run(kernel, parameters, grid, block)
#define IF_FOLD(reduction, inputs) IF_NAMED(JOIN(fold, NAME, reduction, inputs))

// Runs the kernel of this name, as the driver's function does; 0 if there is none.
extern "C" int launch(const char *name, void **parameters, u32 grid, u32 block) {
    IF_NAMED(list_inputs);
    IF_FOLD(sum, any);
    IF_FOLD(min, any);
    IF_FOLD(max, any);
    IF_FOLD(product, any);
#if FLOATS
    IF_FOLD(sum, 1);
    IF_FOLD(sum, 2);
    IF_FOLD(sum, 3);
    IF_FOLD(sum, 4);
    IF_FOLD(sum, 5);
    IF_FOLD(sum, 6);
    IF_FOLD(sum, 7);
    IF_FOLD(sum, 8);
    IF_FOLD(sum, 16);
#else
    IF_FOLD(and, any);
    IF_FOLD(or, any);
    IF_FOLD(xor, any);
#endif
    return 0;
}
