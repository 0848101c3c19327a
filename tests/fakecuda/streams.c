/* Streams: a thread each, which does its work in order. */

#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t the_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
Stream *streams;
bool is_frozen;
__thread int capture_mode_of_thread = GLOBAL_MODE;

static double link_is_free_us[NUM_DEVICES][2]; /* when, in each direction */

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static void sleep_until(double us) {
  double left = us - now_us();
  if (left <= 0) return;
  struct timespec rest = {(time_t)(left / 1e6), (long)((left - (time_t)(left / 1e6) * 1e6) * 1e3)};
  nanosleep(&rest, NULL);
}

/* Copies of all streams take turns on the link, in the order in which streams come to them: stream
   priorities do not apply to copies. Called with the lock; returns when the copy will have landed. */
static double take_link(Stream *stream, const Work *work, bool to_device) {
  double cost = speed.start_us + speed.run_us * (double)work->num_runs, now = now_us();
  if (speed.bytes_per_us > 0)
    for (size_t i = 0; i < work->num_runs; i++)
      cost += (double)work->runs[i].size / speed.bytes_per_us;
  /* Within a device, nothing uses the link. */
  if (work->num_runs && device_of(work->runs[0].from) >= 0 && device_of(work->runs[0].to) >= 0)
    return now + speed.late_us * ((double)random() / (double)RAND_MAX);
  double *is_free = &link_is_free_us[stream->context->device][to_device];
  *is_free = (*is_free > now ? *is_free : now) + cost;
  return *is_free + speed.late_us * ((double)random() / (double)RAND_MAX);
}

static void check_no_file_io(CUdeviceptr address, size_t size) {
  if (is_in_file_io(address, size))
    note_violation("a stream and file I/O use the same device memory");
}

static void move(const Run *run, const char *name, size_t num_runs) {
  char *to, *from;
  pthread_mutex_lock(&the_lock);
  check_no_file_io(run->to, run->size);
  check_no_file_io(run->from, run->size);
  Place target = look_up(run->to, run->size, &to);
  Place source = look_up(run->from, run->size, &from);
  bool is_wrong = corrupts(name, target == ON_DEVICE, num_runs);
  pthread_mutex_unlock(&the_lock);
  if (target == NOWHERE || (source == NOWHERE && !run->early)) return;
  memcpy(to, run->early ? run->early : from, run->size);
  if (is_wrong && run->size) to[run->size - 1] ^= 1;
}

static void wait_until_thawed(Stream *stream) {
  while (is_frozen && !faults.is_lost && !stream->is_ending)
    pthread_cond_wait(&changed, &the_lock);
}

static void copy(Stream *stream, Work *work) {
  wait_until_thawed(stream);
  if (!faults.lost_after_copies) faults.is_lost = true;
  if (faults.lost_after_copies > 0) faults.lost_after_copies--;
  if (faults.is_lost || !work->num_runs) return;
  char *bytes;
  bool to_device = look_up(work->runs[0].to, work->runs[0].size, &bytes) == ON_DEVICE;
  double landed = take_link(stream, work, to_device);
  pthread_mutex_unlock(&the_lock);
  sleep_until(landed);
  const char *name = work->is_batch ? "cuMemcpyBatchAsync" : "cuMemcpyAsync";
  for (size_t i = work->num_runs; i-- > 0;) /* a batch has no order */
    move(&work->runs[i], name, work->num_runs);
  pthread_mutex_lock(&the_lock);
}

/* A kernel that reads its copies from memory that the device sees, and makes them. */
static void run_kernel(Stream *stream, Work *work) {
  wait_until_thawed(stream);
  char *bytes, *ends[2];
  size_t n = work->num_runs;
  if (faults.is_lost) return;
  Place place_of_table = look_up(work->table, 24 * n, &bytes);
  if (place_of_table != ON_DEVICE && place_of_table != PINNED) {
    note_violation("the table of a kernel is not where the device sees it");
    return;
  }
  const int64_t *table = (const int64_t *)bytes;
  bool is_wrong = corrupts("kernel", true, n);
  double landed = take_link(stream, &(Work){.num_runs = 0}, true);
  for (size_t i = 0; i < n; i++) {
    size_t size = (size_t)table[2 * n + i];
    for (int end = 0; end < 2; end++) {
      CUdeviceptr address = (CUdeviceptr)table[(size_t)end * n + i];
      Place place = look_up(address, size, &ends[end]);
      check_no_file_io(address, size);
      if (address % 16 || size % 16 || place == NOWHERE || place == PAGEABLE) {
        note_violation("a kernel touched %zu bytes at %p", size, (void *)address);
        faults.is_lost = true;
        return;
      }
    }
    if (!is_wrong || i) memcpy(ends[0], ends[1], size);
  }
  pthread_mutex_unlock(&the_lock);
  sleep_until(landed);
  pthread_mutex_lock(&the_lock);
}

