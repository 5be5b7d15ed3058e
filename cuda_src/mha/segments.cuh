// Where the tokens of a request lie in arrays. Lengths are the caller's, and may be anything: what they name
// outside of the arrays is cut off here, so that no kernel reads or writes there.
#pragma once
#include "common/types.cuh"

// Tokens begin to begin + count - 1 of arrays of `total` tokens. Without cu_seqlens, of a request's own.
struct Segment {
    int begin, count;

    __device__ __forceinline__ Segment(const int* cu_seqlens, int request, int total, int seqlen)
        : begin(0), count(seqlen) {
        if (cu_seqlens == nullptr) return;
        begin = clamp_int(cu_seqlens[request], 0, total);
        count = clamp_int(cu_seqlens[request + 1], begin, total) - begin;
    }
};

// How many of a request's tokens exist.
__device__ __forceinline__ int used_tokens(const int* seqused, int request, int tokens) {
    return seqused == nullptr ? tokens : clamp_int(seqused[request], 0, tokens);
}
