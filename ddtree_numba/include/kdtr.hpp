// KDTR version 1 in C++17: named tensors in one file, as docs/kdtr.md specifies them.
//
//     kdtr::File file = kdtr::read("case.kdtr");
//     const float* q = file.at("q").as<float>();
//     kdtr::write("copy.kdtr", file.tensors);
//
// No dependencies; include this file and compile. `python -c "import ddtree_numba as d; print(d.__path__[0])"` prints
// the folder that include/ stands in. The checks, their order and the classes of error are those of
// ddtree_numba/kdtr.py. What the operating system refuses is a std::system_error.
#pragma once

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(_WIN32)
#include <io.h>
#else
#include <unistd.h>
#endif

namespace kdtr {

// C++17 has no std::endian. Windows runs on little-endian processors only.
#if defined(__BYTE_ORDER__)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "KDTR is read in place: little-endian hosts only");
#elif !defined(_WIN32)
#error "the byte order of this host is unknown"
#endif
static_assert(sizeof(std::size_t) == 8, "sizes of tensors have 64 bits");
static_assert(sizeof(bool) == 1 && sizeof(float) == 4 && sizeof(double) == 8);

// ---- errors: one class a kind of damage -----------------------------------------------------------------------------

// A file that is not sound KDTR, or tensors that KDTR cannot hold.
struct KdtrError : std::runtime_error { using std::runtime_error::runtime_error; };
// The file has no bytes.
struct KdtrEmptyError : KdtrError { using KdtrError::KdtrError; };
// The file is something else than KDTR.
struct KdtrMagicError : KdtrError { using KdtrError::KdtrError; };
// The file has a version that this reader does not know.
struct KdtrVersionError : KdtrError { using KdtrError::KdtrError; };
// The file is shorter than it says.
struct KdtrTruncatedError : KdtrError { using KdtrError::KdtrError; };
// Bytes of the header, the table or a tensor have changed.
struct KdtrChecksumError : KdtrError { using KdtrError::KdtrError; };
// A gap, an overlap, a misplaced tensor, or a byte that must be zero and is not.
struct KdtrLayoutError : KdtrError { using KdtrError::KdtrError; };
// The file goes on behind its end.
struct KdtrTrailingError : KdtrLayoutError { using KdtrLayoutError::KdtrLayoutError; };
// A tensor's name is empty, too long, used twice, not UTF-8, or holds a NUL.
struct KdtrNameError : KdtrError { using KdtrError::KdtrError; };
// A tensor's dtype is none of those that KDTR has, or another than the caller asked for.
struct KdtrDtypeError : KdtrError { using KdtrError::KdtrError; };
// A tensor's rank or shape is out of bounds or contradicts its size.
struct KdtrShapeError : KdtrError { using KdtrError::KdtrError; };
// A bool tensor holds a byte other than 0 and 1.
struct KdtrValueError : KdtrError { using KdtrError::KdtrError; };

// ---- tensors --------------------------------------------------------------------------------------------------------

enum class Dtype : std::uint32_t {
    boolean = 1, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, bfloat16, float32, float64
};

// C++17 has neither type; these hold the bits.
struct Float16 { std::uint16_t bits; };
struct Bfloat16 { std::uint16_t bits; };

namespace detail {

constexpr std::uint64_t alignment = 64, max_rank = 8, max_name_bytes = 159, max_nbytes = INT64_MAX;
// As in PNG: a byte above 127 and a line end, so that a transfer in text mode cannot pass unnoticed.
constexpr unsigned char magic[8] = {0x89, 'K', 'D', 'T', 'R', '\r', '\n', 0x1a};

// Every field stands at a multiple of its own size, so there is no padding to suppress.
struct Header {
    unsigned char magic[8];
    std::uint32_t version, crc;
    std::uint64_t file_size, num_tensors;
    unsigned char reserved[32];
};
struct Record {
    char name[160];
    std::uint32_t dtype, rank;
    std::uint64_t shape[8];
    std::uint64_t offset, nbytes;
    std::uint32_t crc, reserved;
};
static_assert(sizeof(Header) == 64 && sizeof(Record) == 256);
static_assert(std::is_trivially_copyable_v<Header> && std::is_trivially_copyable_v<Record>);
constexpr std::uint64_t guarded_start = offsetof(Header, file_size);  // the header's CRC begins behind itself

struct DtypeInfo { const char* name; std::uint64_t item_size; };

// Null for a code that KDTR does not have.
inline const DtypeInfo* info(std::uint32_t code) {
    static constexpr DtypeInfo table[] = {
        {"bool", 1}, {"int8", 1}, {"int16", 2}, {"int32", 4}, {"int64", 8}, {"uint8", 1}, {"uint16", 2},
        {"uint32", 4}, {"uint64", 8}, {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}};
    return code >= 1 && code <= 13 ? &table[code - 1] : nullptr;
}

template <class T> struct DtypeOf;  // declared only: as<T>() of another type does not compile
template <> struct DtypeOf<bool> { static constexpr Dtype value = Dtype::boolean; };
template <> struct DtypeOf<std::int8_t> { static constexpr Dtype value = Dtype::int8; };
template <> struct DtypeOf<std::int16_t> { static constexpr Dtype value = Dtype::int16; };
template <> struct DtypeOf<std::int32_t> { static constexpr Dtype value = Dtype::int32; };
template <> struct DtypeOf<std::int64_t> { static constexpr Dtype value = Dtype::int64; };
template <> struct DtypeOf<std::uint8_t> { static constexpr Dtype value = Dtype::uint8; };
template <> struct DtypeOf<std::uint16_t> { static constexpr Dtype value = Dtype::uint16; };
template <> struct DtypeOf<std::uint32_t> { static constexpr Dtype value = Dtype::uint32; };
template <> struct DtypeOf<std::uint64_t> { static constexpr Dtype value = Dtype::uint64; };
template <> struct DtypeOf<Float16> { static constexpr Dtype value = Dtype::float16; };
template <> struct DtypeOf<Bfloat16> { static constexpr Dtype value = Dtype::bfloat16; };
template <> struct DtypeOf<float> { static constexpr Dtype value = Dtype::float32; };
template <> struct DtypeOf<double> { static constexpr Dtype value = Dtype::float64; };

inline std::uint64_t align(std::uint64_t size) { return (size + alignment - 1) / alignment * alignment; }

// The CRC-32 of zlib. The CRC of the bytes so far goes in as `crc`, 0 at the start.
inline std::uint32_t crc32(const void* bytes, std::uint64_t count, std::uint32_t crc = 0) {
    static const auto table = [] {
        std::array<std::uint32_t, 256> t{};
        for (std::uint32_t i = 0; i < 256; ++i) {
            t[i] = i;
            for (int bit = 0; bit < 8; ++bit) t[i] = (t[i] >> 1) ^ ((t[i] & 1u) != 0 ? 0xedb88320u : 0u);
        }
        return t;
    }();
    const auto* p = static_cast<const unsigned char*>(bytes);
    crc = ~crc;
    for (std::uint64_t i = 0; i < count; ++i) crc = (crc >> 8) ^ table[(crc ^ p[i]) & 0xffu];
    return ~crc;
}

inline bool all_zero(const void* bytes, std::uint64_t count) {
    const auto* p = static_cast<const unsigned char*>(bytes);
    for (std::uint64_t i = 0; i < count; ++i)
        if (p[i] != 0) return false;
    return true;
}

// Neither overlong forms, nor surrogates, nor points above U+10FFFF.
inline bool is_utf8(std::string_view s) {
    for (std::size_t i = 0; i < s.size();) {
        const std::uint32_t lead = static_cast<unsigned char>(s[i++]);
        if (lead < 0x80) continue;
        int more = 0;
        if (lead >= 0xc2 && lead <= 0xdf) more = 1;
        if (lead >= 0xe0 && lead <= 0xef) more = 2;
        if (lead >= 0xf0 && lead <= 0xf4) more = 3;
        if (more == 0) return false;
        std::uint32_t point = lead & (0x3fu >> more);
        for (int k = 0; k < more; ++k, ++i) {
            if (i == s.size() || (static_cast<unsigned char>(s[i]) & 0xc0u) != 0x80) return false;
            point = point << 6 | (static_cast<unsigned char>(s[i]) & 0x3fu);
        }
        if (more == 2 && (point < 0x800 || (point >= 0xd800 && point <= 0xdfff))) return false;
        if (more == 3 && (point < 0x10000 || point > 0x10ffff)) return false;
    }
    return true;
}

inline void check_name(std::string_view name, const std::string& where) {
    if (name.empty() || name.size() > max_name_bytes)
        throw KdtrNameError(where + ": the name has " + std::to_string(name.size()) + " bytes; it must have 1 to 159");
    if (name.find('\0') != std::string_view::npos) throw KdtrNameError(where + ": the name must not hold a NUL");
    if (!is_utf8(name)) throw KdtrNameError(where + ": the name must be UTF-8");
}

// Size of the data in bytes, of a dtype and shape that KDTR can hold.
inline std::uint64_t checked_nbytes(std::uint32_t code, const std::uint64_t* shape, std::uint64_t rank,
                                    const std::string& where) {
    std::uint64_t product = info(code)->item_size;
    bool empty = false;
    for (std::uint64_t d = 0; d < rank; ++d) {
        if (shape[d] == 0) {
            empty = true;  // and go on: an empty tensor's other sizes are bounded as well
        } else if (shape[d] > max_nbytes / product) {  // a division cannot overflow
            throw KdtrShapeError(where + ": its sizes other than 0 must give at most 2**63 - 1 bytes");
        } else {
            product *= shape[d];
        }
    }
    return empty ? 0 : product;
}

inline void check_bools(const unsigned char* data, std::uint64_t nbytes, const std::string& where) {
    for (std::uint64_t i = 0; i < nbytes; ++i)
        if (data[i] > 1)
            throw KdtrValueError(where + ": is bool and holds the byte " + std::to_string(data[i]) + ", not 0 or 1");
}

[[noreturn]] inline void throw_system(int code, const std::string& what) {
    throw std::system_error(code != 0 ? code : EIO, std::generic_category(), what);
}

// Opening a pipe waits for a writer, a device has no length, and renaming over either would take it away.
inline void require_regular_or_new(const std::filesystem::path& file, const std::string& path) {
    std::error_code ignored;  // what cannot be looked at cannot be opened either, and that error says more
    const std::filesystem::file_status status = std::filesystem::status(file, ignored);
    if (std::filesystem::is_directory(status)) throw_system(EISDIR, path);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
        throw_system(EINVAL, path + ": is not a regular file");
}

}  // namespace detail

struct Tensor {
    std::string name;
    Dtype dtype = Dtype::uint8;
    std::vector<std::uint64_t> shape;  // outermost first; none for a scalar
    std::vector<unsigned char> data;   // C order, little-endian

