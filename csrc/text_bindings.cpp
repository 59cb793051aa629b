// The Python module cdrmix._text: statistics of texts for the filters, spans that look like personal data, and
// languages. Only this file and bindings.cpp use pybind11.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string_view>
#include <tuple>
#include <vector>

#include "language.hpp"
#include "normal.hpp"
#include "personal.hpp"
#include "squeeze.hpp"
#include "statistics.hpp"

namespace py = pybind11;

namespace {

// The UTF-8 of a str, valid as long as the str exists. Raises UnicodeEncodeError for a lone surrogate.
std::string_view utf8(const py::handle& text) {
    if (!PyUnicode_Check(text.ptr())) throw py::type_error("texts must be str");
    Py_ssize_t size = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (bytes == nullptr) throw py::error_already_set();
    return {bytes, static_cast<std::size_t>(size)};
}

// The UTF-8 of every text, valid as long as `texts` exists.
std::vector<std::string_view> utf8_of_all(const py::tuple& texts) {
    std::vector<std::string_view> views;
    views.reserve(texts.size());
    for (const py::handle& text : texts) views.push_back(utf8(text));
    return views;
}

py::array_t<double> statistics(const py::sequence& sequence) {
    const py::tuple texts(sequence);  // keeps every str alive while the GIL is released
    const auto views = utf8_of_all(texts);
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

py::bytes squeezed(const py::str& text) { return cdrmix::squeezed(utf8(text)); }

// Offsets count bytes of UTF-8.
py::list personal(const py::str& text, std::size_t begin, std::size_t most) {
    const std::string_view whole = utf8(text);
    if (begin > whole.size()) throw py::value_error("begin must not be behind the text");
    const std::string_view view = whole.substr(begin);
    std::vector<cdrmix::PersonalData::Candidate> found;
    {
        py::gil_scoped_release release;
        found = cdrmix::PersonalData().scan(view.data(), view.size(), most);
    }
    py::list out;
    for (const auto& candidate : found)
        out.append(py::make_tuple(cdrmix::PersonalData::NAMES[candidate.kind], begin + candidate.begin, begin + candidate.end));
    return out;
}

py::tuple predict(const cdrmix::LanguageModel& model, const py::sequence& sequence, std::size_t most) {
    const py::tuple texts(sequence);
    const auto views = utf8_of_all(texts);
    py::array_t<std::int32_t> labels(static_cast<py::ssize_t>(views.size()));
    py::array_t<float> probabilities(static_cast<py::ssize_t>(views.size()));
    std::int32_t* label = labels.mutable_data();
    float* probability = probabilities.mutable_data();
    {
        py::gil_scoped_release release;
        for (const std::string_view text : views) std::tie(*label++, *probability++) = model.predict(cdrmix::sample(text, most));
    }
    return py::make_tuple(labels, probabilities);
}

}  // namespace

PYBIND11_MODULE(_text, module) {
    module.doc() = "Statistics of texts, spans that look like personal data, and languages.";
    module.attr("STATISTICS") = statistic_names();
    module.def("statistics", &statistics, py::arg("texts"),
               "Counts, float64 [n, len(STATISTICS)], over each of the texts, a sequence of str.");
    module.def("squeezed", &squeezed, py::arg("text"),
               "The UTF-8 of a text with every run of white space as one space and none at its ends.");
    module.def(
        "is_surely_normal",
        [](const py::str& text) {
            const std::string_view view = utf8(text);
            return cdrmix::is_surely_normal(view.data(), view.size());
        },
        py::arg("text"), "True only if normalising changes nothing; UnicodeEncodeError for lone surrogates.");
    module.def("personal", &personal, py::arg("text"), py::arg("begin") = 0, py::arg("most") = SIZE_MAX,
               "Spans shaped like personal data: (kind, begin, end) in bytes of UTF-8, in the order of their words. Of a "
               "text that begins at byte `begin`, those at the words and signs of its first `most` bytes.");
    module.def(
        "personal_steps",
        [](const py::str& text) {
            const std::string_view view = utf8(text);
            cdrmix::PersonalScanner<true> scanner;
            scanner.scan(view.data(), view.size(), view.size());
            return scanner.steps();
        },
        py::arg("text"), "How often `personal` looks at a byte of the text.");
    py::class_<cdrmix::LanguageModel>(module, "LanguageModel", "A quantised fastText classifier of texts.")
        .def(py::init([](const py::bytes& file) { return cdrmix::LanguageModel(static_cast<std::string_view>(file)); }),
             py::arg("file"))
        .def_property_readonly("labels", [](const cdrmix::LanguageModel& model) { return py::tuple(py::cast(model.labels())); })
        .def("predict", &predict, py::arg("texts"), py::arg("most"),
             "The label's number, int32 [n], -1 for none, and its probability, float32 [n], from `most` bytes of each.");
}
