/* What the driver library uses of the runtime. */
#pragma once
#include <cuda_runtime_api.h>
#include "state.h"

#define CONTEXT_BYTES (430 * MIB)
#define VIRTUAL_MEMORY_SUPPORTED 102 /* an attribute that the runtime has no name for */

typedef struct {
  const void *host; /* the function that stands for it */
  const char *name;
  uint64_t launches;
} Kernel;

void register_kernel(Kernel *);
cudaError_t open_context(int device);
int current_device(void);
int device_attribute(int attribute, int device);
int is_own_stream(cudaStream_t);
cudaError_t check_stream(cudaStream_t); /* a stream is used while its device is current */
cudaError_t launch(const void *host, dim3 grid, dim3 block, size_t shared, cudaStream_t);
