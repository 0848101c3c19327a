/* What tests set and ask. None of it exists in a real driver. */

#define _GNU_SOURCE
#include "fake.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64, MOST_COPIES = 65536 };

typedef struct {
  char name[48];
  int code, from_call, num_calls; /* refuses calls from this one on */
} Refusal;

typedef struct {
  char name[48];
  bool to_device;
  size_t at_least;
} Corruption;

typedef struct {
  uint64_t stream;
  int64_t num_runs;
  int32_t is_batch, order, flags, priority;
} CopyCall;

Speed speed;
Faults faults;

static const Faults NO_FAULTS = {false, -1, -1, INT64_MAX / 2, 0, 4096};
static Refusal refusals[MOST];
static size_t num_refusals;
static Corruption corruptions[MOST];
static size_t num_corruptions;
static CopyCall copy_calls[MOST_COPIES];
static size_t num_copy_calls;
static char violation[256];

void note_violation(const char *format, ...) {
  va_list arguments;
  if (*violation) return;
  va_start(arguments, format);
  vsnprintf(violation, sizeof violation, format, arguments);
  va_end(arguments);
}

CUresult refusal_of(const char *name) {
  CUresult code = OK;
  for (size_t i = 0; i < num_refusals; i++) {
    Refusal *refusal = &refusals[i];
    if (!strcmp(refusal->name, name) && ++refusal->num_calls >= refusal->from_call)
      code = refusal->code;
  }
  return code;
}

bool corrupts(const char *name, bool to_device, size_t num_runs) {
  for (size_t i = 0; i < num_corruptions; i++) {
    Corruption *c = &corruptions[i];
    if (!strcmp(c->name, name) && c->to_device == to_device && num_runs >= c->at_least) return true;
  }
  return false;
}

void note_copies(bool is_batch, size_t num_runs, int order, int flags, Stream *stream) {
  if (num_copy_calls == MOST_COPIES) return;
  copy_calls[num_copy_calls++] =
      (CopyCall){(uint64_t)stream, (int64_t)num_runs, is_batch, order, flags, stream->priority};
}

#define LOCKED(statement)              \
  do {                                 \
    pthread_mutex_lock(&the_lock);     \
    statement;                         \
    pthread_cond_broadcast(&changed);  \
    pthread_mutex_unlock(&the_lock);   \
  } while (0)

void fake_set_version(int version) { driver_version = version; }

void fake_set_speed(const Speed *wanted) { LOCKED(speed = *wanted); }

void fake_set_faults(const Faults *wanted) { LOCKED(faults = *wanted); }

void fake_get_faults(Faults *found) { LOCKED(*found = faults); }

void fake_refuse(const char *name, int code, int from_call) {
  LOCKED({
    Refusal *refusal = &refusals[num_refusals++];
    snprintf(refusal->name, sizeof refusal->name, "%s", name);
    refusal->code = code;
    refusal->from_call = from_call;
    refusal->num_calls = 0;
  });
}

void fake_refuse_nothing(void) { LOCKED(num_refusals = 0); }

void fake_corrupt(const char *name, int to_device, size_t at_least) {
  LOCKED({
    Corruption *c = &corruptions[num_corruptions++];
    snprintf(c->name, sizeof c->name, "%s", name);
    c->to_device = to_device;
    c->at_least = at_least;
  });
}

void fake_keep_registered(uint64_t address) { LOCKED(keep_registered(address)); }

/* Frozen, the device executes no copies. */
void fake_freeze(int frozen) { LOCKED(is_frozen = frozen); }

/* Let a stream wait, like a long kernel, until fake_fire. */
Event *fake_hold(Stream *stream) {
  Event *event = calloc(1, sizeof *event);
  event->recorded = 1;
  LOCKED(enqueue(stream, (Work){.kind = WAIT, .event = event, .version = 1}));
  return event;
}

void fake_fire(Event *event) { LOCKED(event->fired = event->recorded); }

