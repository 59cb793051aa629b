// Unicode as in Python's str: character properties, UTF-8, and str.lower(), of Unicode 14.0.0.
//
// Text is UTF-8. Valid text gives Python's results. For invalid text it is only guaranteed that no byte outside of it
// is read, that every step advances, and that equal bytes give equal results.
#pragma once

#include <cstdint>

#include "unicode_tables.hpp"

namespace cdrmix::unicode {

// Bits of properties(c), with `ch` the character in Python.
enum Property : std::uint8_t {
    WORD = 1,             // ch.isalnum() or ch == "_": what \w of the module re matches
    ALPHABETIC = 2,       // ch.isalpha()
    SPACE = 4,            // ch.isspace()
    NUMERIC = 8,          // ch.isnumeric()
    CASED = 16,           // Unicode's Cased; unset where CASE_IGNORABLE is set, which decides then
    CASE_IGNORABLE = 32,  // Unicode's Case_Ignorable
    UPPER = 64,           // ch.isupper()
    PUNCTUATION = 128,    // unicodedata.category(ch) begins with P
};

constexpr char32_t CODE_POINTS = 0x110000;
constexpr char32_t REPLACEMENT = 0xFFFD;
constexpr char32_t CAPITAL_I_WITH_DOT = 0x130;  // the only one whose lower case is two code points: i and DOT_ABOVE
constexpr char32_t DOT_ABOVE = 0x307;
constexpr char32_t CAPITAL_SIGMA = 0x3A3;  // the only one whose lower case depends on its neighbours
constexpr char32_t SMALL_SIGMA = 0x3C3;
constexpr char32_t FINAL_SIGMA = 0x3C2;

inline const tables::Record& record(char32_t c) noexcept {
    constexpr char32_t MASK = (1U << tables::BLOCK_BITS) - 1;
    if (c >= CODE_POINTS) c = REPLACEMENT;
    const unsigned block = tables::BLOCK_OF[c >> tables::BLOCK_BITS];
    return tables::RECORDS[tables::RECORD_OF[(block << tables::BLOCK_BITS) | (c & MASK)]];
}

inline std::uint8_t properties(char32_t c) noexcept { return record(c).properties; }

// The lower case of c alone: the first code point of chr(c).lower().
inline char32_t lower(char32_t c) noexcept {
    if (c >= CODE_POINTS) return REPLACEMENT;
    return static_cast<char32_t>(static_cast<std::int32_t>(c) + record(c).to_lower);
}

// Scripts written without spaces between words: Han, kana, Thai, Lao, Tibetan, Myanmar, Khmer.
constexpr bool is_unspaced(char32_t c) noexcept {
    return (c >= 0x0E00 && c < 0x1000) || (c >= 0x1000 && c < 0x10A0) || (c >= 0x1780 && c < 0x1800) ||
           (c >= 0x2E80 && c < 0x3130) || (c >= 0x31F0 && c < 0xA000) || (c >= 0xF900 && c < 0xFB00) ||
           (c >= 0xFF66 && c < 0xFFA0) || (c >= 0x20000 && c < 0x32000);
}

// Reads the code point at p < end and moves p after it, never beyond `end`.
inline char32_t decode(const char*& p, const char* end) noexcept {
    const auto byte = [&](int i) -> char32_t { return static_cast<unsigned char>(p[i]); };
    const auto rest = [&](int i) -> char32_t { return byte(i) & 0x3F; };
    const char32_t first = byte(0);
    const int size = first < 0x80 ? 1 : first < 0xC0 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    char32_t c = REPLACEMENT;
    if (end - p < size) {
        p = end;
        return c;
    }
    switch (size) {
        case 1: c = first; break;
        case 2: c = (first & 0x1F) << 6 | rest(1); break;
        case 3: c = (first & 0x0F) << 12 | rest(1) << 6 | rest(2); break;
        case 4: c = (first & 0x07) << 18 | rest(1) << 12 | rest(2) << 6 | rest(3); break;
        default: break;  // a continuation without its start
    }
    p += size == 0 ? 1 : size;
    return c < CODE_POINTS ? c : REPLACEMENT;
}

// Reads the code point that ends before p > begin and moves p to its start, never before `begin`.
inline char32_t decode_before(const char* begin, const char*& p) noexcept {
    const char* end = p;
    do {
        --p;
    } while (p != begin && end - p < 4 && (static_cast<unsigned char>(*p) & 0xC0) == 0x80);
    const char* q = p;
    return decode(q, end);
}

constexpr int MOST_BYTES = 4;  // of one code point in UTF-8

// Writes c < CODE_POINTS as UTF-8, at most MOST_BYTES; returns the address after it.
inline char* encode(char32_t c, char* out) noexcept {
    const auto put = [&](char32_t byte) { *out++ = static_cast<char>(byte); };
    if (c < 0x80) {
        put(c);
    } else if (c < 0x800) {
        put(0xC0 | c >> 6), put(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
        put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
    } else {
        put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 0x3F)), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
    }
    return out;
}

// Whether a capital sigma in [sigma, after) of the text [begin, end) ends a word, Unicode's Final_Sigma: there is a
// cased character before it and none after it, apart from case-ignorable ones. A sigma is cased, so two sigmas never
// read the same character from the same side, and all sigmas of a text take linear time.
inline bool is_final_sigma(const char* begin, const char* sigma, const char* after, const char* end) noexcept {
    std::uint8_t seen = 0;
    for (const char* p = sigma; p != begin;) {
        seen = properties(decode_before(begin, p));
        if (!(seen & CASE_IGNORABLE)) break;
    }
    if (!(seen & CASED)) return false;
    seen = 0;
    for (const char* p = after; p != end;) {
        seen = properties(decode(p, end));
        if (!(seen & CASE_IGNORABLE)) break;
    }
    return !(seen & CASED);
}

// Reads the character at p < end of the text [begin, end), and passes each code point of its lower case, one or two, to
// `receive`. The results of all characters of a text are its str.lower(). p moves after the character.
template <class Receive>
inline void decode_lower(const char* begin, const char*& p, const char* end, Receive&& receive) {
    const char* start = p;
    const char32_t c = decode(p, end);
    if (c == CAPITAL_SIGMA) {
        receive(is_final_sigma(begin, start, p, end) ? FINAL_SIGMA : SMALL_SIGMA);
        return;
    }
    receive(lower(c));
    if (c == CAPITAL_I_WITH_DOT) receive(DOT_ABOVE);
}

}  // namespace cdrmix::unicode
