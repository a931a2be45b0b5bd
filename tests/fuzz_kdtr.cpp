// Fuzzing of kdtr.hpp. Of any bytes whatever:
//   - they give a file or a class derived from KdtrError, nothing else, and the sanitizers stay silent;
//   - no more memory is asked for, freed or not, than three times their number and a little;
//   - what was read and is written again is the same bytes, for there is one form only.
//
// With libFuzzer:
//     clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I ddtree_numba/include
//         tests/fuzz_kdtr.cpp -o fuzz
//     ./fuzz -max_len=8192 -runs=200000 corpus
// With any compiler, the same checks and the same mutator in a fixed sequence:
//     g++ -std=c++17 -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -DOWN_MAIN -I ddtree_numba/include
//         tests/fuzz_kdtr.cpp -o fuzz
//     ./fuzz mutate 100000 1 corpus/*      number of inputs, seed, files to start from
//     ./fuzz outcomes                      files from stdin, each behind its length in 8 bytes; a line for each
// tests/fuzz_kdtr.py runs both and holds them against the Python reader. TMPDIR says where files are written.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <new>
#include <typeinfo>

#include "kdtr.hpp"

static std::size_t requested = 0;

// Counted, freed or not. libFuzzer uses the form without exceptions, which must not be left to another allocator.
__attribute__((noinline)) void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
    requested += size;
    return std::malloc(size);
}
__attribute__((noinline)) void* operator new(std::size_t size) {
    if (void* p = operator new(size, std::nothrow)) return p;
    throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, std::size_t) noexcept { std::free(p); }

using Bytes = std::vector<unsigned char>;

// ---- the checks -----------------------------------------------------------------------------------------------------

static void require(bool holds, const char* what) {
    if (holds) return;
    std::cerr << "does not hold: " << what << std::endl;
    std::abort();
}

static constexpr std::array<const char*, 13> kinds = {
    "ok", "KdtrEmptyError", "KdtrMagicError", "KdtrVersionError", "KdtrTruncatedError", "KdtrChecksumError",
    "KdtrLayoutError", "KdtrTrailingError", "KdtrNameError", "KdtrDtypeError", "KdtrShapeError", "KdtrValueError",
    "another KdtrError"};
static std::array<std::uint64_t, kinds.size()> found = {};
static std::uint64_t mutations = 0;

static std::size_t kind_of(const kdtr::KdtrError& e) {
    using namespace kdtr;
    const std::type_info* types[] = {
        &typeid(KdtrEmptyError), &typeid(KdtrMagicError), &typeid(KdtrVersionError), &typeid(KdtrTruncatedError),
        &typeid(KdtrChecksumError), &typeid(KdtrLayoutError), &typeid(KdtrTrailingError), &typeid(KdtrNameError),
        &typeid(KdtrDtypeError), &typeid(KdtrShapeError), &typeid(KdtrValueError)};
    std::size_t kind = 1;
    for (const std::type_info* type : types) {
        if (*type == typeid(e)) return kind;
        ++kind;
    }
    return kind;
}

// What an action comes to, an index of `kinds`. Other exceptions pass through and end the program.
template <class Action>
std::size_t outcome(Action action, std::size_t size) {
    requested = 0;
    std::size_t kind = 0;
    try {
        action();
    } catch (const kdtr::KdtrError& e) {
        kind = kind_of(e);
    }
    require(requested <= 3 * size + 20'000, "memory is asked for by the length of the file, not by its claims");
    return kind;
}

static const std::string& scratch() {
    static const std::string path =
        (std::filesystem::temp_directory_path() / ("fuzz-" + std::to_string(getpid()) + ".kdtr")).string();
    return path;
}

static Bytes bytes_of(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    require(in.good(), "the file can be opened");
    return {std::istreambuf_iterator<char>(in), {}};
}

static void report() {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < kinds.size(); ++i) {
        if (found[i] != 0) std::cout << "outcome " << kinds[i] << " " << found[i] << "\n";
        sum += found[i];
    }
    std::cout << "mutations " << mutations << "\ninputs " << sum << std::endl;
    std::error_code ignored;
    std::filesystem::remove(scratch(), ignored);
}

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    scratch();  // so that it is there when report() runs
    std::atexit(report);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    kdtr::File file;
    const std::size_t kind = outcome([&] { file = kdtr::parse(data, size); }, size);
    require(kind + 1 < kinds.size(), "each kind of damage has a class of its own");
    ++found[kind];
    if (kind != 0) return 0;

    kdtr::write(scratch(), file.tensors);
    require(bytes_of(scratch()) == Bytes(data, data + size), "what was accepted is written as the same bytes");
    const kdtr::File again = kdtr::read(scratch());
    require(again.tensors.size() == file.tensors.size(), "as many tensors come from the file as from memory");
    for (std::size_t i = 0; i < again.tensors.size(); ++i) {
        const kdtr::Tensor &a = again.tensors[i], &b = file.tensors[i];
        require(a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.data == b.data,
                "the same tensors come from the file and from memory");
    }
    return 0;
}

