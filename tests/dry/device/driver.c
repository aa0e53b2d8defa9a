/* The functions of the CUDA driver that c10, Triton and nvrtc's wrapper in torch call. */
#define _GNU_SOURCE
#include "dry.h"
#include <cuda.h>
#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ANSWER(result)   \
    do {                 \
        COUNT(__func__); \
        return (result); \
    } while (0)

CUresult cuInit(unsigned f) { ANSWER(0); }
CUresult cuDriverGetVersion(int *v) {
    *v = 13000;
    ANSWER(0);
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    switch ((int)error) {
        case OK:
            *text = "no error";
            break;
        case INVALID_VALUE:
            *text = "invalid argument";
            break;
        case OUT_OF_MEMORY:
            *text = "out of memory";
            break;
        default:
            *text = "an error of the dry driver";
    }
    return OK;
}
CUresult cuGetErrorName(CUresult e, const char **s) { return cuGetErrorString(e, s); }
CUresult cuDeviceGet(CUdevice *d, int i) {
    *d = 0;
    ANSWER(i ? CUDA_ERROR_INVALID_DEVICE : 0);
}
CUresult cuDeviceGetCount(int *n) {
    *n = 1;
    ANSWER(0);
}
CUresult cuDeviceGetName(char *s, int n, CUdevice d) {
    snprintf(s, n, "%s", dry_config()->card->name);
    ANSWER(0);
}
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
    *v = dry_attribute(a);
    ANSWER(0);
}
CUresult cuDeviceTotalMem(size_t *n, CUdevice d) {
    *n = dry_config()->total;
    ANSWER(0);
}
CUresult cuDeviceGetUuid(CUuuid *u, CUdevice d) {
    memcpy(u, "dry-device-00000", 16);
    ANSWER(0);
}
CUresult cuDeviceGetPCIBusId(char *s, int n, CUdevice d) {
    snprintf(s, n, "0000:01:00.0");
    ANSWER(0);
}

static CUcontext context = (CUcontext) "context";
static __thread CUcontext current;
CUresult cuCtxGetCurrent(CUcontext *c) {
    *c = current ? current : context;
    ANSWER(0);
}
CUresult cuCtxSetCurrent(CUcontext c) {
    current = c;
    ANSWER(0);
}
CUresult cuCtxPushCurrent(CUcontext c) {
    current = c;
    ANSWER(0);
}
CUresult cuCtxPopCurrent(CUcontext *c) {
    if (c) *c = context;
    ANSWER(0);
}
CUresult cuCtxGetDevice(CUdevice *d) {
    *d = 0;
    ANSWER(0);
}
CUresult cuCtxGetLimit(size_t *v, CUlimit l) {
    *v = 1 << 20;
    ANSWER(0);
}
CUresult cuCtxSetLimit(CUlimit l, size_t v) { ANSWER(0); }
CUresult cuCtxSynchronize(void) {
    dry_device_synchronize(__func__);
    ANSWER(0);
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
    *c = context;
    ANSWER(0);
}
CUresult cuDevicePrimaryCtxRelease(CUdevice d) { ANSWER(0); }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) {
    *flags = 0, *active = 1;
    ANSWER(0);
}

/* --- modules -----------------------------------------------------------------------------------*/
enum { SIZED = 4, KPARAM_INFO = 0x17 }; /* EIFMT_SVAL, EIATTR_KPARAM_INFO of nvdisasm */
typedef struct Module {
    const char *image;
    struct Function *functions;
} Module;
typedef struct Function {
    Kernel kernel;
    Module *module;
    struct Function *next;
    int regs;
} Function;

