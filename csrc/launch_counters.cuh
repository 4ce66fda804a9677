// Host side of counters that the blocks of one launch share: which ones a launch takes. Counters are zero whenever no
// launch uses them: device memory of the library itself starts so, and each launch leaves its own so. What allocates
// nothing and clears nothing can be captured.
#pragma once
#include <cuda_runtime.h>

#include <mutex>
#include <unordered_map>

namespace hf_flash {

// Launches that may run at the same time never share a counter. Those of one stream follow each other and share
// kOfStream of them. A captured launch has its own for ever: its graph may be replayed beside anything, but not beside
// itself.
template <int kStreams, int kOfStream, int kCaptured> class LaunchCounters {
 public:
  static constexpr int kCount = kStreams * kOfStream + kCaptured, kNone = -1;

  // The first of `count` counters. kNone: too many are in use, or the handle stands for a stream of every thread.
  int choose(cudaStream_t stream, bool captured, int count) {
    if (stream == cudaStreamPerThread) return kNone;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (captured) {
      if (count > kCaptured - captured_) return kNone;
      captured_ += count;
      return kCount - kCaptured + captured_ - count;
    }
    if (count > kOfStream) return kNone;
    const auto found = of_stream_.find(stream);
    if (found != of_stream_.end()) return found->second;
    const int next = int(of_stream_.size());
    return next < kStreams ? of_stream_[stream] = next * kOfStream : kNone;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<cudaStream_t, int> of_stream_;   // devices may share an index: each has memory of its own
  int captured_ = 0;
};

// The first of the counters for a launch on this stream. Kinds of counters are numbered through all kernels that use
// them, so that no two kernels mix theirs up.
template <class Counters> int choose_counters(cudaStream_t stream, int count, int* first) {
  static Counters counters;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &status)) return error;
  *first = counters.choose(stream, status != cudaStreamCaptureStatusNone, count);
  return cudaSuccess;
}

}  // namespace hf_flash
