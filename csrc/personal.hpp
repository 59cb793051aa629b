// Spans of a UTF-8 text that have the shape of personal data or of a secret; cdrmix/data/cleaning/pii.py verifies them.
//
// One pass over the words, runs of ASCII letters, digits and '_'. Only e-mail addresses have characters beyond ASCII. A
// shape is searched at every word's beginning and reads a bounded number of bytes, except a key: keys may begin within
// one another, so the ends of their runs and the counts of their characters are kept. So the time is linear.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "unicode.hpp"

namespace cdrmix {

namespace shapes {

enum Class : std::uint8_t { DIGIT = 1, LOWER = 2, UPPER = 4, UNDERSCORE = 8, STARTS = 16, HYPHEN = 32, SLASH = 64 };
constexpr std::uint8_t LETTER = LOWER | UPPER, ALPHANUMERIC = LETTER | DIGIT, WORD = ALPHANUMERIC | UNDERSCORE;

// STARTS: what a shape may begin with, or contain, besides words. SLASH: of base64, also '+'.
constexpr std::array<std::uint8_t, 256> classes() noexcept {
    std::array<std::uint8_t, 256> table{};
    for (unsigned c = 0; c < 128; ++c) {
        if (c >= '0' && c <= '9') table[c] = DIGIT;
        if (c >= 'a' && c <= 'z') table[c] = LOWER;
        if (c >= 'A' && c <= 'Z') table[c] = UPPER;
    }
    table['_'] = UNDERSCORE;
    table['-'] = HYPHEN;
    table['/'] = SLASH;
    table['+'] = SLASH | STARTS;
    for (const unsigned char c : {'@', '('}) table[c] = STARTS;
    return table;
}
inline constexpr auto CLASS = classes();

inline bool is(char c, std::uint8_t classes) noexcept { return (CLASS[static_cast<unsigned char>(c)] & classes) != 0; }

}  // namespace shapes

// COUNTED: steps() tells how often a byte was looked at, for the test that this is linear.
template <bool COUNTED>
class PersonalScanner {
  public:
    enum Kind : std::uint8_t { EMAIL, PHONE, IP, CREDIT_CARD, IBAN, TOKEN, ASSIGNED };
    static constexpr const char* NAMES[] = {"email", "phone", "ip", "credit_card", "iban", "token", "assigned"};

    struct Candidate {
        Kind kind;
        std::size_t begin, end;
    };

    // The candidates in text[0 .. size), in the order of their words; they may overlap. Only of those that are found
    // at the words and signs before text[most].
    std::vector<Candidate> scan(const char* text, std::size_t size, std::size_t most) {
        found_.clear();
        text_ = text, size_ = size;
        runs_ = {}, windows_ = {};
        for (std::size_t i = 0; i < std::min(size, most);) {
            const std::uint8_t kind = shapes::CLASS[byte(i)];
            if (kind & WORD) {
                const std::size_t end = std::min(size, std::max(most, i + 5));  // more than 4 characters are not looked at
                std::size_t stop = i;
                std::uint8_t all = 0;
                while (stop < end && shapes::CLASS[byte(stop)] & WORD) all |= shapes::CLASS[byte(stop++)];
                if (all & DIGIT) number_or_iban(i, stop);
                token(i);
                i = stop;
                continue;
            }
            if (kind & STARTS) {
                if (text[i] == '@') email(i);
                if (text[i] == '+') international(i);
                if (text[i] == '(') american(i, true);
            }
            ++i;
        }
        return std::move(found_);
    }

    std::uint64_t steps() const noexcept { return steps_; }

  private:
    static constexpr auto DIGIT = shapes::DIGIT, UPPER = shapes::UPPER, UNDERSCORE = shapes::UNDERSCORE;
    static constexpr auto STARTS = shapes::STARTS, LETTER = shapes::LETTER, ALPHANUMERIC = shapes::ALPHANUMERIC;
    static constexpr auto WORD = shapes::WORD;
    static constexpr std::uint8_t DASHED = WORD | shapes::HYPHEN, BASE64 = DASHED | shapes::SLASH;
    static bool is(char c, std::uint8_t classes) noexcept { return shapes::is(c, classes); }
    static bool one_of(char c, const char* set) noexcept { return c != '\0' && std::strchr(set, c) != nullptr; }
    static constexpr std::size_t MOST = 4096;  // bytes of the longest key
    static constexpr std::size_t LOCAL = 64;   // bytes of an address before its @ (RFC 5321, 4.5.3.1)
    // A group of digits of a number: its begin and end.
    struct Group {
        std::size_t begin, end;
        std::size_t size() const noexcept { return end - begin; }
    };

