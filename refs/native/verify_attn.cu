// verify_attention on a GPU: ddtree_numba/attention/three_phase.py line by line in CUDA C++; docs/porting.md walks
// through both. Takes the place of verify_attn.cpp. In this folder:
//
//     nvcc -std=c++17 -O2 -arch=sm_90 -I ../../ddtree_numba/include check_verify_attn.cpp verify_attn.cu
//     ./a.out ../verify_attn_*.kdtr

#include "verify_attn.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int THREADS = 256;
constexpr int LANES = 8;
constexpr int KEYS_PER_PASS = 64;
constexpr int PITCH = LANES + 1;  // not LANES: the threads that add up rows of partial sums then hit different banks
constexpr int CHUNK = 32;
constexpr int GROUP = 16 * CHUNK;

constexpr float NEG_INF = -INFINITY;

// A Numba array knows its shape and takes several indices. This is as much of one as the kernel needs.
template <class T, int N>
struct Array {
    T* data;
    std::int64_t shape[N];

    template <class... Index>
    __device__ T& operator()(Index... index) const {
        static_assert(sizeof...(Index) == N, "one index for each axis");
        std::int64_t offset = 0;  // a cache may have more than 2**31 elements
        int axis = 0;
        ((offset = offset * shape[axis++] + index), ...);
        return data[offset];
    }
};

struct Place {
    int page, slot;
};

// Page and slot of a key; a table entry that is no page (bad contents) is clamped to one.
__device__ Place locate(const Array<const std::int32_t, 2>& block_table, int b, int key, int num_pages, int page_size) {
    const int page = block_table(b, key / page_size);
    return {min(max(page, 0), num_pages - 1), key % page_size};
}

// Whether node i sees tree key j.
__device__ bool sees(const Array<const std::uint32_t, 3>& tree_mask, int bits_per_word, int b, int i, int j) {
    const std::uint32_t word = tree_mask(b, i, j / bits_per_word);
    return ((word >> (j % bits_per_word)) & 1) == 1;
}

// Where a chunk ends, pass its sum on to `mid`; where a group of chunks ends, pass theirs on to `acc`.
__device__ void carry(int stop, float& chunk, float& mid, float& acc) {
    if (stop % CHUNK == 0) {
        mid += chunk;
        chunk = 0.0f;
        if (stop % GROUP == 0) {
            acc += mid;
            mid = 0.0f;
        }
    }
}

// Largest value of the block's threads, for each of them.
__device__ float block_max(float* partial, float value) {
    const int t = threadIdx.x;
    partial[t] = value;
    __syncthreads();
    for (int width = THREADS / 2; width > 0; width /= 2) {
        if (t < width) partial[t] = fmaxf(partial[t], partial[t + width]);
        __syncthreads();
    }
    const float result = partial[0];
    __syncthreads();
    return result;
}

// Sum of the values of the block's threads in a fixed order, for each of them.
__device__ float block_sum(float* partial, float value) {
    const int t = threadIdx.x;
    partial[t] = value;
    __syncthreads();
    for (int width = THREADS / 2; width > 0; width /= 2) {
        if (t < width) partial[t] += partial[t + width];
        __syncthreads();
    }
    const float result = partial[0];
    __syncthreads();
    return result;
}

