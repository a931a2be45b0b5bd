// What check_verify_attn hands to the function under test. Replace verify_attn.cpp by your own definition of
// verify_attn (copy to a device, launch, copy back) and link it with check_verify_attn.cpp.
#pragma once

#include <cstdint>

// All arrays are contiguous, last index fastest, in host memory. docs/verify_attention.md has the mathematics.
struct Problem {
    std::int64_t num_requests;  // B
    std::int64_t num_nodes;     // Q, the root included
    std::int64_t num_heads;     // H
    std::int64_t head_dim;      // D, columns of a query and of a cache row
    std::int64_t kv_lora_rank;  // R, the first columns of a cache row, which are its value as well
    double sm_scale;

    const float* q;                     // [B, Q, H, D]
    const std::int32_t* cache_seqlens;  // [B], prefix lengths; the tree's Q rows stand right behind the prefix
    const std::uint32_t* tree_mask;     // [B, Q, num_words]: node i sees tree row j if bit j % 32 of word j / 32 is set
    std::int64_t num_words;             // ceil(Q / 32)

    // Key k of request b is row [b, k] of a contiguous cache, row [block_table[b, k / page_size], k % page_size] of a
    // paged one. Rows and table entries that no node sees may hold anything.
    const float* kv_cache;            // [B, page_size, D] if contiguous, [num_pages, page_size, D] if paged
    std::int64_t page_size;           // contiguous: rows a request
    const std::int32_t* block_table;  // [B, max_pages], null if contiguous
    std::int64_t max_pages;           // contiguous: 1
};

// out [B, Q, H, R], lse [B, Q, H] in nats. A node that sees no key gets 0 and -inf. Both come filled with NaN.
void verify_attn(const Problem& problem, float* out, float* lse);
