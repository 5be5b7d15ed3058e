// Copies that run beside the threads: cp.async, TMA and bulk copies. Each lands at a random time of its own;
// cp.async that no barrier counts lands when its thread waits for it.
#include <cstdint>
#include <cstring>

#include "state.h"

namespace emulator {

namespace {

// A copy that reads or writes the CTA's shared memory when it lands. The CTA may not end before.
void copy_later(std::function<void()> copy) {
    ++cta->copies_of_shared;
    cta->copies.push_back([copy = std::move(copy)] {
        copy();
        --cta->copies_of_shared;
    });
}

}  // namespace

// ---- cp.async

namespace {

// All that the thread gathered for its first `count` arrivals.
void land(Thread& owner, unsigned count) {
    while (static_cast<int>(count - owner.landed) > 0) {
        for (const auto& copy : owner.landing.front()) copy();
        owner.landing.erase(owner.landing.begin());
        ++owner.landed;
    }
}

}  // namespace

void copy_async(unsigned dst, const void* src, int bytes, bool reads) {
    if (dst % bytes || (reads && reinterpret_cast<uintptr_t>(src) % bytes))
        fail("cp.async: addresses that are no multiples of %d", bytes);
    unsigned char* const to = shared(dst, bytes);
    if (reads)
        thread->gathers.push_back([=] { memcpy(to, src, bytes); });
    else
        thread->gathers.push_back([=] { memset(to, 0, bytes); });
}

void copy_async_arrive(unsigned bar) {
    Thread& owner = *thread;
    owner.landing.push_back(std::move(owner.gathers));
    owner.gathers.clear();
    const unsigned count = owner.landed + owner.landing.size();
    copy_later([&owner, count, bar] {
        land(owner, count);
        mbarrier_arrive(bar, 0);
    });
}

void copy_async_wait() {
    land(*thread, thread->landed + thread->landing.size());
    for (const auto& copy : thread->gathers) copy();
    thread->gathers.clear();
}

// ---- bulk stores and reductions

namespace {

// `read` gives what `write` then gets.
template <class Read, class Write>
void store_later(Read read, Write write) {
    if (!thread->bulk) thread->bulk = std::make_shared<BulkGroup>();
    const std::shared_ptr<BulkGroup> group = thread->bulk;
    ++group->to_read;
    ++group->to_write;
    copy_later([=] {
        const std::vector<unsigned char> bytes = read();
        --group->to_read;
        cta->copies.push_back([=] {
            write(bytes);
            --group->to_write;
        });
    });
}

}  // namespace

void bulk_commit() {
    if (!thread->bulk) thread->bulk = std::make_shared<BulkGroup>();
    thread->bulks.push_back(std::move(thread->bulk));
    thread->bulk.reset();
}

void bulk_wait(unsigned left, bool only_reads) {
    const std::vector<std::shared_ptr<BulkGroup>> groups = thread->bulks;
    for (size_t i = 0; i + left < groups.size(); ++i) {
        const std::shared_ptr<BulkGroup> group = groups[i];
        wait([group, only_reads] { return !(only_reads ? group->to_read : group->to_write); },
             [] { return std::string("bulk copies"); });
        if (!only_reads) thread->bulks.erase(thread->bulks.begin());
    }
}

void bulk_load(unsigned dst, const void* src, unsigned bytes, unsigned bar) {
    if (dst % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(src) % 16)
        fail("bulk load: no multiples of 16");
    unsigned char* const to = shared(dst, bytes);
    copy_later([=] {
        memcpy(to, src, bytes);
        mbarrier_land(bar, bytes);
    });
}

void bulk_add_f32(float* dst, unsigned src, unsigned bytes) {
    if (src % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(dst) % 16) fail("bulk add: no multiples of 16");
    const unsigned char* const from = shared(src, bytes);
    store_later([=] { return std::vector<unsigned char>(from, from + bytes); },
                [=](const std::vector<unsigned char>& values) {
                    for (unsigned i = 0; i < bytes / 4; ++i) {
                        float one;
                        memcpy(&one, values.data() + 4 * i, 4);
                        dst[i] += one;
                    }
                });
}

// ---- TMA

namespace {

constexpr int kMostDims = 5;

// What emulator/device.py packs.
struct TensorMap {
    uint64_t address, strides[kMostDims - 1];  // bytes, of all dimensions but the first
    uint32_t dims[kMostDims];
    uint16_t box[kMostDims];
    uint8_t rank, element_bytes, swizzle_bytes;
};

struct Box {
    TensorMap map;
    unsigned char* shared;
    unsigned address;
    int first[kMostDims];
};

// Calls `element(global, shared)` for each of a box; global is null out of the tensor.
template <class Element>
void for_each(const Box& box, Element element) {
    const TensorMap& map = box.map;
    const unsigned permuted = map.swizzle_bytes ? map.swizzle_bytes / 16 - 1 : 0;
    int at[kMostDims] = {};
    for (unsigned offset = 0; at[map.rank - 1] < map.box[map.rank - 1]; offset += map.element_bytes) {
        int64_t global = 0;
        bool is_inside = true;
        for (int i = 0; i < map.rank; ++i) {
            const int64_t x = int64_t(box.first[i]) + at[i];
            is_inside &= x >= 0 && x < map.dims[i];
            global += x * (i ? static_cast<int64_t>(map.strides[i - 1]) : map.element_bytes);
        }
        const unsigned address = box.address + offset;
        const unsigned moved = address ^ (address >> 7 & permuted) << 4;
        element(is_inside ? reinterpret_cast<unsigned char*>(map.address) + global : nullptr,
                box.shared + (moved - box.address));
        for (int i = 0; i < map.rank; ++i) {
            if (++at[i] < map.box[i] || i == map.rank - 1) break;
            at[i] = 0;
        }
    }
}

}  // namespace

void tensor_copy(Transfer transfer, const void* map, unsigned address, unsigned bar, const int* c, int dims) {
    Box box;
    memcpy(&box.map, map, sizeof box.map);
    const int size = box.map.element_bytes;
    if (box.map.rank != dims)
        fail("TMA: %d coordinates for a tensor map of %d dimensions", dims, box.map.rank);
    const unsigned aligned = box.map.swizzle_bytes ? 128 : 16;
    if (address % aligned) fail("TMA: an address of shared memory that is no multiple of %u", aligned);
    unsigned bytes = size;
    for (int i = 0; i < dims; ++i) bytes *= box.map.box[i];
    box.address = address;
    box.shared = shared(address, bytes);
    memcpy(box.first, c, dims * sizeof(int));
    if (transfer == Transfer::kLoad) {
        copy_later([=] {
            for_each(box, [=](const unsigned char* from, unsigned char* to) {
                if (from)
                    memcpy(to, from, size);
                else
                    memset(to, 0, size);
            });
            mbarrier_land(bar, bytes);
        });
        return;
    }
    store_later(
        [=] {
            std::vector<unsigned char> values;
            for_each(box, [&](unsigned char*, const unsigned char* from) {
                values.insert(values.end(), from, from + size);
            });
            return values;
        },
        [=](const std::vector<unsigned char>& values) {
            const unsigned char* from = values.data();
            for_each(box, [&](unsigned char* to, unsigned char*) {
                if (to && transfer == Transfer::kStore) memcpy(to, from, size);
                if (to && transfer == Transfer::kAdd) {
                    float sum, more;
                    memcpy(&sum, to, sizeof sum);
                    memcpy(&more, from, sizeof more);
                    sum += more;
                    memcpy(to, &sum, sizeof sum);
                }
                from += size;
            });
        });
}

}  // namespace emulator