// ---- the mutator ----------------------------------------------------------------------------------------------------

struct Random {  // splitmix64
    std::uint64_t state;
    std::uint64_t next() {
        std::uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }
    std::uint64_t below(std::uint64_t bound) { return next() % bound; }
};

#if defined(OWN_MAIN)
// Stands in for libFuzzer's.
static std::size_t mutate_bytes(Bytes& file, std::size_t size, std::size_t max_size, Random& random) {
    const std::size_t at = random.below(size + 1), count = 1 + random.below(16);
    switch (random.below(4)) {
        case 0:
            if (at < size) file[at] ^= static_cast<unsigned char>(1u << random.below(8));
            return size;
        case 1:
            if (at < size) file[at] = static_cast<unsigned char>(random.next());
            return size;
        case 2:
            if (size + count > max_size) return size;
            std::memmove(file.data() + at + count, file.data() + at, size - at);
            return size + count;
        default:
            if (at + count > size) return size;
            std::memmove(file.data() + at, file.data() + at + count, size - at - count);
            return size - count;
    }
}
#else
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);
static std::size_t mutate_bytes(Bytes& file, std::size_t size, std::size_t max_size, Random&) {
    return LLVMFuzzerMutate(file.data(), size, max_size);
}
#endif

static constexpr std::size_t header_size = 64, record_size = 256;

// A field at any address.
template <class T>
struct Field {
    unsigned char* at;
    T get() const {
        T value;
        std::memcpy(&value, at, sizeof value);
        return value;
    }
    void set(T value) const { std::memcpy(at, &value, sizeof value); }
};
static Field<std::uint32_t> u32(Bytes& file, std::size_t at) { return {file.data() + at}; }
static Field<std::uint64_t> u64(Bytes& file, std::size_t at) { return {file.data() + at}; }

// The number of records that the file claims and has room for.
static std::size_t records_of(Bytes& file) {
    const std::uint64_t claimed = u64(file, 24).get(), room = (file.size() - header_size) / record_size;
    return claimed < room ? claimed : room;
}

static std::uint64_t odd_value(std::uint64_t old, std::uint64_t file_size, Random& random) {
    static constexpr std::uint64_t values[] = {
        0, 1, 2, 3, 7, 8, 9, 13, 14, 63, 64, 65, 128, 256, 1u << 31, 0xffffffff, 1ull << 32, 1ull << 56, 1ull << 61,
        1ull << 62, (1ull << 63) - 1, 1ull << 63, 0 - 64ull, 0 - 1ull};
    switch (random.below(4)) {
        case 0: return old + random.below(3) * 64 - 64;
        case 1: return old ^ 1ull << random.below(64);
        case 2: return file_size - random.below(3) * 64;
        default: return values[random.below(std::size(values))];
    }
}

static void edit_name(unsigned char* name, Random& random) {
    static constexpr std::string_view pieces[] = {
        "a", "\xc3\xb6", "\xe6\xbc\xa2", "\xf0\x9f\x8c\xb3",                // letters of 1 to 4 bytes
        "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe6\xbc", "\xff"};  // none
    const std::string_view piece = pieces[random.below(std::size(pieces))];
    if (random.below(8) == 0) std::memset(name, 'n', 160 - random.below(3));  // too long, or just not
    std::memcpy(name + random.below(random.below(8) == 0 ? 156 : 4), piece.data(), piece.size());
}

