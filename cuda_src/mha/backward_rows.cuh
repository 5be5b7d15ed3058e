// How the backward pass keeps rows of queries in its scratch: in blocks of 64, each of one request.
#pragma once
#include "common/types.cuh"

constexpr int kBlockRows = 64;

// Where a request's tokens begin in the arrays, how many there are, and where its blocks begin: behind those
// of the requests before it, whose last blocks may be cut. Without cu_seqlens all have `seqlen` tokens.
struct RequestRows {
    int begin, count, first_block;

    __device__ __forceinline__ RequestRows(const int* cu_seqlens, int seqlen, int request) {
        if (cu_seqlens == nullptr) {
            begin = 0;
            count = seqlen;
            first_block = request * ceil_div(seqlen, kBlockRows);
        } else {
            begin = cu_seqlens[request];
            count = cu_seqlens[request + 1] - begin;
            first_block = begin / kBlockRows + request;
        }
    }
};

// The request that a block of the scratch belongs to; some blocks hold no rows: they are behind its last row,
// or ahead of the first request.
__device__ __forceinline__ int request_of_block(const int* cu_seqlens, int b, int seqlen, i64 block) {
    if (cu_seqlens == nullptr) return block / ceil_div(seqlen, kBlockRows);
    int first = 0, last = b - 1;
    while (first < last) {
        const int middle = (first + last + 1) / 2;
        if (cu_seqlens[middle] / kBlockRows + middle <= block) {
            first = middle;
        } else {
            last = middle - 1;
        }
    }
    return first;
}
