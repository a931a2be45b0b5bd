// What check_build_tree hands to the function under test. Replace build_tree.cpp by your own definition of build_tree
// (copy to a device, launch, copy back) and link it with check_build_tree.cpp.
#pragma once

#include <cstdint>

// All arrays are contiguous, last index fastest, in host memory. docs/build_tree.md has the rule of the search.
struct Drafts {
    std::int64_t num_requests;     // B
    std::int64_t draft_positions;  // L
    std::int64_t candidates;       // K
    std::int64_t tree_budget;      // most nodes beside the root; Q is one more

    const float* logprobs;           // [B, L, K], in nats; the first entry that is not finite ends its row
    const std::int32_t* token_ids;   // [B, L, K]
    const std::int32_t* root_tokens;  // [B]
};

// Filled with values that no result has. Behind a request's last node: token, parent and links -1, depth 0, score -inf,
// an empty mask row, and the root's token in input_ids.
struct DraftTree {
    std::int32_t* tokens;        // [B, Q]
    std::int32_t* parents;       // [B, Q], the root's -1
    std::int32_t* depths;        // [B, Q], the root's 0
    double* scores;              // [B, Q], in nats, by the recurrence of the rule in double; the root's 0
    std::int32_t* num_nodes;     // [B], the root counted
    std::uint32_t* tree_mask;    // [B, Q, ceil(Q / 32)]: node i sees node j if bit j % 32 of word j / 32 is set
    std::int32_t* first_child;   // [B, Q], -1 for none
    std::int32_t* next_sibling;  // [B, Q], -1 for none
    std::int32_t* input_ids;     // [B, Q]
};

void build_tree(const Drafts& drafts, const DraftTree& tree);
