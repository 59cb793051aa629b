// cdrmix._dedup: the only file that sees pybind11. Arguments are checked and copied here, the GIL is released
// around the work, and threads live here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include "simhash.hpp"

namespace py = pybind11;

namespace {

using Words = py::array_t<std::uint64_t, py::array::c_style>;

// A copy, so that no other Python thread can change the values while the GIL is released.
std::vector<std::uint64_t> copied(const Words& array, const char* name) {
    if (array.ndim() != 1) throw py::value_error(std::string(name) + " must have one dimension");
    return {array.data(), array.data() + array.size()};
}

void check_offsets(const std::vector<std::uint64_t>& offsets, std::size_t size) {
    if (offsets.empty() || offsets.front() != 0) throw py::value_error("offsets must begin with 0");
    if (!std::is_sorted(offsets.begin(), offsets.end())) throw py::value_error("offsets must not decrease");
    if (offsets.back() != size)
        throw py::value_error("the last offset is " + std::to_string(offsets.back()) + ", but the blob has " +
                              std::to_string(size) + " bytes");
}

// Each text's fingerprint goes to the text's own place, so the result does not depend on the number of threads.
void simhash_all(const char* blob, const std::vector<std::uint64_t>& offsets, std::uint64_t* out, unsigned threads) {
    constexpr std::size_t BATCH = 64;  // texts a thread takes at a time: long enough to amortise the counter
    const std::size_t count = offsets.size() - 1;
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t begin; (begin = next.fetch_add(BATCH)) < count;)
            for (std::size_t i = begin; i < std::min(begin + BATCH, count); ++i)
                out[i] = cdrmix::simhash(blob + offsets[i], offsets[i + 1] - offsets[i]);
    };
    std::vector<std::thread> others;
    const std::size_t useful = std::min<std::size_t>(threads, (count + BATCH - 1) / BATCH);
    others.reserve(useful);
    try {
        while (others.size() + 1 < useful) others.emplace_back(work);
    } catch (const std::system_error&) {
        // The system refuses more threads: those that run share all of the work.
    }
    work();
    for (auto& thread : others) thread.join();
}

Words simhash(const py::bytes& blob, const Words& offsets_array, unsigned threads) {
    const auto text = static_cast<std::string_view>(blob);
    const auto offsets = copied(offsets_array, "offsets");
    check_offsets(offsets, text.size());
    if (threads == 0) throw py::value_error("threads must be at least 1");
    Words out(static_cast<py::ssize_t>(offsets.size() - 1));
    std::uint64_t* fingerprints = out.mutable_data();
    {
        py::gil_scoped_release release;
        simhash_all(text.data(), offsets, fingerprints, threads);
    }
    return out;
}

py::array_t<std::int64_t> near_duplicates(const Words& a_array, const Words& b_array, int radius) {
    const auto a = copied(a_array, "fingerprints_a");
    const auto b = copied(b_array, "fingerprints_b");
    if (radius < 0 || radius > 63) throw py::value_error("radius must be in 0..63; found " + std::to_string(radius));
    std::vector<cdrmix::Pair> pairs;
    {
        py::gil_scoped_release release;
        pairs = cdrmix::join(a, b, radius);
    }
    py::array_t<std::int64_t> out({static_cast<py::ssize_t>(pairs.size()), py::ssize_t{2}});
    auto cells = out.mutable_unchecked<2>();
    for (std::size_t i = 0; i < pairs.size(); ++i) {
        cells(static_cast<py::ssize_t>(i), 0) = pairs[i].a;
        cells(static_cast<py::ssize_t>(i), 1) = pairs[i].b;
    }
    return out;
}

}  // namespace

PYBIND11_MODULE(_dedup, module) {
    module.doc() = "64-bit SimHash of texts and the exact Hamming-radius join of two sets of fingerprints.";
    module.def("simhash", &simhash, py::arg("blob"), py::arg("offsets").noconvert(), py::arg("threads"),
               "Fingerprints, uint64 [n], of the UTF-8 texts blob[offsets[i]:offsets[i + 1]]; offsets is uint64 [n + 1].");
    module.def("near_duplicates", &near_duplicates, py::arg("fingerprints_a").noconvert(),
               py::arg("fingerprints_b").noconvert(), py::arg("radius"),
               "Index pairs, int64 [m, 2], sorted, with Hamming distance at most `radius` (0..63).");
}
