// Holds a verify_attn against reference files, without Python. From the root of the repository:
//
//     g++ -std=c++17 -O2 -I ddtree_numba/include refs/native/*.cpp -o check_verify_attn
//     ./check_verify_attn refs/verify_attn_*.kdtr
//
// q and the cache may be bfloat16 in a file; verify_attn gets them as float32. One line a file: its name, the largest
// absolute error of out, the relative Frobenius error of out, the largest error of lse relative to max(1, |lse|), "ok"
// or what is wrong. The exit code is 0 if all files pass, 1 if one fails or cannot be used, 2 if there is none.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "kdtr.hpp"
#include "verify_attn.hpp"

namespace {

// What float32 arithmetic keeps on the reference files with room to spare; a wrong key or weight is far beyond.
constexpr double frobenius_bound = 1e-5;
constexpr double lse_bound = 1e-5;
// One wrong element hardly moves a norm: each must be right to this part of the largest, too.
constexpr double element_bound = 1e-5;

using Shape = std::vector<std::uint64_t>;

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

template <class T>
const T* get(const kdtr::File& file, const char* name, const Shape& shape) {
    const kdtr::Tensor& tensor = file.at(name);
    require(tensor.shape == shape, std::string("tensor '") + name + "' has another shape than the others demand");
    return tensor.as<T>();
}

// As above; a bfloat16 tensor, whose elements are the upper halves of float32, is widened into `widened`.
const float* get_floats(const kdtr::File& file, const char* name, const Shape& shape, std::vector<float>& widened) {
    if (file.at(name).dtype != kdtr::Dtype::bfloat16) return get<float>(file, name, shape);
    const kdtr::Bfloat16* halves = get<kdtr::Bfloat16>(file, name, shape);
    widened.resize(file.at(name).size());
    for (std::size_t i = 0; i < widened.size(); ++i) {
        const std::uint32_t bits = std::uint32_t{halves[i].bits} << 16;
        std::memcpy(&widened[i], &bits, sizeof bits);
    }
    return widened.data();
}

struct Widened {
    std::vector<float> q, kv_cache;
};

// Points into the file and into `widened`. A checksum does not say that the contents make sense, so lengths and table
// entries are checked here: whatever the file holds, verify_attn may index by them.
Problem problem_of(const kdtr::File& file, Widened& widened) {
    const kdtr::Tensor& op = file.at("operator");
    const unsigned char* letters = op.as<std::uint8_t>();
    require(std::string(letters, letters + op.size()) == "verify_attention", "the operator is not verify_attention");
    const Shape &q = file.at("q").shape, &cache = file.at("kv_cache").shape, &mask = file.at("tree_mask").shape;
    require(q.size() == 4 && cache.size() == 3 && mask.size() == 3, "q, kv_cache or tree_mask has another rank");
    for (const Shape* shape : {&q, &cache, &mask})
        for (std::uint64_t size : *shape) require(size >= 1 && size < 1u << 31, "a size is 0 or beyond 2**31 - 1");

    Problem p{};
    p.num_requests = static_cast<std::int64_t>(q[0]);
    p.num_nodes = static_cast<std::int64_t>(q[1]);
    p.num_heads = static_cast<std::int64_t>(q[2]);
    p.head_dim = static_cast<std::int64_t>(q[3]);
    p.page_size = static_cast<std::int64_t>(cache[1]);
    p.num_words = (p.num_nodes + 31) / 32;
    p.kv_lora_rank = *get<std::int32_t>(file, "kv_lora_rank", {});
    p.sm_scale = *get<double>(file, "sm_scale", {});
    require(p.kv_lora_rank >= 1 && p.kv_lora_rank <= p.head_dim, "kv_lora_rank is not 1 to D");
    p.q = get_floats(file, "q", q, widened.q);
    p.cache_seqlens = get<std::int32_t>(file, "cache_seqlens", {q[0]});
    p.tree_mask = get<std::uint32_t>(file, "tree_mask", {q[0], q[1], static_cast<std::uint64_t>(p.num_words)});
    p.kv_cache = get_floats(file, "kv_cache", {cache[0], cache[1], q[3]}, widened.kv_cache);
    p.max_pages = 1;
    if (const kdtr::Tensor* table = file.find("block_table")) {
        require(table->shape.size() == 2 && table->size() > 0, "block_table has another rank, or is empty");
        p.block_table = get<std::int32_t>(file, "block_table", {q[0], table->shape[1]});
        p.max_pages = static_cast<std::int64_t>(table->shape[1]);
    } else {
        require(cache[0] == q[0], "q and kv_cache differ in the number of requests");
    }
    for (std::int64_t b = 0; b < p.num_requests; ++b) {
        const std::int64_t length = p.cache_seqlens[b];
        const std::int64_t pages = (length + p.num_nodes + p.page_size - 1) / p.page_size;
        require(length >= 0 && pages <= p.max_pages, "the cache has no room for prefix and tree");
        for (std::int64_t k = 0; p.block_table != nullptr && k < pages; ++k) {
            const std::int64_t page = p.block_table[b * p.max_pages + k];
            require(page >= 0 && page < static_cast<std::int64_t>(cache[0]), "a table entry in use is out of range");
        }
    }
    return p;
}

// Infinity where one is NaN, or they are not the same infinity: a comparison with a bound then fails.
double difference(double found, double wanted) {
    if (found == wanted) return 0;
    const double gap = std::fabs(found - wanted);
    return std::isnan(gap) ? std::numeric_limits<double>::infinity() : gap;
}

bool check(const std::string& path) {
    const kdtr::File file = kdtr::read(path);
    Widened widened;
    const Problem p = problem_of(file, widened);
    const Shape& q = file.at("q").shape;
    const float* wanted_out = get<float>(file, "out", {q[0], q[1], q[2], static_cast<std::uint64_t>(p.kv_lora_rank)});
    const float* wanted_lse = get<float>(file, "lse", {q[0], q[1], q[2]});
    // NaN, so that an element that is never written cannot pass.
    std::vector<float> out(file.at("out").size(), std::numeric_limits<float>::quiet_NaN());
    std::vector<float> lse(file.at("lse").size(), std::numeric_limits<float>::quiet_NaN());
    verify_attn(p, out.data(), lse.data());

    double max_abs = 0, largest = 0, errors = 0, squares = 0, lse_error = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
        const double wanted = wanted_out[i], error = difference(out[i], wanted);
        max_abs = std::max(max_abs, error);
        largest = std::max(largest, std::fabs(wanted));
        errors += error * error;
        squares += wanted * wanted;
    }
    for (std::size_t i = 0; i < lse.size(); ++i) {
        const double wanted = wanted_lse[i], error = difference(lse[i], wanted);
        lse_error = std::max(lse_error, std::isinf(wanted) ? error : error / std::max(1.0, std::fabs(wanted)));
    }
    const double frobenius = errors == 0 ? 0 : std::sqrt(errors / squares);
    // "<=", so that NaN fails.
    std::string verdict;
    if (!(max_abs <= element_bound * largest)) verdict += ", out: an element is off";
    if (!(frobenius <= frobenius_bound)) verdict += ", out: the norm is off";
    if (!(lse_error <= lse_bound)) verdict += ", lse is off";
    std::printf("%s  max abs %.3e  rel fro %.3e  lse %.3e  %s\n", path.c_str(), max_abs, frobenius, lse_error,
                verdict.empty() ? "ok" : ("FAIL" + verdict.substr(1)).c_str());
    return verdict.empty();
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: %s FILE.kdtr ...\n", argv[0]);
        return 2;
    }
    bool passed = true;
    for (int i = 1; i < argc; ++i) {
        try {
            passed = check(argv[i]) && passed;
        } catch (const std::exception& error) {  // the other files still count
            std::printf("%s  FAIL %s\n", argv[i], error.what());
            passed = false;
        }
    }
    return passed ? 0 : 1;
}
