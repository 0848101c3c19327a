/* What hip_driver.py passes to HIP, beside AMD's header. Only compiled, never run. */

#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#define SAME(what) _Static_assert(what, #what)

SAME(hipMemcpyDefault == 4);
SAME(hipStreamNonBlocking == 1);
SAME(hipStreamCaptureModeRelaxed == 2);
SAME((hipHostRegisterPortable | hipHostRegisterMapped) == 3);
SAME(sizeof(hipDevice_t) == sizeof(int));
SAME(sizeof(hipError_t) == sizeof(int));

/* The functions under the names by which they are loaded. */
const char *(*error_name)(hipError_t) = hipGetErrorName;
hipError_t (*last_error)(void) = hipGetLastError;
hipError_t (*set_device)(int) = hipSetDevice;
hipError_t (*get_device)(hipDevice_t *, int) = hipDeviceGet;
hipError_t (*pci_address)(char *, int, int) = hipDeviceGetPCIBusId;
hipError_t (*priorities)(int *, int *) = hipDeviceGetStreamPriorityRange;
hipError_t (*make_stream)(hipStream_t *, unsigned int, int) = hipStreamCreateWithPriority;
hipError_t (*destroy_stream)(hipStream_t) = hipStreamDestroy;
hipError_t (*capture_mode)(hipStreamCaptureMode *) = hipThreadExchangeStreamCaptureMode;
hipError_t (*register_host)(void *, size_t, unsigned int) = hipHostRegister;
hipError_t (*unregister_host)(void *) = hipHostUnregister;
hipError_t (*device_pointer)(void **, void *, unsigned int) = hipHostGetDevicePointer;
hipError_t (*copy)(void *, const void *, size_t, hipMemcpyKind, hipStream_t) = hipMemcpyAsync;

#if HIP_VERSION >= 70100000
SAME(sizeof(hipMemLocation) == 8);
SAME(sizeof(hipMemcpyAttributes) == 24);
SAME(offsetof(hipMemcpyAttributes, srcAccessOrder) == 0);
SAME(offsetof(hipMemcpyAttributes, srcLocHint) == 4);
SAME(offsetof(hipMemcpyAttributes, dstLocHint) == 12);
SAME(offsetof(hipMemcpyAttributes, flags) == 20);
SAME(hipMemcpySrcAccessOrderStream == 1);
SAME(hipMemcpySrcAccessOrderAny == 3);
SAME(hipMemcpyFlagPreferOverlapWithCompute == 1);
hipError_t (*batch)(void **, void **, size_t *, size_t, hipMemcpyAttributes *, size_t *, size_t,
                    size_t *, hipStream_t) = hipMemcpyBatchAsync;
#endif
