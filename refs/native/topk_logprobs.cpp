// topk_logprobs on the host, as plainly as possible: sorts a part of each row, sums in double.

#include "topk_logprobs.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

void topk_logprobs(const float* logits, std::int64_t num_rows, std::int64_t vocabulary, std::int64_t k, float* logprobs,
                   std::int32_t* token_ids) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(vocabulary));
    for (std::int64_t row = 0; row < num_rows; ++row, logits += vocabulary, logprobs += k, token_ids += k) {
        std::fill_n(logprobs, k, -std::numeric_limits<float>::infinity());
        std::fill_n(token_ids, k, -1);
        // A NaN must be found first: comparisons with it would leave the order undefined.
        if (std::any_of(logits, logits + vocabulary, [](float x) { return std::isnan(x); })) continue;
        const double peak = *std::max_element(logits, logits + vocabulary);
        if (std::isinf(peak)) continue;
        double total = 0;
        for (std::int64_t v = 0; v < vocabulary; ++v) total += std::exp(logits[v] - peak);
        const double lse = peak + std::log(total);
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](std::int32_t x, std::int32_t y) {
            return logits[x] != logits[y] ? logits[x] > logits[y] : x < y;
        });
        for (std::int64_t i = 0; i < k; ++i) {
            token_ids[i] = order[static_cast<std::size_t>(i)];
            logprobs[i] = static_cast<float>(logits[token_ids[i]] - lse);
        }
    }
}