// One block a (request, node, head); shared memory as in `shared_bytes`.
__global__ void __launch_bounds__(THREADS, 4)
    kernel(Array<const float, 4> q, Array<const float, 3> kv_cache, Array<const std::int32_t, 2> block_table,
           Array<const std::int32_t, 1> cache_seqlens, Array<const std::uint32_t, 3> tree_mask, int bits_per_word,
           float sm_scale, int max_seqlen, Array<float, 4> out, Array<float, 3> lse) {
    const int num_nodes = q.shape[1], kv_lora_rank = out.shape[3];
    const int num_pages = kv_cache.shape[0], page_size = kv_cache.shape[1], head_dim = kv_cache.shape[2];
    const int h = blockIdx.x;
    const int i = blockIdx.y;
    const int b = blockIdx.z;
    const int t = threadIdx.x;
    const int lane = t % LANES;
    const int group = t / LANES;
    extern __shared__ float shared[];
    float* q_row = shared;
    float* partial = shared + head_dim;
    float* scores = shared + head_dim + KEYS_PER_PASS * PITCH;

    // Phase 0: this block's query row and keys
    const int prefix = min(max(cache_seqlens(b), 0), max_seqlen);
    const int num_keys = prefix + num_nodes;
    for (int c = t; c < head_dim; c += THREADS) q_row[c] = q(b, i, h, c);
    __syncthreads();

    // Phase 1: the scores of the visible keys
    const float* q_lane = q_row + lane;
    for (int first = 0; first < num_keys; first += KEYS_PER_PASS) {
        const int stop = min(first + KEYS_PER_PASS, num_keys);
        for (int key = first + group; key < stop; key += THREADS / LANES) {
            float s = NEG_INF;
            float s_odd = 0.0f;
            if (key < prefix || sees(tree_mask, bits_per_word, b, i, key - prefix)) {
                const auto [page, slot] = locate(block_table, b, key, num_pages, page_size);
                const float* row = &kv_cache(page, slot, lane);
                s = 0.0f;
                for (int c = 0; c < head_dim - lane; c += 2 * LANES) {  // D is a multiple of 2 * LANES
                    s += q_lane[c] * row[c];
                    s_odd += q_lane[c + LANES] * row[c + LANES];
                }
            }
            partial[(key - first) * PITCH + lane] = s + s_odd;
        }
        __syncthreads();
        for (int key = first + t; key < stop; key += THREADS) {
            float s = 0.0f;
            float s_odd = 0.0f;
            for (int other = 0; other < LANES; other += 2) {
                s += partial[(key - first) * PITCH + other];
                s_odd += partial[(key - first) * PITCH + other + 1];
            }
            scores[key] = (s + s_odd) * sm_scale;
        }
        __syncthreads();
    }

    // Phase 2: the block's max and sum
    float m_i = NEG_INF;
    for (int key = t; key < num_keys; key += THREADS) m_i = fmaxf(m_i, scores[key]);
    m_i = block_max(partial, m_i);
    if (m_i == NEG_INF) {
        m_i = 0.0f;  // nothing visible: each weight becomes exp(-inf) = 0, where -inf - -inf would be NaN
    }
    float l_i = 0.0f;
    for (int key = t; key < num_keys; key += THREADS) {
        const float p = expf(scores[key] - m_i);
        scores[key] = p;
        l_i += p;
    }
    l_i = block_sum(partial, l_i);
    if (l_i == 0.0f) {
        for (int d = t; d < kv_lora_rank; d += THREADS) out(b, i, h, d) = 0.0f;
        if (t == 0) lse(b, i, h) = NEG_INF;
        return;
    }
    for (int key = t; key < num_keys; key += THREADS) scores[key] /= l_i;
    __syncthreads();

    // Phase 3: the output, each thread its own latent dimensions
    for (int d = t; d < kv_lora_rank; d += THREADS) {
        float chunk = 0.0f;
        float mid = 0.0f;
        float acc = 0.0f;
        int key = 0;
        while (key < prefix) {  // prefix: runs of keys that lie in one page and one chunk
            const auto [page, slot] = locate(block_table, b, key, num_pages, page_size);
            const int run = min(min(CHUNK - key % CHUNK, page_size - slot), prefix - key);
            const float* p_run = scores + key;
            const float* column = &kv_cache(page, slot, d);
            for (int n = 0; n < run; ++n) chunk += p_run[n] * column[std::int64_t{n} * head_dim];
            key += run;
            carry(key, chunk, mid, acc);
        }
        for (key = prefix; key < num_keys; ++key) {  // tree: the node's ancestors alone
            const float p = scores[key];
            if (p != 0.0f) {
                const auto [page, slot] = locate(block_table, b, key, num_pages, page_size);
                chunk += p * kv_cache(page, slot, d);
            }
            carry(key + 1, chunk, mid, acc);
        }
        acc += mid + chunk;
        out(b, i, h, d) = acc;
    }
    if (t == 0) lse(b, i, h) = m_i + logf(l_i);
}

// Dynamic shared memory of a block in bytes: query row, partial sums, a score for each key.
std::int64_t shared_bytes(const Problem& problem, std::int64_t max_seqlen) {
    return 4 * (problem.head_dim + KEYS_PER_PASS * PITCH + max_seqlen + problem.num_nodes);
}

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

void check(cudaError_t status, const char* call) {
    if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}
#define CHECK(call) check(call, #call)

