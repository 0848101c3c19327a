/* The functions of libcufile: file I/O on device memory, on the calling thread. */

#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
  DRIVER_NOT_INITIALIZED = 5001,
  CUDA_DRIVER_FAILED = 5011,
  MEMORY_TYPE_INVALID = 5013,
  CONTEXT_MISMATCH = 5015,
  INVALID_FILE_TYPE = 5018,
  INVALID_OPEN_FLAG = 5019,
  INVALID_ARGUMENT = 5022,
  MEMORY_ALREADY_REGISTERED = 5023,
  MEMORY_NOT_REGISTERED = 5024,
  HANDLE_NOT_REGISTERED = 5027,
  HANDLE_ALREADY_REGISTERED = 5028,
};

enum { MOST = 256, PAGE = 4096, OPAQUE_FD = 1, NVME = 1 << 4, ALLOWS_COMPATIBLE = 1 << 1 };

typedef struct {
  int err, cu_err;
} CUfileError_t;

typedef struct {
  int type;
  union {
    int fd;
    void *handle;
  } handle;
  const void *fs_ops;
} CUfileDescr_t;

typedef struct {
  bool is_registered;
  int fd;
} File;

typedef struct {
  CUdeviceptr base;
  size_t size;
} Buffer;

typedef struct {
  CUdeviceptr address; /* 0: none */
  size_t size;
  const File *file;
} Transfer;

static bool is_open, is_compatible;
static File files[MOST];
static Buffer buffers[MOST];
static size_t num_buffers;
static Transfer transfers[MOST];
static size_t num_transfers, num_bounced;

bool is_in_file_io(CUdeviceptr address, size_t size) {
  for (size_t i = 0; i < MOST; i++)
    if (transfers[i].address && overlap(address, size, transfers[i].address, transfers[i].size))
      return true;
  return false;
}

bool is_registered_for_files(CUdeviceptr address, size_t size) {
  for (size_t i = 0; i < num_buffers; i++)
    if (overlap(address, size, buffers[i].base, buffers[i].size)) return true;
  return false;
}

#define ANSWER(code)                             \
  do {                                           \
    CUfileError_t answer = {(code), 0};          \
    pthread_mutex_unlock(&the_lock);             \
    return answer;                               \
  } while (0)

#define BEGIN(name)                              \
  pthread_mutex_lock(&the_lock);                 \
  do {                                           \
    int refusal = refusal_of(name);              \
    if (refusal) ANSWER(refusal);                \
    if (faults.is_lost) ANSWER(CUDA_DRIVER_FAILED); \
  } while (0)

CUfileError_t cuFileDriverOpen(void) {
  BEGIN("cuFileDriverOpen");
  while (is_frozen && !faults.is_lost) pthread_cond_wait(&changed, &the_lock);
  is_open = true;
  ANSWER(OK);
}

typedef struct {
  unsigned int version[2];
  size_t sizes[2];
  unsigned int file_systems, control, flags, limits[5];
} CUfileDrvProps_t;

CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *properties) {
  BEGIN("cuFileDriverGetProperties");
  if (!is_open) ANSWER(DRIVER_NOT_INITIALIZED);
  *properties = (CUfileDrvProps_t){.control = ALLOWS_COMPATIBLE};
  if (!is_compatible) properties->file_systems = NVME;
  ANSWER(OK);
}

CUfileError_t cuFileHandleRegister(File **handle, CUfileDescr_t *descriptor) {
  BEGIN("cuFileHandleRegister");
  struct stat found;
  if (!is_open) ANSWER(DRIVER_NOT_INITIALIZED);
  if (descriptor->type != OPAQUE_FD || descriptor->fs_ops) ANSWER(INVALID_ARGUMENT);
  int fd = descriptor->handle.fd;
  if (fstat(fd, &found) || !S_ISREG(found.st_mode)) ANSWER(INVALID_FILE_TYPE);
  if (!(fcntl(fd, F_GETFL) & O_DIRECT)) ANSWER(INVALID_OPEN_FLAG);
  File *file = NULL;
  for (size_t i = MOST; i-- > 0;) {
    if (files[i].is_registered && files[i].fd == fd) ANSWER(HANDLE_ALREADY_REGISTERED);
    if (!files[i].is_registered) file = &files[i];
  }
  *file = (File){true, fd};
  *handle = file;
  ANSWER(OK);
}

void cuFileHandleDeregister(File *file) {
  pthread_mutex_lock(&the_lock);
  if (!file->is_registered) note_violation("a file is deregistered that is not registered");
  for (size_t i = 0; i < MOST; i++)
    if (transfers[i].address && transfers[i].file == file)
      note_violation("a file in use is deregistered");
  file->is_registered = false;
  pthread_mutex_unlock(&the_lock);
}

CUfileError_t cuFileBufRegister(CUdeviceptr base, size_t size, int flags) {
  BEGIN("cuFileBufRegister");
  char *bytes;
  if (!is_open) ANSWER(DRIVER_NOT_INITIALIZED);
  if (flags || !size || base % PAGE || num_buffers == MOST) ANSWER(INVALID_ARGUMENT);
  if (look_up(base, size, &bytes) != ON_DEVICE) ANSWER(MEMORY_TYPE_INVALID);
  if (device_of(base) != current_device()) ANSWER(CONTEXT_MISMATCH);
  if (is_registered_for_files(base, size)) ANSWER(MEMORY_ALREADY_REGISTERED);
  buffers[num_buffers++] = (Buffer){base, size};
  ANSWER(OK);
}