    void step(std::size_t number = 1) const noexcept {
        if constexpr (COUNTED) steps_ += number;
    }
    unsigned char byte(std::size_t i) const noexcept {
        step();
        return static_cast<unsigned char>(text_[i]);
    }
    char at(std::size_t i) const noexcept {
        step();
        return i < size_ ? text_[i] : '\n';
    }
    char before(std::size_t i, std::size_t steps) const noexcept {
        step();
        return steps <= i ? text_[i - steps] : '\n';
    }

    void add(Kind kind, std::size_t begin, std::size_t end) { found_.push_back({kind, begin, end}); }

    // Whether the characters before i belong to the same number: 1.234, a-234, 5:234.
    bool continues(std::size_t i) const noexcept {
        const char c = before(i, 1);
        return is(c, WORD) || ((c == '.' || c == '-' || c == ':' || c == ',') && is(before(i, 2), WORD));
    }

    void number_or_iban(std::size_t begin, std::size_t stop) {
        if (!is(text_[begin], DIGIT)) {
            iban(begin);
            return;
        }
        if (stop - begin == 4 && (text_[begin] == '2' || text_[begin] == '3') && at(stop) == ':') ip6(begin);
        Group groups[6];
        const std::size_t count = digit_groups(begin, groups);
        if (count == 0 || continues(begin)) return;
        ip4(groups, count);
        credit_card(groups, count);
        american(begin, false);
        if (said_to_be_phone(begin)) {
            std::size_t digits = 0;
            for (std::size_t k = 0; k < count; ++k) digits += groups[k].size();
            if (digits >= 7 && digits <= 15) add(PHONE, begin, groups[count - 1].end);
        }
    }

    // Groups of digits from `begin`, separated by one space, dot or hyphen, up to a group that ends within a word.
    // Returns their number, at most 6.
    std::size_t digit_groups(std::size_t begin, Group* groups) const noexcept {
        std::size_t count = 0;
        for (std::size_t i = begin; count < 6; ++i) {
            const std::size_t first = i;
            while (is(at(i), DIGIT) && i - first < 20) ++i;
            if (i == first || is(at(i), WORD)) break;
            groups[count++] = {first, i};
            if (at(i) != ' ' && at(i) != '.' && at(i) != '-') break;
        }
        return count;
    }

    void ip4(const Group* groups, std::size_t count) {
        if (count < 4) return;
        for (std::size_t k = 0; k < 4; ++k)
            if (groups[k].size() > 3 || (k < 3 && text_[groups[k].end] != '.')) return;
        const std::size_t end = groups[3].end;
        if (at(end) == '.' && is(at(end + 1), WORD)) return;
        add(IP, groups[0].begin, end);
    }

    // Begins with up to four hexadecimal digits and a colon.
    void ip6(std::size_t begin) {
        if (continues(begin)) return;
        std::size_t end = begin, colons = 0;
        for (; end - begin < 40; ++end) {
            const char c = at(end);
            if (c == ':')
                ++colons;
            else if (!is(c, DIGIT) && !(c >= 'a' && c <= 'f') && !(c >= 'A' && c <= 'F'))
                break;
        }
        if (is(at(end), WORD)) return;
        if (text_[end - 1] == ':' && text_[end - 2] != ':') --end;  // a colon of the sentence
        if (colons >= 2) add(IP, begin, end);
    }

    // 13 to 19 digits without separators, or in the groups of cards: four of four, or 4, 6 and 5 or 4.
    void credit_card(const Group* groups, std::size_t count) {
        const std::size_t begin = groups[0].begin;
        if (groups[0].size() >= 13 && groups[0].size() <= 19) {
            if (at(groups[0].end) != '.' || !is(at(groups[0].end + 1), DIGIT)) add(CREDIT_CARD, begin, groups[0].end);
            return;
        }
        if (count < 3 || groups[0].size() != 4) return;
        const char separator = text_[groups[0].end];
        if (separator == '.' || text_[groups[1].end] != separator) return;
        if (separator == ' ' && before(begin, 1) == ' ' && is(before(begin, 2), DIGIT)) return;
        std::size_t last = 2;
        if (groups[1].size() == 4 && groups[2].size() == 4 && count >= 4 && groups[3].size() == 4 &&
            text_[groups[2].end] == separator)
            last = 3;
        else if (groups[1].size() != 6 || (groups[2].size() != 5 && groups[2].size() != 4))
            return;
        const std::size_t end = groups[last].end;
        if (at(end) == separator && is(at(end + 1), ALPHANUMERIC)) return;
        add(CREDIT_CARD, begin, end);
    }

