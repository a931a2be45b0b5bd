// CUDA C++ as g++ takes it, to run verify_attn.cu without a GPU: blocks run one after the other, and each thread of a
// block is a fiber that runs from barrier to barrier. Even blocks run their threads in rising order, odd ones in
// falling order, so that a missing barrier shows in one of them. Arrays have exactly the bytes that were asked for,
// which lets sanitizers see what is out of bounds, and come filled with NaN.
//
// Two things are beyond macros. Before it is compiled, the source must have been changed so:
//
//     kernel<<<blocks, threads, nbytes>>>(...)  ->  cuda_on_host::configure(kernel, blocks, threads, nbytes)(...)
//     extern __shared__ float shared[];         ->  float* shared = cuda_on_host::shared_memory<float>();
//
// Not like a GPU: host and device see each other's memory, warps do not exist, and multiply-adds are fused or not as
// the compiler likes.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __syncthreads() cuda_on_host::barrier(__LINE__)

using std::max;
using std::min;

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline dim3 blockIdx, threadIdx;

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidMemcpyDirection = 21
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

namespace cuda_on_host {

constexpr std::size_t shared_limit = 227 * 1024;  // compute capability 9.0
constexpr std::size_t stack_bytes = 64 * 1024;

inline std::map<const char*, std::size_t> allocated;  // device memory: address and bytes
inline std::map<const void*, std::size_t> allowed;    // kernels that may have more than 48 KB of shared memory
inline cudaError_t last_error = cudaSuccess;

[[noreturn]] inline void stop(const char* what, int line) {
    std::fprintf(stderr, "cuda_on_host: %s, line %d\n", what, line);
    std::exit(3);
}

// Whether all these bytes are device memory.
inline bool on_device(const void* data, std::size_t nbytes) {
    const char* first = static_cast<const char*>(data);
    auto next = allocated.upper_bound(first);
    if (next == allocated.begin()) return false;
    const auto& [start, size] = *std::prev(next);
    return static_cast<std::size_t>(first - start) + nbytes <= size;
}

// The block that is running. A fiber passes control on to the next one, the last one to the main stack.
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int waits_at = 0;  // line of the barrier, 0 if the thread has returned
};
inline std::vector<Fiber> fibers;
inline ucontext_t main_context;
inline std::unique_ptr<char[]> shared;
inline std::function<void()> body;
inline std::size_t current = 0;
inline bool falling = false;

template <class T>
T* shared_memory() {
    return reinterpret_cast<T*>(shared.get());
}

// Which thread stands n-th in the block's order.
inline unsigned thread_at(std::size_t n) {
    return static_cast<unsigned>(falling ? fibers.size() - 1 - n : n);
}

inline void pass_on() {
    ucontext_t& from = fibers[current].context;
    ++current;
    swapcontext(&from, current < fibers.size() ? &fibers[current].context : &main_context);
    threadIdx = dim3(thread_at(current), 0, 0);
}

inline void barrier(int line) {
    fibers[current].waits_at = line;
    pass_on();
}

inline void fiber_main() {
    for (;;) {  // a turn is a block
        threadIdx = dim3(thread_at(current), 0, 0);
        body();
        fibers[current].waits_at = 0;
        pass_on();
    }
}

inline void run_block() {
    do {
        current = 0;
        swapcontext(&main_context, &fibers[0].context);
        const int line = fibers[0].waits_at;
        for (const Fiber& fiber : fibers)
            if (fiber.waits_at != line) stop("threads of a block wait at different barriers", fiber.waits_at);
    } while (fibers[0].waits_at != 0);
}

inline void start_fibers(std::size_t count) {
    fibers = std::vector<Fiber>(count);
    for (Fiber& fiber : fibers) {
        fiber.stack = std::make_unique<char[]>(stack_bytes);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = stack_bytes;
        makecontext(&fiber.context, fiber_main, 0);
    }
}

template <class... Parameters>
auto configure(void (*kernel)(Parameters...), dim3 blocks, int threads, std::size_t nbytes) {
    return [=](Parameters... arguments) {
        const auto found = allowed.find(reinterpret_cast<const void*>(kernel));
        const std::size_t limit = found == allowed.end() ? 48 * 1024 : found->second;
        if (blocks.x < 1 || blocks.y < 1 || blocks.z < 1 || blocks.y > 65535 || blocks.z > 65535 || threads < 1 ||
            threads > 1024 || blocks.x > 2147483647u) {
            last_error = cudaErrorInvalidConfiguration;
            return;
        }
        if (nbytes > limit) {
            last_error = cudaErrorInvalidValue;
            return;
        }
        start_fibers(static_cast<std::size_t>(threads));
        body = [&] { kernel(arguments...); };
        std::size_t number = 0;
        for (unsigned z = 0; z < blocks.z; ++z)
            for (unsigned y = 0; y < blocks.y; ++y)
                for (unsigned x = 0; x < blocks.x; ++x) {
                    blockIdx = dim3(x, y, z);
                    falling = number++ % 2 == 1;
                    shared = std::make_unique<char[]>(nbytes);  // anew, and of this size, for sanitizers
                    std::memset(shared.get(), 0xff, nbytes);
                    run_block();
                }
        shared.reset();
        fibers.clear();
    };
}

}  // namespace cuda_on_host

inline const char* cudaGetErrorString(cudaError_t status) {
    switch (status) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorInvalidMemcpyDirection: return "invalid copy direction for memcpy";
    }
    return "unknown error";
}

inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = static_cast<int>(cuda_on_host::shared_limit);
    return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
    const auto nbytes = static_cast<std::size_t>(value);
    if (nbytes > cuda_on_host::shared_limit) return cudaErrorInvalidValue;
    cuda_on_host::allowed[reinterpret_cast<const void*>(kernel)] = nbytes;
    return cudaSuccess;
}

inline cudaError_t cudaMalloc(void** data, std::size_t nbytes) {
    *data = std::malloc(nbytes);
    if (*data == nullptr) return cudaErrorMemoryAllocation;
    std::memset(*data, 0xff, nbytes);
    cuda_on_host::allocated[static_cast<char*>(*data)] = nbytes;
    return cudaSuccess;
}

inline cudaError_t cudaFree(void* data) {
    if (data != nullptr && cuda_on_host::allocated.erase(static_cast<char*>(data)) == 0) return cudaErrorInvalidValue;
    std::free(data);
    return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t nbytes, cudaMemcpyKind kind) {
    const bool wanted[] = {kind == cudaMemcpyHostToDevice, kind == cudaMemcpyDeviceToHost};
    if (cuda_on_host::on_device(to, nbytes) != wanted[0] || cuda_on_host::on_device(from, nbytes) != wanted[1])
        return cudaErrorInvalidMemcpyDirection;
    std::memcpy(to, from, nbytes);
    return cudaSuccess;
}

inline cudaError_t cudaGetLastError() {
    const cudaError_t status = cuda_on_host::last_error;
    cuda_on_host::last_error = cudaSuccess;
    return status;
}

inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
