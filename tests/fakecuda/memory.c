/* Device memory is mapped twice: at its own address, where no access is allowed, and where the
   fake's streams and the tests see it. */

#define _GNU_SOURCE
#include "fake.h"

#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 8192, PAGE = 4096 };

typedef struct {
  char *address, *seen;
  size_t size;
  int device;
} Allocation;

typedef struct {
  char *address;
  size_t size;
  bool is_stuck;
} Registration;

static Allocation allocations[MOST];
static size_t num_allocations;
static Registration registrations[MOST];
static size_t num_registrations;
static char *stuck;

static bool is_mapped(const char *address, size_t size) {
  unsigned char pages[256];
  char *start = (char *)((uintptr_t)address & ~(uintptr_t)(PAGE - 1));
  const char *end = address + size;
  for (; start < end; start += sizeof pages * PAGE) {
    size_t length = (size_t)(end - start);
    if (length > sizeof pages * PAGE) length = sizeof pages * PAGE;
    if (mincore(start, length, pages)) return false;
  }
  return true;
}

Place look_up(CUdeviceptr at, size_t size, char **bytes) {
  char *address = (char *)at;
  for (size_t i = 0; i < num_allocations; i++) {
    Allocation *a = &allocations[i];
    if (address + size <= a->address || address >= a->address + a->size) continue;
    if (address < a->address || address + size > a->address + a->size) {
      note_violation("%zu bytes at %p cross an end of device memory", size, (void *)address);
      return NOWHERE;
    }
    *bytes = a->seen + (address - a->address);
    return ON_DEVICE;
  }
  *bytes = address;
  if (!is_mapped(address, size)) {
    note_violation("%zu bytes at %p are nowhere", size, (void *)address);
    return NOWHERE;
  }
  for (size_t i = 0; i < num_registrations; i++) {
    Registration *r = &registrations[i];
    if (address + size <= r->address || address >= r->address + r->size) continue;
    if (address >= r->address && address + size <= r->address + r->size) return PINNED;
    note_violation("%zu bytes at %p cross an end of pinned memory", size, (void *)address);
    return NOWHERE;
  }
  return PAGEABLE;
}

CUresult allocate(size_t size, int device, CUdeviceptr *address) {
  size_t whole = (size + PAGE - 1) & ~(size_t)(PAGE - 1);
  int file = memfd_create("fake-device-memory", MFD_CLOEXEC);
  if (num_allocations == MOST || file < 0 || ftruncate(file, (off_t)whole)) return OUT_OF_MEMORY;
  Allocation *a = &allocations[num_allocations++];
  a->address = mmap(NULL, whole, PROT_NONE, MAP_SHARED, file, 0);
  a->seen = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  a->size = size;
  a->device = device;
  close(file);
  *address = (CUdeviceptr)a->address;
  return OK;
}

CUresult release(CUdeviceptr address) {
  for (size_t i = 0; i < num_allocations; i++) {
    Allocation *a = &allocations[i];
    if (a->address != (char *)address) continue;
    if (is_in_flight(address, a->size)) note_violation("device memory in use is freed");
    if (is_registered_for_files(address, a->size))
      note_violation("device memory is freed while registered for file I/O");
    munmap(a->address, a->size);
    munmap(a->seen, a->size);
    *a = allocations[--num_allocations];
    return OK;
  }
  return INVALID_VALUE;
}

int device_of(CUdeviceptr address) {
  for (size_t i = 0; i < num_allocations; i++) {
    Allocation *a = &allocations[i];
    if ((char *)address >= a->address && (char *)address < a->address + a->size) return a->device;
  }
  return -1;
}

size_t allocated_on(int device) {
  size_t sum = 0;
  for (size_t i = 0; i < num_allocations; i++)
    if (allocations[i].device == device) sum += allocations[i].size;
  return sum;
}

static bool shares_a_page(const Registration *r, const char *address, size_t size) {
  /* Pages are counted from the first registration, whose place in the address space is chance. */
  uintptr_t page = (uintptr_t)faults.page_bytes, origin = (uintptr_t)registrations[0].address % page;
  uintptr_t first = ((uintptr_t)address - origin) / page;
  uintptr_t last = ((uintptr_t)address + size - 1 - origin) / page;
  uintptr_t other_first = ((uintptr_t)r->address - origin) / page;
  uintptr_t other_last = ((uintptr_t)r->address + r->size - 1 - origin) / page;
  return first <= other_last && other_first <= last;
}

CUresult register_host(char *address, size_t size) {
  int64_t pinned = 0;
  for (size_t i = 0; i < num_registrations; i++) {
    if (shares_a_page(&registrations[i], address, size)) return ALREADY_REGISTERED;
    pinned += (int64_t)registrations[i].size;
  }
  if (!size || !is_mapped(address, size)) return INVALID_VALUE;
  if (num_registrations == MOST || pinned + (int64_t)size > faults.most_pinned)
    return OUT_OF_MEMORY;
  registrations[num_registrations++] = (Registration){address, size, false};
  return OK;
}

CUresult unregister_host(char *address) {
  for (size_t i = 0; i < num_registrations; i++) {
    Registration *r = &registrations[i];
    if (r->address != address) continue;
    if (address == stuck) return INVALID_VALUE;
    if (is_in_flight((CUdeviceptr)address, r->size)) note_violation("memory in use is unpinned");
    if (!is_mapped(r->address, r->size)) note_violation("memory was unmapped while pinned");
    for (size_t j = i + 1; j < num_registrations; j++) registrations[j - 1] = registrations[j];
    num_registrations--;
    return OK;
  }
  return NOT_REGISTERED;
}

bool is_registered(const char *address) {
  for (size_t i = 0; i < num_registrations; i++) {
    Registration *r = &registrations[i];
    if (address >= r->address && address < r->address + r->size) return true;
  }
  return false;
}

size_t num_registered(uint64_t *starts, uint64_t *sizes, size_t room) {
  for (size_t i = 0; i < num_registrations && i < room; i++) {
    starts[i] = (uint64_t)registrations[i].address;
    sizes[i] = registrations[i].size;
  }
  return num_registrations;
}

void keep_registered(CUdeviceptr address) { stuck = (char *)address; }

void forget_memory(void) {
  while (num_allocations) release((CUdeviceptr)allocations[0].address);
  num_registrations = 0;
  stuck = NULL;
}