// Makes the layout what it must be, wherever a record leaves that open, so that whole files come out as well.
static void lay_out(Bytes& file, std::size_t max_size) {
    static constexpr std::uint64_t item_size[14] = {1, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8};
    const std::size_t count = records_of(file);
    u64(file, 24).set(count);
    std::size_t cursor = header_size + record_size * count;
    file.resize(max_size);
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t record = header_size + record_size * i;
        const std::uint32_t dtype = u32(file, record + 160).get(), rank = u32(file, record + 164).get();
        std::uint64_t nbytes = item_size[dtype < 14 ? dtype : 0];
        for (std::size_t d = 0; d < 8; ++d) {
            const auto size = u64(file, record + 168 + 8 * d);
            size.set(d < rank ? size.get() % 5 : 0);
            if (d < rank) nbytes *= size.get();
        }
        if (cursor + nbytes + 64 > max_size) return;
        u64(file, record + 232).set(cursor);
        u64(file, record + 240).set(nbytes);
        for (std::size_t k = 0; dtype == 1 && k < nbytes; ++k) file[cursor + k] &= 1;
        for (cursor += nbytes; cursor % 64 != 0; ++cursor) file[cursor] = 0;
    }
    file.resize(cursor);
    u64(file, 16).set(cursor);
}

// Makes the checksums agree, where the file's claims allow it, so that mutations reach the checks behind them.
static void seal(Bytes& file) {
    for (std::size_t i = 0; i < records_of(file); ++i) {
        const std::size_t record = header_size + record_size * i;
        const std::uint64_t offset = u64(file, record + 232).get(), nbytes = u64(file, record + 240).get();
        if (offset > file.size() || nbytes > file.size()) continue;
        const std::uint64_t end = std::min<std::uint64_t>(offset + (nbytes + 63) / 64 * 64, file.size());
        u32(file, record + 248).set(kdtr::detail::crc32(file.data() + offset, end - offset));
    }
    const std::size_t payload = header_size + record_size * records_of(file);
    u32(file, 12).set(kdtr::detail::crc32(file.data() + 16, payload - 16));
}

static void add_record(Bytes& file, std::size_t like, Random& random) {
    Bytes record(record_size);
    if (like + record_size <= file.size()) std::memcpy(record.data(), file.data() + like, record_size);
    record[0] = static_cast<unsigned char>('a' + random.below(26));
    const std::size_t count = records_of(file);
    file.insert(file.begin() + long(header_size + record_size * count), record.begin(), record.end());
    u64(file, 24).set(count + 1);
}

static void remove_record(Bytes& file, std::size_t record) {
    u64(file, 24).set(records_of(file) - 1);
    file.erase(file.begin() + long(record), file.begin() + long(record + record_size));
}

