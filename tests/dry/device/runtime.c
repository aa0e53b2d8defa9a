/* The functions of the CUDA runtime that torch calls. */
#define _GNU_SOURCE
#include "dry.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static __thread cudaError_t last; /* the thread's last error */
static cudaError_t keep(int error) {
    if (error) last = error;
    return error;
}
/* Counts the call, keeps its error for cudaGetLastError, and returns it. */
#define ANSWER(result)       \
    do {                     \
        COUNT(__func__);     \
        return keep(result); \
    } while (0)

/* --- devices and errors ------------------------------------------------------------------------
 */
cudaError_t cudaGetDeviceCount(int *n) {
    *n = 1;
    ANSWER(0);
}
cudaError_t cudaGetDevice(int *d) {
    *d = 0;
    ANSWER(0);
}
cudaError_t cudaSetDevice(int d) { ANSWER(d ? cudaErrorInvalidDevice : 0); }
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    *v = dry_attribute(a);
    ANSWER(0);
}
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
    snprintf(s, n, "0000:01:00.0");
    ANSWER(0);
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) {
    *can = 0;
    ANSWER(0);
}
cudaError_t cudaDeviceEnablePeerAccess(int d, unsigned f) {
    ANSWER(cudaErrorPeerAccessUnsupported);
}
cudaError_t cudaDriverGetVersion(int *v) {
    *v = 13000;
    ANSWER(0);
}
cudaError_t cudaRuntimeGetVersion(int *v) {
    *v = 13000;
    ANSWER(0);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    ANSWER(0);
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    COUNT(__func__);
    memset(p, 0, sizeof *p);
    strcpy(p->name, dry_config()->card->name);
    memcpy(p->uuid.bytes, "dry-device-00000", 16);
    p->totalGlobalMem = dry_config()->total;
#define A(FIELD, N) p->FIELD = dry_attribute(N)
    A(maxThreadsPerBlock, 1), A(sharedMemPerBlock, 8), A(totalConstMem, 9), A(warpSize, 10),
        A(memPitch, 11), A(regsPerBlock, 12);
    A(textureAlignment, 14), A(multiProcessorCount, 16), A(canMapHostMemory, 19),
        A(concurrentKernels, 31), A(ECCEnabled, 32);
    A(pciBusID, 33), A(memoryBusWidth, 37), A(l2CacheSize, 38), A(maxThreadsPerMultiProcessor, 39),
        A(asyncEngineCount, 40);
    A(unifiedAddressing, 41), A(major, 75), A(minor, 76), A(streamPrioritiesSupported, 78),
        A(globalL1CacheSupported, 79);
    A(localL1CacheSupported, 80), A(sharedMemPerMultiprocessor, 81), A(regsPerMultiprocessor, 82),
        A(managedMemory, 83);
    A(concurrentManagedAccess, 89), A(computePreemptionSupported, 90),
        A(canUseHostPointerForRegisteredMem, 91);
    A(cooperativeLaunch, 95), A(sharedMemPerBlockOptin, 97), A(hostRegisterSupported, 99),
        A(maxBlocksPerMultiProcessor, 106);
    A(reservedSharedMemPerBlock, 111), A(memoryPoolsSupported, 115), A(clusterLaunch, 120);
    for (int i = 0; i < 3; i++)
        A(maxThreadsDim[i], 2 + i), A(maxGridSize[i], 5 + i);
    p->persistingL2CacheMaxSize = p->l2CacheSize * 5 / 8;
    p->accessPolicyMaxWindowSize = 134217728;
    p->hostNumaId = -1;
    return 0;
}
cudaError_t cudaGetLastError(void) {
    COUNT(__func__);
    cudaError_t error = last;
    last = 0;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t error) {
    switch ((int)error) {
        case OK:
            return "cudaSuccess";
        case OUT_OF_MEMORY:
            return "cudaErrorMemoryAllocation";
        case NOT_READY:
            return "cudaErrorNotReady";
        default:
            return "cudaErrorOfDry";
    }
}
const char *cudaGetErrorString(cudaError_t error) {
    static __thread char text[64];
    switch ((int)error) {
        case OK:
            return "no error";
        case INVALID_VALUE:
            return "invalid argument";
        case OUT_OF_MEMORY:
            return "out of memory";
        case NOT_SUPPORTED:
            return "operation not supported";
        case ALREADY_REGISTERED:
            return "part or all of the requested memory range is already mapped";
    }
    snprintf(text, sizeof text, "CUDA error %d (dry)", error);
    return text;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    COUNT(__func__);
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    *f = dlsym(RTLD_DEFAULT, newer);
    if (!*f) *f = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (!*f) dry_unmodelled(name);
    return *f || status ? 0 : keep(cudaErrorSymbolNotFound);
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **f, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPointByVersion(name, f, 13000, flags, status);
}
cudaError_t cudaProfilerStart(void) { ANSWER(0); }
cudaError_t cudaProfilerStop(void) { ANSWER(0); }