/* Queue a kernel that fills device memory with a byte. */
void fake_fill(Stream *stream, uint64_t address, int value, size_t size) {
  Run *run = malloc(sizeof *run);
  *run = (Run){address, (CUdeviceptr)value, size, NULL};
  LOCKED(enqueue(stream, (Work){.kind = FILL, .runs = run, .num_runs = 1}));
}

/* Queue the copy kernel on a table in device memory. */
void fake_launch(Stream *stream, uint64_t table, size_t num_runs) {
  LOCKED(enqueue(stream, (Work){.kind = KERNEL_COPY, .table = table, .num_runs = num_runs}));
}

/* Queue a call in place of a kernel. */
void fake_call(Stream *stream, void (*call)(void)) {
  LOCKED(enqueue(stream, (Work){.kind = CALL, .call = call}));
}

/* Whether file I/O uses device memory now. */
int fake_is_in_file_io(uint64_t address, size_t size) {
  int answer;
  LOCKED(answer = is_in_file_io(address, size));
  return answer;
}

/* The address at which a test may touch device memory. */
uint64_t fake_seen_at(uint64_t address) {
  char *bytes = NULL;
  LOCKED(look_up(address, 1, &bytes));
  return (uint64_t)bytes;
}

int fake_device_of(uint64_t address) {
  int device;
  LOCKED(device = device_of(address));
  return device;
}

void fake_begin_capture(Stream *stream, int mode) { LOCKED(begin_capture(stream, mode)); }

int fake_end_capture(Stream *stream) {
  int is_intact;
  LOCKED(is_intact = end_capture(stream));
  return is_intact;
}

static bool is_idle(const Stream *stream) { return !stream->first || faults.is_lost; }

static void wait_for_all(bool (*is_done)(const Stream *)) {
  Clock give_up = start_clock();
  pthread_mutex_lock(&the_lock);
  for (Stream *stream = streams; stream;) {
    if (is_done(stream)) {
      stream = stream->next;
    } else {
      wait_for_change(&give_up);
      stream = streams; /* others may have ended meanwhile */
    }
  }
  pthread_mutex_unlock(&the_lock);
}

void fake_wait_idle(void) { wait_for_all(is_idle); }

void fake_wait_quiet(void) { wait_for_all(is_stuck); }

size_t fake_num_streams(void) {
  size_t count = 0;
  LOCKED(for (Stream *stream = streams; stream; stream = stream->next) count++);
  return count;
}

int fake_num_holders(int device) { return contexts[device].num_holders; }

size_t fake_registered(uint64_t *starts, uint64_t *sizes, size_t room) {
  size_t count;
  LOCKED(count = num_registered(starts, sizes, room));
  return count;
}

size_t fake_copy_calls(CopyCall *calls, size_t room) {
  size_t count;
  LOCKED({
    count = num_copy_calls;
    memcpy(calls, copy_calls, (count < room ? count : room) * sizeof *calls);
  });
  return count;
}

void fake_forget_copy_calls(void) { LOCKED(num_copy_calls = 0); }

void fake_violation(char *text, size_t room) { LOCKED(snprintf(text, room, "%s", violation)); }

/* End all streams and forget everything. */
void fake_reset(void) {
  pthread_mutex_lock(&the_lock);
  faults = NO_FAULTS;
  faults.is_lost = true; /* nothing queued is executed any more */
  pthread_cond_broadcast(&changed);
  while (streams) end_stream(streams);
  forget_files();
  forget_memory();
  faults = NO_FAULTS;
  speed = (Speed){0};
  is_frozen = false;
  driver_version = 13000;
  num_refusals = num_corruptions = num_copy_calls = 0;
  *violation = 0;
  for (int i = 0; i < NUM_DEVICES; i++) contexts[i].num_holders = 0;
  capture_mode_of_thread = GLOBAL_MODE;
  current = NULL; /* this thread's, or a test would find that of the one before it */
  pthread_mutex_unlock(&the_lock);
}
