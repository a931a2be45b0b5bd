// Holds the functions of tree_encodings.hpp against reference files, without Python. In this folder:
//
//     g++ -std=c++17 -O2 -I ../../ddtree_numba/include {check_,}tree_encodings.cpp -o check_tree_encodings
//     ./check_tree_encodings ../tree_encodings_*.kdtr
//
// One line a file: of each encoding how many elements differ, "ok" or what is wrong. All of them are exact. The ways
// back, from an encoding to parents or a mask, are not checked, nor what relabel does to other arrays than parents.

#include "check.hpp"
#include "tree_encodings.hpp"

namespace {

using check::get, check::Outcome, check::require, check::Shape, check::unwritten;

// Whatever the file holds, parents are those of trees, and depths and lengths are in their bounds.
TreeBatch trees_of(const kdtr::File& file) {
    const Shape& shape = check::shape_of(file, "parents", 2);
    TreeBatch t{};
    t.num_requests = static_cast<std::int64_t>(shape[0]);
    t.num_nodes = static_cast<std::int64_t>(shape[1]);
    t.max_depth = *get<std::int32_t>(file, "max_depth", {});
    t.parents = get<std::int32_t>(file, "parents", shape);
    t.counts = get<std::int32_t>(file, "num_nodes", {shape[0]});
    t.cache_seqlens = get<std::int32_t>(file, "cache_seqlens", {shape[0]});
    std::vector<std::int64_t> depths(shape[1]);
    for (std::int64_t b = 0; b < t.num_requests; ++b) {
        require(t.counts[b] >= 1 && t.counts[b] <= t.num_nodes, "num_nodes is not 1 to Q");
        require(t.cache_seqlens[b] >= 0 && t.cache_seqlens[b] < 1 << 30, "cache_seqlens is not 0 to 2**30");
        for (std::int64_t i = 0; i < t.num_nodes; ++i) {
            const std::int64_t parent = t.parents[b * t.num_nodes + i];
            const bool hangs = i >= 1 && i < t.counts[b];
            require(hangs ? parent >= 0 && parent < i : parent == -1, "parents are not those of a tree");
            std::int64_t& depth = depths[static_cast<std::size_t>(i)];
            depth = hangs ? depths[static_cast<std::size_t>(parent)] + 1 : 0;
            require(depth <= t.max_depth, "a node is deeper than max_depth");
        }
    }
    return t;
}

// Room for an encoding, and what must stand there. Bools are bytes.
template <class T>
struct Result {
    std::string name;
    Shape shape;
    std::vector<T> wanted, found;

    template <class First, class... Others>
    static Result of(const kdtr::File& file, const std::string& name, const Shape& shape) {
        return {name, shape, check::get_as<T, First, Others...>(file, name, shape), unwritten<T>(shape)};
    }
    void compare(Outcome& outcome) const {
        outcome.keep(name, shape, found.data());
        outcome.equal(name, shape, found, wanted.data());
    }
};

Outcome check_file(const kdtr::File& file) {
    require(check::operator_of(file) == "tree_encodings", "the operator is not tree_encodings");
    const TreeBatch t = trees_of(file);
    const Shape& of_nodes = file.at("parents").shape;
    const std::uint64_t num_requests = of_nodes[0], num_nodes = of_nodes[1], words = (num_nodes + 31) / 32;
    const std::uint64_t width = static_cast<std::uint64_t>(t.max_depth) + 1;
    std::uint64_t full = 0;
    for (std::uint64_t b = 0; b < num_requests; ++b)
        full += num_nodes * (static_cast<std::uint64_t>(t.cache_seqlens[b]) + num_nodes);

    using Ints = Result<std::int32_t>;
    using Longs = Result<std::int64_t>;
    const auto ints = [&](const char* name, const Shape& shape) { return Ints::of<std::int32_t>(file, name, shape); };
    const auto longs = [&](const char* name) { return Longs::of<std::int64_t>(file, name, of_nodes); };
    Ints depths = ints("depths", of_nodes), positions = ints("positions", of_nodes);
    Ints first_child = ints("first_child", of_nodes), next_sibling = ints("next_sibling", of_nodes);
    Ints paths = ints("retrieve_indices", {num_requests, std::max<std::uint64_t>(num_nodes - 1, 1), width});
    Longs index = longs("retrieve_index"), next_token = longs("retrieve_next_token");
    Longs sibling = longs("retrieve_next_sibling");
    auto tree_mask = Result<std::uint32_t>::of<std::uint32_t>(file, "tree_mask", {num_requests, num_nodes, words});
    auto full_mask = Result<std::uint8_t>::of<bool>(file, "full_mask", {full});
    auto qlen_only = Result<std::uint8_t>::of<bool>(file, "qlen_only_mask", {num_requests * num_nodes * num_nodes});
    auto bias = Result<float>::of<float>(file, "dense_bias", {num_requests, num_nodes, num_nodes});
    Result<std::uint32_t> bitpacked{};
    if (num_nodes <= 32)
        bitpacked = Result<std::uint32_t>::of<std::uint32_t, std::uint16_t, std::uint8_t>(
            file, "bitpacked_mask", {num_requests * num_nodes});
    encode_trees(t, {depths.found.data(), first_child.found.data(), next_sibling.found.data(), tree_mask.found.data(),
                     positions.found.data(), paths.found.data(), index.found.data(), next_token.found.data(),
                     sibling.found.data(), full_mask.found.data(), qlen_only.found.data(),
                     num_nodes <= 32 ? bitpacked.found.data() : nullptr, bias.found.data()});

    Outcome outcome;
    for (const Ints& result : {depths, first_child, next_sibling, positions, paths}) result.compare(outcome);
    for (const Longs& result : {index, next_token, sibling}) result.compare(outcome);
    tree_mask.compare(outcome);
    full_mask.compare(outcome);
    qlen_only.compare(outcome);
    if (num_nodes <= 32) bitpacked.compare(outcome);
    // The same bits, as signed words.
    const std::int32_t* tensorrt = get<std::int32_t>(file, "tensorrt_mask", tree_mask.shape);
    const std::vector<std::int32_t> as_signed(tree_mask.found.begin(), tree_mask.found.end());
    outcome.keep("tensorrt_mask", tree_mask.shape, as_signed.data());
    outcome.equal("tensorrt_mask", tree_mask.shape, as_signed, tensorrt);
    bias.compare(outcome);
    const auto check_order = [&](Order order, Ints permutation, Ints parents) {
        relabel(t, order, permutation.found.data(), parents.found.data());
        permutation.compare(outcome);
        parents.compare(outcome);
    };
    check_order(Order::breadth_first, ints("breadth_first.permutation", of_nodes),
                ints("breadth_first.parents", of_nodes));
    check_order(Order::depth_first, ints("depth_first.permutation", of_nodes), ints("depth_first.parents", of_nodes));
    return outcome;
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv, check_file); }
