// cdrmix._text: statistics of texts that the filters judge by. Like bindings.cpp, it alone sees pybind11.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_text, module) { module.doc() = "Statistics of texts."; }
