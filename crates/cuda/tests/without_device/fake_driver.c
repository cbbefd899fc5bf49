// A CUDA driver without a device behind it. INIT is what cuInit returns, and DEVICES how many it shows.
//
// Every call is counted, and fails with `fake_status` if that is set. Memory ends at a terabyte, and
// no PTX compiles that begins with an exclamation mark.

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

int fake_status = 0;
int fake_calls = 0;
int fake_launches = 0;
int fake_objects = 0;

#define CALL(...) \
    do { \
        ++fake_calls; \
        if (fake_status) \
            return fake_status; \
        __VA_ARGS__; \
        return 0; \
    } while (0)

#define NOTHING(name) int name(void) { CALL(); }
#define MAKES(name) int name(void **made) { CALL(*made = (void *)(uintptr_t)(0x1000 * ++fake_objects)); }
#define ENDS(name) int name(void) { CALL(--fake_objects); }

int cuInit(unsigned flags) { (void)flags; return INIT; }
int cuDriverGetVersion(int *version) { CALL(*version = 13000); }
int cuDeviceGetCount(int *count) { CALL(*count = DEVICES); }
int cuDeviceGet(int *device, int ordinal) { CALL(*device = ordinal); }
int cuDeviceGetName(char *name, int length, int device) { CALL(snprintf(name, length, "fake %d", device)); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    CALL(*value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : 1);
}
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
    CALL(if (bytes >> 40) return 2; *pointer = 0x1000000 * (uint64_t)++fake_objects);
}
int cuMemAllocAsync(uint64_t *pointer, size_t bytes, void *stream) { (void)stream; return cuMemAlloc_v2(pointer, bytes); }
int cuModuleLoadDataEx(void **module, const char *image, unsigned count, int *options, void **values) {
    (void)count; (void)options;
    CALL(if (*image == '!') { strcpy(values[0], "ptxas: line 1: no\nptxas: fatal"); return 218; }
         *module = (void *)(uintptr_t)(0x1000 * ++fake_objects));
}
int cuLaunchKernel(void) { CALL(++fake_launches); }
int cuCtxGetCurrent(void **context) { CALL(*context = 0); }
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    (void)value; (void)attribute; (void)pointer;
    CALL(return 1);
}
int cuStreamQuery(void *stream) { (void)stream; CALL(return 600); }

int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 4 ? "CUDA_ERROR_DEINITIALIZED" : code == 218 ? "CUDA_ERROR_INVALID_PTX" : 0;
    return *name ? 0 : 1;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 2 ? "out of memory" : 0;
    return *text ? 0 : 1;
}

MAKES(cuDevicePrimaryCtxRetain) ENDS(cuDevicePrimaryCtxRelease_v2)
MAKES(cuStreamCreateWithPriority) ENDS(cuStreamDestroy_v2)
MAKES(cuEventCreate) ENDS(cuEventDestroy_v2)
MAKES(cuIpcOpenEventHandle)
MAKES(cuMemHostAlloc) ENDS(cuMemFreeHost)
MAKES(cuIpcOpenMemHandle_v2) ENDS(cuIpcCloseMemHandle)
ENDS(cuMemFree_v2) ENDS(cuMemFreeAsync) ENDS(cuModuleUnload)

NOTHING(cuDeviceGetUuid_v2) NOTHING(cuDeviceTotalMem_v2) NOTHING(cuDeviceGetPCIBusId) NOTHING(cuDeviceCanAccessPeer)
NOTHING(cuCtxPushCurrent_v2) NOTHING(cuCtxPopCurrent_v2) NOTHING(cuCtxSynchronize) NOTHING(cuCtxGetStreamPriorityRange)
NOTHING(cuCtxEnablePeerAccess) NOTHING(cuModuleGetFunction) NOTHING(cuMemGetInfo_v2) NOTHING(cuMemHostRegister_v2)
NOTHING(cuMemHostUnregister) NOTHING(cuMemHostGetDevicePointer_v2) NOTHING(cuIpcGetMemHandle) NOTHING(cuMemcpyAsync)
NOTHING(cuMemcpyHtoDAsync_v2) NOTHING(cuMemcpyDtoHAsync_v2) NOTHING(cuMemcpyDtoDAsync_v2) NOTHING(cuMemcpyPeerAsync)
NOTHING(cuMemcpy2DAsync_v2)
NOTHING(cuMemsetD8Async) NOTHING(cuMemsetD32Async) NOTHING(cuStreamSynchronize) NOTHING(cuStreamWaitEvent)
NOTHING(cuStreamIsCapturing) NOTHING(cuEventRecord) NOTHING(cuEventQuery) NOTHING(cuEventSynchronize)
NOTHING(cuEventElapsedTime) NOTHING(cuIpcGetEventHandle)
