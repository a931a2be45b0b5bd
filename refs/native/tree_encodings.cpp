// Encodings of trees on the host, as plainly as possible: all are read off the path from the root to each node.

#include "tree_encodings.hpp"

#include <algorithm>
#include <limits>
#include <vector>

namespace {

using Path = std::vector<std::int32_t>;

// The nodes from the root to each node of request b, itself included.
std::vector<Path> paths_of(const TreeBatch& t, std::int64_t b) {
    std::vector<Path> paths = {{0}};
    for (std::int32_t i = 1; i < t.counts[b]; ++i) {
        paths.push_back(paths[static_cast<std::size_t>(t.parents[b * t.num_nodes + i])]);
        paths.back().push_back(i);
    }
    return paths;
}

}  // namespace

void encode_trees(const TreeBatch& t, const Encodings& e) {
    const std::int64_t num_nodes = t.num_nodes, words = (num_nodes + 31) / 32, width = t.max_depth + 1;
    std::int32_t* leaf_path = e.retrieve_indices;
    std::uint8_t* full_row = e.full_mask;
    for (std::int64_t b = 0; b < t.num_requests; ++b) {
        const std::vector<Path> paths = paths_of(t, b);
        const auto count = static_cast<std::int64_t>(paths.size());
        const std::int64_t row = b * num_nodes, length = t.cache_seqlens[b];
        std::fill_n(e.first_child + row, num_nodes, -1);
        std::fill_n(e.next_sibling + row, num_nodes, -1);
        std::vector<std::int64_t> youngest(paths.size(), -1);  // child of each node so far
        for (std::int32_t i = 1; i < count; ++i) {
            const std::int64_t parent = t.parents[row + i];
            std::int64_t& elder = youngest[static_cast<std::size_t>(parent)];
            (elder == -1 ? e.first_child[row + parent] : e.next_sibling[row + elder]) = i;
            elder = i;
        }

        std::int32_t* const end = leaf_path + std::max<std::int64_t>(num_nodes - 1, 1) * width;
        std::fill(leaf_path, end, -1);
        for (std::int64_t i = 0; i < count; ++i) {
            if (youngest[static_cast<std::size_t>(i)] != -1) continue;
            std::copy(paths[static_cast<std::size_t>(i)].begin(), paths[static_cast<std::size_t>(i)].end(), leaf_path);
            leaf_path += width;
        }
        leaf_path = end;

        for (std::int64_t i = 0; i < num_nodes; ++i, full_row += length + num_nodes) {
            const Path path = i < count ? paths[static_cast<std::size_t>(i)] : Path{};
            e.depths[row + i] = path.empty() ? 0 : static_cast<std::int32_t>(path.size()) - 1;
            e.positions[row + i] = static_cast<std::int32_t>(length) + e.depths[row + i];
            e.retrieve_index[row + i] = row + i;
            e.retrieve_next_token[row + i] = e.first_child[row + i];
            e.retrieve_next_sibling[row + i] = e.next_sibling[row + i];
            std::uint32_t* mask = e.tree_mask + (row + i) * words;
            std::uint8_t* seen = e.qlen_only_mask + (row + i) * num_nodes;
            float* bias = e.dense_bias + (row + i) * num_nodes;
            std::fill_n(mask, words, 0u);
            std::fill_n(seen, num_nodes, std::uint8_t{0});
            std::fill_n(bias, num_nodes, -std::numeric_limits<float>::infinity());
            for (std::int32_t j : path) {
                mask[j / 32] |= 1u << (j % 32);
                seen[j] = 1;
                bias[j] = 0;
            }
            if (e.bitpacked_mask != nullptr) e.bitpacked_mask[row + i] = mask[0];
            std::fill_n(full_row, length, std::uint8_t{1});
            std::copy_n(seen, num_nodes, full_row + length);
        }
    }
}

void relabel(const TreeBatch& t, Order order, std::int32_t* permutation, std::int32_t* parents) {
    for (std::int64_t b = 0; b < t.num_requests; ++b, permutation += t.num_nodes, parents += t.num_nodes) {
        std::vector<Path> paths = paths_of(t, b);
        // In lexicographic order a path stands before its continuations, and these before the next sibling.
        std::sort(paths.begin(), paths.end(), [&](const Path& x, const Path& y) {
            return order == Order::breadth_first && x.size() != y.size() ? x.size() < y.size() : x < y;
        });
        std::vector<std::int32_t> place(paths.size());  // of each old node
        for (std::size_t n = 0; n < paths.size(); ++n) {
            permutation[n] = paths[n].back();
            place[static_cast<std::size_t>(paths[n].back())] = static_cast<std::int32_t>(n);
            parents[n] = n == 0 ? -1 : place[static_cast<std::size_t>(paths[n][paths[n].size() - 2])];
        }
        for (auto n = static_cast<std::int64_t>(paths.size()); n < t.num_nodes; ++n) {
            permutation[n] = static_cast<std::int32_t>(n);
            parents[n] = -1;
        }
    }
}
