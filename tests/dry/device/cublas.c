/* cuBLAS and cuBLASLt: products are checked and logged, not computed. */
#include "dry.h"
#include <stdlib.h>
#include <string.h>
#define __CUDA_FP16_H__ /* the headers of half types need more of the toolkit */
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
typedef unsigned short __half, __nv_bfloat16;
#include <cublasLt.h>
#include <cublas_v2.h>

typedef struct {
    cudaStream_t stream;
    cublasMath_t math;
    cublasPointerMode_t mode;
} Handle;

static Kernel gemm = {"cublas gemm", 0, 0, -1};
static Kernel matmul = {"cublasLt matmul", 0, 0, -1};
static Kernel other = {"cublas other", 0, 0, -1};

/* --- handles -----------------------------------------------------------------------------------*/

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    COUNT(__func__);
    *handle = calloc(1, sizeof(Handle));
    return OK;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    free(handle);
    return OK;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    ((Handle *)handle)->stream = stream;
    return OK;
}
cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream) {
    *stream = ((Handle *)handle)->stream;
    return OK;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t bytes) {
    return dry_is_live(workspace, bytes) ? OK : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    ((Handle *)handle)->math = mode;
    return OK;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    *mode = ((Handle *)handle)->math;
    return OK;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
    ((Handle *)handle)->mode = mode;
    return OK;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
    *mode = ((Handle *)handle)->mode;
    return OK;
}
cublasStatus_t cublasSetSmCountTarget(cublasHandle_t handle, int count) { return OK; }
const char *cublasGetStatusString(cublasStatus_t status) { return "a cuBLAS status of dry"; }

/* --- products ----------------------------------------------------------------------------------*/

static size_t element_bytes(cudaDataType type) {
    switch (type) {
        case CUDA_R_16F:
        case CUDA_R_16BF:
            return 2;
        case CUDA_R_32F:
        case CUDA_R_32I:
            return 4;
        case CUDA_R_64F:
        case CUDA_C_32F:
            return 8;
        case CUDA_C_64F:
            return 16;
        default:
            return 1;
    }
}

/* One operand: `batch` matrices, `stride` elements apart, of columns `ld` elements apart. */
typedef struct {
    const void *pointer;
    cudaDataType type;
    long rows, columns, ld, batch, stride;
} Operand;

static Access access_of(char use, Operand operand) {
    long matrices = operand.stride > 0 ? (operand.batch - 1) * operand.stride : 0;
    long elements = matrices + (operand.columns - 1) * operand.ld + operand.rows;
    return (Access){use, operand.pointer, elements * element_bytes(operand.type)};
}

/* Launches a product unless an operand leaves live memory. */
static cublasStatus_t multiply(Kernel *kernel, void *stream, Operand a, Operand b, Operand c) {
    if (!c.rows || !c.columns || !c.batch) return OK;
    Access accesses[3] = {access_of('w', c)};
    int count = 1;
    if (a.rows && a.columns) accesses[count++] = access_of('r', a);
    if (b.rows && b.columns) accesses[count++] = access_of('r', b);
    int fits = a.ld >= a.rows && b.ld >= b.rows && c.ld >= c.rows;
    for (int i = 0; i < count; i++)
        fits = fits && accesses[i].pointer && dry_is_live(accesses[i].pointer, accesses[i].bytes);
    if (!fits) {
        dry_complain("a product of %ld x %ld: an operand leaves live memory", c.rows, c.columns);
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    return dry_launch_library(kernel, stream, accesses, count);
}

/* C[m, n] of op(A)[m, k] and op(B)[k, n], column by column. */
typedef struct {
    int transpose_a, transpose_b;
    long m, n, k, batch;
} Shape;

static cublasStatus_t product(cublasHandle_t handle, Shape s, Operand a, Operand b, Operand c) {
    if (s.m < 0 || s.n < 0 || s.k < 0) return CUBLAS_STATUS_INVALID_VALUE;
    a.rows = s.transpose_a ? s.k : s.m, a.columns = s.transpose_a ? s.m : s.k, a.batch = s.batch;
    b.rows = s.transpose_b ? s.n : s.k, b.columns = s.transpose_b ? s.k : s.n, b.batch = s.batch;
    c.rows = s.m, c.columns = s.n, c.batch = s.batch;
    return multiply(&gemm, ((Handle *)handle)->stream, a, b, c);
}

#define OPERAND(pointer, type, ld, stride) ((Operand){pointer, type, 0, 0, ld, 1, stride})

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb,
                            int m, int n, int k, const void *alpha, const void *a,
                            cudaDataType a_type, int lda, const void *b, cudaDataType b_type,
                            int ldb, const void *beta, void *c, cudaDataType c_type, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    COUNT(__func__);
    return product(handle, (Shape){ta, tb, m, n, k, 1}, OPERAND(a, a_type, lda, 0),
                   OPERAND(b, b_type, ldb, 0), OPERAND(c, c_type, ldc, 0));
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t ta,
                                          cublasOperation_t tb, int m, int n, int k,
                                          const void *alpha, const void *a, cudaDataType a_type,
                                          int lda, long long stride_a, const void *b,
                                          cudaDataType b_type, int ldb, long long stride_b,
                                          const void *beta, void *c, cudaDataType c_type, int ldc,
                                          long long stride_c, int batch,
                                          cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    COUNT(__func__);
    return product(handle, (Shape){ta, tb, m, n, k, batch}, OPERAND(a, a_type, lda, stride_a),
                   OPERAND(b, b_type, ldb, stride_b), OPERAND(c, c_type, ldc, stride_c));
}

