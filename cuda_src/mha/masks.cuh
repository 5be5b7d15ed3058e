// Masks of dense attention: a query sees the keys of an interval.
#pragma once
#include "mha/tiles.cuh"

// For the thread's two rows. kWindow: keys before the interval are hidden too.
template <bool kWindow>
struct IntervalMask {
    int begin[2], end[2];  // in columns of the block as the lane counts them: its first one is 0

    __device__ __forceinline__ void set(int i, const KeyInterval& keys, int first_column) {
        begin[i] = keys.begin - first_column;
        end[i] = keys.end - first_column;
    }
    __device__ __forceinline__ bool hides(int i, int column) const {
        return column >= end[i] || (kWindow && column < begin[i]);
    }
};
