// The accept operators on the host, as plainly as possible: one request, one row and one token at a time.

#include "accept.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace {

constexpr std::int64_t no_token = -1;

bool is_token(std::int64_t token) { return token >= 0 && token <= std::numeric_limits<std::int32_t>::max(); }

// The first child of a node with a token, or -1; `broken` if a link led to no later node of the tree before it.
std::int64_t child_with(const Trees& t, std::int64_t b, std::int64_t node, std::int64_t token, bool& broken) {
    const std::int64_t count = std::min<std::int64_t>(t.counts[b], t.num_nodes), row = b * t.num_nodes;
    std::int64_t last = node;
    for (std::int64_t link = t.first_child[row + node]; link != -1; link = t.next_sibling[row + link]) {
        broken = !(last < link && link < count);
        if (broken) return -1;
        if (t.tokens[row + link] == token) return link;
        last = link;
    }
    return -1;
}

// All walks of a batch; target(b, node, depth) is asked once for each node that is reached.
template <class Target>
void walk(const Trees& t, const StopTokens& stops, const Accepted& accepted, Target target) {
    for (std::int64_t b = 0; b < t.num_requests; ++b) {
        std::int32_t *nodes = accepted.nodes + b * accepted.width, *tokens = accepted.tokens + b * accepted.width;
        std::fill_n(nodes, accepted.width, -1);
        std::fill_n(tokens, accepted.width, -1);
        std::int32_t flags = 0;
        std::int64_t bonus = no_token, depth = -1;  // of the last accepted node
        std::int64_t node = t.counts[b] > 0 ? 0 : -1;
        while (node != -1) {
            nodes[++depth] = static_cast<std::int32_t>(node);
            if ((flags & stopped) != 0) break;
            const std::int64_t token = target(b, node, depth);
            if (!is_token(token)) {
                flags |= bad_target;
                break;
            }
            tokens[depth] = static_cast<std::int32_t>(token);
            const std::int64_t* own = stops.tokens + b * stops.count;
            if (std::find(own, own + stops.count, token) != own + stops.count) flags |= stopped;
            bool broken = false;
            node = depth + 1 < accepted.width ? child_with(t, b, node, token, broken) : -1;
            if (broken) flags |= bad_link;
            if (node == -1) bonus = token;
        }
        accepted.num_accepted[b] = static_cast<std::int32_t>(depth + 1);
        accepted.bonus_tokens[b] = static_cast<std::int32_t>(bonus);
        accepted.flags[b] = flags;
    }
}

// The upper 64 bits of a product.
std::uint64_t multiply_high(std::uint64_t x, std::uint64_t y) {
    const std::uint64_t x0 = x & 0xffffffffu, x1 = x >> 32, y0 = y & 0xffffffffu, y1 = y >> 32;
    const std::uint64_t middle = x1 * y0 + (x0 * y0 >> 32);  // at most 2**64 - 2**32
    return x1 * y1 + (middle >> 32) + ((x0 * y1 + (middle & 0xffffffffu)) >> 32);
}

// Philox4x32-10 of the counter (position, 0) and the key seed; the first two of its four words.
std::uint64_t position_bits(std::uint64_t seed, std::uint64_t position) {
    std::uint32_t c[4] = {static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32), 0, 0};
    std::uint32_t k[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t p0 = std::uint64_t{0xd2511f53} * c[0], p1 = std::uint64_t{0xcd9e8d57} * c[2];
        const std::uint32_t high0 = static_cast<std::uint32_t>(p0 >> 32), high1 = static_cast<std::uint32_t>(p1 >> 32);
        c[0] = high1 ^ c[1] ^ k[0];
        c[1] = static_cast<std::uint32_t>(p1);
        c[2] = high0 ^ c[3] ^ k[1];
        c[3] = static_cast<std::uint32_t>(p0);
        k[0] += 0x9e3779b9;
        k[1] += 0xbb67ae85;
    }
    return std::uint64_t{c[0]} << 32 | c[1];
}

// floor(uniform * 2**64), at most 2**64 - 1; false where it is negative or NaN.
bool uniform_bits(double uniform, std::uint64_t& bits) {
    if (!(uniform >= 0)) return false;
    bits = uniform >= 1 ? std::numeric_limits<std::uint64_t>::max()
                        : static_cast<std::uint64_t>(std::ldexp(uniform, 64));
    return true;
}

