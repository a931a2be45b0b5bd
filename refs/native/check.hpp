// What the check programs of this folder share: a file's tensors as the implementations take them, the comparison of
// what they return, one line a file, the exit code. docs/native.md says how to put another implementation to the test.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "kdtr.hpp"

namespace check {

using Shape = std::vector<std::uint64_t>;

constexpr double float32_eps = 0x1p-23;  // the spacing of float32 at 1

// ---- what a file holds ----------------------------------------------------------------------------------------------

inline void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

// The operator that a file is for.
inline std::string operator_of(const kdtr::File& file) {
    const kdtr::Tensor& op = file.at("operator");
    const std::uint8_t* letters = op.as<std::uint8_t>();
    return std::string(letters, letters + op.size());
}

// The shape of a tensor of this rank, whose sizes an int32 can count.
inline const Shape& shape_of(const kdtr::File& file, const std::string& name, std::size_t rank) {
    const Shape& shape = file.at(name).shape;
    require(shape.size() == rank, "tensor '" + name + "' has another rank");
    for (std::uint64_t size : shape)
        require(size >= 1 && size < 1u << 31, "tensor '" + name + "' has a size of 0 or beyond 2**31 - 1");
    return shape;
}

inline const kdtr::Tensor& tensor(const kdtr::File& file, const std::string& name, const Shape& shape) {
    const kdtr::Tensor& found = file.at(name);
    require(found.shape == shape, "tensor '" + name + "' has another shape than the others demand");
    return found;
}

// The elements, in the file's memory.
template <class T>
const T* get(const kdtr::File& file, const std::string& name, const Shape& shape) {
    return tensor(file, name, shape).as<T>();
}

inline float widened(kdtr::Bfloat16 half) {
    const std::uint32_t bits = std::uint32_t{half.bits} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float widened(kdtr::Float16 half) {
    const int exponent = half.bits >> 10 & 31, fraction = half.bits & 1023;
    const int significand = exponent == 0 ? fraction : fraction + 1024;
    float value = std::ldexp(static_cast<float>(significand), std::max(exponent, 1) - 25);
    if (exponent == 31)
        value = fraction == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    return half.bits >> 15 != 0 ? -value : value;
}

// A copy as T, exact, of a tensor whose dtype is First or any of Others.
template <class T, class First, class... Others>
std::vector<T> get_as(const kdtr::File& file, const std::string& name, const Shape& shape) {
    const kdtr::Tensor& found = tensor(file, name, shape);
    std::vector<T> values(found.size());
    bool known = false;
    const auto copy_if = [&](auto one) {
        using Source = decltype(one);
        if (known || found.dtype != kdtr::detail::DtypeOf<Source>::value) return;
        known = true;
        const Source* elements = found.as<Source>();
        for (std::size_t i = 0; i < values.size(); ++i) {
            if constexpr (std::is_arithmetic_v<Source>)
                values[i] = static_cast<T>(elements[i]);
            else
                values[i] = widened(elements[i]);
        }
    };
    copy_if(First{});
    (copy_if(Others{}), ...);
    if (!known) found.as<First>();  // throws, and says what the dtype is
    return values;
}

inline std::vector<float> get_floats(const kdtr::File& file, const std::string& name, const Shape& shape) {
    return get_as<float, float, kdtr::Float16, kdtr::Bfloat16>(file, name, shape);
}

inline std::vector<std::int64_t> get_integers(const kdtr::File& file, const std::string& name, const Shape& shape) {
    return get_as<std::int64_t, std::int32_t, std::int64_t>(file, name, shape);
}

// Room for a result, of values that no result has: what is never written must show.
template <class T>
std::vector<T> unwritten(const Shape& shape) {
    std::size_t count = 1;
    for (std::uint64_t size : shape) count *= size;
    if constexpr (std::is_floating_point_v<T>)
        return std::vector<T>(count, std::numeric_limits<T>::quiet_NaN());
    else
        return std::vector<T>(count, std::numeric_limits<T>::max());
}

// ---- comparison -----------------------------------------------------------------------------------------------------

// Infinity where one is NaN, or they are not the same infinity: a comparison with a bound then fails, and no finite
// error hides it.
inline double difference(double found, double wanted) {
    if (found == wanted) return 0;
    const double gap = std::fabs(found - wanted);
    return std::isnan(gap) ? std::numeric_limits<double>::infinity() : gap;
}

inline std::string digits(const char* format, double value) {
    char text[40];
    std::snprintf(text, sizeof text, format, value);
    return text;
}

template <class T>
std::string shown(T value) {
    if constexpr (!std::is_floating_point_v<T>)
        return std::to_string(value);
    else if (std::isnan(value))
        return "nan";  // whatever its sign
    else
        return digits(std::is_same_v<T, float> ? "%.9g" : "%.17g", static_cast<double>(value));
}

// Coordinates of an element: "[1, 0, 7]".
inline std::string place(std::size_t element, const Shape& shape) {
    std::string text;
    for (std::size_t axis = shape.size(); axis-- > 0; element /= shape[axis])
        text = std::to_string(element % shape[axis]) + (text.empty() ? "" : ", ") + text;
    return "[" + text + "]";
}

// What is said of a file: of each result how far off it is, and, if that is too far, which element is the worst.
struct Outcome {
    std::string measured;
    std::string faults;                 // empty if the file passes
    std::vector<kdtr::Tensor> results;  // as the implementation returned them, for --save

    void fault(const std::string& what) { faults += (faults.empty() ? "" : ", ") + what; }

    template <class T>
    void fault_at(const std::string& name, const Shape& shape, std::size_t element, T found, T wanted) {
        fault(name + place(element, shape) + " is " + shown(found) + ", not " + shown(wanted));
    }

    template <class T>
    void keep(const std::string& name, const Shape& shape, const T* found) {
        results.push_back(kdtr::Tensor::of<T>(name, shape, found));
    }

    // Every element must be equal (of floats 0.0 and -0.0 are, a NaN is not), or those that `counts(i)` holds of. The
    // first one that is not is told.
    template <class T, class Counts>
    void equal_where(const std::string& name, const Shape& shape, const T* found, const T* wanted, std::size_t count,
                     Counts counts) {
        std::size_t compared = 0, differ = 0, first = 0;
        for (std::size_t i = 0; i < count; ++i) {
            if (!counts(i)) continue;
            ++compared;
            if (found[i] == wanted[i]) continue;
            if (differ++ == 0) first = i;
        }
        const std::string ratio = std::to_string(differ) + " of " + std::to_string(compared) + " differ";
        measured += "  " + name + " " + (differ == 0 ? "equal" : ratio);
        if (differ != 0) fault_at(name, shape, first, found[first], wanted[first]);
    }

    template <class T>
    void equal(const std::string& name, const Shape& shape, const std::vector<T>& found, const T* wanted) {
        equal_where(name, shape, found.data(), wanted, found.size(), [](std::size_t) { return true; });
    }

    // |found / unit - wanted / unit| must not be above the bound. The element that is worst is told.
    template <class Unit>
    void close(const std::string& name, const Shape& shape, const std::vector<float>& found, const float* wanted,
               Unit unit_of, double bound) {
        double error = 0;
        std::size_t worst = 0;
        for (std::size_t i = 0; i < found.size(); ++i) {
            const double unit = unit_of(i), one = difference(found[i] / unit, wanted[i] / unit);
            if (one > error) {
                error = one;
                worst = i;
            }
        }
        const bool passed = error <= bound;
        measured += "  " + name + digits(" %.3e", error) + (passed ? " <= " : " > ") + digits("%.3e", bound);
        if (!passed) fault_at(name, shape, worst, found[worst], wanted[worst]);
    }
};

// The unit of an error of a log-sum-exp: max(1, |lse|).
inline double lse_unit(double wanted) { return std::isfinite(wanted) ? std::max(1.0, std::fabs(wanted)) : 1.0; }

// ---- the program ----------------------------------------------------------------------------------------------------

inline void save(const std::string& folder, const std::string& path, const std::vector<kdtr::Tensor>& results) {
    namespace fs = std::filesystem;
    fs::create_directories(folder);
    const fs::path target = fs::path(folder) / fs::path(path).filename();
    require(!fs::exists(target) || !fs::equivalent(target, path), "the results would replace the file itself");
    kdtr::write(target.string(), results);
}

// Checks each file that the arguments name and prints a line for it. 0 if all pass, 1 if one fails or cannot be used,
// 2 if the program is called wrongly.
inline int run(int argc, char** argv, Outcome (*check_file)(const kdtr::File&)) {
    const bool saving = argc > 1 && std::strcmp(argv[1], "--save") == 0;
    const int first = saving ? 3 : 1;
    if (argc <= first || (!saving && std::strncmp(argv[1], "--", 2) == 0)) {
        std::fprintf(stderr, "usage: %s [--save FOLDER] FILE.kdtr ...\n", argv[0]);
        return 2;
    }
    bool passed = true;
    for (int i = first; i < argc; ++i) {
        try {
            const Outcome outcome = check_file(kdtr::read(argv[i]));
            if (saving) save(argv[2], argv[i], outcome.results);
            std::printf("%s%s  %s\n", argv[i], outcome.measured.c_str(),
                        outcome.faults.empty() ? "ok" : ("FAIL " + outcome.faults).c_str());
            passed = passed && outcome.faults.empty();
        } catch (const std::exception& error) {  // the other files still count
            std::printf("%s  FAIL %s\n", argv[i], error.what());
            passed = false;
        }
    }
    return passed ? 0 : 1;
}

}  // namespace check
