// Spans of a UTF-8 text that have the shape of personal data or of a secret; cdrmix/data/cleaning/pii.py verifies them.
//
// One pass over the words, runs of ASCII letters, digits and '_'. Characters beyond ASCII belong to no shape. A shape
// is searched at every word's beginning, and at most MOST bytes from it are read, so the time is linear.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace cdrmix {

namespace shapes {

enum Class : std::uint8_t { DIGIT = 1, LOWER = 2, UPPER = 4, UNDERSCORE = 8, STARTS = 16, TOKENS = 32 };
constexpr std::uint8_t LETTER = LOWER | UPPER, ALPHANUMERIC = LETTER | DIGIT, WORD = ALPHANUMERIC | UNDERSCORE;

// STARTS: what a shape may begin with, or contain, besides words. TOKENS: the characters of a key.
constexpr std::array<std::uint8_t, 256> classes() noexcept {
    std::array<std::uint8_t, 256> table{};
    for (unsigned c = 0; c < 128; ++c) {
        if (c >= '0' && c <= '9') table[c] = DIGIT | TOKENS;
        if (c >= 'a' && c <= 'z') table[c] = LOWER | TOKENS;
        if (c >= 'A' && c <= 'Z') table[c] = UPPER | TOKENS;
    }
    table['_'] = UNDERSCORE | TOKENS;
    for (const unsigned char c : {'/', '-', '=', '.'}) table[c] = TOKENS;
    for (const unsigned char c : {'@', '('}) table[c] = STARTS;
    table['+'] = TOKENS | STARTS;
    return table;
}
inline constexpr auto CLASS = classes();

inline bool is(char c, std::uint8_t classes) noexcept { return (CLASS[static_cast<unsigned char>(c)] & classes) != 0; }

}  // namespace shapes

class PersonalData {
  public:
    enum Kind : std::uint8_t { EMAIL, PHONE, IP, CREDIT_CARD, IBAN, TOKEN, ASSIGNED };
    static constexpr const char* NAMES[] = {"email", "phone", "ip", "credit_card", "iban", "token", "assigned"};

    struct Candidate {
        Kind kind;
        std::size_t begin, end;
    };

    // The candidates in text[0 .. size), in the order of their words; they may overlap.
    std::vector<Candidate> scan(const char* text, std::size_t size) {
        found_.clear();
        text_ = text, size_ = size;
        for (std::size_t i = 0; i < size;) {
            const std::uint8_t kind = shapes::CLASS[byte(i)];
            if (kind & WORD) {
                std::size_t stop = i;
                std::uint8_t all = 0;
                while (stop < size && shapes::CLASS[byte(stop)] & WORD) all |= shapes::CLASS[byte(stop++)];
                if (all & DIGIT) number_or_iban(i, stop);
                token(i, stop);
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

  private:
    static constexpr auto DIGIT = shapes::DIGIT, UPPER = shapes::UPPER, UNDERSCORE = shapes::UNDERSCORE;
    static constexpr auto STARTS = shapes::STARTS, TOKENS = shapes::TOKENS;
    static constexpr auto LETTER = shapes::LETTER, ALPHANUMERIC = shapes::ALPHANUMERIC, WORD = shapes::WORD;
    static bool is(char c, std::uint8_t classes) noexcept { return shapes::is(c, classes); }
    static constexpr std::size_t MOST = 4096;  // bytes of the longest token
    // A group of digits of a number: its begin and end.
    struct Group {
        std::size_t begin, end;
        std::size_t size() const noexcept { return end - begin; }
    };

    unsigned char byte(std::size_t i) const noexcept { return static_cast<unsigned char>(text_[i]); }
    char at(std::size_t i) const noexcept { return i < size_ ? text_[i] : '\n'; }
    char before(std::size_t i, std::size_t steps) const noexcept { return steps <= i ? text_[i - steps] : '\n'; }

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
            while (separators < 2 && std::strchr(" -./()", at(i)) != nullptr && at(i) != '\0') ++i, ++separators;
            if (separators == 0 || !is(at(i), DIGIT)) break;
        }
        if (whole >= 8) add(PHONE, begin, end);
    }

    // Whether the word before i announces a number: Tel.: 030 123456.
    bool said_to_be_phone(std::size_t i) const noexcept {
        std::size_t p = i;
        while (p != 0 && i - p < 5 && std::strchr(" .:#=(\t", text_[p - 1]) != nullptr && text_[p - 1] != '\0') --p;
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

    void email(std::size_t sign) {
        std::size_t begin = sign, end = sign + 1;
        const auto local = [](char c) { return is(c, WORD) || c == '.' || c == '%' || c == '+' || c == '-'; };
        while (begin != 0 && sign - begin < 64 && local(text_[begin - 1])) --begin;
        if (sign - begin == 64 && local(before(begin, 1))) return;
        while (begin != sign && !is(text_[begin], WORD)) ++begin;
        if (begin == sign || before(sign, 1) == '.') return;
        std::size_t dots = 0;
        while (end < size_ && end - sign < 254) {
            std::size_t stop = end;
            while (is(at(stop), ALPHANUMERIC) || (at(stop) == '-' && stop != end)) ++stop;
            if (stop == end) return;
            end = stop;
            if (at(end) != '.' || !is(at(end + 1), ALPHANUMERIC)) break;
            ++dots, ++end;
        }
        while (text_[end - 1] == '-') --end;
        if (dots != 0 && is(text_[end - 1], LETTER) && !is(at(end), UNDERSCORE) && at(end) != '@') add(EMAIL, begin, end);
    }

    // A word that begins as a service's keys do, or a long word of letters and digits to which something is assigned.
    void token(std::size_t begin, std::size_t stop) {
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
        if (!known && !is_assigned(begin)) return;
        std::size_t end = stop, digits = 0;
        while (end < size_ && end - begin < MOST && is(text_[end], TOKENS)) ++end;
        for (std::size_t i = begin; i < end && digits == 0; ++i) digits += is(text_[i], DIGIT);
        if (known)
            add(TOKEN, begin, end);
        else if (end - begin >= 20 && digits != 0)
            add(ASSIGNED, begin, end);
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
    std::vector<Candidate> found_;
};

}  // namespace cdrmix
