/* The driver's functions, with the signatures of its header. */

#define _GNU_SOURCE
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <stdio.h>

typedef struct {
  int type, id;
} CUmemLocation;

typedef struct {
  int srcAccessOrder;
  CUmemLocation srcLocHint, dstLocHint;
  unsigned int flags;
} CUmemcpyAttributes;

enum { ORDER_STREAM = 1, ORDER_DURING_CALL = 2, ORDER_ANY = 3 };

Context contexts[NUM_DEVICES] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}};
int driver_version = 13000;
__thread Context *current;

#define HAS_CONTEXT (current && current->num_holders)

#define RETURN(result)                     \
  do {                                     \
    CUresult returned = (result);          \
    pthread_mutex_unlock(&the_lock);       \
    return returned;                       \
  } while (0)

/* Every call begins so: lost devices and refusals come first. */
#define ENTER(name)                                 \
  pthread_mutex_lock(&the_lock);                    \
  do {                                              \
    CUresult refusal = refusal_of(name);            \
    if (faults.is_lost) RETURN(ILLEGAL_ADDRESS);    \
    if (refusal) RETURN(refusal);                   \
  } while (0)

#define REQUIRE(condition, code) \
  do {                           \
    if (!(condition)) RETURN(code); \
  } while (0)

#define UNLESS_CAPTURING()             \
  do {                                 \
    CUresult capture = check_capture(); \
    if (capture) RETURN(capture);      \
  } while (0)

CUresult cuInit(unsigned int flags) { return flags ? INVALID_VALUE : OK; }

CUresult cuDriverGetVersion(int *version) {
  *version = driver_version;
  return OK;
}

CUresult cuGetErrorName(CUresult code, const char **name) {
  static const struct {
    CUresult code;
    const char *name;
  } names[] = {
      {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {NOT_READY, "CUDA_ERROR_NOT_READY"},
      {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
      {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
      {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
  };
  *name = NULL;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (names[i].code == code) *name = names[i].name;
  return *name ? OK : INVALID_VALUE;
}

/* -- devices and contexts ----------------------------------------------------------------------- */

CUresult cuDeviceGetCount(int *count) {
  const char *wanted = getenv("FAKE_GPUS");
  *count = wanted ? atoi(wanted) : NUM_DEVICES;
  return OK;
}

CUresult cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < NUM_DEVICES ? OK : 101;
}

CUresult cuDeviceGetPCIBusId(char *id, int length, int device) {
  ENTER("cuDeviceGetPCIBusId");
  snprintf(id, (size_t)length, "0000:%02X:00.0", FIRST_BUS + device);
  RETURN(OK);
}

CUresult cuDevicePrimaryCtxRetain(Context **context, int device) {
  ENTER("cuDevicePrimaryCtxRetain");
  contexts[device].num_holders++;
  *context = &contexts[device];
  RETURN(OK);
}

CUresult cuDevicePrimaryCtxRelease_v2(int device) {
  pthread_mutex_lock(&the_lock);
  REQUIRE(contexts[device].num_holders, INVALID_CONTEXT);
  contexts[device].num_holders--;
  RETURN(OK);
}

CUresult cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *is_active) {
  ENTER("cuDevicePrimaryCtxGetState");
  *flags = 0;
  *is_active = contexts[device].num_holders > 0;
  RETURN(OK);
}

CUresult cuCtxSetCurrent(Context *context) {
  ENTER("cuCtxSetCurrent");
  current = context;
  RETURN(OK);
}

CUresult cuCtxGetCurrent(Context **context) {
  *context = current;
  return OK;
}

int current_device(void) { return HAS_CONTEXT ? current->device : -1; }

CUresult cuStreamGetCtx(Stream *stream, Context **context) {
  ENTER("cuStreamGetCtx");
  REQUIRE(is_stream(stream), INVALID_VALUE);
  *context = stream->context;
  RETURN(OK);
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
  ENTER("cuThreadExchangeStreamCaptureMode");
  int before = capture_mode_of_thread;
  capture_mode_of_thread = *mode;
  *mode = before;
  RETURN(OK);
}

/* -- memory ------------------------------------------------------------------------------------- */

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
  ENTER("cuMemAlloc");
  UNLESS_CAPTURING();
  REQUIRE(HAS_CONTEXT && size, INVALID_CONTEXT);
  RETURN(allocate(size, current->device, address));
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  ENTER("cuMemFree");
  UNLESS_CAPTURING();
  RETURN(release(address));
}

CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned int flags) {
  ENTER("cuMemHostRegister");
  REQUIRE(HAS_CONTEXT, INVALID_CONTEXT);
  UNLESS_CAPTURING();
  REQUIRE(flags == 3, INVALID_VALUE); /* portable, mapped */
  RETURN(register_host(address, size));
}