// floor(p * 2**44), exact.
std::uint64_t weight_of(float p) { return static_cast<std::uint64_t>(std::ldexp(static_cast<double>(p), 44)); }

// The token whose share of the weights, laid end to end, holds the point bits / 2**64 of them; none if there is no law.
std::int64_t draw(const float* probs, std::int64_t vocabulary, std::uint64_t bits) {
    std::uint64_t total = 0;  // below 2**64: V is at most 2**19
    for (std::int64_t v = 0; v < vocabulary; ++v) {
        if (!(probs[v] >= 0 && probs[v] <= 1)) return no_token;  // a NaN too
        total += weight_of(probs[v]);
    }
    std::uint64_t point = multiply_high(bits, total);
    for (std::int64_t v = 0; v < vocabulary; ++v) {
        const std::uint64_t weight = weight_of(probs[v]);
        if (point < weight) return v;
        point -= weight;
    }
    return no_token;  // all weights are 0
}

// Softmax of the kept logits of a row at a temperature; what is below `least` gets 0.
void softmax(const float* logits, std::int64_t vocabulary, double temperature, float peak, float least, float* probs) {
    double total = 0;
    for (std::int64_t v = 0; v < vocabulary; ++v)
        if (logits[v] >= least) total += std::exp((double(logits[v]) - peak) / temperature);
    for (std::int64_t v = 0; v < vocabulary; ++v)
        probs[v] = logits[v] >= least
                       ? static_cast<float>(std::exp((double(logits[v]) - peak) / temperature) / total)
                       : 0.0f;
}

// The least logit that top_k, then top_p, keep; both keep what is as likely as the last one that they need.
float least_kept(const float* logits, std::int64_t vocabulary, double temperature, std::int64_t top_k, double top_p) {
    std::vector<float> falling(logits, logits + vocabulary);
    std::sort(falling.begin(), falling.end(), [](float x, float y) { return x > y; });
    std::size_t count = falling.size();
    if (top_k >= 1 && top_k < vocabulary) {
        const float last = falling[static_cast<std::size_t>(top_k) - 1];
        while (falling[count - 1] < last) --count;
    }
    if (!(top_p < 1)) return falling[count - 1];
    std::vector<double> sums;
    double sum = 0;
    for (std::size_t n = 0; n < count; ++n)
        sums.push_back(sum += std::exp((double(falling[n]) - falling[0]) / temperature));
    std::size_t enough = 0;
    while (enough + 1 < count && sums[enough] / sum < top_p) ++enough;
    return falling[enough];
}

// Byte offset of a request's row in a layer, or -1 where it has none.
std::int64_t row_offset(const Moves& m, const Layer& layer, std::int64_t b, std::int64_t row) {
    const std::int64_t entry = row / m.page_size;
    if (row < 0 || entry >= m.max_pages) return -1;
    const std::int64_t page = m.block_table == nullptr ? b : m.block_table[b * m.max_pages + entry];
    return page < 0 || page >= m.num_pages ? -1 : (page * m.page_size + row % m.page_size) * layer.row_bytes;
}

}  // namespace

void accept_greedy(const Trees& trees, const std::int64_t* target_tokens, const StopTokens& stops,
                   const Accepted& accepted) {
    walk(trees, stops, accepted, [&](std::int64_t b, std::int64_t node, std::int64_t) {
        return target_tokens[b * trees.num_nodes + node];
    });
}

void accept_sampled(const Trees& trees, const float* probs, std::int64_t vocabulary, const Randomness& randomness,
                    const StopTokens& stops, const Accepted& accepted) {
    walk(trees, stops, accepted, [&](std::int64_t b, std::int64_t node, std::int64_t depth) {
        const std::int64_t place = b * trees.num_nodes + node;
        std::uint64_t bits = 0;
        if (randomness.seeds == nullptr) {
            if (!uniform_bits(randomness.uniforms[place], bits)) return no_token;
        } else {
            const std::uint64_t position =
                randomness.position_a_node
                    ? static_cast<std::uint64_t>(randomness.positions[place])
                    : static_cast<std::uint64_t>(randomness.positions[b]) + static_cast<std::uint64_t>(depth);
            bits = position_bits(randomness.seeds[b], position);
        }
        return draw(probs + place * vocabulary, vocabulary, bits);
    });
}

