// A fast test whether cdrmix/data/cleaning/normalize.py would leave a UTF-8 text unchanged, which holds for most texts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "unicode.hpp"

namespace cdrmix {

// Characters of common scripts that are unchanged by NFC next to any others of this table: none composes with its
// neighbours (NFC_Quick_Check=Yes, combining class 0, Unicode 14).
inline bool stands_for_itself(char32_t c) noexcept {
    struct Range {
        char32_t first, last;
    };
    static constexpr Range RANGES[] = {
        {0xA0, 0x2FF},       // Latin
        {0x400, 0x482},      // Cyrillic
        {0x48A, 0x52F},      {0x2010, 0x2027},   {0x2030, 0x205E},  // punctuation
        {0x20A0, 0x20C0},    // currencies
        {0x2190, 0x21FF},    {0x2500, 0x25FF},   // arrows, boxes
        {0x3001, 0x3029},    {0x3041, 0x3094},   {0x30A1, 0x30FA},  // Japanese
        {0x4E00, 0x9FFF},    {0xAC00, 0xD7A3},   {0xFF01, 0xFF5E},  // Han, Hangul, full width
        {0x1F300, 0x1F64F},  // pictures
    };
    for (const Range& range : RANGES)
        if (c <= range.last) return c >= range.first;
    return false;
}

// True only for normal text; false where normalize.py has to decide.
inline bool is_surely_normal(const char* text, std::size_t size) noexcept {
    static constexpr auto PLAIN = [] {
        std::array<bool, 256> plain{};
        for (unsigned byte = 0x20; byte < 0x7F; ++byte) plain[byte] = true;
        plain['\n'] = plain['\t'] = true;
        return plain;
    }();
    const char* end = text + size;
    for (const char* p = text; p != end;) {
        if (PLAIN[static_cast<unsigned char>(*p)]) {
            ++p;
            continue;
        }
        if (static_cast<unsigned char>(*p) < 0x80 || !stands_for_itself(unicode::decode(p, end))) return false;
    }
    return true;
}

}  // namespace cdrmix
