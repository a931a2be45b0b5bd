// What check_tree_encodings hands to the functions under test. Replace tree_encodings.cpp by your own definitions (copy
// to a device, launch, copy back) and link them with check_tree_encodings.cpp.
#pragma once

#include <cstdint>

// All arrays are contiguous, last index fastest, in host memory. docs/tree_encodings.md has the encodings.
struct TreeBatch {
    std::int64_t num_requests;          // B
    std::int64_t num_nodes;             // Q, the room for each request's nodes
    std::int64_t max_depth;             // bound on every depth
    const std::int32_t* parents;        // [B, Q], smaller than the node; -1 for the root and behind the last node
    const std::int32_t* counts;         // [B], nodes of each tree, at least 1
    const std::int32_t* cache_seqlens;  // [B], prefix lengths
};

// Filled with values that no result has. Masks have a byte an element, 0 or 1. Behind a tree's last node: links -1,
// depth 0, and a row that sees nothing.
struct Encodings {
    std::int32_t* depths;                 // [B, Q]
    std::int32_t* first_child;            // [B, Q], -1 for none
    std::int32_t* next_sibling;           // [B, Q], -1 for none
    std::uint32_t* tree_mask;             // [B, Q, ceil(Q / 32)]: bit j % 32 of word j / 32 if node i sees node j
    std::int32_t* positions;              // [B, Q], prefix length plus depth
    std::int32_t* retrieve_indices;       // [B, max(Q - 1, 1), max_depth + 1], the path to each leaf, -1 elsewhere
    std::int64_t* retrieve_index;         // [B, Q], b * Q + i
    std::int64_t* retrieve_next_token;    // [B, Q]
    std::int64_t* retrieve_next_sibling;  // [B, Q]
    std::uint8_t* full_mask;              // for each request Q rows of prefix and tree columns, the prefix all 1
    std::uint8_t* qlen_only_mask;         // [B, Q, Q]
    std::uint32_t* bitpacked_mask;        // [B, Q], bit j if node i sees node j; null where Q is above 32
    float* dense_bias;                    // [B, Q, Q], 0 or -inf
};

void encode_trees(const TreeBatch& trees, const Encodings& encodings);

// permutation [B, Q]: the old index of each new node, padding stays; parents [B, Q]: of the new nodes. Depth first: a
// node, then each child's subtree. Breadth first: by depth, then by the parent's new place. Children of one node stay
// as they stood.
enum class Order { breadth_first, depth_first };
void relabel(const TreeBatch& trees, Order order, std::int32_t* permutation, std::int32_t* parents);
