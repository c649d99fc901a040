/* A libcuda.so.1 for tests: computes nothing, and writes down what cuda-bindings hand to it, as a driver would read it.

   Memory of the "GPU" is memory of this process. STUB_LOG names the file that is written; STUB_SIZES holds the sizes of
   the parameters of each function in the order in which they are asked for: "8,8,4;128,4,4". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef uint64_t Handle;

enum { OK = 0, INVALID_VALUE = 1, MAX_FUNCTIONS = 64, MAX_PARAMETERS = 64 };

static FILE *out(void) {
    static FILE *file;
    if (!file) file = fopen(getenv("STUB_LOG"), "w");
    return file;
}

#define LOG(...) (fprintf(out(), __VA_ARGS__), fflush(out()))

static Handle next_handle = 100;
static int sizes[MAX_FUNCTIONS][MAX_PARAMETERS], num_sizes[MAX_FUNCTIONS], num_functions;
static Handle functions[MAX_FUNCTIONS];

static int find(Handle function) {
    for (int i = 0; i < num_functions; i++)
        if (functions[i] == function) return i;
    return -1;
}

static void log_parameters(int index, void **parameters) {
    for (int i = 0; i < num_sizes[index]; i++) {
        const unsigned char *data = parameters[i];
        LOG(" ");
        for (int j = 0; j < sizes[index][i]; j++) LOG("%02x", data[j]);
    }
    LOG("\n");
}

Result cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
Result cuDriverGetVersion(int *version) { *version = 13000; return OK; }
Result cuGetErrorName(Result status, const char **text) { *text = "CUDA_ERROR_STUB"; return OK; }
Result cuGetErrorString(Result status, const char **text) { *text = "the stub refuses"; return OK; }
Result cuDeviceGetCount(int *count) { *count = 1; return OK; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
Result cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Stub GPU"); return OK; }
Result cuDeviceTotalMem(size_t *size, int device) { *size = (size_t)1 << 30; return OK; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 97 ? 227 << 10 : attribute == 16 ? 132 : -1;
    return OK;
}
Result cuDevicePrimaryCtxRetain(Handle *context, int device) { *context = 77; return OK; }
Result cuDevicePrimaryCtxRelease(int device) { LOG("release\n"); return OK; }
Result cuCtxSetCurrent(Handle context) { return context == 77 ? OK : INVALID_VALUE; }
Result cuMemGetInfo(size_t *available, size_t *total) { *available = *total = (size_t)1 << 30; return OK; }
Result cuMemAlloc(Handle *address, size_t size) {
    *address = (Handle)aligned_alloc(512, (size + 511) / 512 * 512);
    return OK;
}
Result cuMemFree(Handle address) { free((void *)address); return OK; }
Result cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    *address = aligned_alloc(512, (size + 511) / 512 * 512);
    return flags ? INVALID_VALUE : OK;
}
Result cuMemFreeHost(void *address) { free(address); return OK; }
Result cuMemcpyHtoDAsync(Handle to, const void *from, size_t size, Handle stream) {
    memcpy((void *)to, from, size);
    return OK;
}
Result cuMemcpyDtoHAsync(void *to, Handle from, size_t size, Handle stream) {
    memcpy(to, (void *)from, size);
    return OK;
}
Result cuMemcpyDtoDAsync(Handle to, Handle from, size_t size, Handle stream) {
    memcpy((void *)to, (void *)from, size);
    return OK;
}
Result cuMemcpyDtoH(void *to, Handle from, size_t size) { memcpy(to, (void *)from, size); return OK; }
Result cuMemsetD8Async(Handle to, unsigned char value, size_t size, Handle stream) {
    memset((void *)to, value, size);
    return OK;
}
Result cuStreamCreate(Handle *stream, unsigned flags) { *stream = 55; return flags == 1 ? OK : INVALID_VALUE; }
Result cuStreamDestroy(Handle stream) { return OK; }
Result cuStreamSynchronize(Handle stream) { return stream == 55 ? OK : INVALID_VALUE; }
Result cuEventCreate(Handle *event, unsigned flags) {
    *event = next_handle++;
    LOG("event %u\n", flags);
    return OK;
}
Result cuEventDestroy(Handle event) { return OK; }
Result cuEventRecord(Handle event, Handle stream) { return stream == 55 ? OK : INVALID_VALUE; }
Result cuEventQuery(Handle event) { return OK; }
Result cuEventSynchronize(Handle event) { return OK; }
Result cuEventElapsedTime(float *elapsed, Handle begin, Handle end) { *elapsed = 0.25f * (end - begin); return OK; }

Result cuModuleLoadData(Handle *module, const void *image) {
    *module = next_handle++;
    return memcmp(image, "\177ELF", 4) ? INVALID_VALUE : OK;
}
Result cuModuleUnload(Handle module) { return OK; }
Result cuModuleGetFunction(Handle *function, Handle module, const char *name) {
    *function = functions[num_functions] = next_handle++;
    const char *at = getenv("STUB_SIZES");
    for (int skipped = 0; skipped < num_functions; skipped++) at = strchr(at, ';') + 1;
    while (1) {
        char *end;
        sizes[num_functions][num_sizes[num_functions]++] = strtol(at, &end, 10);
        if (*end != ',') break;
        at = end + 1;
    }
    LOG("function %s %llu\n", name, (unsigned long long)*function);
    num_functions++;
    return OK;
}
Result cuFuncGetParamInfo(Handle function, size_t index, size_t *offset, size_t *size) {
    int number = find(function);
    if (index >= (size_t)num_sizes[number]) return INVALID_VALUE;
    *offset = 0, *size = sizes[number][index];
    return OK;
}
Result cuFuncGetAttribute(int *value, int attribute, Handle function) { *value = 0; return attribute == 1 ? OK : INVALID_VALUE; }
Result cuFuncSetAttribute(Handle function, int attribute, int value) {
    LOG("attribute %llu %d %d\n", (unsigned long long)function, attribute, value);
    return OK;
}

/* cuda.h, CUDA 12 and 13 */
typedef struct {
    Handle func;
    unsigned grid[3], block[3], shared;
    void **parameters, **extra;
    Handle kern, context;
} KernelNode;
typedef struct { int id; char pad[4]; union { char bytes[64]; unsigned cluster[3]; } value; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; Handle stream; Attribute *attributes; unsigned count; } Config;

