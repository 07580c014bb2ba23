/* cuBLAS and cuDNN: handles, versions and the questions that torch reads answers of; products and convolutions are
 * counted and compute nothing. */
#include <stdlib.h>
#include <string.h>
#include "state.h"

#define MAKES(name) \
  API int name(void **handle) { \
    *handle = calloc(1, 4096); \
    return 0; \
  }
#define COUNTED(name, count) \
  API int name() { \
    counts.count++; \
    return 0; \
  }

MAKES(cublasCreate_v2)
MAKES(cublasLtCreate)
MAKES(cublasLtMatmulDescCreate)
MAKES(cublasLtMatmulPreferenceCreate)
MAKES(cublasLtMatrixLayoutCreate)
COUNTED(cublasGemmEx, products)
COUNTED(cublasGemmStridedBatchedEx, products)
COUNTED(cublasSgemm_v2, products)
COUNTED(cublasSgemmStridedBatched, products)
COUNTED(cublasLtMatmul, products)

API int cublasGetMathMode(void *handle, int *mode) {
  *mode = 0;
  return 0;
}

API int cublasGetPointerMode_v2(void *handle, int *mode) {
  *mode = 0;
  return 0;
}

API size_t cublasLtGetVersion(void) { return 130101; }

API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted,
                                       void *found, int *count) {
  memset(found, 0, 96); /* one cublasLtMatmulHeuristicResult_t: no workspace, CUBLAS_STATUS_SUCCESS */
  *count = 1;
  return 0;
}

/* cuDNN: each descriptor has one part of every kind; its numbers, such as bytes of workspace, are 0. */
MAKES(cudnnCreate)
COUNTED(cudnnBackendExecute, executions)

API int cudnnBackendCreateDescriptor(int kind, void **descriptor) {
  *descriptor = calloc(1, 64);
  return 0;
}

#define TYPE_INT64 3
#define TYPE_INT32 23

API int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t wanted, int64_t *count, void *found) {
  if (count) *count = 1;
  if (found && type == TYPE_INT64) *(int64_t *)found = 0;
  if (found && type == TYPE_INT32) *(int32_t *)found = 0;
  return 0;
}
