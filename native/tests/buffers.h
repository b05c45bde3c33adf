// Buffers of exactly the requested size, so that reads and writes outside of them are detected.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>

// Random choices, the same on every platform for the same seed.
class Chance {
public:
    explicit Chance(uint64_t seed) : state_(seed) {}
    uint64_t bits() { return state_(); }
    int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
    int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
    bool once_in(int64_t n) { return below(n) == 0; }
    double real() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
    template <class T>
    T one_of(std::initializer_list<T> values) {
        return values.begin()[below(static_cast<int64_t>(values.size()))];
    }

private:
    std::mt19937_64 state_;
};

// The sanitizer detects plain loads and stores outside an allocation; the page after (or before) it detects accesses by
// any instruction.
class Buffer {
public:
    Buffer() = default;
    Buffer(Chance& chance, int64_t bytes, int64_t unit) : bytes_(static_cast<size_t>(bytes)) {
        const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), inside = (bytes_ + page - 1) / page * page;
        const int64_t kind = chance.below(4);
        if (kind == 0) {
            const auto offset = static_cast<size_t>(chance.below(8) * unit);
            base_ = std::malloc(offset + bytes_ + (offset + bytes_ == 0));
            data_ = static_cast<char*>(base_) + offset;
            return;
        }
        mapped_ = inside + 2 * page;
        base_ = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) std::abort();
        if (inside && mprotect(static_cast<char*>(base_) + page, inside, PROT_READ | PROT_WRITE) != 0)
            std::abort();
        data_ = static_cast<char*>(base_) + page + (kind == 1 ? 0 : inside - bytes_);
    }
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Buffer() {
        if (mapped_) munmap(base_, mapped_);
        else std::free(base_);
    }

    template <class T = char>
    T* data() const {
        return reinterpret_cast<T*>(data_);
    }
    size_t bytes() const { return bytes_; }
    void fill(int byte) const {
        if (bytes_) std::memset(data_, byte, bytes_);
    }

private:
    void swap(Buffer& other) {
        std::swap(base_, other.base_), std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_), std::swap(mapped_, other.mapped_);
    }

    void* base_ = nullptr;
    char* data_ = nullptr;
    size_t bytes_ = 0, mapped_ = 0;
};
