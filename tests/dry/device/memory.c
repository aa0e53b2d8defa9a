/* Device memory, which is address space that nobody touches, and pinned host memory.
 *
 * Addresses of device memory are never used twice, so that a stale pointer is seen. The pages
 * behind them are zeros of the system: small copies and fills are really made (work.c).
 */
#define _GNU_SOURCE
#include "dry.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
void dry_lock(void) { pthread_mutex_lock(&mutex); }
void dry_unlock(void) { pthread_mutex_unlock(&mutex); }

/* --- ranges of addresses, sorted ---------------------------------------------------------------*/

typedef struct {
    char *start;
    size_t bytes;
} Range;

typedef struct {
    Range *all;
    long count, room;
} Ranges;

/* The last range that starts at or before the pointer; -1: none. */
static long find(const Ranges *ranges, const void *pointer) {
    long low = 0, high = ranges->count;
    while (low < high) {
        long middle = (low + high) / 2;
        if (ranges->all[middle].start <= (char *)pointer)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1;
}

static void add(Ranges *ranges, void *start, size_t bytes) {
    if (ranges->count == ranges->room) {
        ranges->room = ranges->room * 2 + 64;
        ranges->all = realloc(ranges->all, ranges->room * sizeof(Range));
    }
    long i = find(ranges, start) + 1;
    memmove(ranges->all + i + 1, ranges->all + i, (ranges->count - i) * sizeof(Range));
    ranges->all[i] = (Range){start, bytes};
    ranges->count++;
}

/* Removes the range that starts at the pointer. Returns its bytes, 0 if there is none. */
static size_t drop(Ranges *ranges, const void *start) {
    long i = find(ranges, start);
    if (i < 0 || ranges->all[i].start != (char *)start) return 0;
    size_t bytes = ranges->all[i].bytes;
    memmove(ranges->all + i, ranges->all + i + 1, (ranges->count - i - 1) * sizeof(Range));
    ranges->count--;
    return bytes;
}

static char *end_of(const Ranges *ranges, long i) {
    return ranges->all[i].start + ranges->all[i].bytes;
}

/* Whether the bytes lie in ranges that follow each other without a gap. */
static int covers(const Ranges *ranges, const void *pointer, size_t bytes) {
    char *end = (char *)pointer + bytes;
    long i = find(ranges, pointer);
    while (i >= 0 && i < ranges->count) {
        if (end <= end_of(ranges, i)) return 1;
        if (i + 1 == ranges->count || ranges->all[i + 1].start != end_of(ranges, i)) return 0;
        i++;
    }
    return 0;
}

/* --- device memory -----------------------------------------------------------------------------*/

enum { PAGE = 2 << 20 };
static const size_t ARENA = 1UL << 45;
static char *arena, *next_address;
static Ranges device, pinned;
static size_t used, pinned_bytes;

static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) & ~(size_t)(PAGE - 1); }

static void make_arena(void) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    arena = mmap((void *)0x200000000000UL, ARENA, PROT_NONE, flags, -1, 0);
    if (arena == MAP_FAILED) {
        perror("dry: no address space for the device");
        _exit(98);
    }
    next_address = arena;
}

void *dry_reserve(size_t bytes) {
    dry_lock();
    if (!arena) make_arena();
    char *found = next_address;
    next_address += whole_pages(bytes) + PAGE; /* a gap, so that an overrun leaves live memory */
    dry_unlock();
    return found;
}

int dry_take(size_t bytes) {
    const Config *config = dry_config();
    dry_lock();
    int fits = used + whole_pages(bytes) + config->context <= config->total;
    if (fits) used += whole_pages(bytes);
    dry_unlock();
    return fits ? OK : OUT_OF_MEMORY;
}

void dry_give(size_t bytes) {
    dry_lock();
    used -= whole_pages(bytes);
    dry_unlock();
}

size_t dry_used(void) { return used + dry_config()->context; }