/* A cubin is an ELF file: the sizes of a kernel's parameters stand in its section .nv.info.NAME. */
static void read_parameters(const char *image, const char *name, Kernel *k) {
    const Elf64_Ehdr *h = (const void *)image;
    k->parameters = -1;
    if (!image || memcmp(h->e_ident, ELFMAG, SELFMAG)) return;
    const Elf64_Shdr *s = (const void *)(image + h->e_shoff);
    const char *names = image + s[h->e_shstrndx].sh_offset;
    char wanted[512];
    snprintf(wanted, sizeof wanted, ".nv.info.%s", name);
    for (int i = 0; i < h->e_shnum; i++) {
        if (strcmp(names + s[i].sh_name, wanted)) continue;
        const uint8_t *p = (const void *)(image + s[i].sh_offset), *e = p + s[i].sh_size;
        k->parameters = 0;
        while (p + 4 <= e) {
            unsigned format = p[0], attribute = p[1], size = p[2] | p[3] << 8;
            p += 4;
            if (format != SIZED) continue; /* the value stands in the size field */
            if (attribute == KPARAM_INFO && size >= 12) {
                unsigned ordinal = p[4] | p[5] << 8, word;
                memcpy(&word, p + 8, 4);
                if (ordinal < 64) {
                    k->parameter_bytes[ordinal] = word >> 18;
                    if ((int)ordinal >= k->parameters) k->parameters = ordinal + 1;
                }
            }
            p += size;
        }
    }
}
CUresult cuModuleLoadData(CUmodule *m, const void *image) {
    const Elf64_Ehdr *h = image;
    Module *n = calloc(1, sizeof *n);
    if (h && !memcmp(h->e_ident, ELFMAG, SELFMAG)) { /* keep a copy: callers free theirs */
        size_t size = h->e_shoff + (size_t)h->e_shnum * h->e_shentsize;
        const Elf64_Shdr *s = (const void *)((const char *)image + h->e_shoff);
        for (int i = 0; i < h->e_shnum; i++)
            if (s[i].sh_type != SHT_NOBITS && s[i].sh_offset + s[i].sh_size > size)
                size = s[i].sh_offset + s[i].sh_size;
        char *copy = malloc(size);
        memcpy(copy, image, size);
        n->image = copy;
    }
    *m = (CUmodule)n;
    ANSWER(0);
}
CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, CUjit_option *o, void **v) {
    return cuModuleLoadData(m, image);
}
CUresult cuModuleLoad(CUmodule *m, const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) return CUDA_ERROR_FILE_NOT_FOUND;
    fseek(f, 0, SEEK_END);
    size_t n = ftell(f);
    char *image = malloc(n);
    rewind(f);
    n = fread(image, 1, n, f);
    fclose(f);
    CUresult e = n > sizeof(Elf64_Ehdr) ? cuModuleLoadData(m, image) : CUDA_ERROR_INVALID_IMAGE;
    free(image);
    return e;
}
CUresult cuModuleUnload(CUmodule m) { ANSWER(0); }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
    Module *module = (Module *)m;
    Function *n = calloc(1, sizeof *n);
    n->module = module, n->kernel.name = strdup(name);
    read_parameters(module->image, name, &n->kernel);
    *f = (CUfunction)n;
    ANSWER(0);
}
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
    Function *n = (Function *)f;
    switch ((int)a) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
            *v = dry_attribute(1);
            break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS:
            *v = 64;
            break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            *v = n->kernel.max_shared ? n->kernel.max_shared : dry_attribute(8);
            break;
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
            *v = dry_config()->card->sm;
            break;
        default:
            *v = 0;
    }
    ANSWER(0);
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
    COUNT(__func__);
    enum { OVERSIZED_SHARED_MEMORY = 17 }; /* of newer cards */
    if ((int)a == OVERSIZED_SHARED_MEMORY) return CUDA_ERROR_INVALID_VALUE;
    if (a == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        if (v > dry_attribute(97)) return CUDA_ERROR_INVALID_VALUE;
        ((Function *)f)->kernel.max_shared = v;
    }
    return 0;
}
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { ANSWER(0); }
CUresult cuFuncGetName(const char **name, CUfunction f) {
    *name = ((Function *)f)->kernel.name;
    ANSWER(0);
}
CUresult cuFuncGetModule(CUmodule *m, CUfunction f) {
    *m = (CUmodule)((Function *)f)->module;
    ANSWER(0);
}
CUresult cuFuncGetParamInfo(CUfunction f, size_t i, size_t *offset, size_t *size) {
    Kernel *k = &((Function *)f)->kernel;
    if ((int)i >= k->parameters) return 1;
    *offset = 0;
    if (size) *size = k->parameter_bytes[i];
    ANSWER(0);
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int t, size_t m) {
    *n = 2048 / (t ? t : 1) > 32 ? 32 : 2048 / (t ? t : 1);
    ANSWER(0);
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) {
    *n = dry_attribute(16) / 2;
    ANSWER(0);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
    Size grid = {c->gridDimX, c->gridDimY, c->gridDimZ};
    Size block = {c->blockDimX, c->blockDimY, c->blockDimZ};
    ANSWER(
        dry_launch(&((Function *)f)->kernel, grid, block, c->sharedMemBytes, c->hStream, params));
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream s, void **params,
                        void **extra) {
    Size grid = {gx, gy, gz}, block = {bx, by, bz};
    ANSWER(dry_launch(&((Function *)f)->kernel, grid, block, shared, s, params));
}
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by, unsigned bz, unsigned shared, CUstream s,
                                   void **params) {
    return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, s, params, NULL);
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *dim, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *es,
                                CUtensorMapInterleave i, CUtensorMapSwizzle w,
                                CUtensorMapL2promotion l, CUtensorMapFloatOOBfill o) {
    COUNT(__func__);
    int bad = (uintptr_t)address & 15 || rank < 1 || rank > 5;
    for (unsigned d = 0; d < rank; d++)
        bad |= !dim[d] || dim[d] > 1ull << 32 || !box[d] || box[d] > 256;
    for (unsigned d = 0; d + 1 < rank; d++)
        bad |= strides[d] & 15 || strides[d] >= 1ull << 40;
    if (bad) {
        dry_complain("refused a tensor map: address %p rank %u", address, rank);
        return CUDA_ERROR_INVALID_VALUE;
    }
    memset(map, 0, sizeof *map);
    return 0;
}