    // A number of the North American plan: (415) 555-2671, 415-555-2671, 1-415-555-2671, 415.555.2671. Area and
    // exchange begin with 2 to 9.
    void american(std::size_t begin, bool bracket) {
        std::size_t i = begin + (bracket ? 1 : 0);
        const auto digits = [&](std::size_t number, bool coded) {
            if (coded && (at(i) < '2' || at(i) > '9')) return false;
            for (std::size_t k = 0; k < number; ++k, ++i)
                if (!is(at(i), DIGIT)) return false;
            return true;
        };
        if (bracket) {
            if (is(before(begin, 1), WORD) || !digits(3, true) || at(i++) != ')') return;
            if (at(i) == ' ' || at(i) == '-') ++i;
            if (!digits(3, true) || (at(i) != '-' && at(i) != '.' && at(i) != ' ')) return;
            ++i;
        } else {
            char separator = '\0';
            if (at(i) == '1' && (at(i + 1) == '-' || at(i + 1) == '.')) separator = at(i + 1), i += 2;
            if (!digits(3, true)) return;
            if (separator == '\0') separator = at(i);
            if ((separator != '-' && separator != '.') || at(i++) != separator) return;
            if (!digits(3, true) || at(i++) != separator) return;
        }
        if (!digits(4, false) || is(at(i), WORD)) return;
        if ((at(i) == '-' || at(i) == '.') && is(at(i + 1), WORD)) return;
        add(PHONE, begin, i);
    }

    // +, a country code and 8 to 15 digits in all (ITU-T E.164), with single separators or a bracket between them.
    void international(std::size_t begin) {
        if (is(before(begin, 1), WORD) || before(begin, 1) == '+' || at(begin + 1) < '1' || at(begin + 1) > '9') return;
        std::size_t digits = 0, end = begin, whole = 0;  // `whole`: digits up to `end`
        for (std::size_t i = begin + 1; digits <= 15;) {
            while (is(at(i), DIGIT) && digits <= 15) ++i, ++digits;
            if (digits > 15 || is(at(i), WORD)) break;
            end = i, whole = digits;
            if (digits >= 11) break;  // most numbers are complete by then, and another may follow
            std::size_t separators = 0;
            while (separators < 2 && one_of(at(i), " -./()")) ++i, ++separators;
            if (separators == 0 || !is(at(i), DIGIT)) break;
        }
        if (whole >= 8) add(PHONE, begin, end);
    }

    // Whether the word before i announces a number: Tel.: 030 123456.
    bool said_to_be_phone(std::size_t i) const noexcept {
        std::size_t p = i;
        while (p != 0 && i - p < 5 && one_of(text_[p - 1], " .:#=(\t")) --p;
        if (p == i) return false;
        const std::size_t end = p;
        while (p != 0 && end - p < 10 && is(text_[p - 1], LETTER)) --p;
        if (is(before(p, 1), WORD)) return false;
        for (const char* word : {"tel", "phone", "telephone", "fax", "mobile", "telefon", "fon", "mobil", "whatsapp"})
            if (std::strlen(word) == end - p && same(p, word)) return true;
        return false;
    }

    // Whether the lower-case `word` is at i, in any letter case.
    bool same(std::size_t i, const char* word) const noexcept {
        for (; *word != '\0'; ++word, ++i)
            if ((at(i) | (is(at(i), UPPER) ? 0x20 : 0)) != *word) return false;
        return true;
    }

    // Two capitals and two digits, then groups of capitals and digits with single spaces between.
    void iban(std::size_t begin) {
        if (!is(at(begin), UPPER) || !is(at(begin + 1), UPPER) || !is(at(begin + 2), DIGIT) || !is(at(begin + 3), DIGIT))
            return;
        std::size_t end = begin, letters = 0;
        for (std::size_t i = begin; letters < 34; ++i) {
            if (is(at(i), UPPER | DIGIT))
                ++letters, end = i + 1;
            else if (at(i) != ' ' || at(i - 1) == ' ')
                break;
        }
        if (letters >= 15) add(IBAN, begin, end);
    }

