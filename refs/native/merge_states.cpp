// merge_states on the host, as plainly as possible, in double.

#include "merge_states.hpp"

#include <cmath>
#include <limits>

void merge_states(const States& s, float* out, float* lse) {
    for (std::int64_t row = 0; row < s.num_rows; ++row) {
        const float *a = s.out_a + row * s.kv_lora_rank, *b = s.out_b + row * s.kv_lora_rank;
        const double lse_a = s.lse_a[row], lse_b = s.lse_b[row];
        // Weights of exactly 1 and 0 would not do beside an empty state: 0 * NaN is NaN.
        const bool has_a = !std::isinf(lse_a), has_b = !std::isinf(lse_b);
        if (has_a && has_b) {
            const double weight = 1 / (1 + std::exp(lse_b - lse_a));  // of a; of b what is left, without cancellation:
            const double rest = 1 / (1 + std::exp(lse_a - lse_b));
            for (std::int64_t c = 0; c < s.kv_lora_rank; ++c)
                out[row * s.kv_lora_rank + c] = static_cast<float>(weight * double(a[c]) + rest * double(b[c]));
            // The larger one is taken out, so that no exponential overflows.
            const double peak = std::fmax(lse_a, lse_b);
            lse[row] = static_cast<float>(peak + std::log1p(std::exp(-std::fabs(lse_a - lse_b))));
        } else {
            for (std::int64_t c = 0; c < s.kv_lora_rank; ++c)
                out[row * s.kv_lora_rank + c] = has_a ? a[c] : has_b ? b[c] : 0.0f;
            lse[row] = has_a ? s.lse_a[row] : has_b ? s.lse_b[row] : -std::numeric_limits<float>::infinity();
        }
    }
}
