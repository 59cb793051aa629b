// A text with normalised white space, which is equal for two documents that differ only in white space.
#pragma once

#include <cstddef>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#include <string>
#include <string_view>

#include "unicode.hpp"

namespace cdrmix {

// UTF-8 with every run of white space (str.isspace) as one space and none at the ends: " ".join(text.split()) in
// Python.
inline std::string squeezed(std::string_view text) {
    std::string out(text.size(), '\0');
    char* to = out.data();
    const char* p = text.data();
    const char* const end = p + text.size();
    bool after_space = true;  // also at the beginning: further white space is dropped
    while (p < end) {
#ifdef __SSE2__
        // Sixteen ASCII characters are copied as they are if none is below the space and no two spaces are adjacent.
        if (end - p >= 16) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
            const int plain = _mm_movemask_epi8(_mm_cmpgt_epi8(bytes, _mm_set1_epi8(' ' - 1)));  // signed: bytes beyond ASCII are negative
            const int spaces = _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(' ')));
            if (plain == 0xffff && (spaces & (spaces << 1 | static_cast<int>(after_space))) == 0) {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
                p += 16;
                to += 16;
                after_space = (spaces & 0x8000) != 0;
                continue;
            }
        }
#endif
        const char* const character = p;
        bool space;
        if (const auto byte = static_cast<unsigned char>(*p); byte < 0x80) {
            // The first is the common case; str.isspace() also holds for four ASCII separators, 0x1C to 0x1F.
            space = byte <= ' ' && (byte == ' ' || (byte >= '\t' && byte <= '\r') || (byte >= 0x1c && byte <= 0x1f));
            ++p;
        } else {
            space = (unicode::properties(unicode::decode(p, end)) & unicode::SPACE) != 0;
        }
        if (!space)
            for (const char* from = character; from < p; ++from) *to++ = *from;
        else if (!after_space)
            *to++ = ' ';
        after_space = space;
    }
    if (after_space && to != out.data()) --to;
    out.resize(static_cast<std::size_t>(to - out.data()));
    return out;
}

}  // namespace cdrmix