// Owns arrays on the GPU until it goes out of scope.
class DeviceMemory {
public:
    DeviceMemory() = default;
    DeviceMemory(const DeviceMemory&) = delete;
    ~DeviceMemory() {
        for (void* data : owned_) {  // a destructor must not throw
            const cudaError_t status = cudaFree(data);
            if (status != cudaSuccess) std::fprintf(stderr, "cudaFree: %s\n", cudaGetErrorString(status));
        }
    }

    template <class T, int N>
    Array<T, N> copy(T* host, const std::int64_t (&shape)[N]) {
        Array<T, N> array{};
        std::copy_n(shape, N, array.shape);
        owned_.push_back(nullptr);
        CHECK(cudaMalloc(&owned_.back(), nbytes(array)));
        CHECK(cudaMemcpy(owned_.back(), host, nbytes(array), cudaMemcpyHostToDevice));
        array.data = static_cast<T*>(owned_.back());
        return array;
    }

    template <class T, int N>
    static std::size_t nbytes(const Array<T, N>& array) {
        std::size_t product = sizeof(T);
        for (std::int64_t size : array.shape) product *= static_cast<std::size_t>(size);
        return product;
    }

private:
    std::vector<void*> owned_;
};

}  // namespace

void verify_attn(const Problem& problem, float* out, float* lse) {
    const std::int64_t B = problem.num_requests, Q = problem.num_nodes, H = problem.num_heads;
    const std::int64_t D = problem.head_dim, R = problem.kv_lora_rank;
    require(D % (2 * LANES) == 0, "head_dim is " + std::to_string(D) + ", not a multiple of 16");
    require(B <= 65535 && Q <= 65535, "a grid has at most 65535 requests and as many nodes");

    // A contiguous cache is a paged one: request b has one page, number b.
    std::vector<std::int32_t> table(static_cast<std::size_t>(B * problem.max_pages));
    std::iota(table.begin(), table.end(), 0);
    if (problem.block_table != nullptr) std::copy_n(problem.block_table, table.size(), table.begin());
    std::int64_t max_seqlen = 0, num_pages = 1;
    for (std::int64_t b = 0; b < B; ++b) {
        const std::int64_t length = problem.cache_seqlens[b];
        max_seqlen = std::max(max_seqlen, length);
        // Entries behind the last key may hold anything.
        for (std::int64_t k = 0; k * problem.page_size < length + Q; ++k)
            num_pages = std::max(num_pages, std::int64_t{table[b * problem.max_pages + k]} + 1);
    }

    const std::int64_t nbytes = shared_bytes(problem, max_seqlen);
    int device = 0, limit = 0;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    require(nbytes <= limit, "a score row of " + std::to_string(max_seqlen + Q) + " keys needs " +
                                 std::to_string(nbytes) + " bytes of shared memory; this GPU has " +
                                 std::to_string(limit));

    DeviceMemory memory;
    const std::int32_t* entries = table.data();
    const auto q_device = memory.copy(problem.q, {B, Q, H, D});
    const auto cache_device = memory.copy(problem.kv_cache, {num_pages, problem.page_size, D});
    const auto table_device = memory.copy(entries, {B, problem.max_pages});
    const auto lengths_device = memory.copy(problem.cache_seqlens, {B});
    const auto mask_device = memory.copy(problem.tree_mask, {B, Q, problem.num_words});
    const auto out_device = memory.copy(out, {B, Q, H, R});  // with the NaN: what no thread writes shows
    const auto lse_device = memory.copy(lse, {B, Q, H});

    // Beyond 48 KB a kernel must be allowed its shared memory by name.
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(nbytes)));
    const dim3 blocks(static_cast<unsigned>(H), static_cast<unsigned>(Q), static_cast<unsigned>(B));
    kernel<<<blocks, THREADS, nbytes>>>(q_device, cache_device, table_device, lengths_device, mask_device, 32,
                                        static_cast<float>(problem.sm_scale), static_cast<int>(max_seqlen), out_device,
                                        lse_device);
    CHECK(cudaGetLastError());       // what is wrong with the launch
    CHECK(cudaDeviceSynchronize());  // what went wrong while it ran
    CHECK(cudaMemcpy(out, out_device.data, memory.nbytes(out_device), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(lse, lse_device.data, memory.nbytes(lse_device), cudaMemcpyDeviceToHost));
}