/* --- memory ----------------------------------------------------------------------------------- */
CUresult cuMemGetInfo(size_t *free, size_t *total) {
    *total = dry_config()->total;
    *free = *total - dry_used();
    ANSWER(0);
}
CUresult cuMemAlloc(CUdeviceptr *p, size_t n) { ANSWER(dry_malloc((void **)p, n, __func__)); }
CUresult cuMemFree(CUdeviceptr p) { ANSWER(dry_free((void *)p, __func__)); }
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
    void *b;
    size_t n;
    COUNT(__func__);
    if (!dry_allocation((void *)p, &b, &n)) return CUDA_ERROR_INVALID_VALUE;
    if (base) *base = (CUdeviceptr)b;
    if (size) *size = n;
    return 0;
}
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) {
    int device = dry_is_device((void *)p), host = !device && dry_is_pinned((void *)p, 1);
    COUNT(__func__);
    if (!device && !host) return CUDA_ERROR_INVALID_VALUE;
    if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)v = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || a == CU_POINTER_ATTRIBUTE_HOST_POINTER)
        *(CUdeviceptr *)v = p;
    else if (a == CU_POINTER_ATTRIBUTE_CONTEXT)
        *(CUcontext *)v = context;
    else
        *(unsigned *)v = 0;
    return 0;
}
/* Physical memory of expandable segments, and where it is mapped. */
typedef struct {
    size_t bytes;
    int holds;
} Handle;
typedef struct Mapping {
    CUdeviceptr p;
    size_t n;
    Handle *h;
    struct Mapping *next;
} Mapping;
static Mapping *mappings;
static void let_go(Handle *handle) {
    if (--handle->holds) return;
    dry_give(handle->bytes);
    free(handle);
}
CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p,
                                       CUmemAllocationGranularity_flags f) {
    *g = 2 << 20;
    ANSWER(0);
}
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr at,
                             unsigned long long f) {
    *p = (CUdeviceptr)dry_reserve(n);
    ANSWER(*p ? 0 : 2);
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) { ANSWER(0); }
CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *p,
                     unsigned long long f) {
    COUNT(__func__);
    if (dry_take(n)) return CUDA_ERROR_OUT_OF_MEMORY;
    Handle *x = malloc(sizeof *x);
    *x = (Handle){n, 1};
    *h = (CUmemGenericAllocationHandle)x;
    return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
    let_go((Handle *)h);
    ANSWER(0);
}
CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle h,
                  unsigned long long f) {
    COUNT(__func__);
    Mapping *m = malloc(sizeof *m);
    *m = (Mapping){p, n, (Handle *)h, mappings};
    mappings = m, m->h->holds++;
    return dry_map((void *)p, n);
}
CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
    COUNT(__func__);
    for (Mapping **m = &mappings; *m;) {
        Mapping *x = *m;
        if (x->p < p || x->p >= p + n) {
            m = &x->next;
            continue;
        }
        dry_unmap((void *)x->p, x->n);
        let_go(x->h);
        *m = x->next;
        free(x);
    }
    return 0;
}
CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *d, size_t c) { ANSWER(0); }
CUresult cuMemcpyHtoD(CUdeviceptr d, const void *s, size_t n) {
    ANSWER(dry_copy((void *)d, s, n, NULL, 0));
}
CUresult cuMemcpyDtoH(void *d, CUdeviceptr s, size_t n) {
    ANSWER(dry_copy(d, (void *)s, n, NULL, 0));
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr d, const void *s, size_t n, CUstream t) {
    ANSWER(dry_copy((void *)d, s, n, t, 1));
}
CUresult cuMemcpyDtoHAsync(void *d, CUdeviceptr s, size_t n, CUstream t) {
    ANSWER(dry_copy(d, (void *)s, n, t, 1));
}
CUresult cuMemsetD8Async(CUdeviceptr d, unsigned char v, size_t n, CUstream t) {
    ANSWER(dry_set((void *)d, v, n, t, 1));
}
CUresult cuMemsetD32Async(CUdeviceptr d, unsigned v, size_t n, CUstream t) {
    ANSWER(dry_set((void *)d, v, n * 4, t, 1));
}
CUresult cuStreamSynchronize(CUstream s) {
    dry_stream_synchronize(s, __func__);
    ANSWER(0);
}
CUresult cuStreamGetCtx(CUstream s, CUcontext *c) {
    *c = context;
    ANSWER(0);
}
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *c) {
    *c = 0;
    ANSWER(0);
}

CUresult cuGetProcAddress_v2(const char *name, void **f, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    COUNT(__func__);
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    *f = dlsym(RTLD_DEFAULT, newer);
    if (!*f) *f = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *f ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *f ? 0 : CUDA_ERROR_NOT_FOUND;
}
CUresult cuGetExportTable(const void **t, const CUuuid *id) {
    *t = NULL;
    ANSWER(CUDA_ERROR_NOT_FOUND);
}
