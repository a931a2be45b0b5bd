// Holds a verify_attn against reference files, without Python. In this folder:
//
//     g++ -std=c++17 -O2 -I ../../ddtree_numba/include check_verify_attn.cpp verify_attn.cpp -o check_verify_attn
//     ./check_verify_attn ../verify_attn_*.kdtr
//
// q and the cache may be float16 or bfloat16 in a file; verify_attn gets them as float32. One line a file: its name, the
// largest absolute error of out, the relative Frobenius error of out, the largest error of lse relative to
// max(1, |lse|), "ok" or what is wrong. The exit code is 0 if all files pass, 1 if one fails or cannot be used, 2 if
// there is none.

#include "check.hpp"
#include "verify_attn.hpp"

namespace {

using check::Shape, check::get, check::require;

// What float32 arithmetic keeps on the reference files with room to spare; a wrong key or weight is far beyond.
constexpr double least_bound = 1e-5;
constexpr double lse_bound = 1e-5;

// On out: of the relative norm and, since one wrong element hardly moves a norm, of each element as a part of the
// largest. Where logits are large their own rounding decides: that of a sum of D terms, as docs/numerics.md has it.
double bound_of(const kdtr::File& file, std::int64_t head_dim) {
    const double magnitude = *get<double>(file, "logit_magnitude", {});
    const double of_logits = check::float32_eps / 2.4 * magnitude * std::sqrt(static_cast<double>(head_dim));
    return std::max(least_bound, of_logits);
}

struct Widened {
    std::vector<float> q, kv_cache;
};

// Points into the file and into `widened`. A checksum does not say that the contents make sense, so lengths and table
// entries are checked here: whatever the file holds, verify_attn may index by them.
Problem problem_of(const kdtr::File& file, Widened& widened) {
    require(check::operator_of(file) == "verify_attention", "the operator is not verify_attention");
    const Shape &q = check::shape_of(file, "q", 4), &cache = check::shape_of(file, "kv_cache", 3);
    check::shape_of(file, "tree_mask", 3);

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
    widened.q = check::get_floats(file, "q", q);
    widened.kv_cache = check::get_floats(file, "kv_cache", {cache[0], cache[1], q[3]});
    p.q = widened.q.data();
    p.kv_cache = widened.kv_cache.data();
    p.cache_seqlens = get<std::int32_t>(file, "cache_seqlens", {q[0]});
    p.tree_mask = get<std::uint32_t>(file, "tree_mask", {q[0], q[1], static_cast<std::uint64_t>(p.num_words)});
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

check::Outcome check_file(const kdtr::File& file) {
    Widened widened;
    const Problem p = problem_of(file, widened);
    const Shape& q = file.at("q").shape;
    const Shape of_out = {q[0], q[1], q[2], static_cast<std::uint64_t>(p.kv_lora_rank)}, of_lse = {q[0], q[1], q[2]};
    const float* wanted_out = get<float>(file, "out", of_out);
    const float* wanted_lse = get<float>(file, "lse", of_lse);
    std::vector<float> out = check::unwritten<float>(of_out), lse = check::unwritten<float>(of_lse);
    verify_attn(p, out.data(), lse.data());

    double max_abs = 0, largest = 0, errors = 0, squares = 0, lse_error = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
        const double wanted = wanted_out[i], error = check::difference(out[i], wanted);
        max_abs = std::max(max_abs, error);
        largest = std::max(largest, std::fabs(wanted));
        errors += error * error;
        squares += wanted * wanted;
    }
    for (std::size_t i = 0; i < lse.size(); ++i) {
        const double wanted = wanted_lse[i], error = check::difference(lse[i], wanted);
        lse_error = std::max(lse_error, error / check::lse_unit(wanted));
    }
    const double bound = bound_of(file, p.head_dim);
    const double frobenius = errors == 0 ? 0 : std::sqrt(errors / squares);

    check::Outcome outcome;
    outcome.keep("out", of_out, out.data());
    outcome.keep("lse", of_lse, lse.data());
    outcome.measured = check::digits("  max abs %.3e", max_abs) + check::digits("  rel fro %.3e", frobenius) +
                       check::digits("  lse %.3e", lse_error);
    // "<=", so that NaN fails.
    if (!(max_abs <= bound * largest)) outcome.fault("out: an element is off");
    if (!(frobenius <= bound)) outcome.fault("out: the norm is off");
    if (!(lse_error <= lse_bound)) outcome.fault("lse is off");
    return outcome;
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv, check_file); }