void argmax_tokens(const float* logits, std::int64_t num_rows, std::int64_t vocabulary, std::int32_t* tokens) {
    for (std::int64_t row = 0; row < num_rows; ++row) {
        const float* values = logits + row * vocabulary;
        const bool has_nan = std::any_of(values, values + vocabulary, [](float x) { return std::isnan(x); });
        tokens[row] = has_nan ? -1 : static_cast<std::int32_t>(std::max_element(values, values + vocabulary) - values);
    }
}

void target_probs(const float* logits, std::int64_t num_requests, std::int64_t num_nodes, std::int64_t vocabulary,
                  const float* temperature, const std::int32_t* top_k, const float* top_p, float* probs) {
    for (std::int64_t b = 0; b < num_requests; ++b) {
        const float t = temperature[b];
        for (std::int64_t i = 0; i < num_nodes; ++i, logits += vocabulary, probs += vocabulary) {
            std::fill_n(probs, vocabulary, 0.0f);
            if (std::any_of(logits, logits + vocabulary, [](float x) { return std::isnan(x); })) continue;
            const float* best = std::max_element(logits, logits + vocabulary);
            if (std::isinf(*best) || !(t >= 0) || std::isinf(t) || !(top_p[b] > 0)) continue;
            if (t == 0)
                probs[best - logits] = 1;
            else
                softmax(logits, vocabulary, t, *best, least_kept(logits, vocabulary, t, top_k[b], top_p[b]), probs);
        }
    }
}

void compact_kv(const Moves& m, const std::vector<Layer>& layers, std::int32_t* cache_seqlens) {
    for (std::int64_t b = 0; b < m.num_requests; ++b) {
        const std::int64_t length = cache_seqlens[b];
        const std::int64_t count = std::clamp<std::int64_t>(m.num_accepted[b], 0, m.width);
        if (length < 0) continue;
        // In rising order a move reads at or behind where it writes, so that no move reads what another has written.
        for (const Layer& layer : layers)
            for (std::int64_t k = 0; k < count; ++k) {
                const std::int64_t node = m.nodes[b * m.width + k];
                if (node < k) continue;
                const std::int64_t source = row_offset(m, layer, b, length + node);
                const std::int64_t target = row_offset(m, layer, b, length + k);
                if (source < 0 || target < 0 || source == target) continue;
                std::memcpy(layer.cache + target, layer.cache + source, static_cast<std::size_t>(layer.row_bytes));
            }
        if (length + count <= m.max_pages * m.page_size) cache_seqlens[b] = static_cast<std::int32_t>(length + count);
    }
}

void gather_accepted(const Moves& m, const float* x, std::int64_t num_nodes, std::int64_t columns, float* gathered) {
    for (std::int64_t b = 0; b < m.num_requests; ++b)
        for (std::int64_t k = 0; k < m.width; ++k, gathered += columns) {
            const std::int64_t node = m.nodes[b * m.width + k];
            if (node >= 0 && node < num_nodes)
                std::copy_n(x + (b * num_nodes + node) * columns, columns, gathered);
            else
                std::fill_n(gathered, columns, 0.0f);
        }
}

void verify_tree_greedy(const SglangWalk& w, std::int32_t* predicts, std::int32_t* accept_index,
                        std::int32_t* accept_token_num) {
    const std::int64_t places = w.num_requests * w.num_nodes;
    const auto is_place = [&](std::int64_t place) { return place >= 0 && place < places; };
    for (std::int64_t b = 0; b < w.num_requests; ++b, accept_index += w.columns) {
        const std::int64_t row = b * w.num_nodes;
        std::int64_t place = w.retrive_index[row], accepted = 0;
        accept_token_num[b] = 0;
        if (!is_place(place)) continue;
        accept_index[0] = static_cast<std::int32_t>(place);
        std::int64_t node = w.retrive_next_token[row];
        // At most Q nodes are looked at, so that cycles end.
        for (std::int64_t looked = 0; looked < w.num_nodes && accepted + 1 < w.columns; ++looked) {
            if (node < 0 || node >= w.num_nodes) break;
            if (w.candidates[row + node] != w.target_predict[place]) {
                node = w.retrive_next_sibling[row + node];
                continue;
            }
            if (!is_place(w.retrive_index[row + node])) break;
            predicts[place] = static_cast<std::int32_t>(w.target_predict[place]);
            place = w.retrive_index[row + node];
            accept_index[++accepted] = static_cast<std::int32_t>(place);
            node = w.retrive_next_token[row + node];
        }
        predicts[place] = static_cast<std::int32_t>(w.target_predict[place]);
        accept_token_num[b] = static_cast<std::int32_t>(accepted);
    }
}