Result cuGraphCreate(Handle *graph, unsigned flags) { *graph = next_handle++; return OK; }
Result cuGraphDestroy(Handle graph) { return OK; }
Result cuGraphAddKernelNode(Handle *node, Handle graph, const Handle *after, size_t count, const KernelNode *p) {
    *node = next_handle++;
    LOG("node %llu after %lld: %u %u %u, %u %u %u, %u, %d:", (unsigned long long)p->func,
        count ? (long long)(*node - after[0]) : -1, p->grid[0], p->grid[1], p->grid[2], p->block[0], p->block[1],
        p->block[2], p->shared, p->extra || p->kern || p->context);
    log_parameters(find(p->func), p->parameters);
    return OK;
}
Result cuGraphAddEventRecordNode(Handle *node, Handle graph, const Handle *after, size_t count, Handle event) {
    *node = next_handle++;
    LOG("record after %zu\n", count);
    return OK;
}
Result cuGraphKernelNodeSetAttribute(Handle node, int attribute, const void *value) {
    const unsigned *numbers = value;
    LOG("node attribute %d %u %u %u\n", attribute, numbers[0], attribute == 4 ? numbers[1] : 0,
        attribute == 4 ? numbers[2] : 0);
    return OK;
}
typedef struct { unsigned char from_port, to_port, type, reserved[5]; } EdgeData;
Result cuGraphAddDependencies(Handle graph, const Handle *from, const Handle *to, const EdgeData *edge, size_t count) {
    LOG("edge %lld: %u %u %u, %zu\n", (long long)(*to - *from), edge->from_port, edge->to_port, edge->type, count);
    return OK;
}
Result cuGraphInstantiateWithFlags(Handle *exec, Handle graph, unsigned long long flags) {
    *exec = next_handle++;
    return flags ? INVALID_VALUE : OK;
}
Result cuGraphExecDestroy(Handle exec) { return OK; }
Result cuGraphUpload(Handle exec, Handle stream) { return stream == 55 ? OK : INVALID_VALUE; }
Result cuGraphLaunch(Handle exec, Handle stream) { LOG("graph\n"); return stream == 55 ? OK : INVALID_VALUE; }
Result cuLaunchKernelEx(const Config *p, Handle function, void **parameters, void **extra) {
    LOG("launch %llu: %u %u %u, %u %u %u, %u, %d:", (unsigned long long)function, p->grid[0], p->grid[1], p->grid[2],
        p->block[0], p->block[1], p->block[2], p->shared, extra != 0);
    for (unsigned i = 0; i < p->count; i++)
        LOG(" [%d %u %u %u]", p->attributes[i].id, p->attributes[i].value.cluster[0],
            p->attributes[i].id == 4 ? p->attributes[i].value.cluster[1] : 0,
            p->attributes[i].id == 4 ? p->attributes[i].value.cluster[2] : 0);
    log_parameters(find(function), parameters);
    return p->stream == 55 ? OK : INVALID_VALUE;
}
Result cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *extents,
                              const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                              int swizzle, int promotion, int fill) {
    LOG("map %d %d %u: %llu %llu, %llu, %u %u, %u %u, %d %d %d %d\n", (int)((uintptr_t)map % 128), type, rank,
        (unsigned long long)extents[0], (unsigned long long)extents[1], (unsigned long long)strides[0], box[0], box[1],
        steps[0], steps[1], interleave, swizzle, promotion, fill);
    memset(map, 0xDD, 128);
    memcpy(map, &address, sizeof address);
    return OK;
}

Result cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (!*function) {  /* dlopen gave the library a scope of its own */
        Dl_info info;
        dladdr((void *)cuInit, &info);
        *function = dlsym(dlopen(info.dli_fname, RTLD_LAZY), symbol);
    }
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : 500;
}
Result cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    return cuGetProcAddress_v2(symbol, function, version, flags, status);
}
