// Lists the tensors of KDTR files. In this folder:
//
//     g++ -std=c++17 -O2 -I ../../ddtree_numba/include kdtr_list.cpp -o kdtr_list
//     ./kdtr_list ../merge_states_*.kdtr
//
// A line for each file, then one for each tensor: name, dtype, shape, the CRC-32 of its data without padding, and
// smallest, largest and sum of its finite elements, with their number where others are there. Elements are widened to
// double and added one after the other, so that a sum has the same digits in every language. The exit code is 0 if all
// files can be read, 1 if not, 2 if there is none.

#include <algorithm>
#include <cinttypes>

#include "check.hpp"

namespace {

template <class T>
std::vector<double> elements(const kdtr::Tensor& tensor) {
    std::vector<double> values(tensor.size());
    const T* found = tensor.as<T>();
    for (std::size_t i = 0; i < values.size(); ++i) {
        if constexpr (std::is_arithmetic_v<T>)
            values[i] = static_cast<double>(found[i]);
        else
            values[i] = check::widened(found[i]);
    }
    return values;
}

std::vector<double> elements_of(const kdtr::Tensor& tensor) {
    using kdtr::Dtype;
    switch (tensor.dtype) {
        case Dtype::boolean: return elements<bool>(tensor);
        case Dtype::int8: return elements<std::int8_t>(tensor);
        case Dtype::int16: return elements<std::int16_t>(tensor);
        case Dtype::int32: return elements<std::int32_t>(tensor);
        case Dtype::int64: return elements<std::int64_t>(tensor);
        case Dtype::uint8: return elements<std::uint8_t>(tensor);
        case Dtype::uint16: return elements<std::uint16_t>(tensor);
        case Dtype::uint32: return elements<std::uint32_t>(tensor);
        case Dtype::uint64: return elements<std::uint64_t>(tensor);
        case Dtype::float16: return elements<kdtr::Float16>(tensor);
        case Dtype::bfloat16: return elements<kdtr::Bfloat16>(tensor);
        case Dtype::float32: return elements<float>(tensor);
        case Dtype::float64: return elements<double>(tensor);
    }
    throw std::logic_error("a dtype that kdtr::read lets through and this program does not know");
}

void list(const kdtr::Tensor& tensor) {
    std::string shape;
    for (std::uint64_t size : tensor.shape) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    std::printf("  %s  %s  [%s]  crc %08" PRIx32, tensor.name.c_str(),
                kdtr::detail::info(static_cast<std::uint32_t>(tensor.dtype))->name, shape.c_str(),
                kdtr::detail::crc32(tensor.data.data(), tensor.data.size()));
    double smallest = 0, largest = 0, sum = 0;
    std::size_t finite = 0;
    for (double value : elements_of(tensor)) {
        if (!std::isfinite(value)) continue;
        smallest = finite == 0 ? value : std::min(smallest, value);
        largest = finite == 0 ? value : std::max(largest, value);
        sum += value;
        ++finite;
    }
    // Adding 0 makes -0 a 0: which of the two is the smallest would depend on their order.
    if (finite > 0) std::printf("  min %.17g  max %.17g  sum %.17g", smallest + 0.0, largest + 0.0, sum);
    if (finite < tensor.size()) std::printf("  finite %zu of %zu", finite, tensor.size());
    std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: %s FILE.kdtr ...\n", argv[0]);
        return 2;
    }
    bool readable = true;
    for (int i = 1; i < argc; ++i) {
        try {
            const kdtr::File file = kdtr::read(argv[i]);
            std::printf("%s\n", argv[i]);
            for (const kdtr::Tensor& tensor : file.tensors) list(tensor);
        } catch (const std::exception& error) {  // the other files still count
            std::printf("%s  FAIL %s\n", argv[i], error.what());
            readable = false;
        }
    }
    return readable ? 0 : 1;
}