/* --- memory ----------------------------------------------------------------------------------- */
cudaError_t cudaMalloc(void **p, size_t n) { ANSWER(dry_malloc(p, n, __func__)); }
/* Freeing waits for the device. */
cudaError_t cudaFree(void *p) {
    if (p) dry_device_synchronize("cudaFree");
    ANSWER(dry_free(p, __func__));
}
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) {
    ANSWER(dry_malloc(p, n, __func__));
}
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { ANSWER(dry_free(p, __func__)); }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = dry_config()->total;
    *free = *total - dry_used();
    ANSWER(0);
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) {
    COUNT(__func__);
    *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int error = *p == MAP_FAILED ? OUT_OF_MEMORY : dry_pin(*p, n);
    if (error && *p != MAP_FAILED) munmap(*p, n);
    return keep(error);
}
cudaError_t cudaFreeHost(void *p) { ANSWER(dry_unpin(p, 1)); }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) { ANSWER(dry_pin(p, n)); }
cudaError_t cudaHostUnregister(void *p) { ANSWER(dry_unpin(p, 0)); }
cudaError_t cudaHostGetFlags(unsigned *flags, void *p) {
    *flags = 0;
    ANSWER(dry_is_pinned(p, 1) ? 0 : 1);
}
cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned flags) {
    *d = h;
    ANSWER(0);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->devicePointer = a->hostPointer = (void *)p;
    a->type = dry_is_device(p)      ? cudaMemoryTypeDevice
              : dry_is_pinned(p, 1) ? cudaMemoryTypeHost
                                    : cudaMemoryTypeUnregistered;
    if (a->type == cudaMemoryTypeDevice) a->hostPointer = NULL;
    if (a->type == cudaMemoryTypeUnregistered) a->devicePointer = NULL, a->device = -2;
    ANSWER(0);
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
    ANSWER(dry_copy(d, s, n, NULL, 0));
}
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k,
                            cudaStream_t t) {
    ANSWER(dry_copy(d, s, n, t, 1));
}
cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, cudaStream_t t) {
    ANSWER(dry_copy(d, s, n, t, 1));
}
cudaError_t cudaMemset(void *d, int v, size_t n) { ANSWER(dry_set(d, v, n, NULL, 0)); }
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t t) {
    ANSWER(dry_set(d, v, n, t, 1));
}
cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h,
                              enum cudaMemcpyKind k, cudaStream_t t) {
    COUNT(__func__);
    int error = 0;
    for (size_t i = 0; i < h && !error; i++)
        error = dry_copy((char *)d + i * dp, (char *)s + i * sp, w, t, 1);
    return keep(error);
}
static char symbols[1 << 16]; /* where all __device__ variables are said to live */
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) {
    *p = symbols;
    ANSWER(0);
}
cudaError_t cudaMemcpyToSymbol(const void *y, const void *s, size_t n, size_t o,
                               enum cudaMemcpyKind k) {
    ANSWER(0);
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) {
    *p = (cudaMemPool_t)symbols;
    ANSWER(0);
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { ANSWER(0); }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) {
    *(uint64_t *)v = dry_used() - dry_config()->context;
    ANSWER(0);
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t p, const struct cudaMemAccessDesc *d, size_t n) {
    ANSWER(0);
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t p, size_t n) { ANSWER(0); }

/* --- streams and events ----------------------------------------------------------------------- */
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
    *s = dry_stream_new(f, p);
    ANSWER(0);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) {
    *s = dry_stream_new(f, 0);
    ANSWER(0);
}
cudaError_t cudaStreamCreate(cudaStream_t *s) {
    *s = dry_stream_new(0, 0);
    ANSWER(0);
}
cudaError_t cudaStreamDestroy(cudaStream_t s) { ANSWER(0); }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
    *p = dry_stream_priority(s);
    ANSWER(0);
}
cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned *f) {
    *f = dry_stream_flags(s);
    ANSWER(0);
}
cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long *id) {
    *id = dry_stream_id(s);
    ANSWER(0);
}
cudaError_t cudaStreamGetDevice(cudaStream_t s, int *d) {
    *d = 0;
    ANSWER(0);
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
    COUNT(__func__);
    return dry_stream_query(s);
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    dry_stream_synchronize(s, __func__);
    ANSWER(0);
}
cudaError_t cudaDeviceSynchronize(void) {
    dry_device_synchronize(__func__);
    ANSWER(0);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) {
    dry_stream_wait(s, e);
    ANSWER(0);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) {
    *c = cudaStreamCaptureStatusNone;
    return 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c,
                                     unsigned long long *id, cudaGraph_t *g,
                                     const cudaGraphNode_t **d, const cudaGraphEdgeData **e,
                                     size_t *n) {
    *c = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (n) *n = 0;
    return 0;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return 0; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data,
                                  unsigned flags) {
    f(s, 0, data);
    ANSWER(0);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) {
    f(data);
    ANSWER(0);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
    *e = dry_event_new();
    ANSWER(0);
}
cudaError_t cudaEventCreate(cudaEvent_t *e) {
    *e = dry_event_new();
    ANSWER(0);
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    dry_event_free(e);
    ANSWER(0);
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    dry_event_record(e, s);
    ANSWER(0);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
    dry_event_record(e, s);
    ANSWER(0);
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
    COUNT(__func__);
    return keep(dry_event_query(e));
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    dry_event_synchronize(e, __func__);
    ANSWER(0);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    *ms = dry_event_milliseconds(a, b);
    ANSWER(0);
}