    // An address in ASCII and, where it differs, with the letters of any script (RFC 6531) and apostrophes. The second
    // is wider on both sides. It may be no address where the first is: `you@example.com` followed by letters that
    // belong to the sentence.
    void email(std::size_t sign) {
        const std::size_t narrow_end = domain_end(sign + 1, false), wide_end = domain_end(sign + 1, true);
        const std::size_t narrow = narrow_local(sign), wide = wide_local(sign, wide_end);
        if (wide_end != 0 && wide != sign && (wide != narrow || wide_end != narrow_end)) add(EMAIL, wide, wide_end);
        if (narrow_end != 0 && narrow != sign) add(EMAIL, narrow, narrow_end);
    }

    // A letter, digit or mark beyond ASCII. The blocks from Devanagari to Georgian and Khmer have vowels that are marks.
    static bool is_foreign(char32_t c) noexcept {
        if (c < 0x80) return false;
        const std::uint8_t properties = unicode::properties(c);
        if (properties & unicode::WORD) return true;
        if (properties & (unicode::SPACE | unicode::PUNCTUATION)) return false;
        return (c >= 0x300 && c < 0x370) || (c >= 0x900 && c < 0x1100) || (c >= 0x1780 && c < 0x1800);
    }

    // Of scripts whose letters may touch an address that does not belong to them: 请联系joe@example.com, 메일은joe@...
    static bool touches(char32_t c) noexcept { return unicode::is_unspaced(c) || (c >= 0xAC00 && c < 0xD7B0); }

    static bool is_local(char c) noexcept { return is(c, WORD) || c == '.' || c == '%' || c == '+' || c == '-'; }

    // Where the part before the @ begins; `sign` if there is none.
    std::size_t narrow_local(std::size_t sign) const noexcept {
        std::size_t begin = sign;
        while (begin != 0 && sign - begin < LOCAL && is_local(before(begin, 1))) --begin;
        if ((sign - begin == LOCAL && is_local(before(begin, 1))) || before(sign, 1) == '.') return sign;
        while (begin != sign && !is(at(begin), WORD)) ++begin;
        return begin;
    }

    // The same with letters of any script and apostrophes. end: of the address; 0: there is none.
    std::size_t wide_local(std::size_t sign, std::size_t end) const noexcept {
        if (before(sign, 1) == '.' || end == 0) return sign;
        // In a domain beyond ASCII, scripts may mix, and before it too. Letters after `.com` belong to the sentence.
        std::size_t dot = end;
        while (before(dot, 1) != '.') --dot;
        step(dot - sign);
        const auto is_ascii = [](char c) { return static_cast<unsigned char>(c) < 0x80; };
        const bool mixed = !std::all_of(text_ + sign, text_ + dot + 1, is_ascii);
        const char* p = text_ + sign;
        std::size_t begin = sign, first = sign;  // `first`: of the letters
        int kind = -1;                           // whether the last letter is of a script that touches others
        while (p != text_) {
            step();
            const char32_t c = unicode::decode_before(text_, p);
            const bool letter = is_foreign(c) || (c < 0x80 && is(static_cast<char>(c), ALPHANUMERIC));
            if (letter) {
                if (kind < 0) kind = touches(c);
                if (!mixed && kind != static_cast<int>(touches(c))) break;
            } else if (c >= 0x80 || (!is_local(static_cast<char>(c)) && !(c == '\'' && is_apostrophe(begin - 1, end)))) {
                break;
            }
            begin = static_cast<std::size_t>(p - text_);
            if (sign - begin > LOCAL) return sign;
            if (letter || c == '_') first = begin;
        }
        return first;
    }

    // Whether the ' at i stands within a name, as in o'brien, and is no quotation mark. end: of the address.
    bool is_apostrophe(std::size_t i, std::size_t end) const noexcept {
        const auto letter = [&](char c) { return is(c, ALPHANUMERIC) || static_cast<unsigned char>(c) >= 0x80; };
        if (!letter(at(i + 1)) || !letter(before(i, 1))) return false;
        std::size_t p = i;
        while (p != 0 && i - p < 3 && letter(text_[p - 1])) --p;
        if (at(end) == '\'') return before(p, 1) == '\'';  // 'o'brien@example.com', but not u'joe@example.com'
        // The prefixes of strings in programs.
        return i - p > 2 || !std::all_of(text_ + p, text_ + i, [](char c) { return one_of(c, "rubfRUBF"); });
    }

