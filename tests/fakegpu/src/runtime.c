/* The CUDA runtime: memory, streams and events are kept account of, copies copy, kernels do nothing. Device memory is
 * address space of the host, committed only where something is written. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include "runtime.h"

static __thread int current;
static __thread cudaError_t last_error;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

/* ---- devices ---- */

static cudaError_t start(void) {
  start_machine();
  if (uses_after_fork()) return fail(cudaErrorInitializationError);
  if (machine->driver_error) return fail((cudaError_t)machine->driver_error);
  if (machine->runtime_error) return fail((cudaError_t)machine->runtime_error);
  return num_devices ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t open_context(int device) {
  cudaError_t error = start();
  if (error) return error;
  if (device < 0 || device >= num_devices) return fail(cudaErrorInvalidDevice);
  lock_state();
  if (!devices[device]->has_context) {
    devices[device]->has_context = 1;
    take_memory(device, CONTEXT_BYTES);
  }
  unlock_state();
  return cudaSuccess;
}

int current_device(void) { return current; }

API cudaError_t cudaGetDeviceCount(int *count) {
  cudaError_t error = start();
  *count = error ? 0 : num_devices;
  return error;
}

API cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return start();
}

API cudaError_t cudaSetDevice(int device) {
  cudaError_t error = open_context(device);
  if (!error) current = device;
  return error;
}

int device_attribute(int attribute, int device) {
  const Card *card = devices[device]->card;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return card->shared_kib[0] << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return card->shared_kib[1] << 10;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return 2500000;
    case cudaDevAttrMemoryClockRate: return 10501000;
    case cudaDevAttrGlobalMemoryBusWidth: return 384;
    case cudaDevAttrMultiProcessorCount: return card->sms;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return card->threads_per_sm;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 24;
    case cudaDevAttrL2CacheSize: return card->l2_mib << 20;
    case cudaDevAttrComputeCapabilityMajor: return card->capability[0];
    case cudaDevAttrComputeCapabilityMinor: return card->capability[1];
    case cudaDevAttrIntegrated: return card->integrated;
    case cudaDevAttrPageableMemoryAccess: case cudaDevAttrPageableMemoryAccessUsesHostPageTables: return card->host_page_tables;
    case cudaDevAttrPciBusId: return devices[device]->slot + 1;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrConcurrentKernels:
    case VIRTUAL_MEMORY_SUPPORTED: return 1;
    default: return 0;
  }
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  cudaError_t error = start();
  if (!error) *value = device_attribute(attribute, device);
  return error;
}

#undef cudaGetDeviceProperties
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  cudaError_t error = start();
  if (error) return error;
  if (device < 0 || device >= num_devices) return fail(cudaErrorInvalidDevice);
  const Card *card = devices[device]->card;
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "%s", card->name);
  write_uuid(devices[device], (unsigned char *)&found->uuid);
  found->totalGlobalMem = card_bytes(card);
#define SAME(field, attribute) found->field = device_attribute(cudaDevAttr##attribute, device);
  SAME(major, ComputeCapabilityMajor) SAME(minor, ComputeCapabilityMinor) SAME(multiProcessorCount, MultiProcessorCount)
  SAME(l2CacheSize, L2CacheSize) SAME(sharedMemPerBlock, MaxSharedMemoryPerBlock) SAME(warpSize, WarpSize)
  SAME(sharedMemPerBlockOptin, MaxSharedMemoryPerBlockOptin) SAME(regsPerBlock, MaxRegistersPerBlock)
  SAME(sharedMemPerMultiprocessor, MaxSharedMemoryPerMultiprocessor) SAME(maxThreadsPerBlock, MaxThreadsPerBlock)
  SAME(regsPerMultiprocessor, MaxRegistersPerMultiprocessor) SAME(integrated, Integrated) SAME(pciBusID, PciBusId)
  SAME(maxThreadsPerMultiProcessor, MaxThreadsPerMultiProcessor) SAME(unifiedAddressing, UnifiedAddressing)
  SAME(maxBlocksPerMultiProcessor, MaxBlocksPerMultiprocessor) SAME(memoryBusWidth, GlobalMemoryBusWidth)
  SAME(pageableMemoryAccess, PageableMemoryAccess) SAME(concurrentKernels, ConcurrentKernels)
  SAME(pageableMemoryAccessUsesHostPageTables, PageableMemoryAccessUsesHostPageTables)
  for (int axis = 0; axis < 3; axis++) {
    found->maxThreadsDim[axis] = device_attribute(cudaDevAttrMaxBlockDimX + axis, device);
    found->maxGridSize[axis] = device_attribute(cudaDevAttrMaxGridDimX + axis, device);
  }
  return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int *version) {
  start_machine();
  *version = machine->cuda_driver ? machine->cuda_driver : CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device) {
  snprintf(text, room, "0000:%02X:00.0", devices[device]->slot + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  cudaError_t error = open_context(current);
  if (error) return error;
  *total = card_bytes(devices[current]->card);
  *unused = *total - devices[current]->used;
  return cudaSuccess;
}

API cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

API cudaError_t cudaPeekAtLastError(void) { return last_error; }

API const char *cudaGetErrorString(cudaError_t error) {
  static __thread char text[64];
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorSystemDriverMismatch: return "system has unsupported display driver / cuda driver combination";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    default: snprintf(text, sizeof text, "error %d of the stand-in", error); return text;
  }
}