    // Number of elements.
    std::size_t size() const {
        const detail::DtypeInfo* known = detail::info(static_cast<std::uint32_t>(dtype));
        return known == nullptr ? 0 : data.size() / known->item_size;
    }

    // The elements, null if there are none. A vector's memory comes from operator new and is aligned for any of them.
    template <class T>
    const T* as() const {
        if (dtype != detail::DtypeOf<T>::value) {
            const detail::DtypeInfo* known = detail::info(static_cast<std::uint32_t>(dtype));
            throw KdtrDtypeError("tensor '" + name + "' is " + (known != nullptr ? known->name : "of no known dtype") +
                                 ", not " + detail::info(static_cast<std::uint32_t>(detail::DtypeOf<T>::value))->name);
        }
        return data.empty() ? nullptr : reinterpret_cast<const T*>(data.data());
    }

    // A tensor with a copy of the values, as many as the shape says.
    template <class T>
    static Tensor of(std::string name, std::vector<std::uint64_t> shape, const T* values) {
        Tensor t{std::move(name), detail::DtypeOf<T>::value, std::move(shape), {}};
        const std::uint64_t nbytes = detail::checked_nbytes(static_cast<std::uint32_t>(t.dtype), t.shape.data(),
                                                            t.shape.size(), "tensor '" + t.name + "'");
        const auto* bytes = reinterpret_cast<const unsigned char*>(values);
        t.data.assign(bytes, bytes + nbytes);
        return t;
    }
};

struct File {
    std::vector<Tensor> tensors;  // in the order of the file

