// How the work of decoding is shared among CTAs, from lengths on the device and without a plan.
//
// A pair is a tile of query rows and the KV head that they attend. A team of CTAs has Params::team heads side
// by side, one each, and its CTAs read the same tokens at the same time: a page holds the rows of all heads.
// The blocks of keys of the pairs of one CTA of a team form a line: requests one after the other, in each its
// heads, in each its tiles. Each team takes an equal share of the line. So every multiprocessor loads as much
// as the others, however the lengths vary, and a CTA begins and ends at most one pair that others share.
#pragma once
#include "common/division.cuh"
#include "mha/decode_params.cuh"
#include "mha/segments.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

// The tokens of a request.
struct Request {
    int q_begin, q_len;
    int new_begin, new_len;  // tokens of k_new
    int cached;              // tokens in the cache: the first new one's position. May be negative
    int length;              // of all keys
    int first_seen;          // the first position that a query sees
    int first_key;           // the first position that is loaded: new tokens are, whoever sees them
    int first_block, blocks, tiles;
    int pairs;  // of a CTA of a team

    Request() = default;
    __device__ __forceinline__ Request(const Params& params, int request) {
        const Segment q(params.cu_seqlens_q, request, params.total_q, params.seqlen_q);
        const Segment fresh(params.cu_seqlens_new, request, params.total_new, params.seqlen_new);
        const int capacity = params.block_size * params.table_columns;
        q_begin = q.begin, q_len = q.count <= params.most_tokens ? q.count : 0;
        new_begin = fresh.begin, new_len = fresh.count;
        cached = static_cast<int>(params.cache_length);
        if (params.cache_seqlens != nullptr) {
            cached = params.cache_seqlens[request];
        } else if (params.cu_seqlens_k != nullptr) {
            cached = params.cu_seqlens_k[request + 1] - params.cu_seqlens_k[request];
        }
        cached = clamp_int(cached, -kMostTokens, capacity);
        length = clamp_int(cached + new_len, 0, capacity);
        // The last query sees the last key, whatever the window is on the right.
        const int leftpad = params.cache_leftpad == nullptr ? 0 : params.cache_leftpad[request];
        first_seen = min_int(max_int(max_int(leftpad, 0), length - q_len - params.window_left), length);
        if (q_len == 0) first_seen = length;
        first_key = new_len > 0 ? min_int(first_seen, max_int(cached, 0)) : first_seen;
        first_block = first_key / kBlockTokens;
        blocks = max_int(ceil_div(length, kBlockTokens) - first_block, 1);  // one that writes zeros
        tiles = ceil_div(q_len * params.group, kTileRows);
        if (tiles == 0 && new_len > 0) tiles = 1;  // which appends
        pairs = tiles * params.heads_of_cta;
    }
    __device__ __forceinline__ i64 work() const { return static_cast<i64>(blocks) * pairs; }

    static constexpr int kMostTokens = 1 << 30;
};

// The sum of a lane's number and all lower lanes' numbers.
__device__ __forceinline__ i64 sum_upto(i64 value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const i64 before = __shfl_up_sync(0xffffffff, value, distance);
        if (lane_index() >= distance) value += before;
    }
    return value;
}

// The blocks of requests, counted by a warpgroup: each thread has the sum of several requests side by side.
constexpr int kCounts = 128;
__device__ __forceinline__ void count_blocks(const Params& params, i64 (&counts)[kCounts]) {
    const int thread = threadIdx.x % kCounts, of_thread = ceil_div(params.b, kCounts);
    const int first = thread * of_thread;
    i64 sum = 0;
#pragma unroll 1  // between an engine's other kernels instructions are cold, and take longer than the loop
    for (int request = first; request < min_int(first + of_thread, params.b); ++request)
        sum += Request(params, request).work();
    counts[thread] = sum;
}

