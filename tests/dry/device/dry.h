/* The dry device's shared state: configuration, record, memory, streams, work.
 *
 * runtime.c, driver.c, cublas.c, cudnn.c and nvml.c answer CUDA's interfaces with these functions.
 * Results are 0 or an error number that the runtime and the driver share.
 */
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
};

/* --- config.c: what the environment asks for ---------------------------------------------------*/

/* What differs between the cards that are played. */
typedef struct {
    int sm;
    const char *name;
    long memory_mib;
    int multiprocessors, clock_khz, memory_clock_khz, l2_bytes;
    int shared_per_multiprocessor, shared_per_block; /* the latter on request */
    int clusters;
} Card;

typedef struct {
    const Card *card;
    size_t total, context; /* device bytes, and the bytes of them that a CUDA context takes */
    size_t pinned_limit;   /* pinned host bytes; 0: no limit */
    size_t copy_bytes;     /* copies up to this size are really made */
    int lag;               /* how often a query answers "not ready" before the host waits */
} Config;

const Config *dry_config(void);
int dry_attribute(int attribute); /* cudaDevAttr and CUdevice_attribute share their numbers */

/* --- record.c: counters, the log, Python's hook ------------------------------------------------*/

typedef struct Counter {
    const char *name;
    atomic_long count;
    struct Counter *next;
    int listed;
} Counter;

void dry_list(Counter *counter);
/* Counts a call of the interface under `name`. */
#define COUNT(name)                              \
    do {                                         \
        static Counter counter = {name};         \
        if (!counter.listed) dry_list(&counter); \
        counter.count++;                         \
    } while (0)

typedef struct Kernel { /* a function of torch's fat binaries or of a cubin */
    const char *name;   /* mangled */
    atomic_long launches;
    int max_shared; /* dynamic shared memory that was asked for */
    int parameters; /* known for a cubin's kernel; -1 for others */
    uint16_t parameter_bytes[64];
} Kernel;

void dry_count_launch(Kernel *kernel);
void dry_count_copy(int kind, size_t bytes, int pageable); /* kind: 2 * from device + to device */
int dry_logging(void);
void dry_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
void dry_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
void dry_unmodelled(const char *name); /* says once per call that `name` has no model */
void dry_tell(const char *what);       /* the host waited: tells Python's hook */

/* --- memory.c ----------------------------------------------------------------------------------*/

void dry_lock(void);
void dry_unlock(void);
int dry_malloc(void **pointer, size_t bytes, const char *how);
int dry_free(void *pointer, const char *how);
void *dry_reserve(size_t bytes); /* address space without memory behind it */
int dry_map(void *pointer, size_t bytes);
void dry_unmap(void *pointer, size_t bytes);
int dry_take(size_t bytes); /* physical memory: OK or OUT_OF_MEMORY */
void dry_give(size_t bytes);
size_t dry_used(void);
int dry_is_device(const void *pointer);             /* in a live or a dead allocation */
int dry_is_live(const void *pointer, size_t bytes); /* wholly in live device memory */
int dry_allocation(const void *pointer, void **start, size_t *bytes);
int dry_pin(void *pointer, size_t bytes);
int dry_unpin(void *pointer, int unmap);
int dry_is_pinned(const void *pointer, size_t bytes);

/* --- streams.c ---------------------------------------------------------------------------------*/

void *dry_stream_new(unsigned flags, int priority);
int dry_stream_priority(void *stream);
unsigned dry_stream_flags(void *stream);
int dry_stream_id(void *stream);
int dry_stream_query(void *stream);
void dry_stream_synchronize(void *stream, const char *how);
void dry_device_synchronize(const char *how);
unsigned dry_next_operation(void *stream); /* the number of one more operation on the stream */
void *dry_event_new(void);
void dry_event_free(void *event);
void dry_event_record(void *event, void *stream);
int dry_event_query(void *event);
void dry_event_synchronize(void *event, const char *how);
void dry_stream_wait(void *stream, void *event);
float dry_event_milliseconds(void *from, void *to);

/* --- work.c ------------------------------------------------------------------------------------*/

typedef struct { /* memory that a kernel uses; use: 'r' reads, 'w' writes, '?' either */
    char use;
    const void *pointer;
    size_t bytes;
} Access;

typedef struct {
    unsigned x, y, z;
} Size;

int dry_copy(void *to, const void *from, size_t bytes, void *stream, int async);
int dry_set(void *to, int value, size_t bytes, void *stream, int async);
/* A kernel whose arguments are given as CUDA takes them: their pointers are found here. */
int dry_launch(Kernel *kernel, Size grid, Size block, size_t shared, void *stream,
               void **arguments);
/* A library's kernel, whose accesses the caller knows. */
int dry_launch_library(Kernel *kernel, void *stream, const Access *accesses, int count);