    // Null if there is no tensor of that name.
    const Tensor* find(std::string_view name) const {
        for (const Tensor& t : tensors)
            if (t.name == name) return &t;
        return nullptr;
    }
    const Tensor& at(std::string_view name) const {
        if (const Tensor* t = find(name)) return *t;
        throw std::out_of_range("no tensor '" + std::string(name) + "'");
    }
};

// ---- reading --------------------------------------------------------------------------------------------------------

namespace detail {

// Verifies a file of `length` bytes and keeps its tensors; take(to, count) hands out its next bytes.
template <class Take>
File read_all(std::uint64_t length, Take take, const std::string& path) {
    if (length == 0) throw KdtrEmptyError(path + ": the file is empty; a KDTR file has at least 64 bytes");

    Header header{};
    const std::uint64_t there = length < sizeof header ? length : sizeof header;
    take(&header, there);
    if (std::memcmp(header.magic, magic, there < 8 ? there : 8) != 0)
        throw KdtrMagicError(path + ": is not a KDTR file");
    if (length < sizeof header)
        throw KdtrTruncatedError(path + ": has " + std::to_string(length) + " bytes; the header alone has 64");
    if (header.version != 1)
        throw KdtrVersionError(path + ": has version " + std::to_string(header.version) + "; this reader knows 1 only");
    if (header.num_tensors > (length - sizeof header) / sizeof(Record))
        throw KdtrTruncatedError(path + ": has no room for a table of " + std::to_string(header.num_tensors));
    std::vector<unsigned char> table(header.num_tensors * sizeof(Record));
    take(table.data(), table.size());
    unsigned char guarded[sizeof header];
    std::memcpy(guarded, &header, sizeof header);
    const std::uint32_t crc = crc32(guarded + guarded_start, sizeof header - guarded_start);
    if (crc32(table.data(), table.size(), crc) != header.crc)
        throw KdtrChecksumError(path + ": header and table do not have the CRC-32 that they should");
    const std::string sizes =
        path + ": has " + std::to_string(length) + " bytes; it must have " + std::to_string(header.file_size);
    if (length < header.file_size) throw KdtrTruncatedError(sizes);
    if (length > header.file_size) throw KdtrTrailingError(sizes);
    if (!all_zero(header.reserved, sizeof header.reserved))
        throw KdtrLayoutError(path + ": the header's reserved bytes must be 0");

    File file;
    file.tensors.reserve(header.num_tensors);  // so that the names stay where `names` sees them
    std::set<std::string_view> names;
    std::uint64_t cursor = sizeof header + table.size();
    for (std::uint64_t i = 0; i < header.num_tensors; ++i) {
        Record r;
        std::memcpy(&r, table.data() + i * sizeof r, sizeof r);
        std::string where = path + ": tensor " + std::to_string(i);
        const void* nul = std::memchr(r.name, 0, sizeof r.name);
        const std::string_view name(r.name, nul == nullptr ? sizeof r.name : static_cast<const char*>(nul) - r.name);
        check_name(name, where);
        if (!all_zero(r.name + name.size(), sizeof r.name - name.size()))
            throw KdtrNameError(where + ": only NUL may follow the name");
        where = path + ": tensor '" + std::string(name) + "'";
        if (names.count(name) != 0) throw KdtrNameError(where + ": the name occurs twice; names must be unique");

        if (info(r.dtype) == nullptr)
            throw KdtrDtypeError(where + ": has dtype code " + std::to_string(r.dtype) + "; it must be 1 to 13");
        if (r.rank > max_rank)
            throw KdtrShapeError(where + ": has rank " + std::to_string(r.rank) + "; it must be at most 8");
        if (!all_zero(r.shape + r.rank, (max_rank - r.rank) * sizeof r.shape[0]))
            throw KdtrShapeError(where + ": has sizes behind its dimensions; they must be 0");
        const std::uint64_t needed = checked_nbytes(r.dtype, r.shape, r.rank, where);
        if (r.nbytes != needed)
            throw KdtrShapeError(where + ": has " + std::to_string(r.nbytes) + " bytes; it must have " +
                                 std::to_string(needed));
        if (r.offset != cursor)
            throw KdtrLayoutError(where + ": its data are at " + std::to_string(r.offset) + "; they must be at " +
                                  std::to_string(cursor));
        if (r.reserved != 0) throw KdtrLayoutError(where + ": the reserved field must be 0");
        // cursor <= length < 2**63 here; past the first half the sum is at most length, so that align cannot overflow.
        if (r.nbytes > length - cursor || align(cursor + r.nbytes) > length)
            throw KdtrLayoutError(where + ": its data would end behind the file's end at " + std::to_string(length));

        Tensor t{std::string(name), static_cast<Dtype>(r.dtype), {r.shape, r.shape + r.rank}, {}};
        t.data.resize(r.nbytes);
        take(t.data.data(), r.nbytes);
        unsigned char padding[alignment];
        const std::uint64_t padded = align(r.nbytes) - r.nbytes;
        take(padding, padded);
        if (crc32(padding, padded, crc32(t.data.data(), r.nbytes)) != r.crc)
            throw KdtrChecksumError(where + ": its data do not have the CRC-32 that they should");
        if (!all_zero(padding, padded)) throw KdtrLayoutError(where + ": the padding behind its data must be 0");
        if (t.dtype == Dtype::boolean) check_bools(t.data.data(), r.nbytes, where);
        cursor = align(cursor + r.nbytes);
        file.tensors.push_back(std::move(t));
        names.insert(file.tensors.back().name);
    }
    if (cursor != length)
        throw KdtrLayoutError(path + ": the file must end where the last tensor does, at " + std::to_string(cursor));
    return file;
}

}  // namespace detail

// Reads and verifies a whole file.
//
// Throws std::system_error if it cannot be read, a subclass of KdtrError if it is damaged. Whatever a file claims is
// held against its length before memory is asked for: the payload once, the table once, and some 300 bytes for each
// tensor whose 256 bytes really stand in the table.
inline File read(const std::string& path) {
    using namespace detail;
    require_regular_or_new(path, path);
    errno = 0;
    std::ifstream in(path, std::ios::binary);
    if (!in) throw_system(errno, path);
    // The length is that of the open file: the path may name another one by now.
    in.seekg(0, std::ios::end);
    const std::streamoff end = in.tellg();
    in.seekg(0);
    if (!in || end < 0) throw_system(ESPIPE, path + ": its length cannot be found");
    const auto take = [&](void* to, std::uint64_t count) {
        if (count == 0) return;
        in.read(static_cast<char*>(to), static_cast<std::streamsize>(count));
        if (in.bad()) throw_system(EIO, path + ": cannot be read");
        if (!in) throw KdtrTruncatedError(path + ": became shorter while it was read");
    };
    return read_all(static_cast<std::uint64_t>(end), take, path);
}

// The same for a file that is in memory already. The tensors are copies; `name` stands for the path in messages.
inline File parse(const void* bytes, std::size_t size, const std::string& name = "KDTR data") {
    const auto* next = static_cast<const unsigned char*>(bytes);
    const auto take = [&](void* to, std::uint64_t count) {
        if (count == 0) return;  // memcpy takes no null pointer, even then
        std::memcpy(to, next, count);
        next += count;
    };
    return detail::read_all(size, take, name);
}

// ---- writing --------------------------------------------------------------------------------------------------------

// Writes a file, whole or not at all: the bytes go to a temporary file in the same folder, reach the disk, and take
// the place of `path` in one step. On failure the old file stays; a process that is killed leaves the temporary one
// behind (.kdtr-*.tmp). A symbolic link is followed.
//
// Throws KdtrNameError, KdtrDtypeError, KdtrShapeError or KdtrValueError before anything is written if KDTR cannot hold
// the tensors, std::system_error if the file cannot be written.
inline void write(const std::string& path, const std::vector<Tensor>& tensors) {
    using namespace detail;
    namespace fs = std::filesystem;
    std::vector<Record> records;
    records.reserve(tensors.size());
    std::set<std::string_view> names;
    std::uint64_t cursor = sizeof(Header) + tensors.size() * sizeof(Record);
    for (const Tensor& t : tensors) {
        const std::string where = path + ": tensor " + std::to_string(records.size());
        check_name(t.name, where);
        if (!names.insert(t.name).second) throw KdtrNameError(where + ": the name occurs twice; names must be unique");
        const auto code = static_cast<std::uint32_t>(t.dtype);
        if (info(code) == nullptr) throw KdtrDtypeError(where + ": has no known dtype");
        if (t.shape.size() > max_rank) throw KdtrShapeError(where + ": its rank must be at most 8");
        if (t.data.size() != checked_nbytes(code, t.shape.data(), t.shape.size(), where))
            throw KdtrShapeError(where + ": data and shape disagree");
        if (t.dtype == Dtype::boolean) check_bools(t.data.data(), t.data.size(), where);

        Record r{};
        std::memcpy(r.name, t.name.data(), t.name.size());
        r.dtype = code;
        r.rank = static_cast<std::uint32_t>(t.shape.size());
        for (std::size_t d = 0; d < t.shape.size(); ++d) r.shape[d] = t.shape[d];
        r.offset = cursor;
        r.nbytes = t.data.size();
        const unsigned char zeros[alignment] = {};
        r.crc = crc32(zeros, align(r.nbytes) - r.nbytes, crc32(t.data.data(), r.nbytes));
        cursor = align(cursor + r.nbytes);
        records.push_back(r);
    }
    Header header{};
    std::memcpy(header.magic, magic, sizeof magic);
    header.version = 1;
    header.file_size = cursor;
    header.num_tensors = records.size();
    unsigned char guarded[sizeof header];
    std::memcpy(guarded, &header, sizeof header);
    header.crc = crc32(records.data(), records.size() * sizeof(Record),
                       crc32(guarded + guarded_start, sizeof header - guarded_start));

    // The random name keeps writers apart; one made from the target's could be too long for the file system.
    std::error_code failure;
    fs::path target = fs::weakly_canonical(path, failure);
    std::error_code ignored;
    while (!failure && fs::is_symlink(fs::symlink_status(target, ignored)))  // its file is not there yet
        target = fs::weakly_canonical(target.parent_path() / fs::read_symlink(target, failure), failure);
    if (failure) throw std::system_error(failure, path);
    require_regular_or_new(target, path);
    std::random_device random;
    std::string hidden = ".kdtr-";
    for (int i = 0; i < 4; ++i) hidden += std::to_string(random()) + (i < 3 ? "-" : ".tmp");
    const fs::path temporary = target.parent_path() / hidden;

    std::FILE* out = std::fopen(temporary.string().c_str(), "wbx");
    if (out == nullptr) throw_system(errno, path + ": cannot write the KDTR file");
    bool good = true;
    const auto put = [&](const void* bytes, std::uint64_t count) {
        good = good && (count == 0 || std::fwrite(bytes, 1, count, out) == count);
    };
    put(&header, sizeof header);
    put(records.data(), records.size() * sizeof(Record));
    for (const Tensor& t : tensors) {
        const unsigned char zeros[alignment] = {};
        put(t.data.data(), t.data.size());
        put(zeros, align(t.data.size()) - t.data.size());
    }
#if defined(_WIN32)
    good = good && std::fflush(out) == 0 && _commit(_fileno(out)) == 0;
#else
    good = good && std::fflush(out) == 0 && fsync(fileno(out)) == 0;
#endif
    int code = good ? 0 : errno;  // closing may overwrite errno
    if (std::fclose(out) != 0 && good) {
        good = false;
        code = errno;
    }
    if (good) fs::rename(temporary, target, failure);
    if (good && !failure) return;
    fs::remove(temporary, ignored);
    if (good) throw std::system_error(failure, path + ": cannot write the KDTR file");
    throw_system(code, path + ": cannot write the KDTR file");
}

}  // namespace kdtr
