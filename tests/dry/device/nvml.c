/* NVML, as far as torch asks: expandable segments, and the text of an out-of-memory error. */
#include "dry.h"
#include <string.h>

enum { NVML_NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) {
    COUNT(__func__);
    return OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return error ? "Not Supported (dry)" : "Success"; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return OK;
}
int nvmlSystemGetDriverVersion(char *text, unsigned bytes) {
    strncpy(text, "580.00", bytes);
    return OK;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return OK;
}

static int the_device(void **device) {
    *device = (void *)1;
    return OK;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return the_device(device); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return the_device(device); }
int nvmlDeviceGetHandleByUUID(const char *id, void **device) { return the_device(device); }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return OK; }

static int no_processes(unsigned *count) {
    *count = 0;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *all) {
    return no_processes(count);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *all) {
    return no_processes(count);
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) {
    return NVML_NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) {
    return NVML_NOT_SUPPORTED;
}
int nvmlDeviceGetName(void *device, char *text, unsigned bytes) {
    strncpy(text, dry_config()->card->name, bytes);
    return OK;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = dry_config()->total;
    memory[2] = dry_used();
    memory[1] = memory[0] - memory[2];
    return OK;
}