/* The forms of one type: S is float, D is double. */
#define GEMM(letter, real, type)                                                                 \
    cublasStatus_t cublas##letter##gemm_v2(                                                      \
        cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,  \
        const real *alpha, const real *a, int lda, const real *b, int ldb, const real *beta,     \
        real *c, int ldc) {                                                                      \
        COUNT(__func__);                                                                         \
        return product(handle, (Shape){ta, tb, m, n, k, 1}, OPERAND(a, type, lda, 0),            \
                       OPERAND(b, type, ldb, 0), OPERAND(c, type, ldc, 0));                      \
    }                                                                                            \
    cublasStatus_t cublas##letter##gemmStridedBatched(                                           \
        cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,  \
        const real *alpha, const real *a, int lda, long long stride_a, const real *b, int ldb,   \
        long long stride_b, const real *beta, real *c, int ldc, long long stride_c, int batch) { \
        COUNT(__func__);                                                                         \
        return product(handle, (Shape){ta, tb, m, n, k, batch}, OPERAND(a, type, lda, stride_a), \
                       OPERAND(b, type, ldb, stride_b), OPERAND(c, type, ldc, stride_c));        \
    }
GEMM(S, float, CUDA_R_32F)
GEMM(D, double, CUDA_R_64F)

/* Every other function of cuBLAS (missing.py) counts as one launch on the handle's stream. */
int dry_cublas_other(void *handle, const char *name) {
    dry_log("G other %s\n", name);
    return dry_launch_library(&other, ((Handle *)handle)->stream, NULL, 0);
}

/* --- cuBLASLt ----------------------------------------------------------------------------------*/

typedef struct { /* in the caller's memory, which is opaque and large enough */
    int type;
    uint64_t rows, columns;
    int64_t ld, stride;
    int batch;
} Layout;

size_t cublasLtGetVersion(void) { return 130100; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = calloc(1, sizeof(Handle));
    return OK;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    free(handle);
    return OK;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *description,
                                        cublasComputeType_t compute, cudaDataType_t scale) {
    *description = calloc(1, sizeof(cublasLtMatmulDescOpaque_t));
    return OK;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
    free(description);
    return OK;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
    return OK;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t ld) {
    Layout *made = calloc(1, sizeof(cublasLtMatrixLayoutOpaque_t));
    *made = (Layout){type, rows, columns, ld, 0, 1};
    *layout = (cublasLtMatrixLayout_t)made;
    return OK;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    free(layout);
    return OK;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes) {
    Layout *own = (Layout *)layout;
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) memcpy(&own->batch, value, 4);
    if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET) memcpy(&own->stride, value, 8);
    return OK;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = calloc(1, sizeof **preference);
    return OK;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    free(preference);
    return OK;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes) {
    return OK;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle,
                                              cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int asked,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *found) {
    COUNT(__func__);
    memset(results, 0, sizeof *results);
    results->wavesCount = 1;
    *found = 1;
    return OK;
}

static Operand operand_of(const void *pointer, cublasLtMatrixLayout_t layout) {
    const Layout *own = (const Layout *)layout;
    return (Operand){pointer, own->type, own->rows, own->columns, own->ld, own->batch, own->stride};
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                              const void *alpha, const void *a, cublasLtMatrixLayout_t a_layout,
                              const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,
                              const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    COUNT(__func__);
    if (workspace_bytes && !dry_is_live(workspace, workspace_bytes))
        return CUBLAS_STATUS_INVALID_VALUE;
    return multiply(&matmul, stream, operand_of(a, a_layout), operand_of(b, b_layout),
                    operand_of(d, d_layout));
}
