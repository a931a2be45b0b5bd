// What check_topk_logprobs hands to the function under test. Replace topk_logprobs.cpp by your own definition of
// topk_logprobs (copy to a device, launch, copy back) and link it with check_topk_logprobs.cpp.
#pragma once

#include <cstdint>

// logits [num_rows, V] in nats; those of 16 bits in a file come widened. logprobs, token_ids [num_rows, k], logprobs in
// nats: the k best tokens of each row, best first, of equal logits the lowest id first. A row with a NaN or a +inf, or
// of nothing but -inf, gives -inf and -1. k is 1 to V. Both come filled with values that no result has.
// docs/topk_logprobs.md has the mathematics.
void topk_logprobs(const float* logits, std::int64_t num_rows, std::int64_t vocabulary, std::int64_t k, float* logprobs,
                   std::int32_t* token_ids);
