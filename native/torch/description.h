// Descriptions: the constants of a call, as ASCII words separated by spaces, where the first is the version of their
// grammar. A word is a name, or name=value. They are parsed once, and cached by their text; they never contain sizes.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "torch/tensor.h"

namespace hop::torch {

constexpr std::string_view kGrammar = "1";

class Words {
public:
    explicit Words(std::string_view text) : rest_(text), text_(text) {
        if (!next() || name != kGrammar)
            fail("the description must begin with " + std::string(kGrammar) + ", the version of its grammar, got '" +
                 std::string(text_) + "'");
    }
    std::string_view word, name, value;  // the word found by `next`; without a value, `name` is the whole word
    bool next();
    [[noreturn]] void refuse() const;  // raises: the word is not understood
    int64_t integer() const { return integer(value); }
    int32_t integer(int32_t low, int32_t high) const;  // raises for others
    float real() const { return real(value); }
    float real(std::string_view digits) const;  // from its bits, written as an integer
    std::string_view text() const { return text_; }
    Sizes list(int64_t at = 0) const;       // comma-separated integers from -1 to 2^31, in the value from position `at` on
    Sizes block(int64_t at = 0) const;      // the same for sizes of at least 1, or -1
    std::vector<float> reals(size_t most) const;  // comma-separated integers as in `real`
    int one_of(std::string_view word, const std::string_view* names, int count) const;

private:
    int64_t integer(std::string_view digits) const;
    std::string_view rest_, text_;
};

// Caches parsed descriptions by their text.
template <class T>
class Parsed {
public:
    std::shared_ptr<const T> operator()(const std::string& text) {
        {
            const std::lock_guard lock(mutex_);
            const auto found = known_.find(text);
            if (found != known_.end()) return found->second;
        }
        auto made = std::make_shared<const T>(text);
        const std::lock_guard lock(mutex_);
        if (known_.size() >= kMost) known_.clear();
        return known_.emplace(text, std::move(made)).first->second;
    }

private:
    static constexpr size_t kMost = 4096;
    std::mutex mutex_;  // locked for look-ups; std::shared_mutex would need glibc 2.34
    std::unordered_map<std::string, std::shared_ptr<const T>> known_;
};

}  // namespace hop::torch
