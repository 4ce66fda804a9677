// The C ABI of libhf_flash.so: pointers, strides and a stream; no torch, no C++.
// hf_flash/library.py mirrors HfFlashParams field by field and compares its size at import.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Element (batch, row, head, column) lies at data + batch*batch_stride + row*row_stride + head*head_stride + column.
// Strides count elements; rows start on 16 bytes. Packed (varlen) tensors have one batch: batch_stride is 0.
// data == NULL: the tensor is not given, or, for a gradient, not wanted.
typedef struct {
  void *data;
  int64_t batch_stride, row_stride, head_stride;
} HfFlashTensor;

enum { HF_FLASH_BF16 = 0, HF_FLASH_FP16 = 1 };                                   // dtype
enum { HF_FLASH_AUTO = 0, HF_FLASH_PORTABLE = 1, HF_FLASH_HOPPER = 2 };          // kernel
enum { HF_FLASH_FORWARD = 0, HF_FLASH_BACKWARD = 1, HF_FLASH_DECODE = 2 };       // pass

// Errors below 1000 are cudaError_t.
enum { HF_FLASH_UNSUPPORTED = 1001, HF_FLASH_NO_KERNEL_IMAGE = 1002, HF_FLASH_NO_TENSOR_MAP = 1003,
       HF_FLASH_WORKSPACE_TOO_SMALL = 1004 };

typedef struct {
  // (batch, seq, heads, head_dim), or (total, heads, head_dim) with cu_seqlens. k and v have kv_heads heads.
  // Paged caches: k and v are (pages, page_size, kv_heads, head_dim), batch_stride is one page.
  HfFlashTensor q, k, v, out;
  HfFlashTensor grad_out, grad_q, grad_k, grad_v;
  HfFlashTensor new_k, new_v;          // decode: (batch, seq_new, kv_heads, head_dim), appended to the cache at used_k

  // Row sums, fp32, natural log: (batch, heads, seq_q), or (heads, total_q) with cu_seqlens. Rows have stride 1.
  float *lse;
  const float *grad_lse;               // laid out like lse, or NULL
  int64_t lse_batch_stride, lse_head_stride;

  const int32_t *cu_seqlens_q;         // (batch + 1), or NULL: dense
  const int32_t *cu_seqlens_k;
  const int32_t *used_k;               // (batch): keys in use, or NULL: all
  const int32_t *leftpad_k;            // (batch): keys to skip at the start, or NULL
  const int32_t *block_table;          // (batch, pages per sequence), or NULL: contiguous
  const int32_t *cache_batch_idx;      // (batch): row of the cache that serves a query row, or NULL
  int64_t block_table_stride;
  const void *rotary_cos, *rotary_sin; // (positions, rotary_dim / 2), dtype of q
  const float *alibi_slopes;           // (heads) or (batch, heads)
  int64_t alibi_batch_stride;          // 0: shared by the batch
  const int64_t *rng_state;            // device memory: {seed, offset} of the dropout mask

  void *workspace;                     // hf_flash_workspace_bytes(pass, params) bytes on 256; contents do not matter
  int64_t workspace_bytes;

  int64_t total_q, total_k;            // rows of the packed tensors (rows past cu_seqlens[batch] are zeroed); dense: 0
  int32_t dtype, kernel;
  int32_t batch, heads, kv_heads, head_dim;
  int32_t seq_q, seq_k, seq_new;       // lengths; with cu_seqlens the longest; with a cache its capacity
  int32_t page_size;
  int32_t window_left, window_right;   // keys visible before and after the diagonal, -1: no limit; causal: right = 0
  int32_t rotary_dim, rotary_interleaved;
  int32_t num_splits;                  // decode: 0 chooses
  int32_t deterministic;
  float scale, softcap, dropout_p;     // softcap 0: none
  int32_t rotary_per_token;            // whether cos and sin are (batch, seq_new, rotary_dim / 2), of the new tokens
} HfFlashParams;

int64_t hf_flash_params_size(void);
int64_t hf_flash_workspace_bytes(int pass, const HfFlashParams *params);
int hf_flash_forward(const HfFlashParams *params, void *stream);
int hf_flash_backward(const HfFlashParams *params, void *stream);
int hf_flash_decode(const HfFlashParams *params, void *stream);   // a few queries against a cache, appending first
const char *hf_flash_kernel_name(int pass, const HfFlashParams *params);   // what would run, as "hopper/128"
const char *hf_flash_error(int code);
const char *hf_flash_architectures(void);                         // what was compiled: "80;90a"

#ifdef __cplusplus
}
#endif