    // The end of the domain that begins at i; 0 if there is none. wide: with letters of any script.
    std::size_t domain_end(std::size_t i, bool wide) const noexcept {
        const auto after_letter = [&](std::size_t from) {  // `from` if there is no letter or digit
            if (is(at(from), ALPHANUMERIC)) return from + 1;
            const char* p = text_ + from;
            const bool foreign = wide && from < size_ && is_foreign(unicode::decode(p, text_ + size_));
            return foreign ? static_cast<std::size_t>(p - text_) : from;
        };
        std::size_t end = i, last = i, dots = 0;  // `last`: the last letter or digit
        while (end < size_ && end - i < 253) {
            const std::size_t label = end;
            for (;;) {
                if (const std::size_t next = after_letter(end); next != end)
                    last = end, end = next;
                else if (at(end) == '-' && end != label)
                    ++end;
                else
                    break;
            }
            if (end == label) return 0;
            if (at(end) != '.' || after_letter(end + 1) == end + 1) break;
            ++dots, ++end;
        }
        while (end != i && text_[end - 1] == '-') --end;
        if (dots == 0 || after_letter(last) != end || is(text_[last], DIGIT)) return 0;
        return is(at(end), UNDERSCORE) || at(end) == '@' ? 0 : end;
    }

    // A word that begins as a service's keys do, or a long word of letters and digits to which something is assigned.
    void token(std::size_t begin) {
        bool known = false;
        switch (text_[begin]) {
            case 'A': known = starts(begin, "AKIA") || starts(begin, "ASIA") || starts(begin, "AIza"); break;
            case 'S': known = starts(begin, "SG."); break;
            case 'e': known = starts(begin, "eyJ"); break;
            case 'g': known = (starts(begin, "gh") && at(begin + 3) == '_') || starts(begin, "github_pat_") ||
                              starts(begin, "glpat-"); break;
            case 'h': known = starts(begin, "hf_"); break;
            case 'n': known = starts(begin, "npm_"); break;
            case 'p': known = starts(begin, "pypi-"); break;
            case 'r': known = starts(begin, "rk_live_"); break;
            case 's': known = starts(begin, "sk-") || starts(begin, "sk_live_") || starts(begin, "sk_test_"); break;
            case 'x': known = starts(begin, "xox"); break;
            case 'y': known = starts(begin, "ya29."); break;
            default: break;
        }
        if (known)
            key(begin);
        else if (is_assigned(begin))
            assigned(begin);
    }

    // Keys with a prefix that their issuers document.
    void key(std::size_t begin) {
        switch (text_[begin]) {
            case 'A':
                if (starts(begin, "AIza")) {
                    if (const auto end = run(begin + 4, DASHED, 35, begin + 39)) random(TOKEN, begin, end, BOUNDED);
                } else if (const auto end = run(begin + 4, UPPER | DIGIT, 16, begin + 20)) {
                    if (!is(at(end), ALPHANUMERIC)) random(TOKEN, begin, end, BOUNDED);
                }
                break;
            case 'S': dotted(begin, begin + 3, 16, "", 1); break;
            case 'e': dotted(begin, begin + 3, 10, "eyJ", 2); break;
            case 'g':
                if (starts(begin, "glpat-"))
                    dashed(begin, begin + 6, 20);
                else if (starts(begin, "github_pat_"))
                    plain(begin, begin + 11, WORD, 36);
                else if (one_of(at(begin + 2), "pousr"))
                    plain(begin, begin + 4, ALPHANUMERIC, 36);
                break;
            case 'h': plain(begin, begin + 3, ALPHANUMERIC, 30); break;
            case 'n':
                if (const auto end = run(begin + 4, ALPHANUMERIC, 36, begin + 40)) random(TOKEN, begin, end, BOUNDED);
                break;
            case 'p': dashed(begin, begin + 5, 50); break;
            case 's':
                if (at(begin + 2) == '-') {
                    dashed(begin, begin + 3, 20);
                    break;
                }
                [[fallthrough]];
            case 'r': plain(begin, begin + 8, ALPHANUMERIC, 16); break;
            case 'x':
                if (at(begin + 4) == '-' && one_of(at(begin + 3), "abeoprs")) dashed(begin, begin + 5, 16);
                break;
            case 'y': dashed(begin, begin + 5, 20); break;
            default: break;
        }
    }

    // The end of at least `least` characters of the classes from `from` to `limit`; 0 if there are fewer.
    std::size_t run(std::size_t from, std::uint8_t classes, std::size_t least, std::size_t limit) const noexcept {
        std::size_t end = from;
        while (end < std::min(size_, limit) && is(at(end), classes)) ++end;
        return end - from >= least ? end : 0;
    }

