// build_tree on the host, as plainly as possible: the best entry of a set, one after the other.

#include "build_tree.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>
#include <vector>

namespace {

using Ranks = std::vector<std::int64_t>;

// A path of the frontier. Of equal scores the lexicographically smaller ranks go first; a vector compares so.
struct Entry {
    double score;
    Ranks ranks;
    std::int32_t parent;

    bool operator<(const Entry& other) const {
        return score != other.score ? score > other.score : ranks < other.ranks;
    }
};

// The arrays of one request.
struct Rows {
    std::int32_t *tokens, *parents, *depths;
    double* scores;
    std::uint32_t* tree_mask;
    std::int32_t *first_child, *next_sibling, *input_ids;
};

// Takes the best paths and writes tokens, parents, depths and scores of the nodes behind the root; how many there are,
// the root counted.
std::int64_t search(const Drafts& d, const float* logprobs, const std::int32_t* token_ids, const Rows& rows) {
    const auto has = [&](std::int64_t position, std::int64_t rank) {
        if (position >= d.draft_positions || rank >= d.candidates) return false;
        const float* row = logprobs + position * d.candidates;
        return std::all_of(row, row + rank + 1, [](float x) { return std::isfinite(x); });
    };
    const auto logprob = [&](std::int64_t position, std::int64_t rank) {
        return static_cast<double>(logprobs[position * d.candidates + rank]);
    };
    std::set<Entry> frontier;
    if (has(0, 0)) frontier.insert({logprob(0, 0), {0}, 0});
    std::int64_t count = 1;
    while (count <= d.tree_budget && !frontier.empty()) {
        const Entry best = std::move(frontier.extract(frontier.begin()).value());
        const auto depth = static_cast<std::int64_t>(best.ranks.size());
        const std::int64_t rank = best.ranks.back();
        rows.tokens[count] = token_ids[(depth - 1) * d.candidates + rank];
        rows.parents[count] = best.parent;
        rows.depths[count] = static_cast<std::int32_t>(depth);
        rows.scores[count] = best.score;
        // The order of these two operations decides the last bit of a score, and with it ties.
        if (has(depth - 1, rank + 1)) {
            Ranks sibling = best.ranks;
            ++sibling.back();
            const double score = best.score - logprob(depth - 1, rank) + logprob(depth - 1, rank + 1);
            frontier.insert({score, std::move(sibling), best.parent});
        }
        if (has(depth, 0)) {
            Ranks child = best.ranks;
            child.push_back(0);
            frontier.insert({best.score + logprob(depth, 0), std::move(child), static_cast<std::int32_t>(count)});
        }
        ++count;
    }
    return count;
}

}  // namespace

void build_tree(const Drafts& d, const DraftTree& tree) {
    const std::int64_t num_nodes = d.tree_budget + 1, words = (num_nodes + 31) / 32;
    for (std::int64_t b = 0; b < d.num_requests; ++b) {
        const std::int64_t place = b * num_nodes, candidate = b * d.draft_positions * d.candidates;
        const Rows rows = {tree.tokens + place,           tree.parents + place,      tree.depths + place,
                           tree.scores + place,           tree.tree_mask + place * words, tree.first_child + place,
                           tree.next_sibling + place,     tree.input_ids + place};
        std::fill_n(rows.tokens, num_nodes, -1);
        std::fill_n(rows.parents, num_nodes, -1);
        std::fill_n(rows.depths, num_nodes, 0);
        std::fill_n(rows.scores, num_nodes, -std::numeric_limits<double>::infinity());
        std::fill_n(rows.tree_mask, num_nodes * words, 0u);
        std::fill_n(rows.first_child, num_nodes, -1);
        std::fill_n(rows.next_sibling, num_nodes, -1);
        std::fill_n(rows.input_ids, num_nodes, d.root_tokens[b]);

        rows.tokens[0] = d.root_tokens[b];
        rows.scores[0] = 0;
        const std::int64_t count = search(d, d.logprobs + candidate, d.token_ids + candidate, rows);
        tree.num_nodes[b] = static_cast<std::int32_t>(count);

        std::vector<std::int64_t> youngest(static_cast<std::size_t>(count), -1);  // child of each node so far
        for (std::int64_t i = 0; i < count; ++i) {
            rows.input_ids[i] = rows.tokens[i];
            rows.tree_mask[i * words + i / 32] |= 1u << (i % 32);
            if (i == 0) continue;
            // A parent comes before its children, so that its row is complete.
            const std::int64_t parent = rows.parents[i];
            for (std::int64_t w = 0; w < words; ++w)
                rows.tree_mask[i * words + w] |= rows.tree_mask[parent * words + w];
            std::int64_t& elder = youngest[static_cast<std::size_t>(parent)];
            (elder == -1 ? rows.first_child[parent] : rows.next_sibling[elder]) = static_cast<std::int32_t>(i);
            elder = i;
        }
    }
}
