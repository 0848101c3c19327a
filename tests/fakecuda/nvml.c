/* The management library: what the GPUs are called, and how much of their memory is used. */

#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>

enum { CONTEXT_BYTES = 300 << 20, NOT_FOUND = 6 };

typedef struct {
  unsigned long long total, free, used;
} nvmlMemory_t;

int nvmlInit_v2(void) { return OK; }

int nvmlShutdown(void) { return OK; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, Context **device) {
  unsigned int bus;
  if (sscanf(id, "0000:%X:00.0", &bus) != 1 || bus < FIRST_BUS || bus >= FIRST_BUS + NUM_DEVICES)
    return NOT_FOUND;
  *device = &contexts[bus - FIRST_BUS];
  return OK;
}

int nvmlDeviceGetName(Context *device, char *name, unsigned int length) {
  snprintf(name, length, "Fake GPU %d", device->device);
  return OK;
}

/* A context takes memory, as on a real device. */
int nvmlDeviceGetMemoryInfo(Context *device, nvmlMemory_t *memory) {
  pthread_mutex_lock(&the_lock);
  memory->total = 16ull << 30;
  memory->used = allocated_on(device->device) + (device->num_holders ? CONTEXT_BYTES : 0);
  memory->free = memory->total - memory->used;
  pthread_mutex_unlock(&the_lock);
  return OK;
}