    // A key of letters and digits, in which no other word begins.
    void plain(std::size_t begin, std::size_t body, std::uint8_t classes, std::size_t least) {
        if (const auto end = run(body, classes, least, begin + MOST)) random(TOKEN, begin, end, BOUNDED);
    }

    // A key with hyphens. After a hyphen another key may begin, and it has the same end.
    void dashed(std::size_t begin, std::size_t body, std::size_t least) {
        const std::size_t end = std::min(end_of_dashed(body, 0), begin + MOST);
        if (end >= body + least) random(TOKEN, begin, end, ONE_RUN);
    }

    // A key of 1 + `more` parts of at least `least` characters with dots between. prefix: of the parts but the last one.
    void dotted(std::size_t begin, std::size_t body, std::size_t least, const char* prefix, std::size_t more) {
        const std::size_t limit = begin + MOST;
        for (std::size_t part = 0;; ++part) {
            const std::size_t end = std::min(end_of_dashed(body, part), limit);
            if (end < body + least) return;
            if (part == more) {
                random(TOKEN, begin, end, RUNS);
                return;
            }
            if (end == limit || at(end) != '.') return;
            body = end + 1;
            if (part + 1 < more) {
                if (!starts(body, prefix)) return;
                body += std::strlen(prefix);
            }
        }
    }

    // The end of the run of letters, digits, '_' and '-' at `from`. number: of the run in its key.
    std::size_t end_of_dashed(std::size_t from, std::size_t number) noexcept {
        Group& kept = runs_[number];
        if (from < kept.begin || from >= kept.end)
            for (kept = {from, from}; kept.end < size_ && is(at(kept.end), DASHED);) ++kept.end;
        return kept.end;
    }

    // No value that is assigned begins within another one: before it is a sign that no value has but at its end.
    void assigned(std::size_t begin) {
        std::size_t end = run(begin, BASE64, 20, begin + MOST);
        if (end == 0) return;
        for (std::size_t most = std::min(end + 2, begin + MOST); end < most && at(end) == '=';) ++end;
        random(ASSIGNED, begin, end, BOUNDED);
    }

    // The counts of the characters of a part of the text, which moves on from key to key.
    struct Window {
        std::size_t begin = 0, end = 0;
        std::array<std::uint32_t, 256> counts{};
    };
    enum WindowOf : std::size_t { BOUNDED, ONE_RUN, RUNS };  // both ends of the keys of one window ascend

    // Adds text[begin .. end) if it has letters, digits and at least 3 bits of entropy per character: xxxx1234 has less.
    // On average, 20 random hexadecimal digits have 3.3 bits, 32 have 3.6, and base64 has 4 or more.
    void random(Kind kind, std::size_t begin, std::size_t end, WindowOf keys) {
        Window& window = windows_[keys];
        if (begin >= window.end || begin < window.begin || end < window.end) {
            while (window.begin < window.end) --window.counts[byte(window.begin++)];
            window.begin = window.end = begin;
        }
        while (window.begin < begin) --window.counts[byte(window.begin++)];
        while (window.end < end) ++window.counts[byte(window.end++)];
        bool letters = false, digits = false;
        double bits = 0;
        for (unsigned c = 0; c < 128; ++c) {
            if (window.counts[c] == 0) continue;
            letters |= is(static_cast<char>(c), LETTER), digits |= is(static_cast<char>(c), DIGIT);
            const double share = static_cast<double>(window.counts[c]) / static_cast<double>(end - begin);
            bits -= share * std::log2(share);
        }
        if (letters && digits && bits >= 3) add(kind, begin, end);
    }

    // Whether = or : is before i, apart from quotation marks and white space.
    bool is_assigned(std::size_t i) const noexcept {
        for (std::size_t steps = 1; steps <= 4; ++steps) {
            const char c = before(i, steps);
            if (c == '=' || c == ':') return true;
            if (c != ' ' && c != '\t' && c != '"' && c != '\'' && c != '`') return false;
        }
        return false;
    }

    bool starts(std::size_t i, const char* prefix) const noexcept {
        for (; *prefix != '\0'; ++prefix, ++i)
            if (at(i) != *prefix) return false;
        return true;
    }

    const char* text_ = nullptr;
    std::size_t size_ = 0;
    mutable std::uint64_t steps_ = 0;
    std::vector<Candidate> found_;
    std::array<Group, 3> runs_{};
    std::array<Window, 3> windows_{};
};

using PersonalData = PersonalScanner<false>;

}  // namespace cdrmix
