// What a fuzzed property that does not hold ends with: a line that names it, and an abort that the fuzzer reports.
#pragma once

#include <cstdio>
#include <cstdlib>

inline void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "not so: %s\n", what);
    std::abort();
}
