// A few queries against a cache (Flash-Decoding: keys split over blocks), sm_80 and later.
//
// q, out (batch, seq_q, heads, head_dim); k, v caches (rows, capacity, kv_heads, head_dim) or pages; lse (batch, heads,
// seq_q). A block takes consecutive parts (a run of splits) of the keys of one kv head, for a tile of rows: a row is a
// (query, head of the group) pair, so that all heads that share keys read them once. Its warps stream keys
// independently, 16 at a time, each through stages of its own, and meet only at a split's end, while the copies for
// the next one go on: the work is bound by memory, and no warp waits for another's copies. One launch does all of a
// step: a block that reads new keys writes them to the cache itself, and of the blocks that share the keys of a tile of
// rows the last to finish combines the outputs of their splits.
#include <type_traits>

#include "../launch.cuh"
#include "../softmax.cuh"
#include "cache.cuh"
#include "decode_combine.cuh"
#include "rotary.cuh"
#include "tile.cuh"

namespace hf_flash {

constexpr int kKeysPerUnit = 16;   // of a warp's stage: one k-step of p v

// Its warps keep all stages but one in flight, 64 to 72 KB of a block; two blocks fit the 228 KB of an H100. kWide: the
// third stage where q takes a place in shared memory, for GPUs on which two such blocks fit a multiprocessor; on others
// 32 KB are in flight.
template <int kHeadDim, int kRowBlocks, bool kWide> struct DecodeConfig {
  // A row block takes kHeadDim / 2 registers for the output and kHeadDim / 4 for q, of 255.
  static constexpr bool kQueryInRegisters = kHeadDim * kRowBlocks <= 192;
  static_assert(!kWide || !kQueryInRegisters);
  static constexpr int kWarps = kHeadDim <= 128 ? 4 : kHeadDim <= 160 ? 3 : 2;
  static constexpr int kStages = !kQueryInRegisters ? 2 + kWide : kHeadDim <= 96 || kHeadDim == 192 ? 4 : 3;
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kRowBlocks;

  // Shared memory: the stages, each k and v of every warp; q behind them, or in the last stage until that is filled;
  // then, of each warp's rows of a split, the references and sums. The rows themselves, 16 at a time, take the place of
  // the 16 keys and values that the warp read last.
  static constexpr int kTileBytes = TileLayout<kHeadDim>::bytes(kKeysPerUnit), kStageBytes = kWarps * 2 * kTileBytes;
  static constexpr int kQueryBytes = TileLayout<kHeadDim>::bytes(kRows);
  static constexpr int kQueryOffset = kQueryInRegisters ? (kStages - 1) * kStageBytes : kStages * kStageBytes;
  static constexpr int kSumsOffset = kStages * kStageBytes + (kQueryInRegisters ? 0 : kQueryBytes);
  static constexpr int kBytes = kSumsOffset + kWarps * kRows * 8;
  static_assert(16 * kHeadDim * 4 <= 2 * kTileBytes, "16 rows fit where 16 keys and values lay");
  static_assert(kWide || kBytes <= 99 * 1024, "sm_86 and sm_89 give a block 99 KB");
  static_assert(kQueryBytes <= kStageBytes, "q lies in the last stage until it is filled");
};

template <class Element, int kHeadDim, int kRowBlocks, bool kWide>
__global__ void __launch_bounds__(DecodeConfig<kHeadDim, kRowBlocks, kWide>::kThreads, 2)
    decode_kernel(const Params p, const DecodeSchedule schedule) {
  using Config = DecodeConfig<kHeadDim, kRowBlocks, kWide>;
  using Layout = TileLayout<kHeadDim>;
  constexpr int kWarps = Config::kWarps, kStages = Config::kStages, kThreads = Config::kThreads;
  constexpr int kRows = Config::kRows, kSteps = kHeadDim / 16, kOutBlocks = kHeadDim / 8, kChunks = Layout::kChunks;

  HF_DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const DecodeWork work(p, schedule, blockIdx.x);
  const int row_tile = work.row_tile, kv_head = work.kv_head, batch = work.batch;
  const Sequence sequence = decode_sequence(p, batch);
  const RowTile tile(p, schedule, sequence.q_length, row_tile);
  const Mask mask(sequence.q_length, sequence.k_length, p.window_left, p.window_right);
  const Splits splits(mask.keys(tile.first_query(), tile.last_query()), p.num_splits);
  const int run_length = schedule.run_length(splits.count), first_split = work.run * run_length;
  if (first_split >= splits.count) return;
  const int end_split = min(first_split + run_length, splits.count);
  const Range keys{splits.part(first_split).begin, splits.part(end_split - 1).end};   // of the run
  const Range unmasked = mask.keys_seen_by_all(tile.first_query(), tile.last_query());

  if (p.new_k.data) {
    // Keys that a window hides from everybody are appended too, by a block that is always there.
    const bool all = row_tile == schedule.row_tiles - 1 && end_split == splits.count;
    const int first_new = cached_keys(p, batch) - int(sequence.k_row);
    append<Element>(p, batch, kv_head, all ? Range{0, p.seq_new} : Range{keys.begin - first_new, keys.end - first_new});
  }

  const Element* const k_base = static_cast<const Element*>(p.k.data) + kv_head * p.k.head_stride;
  const Element* const v_base = static_cast<const Element*>(p.v.data) + kv_head * p.v.head_stride;
  const int64_t cache_row = p.cache_batch_idx ? p.cache_batch_idx[batch] : batch;
  char* const my_stages = shared + warp * 2 * Config::kTileBytes;

  // Starts the copy of one unit of this warp: 16 keys and values, zeros past the end. Lanes take 8 chunks of a row side
  // by side, and the last 4 or 2 of rows that have no multiple of 8.
  const auto load_unit = [&](int first_key, int stage) {
    char* const to = my_stages + stage * Config::kStageBytes;
    int64_t k_offset = 0, v_offset = 0;   // paged: of key first_key + lane % 16
    if (p.block_table) {
      const CacheRow at(p, batch, int(sequence.k_row) + min(first_key + lane % kKeysPerUnit, keys.end - 1));
      k_offset = at.offset(p.k);
      v_offset = at.offset(p.v);
    }
    const auto load_columns = [&](auto width, int first_chunk, int panels) {
      constexpr int kWidth = decltype(width)::value, kStep = 32 / kWidth;
      const int chunk = first_chunk + lane % kWidth;
      int row = lane / kWidth;
      const Element* k_from = k_base + chunk * 8;
      const Element* v_from = v_base + chunk * 8;
      if (!p.block_table) {
        k_from += cache_row * p.k.batch_stride + (sequence.k_row + first_key + row) * p.k.row_stride;
        v_from += cache_row * p.v.batch_stride + (sequence.k_row + first_key + row) * p.v.row_stride;
      }
      HF_UNROLL
      for (int i = 0; i < kKeysPerUnit / kStep; ++i, row += kStep) {
        const int64_t k_row = p.block_table ? __shfl_sync(0xffffffffu, k_offset, row) : 0;
        const int64_t v_row = p.block_table ? __shfl_sync(0xffffffffu, v_offset, row) : 0;
        HF_UNROLL
        for (int panel = 0; panel < panels; ++panel) {
          const bool valid = first_key + row < keys.end && (chunk + panel * 8) * 8 < p.head_dim;
          const int offset = Layout::chunk_offset(row, chunk + panel * 8);
          copy_async_16(to + offset, k_from + k_row + panel * 64, valid);
          copy_async_16(to + Config::kTileBytes + offset, v_from + v_row + panel * 64, valid);
        }
        if (!p.block_table) {
          k_from += kStep * p.k.row_stride;
          v_from += kStep * p.v.row_stride;
        }
      }
    };
    constexpr int kTail = kChunks % 8;
    if constexpr (kChunks >= 8) load_columns(std::integral_constant<int, 8>{}, 0, kChunks / 8);
    if constexpr (kTail > 0) load_columns(std::integral_constant<int, kTail>{}, kChunks - kTail, 1);
  };
  // Warp w takes units w, w + kWarps, ... of every split. All warps go through as many stages in a split, so that they
  // meet at its end with the same one free.
  const int units_per_split = splits.length / kKeysPerUnit;
  int copy_begin = keys.begin, copy_unit = warp;   // what is copied next: a unit of the split that begins there
  const auto load_next = [&](int stage) {
    const int first_key = copy_begin + copy_unit * kKeysPerUnit;
    if (copy_unit < units_per_split && first_key < keys.end) load_unit(first_key, stage);
    copy_async_commit();
    copy_unit += kWarps;
    if (copy_unit - warp < units_per_split) return;
    copy_unit = warp;
    copy_begin += splits.length;
  };
  HF_UNROLL
  for (int stage = 0; stage < kStages - 1; ++stage) load_next(stage);

  // q, rotated. Without a causal or local mask all queries share one position.
  char* const shared_q = shared + Config::kQueryOffset;
  const bool own_positions = p.window_left >= 0 || p.window_right >= 0;
  const int last_position = p.seq_k - 1 + (own_positions ? max(0, p.seq_q - p.seq_new) : 0);   // that has angles
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks, query = tile.query(row), head = tile.head(row, kv_head);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (tile.first + row < tile.last && chunk * 8 < p.head_dim) {
      const int position = min(cached_keys(p, batch) + (own_positions ? query : 0), last_position);
      x = rotated_chunk(p, sequence.q_base<const Element>(p.q, head) + query * p.q.row_stride, chunk * 8,
                        angles_row(p, batch, query, position));
    }
    *reinterpret_cast<uint4*>(shared_q + Layout::chunk_offset(row, chunk)) = x;
  }
  __syncthreads();
  uint32_t q[Config::kQueryInRegisters ? kSteps : 1][kRowBlocks][4];
  const auto load_query = [&](int step) {
    HF_UNROLL
    for (int m = 0; m < kRowBlocks; ++m)
      load_a<kHeadDim>(q[Config::kQueryInRegisters ? step : 0][m], shared_q, 16 * m, 16 * step);
  };
  if (Config::kQueryInRegisters) {
    HF_UNROLL
    for (int step = 0; step < kSteps; ++step) load_query(step);
    __syncthreads();   // the last stage may be filled
  }

