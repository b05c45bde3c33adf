// Dynamic maps, as used for optimizer states, whose thresholds are evenly spaced within each decade.
#pragma once
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

inline std::vector<float> dynamic_numbers(int bits, bool is_signed) {
    const int decades = bits - 1, first = is_signed ? 1 : 2;
    std::vector<float> found{0.0f, 1.0f};
    for (int d = 0; d < decades; ++d) {
        const int count = first << d;
        for (int i = 0; i < count; ++i) {
            const double x = (0.1 + 0.9 * (i + 0.5) / count) * std::pow(10.0, d + 1 - decades);
            found.push_back(static_cast<float>(x));
            if (is_signed) found.push_back(static_cast<float>(-x));
        }
    }
    for (size_t i = 1; i < found.size(); ++i)
        for (size_t k = i; k && found[k] < found[k - 1]; --k) std::swap(found[k], found[k - 1]);
    return found;
}

// Evenly spaced numbers, from above 0 to 1.
inline std::vector<float> even_numbers(int count) {
    std::vector<float> found;
    for (int i = 0; i < count; ++i) found.push_back(static_cast<float>(i + 1) / static_cast<float>(count));
    return found;
}

// The smallest float that is closer to `high` than to `low`.
inline float halfway(float low, float high) {
    const double middle = (static_cast<double>(low) + static_cast<double>(high)) / 2;
    float found = static_cast<float>(middle);
    while (static_cast<double>(found) <= middle) found = std::nextafterf(found, std::numeric_limits<float>::infinity());
    while (static_cast<double>(std::nextafterf(found, -1.0f)) > middle) found = std::nextafterf(found, -1.0f);
    return found;
}
