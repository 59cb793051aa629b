// The Python module cdrmix._dedup: near-duplicates of texts. It checks arguments, releases the GIL during the work, and
// starts the threads. Indices are copied before the GIL is released, so that no other Python thread can change them.
// Bytes of texts and values of signatures are not copied: changing them changes results, but no read is out of bounds.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "lsh.hpp"
#include "minhash.hpp"
#include "simhash.hpp"

namespace py = pybind11;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

std::size_t size_of(const py::array& array, py::ssize_t axis = 0) { return static_cast<std::size_t>(array.shape(axis)); }

template <class T>
void check_dimensions(const Array<T>& array, py::ssize_t dimensions, const char* name) {
    if (array.ndim() != dimensions)
        throw py::value_error(std::string(name) + " must have " + std::to_string(dimensions) +
                              (dimensions == 1 ? " dimension" : " dimensions"));
}

template <class T>
std::vector<T> copied(const Array<T>& array, const char* name) {
    check_dimensions(array, 1, name);
    return {array.data(), array.data() + array.size()};
}

// Index pairs, int64 [m, 2], each index in 0 .. count - 1.
std::vector<cdrmix::Pair> copied_pairs(const Array<std::int64_t>& array, std::size_t count) {
    check_dimensions(array, 2, "pairs");
    if (array.shape(1) != 2) throw py::value_error("pairs must have two columns");
    std::vector<cdrmix::Pair> pairs;
    pairs.reserve(size_of(array));
    for (py::ssize_t i = 0; i < array.shape(0); ++i) {
        pairs.emplace_back(array.at(i, 0), array.at(i, 1));
        for (const std::int64_t index : {pairs.back().first, pairs.back().second})
            if (index < 0 || static_cast<std::uint64_t>(index) >= count)
                throw py::value_error("pairs hold index " + std::to_string(index) + " of " + std::to_string(count));
    }
    return pairs;
}

Array<std::int64_t> array_of(const std::vector<cdrmix::Pair>& pairs) {
    Array<std::int64_t> out({static_cast<py::ssize_t>(pairs.size()), py::ssize_t{2}});
    std::int64_t* cells = out.mutable_data();
    for (const auto& [a, b] : pairs) {
        *cells++ = a;
        *cells++ = b;
    }
    return out;
}

// UTF-8 texts, with the objects that own their memory.
class Texts {
  public:
    // ASCII strings are read in Python's memory; other strings are copied as UTF-8.
    explicit Texts(const py::sequence& strings) {
        py::list kept;
        for (const py::handle item : strings) {
            if (!PyUnicode_Check(item.ptr()))
                throw py::type_error(std::string("texts must be strings; found ") + Py_TYPE(item.ptr())->tp_name);
            if (PyUnicode_IS_COMPACT_ASCII(item.ptr())) {
                views_.emplace_back(static_cast<const char*>(PyUnicode_DATA(item.ptr())),
                                    static_cast<std::size_t>(PyUnicode_GET_LENGTH(item.ptr())));
                kept.append(item);
            } else {
                const auto encoded = py::reinterpret_steal<py::bytes>(PyUnicode_AsUTF8String(item.ptr()));
                if (!encoded) throw py::error_already_set();
                views_.push_back(static_cast<std::string_view>(encoded));
                kept.append(encoded);
            }
        }
        owner_ = std::move(kept);
    }

    // The texts blob[offsets[i] .. offsets[i + 1]).
    Texts(const py::object& blob, const py::array& offsets) {
        owner_ = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(blob.ptr()));
        if (!owner_) throw py::error_already_set();
        const Py_buffer* buffer = PyMemoryView_GET_BUFFER(owner_.ptr());
        if (!PyBuffer_IsContiguous(buffer, 'C')) throw py::value_error("the blob must be contiguous");
        const std::string_view bytes(static_cast<const char*>(buffer->buf), static_cast<std::size_t>(buffer->len));
        if (py::isinstance<py::array_t<std::uint64_t>>(offsets))
            cut<std::uint64_t>(bytes, offsets);
        else if (py::isinstance<py::array_t<std::int64_t>>(offsets))
            cut<std::int64_t>(bytes, offsets);
        else
            throw py::type_error("offsets must be int64 or uint64");
    }

    std::size_t size() const noexcept { return views_.size(); }
    std::string_view operator[](std::size_t i) const noexcept { return views_[i]; }

  private:
    template <class T>
    void cut(std::string_view blob, const Array<T>& array) {
        const auto offsets = copied(array, "offsets");
        if (offsets.empty()) throw py::value_error("offsets must have one element more than there are texts; found 0");
        if (static_cast<std::int64_t>(offsets.front()) < 0) throw py::value_error("offsets must not be negative");
        if (!std::is_sorted(offsets.begin(), offsets.end())) throw py::value_error("offsets must not decrease");
        if (static_cast<std::uint64_t>(offsets.back()) > blob.size())
            throw py::value_error("the last offset is " + std::to_string(offsets.back()) + ", but the blob has " +
                                  std::to_string(blob.size()) + " bytes");
        views_.reserve(offsets.size() - 1);
        for (std::size_t i = 0; i + 1 < offsets.size(); ++i)
            views_.push_back(blob.substr(static_cast<std::size_t>(offsets[i]),
                                         static_cast<std::size_t>(offsets[i + 1] - offsets[i])));
    }

    std::vector<std::string_view> views_;
    py::object owner_;  // a list of the objects, or a view of the blob, which keeps it from being freed or resized
};

