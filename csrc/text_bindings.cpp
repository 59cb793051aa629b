// cdrmix._text: statistics of texts that the filters judge by, and places that look like personal data. Like bindings.cpp, it alone sees pybind11.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string_view>
#include <vector>

#include "personal.hpp"
#include "statistics.hpp"

namespace py = pybind11;

namespace {

// The UTF-8 of a str, which lives as long as the str does. Raises UnicodeEncodeError for a lone surrogate.
std::string_view utf8(const py::handle& text) {
    if (!PyUnicode_Check(text.ptr())) throw py::type_error("texts must be str");
    Py_ssize_t size = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (bytes == nullptr) throw py::error_already_set();
    return {bytes, static_cast<std::size_t>(size)};
}

py::array_t<double> statistics(const py::sequence& sequence) {
    const py::tuple texts(sequence);  // keeps every str alive while the GIL is released
    std::vector<std::string_view> views;
    views.reserve(texts.size());
    for (const py::handle& text : texts) views.push_back(utf8(text));
    py::array_t<double> out({static_cast<py::ssize_t>(views.size()), static_cast<py::ssize_t>(cdrmix::STATISTICS)});
    double* row = out.mutable_data();
    {
        py::gil_scoped_release release;
        cdrmix::TextStatistics one;
        for (const std::string_view text : views) {
            one.measure(text.data(), text.size(), row);
            row += cdrmix::STATISTICS;
        }
    }
    return out;
}

py::tuple statistic_names() {
    py::tuple names(cdrmix::STATISTICS);
    for (std::size_t i = 0; i < cdrmix::STATISTICS; ++i) names[i] = cdrmix::STATISTIC_NAMES[i];
    return names;
}

// Offsets count bytes of UTF-8.
py::list personal(const py::str& text) {
    const std::string_view view = utf8(text);
    std::vector<cdrmix::PersonalData::Candidate> found;
    {
        py::gil_scoped_release release;
        found = cdrmix::PersonalData().scan(view.data(), view.size());
    }
    py::list out;
    for (const auto& candidate : found)
        out.append(py::make_tuple(cdrmix::PersonalData::NAMES[candidate.kind], candidate.begin, candidate.end));
    return out;
}

}  // namespace

PYBIND11_MODULE(_text, module) {
    module.doc() = "Statistics of texts, and places in them that look like personal data.";
    module.attr("STATISTICS") = statistic_names();
    module.def("statistics", &statistics, py::arg("texts"),
               "Counts, float64 [n, len(STATISTICS)], over each of the texts, a sequence of str.");
    module.def("personal", &personal, py::arg("text"),
               "Places shaped like personal data, as (kind, begin, end) in bytes of UTF-8, in the order of their words.");
}
