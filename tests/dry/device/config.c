/* What the environment asks for, the cards that are played, and a watchdog over this machine. */
#define _GNU_SOURCE
#include "dry.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const Card CARDS[] = {
    {90, "NVIDIA H100 80GB HBM3", 81008, 132, 1980000, 2619000, 52428800, 233472, 232448, 1},
    {80, "NVIDIA A100-SXM4-80GB", 81037, 108, 1410000, 1593000, 41943040, 167936, 166912, 0},
    {100, "NVIDIA B200", 182642, 148, 1965000, 3996000, 132644864, 233472, 232448, 1},
};

static Config config;
static long resident_limit;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static long from_environment(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtol(value, NULL, 0) : otherwise;
}

/* Ends the process before it makes this machine swap: something touches memory that should only be
 * an address. */
static void *watch(void *unused) {
    for (;;) {
        long size = 0, resident = 0;
        FILE *file = fopen("/proc/self/statm", "r");
        if (file) {
            if (fscanf(file, "%ld %ld", &size, &resident) != 2) resident = 0;
            fclose(file);
        }
        if (resident * 4096 > resident_limit) {
            dry_complain("%.1f GiB are resident, more than DRY_RSS_GIB",
                         resident * 4096.0 / (1L << 30));
            _exit(99);
        }
        usleep(20000);
    }
    return NULL;
}

static void read_environment(void) {
    long sm = from_environment("DRY_SM", 90);
    config.card = &CARDS[0];
    for (size_t i = 0; i < sizeof CARDS / sizeof *CARDS; i++)
        if (CARDS[i].sm == sm) config.card = &CARDS[i];
    config.total = (size_t)from_environment("DRY_MEM_MIB", config.card->memory_mib) << 20;
    config.context = (size_t)from_environment("DRY_CONTEXT_MIB", 520) << 20;
    config.pinned_limit = (size_t)from_environment("DRY_PINNED_GIB", 0) << 30;
    config.copy_bytes = from_environment("DRY_COPY_MAX", 1 << 20);
    config.lag = from_environment("DRY_LAG", 0);
    resident_limit = from_environment("DRY_RSS_GIB", 12) << 30;
    pthread_t thread;
    pthread_create(&thread, NULL, watch, NULL);
    pthread_detach(thread);
}

const Config *dry_config(void) {
    pthread_once(&once, read_environment);
    return &config;
}

int dry_attribute(int attribute) {
    const Card *card = dry_config()->card;
    switch (attribute) {
        case 1: /* threads of a block, its dimensions */
        case 2:
        case 3:
            return 1024;
        case 4:
            return 64;
        case 5:
            return 2147483647; /* a grid's dimensions */
        case 6:
        case 7:
            return 65535;
        case 8:
            return 49152; /* shared memory of a block, unless more is asked for */
        case 9:
            return 65536; /* constant memory */
        case 10:
            return 32; /* warp */
        case 11:
            return 2147483647;
        case 12:
            return 65536; /* registers of a block */
        case 13:
            return card->clock_khz;
        case 14:
            return 512; /* texture alignment */
        case 16:
            return card->multiprocessors;
        case 33:
            return 1; /* PCI bus */
        case 36:
            return card->memory_clock_khz;
        case 37:
            return 5120; /* memory bus, bits */
        case 38:
            return card->l2_bytes;
        case 39:
            return 2048; /* threads of a multiprocessor */
        case 40:
            return 3; /* copy engines */
        case 75:
            return card->sm / 10;
        case 76:
            return card->sm % 10;
        case 81:
            return card->shared_per_multiprocessor;
        case 82:
            return 65536; /* registers of a multiprocessor */
        case 97:
            return card->shared_per_block;
        case 106:
            return 32; /* blocks of a multiprocessor */
        case 111:
            return 1024; /* shared memory of a block that CUDA takes */
        case 120:
            return card->clusters;
        /* What the device can: host memory mapped, concurrent kernels, ECC, unified addresses,
         * priorities, caches, managed memory, preemption, cooperative launches, pinning, virtual
         * memory, pools. */
        case 15:
        case 19:
        case 31:
        case 32:
        case 41:
        case 78:
        case 79:
        case 80:
        case 83:
        case 89:
        case 90:
        case 91:
        case 95:
        case 99:
        case 102:
        case 115:
            return 1;
    }
    return 0;
}
