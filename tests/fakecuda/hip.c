/* The same driver by HIP's names, as libamdhip64.so exports them. A device is current instead of a
   context, and the thread's last error is kept until it is asked for. */

#include "fake.h"

#include <stdio.h>

typedef int hipError_t;

enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEFAULT_KIND = 4 };

CUresult cuCtxSetCurrent(Context *context);
CUresult cuDeviceGet(int *device, int ordinal);
CUresult cuDeviceGetPCIBusId(char *id, int length, int device);
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest);
CUresult cuStreamCreateWithPriority(Stream **stream, unsigned int flags, int priority);
CUresult cuStreamDestroy_v2(Stream *stream);
CUresult cuThreadExchangeStreamCaptureMode(int *mode);
CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned int flags);
CUresult cuMemHostUnregister(void *address);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *seen, void *address, unsigned int flags);
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, Stream *stream);
CUresult cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags,
                             int *status);

static __thread hipError_t last_error;

static hipError_t noted(CUresult result) {
  if (result) last_error = result;
  return result;
}

hipError_t hipGetLastError(void) {
  hipError_t error = last_error;
  last_error = OK;
  return error;
}

hipError_t hipPeekAtLastError(void) { return last_error; }

const char *hipGetErrorName(hipError_t code) {
  switch (code) {
    case INVALID_VALUE: return "hipErrorInvalidValue";
    case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case INVALID_CONTEXT: return "hipErrorInvalidContext";
    case ILLEGAL_ADDRESS: return "hipErrorIllegalAddress";
    case ALREADY_REGISTERED: return "hipErrorHostMemoryAlreadyRegistered";
    case NOT_SUPPORTED: return "hipErrorNotSupported";
    default: return "hipErrorUnknown";
  }
}

hipError_t hipSetDevice(int device) {
  if (device < 0 || device >= NUM_DEVICES) return noted(101);
  if (!contexts[device].num_holders) contexts[device].num_holders = 1; /* as the runtime does */
  return noted(cuCtxSetCurrent(&contexts[device]));
}

hipError_t hipDeviceGet(int *device, int ordinal) { return noted(cuDeviceGet(device, ordinal)); }

hipError_t hipDeviceGetPCIBusId(char *id, int length, int device) {
  return noted(cuDeviceGetPCIBusId(id, length, device));
}

hipError_t hipDeviceGetStreamPriorityRange(int *least, int *greatest) {
  return noted(cuCtxGetStreamPriorityRange(least, greatest));
}

hipError_t hipStreamCreateWithPriority(Stream **stream, unsigned int flags, int priority) {
  return noted(cuStreamCreateWithPriority(stream, flags, priority));
}

hipError_t hipStreamDestroy(Stream *stream) { return noted(cuStreamDestroy_v2(stream)); }

hipError_t hipThreadExchangeStreamCaptureMode(int *mode) {
  return noted(cuThreadExchangeStreamCaptureMode(mode));
}

hipError_t hipHostRegister(void *address, size_t size, unsigned int flags) {
  return noted(cuMemHostRegister_v2(address, size, flags));
}

hipError_t hipHostUnregister(void *address) { return noted(cuMemHostUnregister(address)); }

hipError_t hipHostGetDevicePointer(CUdeviceptr *seen, void *address, unsigned int flags) {
  return noted(cuMemHostGetDevicePointer_v2(seen, address, flags));
}

hipError_t hipMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, int kind, Stream *stream) {
  char *bytes;
  pthread_mutex_lock(&the_lock);
  int actual = look_up(to, size, &bytes) == ON_DEVICE ? HOST_TO_DEVICE : DEVICE_TO_HOST;
  if (kind != DEFAULT_KIND && kind != actual) note_violation("a copy is declared as kind %d", kind);
  pthread_mutex_unlock(&the_lock);
  return noted(cuMemcpyAsync(to, from, size, stream));
}

/* Exported since ROCm 7.1; tests of older ones hide it. */
hipError_t hipMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                               void *attributes, size_t *first_with, size_t num_attributes,
                               size_t *failed, Stream *stream) {
  CUresult (*batch)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, void *, size_t *, size_t,
                    size_t *, Stream *) = NULL;
  int status;
  cuGetProcAddress_v2("cuMemcpyBatchAsync", (void **)&batch, 12080, 0, &status);
  if (!batch) return noted(NOT_SUPPORTED);
  return noted(batch(to, from, sizes, count, attributes, first_with, num_attributes, failed,
                     stream));
}
