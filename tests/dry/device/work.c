/* Work on streams: copies, fills and launches. Each is checked, counted and logged. */
#define _GNU_SOURCE
#include "dry.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- copies and fills --------------------------------------------------------------------------*/

int dry_copy(void *to, const void *from, size_t bytes, void *stream, int async) {
    static const char *KINDS[] = {"h2h", "h2d", "d2h", "d2d"};
    if (!bytes) return OK;
    int to_device = dry_is_device(to), from_device = dry_is_device(from);
    if ((to_device && !dry_is_live(to, bytes)) || (from_device && !dry_is_live(from, bytes))) {
        dry_complain("a copy of %zu bytes, %p <- %p, leaves live device memory", bytes, to, from);
        return INVALID_VALUE;
    }
    int kind = 2 * from_device + to_device;
    int pageable =
        (!to_device && !dry_is_pinned(to, bytes)) || (!from_device && !dry_is_pinned(from, bytes));
    dry_count_copy(kind, bytes, pageable);
    unsigned at = dry_next_operation(stream);
    dry_log("C %d at %u: %s%s r %p %zu w %p %zu\n", dry_stream_id(stream), at, KINDS[kind],
            pageable ? " pageable" : "", from, bytes, to, bytes);
    if (bytes <= dry_config()->copy_bytes) memmove(to, from, bytes);
    if (!async) {
        dry_stream_synchronize(stream, "cudaMemcpy");
    } else if (pageable && kind) { /* the host waits for a copy through a staging buffer */
        COUNT("pageable cudaMemcpyAsync");
        dry_tell("pageable cudaMemcpyAsync");
    }
    return OK;
}

int dry_set(void *to, int value, size_t bytes, void *stream, int async) {
    static const size_t REALLY_MADE = 65536;
    if (!bytes) return OK;
    if (dry_is_device(to) && !dry_is_live(to, bytes)) {
        dry_complain("a fill of %zu bytes at %p leaves live device memory", bytes, to);
        return INVALID_VALUE;
    }
    unsigned at = dry_next_operation(stream);
    dry_log("Z %d at %u: fill w %p %zu\n", dry_stream_id(stream), at, to, bytes);
    if (bytes <= REALLY_MADE) memset(to, value, bytes);
    if (!async) dry_stream_synchronize(stream, "cudaMemset");
    return OK;
}

/* --- pointers among a kernel's arguments -------------------------------------------------------*/

enum { ACCESSES = 64 };

typedef struct {
    Access all[ACCESSES];
    int count;
} Accesses;

static void add(Accesses *found, char use, const void *pointer, size_t bytes) {
    if (found->count < ACCESSES && dry_is_device(pointer))
        found->all[found->count++] = (Access){use, pointer, bytes};
}

static const void *word(const void *memory, int index) {
    const void *value;
    memcpy(&value, (const char *)memory + 8 * index, 8);
    return value;
}

/* A cubin's kernel (Triton's): each parameter of 8 bytes may be a pointer. */
static void from_parameters(const Kernel *kernel, void **arguments, Accesses *found) {
    for (int i = 0; i < kernel->parameters; i++)
        if (kernel->parameter_bytes[i] == 8) add(found, '?', word(arguments[i], 0), 1);
}

/* ATen's vectorized and unrolled element-wise kernels take (int N, function, array of pointers):
 * the output, then the inputs, of N elements of a byte or more. The array's length stands in the
 * mangled name. */
static void from_elementwise(const Kernel *kernel, void **arguments, Accesses *found) {
    const char *array = strstr(kernel->name, "St5arrayIPcLm");
    if (!array || strstr(kernel->name, "multi_outputs")) return;
    int pointers = atoi(array + strlen("St5arrayIPcLm")), elements;
    memcpy(&elements, arguments[0], 4);
    for (int i = 0; i < pointers; i++)
        add(found, i ? 'r' : 'w', word(arguments[2], i), elements);
}

/* FlashAttention's kernels take one structure, whose first words are q, k and v. Other words of it
 * are numbers that may look like addresses: only live ones count. */
static void from_flash(void **arguments, Accesses *found) {
    enum { WORDS = 40 };
    for (int i = 0; i < WORDS; i++) {
        const void *value = word(arguments[0], i);
        if (i < 3)
            add(found, 'r', value, 1);
        else if (dry_is_device(value) && dry_is_live(value, 1))
            add(found, '?', value, 1);
    }
}

static void find_accesses(const Kernel *kernel, void **arguments, Accesses *found) {
    found->count = 0;
    if (!arguments) return;
    if (kernel->parameters >= 0)
        from_parameters(kernel, arguments, found);
    else if (strstr(kernel->name, "vectorized_elementwise_kernel") ||
             strstr(kernel->name, "unrolled_elementwise_kernel"))
        from_elementwise(kernel, arguments, found);
    else if (strstr(kernel->name, "flash_fwd_kernel") || strstr(kernel->name, "flash_bwd_"))
        from_flash(arguments, found);
}

/* --- launches ----------------------------------------------------------------------------------*/

static int is_refused(const Kernel *kernel, Size grid, Size block, size_t shared) {
    int empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
    int large_grid = grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535;
    int large_block = block.x > 1024 || block.y > 1024 || block.z > 64 ||
                      (unsigned long)block.x * block.y * block.z > 1024;
    int large_shared = shared > (size_t)dry_attribute(97) ||
                       (shared > (size_t)dry_attribute(8) && shared > (size_t)kernel->max_shared);
    return empty || large_grid || large_block || large_shared;
}

static void log_launch(const Kernel *kernel, void *stream, unsigned at, const Access *accesses,
                       int count) {
    char text[64 * ACCESSES];
    int length = 0;
    for (int i = 0; i < count; i++)
        length += snprintf(text + length, sizeof text - length, " %c %p %zu", accesses[i].use,
                           accesses[i].pointer, accesses[i].bytes);
    text[length] = 0;
    dry_log("K %d at %u: %s%s\n", dry_stream_id(stream), at, kernel->name, text);
}

int dry_launch_library(Kernel *kernel, void *stream, const Access *accesses, int count) {
    for (int i = 0; i < count; i++)
        if (!dry_is_live(accesses[i].pointer, 1))
            dry_complain("%s gets %p, which is not live", kernel->name, accesses[i].pointer);
    dry_count_launch(kernel);
    unsigned at = dry_next_operation(stream);
    if (dry_logging()) log_launch(kernel, stream, at, accesses, count);
    return OK;
}

int dry_launch(Kernel *kernel, Size grid, Size block, size_t shared, void *stream,
               void **arguments) {
    if (is_refused(kernel, grid, block, shared)) {
        dry_complain("refused %s: grid %u,%u,%u block %u,%u,%u shared %zu (asked for %d)",
                     kernel->name, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared,
                     kernel->max_shared);
        return INVALID_VALUE;
    }
    Accesses found;
    find_accesses(kernel, arguments, &found);
    return dry_launch_library(kernel, stream, found.all, found.count);
}
