/* Streams and events. Work on a stream ends at once; its order is kept as vector clocks.
 *
 * A clock holds, for each stream, the number of the last operation that is ordered before. An event
 * is a copy of its stream's clock; a stream that waits for the event merges it. `done` is what the
 * host knows to have ended.
 */
#define _GNU_SOURCE
#include "dry.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { STREAMS = 160 };

typedef struct {
    int id, priority;
    unsigned flags;
    unsigned clock[STREAMS];
} Stream;

typedef struct {
    int recorded, queries;
    double time; /* the host's, in milliseconds: a device's seconds are not modelled */
    unsigned clock[STREAMS];
} Event;

static Stream streams[STREAMS]; /* 0 is the default stream */
static int stream_count = 1;
static unsigned done[STREAMS];

/* Small handles are CUDA's own names for the default stream. */
static Stream *of(void *stream) { return (uintptr_t)stream < 16 ? streams : (Stream *)stream; }

static void merge(unsigned *into, const unsigned *from) {
    for (int i = 0; i < stream_count; i++)
        if (into[i] < from[i]) into[i] = from[i];
}

static int runs_still(const unsigned *clock) {
    for (int i = 0; i < stream_count; i++)
        if (clock[i] > done[i]) return 1;
    return 0;
}

static double milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

/* --- streams -----------------------------------------------------------------------------------*/

void *dry_stream_new(unsigned flags, int priority) {
    dry_lock();
    int id = stream_count < STREAMS ? stream_count++ : STREAMS - 1;
    streams[id] = (Stream){.id = id, .priority = priority, .flags = flags};
    dry_unlock();
    dry_log("S new %d priority %d flags %u\n", id, priority, flags);
    return &streams[id];
}

int dry_stream_priority(void *stream) { return of(stream)->priority; }
unsigned dry_stream_flags(void *stream) { return of(stream)->flags; }
int dry_stream_id(void *stream) { return of(stream)->id; }

unsigned dry_next_operation(void *stream) {
    Stream *own = of(stream);
    dry_lock();
    unsigned number = ++own->clock[own->id];
    dry_unlock();
    return number;
}

int dry_stream_query(void *stream) {
    static atomic_int queries;
    const Config *config = dry_config();
    if (!config->lag) return OK;
    dry_lock();
    int late = runs_still(of(stream)->clock) && queries++ < config->lag;
    if (!late) {
        merge(done, of(stream)->clock);
        queries = 0;
    }
    dry_unlock();
    return late ? NOT_READY : OK;
}

void dry_stream_synchronize(void *stream, const char *how) {
    dry_lock();
    merge(done, of(stream)->clock);
    dry_unlock();
    dry_log("W %s stream %d\n", how, of(stream)->id);
    dry_tell(how);
}

void dry_device_synchronize(const char *how) {
    dry_lock();
    for (int i = 0; i < stream_count; i++)
        merge(done, streams[i].clock);
    dry_unlock();
    dry_log("W %s\n", how);
    dry_tell(how);
}

/* --- events ------------------------------------------------------------------------------------*/

void *dry_event_new(void) { return calloc(1, sizeof(Event)); }
void dry_event_free(void *event) { free(event); }

void dry_event_record(void *handle, void *stream) {
    Event *event = handle;
    Stream *own = of(stream);
    dry_lock();
    unsigned at = ++own->clock[own->id];
    memcpy(event->clock, own->clock, sizeof event->clock);
    event->recorded = 1;
    event->queries = 0;
    event->time = milliseconds();
    dry_unlock();
    dry_log("E record %p stream %d at %u\n", handle, own->id, at);
}

int dry_event_query(void *handle) {
    Event *event = handle;
    const Config *config = dry_config();
    if (!config->lag || !event->recorded) return OK;
    dry_lock();
    int late = runs_still(event->clock) && event->queries++ < config->lag;
    if (!late) merge(done, event->clock);
    dry_unlock();
    return late ? NOT_READY : OK;
}

void dry_event_synchronize(void *handle, const char *how) {
    Event *event = handle;
    dry_lock();
    if (event->recorded) merge(done, event->clock);
    dry_unlock();
    dry_log("W %s %p\n", how, handle);
    dry_tell(how);
}

void dry_stream_wait(void *stream, void *handle) {
    Event *event = handle;
    Stream *own = of(stream);
    dry_lock();
    if (event->recorded) merge(own->clock, event->clock);
    ++own->clock[own->id];
    dry_unlock();
    dry_log("E wait %p stream %d\n", handle, own->id);
}

float dry_event_milliseconds(void *from, void *to) {
    return (float)(((Event *)to)->time - ((Event *)from)->time);
}