int dry_map(void *pointer, size_t bytes) {
    if (mprotect(pointer, bytes, PROT_READ | PROT_WRITE)) {
        perror("dry: mprotect");
        return INVALID_VALUE;
    }
    dry_lock();
    add(&device, pointer, bytes);
    dry_unlock();
    return OK;
}

void dry_unmap(void *pointer, size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    mmap(pointer, bytes, PROT_NONE, flags, -1, 0); /* gives touched pages back */
    dry_lock();
    drop(&device, pointer);
    dry_unlock();
}

int dry_malloc(void **pointer, size_t bytes, const char *how) {
    *pointer = NULL;
    if (!bytes) return OK;
    if (dry_take(bytes)) {
        dry_log("A %s %zu fails, %zu used\n", how, bytes, used);
        return OUT_OF_MEMORY;
    }
    *pointer = dry_reserve(bytes);
    dry_log("A %s %zu %p\n", how, bytes, *pointer);
    return dry_map(*pointer, whole_pages(bytes));
}

int dry_free(void *pointer, const char *how) {
    if (!pointer) return OK;
    void *start;
    size_t bytes;
    dry_log("F %s %p\n", how, pointer);
    if (!dry_allocation(pointer, &start, &bytes) || start != pointer) return INVALID_VALUE;
    dry_unmap(pointer, bytes);
    dry_give(bytes);
    return OK;
}

int dry_is_device(const void *pointer) {
    return arena && (char *)pointer >= arena && (char *)pointer < arena + ARENA;
}

int dry_is_live(const void *pointer, size_t bytes) {
    dry_lock();
    int live = covers(&device, pointer, bytes);
    dry_unlock();
    return live;
}

int dry_allocation(const void *pointer, void **start, size_t *bytes) {
    dry_lock();
    int found = covers(&device, pointer, 1);
    if (found) {
        Range range = device.all[find(&device, pointer)];
        *start = range.start;
        *bytes = range.bytes;
    }
    dry_unlock();
    return found;
}

/* --- pinned host memory ------------------------------------------------------------------------*/

int dry_pin(void *pointer, size_t bytes) {
    const Config *config = dry_config();
    int result = OK;
    dry_lock();
    long i = find(&pinned, (char *)pointer + bytes - 1);
    if (i >= 0 && end_of(&pinned, i) > (char *)pointer) {
        result = ALREADY_REGISTERED;
    } else if (config->pinned_limit && pinned_bytes + bytes > config->pinned_limit) {
        result = OUT_OF_MEMORY;
    } else {
        add(&pinned, pointer, bytes);
        pinned_bytes += bytes;
    }
    dry_unlock();
    dry_log("H pin %zu %p %d\n", bytes, pointer, result);
    return result;
}

int dry_unpin(void *pointer, int unmap) {
    dry_lock();
    size_t bytes = drop(&pinned, pointer);
    pinned_bytes -= bytes;
    dry_unlock();
    dry_log("H unpin %zu %p\n", bytes, pointer);
    if (bytes && unmap) munmap(pointer, bytes);
    return bytes ? OK : NOT_REGISTERED;
}

int dry_is_pinned(const void *pointer, size_t bytes) {
    dry_lock();
    int found = covers(&pinned, pointer, bytes);
    dry_unlock();
    return found;
}

/* --- large host mappings of the process --------------------------------------------------------*/

/* Host buffers of a long step are larger than this machine: mapped without being reserved. */
void *mmap64(void *at, size_t bytes, int protection, int flags, int file, off_t offset) {
    if (bytes >= 1UL << 28 && flags & MAP_ANONYMOUS && flags & MAP_PRIVATE) {
        flags |= MAP_NORESERVE;
        dry_log("H map %zu\n", bytes);
    }
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, file, offset);
}

void *mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset) {
    return mmap64(at, bytes, protection, flags, file, offset);
}