static void do_work(Stream *stream, Work *work) {
  char *bytes;
  switch (work->kind) {
    case COPY: copy(stream, work); break;
    case KERNEL_COPY: run_kernel(stream, work); break;
    case FILL:
      check_no_file_io(work->runs->to, work->runs->size);
      if (look_up(work->runs->to, work->runs->size, &bytes) == ON_DEVICE)
        memset(bytes, (int)work->runs->from, work->runs->size);
      else
        note_violation("a kernel filled what is not device memory");
      break;
    case CALL:
      pthread_mutex_unlock(&the_lock);
      work->call();
      pthread_mutex_lock(&the_lock);
      break;
    case RECORD:
      if (work->event->fired < work->version) work->event->fired = work->version;
      work->event->fired_us = now_us();
      break;
    case WAIT:
      while (work->event->fired < work->version && !faults.is_lost && !stream->is_ending)
        pthread_cond_wait(&changed, &the_lock);
      break;
  }
}

void free_work(Work *work) {
  for (size_t i = 0; work->runs && i < work->num_runs; i++) free(work->runs[i].early);
  free(work->runs);
}

static void *run_stream(void *argument) {
  Stream *stream = argument;
  pthread_mutex_lock(&the_lock);
  for (;;) {
    while (!stream->first && !stream->is_ending) pthread_cond_wait(&changed, &the_lock);
    Work *work = stream->first;
    if (!work) break;
    do_work(stream, work);
    stream->first = work->next;
    if (!stream->first) stream->last = NULL;
    free_work(work);
    free(work);
    pthread_cond_broadcast(&changed);
  }
  pthread_mutex_unlock(&the_lock);
  return NULL;
}

Stream *make_stream(Context *context, int priority) {
  Stream *stream = calloc(1, sizeof *stream);
  stream->context = context;
  stream->priority = priority;
  stream->next = streams;
  streams = stream;
  pthread_create(&stream->thread, NULL, run_stream, stream);
  return stream;
}

bool is_stream(const Stream *stream) {
  for (Stream *other = streams; other; other = other->next)
    if (other == stream) return true;
  return false;
}

void end_stream(Stream *stream) {
  Stream **link = &streams;
  while (*link != stream) link = &(*link)->next;
  *link = stream->next;
  stream->is_ending = true;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&the_lock);
  pthread_join(stream->thread, NULL);
  pthread_mutex_lock(&the_lock);
  free(stream);
}

void enqueue(Stream *stream, Work work) {
  Work *kept = malloc(sizeof *kept);
  *kept = work;
  kept->next = NULL;
  if (stream->is_capturing) note_violation("work was queued on a stream that is captured");
  if (stream->last)
    stream->last->next = kept;
  else
    stream->first = kept;
  stream->last = kept;
  pthread_cond_broadcast(&changed);
}

bool is_stuck(const Stream *stream) {
  const Work *work = stream->first;
  if (!work || faults.is_lost) return true;
  if (work->kind == WAIT) return work->event->fired < work->version;
  return is_frozen && (work->kind == COPY || work->kind == KERNEL_COPY);
}

Clock start_clock(void) {
  Clock give_up;
  clock_gettime(CLOCK_MONOTONIC, &give_up);
  give_up.tv_sec += LONGEST_WAIT_S;
  return give_up;
}

void wait_for_change(const Clock *give_up) {
  if (pthread_cond_clockwait(&changed, &the_lock, CLOCK_MONOTONIC, give_up) != ETIMEDOUT) return;
  note_violation("a call waited for %d s", LONGEST_WAIT_S);
  faults.is_lost = true;
  pthread_cond_broadcast(&changed);
}

void wait_idle(Stream *stream) {
  Clock give_up = start_clock();
  while (stream->first && !faults.is_lost) wait_for_change(&give_up);
}

bool overlap(CUdeviceptr a, size_t a_size, CUdeviceptr b, size_t b_size) {
  return a < b + b_size && b < a + a_size;
}

bool is_in_flight(CUdeviceptr address, size_t size) {
  if (faults.is_lost) return false;
  for (Stream *stream = streams; stream; stream = stream->next)
    for (Work *work = stream->first; work; work = work->next) {
      if (work->kind == KERNEL_COPY && overlap(address, size, work->table, 24 * work->num_runs))
        return true;
      for (size_t i = 0; work->kind == COPY && i < work->num_runs; i++) {
        Run *run = &work->runs[i];
        if (overlap(address, size, run->to, run->size)) return true;
        if (!run->early && overlap(address, size, run->from, run->size)) return true;
      }
    }
  return false;
}

/* While a thread captures in global mode, such calls by other threads void the capture, unless
   their thread has declared itself independent. */
CUresult check_capture(void) {
  CUresult result = OK;
  if (capture_mode_of_thread != GLOBAL_MODE) return OK;
  for (Stream *stream = streams; stream; stream = stream->next) {
    if (!stream->is_capturing) continue;
    if (stream->capture_mode != GLOBAL_MODE && !pthread_equal(stream->capturer, pthread_self()))
      continue;
    stream->capture_is_void = true;
    result = CAPTURE_UNSUPPORTED;
  }
  return result;
}

void begin_capture(Stream *stream, int mode) {
  stream->is_capturing = true;
  stream->capture_is_void = false;
  stream->capture_mode = mode;
  stream->capturer = pthread_self();
}

bool end_capture(Stream *stream) {
  stream->is_capturing = false;
  return !stream->capture_is_void;
}
