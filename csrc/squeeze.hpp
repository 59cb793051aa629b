// White space squeezed out of a text: what two documents that differ in nothing else have in common.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "unicode.hpp"

namespace cdrmix {

// UTF-8 with every run of white space (str.isspace) as one space and none at the ends: " ".join(text.split()) in Python.
inline std::string squeezed(std::string_view text) {
    std::string out(text.size(), '\0');
    char* to = out.data();
    const char* p = text.data();
    const char* const end = p + text.size();
    bool pending = false;  // a space, if a character follows
    while (p < end) {
        const char* const character = p;
        bool space;
        if (const auto byte = static_cast<unsigned char>(*p); byte < 0x80) {
            // the first is the common case; str.isspace() also holds for four separators of old tapes
            space = byte <= ' ' && (byte == ' ' || (byte >= '\t' && byte <= '\r') || (byte >= 0x1c && byte <= 0x1f));
            ++p;
        } else {
            space = (unicode::properties(unicode::decode(p, end)) & unicode::SPACE) != 0;
        }
        if (space) {
            pending = to != out.data();
            continue;
        }
        if (pending) *to++ = ' ';
        pending = false;
        for (const char* from = character; from < p; ++from) *to++ = *from;
    }
    out.resize(static_cast<std::size_t>(to - out.data()));
    return out;
}

}  // namespace cdrmix
