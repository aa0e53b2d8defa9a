/* cuDNN's graph API: each graph has one engine, without a workspace of its own.
 *
 * cuDNN's frontend is compiled into torch and is real: its checks, its own workspace, its plans.
 * Other functions of cuDNN (missing.py) are refused.
 */
#include "dry.h"
#include <stdlib.h>
#include <string.h>

enum { /* attributes of descriptors, cudnn_graph.h */
       ENGINE_HEURISTICS_RESULTS = 202,
       ENGINE_CONFIG_ENGINE = 300,
       ENGINE_CONFIG_WORKSPACE = 303,
       ENGINE_CONFIG_SHARED_MEMORY = 304,
       PLAN_WORKSPACE = 402,
       PACK_POINTERS = 1001,
       PACK_WORKSPACE = 1003,
       ENGINE_GLOBAL_INDEX = 1301,
       TYPE_INT64 = 3,
       TYPE_INT32 = 23,
       FAILED = 3000, /* CUDNN_STATUS_NOT_SUPPORTED */
       POINTERS = 64,
};

typedef struct {
    int count;
    void *pointers[POINTERS];
} Descriptor;

typedef struct {
    void *stream;
} Handle;

static Kernel graph = {"cudnn graph", 0, 0, -1};

int cudnnCreate(void **handle) {
    COUNT(__func__);
    *handle = calloc(1, sizeof(Handle));
    return OK;
}
int cudnnDestroy(void *handle) {
    free(handle);
    return OK;
}
int cudnnSetStream(void *handle, void *stream) {
    ((Handle *)handle)->stream = stream;
    return OK;
}
int cudnnGetStream(void *handle, void **stream) {
    *stream = ((Handle *)handle)->stream;
    return OK;
}
size_t cudnnGetVersion(void) { return 92400; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int error) {
    return error ? "CUDNN_STATUS_NOT_SUPPORTED (dry)" : "CUDNN_STATUS_SUCCESS";
}
void cudnnGetLastErrorString(char *text, size_t bytes) {
    if (bytes) *text = 0;
}
int cudnnGetProperty(int which, int *value) {
    static const int VERSION[] = {9, 24, 0};
    *value = VERSION[which];
    return OK;
}

int cudnnBackendCreateDescriptor(int type, void **descriptor) {
    *descriptor = calloc(1, sizeof(Descriptor));
    return OK;
}
int cudnnBackendDestroyDescriptor(void *descriptor) {
    free(descriptor);
    return OK;
}
int cudnnBackendFinalize(void *descriptor) { return OK; }

int cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count,
                             const void *values) {
    Descriptor *own = descriptor;
    if (name == PACK_POINTERS) {
        own->count = count < POINTERS ? count : POINTERS;
        memcpy(own->pointers, values, sizeof(void *) * own->count);
    }
    return OK;
}

int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t asked, int64_t *found,
                             void *values) {
    int known = name == ENGINE_HEURISTICS_RESULTS || name == ENGINE_CONFIG_ENGINE ||
                name == ENGINE_GLOBAL_INDEX || name == ENGINE_CONFIG_WORKSPACE ||
                name == PLAN_WORKSPACE || name == ENGINE_CONFIG_SHARED_MEMORY;
    if (known && values && asked && type == TYPE_INT64) *(int64_t *)values = 0;
    if (known && values && asked && type == TYPE_INT32) *(int *)values = 0;
    if (found) *found = known;
    return OK;
}

int cudnnBackendExecute(void *handle, void *plan, void *pack) {
    Descriptor *own = pack;
    Access accesses[POINTERS];
    int count = 0;
    COUNT(__func__);
    for (int i = 0; i < own->count; i++) {
        if (!dry_is_device(own->pointers[i])) continue; /* scalars are the host's */
        if (!dry_is_live(own->pointers[i], 1)) {
            dry_complain("a cuDNN graph gets %p, which is not live", own->pointers[i]);
            return FAILED;
        }
        accesses[count++] = (Access){'?', own->pointers[i], 1};
    }
    return dry_launch_library(&graph, ((Handle *)handle)->stream, accesses, count);
}
