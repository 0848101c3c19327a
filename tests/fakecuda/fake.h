/* A CUDA driver for tests, without a GPU: asynchronous, and strict about what it is asked to do.

   memory.c   device memory, page-locked memory, and what an address is
   streams.c  streams are threads that take their work in order; events; captures; the link's speed
   driver.c   the driver's functions, as libcuda.so.1 exports them
   cufile.c   those of libcufile.so.0: files to and from device memory
   nvml.c     the management library's, as libnvidia-ml.so.1 exports them
   control.c  what tests set and ask: fake_*

   One lock guards everything. Copies run without it. A use that a real driver leaves undefined is
   noted as a violation, which fails the test. */

#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef struct timespec Clock; /* when a wait has been too long */

enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_CONTEXT = 201,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
};

enum { NUM_DEVICES = 4, FIRST_BUS = 0x3b, GLOBAL_MODE = 0, THREAD_LOCAL_MODE = 1 };
enum { LONGEST_WAIT_S = 60 };

typedef struct context {
  int device;
  int num_holders; /* 0: this process has no context on the device */
} Context;

typedef struct event {
  uint64_t recorded, fired; /* an event has fired if its last record has */
  bool is_timed;
  double fired_us; /* when it did last */
} Event;

typedef struct run {
  CUdeviceptr to, from;
  size_t size;
  char *early; /* the bytes, if they were read when the copy was queued */
} Run;

typedef enum { COPY, KERNEL_COPY, FILL, CALL, RECORD, WAIT } WorkKind;

typedef struct work {
  WorkKind kind;
  struct work *next;
  Run *runs; /* COPY; FILL: one, whose `from` is the value */
  size_t num_runs;
  bool is_batch;
  CUdeviceptr table; /* KERNEL_COPY: three rows of num_runs, read when the kernel runs */
  void (*call)(void); /* CALL: in place of a kernel */
  Event *event;      /* RECORD, WAIT */
  uint64_t version;
} Work;

typedef struct stream {
  Context *context;
  int priority;
  pthread_t thread;
  Work *first, *last; /* the first is being done */
  bool is_ending, is_capturing, capture_is_void;
  int capture_mode;
  pthread_t capturer;
  struct stream *next;
} Stream;

typedef enum { NOWHERE, ON_DEVICE, PINNED, PAGEABLE } Place;

/* How long things take; all zero unless a test says otherwise. */
typedef struct speed {
  double call_us;     /* of a single copy's call, on the calling thread */
  double start_us;    /* of a copy or batch, on the link */
  double run_us;      /* of each run of a batch */
  double bytes_per_us;
  double late_us;     /* a copy lands up to this much later, at random */
} Speed;

/* How the driver misbehaves. */
typedef struct faults {
  bool is_lost;          /* all calls fail, as after an illegal address */
  int lost_after_copies; /* copies until that happens; -1: never */
  int refused_run;       /* of a batch; -1: none */
  int64_t most_pinned;   /* bytes */
  int64_t mapping_offset; /* how far off the device sees pinned memory */
  int64_t page_bytes;    /* no two registrations share such a page */
} Faults;

extern pthread_mutex_t the_lock;
extern pthread_cond_t changed;
extern Context contexts[NUM_DEVICES];
extern Stream *streams;
extern Speed speed;
extern Faults faults;
extern int driver_version;
extern bool is_frozen; /* no copy is executed */

/* control.c */
void note_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
CUresult refusal_of(const char *name); /* counts the call */
bool corrupts(const char *name, bool to_device, size_t num_runs);
void note_copies(bool is_batch, size_t num_runs, int order, int flags, Stream *stream);

/* driver.c */
int current_device(void); /* of the calling thread's context; -1: it has none */

/* cufile.c */
bool is_in_file_io(CUdeviceptr address, size_t size);
bool is_registered_for_files(CUdeviceptr address, size_t size);
void forget_files(void);

/* memory.c */
Place look_up(CUdeviceptr address, size_t size, char **bytes);
CUresult allocate(size_t size, int device, CUdeviceptr *address);
CUresult release(CUdeviceptr address);
int device_of(CUdeviceptr address);
size_t allocated_on(int device);
CUresult register_host(char *address, size_t size);
CUresult unregister_host(char *address);
bool is_registered(const char *address);
size_t num_registered(uint64_t *starts, uint64_t *sizes, size_t room);
void keep_registered(CUdeviceptr address); /* unregistering it will fail */
void forget_memory(void);

/* streams.c */
Stream *make_stream(Context *context, int priority);
bool is_stream(const Stream *stream);
void end_stream(Stream *stream);
void enqueue(Stream *stream, Work work);
void wait_idle(Stream *stream);
Clock start_clock(void); /* of the calling thread's wait */
void wait_for_change(const Clock *give_up); /* then the device is lost: a deadlock ends */
bool is_stuck(const Stream *stream); /* nothing it has to do can be done now */
bool is_in_flight(CUdeviceptr address, size_t size);
bool overlap(CUdeviceptr a, size_t a_size, CUdeviceptr b, size_t b_size);
void free_work(Work *work);
CUresult check_capture(void); /* for calls that a capture in global mode forbids */
void begin_capture(Stream *stream, int mode);
bool end_capture(Stream *stream);
extern __thread int capture_mode_of_thread;
extern __thread Context *current; /* of the calling thread */

#endif
