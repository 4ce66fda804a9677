// Where a sequence of the batch lies and how long it is: dense, packed (cu_seqlens), partly used or left padded.
#pragma once
#include "common.cuh"

namespace hf_flash {

struct Sequence {
  int64_t q_row, k_row;     // first row in the packed tensors, 0 when dense; k_row includes left padding
  int q_batch, k_batch;     // index along the batch stride, 0 when packed
  int q_length, k_length;

  HF_DEVICE Sequence(const Params& p, int batch) {
    const bool q_packed = p.cu_seqlens_q != nullptr, k_packed = p.cu_seqlens_k != nullptr;
    q_row = q_packed ? p.cu_seqlens_q[batch] : 0;
    k_row = k_packed ? p.cu_seqlens_k[batch] : 0;
    q_batch = q_packed ? 0 : batch;
    k_batch = k_packed ? 0 : p.cache_batch_idx ? p.cache_batch_idx[batch] : batch;
    q_length = q_packed ? p.cu_seqlens_q[batch + 1] - int(q_row) : p.seq_q;
    k_length = p.used_k ? p.used_k[batch] : k_packed ? p.cu_seqlens_k[batch + 1] - int(k_row) : p.seq_k;
    if (p.used_k && !k_packed) k_length = min(max(k_length, 0), p.seq_k);   // the host could not check it
    if (p.leftpad_k) {
      const int leftpad = max(p.leftpad_k[batch], 0);
      k_row += leftpad;
      k_length = max(0, k_length - leftpad);
    }
  }

  // Keys the last query sees beyond its own index: the diagonal is aligned bottom-right.
  HF_DEVICE int diagonal() const { return k_length - q_length; }

  template <class Element> HF_DEVICE Element* q_base(const Tensor& t, int head) const {
    return static_cast<Element*>(t.data) + q_batch * t.batch_stride + q_row * t.row_stride + head * t.head_stride;
  }
  template <class Element> HF_DEVICE Element* k_base(const Tensor& t, int head) const {
    return static_cast<Element*>(t.data) + k_batch * t.batch_stride + k_row * t.row_stride + head * t.head_stride;
  }
  HF_DEVICE int64_t lse_base(const Params& p, int batch, int head) const {
    return (p.cu_seqlens_q ? 0 : batch * p.lse_batch_stride) + head * p.lse_head_stride + q_row;
  }
};

// Rows of a packed tensor past the last sequence belong to nobody: the grid zeroes them, so that no garbage leaves.
// t (total, heads, head_dim); every block takes every gridDim.x-th row.
template <class Element>
HF_DEVICE void zero_unowned_rows(const Tensor& t, const int32_t* cu_seqlens, int batch, int64_t total, int heads,
                                 int head_dim) {
  if (cu_seqlens == nullptr || t.data == nullptr) return;
  for (int64_t row = int64_t(cu_seqlens[batch]) + blockIdx.x; row < total; row += gridDim.x)
    for (int i = threadIdx.x; i < heads * head_dim; i += blockDim.x)
      static_cast<Element*>(t.data)[row * t.row_stride + int64_t(i / head_dim) * t.head_stride + i % head_dim] =
          Element(0.f);
}

// The forward pass's: of out and lse.
template <class Element> HF_DEVICE void zero_unowned_output(const Params& p) {
  zero_unowned_rows<Element>(p.out, p.cu_seqlens_q, p.batch, p.total_q, p.heads, p.head_dim);
  if (p.cu_seqlens_q == nullptr) return;
  for (int64_t row = int64_t(p.cu_seqlens_q[p.batch]) + blockIdx.x; row < p.total_q; row += gridDim.x)
    for (int head = threadIdx.x; head < p.heads; head += blockDim.x) p.lse[head * p.lse_head_stride + row] = 0.f;
}

}  // namespace hf_flash