CUresult cuMemHostUnregister(void *address) {
  ENTER("cuMemHostUnregister");
  REQUIRE(HAS_CONTEXT, INVALID_CONTEXT);
  UNLESS_CAPTURING();
  RETURN(unregister_host(address));
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *seen, void *address, unsigned int flags) {
  ENTER("cuMemHostGetDevicePointer");
  REQUIRE(HAS_CONTEXT, INVALID_CONTEXT);
  REQUIRE(!flags && is_registered(address), INVALID_VALUE);
  *seen = (CUdeviceptr)((char *)address + faults.mapping_offset);
  RETURN(OK);
}

/* -- streams and events ------------------------------------------------------------------------- */

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  ENTER("cuCtxGetStreamPriorityRange");
  REQUIRE(HAS_CONTEXT, INVALID_CONTEXT);
  *least = 0;
  *greatest = -5;
  RETURN(OK);
}

CUresult cuStreamCreateWithPriority(Stream **stream, unsigned int flags, int priority) {
  ENTER("cuStreamCreate");
  UNLESS_CAPTURING();
  REQUIRE(HAS_CONTEXT, INVALID_CONTEXT);
  REQUIRE(flags == 1, INVALID_VALUE); /* without it, it would wait for the legacy stream */
  *stream = make_stream(current, priority);
  RETURN(OK);
}

CUresult cuStreamDestroy_v2(Stream *stream) {
  ENTER("cuStreamDestroy");
  REQUIRE(is_stream(stream), INVALID_VALUE);
  if (stream->first) note_violation("a stream with work is destroyed");
  end_stream(stream);
  RETURN(OK);
}

CUresult cuStreamSynchronize(Stream *stream) {
  ENTER("cuStreamSynchronize");
  UNLESS_CAPTURING();
  REQUIRE(is_stream(stream), INVALID_VALUE);
  wait_idle(stream);
  RETURN(faults.is_lost ? ILLEGAL_ADDRESS : OK);
}

CUresult cuStreamWaitEvent(Stream *stream, Event *event, unsigned int flags) {
  ENTER("cuStreamWaitEvent");
  REQUIRE(is_stream(stream) && !flags, INVALID_VALUE);
  enqueue(stream, (Work){.kind = WAIT, .event = event, .version = event->recorded});
  RETURN(OK);
}

CUresult cuEventCreate(Event **event, unsigned int flags) {
  ENTER("cuEventCreate");
  *event = calloc(1, sizeof **event); /* never freed: streams may still refer to it */
  (*event)->is_timed = !(flags & 2);
  RETURN(OK);
}

CUresult cuEventRecord(Event *event, Stream *stream) {
  ENTER("cuEventRecord");
  REQUIRE(is_stream(stream), INVALID_VALUE);
  event->recorded++;
  enqueue(stream, (Work){.kind = RECORD, .event = event, .version = event->recorded});
  RETURN(OK);
}

CUresult cuEventQuery(Event *event) {
  ENTER("cuEventQuery");
  UNLESS_CAPTURING();
  RETURN(event->fired == event->recorded ? OK : NOT_READY);
}

CUresult cuEventSynchronize(Event *event) {
  ENTER("cuEventSynchronize");
  UNLESS_CAPTURING();
  uint64_t version = event->recorded;
  Clock give_up = start_clock();
  while (event->fired < version && !faults.is_lost) wait_for_change(&give_up);
  RETURN(faults.is_lost ? ILLEGAL_ADDRESS : OK);
}

CUresult cuEventElapsedTime(float *milliseconds, Event *begin, Event *end) {
  ENTER("cuEventElapsedTime");
  REQUIRE(begin->is_timed && end->is_timed && begin->recorded && end->recorded, INVALID_VALUE);
  REQUIRE(begin->fired == begin->recorded && end->fired == end->recorded, NOT_READY);
  *milliseconds = (float)((end->fired_us - begin->fired_us) / 1e3);
  RETURN(OK);
}

