// How the backward pass keeps rows of queries in its scratch: in blocks of 64, each of one request.
#pragma once
#include "common/types.cuh"
#include "mha/segments.cuh"

constexpr int kBlockRows = 64;

// Where a request's tokens begin in the arrays, how many there are, and its first block in the scratch: it
// comes after the blocks of all requests before it. The last block of a request may have fewer rows. Without
// cu_seqlens every request has `seqlen` tokens. With cu_seqlens a request has no block past
// total / kBlockRows + request.
struct RequestRows : Segment {
    int first_block;

    __device__ __forceinline__ RequestRows(const int* cu_seqlens, int total, int seqlen, int request)
        : Segment(cu_seqlens, request, total, seqlen),
          first_block(cu_seqlens == nullptr ? request * ceil_div(seqlen, kBlockRows)
                                            : begin / kBlockRows + request) {}
};

// The request that a block of the scratch belongs to; some blocks hold no rows: they are behind its last row,
// or ahead of the first request.
__device__ __forceinline__ int request_of_block(const int* cu_seqlens, int b, int total, int seqlen,
                                                i64 block) {
    if (cu_seqlens == nullptr) return block / ceil_div(seqlen, kBlockRows);
    int first = 0, last = b - 1;
    while (first < last) {
        const int middle = (first + last + 1) / 2;
        if (clamp_int(cu_seqlens[middle], 0, total) / kBlockRows + middle <= block) {
            first = middle;
        } else {
            last = middle - 1;
        }
    }
    return first;
}