  int query_of[kRowBlocks][2];
  float slope_of[kRowBlocks][2];
  HF_UNROLL
  for (int m = 0; m < kRowBlocks; ++m)
    HF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = min(16 * m + lane / 4 + 8 * half, tile.last - 1 - tile.first), head = tile.head(row, kv_head);
      query_of[m][half] = tile.query(row);
      slope_of[m][half] = p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] * kLog2e : 0.f;
    }
  const bool plain = p.softcap <= 0.f && p.alibi_slopes == nullptr && p.scale > 0.f;
  const float scale_log2 = plain ? p.scale * kLog2e : 1.f;

  int stage = 0;
  HF_NO_UNROLL
  for (int split = first_split, begin = keys.begin;; ++split, begin += splits.length) {
    const bool is_last = keys.end - begin <= splits.length;
    const Range part{begin, is_last ? keys.end : begin + splits.length};
    OnlineSoftmax<kRowBlocks> softmax;
    float out[kRowBlocks][kOutBlocks][4];
    clear(out);

    HF_NO_UNROLL
    for (int unit = warp; part.begin + (unit - warp) * kKeysPerUnit < part.end; unit += kWarps) {
      copy_async_wait<kStages - 2>();
      __syncwarp();   // every lane's copies of this stage are here, and nobody reads the stage before it any more
      load_next(stage == 0 ? kStages - 1 : stage - 1);
      const char* const k_tile = my_stages + stage * Config::kStageBytes;
      const char* const v_tile = k_tile + Config::kTileBytes;
      if (++stage == kStages) stage = 0;
      const int first_key = part.begin + unit * kKeysPerUnit, key = first_key + lane % 4 * 2;
      if (first_key >= part.end) break;   // the others are at their last unit

      float scores[kRowBlocks][2][4];
      clear(scores);
      HF_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if (!Config::kQueryInRegisters) load_query(step);
        uint32_t b[4];
        load_b<kHeadDim>(b, k_tile, 0, 16 * step);
        HF_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          const auto& a = q[Config::kQueryInRegisters ? step : 0][m];
          mma_m16n8k16<Element>(scores[m][0], a, b[0], b[1]);
          mma_m16n8k16<Element>(scores[m][1], a, b[2], b[3]);
        }
      }

      if (!plain) {
        const float into_cap = p.softcap > 0.f ? p.scale / p.softcap : 0.f;
        const float to_log2 = (p.softcap > 0.f ? p.softcap : p.scale) * kLog2e;
        HF_UNROLL
        for (int m = 0; m < kRowBlocks; ++m)
          HF_UNROLL
          for (int e = 0; e < 8; ++e) {
            float& x = scores[m][e / 4][e % 4];
            if (p.softcap > 0.f) x = tanh_of(x * into_cap);
            const int half = e % 4 / 2;
            const int distance = query_of[m][half] + mask.diagonal - (key + 8 * (e / 4) + e % 2);
            x = x * to_log2 - slope_of[m][half] * fabsf(float(distance));
          }
      }
      if (first_key < unmasked.begin || first_key + kKeysPerUnit > unmasked.end) {
        HF_UNROLL
        for (int m = 0; m < kRowBlocks; ++m)
          HF_UNROLL
          for (int half = 0; half < 2; ++half) {
            const Range seen = mask.keys(query_of[m][half]);
            const int begin = max(seen.begin, part.begin) - key, end = min(seen.end, part.end) - key;
            HF_UNROLL
            for (int n = 0; n < 2; ++n)
              HF_UNROLL
              for (int e = 0; e < 2; ++e)
                if (8 * n + e < begin || 8 * n + e >= end) scores[m][n][2 * half + e] = kNegativeInfinity;
          }
      }
      softmax.follow_maximum(scores, out, scale_log2);
      softmax.exponentiate(scores, 0, scale_log2);
      uint32_t a[kRowBlocks][4];
      pack_a<Element>(a, scores, 0);
      HF_UNROLL
      for (int n = 0; n < kOutBlocks; n += 2) {
        uint32_t b[4];
        load_b_transposed<kHeadDim>(b, v_tile, 0, 8 * n);
        HF_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          mma_m16n8k16<Element>(out[m][n], a[m], b[0], b[1]);
          mma_m16n8k16<Element>(out[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }

    // What the loop has no use for is computed again: it would cost registers there.
    const DecodeWork done(p, schedule, volatile_opaque(blockIdx.x));
    const Sequence queries(p, done.batch);
    const RowTile rows(p, schedule, queries.q_length, done.row_tile);

    // The warps' outputs meet in the stage that is free, brought to each row's largest reference. Row r is turned by
    // 8 (r % 4) columns, which puts the rows of a half-warp on different banks.
    softmax.finish();
    char* const free_stage = shared + (stage == 0 ? kStages - 1 : stage - 1) * Config::kStageBytes;
    const auto place = [&](int of_warp, int row, int column) {   // row: of 16
      column += row % 4 * 8;
      if (column >= kHeadDim) column -= kHeadDim;
      return reinterpret_cast<float*>(free_stage + of_warp * 2 * Config::kTileBytes) + row * kHeadDim + column;
    };
    float* const minus_references = reinterpret_cast<float*>(shared + Config::kSumsOffset);   // (kWarps, kRows)
    float* const sums = minus_references + kWarps * kRows;
    __syncwarp();   // nobody reads the stage any more
    HF_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      if (m > 0) __syncthreads();   // the rows before are merged
      HF_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        if (rows.first + 16 * m + row >= rows.last) continue;
        if (lane % 4 == 0) {
          minus_references[warp * kRows + 16 * m + row] = softmax.minus_reference[m][half];
          sums[warp * kRows + 16 * m + row] = softmax.sum[m][half];
        }
        HF_UNROLL
        for (int n = 0; n < kOutBlocks; ++n)
          *reinterpret_cast<float2*>(place(warp, row, 8 * n + lane % 4 * 2)) =
              make_float2(out[m][n][2 * half], out[m][n][2 * half + 1]);
      }
      __syncthreads();

      for (int i = threadIdx.x; i < 16 * (kHeadDim / 4); i += kThreads) {
        const int row = 16 * m + i / (kHeadDim / 4), column = i % (kHeadDim / 4) * 4;
        if (rows.first + row >= rows.last || column >= p.head_dim) continue;
        float minus_reference = minus_references[row], sum = 0.f;
        HF_UNROLL
        for (int w = 1; w < kWarps; ++w) minus_reference = fminf(minus_reference, minus_references[w * kRows + row]);
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
        HF_UNROLL
        for (int w = 0; w < kWarps; ++w) {
          const float factor = exp2_approx(minus_reference - minus_references[w * kRows + row]);
          const float4 y = *reinterpret_cast<const float4*>(place(w, row % 16, column));
          sum = fmaf(factor, sums[w * kRows + row], sum);
          x = make_float4(fmaf(factor, y.x, x.x), fmaf(factor, y.y, x.y),
                          fmaf(factor, y.z, x.z), fmaf(factor, y.w, x.w));
        }
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;
        const float lse_log2 = sum == 0.f ? kNegativeInfinity : log2f(sum) - minus_reference;
        x = make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
        const int query = rows.query(row), head = rows.head(row, done.kv_head);
        if (splits.count == 1) {
          *reinterpret_cast<uint2*>(queries.q_base<Element>(p.out, head) + query * p.out.row_stride + column) =
              make_uint2(pack<Element>(x.x, x.y), pack<Element>(x.z, x.w));
          if (column == 0 && p.lse) p.lse[queries.lse_base(p, done.batch, head) + query] = lse_log2 * kLn2;
        } else {
          const int64_t partial = schedule.partial_row(p, done.batch, head, query) + split;
          *reinterpret_cast<float4*>(schedule.partial_out + partial * p.head_dim + column) = x;
          if (column == 0) schedule.partial_lse[partial] = lse_log2;
        }
      }
    }
    if (is_last) break;
    __syncthreads();   // the stage may be filled
  }

  if (splits.count == 1) return;
  const DecodeWork done(p, schedule, volatile_opaque(blockIdx.x));
  const int runs = ceil_div(splits.count, schedule.run_length(splits.count));
  if (is_last_arrival(schedule.arrivals_of(done.tile), runs, reinterpret_cast<int*>(shared + kThreads * 32))) {
    const RowTile rows(p, schedule, Sequence(p, done.batch).q_length, done.row_tile);
    combine_splits<Element, kHeadDim, kThreads>(p, schedule, done, rows, splits.count, shared);
  }
}

