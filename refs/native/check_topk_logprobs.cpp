// Holds a topk_logprobs against reference files, without Python. In this folder:
//
//     g++ -std=c++17 -O2 -I ../../ddtree_numba/include check_topk_logprobs.cpp topk_logprobs.cpp -o check_topk_logprobs
//     ./check_topk_logprobs ../topk_logprobs_*.kdtr
//
// One line a file: the largest error of logprobs in units of max(1, |lse|, |logit|) with its bound, how many of
// token_ids differ, "ok" or what is wrong. The bound is that of `python -m ddtree_numba check`.

#include "check.hpp"
#include "topk_logprobs.hpp"

namespace {

using check::get, check::Shape;

constexpr double logprob_bound = 4 * check::float32_eps;  // derived in ddtree_numba/check.py

check::Outcome check_file(const kdtr::File& file) {
    check::require(check::operator_of(file) == "topk_logprobs", "the operator is not topk_logprobs");
    const Shape& of_logits = check::shape_of(file, "logits", 3);
    const std::vector<float> logits = check::get_floats(file, "logits", of_logits);
    const std::int64_t vocabulary = static_cast<std::int64_t>(of_logits[2]), k = *get<std::int32_t>(file, "k", {});
    check::require(k >= 1 && k <= vocabulary, "k is not 1 to V");
    const Shape of_rows = {of_logits[0], of_logits[1]};
    const Shape of_best = {of_logits[0], of_logits[1], static_cast<std::uint64_t>(k)};
    const float* wanted_logprobs = get<float>(file, "logprobs", of_best);
    const std::int32_t* wanted_ids = get<std::int32_t>(file, "token_ids", of_best);
    const double* lse = get<double>(file, "lse", of_rows);
    std::vector<float> logprobs = check::unwritten<float>(of_best);
    std::vector<std::int32_t> token_ids = check::unwritten<std::int32_t>(of_best);
    topk_logprobs(logits.data(), static_cast<std::int64_t>(of_rows[0] * of_rows[1]), vocabulary, k, logprobs.data(),
                  token_ids.data());

    const auto unit = [&](std::size_t i) {
        if (!std::isfinite(wanted_logprobs[i])) return 1.0;
        const std::size_t row = i / of_best[2];
        check::require(wanted_ids[i] >= 0 && wanted_ids[i] < vocabulary, "token_ids is not 0 to V - 1");
        const double logit = logits[row * of_logits[2] + static_cast<std::size_t>(wanted_ids[i])];
        return std::max({1.0, std::fabs(lse[row]), std::fabs(logit)});
    };
    check::Outcome outcome;
    outcome.keep("logprobs", of_best, logprobs.data());
    outcome.keep("token_ids", of_best, token_ids.data());
    outcome.close("logprobs", of_best, logprobs, wanted_logprobs, unit, logprob_bound);
    outcome.equal("token_ids", of_best, token_ids, wanted_ids);
    return outcome;
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv, check_file); }
