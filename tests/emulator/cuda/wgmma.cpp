// Warpgroup matrix products: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// A batch of products is computed when all threads of the warpgroup have committed it: at once, or not before
// one of them waits for it, as the seed decides. Whoever overwrites an operand too early, or needs it to be
// there too late, is found by one of the two.
#include <bit>
#include <cstdint>
#include <cstring>

#include "state.h"

#ifndef __F16C__
#error "the emulator needs a CPU that converts float16"
#endif

namespace emulator {
namespace {

constexpr int kRows = 64, kDepth = 16, kMostColumns = 256;

float to_float(uint16_t bits, bool is_f16) {
    return is_f16 ? float(std::bit_cast<_Float16>(bits)) : std::bit_cast<float>(uint32_t(bits) << 16);
}

// A matrix in shared memory as out[k][row]: 16 bytes, which no swizzle parts, at a time.
void read_matrix(float* out, int rows, uint64_t desc, bool is_mn_major, bool is_f16) {
    const unsigned start = (desc & 0x3fff) << 4, lbo = (desc >> 16 & 0x3fff) << 4,
                   sbo = (desc >> 32 & 0x3fff) << 4;
    const unsigned mode = desc >> 62;  // 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes
    const int row_bytes = mode ? 256 >> mode : 16;
    const unsigned permuted = mode ? row_bytes / 16 - 1 : 0;
    if (is_mn_major && !mode) fail("wgmma: an MN-major operand without swizzle");
    const auto unit = [&](unsigned address, float* to, int step) {
        address ^= (address >> 7 & permuted) << 4;
        uint16_t values[8];
        memcpy(values, shared(address, 16), 16);
        for (int i = 0; i < 8; ++i) to[i * step] = to_float(values[i], is_f16);
    };
    if (is_mn_major) {
        const int columns = row_bytes / 2;
        for (int k = 0; k < kDepth; ++k)
            for (int row = 0; row < rows; row += 8)
                unit(start + row / columns * lbo + k / 8 * sbo + k % 8 * row_bytes + 2 * (row % columns),
                     out + k * rows + row, 1);
    } else {
        for (int row = 0; row < rows; ++row)
            for (int k = 0; k < kDepth; k += 8)
                unit(start + row / 8 * sbo + row % 8 * row_bytes + (mode ? 2 * k : k / 8 * lbo),
                     out + k * rows + row, rows);
    }
}

// Row and column of element i of a thread's accumulators, or of its part of A.
int row_of(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + 8 * (i >> 1 & 1); }
int column_of(int thread, int i) { return 8 * (i >> 2) + 2 * (thread % 4) + (i & 1); }

// A product that the 128 threads issued.
void compute(const Product* const (&issued)[kWarpgroup]) {
    const Product& o = *issued[0];
    for (const Product* p : issued)
        if (p->count != o.count || p->a_in_registers != o.a_in_registers || p->desc_b != o.desc_b ||
            (!o.a_in_registers && p->desc_a != o.desc_a) || p->accumulate != o.accumulate)
            fail("the threads of a warpgroup issue different wgmma");
    const int columns = 2 * o.count;
    static float a[kDepth * kRows], b[kDepth * kMostColumns], c[kRows * kMostColumns];
    if (o.a_in_registers) {
        for (int t = 0; t < kWarpgroup; ++t)
            for (int i = 0; i < 8; ++i) {
                const uint16_t bits = issued[t]->a[i / 2] >> 16 * (i & 1);
                a[column_of(t, i) * kRows + row_of(t, i)] = to_float(bits, o.is_f16);
            }
    } else {
        read_matrix(a, kRows, o.desc_a, o.a_is_mn_major, o.is_f16);
    }
    read_matrix(b, columns, o.desc_b, o.b_is_mn_major, o.is_f16);
    memset(c, 0, sizeof(float) * kRows * columns);
    for (int row = 0; row < kRows; ++row)
        for (int k = 0; k < kDepth; ++k)
            for (int j = 0; j < columns; ++j) c[row * columns + j] += a[k * kRows + row] * b[k * columns + j];
    for (int t = 0; t < kWarpgroup; ++t)
        for (int i = 0; i < o.count; ++i) {
            float& d = issued[t]->d[i];
            d = (o.accumulate ? d : 0.0f) + c[row_of(t, i) * columns + column_of(t, i)];
        }
}

Thread* threads_of(const Warpgroup& group) {
    return cta->threads.data() + (&group - cta->warpgroups.data()) * kWarpgroup;
}

// The oldest batch.
void compute_batch(Warpgroup& group) {
    Thread* const threads = threads_of(group);
    const size_t count = threads[0].batches.front().size();
    for (int t = 0; t < kWarpgroup; ++t)
        if (threads[t].batches.front().size() != count)
            fail("the threads of a warpgroup commit different wgmma");
    for (size_t i = 0; i < count; ++i) {
        const Product* issued[kWarpgroup];
        for (int t = 0; t < kWarpgroup; ++t) issued[t] = &threads[t].batches.front()[i];
        compute(issued);
    }
    for (int t = 0; t < kWarpgroup; ++t) threads[t].batches.erase(threads[t].batches.begin());
    group.committed.erase(group.committed.begin());
    ++group.computed;
}

Warpgroup& own_group() {
    Warpgroup& group = cta->warpgroups[thread->index / kWarpgroup];
    if (threads_of(group) + kWarpgroup > cta->threads.data() + cta->threads.size())
        fail("wgmma in less than a warpgroup");
    return group;
}

}  // namespace

void wgmma_issue(const Product& product) {
    own_group();
    thread->products.push_back(product);
}

void wgmma_commit() {
    Warpgroup& group = own_group();
    thread->batches.push_back(std::move(thread->products));
    thread->products.clear();
    const size_t place = thread->batches.size() - 1;
    if (group.committed.size() <= place) group.committed.push_back(0);
    const bool is_last = ++group.committed[place] == kWarpgroup;
    if (is_last && random_number() % 2)
        for (size_t i = 0; i <= place; ++i) compute_batch(group);
}

void wgmma_wait(unsigned left) {
    Warpgroup& group = own_group();
    if (!thread->products.empty()) fail("a wait for wgmma that is not committed");
    if (thread->batches.size() <= left) return;
    const unsigned wanted = group.computed + thread->batches.size() - left;
    const auto is_computed = [&group, wanted] { return static_cast<int>(group.computed - wanted) >= 0; };
    wait(
        [&group, wanted, is_computed] {
            return is_computed() || group.committed[wanted - group.computed - 1] == kWarpgroup;
        },
        [] { return std::string("wgmma that not all threads of the warpgroup have issued"); });
    while (!is_computed()) compute_batch(group);
}

}  // namespace emulator