API const char *cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError"; }

/* ---- memory ---- */

#define WHOLE(bytes, page) (((bytes) + (page) - 1) / (page) * (page))

static void *map(uint64_t bytes) {
  void *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? 0 : at;
}

API cudaError_t cudaMalloc(void **address, size_t bytes) {
  cudaError_t error = open_context(current);
  if (error) return error;
  uint64_t whole = WHOLE(bytes, 2 * MIB);
  lock_state();
  int fits = take_memory(current, whole);
  if (fits) {
    *address = map(whole);
    add_block((uint64_t)*address, whole, DEVICE, current);
  }
  unlock_state();
  return fits ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

static cudaError_t forget(void *address, cudaError_t otherwise, int unmaps) {
  if (!address) return cudaSuccess;
  lock_state();
  Block *block = block_at((uint64_t)address);
  int is_known = block && block->begin == (uint64_t)address;
  if (is_known) {
    if (block->place == DEVICE) devices[block->device]->used -= block->size;
    if (unmaps) munmap(address, block->size);
    remove_block(block);
  }
  unlock_state();
  return is_known ? cudaSuccess : fail(otherwise);
}

API cudaError_t cudaFree(void *address) {
  cudaError_t error = open_context(current);
  return error ? error : forget(address, cudaErrorInvalidValue, 1);
}

API cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
  cudaError_t error = open_context(current);
  if (error) return error;
  lock_state();
  *address = map(WHOLE(bytes, 4096));
  add_block((uint64_t)*address, WHOLE(bytes, 4096), HOST, current);
  unlock_state();
  return cudaSuccess;
}

API cudaError_t cudaFreeHost(void *address) { return forget(address, cudaErrorInvalidValue, 1); }

API cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
  cudaError_t error = open_context(current);
  if (error) return error;
  lock_state();
  int is_taken = block_at((uint64_t)address) != 0;
  if (!is_taken) add_block((uint64_t)address, bytes, HOST, current);
  unlock_state();
  return is_taken ? fail(cudaErrorHostMemoryAlreadyRegistered) : cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *address) { return forget(address, cudaErrorHostMemoryNotRegistered, 0); }

API cudaError_t cudaHostGetDevicePointer(void **found, void *address, unsigned flags) {
  *found = address;
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
  memset(found, 0, sizeof *found);
  lock_state();
  Block *block = block_at((uint64_t)address);
  found->type = !block ? cudaMemoryTypeUnregistered : block->place == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  found->device = block ? block->device : cudaInvalidDeviceId;
  if (block) found->devicePointer = (void *)address;
  if (block && block->place == HOST) found->hostPointer = (void *)address;
  unlock_state();
  return cudaSuccess;
}

/* FAKEGPU_COPIES=0: no weights are written to a device, so that models of full size need no memory; masks and indices,
 * which decide shapes, are. */
static int writes_to_device(size_t bytes) {
  const char *asked = getenv("FAKEGPU_COPIES");
  return bytes <= 1 << 20 || !asked || *asked != '0';
}

static cudaError_t copy(void *to, const void *from, size_t bytes) {
  cudaError_t error = open_context(current);
  if (error || !bytes) return error;
  lock_state();
  Block *target = block_at((uint64_t)to), *source = block_at((uint64_t)from);
  int to_device = target && target->place == DEVICE, from_device = source && source->place == DEVICE;
  int is_illegal = (to_device && !is_mapped((uint64_t)to, bytes)) || (from_device && !is_mapped((uint64_t)from, bytes));
  if (to_device && from_device) counts.bytes_on_device += bytes;
  else if (to_device) {
    counts.copies_to_device++;
    counts.bytes_to_device += bytes;
    if (!source) counts.pageable_bytes_to_device += bytes;
  } else {
    counts.copies_from_device++;
    counts.bytes_from_device += bytes;
  }
  unlock_state();
  if (is_illegal) return fail(cudaErrorIllegalAddress);
  if (!to_device || writes_to_device(bytes)) memmove(to, from, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  counts.host_waits++;
  return copy(to, from, bytes);
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  cudaError_t error = check_stream(stream);
  return error ? error : copy(to, from, bytes);
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int other, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes);
}

API cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
  lock_state();
  int is_legal = is_mapped((uint64_t)address, bytes);
  unlock_state();
  if (!is_legal) return fail(cudaErrorIllegalAddress);
  if (writes_to_device(bytes)) memset(address, value, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemset(void *address, int value, size_t bytes) { return cudaMemsetAsync(address, value, bytes, 0); }

API cudaError_t cudaGetSymbolAddress(void **found, const void *symbol) {
  static char area[4096];
  *found = area;
  return cudaSuccess;
}

/* ---- streams and events ---- */

typedef struct { int device; } Stream;
typedef struct {
  int device;
  struct timespec recorded;
} Event;

cudaError_t check_stream(cudaStream_t stream) {
  if (is_own_stream(stream) && ((Stream *)stream)->device != current) {
    fprintf(stderr, "fakegpu: device %d is current, the stream belongs to %d\n", current, ((Stream *)stream)->device);
    return fail(cudaErrorInvalidResourceHandle);
  }
  return cudaSuccess;
}

/* The default streams are small numbers. */
int is_own_stream(cudaStream_t stream) { return (uintptr_t)stream > 0xffff; }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  cudaError_t error = open_context(current);
  if (error) return error;
  Stream *made = malloc(sizeof *made);
  made->device = current;
  *stream = (cudaStream_t)made;
  counts.streams++;
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

static cudaError_t wait(void) {
  counts.host_waits++;
  return open_context(current);
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait(); }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait(); }
API cudaError_t cudaDeviceSynchronize(void) { return wait(); }

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  counts.event_waits++;
  return cudaSuccess;
}

#undef cudaEventCreate
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  cudaError_t error = open_context(current);
  if (error) return error;
  Event *made = calloc(1, sizeof *made);
  made->device = current;
  *event = (cudaEvent_t)made;
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  int device = is_own_stream(stream) ? ((Stream *)stream)->device : current;
  if (((Event *)event)->device != device) return fail(cudaErrorInvalidResourceHandle);
  clock_gettime(CLOCK_MONOTONIC, &((Event *)event)->recorded);
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
API cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }

API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  struct timespec begin = ((Event *)from)->recorded, end = ((Event *)to)->recorded;
  *milliseconds = (end.tv_sec - begin.tv_sec) * 1e3f + (end.tv_nsec - begin.tv_nsec) / 1e6f;
  return cudaSuccess;
}

#undef cudaStreamGetCaptureInfo
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  function(data);
  return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

/* ---- kernels: counted by name ---- */

#define TABLE_SIZE (1u << 19)
static Kernel **table;

static unsigned place_of(const void *host) { return (unsigned)(((uint64_t)host >> 4) * 2654435761u) & (TABLE_SIZE - 1); }

static Kernel *kernel_of(const void *host) {
  for (unsigned at = place_of(host); table && table[at]; at = (at + 1) & (TABLE_SIZE - 1))
    if (table[at]->host == host) return table[at];
  return 0;
}

void register_kernel(Kernel *kernel) {
  if (!table) table = calloc(TABLE_SIZE, sizeof *table);
  unsigned at = place_of(kernel->host);
  while (table[at]) at = (at + 1) & (TABLE_SIZE - 1);
  table[at] = kernel;
}

API void __cudaRegisterFunction(void **binary, const char *host, char *symbol, const char *name, int limit, void *a, void *b, void *c, void *d, int *e) {
  Kernel *kernel = calloc(1, sizeof *kernel);
  kernel->host = host;
  kernel->name = name;
  register_kernel(kernel);
}

/* Writes a line for each kernel that was launched: how often, and its name. */
API void fakegpu_write_kernels(const char *path) {
  FILE *file = fopen(path, "w");
  for (unsigned at = 0; file && table && at < TABLE_SIZE; at++)
    if (table[at] && table[at]->launches) fprintf(file, "%lu %s\n", table[at]->launches, table[at]->name);
  if (file) fclose(file);
}

API void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[2];
  return handle;
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } call;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  call.grid = grid, call.block = block, call.shared = shared, call.stream = stream;
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = call.grid, *block = call.block, *shared = call.shared, *(void **)stream = call.stream;
  return cudaSuccess;
}

cudaError_t launch(const void *host, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  cudaError_t error = open_context(current);
  if (!error) error = check_stream(stream);
  if (error) return error;
  Kernel *kernel = kernel_of(host);
  counts.launches++;
  if (kernel) kernel->launches++;
  int is_empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  if (is_empty || grid.y > 65535 || grid.z > 65535 || block.x * block.y * block.z > 1024 ||
      shared > (size_t)devices[current]->card->shared_kib[0] << 10) {
    fprintf(stderr, "fakegpu: invalid launch of %s: grid %u %u %u, block %u %u %u, shared %zu\n",
            kernel ? kernel->name : "?", grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
    return fail(cudaErrorInvalidConfiguration);
  }
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return launch(host, grid, block, shared, stream);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, shared, stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *host, void **arguments) {
  return launch(host, how->gridDim, how->blockDim, how->dynamicSmemBytes, how->stream);
}

API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
  *kernel = (cudaKernel_t)host;
  return cudaSuccess;
}

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *host) {
  static const int built_for[] = {75, 80, 86, 90, 100, 120}; /* torch.cuda.get_arch_list() */
  const int *own = devices[current]->card->capability;
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 64;
  found->maxDynamicSharedSizeBytes = 48 << 10;
  for (size_t i = 0; i < sizeof built_for / sizeof *built_for; i++)
    if (built_for[i] <= own[0] * 10 + own[1]) found->binaryVersion = found->ptxVersion = built_for[i];
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *host, int block, size_t shared, unsigned flags) {
  *count = 2;
  return cudaSuccess;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *result) {
  *found = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *found ? cudaSuccess : cudaErrorSymbolNotFound;
}
