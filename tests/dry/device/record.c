/* Counters of calls, launches and copies; the log; the hook that tells Python of host waits. */
#define _GNU_SOURCE
#include "dry.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static Counter *counters;
static Kernel **kernels;
static long kernel_count, kernel_room;
static atomic_long launches, pageable_copies, copies[4], copied_bytes[4]; /* of each kind */
static const char *KINDS[] = {"h2h", "h2d", "d2h", "d2d"};

/* --- counters ----------------------------------------------------------------------------------*/

void dry_list(Counter *counter) {
    dry_lock();
    if (!counter->listed) {
        counter->listed = 1;
        counter->next = counters;
        counters = counter;
    }
    dry_unlock();
}

static void list_kernel(Kernel *kernel) {
    dry_lock();
    long i = 0;
    while (i < kernel_count && kernels[i] != kernel)
        i++;
    if (i == kernel_count) {
        if (kernel_count == kernel_room) {
            kernel_room = kernel_room * 2 + 256;
            kernels = realloc(kernels, kernel_room * sizeof *kernels);
        }
        kernels[kernel_count++] = kernel;
    }
    dry_unlock();
}

void dry_count_launch(Kernel *kernel) {
    if (kernel->launches++ == 0) list_kernel(kernel);
    launches++;
}

void dry_count_copy(int kind, size_t bytes, int pageable) {
    copies[kind]++;
    copied_bytes[kind] += bytes;
    pageable_copies += pageable;
}

/* --- called from Python (stub.py) --------------------------------------------------------------*/

void dry_reset(void) {
    dry_lock();
    for (Counter *counter = counters; counter; counter = counter->next)
        counter->count = 0;
    for (long i = 0; i < kernel_count; i++)
        kernels[i]->launches = 0;
    launches = pageable_copies = 0;
    for (int i = 0; i < 4; i++)
        copies[i] = copied_bytes[i] = 0;
    dry_unlock();
}

/* Writes a line "GROUP NAME COUNT" for each counter that is not 0. */
void dry_dump(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) return;
    dry_lock();
    fprintf(file, "total launches %ld\n", (long)launches);
    fprintf(file, "total pageable_copies %ld\n", (long)pageable_copies);
    for (int i = 0; i < 4; i++) {
        fprintf(file, "copies %s %ld\n", KINDS[i], (long)copies[i]);
        fprintf(file, "bytes %s %ld\n", KINDS[i], (long)copied_bytes[i]);
    }
    for (Counter *counter = counters; counter; counter = counter->next)
        if (counter->count) fprintf(file, "call %s %ld\n", counter->name, (long)counter->count);
    for (long i = 0; i < kernel_count; i++)
        if (kernels[i]->launches)
            fprintf(file, "kernel %s %ld\n", kernels[i]->name, (long)kernels[i]->launches);
    dry_unlock();
    fclose(file);
}

long dry_launches(void) { return launches; }

static void (*hook)(const char *);
static __thread int in_hook; /* the hook's own Python may wait */

void dry_set_hook(void (*function)(const char *)) { hook = function; }

void dry_tell(const char *what) {
    if (!hook || in_hook) return;
    in_hook = 1;
    hook(what);
    in_hook = 0;
}

/* --- the log -----------------------------------------------------------------------------------*/

static FILE *log_file;

static void flush_log(void) {
    if (log_file) fflush(log_file);
}

/* Begins a log at `path`, in place of the one before; NULL ends it. */
void dry_log_to(const char *path) {
    FILE *before = log_file;
    log_file = NULL;
    if (before) fclose(before);
    if (path && *path) log_file = fopen(path, "w");
    if (log_file) setvbuf(log_file, NULL, _IOFBF, 1 << 20);
}

__attribute__((constructor)) static void open_log(void) {
    dry_log_to(getenv("DRY_LOG"));
    atexit(flush_log);
}

int dry_logging(void) { return log_file != NULL; }

void dry_log(const char *format, ...) {
    if (!log_file) return;
    va_list arguments;
    va_start(arguments, format);
    flockfile(log_file);
    vfprintf(log_file, format, arguments);
    funlockfile(log_file);
    va_end(arguments);
}

void dry_mark(const char *text) { dry_log("M %s\n", text); }

/* --- what goes wrong ---------------------------------------------------------------------------*/

static atomic_long complaints;

long dry_complaints(void) { return complaints; }

void dry_complain(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    flockfile(stderr);
    fputs("dry: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("\n", stderr);
    funlockfile(stderr);
    va_end(arguments);
    complaints++;
}

void dry_unmodelled(const char *name) {
    fprintf(stderr, "dry: %s is not modelled\n", name);
    dry_log("? unmodelled %s\n", name);
}
