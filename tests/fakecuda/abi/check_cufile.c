/* What cufile.py passes to libcufile, beside NVIDIA's header. Only compiled, never run. */

#include <stddef.h>
#include <stdint.h>
#include <cufile.h>

#define SAME(what) _Static_assert(what, #what)

SAME(sizeof(CUfileError_t) == 8);
SAME(offsetof(CUfileError_t, err) == 0);
SAME(offsetof(CUfileError_t, cu_err) == 4);
SAME(sizeof(CUfileDescr_t) == 24);
SAME(offsetof(CUfileDescr_t, type) == 0);
SAME(offsetof(CUfileDescr_t, handle.fd) == 8);
SAME(offsetof(CUfileDescr_t, fs_ops) == 16);
SAME(sizeof(CUfileDrvProps_t) <= 288);
SAME(offsetof(CUfileDrvProps_t, nvfs.dstatusflags) == 24);
SAME(offsetof(CUfileDrvProps_t, nvfs.dcontrolflags) == 28);
SAME(CU_FILE_HANDLE_TYPE_OPAQUE_FD == 1);
SAME(CUFILEOP_BASE_ERR == 5000);
SAME(CU_FILE_DRIVER_ALREADY_OPEN == 5026);
SAME(CU_FILE_GPU_MEMORY_PINNING_FAILED == 5036);
SAME(sizeof(off_t) == 8);
SAME(sizeof(ssize_t) == 8);

CUfileError_t (*open_driver)(void) = cuFileDriverOpen;
CUfileError_t (*ask_properties)(CUfileDrvProps_t *) = cuFileDriverGetProperties;
CUfileError_t (*register_file)(CUfileHandle_t *, CUfileDescr_t *) = cuFileHandleRegister;
void (*deregister_file)(CUfileHandle_t) = cuFileHandleDeregister;
CUfileError_t (*register_memory)(const void *, size_t, int) = cuFileBufRegister;
CUfileError_t (*deregister_memory)(const void *) = cuFileBufDeregister;
ssize_t (*read_file)(CUfileHandle_t, void *, size_t, off_t, off_t) = cuFileRead;
ssize_t (*write_file)(CUfileHandle_t, const void *, size_t, off_t, off_t) = cuFileWrite;
