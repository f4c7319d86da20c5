// cuBLAS and cuBLASLt: each matrix product is written down as one kernel, with its sizes.

#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstring>
#include <string>

#include "device.hpp"

// What the handles of cuBLAS stand for.
struct cublasContext {
  cudaStream_t stream = nullptr;
  cublasMath_t math_mode = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
};

namespace stub {

namespace {

cublasStatus_t product(cublasHandle_t handle, const char* function, int m, int n, int k, int batch = 1) {
  launch(std::string("gemm ") + function + " m=" + std::to_string(m) + " n=" + std::to_string(n) + " k=" +
             std::to_string(k) + (batch > 1 ? " batch=" + std::to_string(batch) : ""),
         handle->stream);
  return CUBLAS_STATUS_SUCCESS;
}

// A matrix layout of cuBLASLt is an opaque array, in which the stub keeps the sizes.
struct Sizes {
  uint64_t num_rows, num_columns;
};

const Sizes& sizes_of(cublasLtMatrixLayout_t layout) { return *reinterpret_cast<const Sizes*>(layout); }

}  // namespace

}  // namespace stub

using namespace stub;

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  if (refuse_in_capture("cublasCreate")) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  handle->math_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = handle->math_mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  handle->pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = handle->pointer_mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) { return CUBLAS_STATUS_SUCCESS; }

// Solutions of triangular systems: they use workspaces of their own, and may not be captured.
cublasStatus_t cublasStrsm_v2(cublasHandle_t handle, cublasSideMode_t, cublasFillMode_t, cublasOperation_t,
                              cublasDiagType_t, int m, int n, const float*, const float*, int, float*, int) {
  return refuse_in_capture("cublasStrsm") ? CUBLAS_STATUS_NOT_SUPPORTED : product(handle, "Strsm", m, n, m);
}

cublasStatus_t cublasStrsmBatched(cublasHandle_t handle, cublasSideMode_t, cublasFillMode_t, cublasOperation_t,
                                  cublasDiagType_t, int m, int n, const float*, const float* const[], int,
                                  float* const[], int, int batch) {
  if (refuse_in_capture("cublasStrsmBatched")) return CUBLAS_STATUS_NOT_SUPPORTED;
  return product(handle, "StrsmBatched", m, n, m, batch);
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                            const void*, const void*, cudaDataType, int, const void*, cudaDataType, int, const void*,
                            void*, cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t) {
  return product(handle, "GemmEx", m, n, k);
}

cublasStatus_t cublasSgemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                             const float*, const void*, cudaDataType, int, const void*, cudaDataType, int,
                             const float*, void*, cudaDataType, int) {
  return product(handle, "SgemmEx", m, n, k);
}

cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                              const float*, const float*, int, const float*, int, const float*, float*, int) {
  return product(handle, "Sgemm", m, n, k);
}

cublasStatus_t cublasDgemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                              const double*, const double*, int, const double*, int, const double*, double*, int) {
  return product(handle, "Dgemm", m, n, k);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n,
                                          int k, const void*, const void*, cudaDataType, int, long long,
                                          const void*, cudaDataType, int, long long, const void*, void*,
                                          cudaDataType, int, long long, int batch, cublasComputeType_t,
                                          cublasGemmAlgo_t) {
  return product(handle, "GemmStridedBatchedEx", m, n, k, batch);
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n,
                                         int k, const float*, const float*, int, long long, const float*, int,
                                         long long, const float*, float*, int, long long, int batch) {
  return product(handle, "SgemmStridedBatched", m, n, k, batch);
}

cublasStatus_t cublasDgemmStridedBatched(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n,
                                         int k, const double*, const double*, int, long long, const double*, int,
                                         long long, const double*, double*, int, long long, int batch) {
  return product(handle, "DgemmStridedBatched", m, n, k, batch);
}

cublasStatus_t cublasSgemv_v2(cublasHandle_t handle, cublasOperation_t, int m, int n, const float*, const float*, int,
                              const float*, int, const float*, float*, int) {
  return product(handle, "Sgemv", m, 1, n);
}

// ---- cuBLASLt

size_t cublasLtGetVersion() { return 130100; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t, cudaDataType_t) {
  *description = new cublasLtMatmulDescOpaque_t{};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  delete description;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void*,
                                              size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t{};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType, uint64_t num_rows,
                                          uint64_t num_columns, int64_t) {
  *layout = new cublasLtMatrixLayoutOpaque_t{};
  *reinterpret_cast<Sizes*>(*layout) = {num_rows, num_columns};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t, const void*,
                                                size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t results[], int* num_results) {
  results[0] = {};
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *num_results = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                              cublasLtMatrixLayout_t a, const void*, cublasLtMatrixLayout_t b, const void*,
                              const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t,
                              const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  const auto shown = [](const Sizes& sizes) {
    return std::to_string(sizes.num_rows) + "x" + std::to_string(sizes.num_columns);
  };
  launch("gemm LtMatmul " + shown(sizes_of(a)) + " " + shown(sizes_of(b)), stream);
  return CUBLAS_STATUS_SUCCESS;
}
}
