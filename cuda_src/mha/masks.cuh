// Masks of dense attention: a query sees the keys of an interval.
#pragma once
#include "attention/masks.cuh"
#include "common/types.cuh"
#include "mha/tiles.cuh"

// For the thread's two rows, in columns of a block as attention/masks.cuh counts them. kWindow: keys before
// the interval are hidden too.
template <bool kWindow>
struct IntervalMask {
    static constexpr int kMaxColumns = 256;
    int begin[2], end[2];

    __device__ __forceinline__ void set(int i, const KeyInterval& keys, int first_key, int lane) {
        const int offset = first_key + 2 * (lane % 4);
        begin[i] = keys.begin - offset;
        end[i] = keys.end - offset;
    }
    __device__ __forceinline__ bool hides(int i, int column) const {
        return column >= end[i] || (kWindow && column < begin[i]);
    }
};
