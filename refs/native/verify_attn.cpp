// verify_attention on the host, as plainly as possible: two passes over the keys of each node, sums in double.

#include "verify_attn.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

const float* cache_row(const Problem& p, std::int64_t b, std::int64_t key) {
    const std::int64_t page = p.block_table == nullptr ? b : p.block_table[b * p.max_pages + key / p.page_size];
    return p.kv_cache + (page * p.page_size + key % p.page_size) * p.head_dim;
}

double dot(const float* x, const float* y, std::int64_t count) {
    // Four sums, so that an addition need not wait for the one before it.
    double sums[4] = {};
    std::int64_t c = 0;
    for (; c + 4 <= count; c += 4)
        for (int k = 0; k < 4; ++k) sums[k] += double(x[c + k]) * double(y[c + k]);
    for (; c < count; ++c) sums[0] += double(x[c]) * double(y[c]);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace

void verify_attn(const Problem& p, float* out, float* lse) {
    std::vector<const float*> rows;
    std::vector<double> weights, sums(static_cast<std::size_t>(p.kv_lora_rank));
    for (std::int64_t b = 0; b < p.num_requests; ++b) {
        const std::int64_t length = p.cache_seqlens[b];
        for (std::int64_t i = 0; i < p.num_nodes; ++i) {
            // A row that the node does not see is not read: it may hold NaN.
            rows.clear();
            for (std::int64_t key = 0; key < length; ++key) rows.push_back(cache_row(p, b, key));
            const std::uint32_t* words = p.tree_mask + (b * p.num_nodes + i) * p.num_words;
            for (std::int64_t j = 0; j < p.num_nodes; ++j)
                if ((words[j / 32] >> (j % 32) & 1u) != 0) rows.push_back(cache_row(p, b, length + j));

            for (std::int64_t h = 0; h < p.num_heads; ++h, out += p.kv_lora_rank, ++lse) {
                if (rows.empty()) {
                    std::fill_n(out, p.kv_lora_rank, 0.0f);
                    *lse = -std::numeric_limits<float>::infinity();
                    continue;
                }
                const float* query = p.q + ((b * p.num_nodes + i) * p.num_heads + h) * p.head_dim;
                weights.clear();
                for (const float* row : rows) weights.push_back(dot(query, row, p.head_dim) * p.sm_scale);
                // The largest exponent becomes 0, so that no exponential overflows.
                const double peak = *std::max_element(weights.begin(), weights.end());
                double total = 0;
                for (double& weight : weights) total += weight = std::exp(weight - peak);

                std::fill(sums.begin(), sums.end(), 0.0);
                for (std::size_t k = 0; k < rows.size(); ++k)
                    for (std::size_t c = 0; c < sums.size(); ++c) sums[c] += weights[k] * double(rows[k][c]);
                for (std::size_t c = 0; c < sums.size(); ++c) out[c] = static_cast<float>(sums[c] / total);
                *lse = static_cast<float>(peak + std::log(total));
            }
        }
    }
}
