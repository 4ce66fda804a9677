// Forward attention on sm_80 and later with mma.sync, ldmatrix and cp.async (FlashAttention-2, arXiv 2307.08691).
//
// q, out (batch, seq_q, heads, head_dim); k, v (batch, seq_k, kv_heads, head_dim), packed or paged; lse (batch, heads,
// seq_q). One block computes kBlockM query rows of one head: its warps split the rows and share each tile of kBlockN
// keys, walked from the last to the first. Every feature is a branch at run time; kPlain says only that the keys are
// not paged and that scores need no more than a positive scale and a mask.
#include "../launch.cuh"
#include "../sequence.cuh"
#include "../softmax.cuh"
#include "tile.cuh"

namespace hf_flash {

// A block has 16 * kRowBlocks * kWarps query rows. Every warp reads all keys and values from shared memory for its own
// rows: 32 rows a warp halve that traffic, and 16 are taken where the output (kHeadDim floats a row) leaves no
// registers for 32. A tile of k or v has kStages buffers: two need one barrier a tile instead of two, and are taken
// where the blocks of a multiprocessor still fit 164 KB (sm_80). kBlocks a multiprocessor bound the registers: 3 give
// a thread 168, 2 give it 255.
template <int kWarps_, int kRowBlocks_, int kBlockN_, int kStages_, int kBlocks_> struct ForwardShape {
  static constexpr int kWarps = kWarps_, kRowBlocks = kRowBlocks_, kBlockN = kBlockN_, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_, kThreads = 32 * kWarps, kBlockM = 16 * kRowBlocks * kWarps;
};
// The general kernels need more registers.
template <int kHeadDim, bool kPlain> struct ForwardConfig;
template <bool kPlain> struct ForwardConfig<32, kPlain> : ForwardShape<4, 2, 64, 2, 3> {};
template <bool kPlain> struct ForwardConfig<64, kPlain> : ForwardShape<4, 2, 64, 2, kPlain ? 3 : 2> {};
template <bool kPlain> struct ForwardConfig<80, kPlain> : ForwardShape<4, 2, 64, 2, 2> {};
template <bool kPlain> struct ForwardConfig<96, kPlain> : ForwardShape<4, 2, 64, 2, 2> {};
template <bool kPlain> struct ForwardConfig<128, kPlain> : ForwardShape<4, 2, kPlain ? 64 : 32, 1, 2> {};
template <bool kPlain> struct ForwardConfig<160, kPlain> : ForwardShape<4, kPlain ? 2 : 1, kPlain ? 32 : 64, 1, 2> {};
template <bool kPlain> struct ForwardConfig<192, kPlain> : ForwardShape<4, 1, 64, 1, 2> {};
template <bool kPlain> struct ForwardConfig<256, kPlain> : ForwardShape<4, 1, 64, 1, 2> {};

template <int kHeadDim, bool kPlain> struct ForwardShared {
  using Config = ForwardConfig<kHeadDim, kPlain>;
  static constexpr int kQueryBytes = TileLayout<kHeadDim>::bytes(Config::kBlockM);      // later the output
  static constexpr int kKeyBytes = TileLayout<kHeadDim>::bytes(Config::kBlockN);        // of one stage of k or v
  static constexpr int kBytes = kQueryBytes + 2 * Config::kStages * kKeyBytes;
  static_assert(kBytes <= 99 * 1024, "sm_86 and sm_89 give a block 99 KB");
};

// Which query tile of which head a block computes. Long tiles (the last, under a causal mask) come first, so that the
// grid ends evenly; heads are taken in sections whose keys and values stay in the L2 cache meanwhile.
struct ForwardSchedule {
  int query_tiles, section;   // section: (batch, head) pairs

  ForwardSchedule(const Params& p, int block_m) : query_tiles(p.seq_q > 0 ? ceil_div(p.seq_q, block_m) : 1) {
    constexpr int64_t kCacheBytes = 24 << 20;
    const int64_t bytes_per_head = int64_t(p.seq_k > 0 ? p.seq_k : 1) * p.head_dim * 4 * p.kv_heads / p.heads + 1;
    const int64_t fitting = kCacheBytes / bytes_per_head, all = int64_t(p.batch) * p.heads;
    section = int(fitting < 1 ? 1 : fitting > all ? all : fitting);
  }
  int64_t blocks(const Params& p) const { return int64_t(query_tiles) * p.batch * p.heads; }
};

// What one block computes: the query rows from first_row on, of one head.
struct ForwardWork {
  int first_row, batch, head;

