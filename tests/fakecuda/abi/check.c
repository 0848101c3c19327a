/* What copy_driver.py passes to the driver, beside NVIDIA's header. Only compiled, never run. */

#include <cuda.h>
#include <cudaTypedefs.h>
#include <stddef.h>
#include <stdint.h>

#define SAME(what) _Static_assert(what, #what)

SAME(CUDA_VERSION >= 12080);
SAME(sizeof(CUmemLocation) == 8);
SAME(sizeof(CUmemcpyAttributes) == 24);
SAME(offsetof(CUmemcpyAttributes, srcAccessOrder) == 0);
SAME(offsetof(CUmemcpyAttributes, srcLocHint) == 4);
SAME(offsetof(CUmemcpyAttributes, dstLocHint) == 12);
SAME(offsetof(CUmemcpyAttributes, flags) == 20);
SAME(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM == 1);
SAME(CU_MEMCPY_SRC_ACCESS_ORDER_ANY == 3);
SAME(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE == 1);
SAME(CU_STREAM_CAPTURE_MODE_RELAXED == 2);
SAME(CU_STREAM_NON_BLOCKING == 1);
SAME((CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) == 3);
SAME(sizeof(CUdeviceptr) == sizeof(void *));

/* The functions under the names by which they are loaded. */
CUresult (*error_name)(CUresult, const char **) = cuGetErrorName;
CUresult (*get_device)(CUdevice *, int) = cuDeviceGet;
CUresult (*pci_address)(char *, int, CUdevice) = cuDeviceGetPCIBusId;
CUresult (*retain)(CUcontext *, CUdevice) = cuDevicePrimaryCtxRetain;
CUresult (*release)(CUdevice) = cuDevicePrimaryCtxRelease_v2;
CUresult (*set_context)(CUcontext) = cuCtxSetCurrent;
CUresult (*priorities)(int *, int *) = cuCtxGetStreamPriorityRange;
CUresult (*make_stream)(CUstream *, unsigned int, int) = cuStreamCreateWithPriority;
CUresult (*destroy_stream)(CUstream) = cuStreamDestroy_v2;
CUresult (*capture_mode)(CUstreamCaptureMode *) = cuThreadExchangeStreamCaptureMode;
CUresult (*register_host)(void *, size_t, unsigned int) = cuMemHostRegister_v2;
CUresult (*unregister_host)(void *) = cuMemHostUnregister;
CUresult (*device_pointer)(CUdeviceptr *, void *, unsigned int) = cuMemHostGetDevicePointer_v2;
CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream) = cuMemcpyAsync;
CUresult (*find)(const char *, void **, int, cuuint64_t,
                 CUdriverProcAddressQueryResult *) = cuGetProcAddress_v2;

/* The batched copy as of 12.8, which later headers still describe. */
typedef CUresult (*Batch)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *,
                          size_t *, size_t, size_t *, CUstream);
extern PFN_cuMemcpyBatchAsync_v12080 batch_of_12_8;
Batch check_batch(void) { return batch_of_12_8; }