CUfileError_t cuFileBufDeregister(CUdeviceptr base) {
  BEGIN("cuFileBufDeregister");
  for (size_t i = 0; i < num_buffers; i++) {
    if (buffers[i].base != base) continue;
    if (device_of(base) != current_device()) ANSWER(CONTEXT_MISMATCH);
    if (is_in_file_io(base, buffers[i].size) || is_in_flight(base, buffers[i].size))
      note_violation("memory in use is deregistered");
    buffers[i] = buffers[--num_buffers];
    ANSWER(OK);
  }
  ANSWER(MEMORY_NOT_REGISTERED);
}

/* Whether the library would not go through memory of its own. */
static bool is_direct(CUdeviceptr base, size_t size, off_t file_offset, off_t base_offset) {
  if (size % PAGE || file_offset % PAGE || base_offset % PAGE) return false;
  for (size_t i = 0; i < num_buffers; i++) {
    if (!overlap(base + (CUdeviceptr)base_offset, size, buffers[i].base, buffers[i].size)) continue;
    if (base != buffers[i].base) note_violation("I/O with another base than was registered");
    return (size_t)base_offset + size <= buffers[i].size;
  }
  return false;
}

static int refusal_of_io(const char *name, File *file, CUdeviceptr at, size_t size, char **bytes) {
  int refusal = refusal_of(name);
  if (refusal) return refusal;
  if (faults.is_lost) return CUDA_DRIVER_FAILED;
  if (!file->is_registered) return HANDLE_NOT_REGISTERED;
  if (look_up(at, size, bytes) != ON_DEVICE) return MEMORY_TYPE_INVALID;
  if (device_of(at) != current_device()) return CONTEXT_MISMATCH;
  if (is_in_flight(at, size) || is_in_file_io(at, size))
    note_violation("file I/O and another transfer use the same device memory");
  return OK;
}

static void be_late(void) {
  double us = speed.late_us * ((double)random() / (double)RAND_MAX);
  nanosleep(&(struct timespec){(time_t)(us / 1e6), (long)us % 1000000 * 1000}, NULL);
}

static Transfer *begin_transfer(const File *file, CUdeviceptr at, size_t size) {
  while (num_transfers == MOST) pthread_cond_wait(&changed, &the_lock);
  Transfer *transfer = transfers;
  while (transfer->address) transfer++;
  *transfer = (Transfer){at, size, file};
  num_transfers++;
  while (is_frozen && !faults.is_lost) pthread_cond_wait(&changed, &the_lock);
  return transfer;
}

static ssize_t move(const char *name, bool is_read, File *file, CUdeviceptr base, size_t size,
                    off_t file_offset, off_t base_offset) {
  CUdeviceptr at = base + (CUdeviceptr)base_offset;
  char *bytes, *copy = NULL;
  ssize_t moved;
  pthread_mutex_lock(&the_lock);
  int refusal = refusal_of_io(name, file, at, size, &bytes);
  if (refusal) {
    pthread_mutex_unlock(&the_lock);
    errno = refusal;
    return refusal < DRIVER_NOT_INITIALIZED ? -1 : -refusal;
  }
  if (is_compatible || !is_direct(base, size, file_offset, base_offset)) num_bounced++;
  Transfer *transfer = begin_transfer(file, at, size);
  bool is_wrong = corrupts(name, is_read, 1);
  pthread_mutex_unlock(&the_lock);
  if (posix_memalign((void **)&copy, PAGE, size)) abort();
  if (is_read) {
    moved = pread(file->fd, copy, size, file_offset);
    be_late();
    if (moved > 0) memcpy(bytes, copy, (size_t)moved);
    if (is_wrong && moved > 0) bytes[moved - 1] ^= 1;
  } else {
    be_late();
    memcpy(copy, bytes, size);
    if (is_wrong) copy[size - 1] ^= 1;
    moved = pwrite(file->fd, copy, size, file_offset);
  }
  int code = errno;
  free(copy);
  pthread_mutex_lock(&the_lock);
  transfer->address = 0;
  num_transfers--;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&the_lock);
  errno = code;
  return moved;
}

ssize_t cuFileRead(File *file, CUdeviceptr base, size_t size, off_t file_offset, off_t base_offset) {
  return move("cuFileRead", true, file, base, size, file_offset, base_offset);
}

ssize_t cuFileWrite(File *file, CUdeviceptr base, size_t size, off_t file_offset,
                    off_t base_offset) {
  return move("cuFileWrite", false, file, base, size, file_offset, base_offset);
}

/* -- what tests ask ----------------------------------------------------------------------------- */

size_t fake_num_files(void) {
  size_t count = 0;
  for (size_t i = 0; i < MOST; i++) count += files[i].is_registered;
  return count;
}

size_t fake_num_buffers(void) { return num_buffers; }

size_t fake_num_transfers(void) { return num_transfers; }

/* I/O that went through the library's own memory: unaligned, or not registered. */
size_t fake_num_bounced(void) { return num_bounced; }

/* Be in compatibility mode, as without nvidia-fs: all I/O goes through host memory. */
void fake_be_compatible(void) { is_compatible = true; }

/* Wait for I/O in flight, and forget the rest. */
void forget_files(void) {
  while (num_transfers) pthread_cond_wait(&changed, &the_lock);
  is_open = is_compatible = false;
  memset(files, 0, sizeof files);
  num_buffers = num_bounced = 0;
}