static void edit(Bytes& file, std::size_t max_size, Random& random) {
    const std::size_t count = records_of(file), payload = header_size + record_size * count;
    const std::size_t record = header_size + record_size * (count == 0 ? 0 : random.below(count));
    const std::size_t other = header_size + record_size * (count == 0 ? 0 : random.below(count));
    const auto change = [&](Field<std::uint64_t> field) { field.set(odd_value(field.get(), file.size(), random)); };
    const auto choose = [&](auto... at) { return std::array{at...}[random.below(sizeof...(at))]; };
    switch (random.below(count == 0 ? 4 : 12)) {
        case 0: change(u64(file, choose(0u, 8u, 16u, 24u, 32u, 56u))); break;
        case 1: file.resize(header_size + random.below(file.size())); break;
        case 2: file.resize(std::min(file.size() + 64, max_size)); break;
        case 3: if (file.size() + record_size <= max_size) add_record(file, record, random); break;
        case 4: remove_record(file, record); break;
        case 5: edit_name(file.data() + record, random); break;
        case 6: std::memcpy(file.data() + record, file.data() + other, 160); break;  // the same name, or no change
        case 7: u32(file, record + 160).set(static_cast<std::uint32_t>(choose(random.below(15), random.next()))); break;
        case 8: u32(file, record + 164).set(static_cast<std::uint32_t>(choose(random.below(10), random.next()))); break;
        case 9: change(u64(file, record + 168 + 8 * random.below(8))); break;
        case 10: change(u64(file, record + choose(232u, 240u, 248u))); break;  // the last takes `reserved` along
        default: if (payload < file.size()) file[payload + random.below(file.size() - payload)] ^= choose(1, 2, 128);
    }
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
    Random random{seed};
    Bytes file(data, data + size);
    ++mutations;
    if (size < header_size || max_size < header_size || random.below(4) == 0) {
        file.resize(max_size);
        file.resize(mutate_bytes(file, size, max_size, random));
    } else {
        edit(file, max_size, random);
    }
    if (file.size() >= header_size && max_size >= header_size) {
        if (random.below(4) != 0) u64(file, 16).set(file.size());
        if (random.below(4) == 0) lay_out(file, max_size);
        if (random.below(8) != 0) seal(file);
    }
    if (file.size() > max_size) file.resize(max_size);
    if (!file.empty()) std::memcpy(data, file.data(), file.size());
    return file.size();
}

// ---- without libFuzzer ----------------------------------------------------------------------------------------------

#if defined(OWN_MAIN)
static int mutate(std::uint64_t count, std::uint64_t seed, const std::vector<std::string>& paths) {
    static constexpr std::size_t max_size = 8192, max_kept = 512;
    std::vector<Bytes> pool;
    for (const std::string& path : paths) pool.push_back(bytes_of(path));
    require(!pool.empty(), "there is a file to start from");
    const std::size_t given = pool.size();
    Random random{seed};
    LLVMFuzzerTestOneInput(nullptr, 0);  // as libFuzzer does; the mutator leaves no file empty
    for (std::uint64_t i = 1; i < count; ++i) {
        Bytes input = pool[random.below(pool.size())];
        std::size_t size = input.size();
        input.resize(std::max(size, max_size));
        for (std::uint64_t rounds = 1 + random.below(3); rounds > 0; --rounds)
            size = LLVMFuzzerCustomMutator(input.data(), size, input.size(), static_cast<unsigned>(random.next()));
        const Bytes exact(input.data(), input.data() + size);  // so that the sanitizer sees a byte read behind the end
        const std::uint64_t accepted = found[0];
        LLVMFuzzerTestOneInput(exact.data(), exact.size());
        if (found[0] == accepted) continue;
        if (pool.size() < max_kept) pool.push_back(exact);  // whole files lead to other whole files
        else pool[given + random.below(max_kept - given)] = exact;
    }
    return 0;
}

static int outcomes() {
    for (std::uint64_t size = 0; std::cin.read(reinterpret_cast<char*>(&size), sizeof size);) {
        Bytes bytes(size);
        std::cin.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
        require(std::cin.good(), "the bytes follow their length");
        std::ofstream out(scratch(), std::ios::binary);
        out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(size));
        out.close();
        const std::size_t from_file = outcome([] { kdtr::read(scratch()); }, size + 4096);
        const std::size_t from_memory = outcome([&] { kdtr::parse(bytes.data(), size); }, size);
        require(from_file == from_memory, "a file and its bytes in memory come to the same");
        ++found[from_memory];
        std::cout << kinds[from_memory] << std::endl;
    }
    return 0;
}

int main(int argc, char** argv) {
    const std::vector<std::string> words(argv + 1, argv + argc);
    LLVMFuzzerInitialize(&argc, &argv);
    if (words.size() > 3 && words[0] == "mutate")
        return mutate(std::stoull(words[1]), std::stoull(words[2]), {words.begin() + 3, words.end()});
    if (words == std::vector<std::string>{"outcomes"}) return outcomes();
    std::cerr << "usage: fuzz mutate COUNT SEED FILE..., or: fuzz outcomes\n";
    return 2;
}
#endif