template <class Element, int kHeadDim, int kRowBlocks, bool kWide = false>
int launch_decode(const Params& p, DecodeSchedule& schedule, cudaStream_t stream) {
  using Config = DecodeConfig<kHeadDim, kRowBlocks, kWide>;
  // A multiprocessor has 1 KB more than one block may take, and every block takes 1 KB besides its own.
  const int shared_memory = device_facts().shared_memory_per_block + 1024;
  if constexpr (!kWide && !Config::kQueryInRegisters)
    if (shared_memory >= 2 * (DecodeConfig<kHeadDim, kRowBlocks, true>::kBytes + 1024))
      return launch_decode<Element, kHeadDim, kRowBlocks, true>(p, schedule, stream);
  schedule.choose_runs(p, min(shared_memory / (Config::kBytes + 1024), 3));   // 3: registers
  return launch(decode_kernel<Element, kHeadDim, kRowBlocks, kWide>, schedule.blocks(p), Config::kThreads,
                Config::kBytes, stream, p, schedule);
}

template <class Element, int kHeadDim> int decode(const Params& p, cudaStream_t stream) {
  DecodeSchedule schedule(p, kHeadDim);
  if (const int error = schedule.choose_arrivals(p, stream)) return error;
  constexpr int kMaxRowBlocks = kHeadDim <= 128 ? 2 : 1;   // registers for two outputs
  return schedule.rows == 16 ? launch_decode<Element, kHeadDim, 1>(p, schedule, stream)
                             : launch_decode<Element, kHeadDim, kMaxRowBlocks>(p, schedule, stream);
}

template <int kHeadDim> int portable_decode(const Params& p, cudaStream_t stream) {
  if (p.cu_seqlens_q || p.cu_seqlens_k || p.dropout_p > 0.f) return HF_FLASH_UNSUPPORTED;
  return p.dtype == HF_FLASH_BF16 ? decode<bf16, kHeadDim>(p, stream) : decode<fp16, kHeadDim>(p, stream);
}

template <int kHeadDim> int64_t portable_decode_workspace(const Params& p) {
  return DecodeSchedule(p, kHeadDim).workspace_bytes(p);
}

template int portable_decode<HF_FLASH_HEAD_DIM>(const Params& p, cudaStream_t stream);
template int64_t portable_decode_workspace<HF_FLASH_HEAD_DIM>(const Params& p);

}  // namespace hf_flash