/* -- copies ------------------------------------------------------------------------------------- */

/* Look at a run when it is queued; read its source at once if `reads_early`. */
static CUresult accept_run(Run *run, bool reads_early, Place *host) {
  char *to, *from;
  Place target = look_up(run->to, run->size, &to), source = look_up(run->from, run->size, &from);
  if (target == NOWHERE || source == NOWHERE) return INVALID_VALUE;
  bool is_within = target == ON_DEVICE && device_of(run->to) == device_of(run->from);
  if (!is_within && (target == ON_DEVICE) == (source == ON_DEVICE)) {
    note_violation("a copy is not between host and device, nor within a device");
    return INVALID_VALUE;
  }
  *host = target == ON_DEVICE ? source : target;
  if (reads_early) {
    run->early = malloc(run->size ? run->size : 1);
    memcpy(run->early, from, run->size);
  }
  return OK;
}

static void spend(double us) {
  struct timespec start, now;
  if (us <= 0) return;
  clock_gettime(CLOCK_MONOTONIC, &start);
  do
    clock_gettime(CLOCK_MONOTONIC, &now);
  while ((double)(now.tv_sec - start.tv_sec) * 1e6 + (double)(now.tv_nsec - start.tv_nsec) * 1e-3 < us);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, Stream *stream) {
  spend(speed.call_us);
  ENTER("cuMemcpyAsync");
  REQUIRE(is_stream(stream), INVALID_VALUE);
  REQUIRE(HAS_CONTEXT && current == stream->context, INVALID_CONTEXT);
  Run *run = malloc(sizeof *run);
  *run = (Run){to, from, size, NULL};
  Place host = NOWHERE;
  char *bytes;
  Work work = {.kind = COPY, .runs = run, .num_runs = 1};
  /* From pageable memory the driver stages the bytes before it returns. */
  bool is_staged = look_up(from, size, &bytes) == PAGEABLE;
  CUresult result = accept_run(run, is_staged, &host);
  if (result) {
    free_work(&work);
    RETURN(result);
  }
  note_copies(false, 1, 0, 0, stream);
  enqueue(stream, work);
  if (host == PAGEABLE && !is_staged) wait_idle(stream); /* to pageable memory it waits */
  RETURN(OK);
}

static CUresult copy_batch(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                           CUmemcpyAttributes *attributes, size_t *first_with, size_t num_attributes,
                           size_t *failed, Stream *stream) {
  spend(speed.call_us);
  ENTER("cuMemcpyBatchAsync");
  *failed = SIZE_MAX;
  REQUIRE(stream && is_stream(stream), INVALID_VALUE); /* not the legacy stream */
  REQUIRE(HAS_CONTEXT && current == stream->context, INVALID_CONTEXT);
  REQUIRE(count && num_attributes == 1 && first_with[0] == 0, INVALID_VALUE);
  int order = attributes->srcAccessOrder;
  REQUIRE(order == ORDER_STREAM || order == ORDER_DURING_CALL || order == ORDER_ANY, INVALID_VALUE);
  CUmemLocation hints[] = {attributes->srcLocHint, attributes->dstLocHint};
  for (int i = 0; i < 2; i++) REQUIRE(!hints[i].type && !hints[i].id, INVALID_VALUE);
  Run *runs = calloc(count, sizeof *runs);
  Work work = {.kind = COPY, .runs = runs, .num_runs = count, .is_batch = true};
  for (size_t i = 0; i < count; i++) {
    Place host;
    runs[i] = (Run){to[i], from[i], sizes[i], NULL};
    /* In any order: half of the sources are read now, the others when the stream comes to them. */
    bool is_early = order == ORDER_DURING_CALL || (order == ORDER_ANY && i % 2 == 0);
    if (accept_run(&runs[i], is_early, &host) || (int)i == faults.refused_run) {
      *failed = i;
      free_work(&work);
      RETURN(INVALID_VALUE);
    }
  }
  note_copies(true, count, order, (int)attributes->flags, stream);
  enqueue(stream, work);
  RETURN(OK);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags,
                             int *status) {
  bool is_known = !strcmp(symbol, "cuMemcpyBatchAsync") && version == 12080 && !flags;
  bool is_here = is_known && driver_version >= 12080;
  *found = is_here ? (void *)copy_batch : NULL;
  *status = is_here ? 0 : 1; /* success all the same: the status says it */
  return OK;
}
