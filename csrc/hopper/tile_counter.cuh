// Host side of the tile scheduler: which counter a launch takes its tiles from. Counters are zero whenever no launch
// uses them: device memory of the library itself starts so, and each launch leaves its own so. What allocates nothing
// and clears nothing can be captured.
#pragma once
#include <cuda_runtime.h>

#include <mutex>
#include <unordered_map>

namespace hf_flash::hopper {

// Launches that may run at the same time never share a counter. Those of one stream follow each other and share one. A
// captured launch has its own for ever: its graph may be replayed beside anything, but not beside itself.
class TileCounters {
 public:
  static constexpr int kStreams = 1024, kCaptured = 15 * 1024, kCount = kStreams + kCaptured;
  static constexpr int kNone = -1;

  // kNone: all are in use, or the handle stands for a stream of every thread.
  int choose(cudaStream_t stream, bool captured) {
    if (stream == cudaStreamPerThread) return kNone;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (captured) return captured_ < kCaptured ? kStreams + captured_++ : kNone;
    const auto found = of_stream_.find(stream);
    if (found != of_stream_.end()) return found->second;
    const int next = int(of_stream_.size());
    return next < kStreams ? of_stream_[stream] = next : kNone;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<cudaStream_t, int> of_stream_;   // devices may share an index: each has memory of its own
  int captured_ = 0;
};

// The counter for a launch on this stream. Numbers are unique in the library, so that no two kernels mix theirs up.
inline int choose_tile_counter(cudaStream_t stream, int* counter) {
  static TileCounters counters;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &status)) return error;
  *counter = counters.choose(stream, status != cudaStreamCaptureStatusNone);
  return cudaSuccess;
}

}  // namespace hf_flash::hopper
