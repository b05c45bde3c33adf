#include "torch/description.h"

#include <charconv>
#include <cstring>

namespace hop::torch {

bool Words::next() {
    while (!rest_.empty() && rest_.front() == ' ') rest_.remove_prefix(1);
    word = rest_.substr(0, rest_.find(' '));
    rest_.remove_prefix(word.size());
    const size_t equals = word.find('=');
    name = word.substr(0, equals);
    value = equals == word.npos ? std::string_view() : word.substr(equals + 1);
    return !word.empty();
}

void Words::refuse() const {
    fail("'" + std::string(word) + "' is not understood in '" + std::string(text_) + "'");
}

int64_t Words::integer(std::string_view digits) const {
    int64_t found = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), found);
    if (error != std::errc() || end != digits.data() + digits.size()) refuse();
    return found;
}

int32_t Words::integer(int32_t low, int32_t high) const {
    const int64_t found = integer(value);
    if (found < low || found > high) refuse();
    return static_cast<int32_t>(found);
}

float Words::real(std::string_view digits) const {
    const int64_t whole = integer(digits);
    if (whole < 0 || whole > UINT32_MAX) refuse();
    const auto bits = static_cast<uint32_t>(whole);
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}

Sizes Words::list(int64_t at) const {
    Sizes found;
    std::string_view rest = value.substr(static_cast<size_t>(at));
    while (true) {
        const size_t comma = rest.find(',');
        found.push_back(integer(rest.substr(0, comma)));
        if (found.back() < -1 || found.back() > int64_t(1) << 31) refuse();
        if (comma == rest.npos) return found;
        rest.remove_prefix(comma + 1);
    }
}

std::vector<float> Words::reals(size_t most) const {
    std::vector<float> found;
    if (value.empty()) return found;
    std::string_view rest = value;
    while (found.size() < most) {
        const size_t comma = rest.find(',');
        found.push_back(real(rest.substr(0, comma)));
        if (comma == rest.npos) return found;
        rest.remove_prefix(comma + 1);
    }
    refuse();
}

Sizes Words::block(int64_t at) const {
    Sizes found = list(at);
    for (const int64_t size : found)
        if (size == 0) refuse();
    return found;
}

int Words::one_of(std::string_view word, const std::string_view* names, int count) const {
    for (int i = 0; i < count; ++i)
        if (!names[i].empty() && names[i] == word) return i;
    refuse();
}

}  // namespace hop::torch
