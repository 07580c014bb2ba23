/* The CUDA driver API, as torch, Triton and autotune's probe use it. */
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "runtime.h"

/* Numbers of the runtime's errors and the driver's agree where both exist. */
static CUresult as_driver(cudaError_t error) {
  if (error == cudaErrorInvalidConfiguration) return CUDA_ERROR_INVALID_VALUE;
  return (CUresult)error;
}

API CUresult cuInit(unsigned flags) {
  start_machine();
  if (machine->driver_error) return machine->driver_error;
  return num_devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

API CUresult cuDriverGetVersion(int *version) { return as_driver(cudaDriverGetVersion(version)); }

API CUresult cuDeviceGetCount(int *count) {
  *count = num_devices;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int index) {
  if (index < 0 || index >= num_devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = index;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = device_attribute(attribute, device);
  return CUDA_SUCCESS;
}

#undef cuDeviceGetUuid
API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  write_uuid(devices[device], (unsigned char *)uuid);
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
  snprintf(name, room, "%s", devices[device]->card->name);
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = cudaGetErrorString((cudaError_t)error);
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char **text) {
  *text = cudaGetErrorName((cudaError_t)error);
  return CUDA_SUCCESS;
}

/* ---- contexts: a number for each device ---- */

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(0x1000 + device); }

API CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = devices[current_device()]->has_context ? context_of(current_device()) : 0;
  return CUDA_SUCCESS;
}

API CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) { return cuCtxGetCurrent(context); }

API CUresult cuCtxGetDevice(CUdevice *device) {
  *device = current_device();
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = context_of(device);
  return as_driver(open_context(device));
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = devices[device]->has_context;
  return CUDA_SUCCESS;
}

/* ---- generated kernels ---- */

API CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = malloc(1);
  return CUDA_SUCCESS;
}

API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
  return cuModuleLoadData(module, image);
}

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  Kernel *kernel = calloc(1, sizeof *kernel);
  kernel->host = kernel;
  kernel->name = strdup(name);
  register_kernel(kernel);
  *function = (CUfunction)kernel;
  return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                            unsigned block_z, unsigned shared, CUstream stream, void **arguments, void **more) {
  counts.generated_launches++;
  return as_driver(launch(function, (dim3){grid_x, grid_y, grid_z}, (dim3){block_x, block_y, block_z}, shared, stream));
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **arguments, void **more) {
  return cuLaunchKernel(function, how->gridDimX, how->gridDimY, how->gridDimZ, how->blockDimX, how->blockDimY, how->blockDimZ,
                        how->sharedMemBytes, how->hStream, arguments, more);
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int block, size_t shared) {
  *count = 2;
  return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *how) {
  *count = 2;
  return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  *(uint64_t *)value = address;
  return CUDA_SUCCESS;
}

/* ---- segments that grow: addresses are reserved, and memory is mapped there ---- */

typedef struct {
  size_t size;
  int device;
} Physical;

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags flags) {
  *bytes = 2 * MIB;
  return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
  void *at = mmap(0, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = (CUdeviceptr)at;
  return at == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  munmap((void *)address, bytes);
  return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags) {
  int device = properties->location.id;
  cudaError_t error = open_context(device);
  if (error) return as_driver(error);
  lock_state();
  int fits = take_memory(device, bytes);
  unlock_state();
  if (!fits) return CUDA_ERROR_OUT_OF_MEMORY;
  Physical *made = malloc(sizeof *made);
  *made = (Physical){bytes, device};
  *handle = (CUmemGenericAllocationHandle)made;
  return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Physical *freed = (Physical *)handle;
  lock_state();
  devices[freed->device]->used -= freed->size;
  unlock_state();
  free(freed);
  return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  mprotect((void *)address, bytes, PROT_READ | PROT_WRITE);
  lock_state();
  add_block(address, bytes, DEVICE, ((Physical *)handle)->device);
  unlock_state();
  return CUDA_SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  madvise((void *)address, bytes, MADV_DONTNEED);
  mprotect((void *)address, bytes, PROT_NONE);
  lock_state();
  for (CUdeviceptr at = address; at < address + bytes;) {
    Block *block = block_at(at);
    if (!block) break;
    at = block->begin + block->size;
    remove_block(block);
  }
  unlock_state();
  return CUDA_SUCCESS;
}