/* --- kernels ---------------------------------------------------------------------------------- */
/* Kernels of fat binaries by their entry on the host, in an open hash table. */
enum { ROOM_BITS = 19, ROOM = 1 << ROOM_BITS };
typedef struct {
    const void *entry;
    Kernel kernel;
} Row;
static Row *table;
static void **binary_slot;
static Kernel *lookup(const void *entry) {
    static const uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!table) table = mmap(NULL, ROOM * sizeof *table, PROT_READ | PROT_WRITE, flags, -1, 0);
    size_t i = ((uintptr_t)entry * GOLDEN) >> (64 - ROOM_BITS);
    while (table[i].entry && table[i].entry != entry)
        i = (i + 1) & (ROOM - 1);
    if (!table[i].entry) {
        table[i].entry = entry;
        table[i].kernel.name = "unregistered";
        table[i].kernel.parameters = -1;
    }
    return &table[i].kernel;
}
void **__cudaRegisterFatBinary(void *f) { return (void **)&binary_slot; }
char __cudaInitModule(void **h) { return 1; }
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
void __cudaRegisterFunction(void **h, const char *entry, char *device, const char *name, int limit,
                            uint3 *tid, uint3 *bid, dim3 *bd, dim3 *gd, int *w) {
    lookup(entry)->name = name;
}
void __cudaRegisterVar(void **h, char *host, char *device, const char *name, int ext, size_t size,
                       int constant, int global) {}
typedef struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} Call;
static __thread Call calls[16];
static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                     struct CUstream_st *stream) {
    if (depth == 16) return 1;
    calls[depth++] = (Call){grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (!depth) return 1;
    Call c = calls[--depth];
    *grid = c.grid, *block = c.block, *shared = c.shared, *(void **)stream = c.stream;
    return 0;
}
static cudaError_t launch(Kernel *k, dim3 g, dim3 b, void **args, size_t shared, void *stream) {
    Size grid = {g.x, g.y, g.z}, block = {b.x, b.y, b.z};
    int error = dry_launch(k, grid, block, shared, stream, args);
    return keep(error ? cudaErrorInvalidConfiguration : OK);
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *entry) {
    *k = (cudaKernel_t)lookup(entry);
    return 0;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **args, size_t shared,
                               cudaStream_t s) {
    COUNT("cudaLaunchKernel");
    return launch((Kernel *)k, g, b, args, shared, s);
}
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **args, size_t shared,
                             cudaStream_t s) {
    COUNT("cudaLaunchKernel");
    return launch(lookup(f), g, b, args, shared, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
    COUNT("cudaLaunchKernel");
    return launch(lookup(f), c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **args, size_t shared,
                                        cudaStream_t s) {
    COUNT("cudaLaunchKernel");
    return launch(lookup(f), g, b, args, shared, s);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->numRegs = 64;
    a->ptxVersion = a->binaryVersion = dry_config()->card->sm;
    a->maxDynamicSharedSizeBytes = 49152;
    ANSWER(0);
}
static cudaError_t set_shared(Kernel *k, int attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value > dry_attribute(97)) return keep(cudaErrorInvalidValue);
        k->max_shared = value;
    }
    return 0;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) {
    COUNT(__func__);
    return set_shared(lookup(f), a, v);
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute a, int v,
                                            int d) {
    COUNT(__func__);
    return set_shared((Kernel *)k, a, v);
}
cudaError_t cudaFuncGetName(const char **name, const void *f) {
    *name = lookup(f)->name;
    return 0;
}
static int blocks(int threads, size_t shared) {
    int n = 2048 / (threads ? threads : 1);
    if (shared && n > (int)(dry_attribute(81) / (shared + 1024)))
        n = dry_attribute(81) / (shared + 1024);
    return n > 32 ? 32 : n < 1 ? 1 : n;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int t,
                                                                   size_t m, unsigned flags) {
    *n = blocks(t, m);
    ANSWER(0);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int t, size_t m) {
    *n = blocks(t, m);
    ANSWER(0);
}
cudaError_t cudaOccupancyMaxActiveClusters(int *n, const void *f, const cudaLaunchConfig_t *c) {
    *n = dry_attribute(16) / 2;
    ANSWER(0);
}
