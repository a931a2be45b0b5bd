// Holds a build_tree against reference files, without Python. In this folder:
//
//     g++ -std=c++17 -O2 -I ../../ddtree_numba/include check_build_tree.cpp build_tree.cpp -o check_build_tree
//     ./check_build_tree ../build_tree_*.kdtr
//
// One line a file: of each array of the trees how many elements differ, "ok" or what is wrong. All of them are exact,
// scores to the last bit.

#include "build_tree.hpp"
#include "check.hpp"

namespace {

using check::get, check::Outcome, check::require, check::Shape;

// Room for an array of the trees, and what must stand there.
template <class T>
struct Result {
    std::string name;
    Shape shape;
    const T* wanted;
    std::vector<T> found;

    Result(const kdtr::File& file, const std::string& name, const Shape& shape)
        : name(name), shape(shape), wanted(get<T>(file, name, shape)), found(check::unwritten<T>(shape)) {}

    void compare(Outcome& outcome) const {
        outcome.keep(name, shape, found.data());
        outcome.equal(name, shape, found, wanted);
    }
};

Outcome check_file(const kdtr::File& file) {
    require(check::operator_of(file) == "build_tree", "the operator is not build_tree");
    const Shape& of_drafts = check::shape_of(file, "logprobs", 3);
    Drafts d{};
    d.num_requests = static_cast<std::int64_t>(of_drafts[0]);
    d.draft_positions = static_cast<std::int64_t>(of_drafts[1]);
    d.candidates = static_cast<std::int64_t>(of_drafts[2]);
    d.tree_budget = *get<std::int32_t>(file, "tree_budget", {});
    require(d.tree_budget >= 0, "tree_budget is negative");
    d.logprobs = get<float>(file, "logprobs", of_drafts);
    d.token_ids = get<std::int32_t>(file, "token_ids", of_drafts);
    d.root_tokens = get<std::int32_t>(file, "root_tokens", {of_drafts[0]});
    require(*get<std::int32_t>(file, "max_depth", {}) == std::min(d.draft_positions, d.tree_budget),
            "max_depth is not min(L, tree_budget)");

    const std::uint64_t num_nodes = static_cast<std::uint64_t>(d.tree_budget) + 1;
    const Shape of_nodes = {of_drafts[0], num_nodes}, of_mask = {of_drafts[0], num_nodes, (num_nodes + 31) / 32};
    Result<std::int32_t> tokens(file, "tokens", of_nodes), parents(file, "parents", of_nodes);
    Result<std::int32_t> depths(file, "depths", of_nodes), counts(file, "num_nodes", {of_drafts[0]});
    Result<std::int32_t> first_child(file, "first_child", of_nodes), next_sibling(file, "next_sibling", of_nodes);
    Result<std::int32_t> input_ids(file, "input_ids", of_nodes);
    Result<double> scores(file, "scores", of_nodes);
    Result<std::uint32_t> tree_mask(file, "tree_mask", of_mask);
    build_tree(d, {tokens.found.data(), parents.found.data(), depths.found.data(), scores.found.data(),
                   counts.found.data(), tree_mask.found.data(), first_child.found.data(), next_sibling.found.data(),
                   input_ids.found.data()});

    Outcome outcome;
    tokens.compare(outcome);
    parents.compare(outcome);
    depths.compare(outcome);
    scores.compare(outcome);
    counts.compare(outcome);
    tree_mask.compare(outcome);
    first_child.compare(outcome);
    next_sibling.compare(outcome);
    input_ids.compare(outcome);
    return outcome;
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv, check_file); }