// Calls work(i) for each i < count on up to `threads` threads; each thread gets its own `work` from make_work().
// work(i) writes its result to index i, so results do not depend on the number of threads. Rethrows the first
// exception.
template <class MakeWork>
void parallel_for(std::size_t count, std::size_t batch, unsigned threads, MakeWork make_work) {
    std::atomic<std::size_t> next{0};
    std::exception_ptr failure;
    std::mutex failing;
    const auto run = [&] {
        try {
            auto work = make_work();
            for (std::size_t begin; (begin = next.fetch_add(batch)) < count;)
                for (std::size_t i = begin; i < std::min(begin + batch, count); ++i) work(i);
        } catch (...) {
            next = count;
            const std::lock_guard<std::mutex> guard(failing);
            if (!failure) failure = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    const std::size_t useful = std::min<std::size_t>(threads, (count + batch - 1) / batch);
    others.reserve(useful);
    try {
        while (others.size() + 1 < useful) others.emplace_back(run);
    } catch (const std::system_error&) {
        // The system has no more threads; the running ones do all of the work.
    }
    run();
    for (auto& thread : others) thread.join();
    if (failure) std::rethrow_exception(failure);
}

constexpr std::size_t BATCH = 16;  // texts that a thread takes at a time, so that the counter costs little

Array<std::uint64_t> simhash(const Texts& texts, unsigned threads) {
    Array<std::uint64_t> out(static_cast<py::ssize_t>(texts.size()));
    std::uint64_t* fingerprints = out.mutable_data();
    const py::gil_scoped_release release;
    parallel_for(texts.size(), BATCH, threads, [&] {
        return [&, hash = cdrmix::SimHash()](std::size_t i) mutable {
            fingerprints[i] = hash(texts[i].data(), texts[i].size());
        };
    });
    return out;
}

cdrmix::MinimumKernel kernel_named(const std::string& name) {
    const auto sets = cdrmix::instruction_sets();
    if (name.empty()) return sets.back().minimum;
    for (const auto& set : sets)
        if (name == set.name) return set.minimum;
    throw py::value_error("this processor has no instruction set " + name);
}

Array<std::uint32_t> minhash(const Texts& texts, std::size_t num_perm, std::size_t ngram, std::uint64_t seed,
                             unsigned threads, const std::string& instruction_set) {
    const auto kernel = kernel_named(instruction_set);
    Array<std::uint32_t> out({texts.size(), num_perm});
    std::uint32_t* signatures = out.mutable_data();
    const py::gil_scoped_release release;
    const cdrmix::Permutations permutations(num_perm, seed);
    parallel_for(texts.size(), BATCH, threads, [&] {
        return [&, hash = cdrmix::MinHash(permutations, ngram, kernel)](std::size_t i) mutable {
            hash(texts[i].data(), texts[i].size(), signatures + i * num_perm);
        };
    });
    return out;
}

// The bits of unicode::Property of every code point, surrogates included.
Array<std::uint8_t> unicode_properties() {
    Array<std::uint8_t> out(py::ssize_t{cdrmix::unicode::CODE_POINTS});
    for (char32_t c = 0; c < cdrmix::unicode::CODE_POINTS; ++c) out.mutable_data()[c] = cdrmix::unicode::properties(c);
    return out;
}

py::bytes lower(const py::bytes& utf8) {
    const auto text = static_cast<std::string_view>(utf8);
    const char *begin = text.data(), *end = begin + text.size();
    std::string lowered;
    for (const char* p = begin; p != end;)
        cdrmix::unicode::decode_lower(begin, p, end, [&](char32_t c) {
            char bytes[cdrmix::unicode::MOST_BYTES];
            lowered.append(bytes, static_cast<std::size_t>(cdrmix::unicode::encode(c, bytes) - bytes));
        });
    return lowered;
}

py::list shingle_hashes(const Texts& texts, std::size_t ngram) {
    py::list out;
    cdrmix::Shingles shingles(ngram);
    std::vector<std::uint64_t> hashes(cdrmix::Shingles::MOST), all;
    for (std::size_t i = 0; i < texts.size(); ++i) {
        shingles.open(texts[i].data(), texts[i].size());
        all.clear();
        while (const std::size_t count = shingles.read(hashes.data()))
            all.insert(all.end(), hashes.begin(), hashes.begin() + static_cast<std::ptrdiff_t>(count));
        out.append(Array<std::uint64_t>(static_cast<py::ssize_t>(all.size()), all.data()));
    }
    return out;
}

void check_bands(const Array<std::uint32_t>& signatures, std::size_t bands, std::size_t rows) {
    check_dimensions(signatures, 2, "signatures");
    const std::size_t values = size_of(signatures, 1);
    if (bands == 0 || rows == 0 || bands > values / rows)
        throw py::value_error("bands * rows must be at least 1 and at most the " + std::to_string(values) +
                              " values of a signature; found bands=" + std::to_string(bands) +
                              " and rows=" + std::to_string(rows));
}

Array<std::uint64_t> band_hashes(const Array<std::uint32_t>& signatures, std::size_t bands, std::size_t rows) {
    check_bands(signatures, bands, rows);
    const std::size_t count = size_of(signatures), values = size_of(signatures, 1);
    Array<std::uint64_t> out({count, bands});
    std::uint64_t* hashes = out.mutable_data();
    const std::uint32_t* data = signatures.data();
    const py::gil_scoped_release release;
    for (std::size_t i = 0; i < count; ++i)
        for (std::size_t band = 0; band < bands; ++band)
            hashes[i * bands + band] = cdrmix::band_hash(data + i * values + band * rows, rows, band);
    return out;
}

Array<std::int64_t> bucket_pairs(const Array<std::uint64_t>& hashes, const Array<std::int64_t>& ids, std::size_t limit) {
    check_dimensions(hashes, 1, "hashes");
    check_dimensions(ids, 1, "ids");
    if (hashes.size() != ids.size())
        throw py::value_error("there are " + std::to_string(hashes.size()) + " hashes, but " +
                              std::to_string(ids.size()) + " ids");
    std::vector<cdrmix::BucketEntry> entries(size_of(hashes));
    for (std::size_t i = 0; i < entries.size(); ++i) entries[i] = {hashes.data()[i], ids.data()[i]};
    std::vector<cdrmix::Pair> pairs;
    {
        const py::gil_scoped_release release;
        cdrmix::append_bucket_pairs(entries, limit, pairs);
        cdrmix::sort_unique(pairs);
    }
    return array_of(pairs);
}

Array<std::int64_t> candidate_pairs(const Array<std::uint32_t>& signatures, std::size_t bands, std::size_t rows,
                                    std::size_t limit, unsigned threads) {
    check_bands(signatures, bands, rows);
    const std::size_t count = size_of(signatures), values = size_of(signatures, 1);
    const std::uint32_t* data = signatures.data();
    std::vector<cdrmix::Pair> pairs;
    {
        const py::gil_scoped_release release;
        std::vector<std::vector<cdrmix::Pair>> of_band(bands);
        parallel_for(bands, 1, threads, [&] {
            return [&, entries = std::vector<cdrmix::BucketEntry>()](std::size_t band) mutable {
                entries.resize(count);
                for (std::size_t i = 0; i < count; ++i)
                    entries[i] = {cdrmix::band_hash(data + i * values + band * rows, rows, band),
                                  static_cast<std::int64_t>(i)};
                cdrmix::append_bucket_pairs(entries, limit, of_band[band]);
            };
        });
        for (auto& some : of_band) {
            pairs.insert(pairs.end(), some.begin(), some.end());
            some = {};
        }
        cdrmix::sort_unique(pairs);
    }
    return array_of(pairs);
}

Array<float> estimated_jaccard(const Array<std::uint32_t>& a, const Array<std::uint32_t>& b) {
    check_dimensions(a, 2, "signatures_a");
    check_dimensions(b, 2, "signatures_b");
    if (a.shape(0) != b.shape(0) || a.shape(1) != b.shape(1))
        throw py::value_error("signatures_a and signatures_b must have the same shape");
    const std::size_t count = size_of(a), values = size_of(a, 1);
    Array<float> out(static_cast<py::ssize_t>(count));
    float* similarities = out.mutable_data();
    const std::uint32_t *data_a = a.data(), *data_b = b.data();
    const py::gil_scoped_release release;
    for (std::size_t i = 0; i < count; ++i)
        similarities[i] = cdrmix::estimated_jaccard(data_a + i * values, data_b + i * values, values);
    return out;
}

Array<double> exact_jaccard(const Texts& texts, const Array<std::int64_t>& pair_array, std::size_t ngram,
                            unsigned threads) {
    const auto pairs = copied_pairs(pair_array, texts.size());
    Array<double> out(static_cast<py::ssize_t>(pairs.size()));
    double* similarities = out.mutable_data();
    const py::gil_scoped_release release;
    std::vector<std::size_t> wanted;
    std::vector<bool> is_wanted(texts.size());
    for (const auto& [a, b] : pairs)
        for (const auto i : {static_cast<std::size_t>(a), static_cast<std::size_t>(b)})
            if (!is_wanted[i]) {
                is_wanted[i] = true;
                wanted.push_back(i);
            }
    std::vector<std::vector<std::uint64_t>> sets(texts.size());
    parallel_for(wanted.size(), BATCH, threads, [&] {
        return [&, shingles = cdrmix::Shingles(ngram)](std::size_t i) mutable {
            const auto text = texts[wanted[i]];
            sets[wanted[i]] = cdrmix::shingle_set(shingles, text.data(), text.size());
        };
    });
    parallel_for(pairs.size(), BATCH, threads, [&] {
        return [&](std::size_t i) {
            const auto [a, b] = pairs[i];
            similarities[i] = cdrmix::exact_jaccard(sets[static_cast<std::size_t>(a)], sets[static_cast<std::size_t>(b)]);
        };
    });
    return out;
}

Array<std::int64_t> clusters(const Array<std::int64_t>& pair_array, std::size_t count) {
    const auto pairs = copied_pairs(pair_array, count);
    std::vector<std::int64_t> found;
    {
        const py::gil_scoped_release release;
        found = cdrmix::clusters(pairs, count);
    }
    return Array<std::int64_t>(static_cast<py::ssize_t>(found.size()), found.data());
}

Array<std::int64_t> near_duplicates(const Array<std::uint64_t>& a_array, const Array<std::uint64_t>& b_array,
                                    int radius) {
    const auto a = copied(a_array, "fingerprints_a");
    const auto b = copied(b_array, "fingerprints_b");
    if (radius < 0 || radius > 63) throw py::value_error("radius must be in 0..63; found " + std::to_string(radius));
    std::vector<cdrmix::Pair> pairs;
    {
        const py::gil_scoped_release release;
        pairs = cdrmix::join(a, b, radius);
    }
    return array_of(pairs);
}

}  // namespace

PYBIND11_MODULE(_dedup, module) {
    module.doc() = "Near-duplicates of texts: MinHash, locality-sensitive hashing, exact similarity, SimHash.";
    py::class_<Texts>(module, "Texts", "UTF-8 texts for the functions below; they must not change during a call.")
        .def(py::init<const py::sequence&>(), py::arg("strings"))
        .def(py::init<const py::object&, const py::array&>(), py::arg("blob"), py::arg("offsets"))
        .def("__len__", &Texts::size);
    module.def("instruction_sets", [] {
        py::list names;
        for (const auto& set : cdrmix::instruction_sets()) names.append(set.name);
        return names;
    }, "The instruction sets of this processor, the widest last.");
    module.def("minhash", &minhash, py::arg("texts"), py::arg("num_perm"), py::arg("ngram"), py::arg("seed"),
               py::arg("threads"), py::arg("instruction_set") = "",
               "Signatures, uint32 [n, num_perm]; by default with the widest instruction set.");
    module.def("unicode_properties", &unicode_properties,
               "The bits of csrc/unicode.hpp of every code point, uint8 [0x110000], for tests of the tables.");
    module.def("lower", &lower, py::arg("utf8"), "str.lower() of a text in UTF-8.");
    module.def("shingle_hashes", &shingle_hashes, py::arg("texts"), py::arg("ngram"),
               "The hashes of each text's shingles, in order, as uint64 arrays.");
    module.def("band_hashes", &band_hashes, py::arg("signatures").noconvert(), py::arg("bands"), py::arg("rows"));
    module.def("bucket_pairs", &bucket_pairs, py::arg("hashes").noconvert(), py::arg("ids").noconvert(),
               py::arg("limit"));
    module.def("candidate_pairs", &candidate_pairs, py::arg("signatures").noconvert(), py::arg("bands"),
               py::arg("rows"), py::arg("limit"), py::arg("threads"));
    module.def("estimated_jaccard", &estimated_jaccard, py::arg("signatures_a").noconvert(),
               py::arg("signatures_b").noconvert());
    module.def("exact_jaccard", &exact_jaccard, py::arg("texts"), py::arg("pairs").noconvert(), py::arg("ngram"),
               py::arg("threads"));
    module.def("clusters", &clusters, py::arg("pairs").noconvert(), py::arg("n"));
    module.def("simhash", &simhash, py::arg("texts"), py::arg("threads"));
    module.def("near_duplicates", &near_duplicates, py::arg("fingerprints_a").noconvert(),
               py::arg("fingerprints_b").noconvert(), py::arg("radius"));
}
