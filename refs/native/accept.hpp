// What check_accept hands to the functions under test. Replace accept.cpp by your own definitions (copy to a device,
// launch, copy back) and link them with check_accept.cpp; what you do not have yet, take from accept.cpp.
//
// All arrays are contiguous, last index fastest, in host memory. Integers that are int32 or int64 in a file come as
// int64, floats of 16 bits as float. Results come filled with values that no result has, unless they are said to be
// updated. Whatever the arrays hold, a function must end, and read and write inside them.
#pragma once

#include <cstdint>
#include <vector>

// Trees as docs/build_tree.md has them; -1 is no link.
struct Trees {
    std::int64_t num_requests;         // B
    std::int64_t num_nodes;            // Q, the room for each request's nodes
    const std::int32_t* tokens;        // [B, Q]
    const std::int32_t* first_child;   // [B, Q]
    const std::int32_t* next_sibling;  // [B, Q]
    const std::int32_t* counts;        // [B], num_nodes of a DraftTree
};

// Tokens that end a request; negative ones are none.
struct StopTokens {
    const std::int64_t* tokens;  // [B, count]
    std::int64_t count;
};

// What a walk leaves, as docs/accept.md has it. width is max_depth + 1.
struct Accepted {
    std::int64_t width;          // W
    std::int32_t* nodes;         // [B, W]
    std::int32_t* num_accepted;  // [B]
    std::int32_t* bonus_tokens;  // [B]
    std::int32_t* flags;         // [B]
    std::int32_t* tokens;        // [B, W]
};
enum Flags : std::int32_t { bad_target = 1, bad_link = 2, stopped = 4 };

void accept_greedy(const Trees& trees, const std::int64_t* target_tokens /* [B, Q] */, const StopTokens& stops,
                   const Accepted& accepted);

// The numbers that decide the draws: seeds and positions, or, where seeds is null, uniforms.
struct Randomness {
    const std::uint64_t* seeds;     // [B]
    const std::int64_t* positions;  // [B, Q] if position_a_node, else [B], the roots'; taken modulo 2**64
    bool position_a_node;
    const double* uniforms;  // [B, Q]
};

// probs [B, Q, V], the target's law behind each node, V at most 2**19.
void accept_sampled(const Trees& trees, const float* probs, std::int64_t vocabulary, const Randomness& randomness,
                    const StopTokens& stops, const Accepted& accepted);

// Of each of the rows of logits [num_rows, V] the likeliest token, of equal ones the lowest; -1 if one is NaN.
void argmax_tokens(const float* logits, std::int64_t num_rows, std::int64_t vocabulary, std::int32_t* tokens);

// logits, probs [B, Q, V]; temperature, top_k and top_p [B]. docs/target_probs.md has the rule.
void target_probs(const float* logits, std::int64_t num_requests, std::int64_t num_nodes, std::int64_t vocabulary,
                  const float* temperature, const std::int32_t* top_k, const float* top_p, float* probs);

// Row r of request b is row [b, r] of a contiguous cache, row [block_table[b, r / page_size], r % page_size] of a paged
// one.
struct Moves {
    std::int64_t num_requests;        // B
    std::int64_t width;               // W
    const std::int32_t* nodes;        // [B, W]
    const std::int32_t* num_accepted; // [B]
    std::int64_t num_pages;           // contiguous: B
    std::int64_t page_size;           // contiguous: rows a request
    const std::int32_t* block_table;  // [B, max_pages], null if contiguous
    std::int64_t max_pages;           // contiguous: 1
};
struct Layer {
    unsigned char* cache;  // [num_pages, page_size, row_bytes], updated
    std::int64_t row_bytes;
};

// The accepted rows of all layers move next to the prefix, and cache_seqlens [B] grow by their numbers.
void compact_kv(const Moves& moves, const std::vector<Layer>& layers, std::int32_t* cache_seqlens);

// gathered [B, W, columns]: rows of x [B, num_nodes, columns]; zeros where nodes [B, W] holds none.
void gather_accepted(const Moves& moves, const float* x, std::int64_t num_nodes, std::int64_t columns, float* gathered);

// SGLang's arrays, by its names.
struct SglangWalk {
    std::int64_t num_requests;                 // B
    std::int64_t num_nodes;                    // Q
    std::int64_t columns;                      // S
    const std::int64_t* candidates;            // [B, Q]
    const std::int64_t* retrive_index;         // [B, Q]
    const std::int64_t* retrive_next_token;    // [B, Q]
    const std::int64_t* retrive_next_sibling;  // [B, Q]
    const std::int64_t* target_predict;        // [B, Q]
};

// predicts [B * Q], accept_index [B, S] and accept_token_num [B] are updated.
void verify_tree_greedy(const SglangWalk& walk, std::int32_t* predicts, std::int32_t* accept_index,
                        std::int32_t* accept_token_num);
