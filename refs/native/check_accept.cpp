// Holds the functions of accept.hpp against reference files, without Python. In this folder:
//
//     g++ -std=c++17 -O2 -I ../../ddtree_numba/include check_accept.cpp accept.cpp -o check_accept
//     ./check_accept ../{argmax_tokens,accept,target_probs,compact_kv,verify_tree_greedy}_*.kdtr
//
// Each file says which operator it is for, and docs/kdtr.md what it holds. One line a file: of each result how many
// elements differ, of probabilities the largest error with its bound, "ok" or what is wrong. All results but the
// probabilities are exact. The bound is that of `python -m ddtree_numba check`.

#include "accept.hpp"
#include "check.hpp"

namespace {

using check::get, check::Outcome, check::require, check::Shape, check::shape_of, check::unwritten;

// Of a probability p, relative to p * (1 + |a|), a being the token's exponent; derived in ddtree_numba/check.py.
constexpr double probs_bound = 4 * check::float32_eps;

std::int64_t signed_size(std::uint64_t size) { return static_cast<std::int64_t>(size); }

Trees trees_of(const kdtr::File& file) {
    const Shape& shape = shape_of(file, "tokens", 2);
    return {signed_size(shape[0]),
            signed_size(shape[1]),
            get<std::int32_t>(file, "tokens", shape),
            get<std::int32_t>(file, "first_child", shape),
            get<std::int32_t>(file, "next_sibling", shape),
            get<std::int32_t>(file, "num_nodes", {shape[0]})};
}

// [B, n], from [n] or [B, n].
std::vector<std::int64_t> stops_of(const kdtr::File& file, std::uint64_t num_requests) {
    const bool own = file.at("stop_tokens").shape.size() == 2;
    Shape shape = shape_of(file, "stop_tokens", own ? 2 : 1);
    if (own) shape[0] = num_requests;
    const std::vector<std::int64_t> given = check::get_integers(file, "stop_tokens", shape);
    std::vector<std::int64_t> stops = given;
    for (std::uint64_t b = 1; !own && b < num_requests; ++b) stops.insert(stops.end(), given.begin(), given.end());
    return stops;
}

// Runs a walk and compares what it leaves with the tensors whose names begin with `wanted_prefix`; in what is printed
// and saved, names begin with `prefix`.
template <class Walk>
void check_walk(Outcome& outcome, const kdtr::File& file, const std::string& wanted_prefix, const std::string& prefix,
                std::uint64_t num_requests, Walk walk) {
    const std::int64_t max_depth = *get<std::int32_t>(file, "max_depth", {});
    require(max_depth >= 0, "max_depth is negative");
    const Shape of_path = {num_requests, static_cast<std::uint64_t>(max_depth) + 1}, of_request = {num_requests};
    const struct {
        const char* name;
        const Shape& shape;
    } results[] = {{"nodes", of_path},
                   {"num_accepted", of_request},
                   {"bonus_tokens", of_request},
                   {"flags", of_request},
                   {"tokens", of_path}};
    std::vector<const std::int32_t*> wanted;  // before there is memory for as much: the file must hold it
    for (const auto& result : results)
        wanted.push_back(get<std::int32_t>(file, wanted_prefix + result.name, result.shape));
    std::vector<std::vector<std::int32_t>> found;
    for (const auto& result : results) found.push_back(unwritten<std::int32_t>(result.shape));
    walk(Accepted{max_depth + 1, found[0].data(), found[1].data(), found[2].data(), found[3].data(), found[4].data()});
    for (std::size_t i = 0; i < found.size(); ++i) {
        outcome.keep(prefix + results[i].name, results[i].shape, found[i].data());
        outcome.equal(prefix + results[i].name, results[i].shape, found[i], wanted[i]);
    }
}

Outcome check_greedy(const kdtr::File& file) {
    const Trees trees = trees_of(file);
    const Shape& shape = file.at("tokens").shape;
    const std::vector<std::int64_t> targets = check::get_integers(file, "target_tokens", shape);
    const std::vector<std::int64_t> stops = stops_of(file, shape[0]);
    const StopTokens stop{stops.data(), signed_size(stops.size()) / trees.num_requests};
    Outcome outcome;
    check_walk(outcome, file, "accepted.", "", shape[0],
               [&](const Accepted& accepted) { accept_greedy(trees, targets.data(), stop, accepted); });
    return outcome;
}

Outcome check_sampled(const kdtr::File& file) {
    const Trees trees = trees_of(file);
    const Shape &shape = file.at("tokens").shape, &of_probs = shape_of(file, "target_probs", 3);
    require(of_probs[2] <= 1u << 19, "target_probs has more than 2**19 tokens");
    const std::vector<float> probs = check::get_floats(file, "target_probs", {shape[0], shape[1], of_probs[2]});
    const auto seeds = check::get_as<std::uint64_t, std::int64_t, std::uint64_t>(file, "seeds", {shape[0]});
    const bool position_a_node = file.at("positions").shape.size() == 2;
    const std::vector<std::int64_t> positions =
        check::get_integers(file, "positions", position_a_node ? shape : Shape{shape[0]});
    const std::vector<double> uniforms = check::get_as<double, float, double>(file, "uniforms", shape);
    const std::vector<std::int64_t> stops = stops_of(file, shape[0]);
    const StopTokens stop{stops.data(), signed_size(stops.size()) / trees.num_requests};
    const Randomness seeded{seeds.data(), positions.data(), position_a_node, nullptr};
    const Randomness uniform{nullptr, nullptr, false, uniforms.data()};
    Outcome outcome;
    for (const Randomness& numbers : {seeded, uniform}) {
        const char* prefix = numbers.seeds != nullptr ? "seeded." : "uniform.";
        check_walk(outcome, file, prefix, prefix, shape[0], [&](const Accepted& accepted) {
            accept_sampled(trees, probs.data(), signed_size(of_probs[2]), numbers, stop, accepted);
        });
    }
    return outcome;
}

Outcome check_argmax(const kdtr::File& file) {
    const Shape& of_logits = shape_of(file, "logits", 3);
    const Shape shape = {of_logits[0], of_logits[1]};
    const std::vector<float> logits = check::get_floats(file, "logits", of_logits);
    const std::int32_t* wanted = get<std::int32_t>(file, "target_tokens", shape);
    std::vector<std::int32_t> found = unwritten<std::int32_t>(shape);
    argmax_tokens(logits.data(), signed_size(found.size()), signed_size(of_logits[2]), found.data());
    Outcome outcome;
    outcome.keep("target_tokens", shape, found.data());
    outcome.equal("target_tokens", shape, found, wanted);
    return outcome;
}

Outcome check_probs(const kdtr::File& file) {
    const Shape& shape = shape_of(file, "logits", 3);
    const std::vector<float> logits = check::get_floats(file, "logits", shape);
    const float* temperature = get<float>(file, "temperature", {shape[0]});
    const std::int32_t* top_k = get<std::int32_t>(file, "top_k", {shape[0]});
    const float *top_p = get<float>(file, "top_p", {shape[0]}), *wanted = get<float>(file, "target_probs", shape);
    std::vector<float> found = unwritten<float>(shape);
    target_probs(logits.data(), signed_size(shape[0]), signed_size(shape[1]), signed_size(shape[2]), temperature,
                 top_k, top_p, found.data());

    std::vector<double> units(found.size(), 1.0);
    std::vector<std::int32_t> found_kept(found.size()), wanted_kept(found.size());
    for (std::size_t row = 0; row < found.size(); row += shape[2]) {
        const float t = temperature[row / (shape[1] * shape[2])];
        double peak = -std::numeric_limits<double>::infinity();
        for (std::size_t i = row; i < row + shape[2]; ++i)
            if (wanted[i] > 0) peak = std::max(peak, double(logits[i]));
        for (std::size_t i = row; i < row + shape[2]; ++i) {
            found_kept[i] = found[i] > 0;
            wanted_kept[i] = wanted[i] > 0;
            if (wanted[i] > 0) units[i] = double(wanted[i]) * (1 + std::fabs((logits[i] - peak) / (t > 0 ? t : 1)));
        }
    }
    Outcome outcome;
    outcome.keep("target_probs", shape, found.data());
    outcome.close("target_probs", shape, found, wanted, [&](std::size_t i) { return units[i]; }, probs_bound);
    outcome.equal("kept", shape, found_kept, wanted_kept.data());
    return outcome;
}

Outcome check_compact(const kdtr::File& file) {
    const Shape& of_path = shape_of(file, "accepted.nodes", 2);
    const Shape of_request = {of_path[0]};
    Moves m{};
    m.num_requests = signed_size(of_path[0]);
    m.width = signed_size(of_path[1]);
    m.nodes = get<std::int32_t>(file, "accepted.nodes", of_path);
    m.num_accepted = get<std::int32_t>(file, "accepted.num_accepted", of_request);
    const Shape& of_cache = file.at("kv_cache_0").shape;
    require(of_cache.size() >= 2, "kv_cache_0 has another rank");
    const Shape rows = {of_cache[0], of_cache[1]};
    for (std::uint64_t size : rows) require(size >= 1 && size < 1u << 31, "kv_cache_0 has no rows, or too many");
    m.num_pages = signed_size(rows[0]);
    m.page_size = signed_size(rows[1]);
    m.max_pages = 1;
    if (file.find("block_table") != nullptr) {
        const Shape& of_table = shape_of(file, "block_table", 2);
        m.block_table = get<std::int32_t>(file, "block_table", {of_path[0], of_table[1]});
        m.max_pages = signed_size(of_table[1]);
    } else {
        require(rows[0] == of_path[0], "kv_cache_0 and accepted differ in the number of requests");
    }

    // Caches are copied bit for bit, so they are bytes here, whatever their dtype.
    std::vector<std::string> names;
    std::vector<std::vector<unsigned char>> caches;
    std::vector<Layer> layers;
    for (;;) {
        const std::string name = "kv_cache_" + std::to_string(names.size());
        if (file.find(name) == nullptr) break;
        const kdtr::Tensor& cache = file.at(name);
        require(cache.shape.size() >= 2 && cache.shape[0] == rows[0] && cache.shape[1] == rows[1] && cache.size() > 0,
                "tensor '" + name + "' has another shape than the others demand");
        require(check::tensor(file, "compacted." + name, cache.shape).dtype == cache.dtype,
                "tensor 'compacted." + name + "' has another dtype than the cache");
        names.push_back(name);
        caches.push_back(cache.data);
        layers.push_back({nullptr, signed_size(cache.data.size() / (rows[0] * rows[1]))});
    }
    for (std::size_t n = 0; n < layers.size(); ++n) layers[n].cache = caches[n].data();
    const std::int32_t* before = get<std::int32_t>(file, "cache_seqlens", of_request);
    std::vector<std::int32_t> lengths(before, before + of_path[0]);
    const std::int32_t* wanted_lengths = get<std::int32_t>(file, "compacted.cache_seqlens", of_request);
    const Shape& of_x = shape_of(file, "x", 3);
    const float* x = get<float>(file, "x", {of_path[0], of_x[1], of_x[2]});
    const Shape of_gathered = {of_path[0], of_path[1], of_x[2]};
    const float* wanted_gathered = get<float>(file, "gathered", of_gathered);
    std::vector<float> gathered = unwritten<float>(of_gathered);
    compact_kv(m, layers, lengths.data());
    gather_accepted(m, x, signed_size(of_x[1]), signed_size(of_x[2]), gathered.data());

    Outcome outcome;
    for (std::size_t n = 0; n < layers.size(); ++n) {
        const kdtr::Tensor& wanted = file.at("compacted." + names[n]);
        outcome.results.push_back({names[n], wanted.dtype, wanted.shape, caches[n]});
        // The last coordinate counts bytes of a row.
        outcome.equal(names[n], {rows[0], rows[1], static_cast<std::uint64_t>(layers[n].row_bytes)}, caches[n],
                      wanted.data.data());
    }
    outcome.keep("cache_seqlens", of_request, lengths.data());
    outcome.equal("cache_seqlens", of_request, lengths, wanted_lengths);
    outcome.keep("gathered", of_gathered, gathered.data());
    outcome.equal("gathered", of_gathered, gathered, wanted_gathered);
    return outcome;
}

Outcome check_sglang(const kdtr::File& file) {
    const Shape& shape = shape_of(file, "candidates", 2);
    const Shape of_places = {shape[0] * shape[1]}, of_request = {shape[0]};
    const Shape of_index = {shape[0], shape_of(file, "accept_index", 2)[1]};
    std::vector<std::vector<std::int64_t>> given;
    for (const char* name :
         {"candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict"})
        given.push_back(check::get_integers(file, name, shape));
    const SglangWalk walk{signed_size(shape[0]), signed_size(shape[1]), signed_size(of_index[1]),
                          given[0].data(),       given[1].data(),       given[2].data(),
                          given[3].data(),       given[4].data()};
    const struct {
        const char* name;
        const Shape& shape;
    } results[] = {{"predicts", of_places}, {"accept_index", of_index}, {"accept_token_num", of_request}};
    std::vector<std::vector<std::int32_t>> found;
    std::vector<const std::int32_t*> wanted;
    for (const auto& [name, of_result] : results) {
        const std::int32_t* before = get<std::int32_t>(file, name, of_result);
        found.emplace_back(before, before + file.at(name).size());
        wanted.push_back(get<std::int32_t>(file, std::string("accepted.") + name, of_result));
    }
    verify_tree_greedy(walk, found[0].data(), found[1].data(), found[2].data());
    Outcome outcome;
    for (std::size_t i = 0; i < found.size(); ++i) {
        outcome.keep(results[i].name, results[i].shape, found[i].data());
        outcome.equal(results[i].name, results[i].shape, found[i], wanted[i]);
    }
    return outcome;
}

Outcome check_file(const kdtr::File& file) {
    const std::string op = check::operator_of(file);
    if (op == "accept_greedy") return check_greedy(file);
    if (op == "accept_sampled") return check_sampled(file);
    if (op == "argmax_tokens") return check_argmax(file);
    if (op == "target_probs") return check_probs(file);
    if (op == "compact_kv") return check_compact(file);
    require(op == "verify_tree_greedy", "the operator is none of accept.hpp");
    return check_sglang(file);
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv, check_file); }