// The line of a call, from counts in shared memory. All lanes of a warp build it and call its functions.
class Line {
  public:
    __device__ __forceinline__ Line(const Params& params, const i64 (&counts)[kCounts], int most_shares)
        : counts(counts), upto(0) {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) upto += counts[kOfLane * lane_index() + i];
        upto = sum_upto(upto);
        total = __shfl_sync(0xffffffff, upto, 31);
        shares = static_cast<int>(total < most_shares ? total : most_shares);
        least = shares == 0 ? 0 : total / shares;
        rest = static_cast<u32>(total - least * shares);
    }
    // The share of a team; no blocks if there are fewer shares.
    __device__ __forceinline__ Share share(const Params& params, int team) const {
        if (team >= shares) return {0, 0, 0, 0, 0};
        const i64 first = begin(team);
        Share found = find(params, first);
        found.blocks = static_cast<int>(begin(team + 1) - first);
        found.pair_begins = share_of(first - found.block);
        return found;
    }

  private:
    static constexpr int kOfLane = kCounts / 32;

    const i64 (&counts)[kCounts];
    i64 upto;    // blocks of the lane's requests and of all before them
    i64 total;   // blocks
    int shares;  // teams that have some
    i64 least;   // blocks of a share
    u32 rest;    // shares that have one more

    // share * total / shares, the first block of a share, and of `shares` itself the end of the line. Where
    // each pair is a whole number of shares, pairs of one length are cut in the same way.
    __device__ __forceinline__ i64 begin(int share) const {
        return share * least + static_cast<u32>(share) * rest / static_cast<u32>(shares);
    }
    // The share that has a block: the last one that begins before the next block.
    __device__ __forceinline__ int share_of(i64 block) const {
        return static_cast<int>(((block + 1) * shares - 1) / total);
    }
    // Where a block of the line is.
    __device__ __forceinline__ Share find(const Params& params, i64 block) const {
        const int lane = __ffs(__ballot_sync(0xffffffff, block < upto)) - 1;
        const i64 before = __shfl_sync(0xffffffff, upto, max_int(lane - 1, 0));
        if (lane > 0) block -= before;
        int thread = kOfLane * lane;
        for (; block >= counts[thread]; ++thread) block -= counts[thread];
        for (int request = thread * ceil_div(params.b, kCounts);; ++request) {
            const Request here(params, request);
            if (block >= here.work()) {
                block -= here.work();
                continue;
            }
            const int pair = static_cast<int>(block / here.blocks);
            return {request, pair, static_cast<int>(block - static_cast<i64>(pair) * here.blocks), 0, 0};
        }
    }
};

// Brings lengths and the block table to L2, where the keys of an earlier call have taken their place.
__device__ __forceinline__ void prefetch_lengths(const Params& params) {
    constexpr int kLine = 32;  // integers
    const i64 first = (blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x) * kLine;
    if (params.block_table != nullptr &&
        first < (params.table_rows - 1) * params.table_stride + params.table_columns)
        prefetch_l2(params.block_table + first);
    if (params.cache_seqlens != nullptr && first < params.b) prefetch_l2(params.cache_seqlens + first);
}

// The share of this CTA.
__device__ __forceinline__ Share share_of_cta(const Params& params, const i64 (&counts)[kCounts]) {
    return Line(params, counts, gridDim.x / params.team).share(params, blockIdx.x / params.team);
}

// The share of a CTA that attends whole pairs (Params::is_whole). It is one pair, or none if the request has
// fewer. A request with more tiles than max_tiles, as in a replayed graph, has several for a CTA.
__device__ __forceinline__ Share whole_pairs(const Params& params, int index) {
    const int ctas = params.heads_of_cta * params.max_tiles;  // of a request
    const int request_index = index / ctas, place = index - request_index * ctas;
    const Request request(params, request_index);
    const int each = ceil_div(request.pairs, ctas), first = place * each;
    return {request_index, first, 0, clamp_int(request.pairs - first, 0, each) * request.blocks, index};
}

// Walks the pairs of a share. Every warp does so by itself.
struct Walk {
    Request request;
    int index;  // of the request
    int head_of_team;
    int pair, block, left;
    // The current pair has these.
    int head, tile;
    int first_block, blocks;

    __device__ __forceinline__ Walk(const Params& params, const Share& share)
        : index(share.request - 1),
          head_of_team(blockIdx.x % params.team),
          pair(share.pair),
          block(share.block),
          left(share.blocks) {
        request.pairs = 0;  // `next` has the one place that reads a request
    }

    __device__ __forceinline__ bool next(const Params& params) {
        if (left == 0) return false;
        for (; pair >= request.pairs; request = Request(params, ++index)) pair -= request.pairs;
        const int of_cta = pair / request.tiles;
        head = of_cta * params.team + head_of_team;
        tile = pair - of_cta * request.tiles;
        first_block = request.first_block + block;
        blocks = min_int(request.blocks - block, left);
        left -= blocks;
        block = 0;
        ++pair;
        return true;
    }
    // Whether the share has the pair's first, and its last block.
    __device__ __forceinline__ bool begins() const { return first_block == request.first_block; }
    __device__ __forceinline__ bool ends() const {
        return first_block + blocks == request.first_block + request.blocks;
    }
    // The first row of a group, of kRowGroups, among the rows of its request and KV head.
    __device__ __forceinline__ int first_row(int row_group) const {
        return tile * kTileRows + row_group * kOwnRows;
    }
};

// A query row of a pair.
struct RowPlace {
    bool exists;
    int token, head;

    __device__ __forceinline__ RowPlace(const Params& params, const Walk& walk, int row) {
        token = divide(row, params.group_magic, params.group_shift);
        head = walk.head * params.group + row - token * params.group;
        exists = token < walk.request.q_len;
    }
};