  HF_DEVICE ForwardWork(const Params& p, const ForwardSchedule& schedule, int block, int block_m) {
    const int first = int(block / (int64_t(schedule.query_tiles) * schedule.section)) * schedule.section;
    const int size = min(schedule.section, p.batch * p.heads - first);
    const int rest = int(block - int64_t(first) * schedule.query_tiles), pair = first + rest % size;
    first_row = (schedule.query_tiles - 1 - rest / size) * block_m;
    batch = pair / p.heads;
    head = pair % p.heads;
  }
};

template <class Element, int kHeadDim, bool kPlain>
__global__ void __launch_bounds__(ForwardConfig<kHeadDim, kPlain>::kThreads, ForwardConfig<kHeadDim, kPlain>::kBlocks)
    portable_forward_kernel(const Params p, const ForwardSchedule schedule) {
  using Config = ForwardConfig<kHeadDim, kPlain>;
  using Shared = ForwardShared<kHeadDim, kPlain>;
  using Layout = TileLayout<kHeadDim>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kRowBlocks = Config::kRowBlocks;
  constexpr int kThreads = Config::kThreads, kStages = Config::kStages;
  constexpr int kScoreBlocks = kBlockN / 8, kOutBlocks = kHeadDim / 8, kSteps = kHeadDim / 16;

  HF_DYNAMIC_SHARED(shared);
  char* const shared_q = shared;
  char* const shared_k = shared + Shared::kQueryBytes;
  char* const shared_v = shared_k + kStages * Shared::kKeyBytes;

  const ForwardWork work(p, schedule, blockIdx.x, kBlockM);
  const int batch = work.batch, head = work.head, first_row = work.first_row;
  zero_unowned_rows<Element>(p.out, p.cu_seqlens_q, p.batch, p.total_q, p.heads, p.head_dim);
  const Sequence sequence(p, batch);
  if (first_row >= sequence.q_length) return;

  const int kv_head = head / (p.heads / p.kv_heads);
  const int warp_row = int(threadIdx.x) / 32 * (16 * kRowBlocks);
  const int rows = min(kBlockM, sequence.q_length - first_row);
  const Mask mask(sequence.q_length, sequence.k_length, p.window_left, p.window_right);
  const Range keys = mask.keys(first_row, first_row + rows);
  const Range unmasked = mask.keys_seen_by_all(first_row, first_row + rows);
  const int first_tile = keys.begin / kBlockN;
  int tile = keys.empty() ? first_tile - 1 : (keys.end - 1) / kBlockN;

  // Tiles of k and v are loaded from the last to the first: their rows move down by one tile with each call.
  using Source = TileSource<kHeadDim, kThreads>;
  const int64_t last_key = int64_t(tile) * kBlockN;
  Source k_source(sequence.k_base<const Element>(p.k, kv_head) + last_key * p.k.row_stride, p.k.row_stride);
  Source v_source(sequence.k_base<const Element>(p.v, kv_head) + last_key * p.v.row_stride, p.v.row_stride);
  const auto load = [&](const Tensor& t, Source& source, char* to, int tile) {
    const int first_key = tile * kBlockN, count = sequence.k_length - first_key;
    if (kPlain || p.block_table == nullptr) {
      copy_tile_async<kBlockN>(to, source, t.row_stride, count, p.head_dim);
      source.move(-kBlockN * t.row_stride);
    } else {
      const int32_t* pages = p.block_table + batch * p.block_table_stride;
      copy_rows_async<kBlockN, kHeadDim, kThreads>(to, [&](int row) {
        const int key = int(sequence.k_row) + first_key + row, page = key / p.page_size;
        return static_cast<const Element*>(t.data) + pages[page] * t.batch_stride +
               (key - page * p.page_size) * t.row_stride + kv_head * t.head_stride;
      }, count, p.head_dim);
    }
  };
  const auto load_k = [&](int tile) { load(p.k, k_source, shared_k + tile % kStages * Shared::kKeyBytes, tile); };
  const auto load_v = [&](int tile) { load(p.v, v_source, shared_v + tile % kStages * Shared::kKeyBytes, tile); };

  if (tile >= first_tile) {
    copy_tile_async<kBlockM, kHeadDim, kThreads>(
        shared_q, sequence.q_base<const Element>(p.q, head) + first_row * p.q.row_stride, p.q.row_stride, rows,
        p.head_dim);
    load_k(tile);
    if (kStages > 1) load_v(tile);
    copy_async_commit();
  }

  const float scale_log2 = kPlain ? p.scale * kLog2e : 1.f;
  OnlineSoftmax<kRowBlocks> softmax;
  float out[kRowBlocks][kOutBlocks][4];
  clear(out);

  HF_NO_UNROLL
  for (; tile >= first_tile; --tile) {
    const char* const k_tile = shared_k + tile % kStages * Shared::kKeyBytes;
    const char* const v_tile = shared_v + tile % kStages * Shared::kKeyBytes;
    // Of this lane's first score. Its warp is read again: keeping warp_row would spill.
    const int lane_row = first_row + volatile_opaque(threadIdx.x) / 32 * (16 * kRowBlocks) + threadIdx.x % 32 / 4;
    const int lane_key = tile * kBlockN + threadIdx.x % 4 * 2;

    copy_async_wait<0>();
    __syncthreads();   // k (and with two stages v) has arrived; the other stage (or v) is no longer read
    if (kStages == 1) {
      load_v(tile);
    } else if (tile > first_tile) {
      load_k(tile - 1);
      load_v(tile - 1);
    }
    copy_async_commit();

    float scores[kRowBlocks][kScoreBlocks][4];
    clear(scores);
    HF_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[kRowBlocks][4];
      HF_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) load_a<kHeadDim>(a[m], shared_q, warp_row + 16 * m, 16 * step);
      HF_UNROLL
      for (int n = 0; n < kScoreBlocks; n += 2) {
        uint32_t b[4];
        load_b<kHeadDim>(b, k_tile, 8 * n, 16 * step);
        HF_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          mma_m16n8k16<Element>(scores[m][n], a[m], b[0], b[1]);
          mma_m16n8k16<Element>(scores[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }

    if (!kPlain) ScoreTransform(p, batch, head, mask.diagonal).apply(scores, lane_row, lane_key);
    if (tile * kBlockN < unmasked.begin || (tile + 1) * kBlockN > unmasked.end)
      mask_scores(scores, mask, lane_row, lane_key);
    softmax.follow_maximum(scores, out, scale_log2);

    if (kStages == 1) {
      copy_async_wait<0>();
      __syncthreads();   // v has arrived; k is no longer read
      if (tile > first_tile) load_k(tile - 1);
      copy_async_commit();
    }
    HF_UNROLL
    for (int step = 0; step < kBlockN / 16; ++step) {
      softmax.exponentiate(scores, step, scale_log2);
      if (!kPlain && p.dropout_p > 0.f) drop(scores, step, Dropout(p, batch, head), lane_row, lane_key);
      uint32_t a[kRowBlocks][4];
      pack_a<Element>(a, scores, step);
      HF_UNROLL
      for (int n = 0; n < kOutBlocks; n += 2) {
        uint32_t b[4];
        load_b_transposed<kHeadDim>(b, v_tile, 16 * step, 8 * n);
        HF_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          mma_m16n8k16<Element>(out[m][n], a[m], b[0], b[1]);
          mma_m16n8k16<Element>(out[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __syncwarp();   // the output takes the place of the warp's own queries, which all its lanes have read
  // What the loop has no use for is computed again: it would cost registers there.
  const ForwardWork done(p, schedule, volatile_opaque(blockIdx.x), kBlockM);
  const Sequence queries(p, done.batch);
  softmax.finish();
  const float keep_scale = !kPlain && p.dropout_p > 0.f ? 1.f / (1.f - p.dropout_p) : 1.f;
  const int row_in_tile = warp_row + threadIdx.x % 32 / 4, lane_column = threadIdx.x % 4 * 2;
  float* const lse = p.lse + queries.lse_base(p, done.batch, done.head) + done.first_row;
  HF_UNROLL
  for (int m = 0; m < kRowBlocks; ++m)
    HF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float factor = softmax.inverse_sum(m, half) * keep_scale;
      const int row = row_in_tile + 16 * m + 8 * half;
      HF_UNROLL
      for (int n = 0; n < kOutBlocks; ++n)   // over q, each warp its own rows
        *reinterpret_cast<uint32_t*>(shared_q + Layout::offset(row, 8 * n + lane_column)) =
            pack<Element>(out[m][n][2 * half] * factor, out[m][n][2 * half + 1] * factor);
      if (lane_column == 0 && done.first_row + row < queries.q_length) lse[row] = softmax.log_sum_exp(m, half);
    }
  __syncthreads();
  store_tile<kBlockM, kHeadDim, kThreads>(queries.q_base<Element>(p.out, done.head) + done.first_row * p.out.row_stride,
                                          p.out.row_stride, shared_q, queries.q_length - done.first_row, p.head_dim);
}

template <class Element, int kHeadDim, bool kPlain> int launch_forward(const Params& p, cudaStream_t stream) {
  using Config = ForwardConfig<kHeadDim, kPlain>;
  const ForwardSchedule schedule(p, Config::kBlockM);
  return launch(portable_forward_kernel<Element, kHeadDim, kPlain>, schedule.blocks(p), Config::kThreads,
                ForwardShared<kHeadDim, kPlain>::kBytes, stream, p, schedule);
}

template <int kHeadDim> int portable_forward(const Params& p, cudaStream_t stream) {
  // Rows that no sequence owns give 0 here too; in the kernel this would cost registers.
  if (p.cu_seqlens_q)
    if (const int error = cudaMemsetAsync(p.lse, 0, p.heads * p.lse_head_stride * sizeof(float), stream)) return error;
  const bool plain = p.softcap <= 0.f && p.alibi_slopes == nullptr && p.dropout_p <= 0.f && p.scale > 0.f &&
                     p.block_table == nullptr;
  if (p.dtype == HF_FLASH_BF16)
    return plain ? launch_forward<bf16, kHeadDim, true>(p, stream) : launch_forward<bf16, kHeadDim, false>(p, stream);
  return plain ? launch_forward<fp16, kHeadDim, true>(p, stream) : launch_forward<fp16, kHeadDim, false>(p, stream);
}

template int portable_forward<HF_FLASH_HEAD_DIM>(const Params& p, cudaStream_t stream);

}  // namespace hf_flash
