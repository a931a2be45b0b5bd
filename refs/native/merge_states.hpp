// What check_merge_states hands to the function under test. Replace merge_states.cpp by your own definition of
// merge_states (copy to a device, launch, copy back) and link it with check_merge_states.cpp.
#pragma once

#include <cstdint>

// Two attention states of each row, over different keys. All arrays are contiguous, last index fastest, in host memory.
// docs/merge_states.md has the mathematics.
struct States {
    std::int64_t num_rows;      // requests times nodes times heads
    std::int64_t kv_lora_rank;  // R, the columns of out

    // An lse of -inf or +inf says that the state is empty; its out may then hold anything, NaN too. Floats of 16 bits
    // in a file come widened.
    const float* out_a;  // [num_rows, R]
    const float* lse_a;  // [num_rows], in nats
    const float* out_b;
    const float* lse_b;
};

// out [num_rows, R], lse [num_rows] in nats. Beside an empty state the other one comes out as it is; two empty ones
// give 0 and -inf. Where a file's floats have 16 bits, out may be rounded to them. Both come filled with NaN.
void merge_states(const States& states, float* out, float* lse);
