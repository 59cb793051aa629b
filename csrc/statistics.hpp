// Counts of one UTF-8 text, in one pass, from which cdrmix/data/cleaning/rules.py computes its scores.
//
// A word is a run without white space. A line is what is between two \n, without white space at its ends, if not
// empty. A paragraph is a run of lines without an empty one between them. Letter case is that of ASCII.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "repetition.hpp"
#include "unicode.hpp"

namespace cdrmix {

// The names of the columns that Python sees, in this order.
#define CDRMIX_STATISTICS(X)                                                                                          \
    X(characters) X(alphabetic_characters) X(alphanumeric_characters) X(unspaced_characters)                          \
    X(words) X(word_characters) X(alphabetic_words) X(stop_words) X(sentences)                                        \
    X(hashes) X(ellipses) X(curly_brackets) X(newlines) X(longest_line) X(generated_marks) X(lorem_ipsum)             \
    X(lines) X(line_characters) X(bullet_lines) X(ellipsis_lines) X(terminal_lines) X(short_lines) X(narrow_lines)    \
    X(javascript_lines) X(policy_lines) X(duplicate_lines) X(duplicate_line_characters)                               \
    X(paragraphs) X(paragraph_characters) X(duplicate_paragraphs) X(duplicate_paragraph_characters)                   \
    X(top_2_gram_characters) X(top_3_gram_characters) X(top_4_gram_characters)                                        \
    X(duplicate_5_gram_characters) X(duplicate_6_gram_characters) X(duplicate_7_gram_characters)                      \
    X(duplicate_8_gram_characters) X(duplicate_9_gram_characters) X(duplicate_10_gram_characters)

enum class Statistic : std::size_t {
#define CDRMIX_ENTRY(name) name,
    CDRMIX_STATISTICS(CDRMIX_ENTRY)
#undef CDRMIX_ENTRY
        COUNT
};
constexpr std::size_t STATISTICS = static_cast<std::size_t>(Statistic::COUNT);

constexpr const char* STATISTIC_NAMES[STATISTICS] = {
#define CDRMIX_ENTRY(name) #name,
    CDRMIX_STATISTICS(CDRMIX_ENTRY)
#undef CDRMIX_ENTRY
};

namespace characters {

enum Class : std::uint8_t { SPACE = 1, ALPHABETIC = 2, ALPHANUMERIC = 4, MARK = 8, PUNCTUATION = 16, PLAIN = 32 };

// MARK: characters at which a counted item may be recognised. PLAIN: letters that are no such characters. Bytes beyond
// ASCII have no class.
constexpr std::array<std::uint8_t, 256> byte_classes() noexcept {
    std::array<std::uint8_t, 256> table{};
    for (unsigned c = 0; c < 128; ++c) {
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'), digit = c >= '0' && c <= '9';
        const bool space = c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f);
        table[c] = static_cast<std::uint8_t>((letter ? ALPHABETIC : 0) | (letter || digit ? ALPHANUMERIC : 0) |
                                             (space ? SPACE : 0) |
                                             (c > 32 && c < 127 && !letter && !digit ? PUNCTUATION : 0));
    }
    for (const char c : {'#', '{', '}', '.', 'j', 'J', 'k', 'K', 'v', 'V', 'f', 'F', 'm', 'M', 'g', 'G'})
        table[static_cast<unsigned char>(c)] |= MARK;
    for (std::uint8_t& classes : table)
        if ((classes & ALPHABETIC) && !(classes & MARK)) classes |= PLAIN;
    return table;
}
inline constexpr auto CLASSES = byte_classes();
inline std::uint8_t classes(char c) noexcept { return CLASSES[static_cast<unsigned char>(c)]; }

template <std::size_t N>
constexpr bool one_of(char32_t c, const char32_t (&set)[N]) noexcept {
    for (std::size_t i = 0; i + 1 < N; ++i)
        if (c == set[i]) return true;
    return false;
}

// Marks that may end a line of prose, also before closing quotation marks, in scripts that have their own ones too.
constexpr bool ends_line(char32_t c) noexcept {
    if (c < 0x80) return c == '.' || c == '!' || c == '?' || c == '"' || c == '\'';
    return one_of(c, U"…”’»。！？．」』）؟۔।॥።၊။៕");
}
constexpr bool ends_sentence(char32_t c) noexcept { return one_of(c, U"。！？"); }  // at any position
constexpr bool closes(char32_t c) noexcept { return one_of(c, U")]}\"'”’»"); }
constexpr bool is_bullet(char32_t c) noexcept { return one_of(c, U"-*•‣▪▸►●○◦∙·–⁃"); }

}  // namespace characters

class TextStatistics {
  public:
    // Writes the STATISTICS of text[0 .. size) to `out`.
    void measure(const char* text, std::size_t size, double* out) {
        counts_.fill(0);
        stop_words_ = 0;
        word_hashes_.clear(), word_lengths_.clear(), lines_.clear();
        continuations_ = 0;
        paragraph_ = Paragraph();
        paragraphs_.clear();
        begin_ = text;
        const char* p = text;
        const char* end = text + size;
        for (std::uint64_t number = 0; p != end; ++number) p = read_line(p, end, number);
        end_paragraph();
        at(Statistic::characters) = position(end);
        finish();
        for (std::size_t i = 0; i < STATISTICS; ++i) out[i] = static_cast<double>(counts_[i]);
    }

  private:
    struct Span {
        std::uint64_t hash;
        std::uint32_t characters;
    };
    struct Paragraph {
        const char *begin = nullptr, *end = nullptr;
        std::uint64_t first = 0, last = 0;  // characters before its beginning and before its end
    };

    std::uint64_t& at(Statistic name) noexcept { return counts_[static_cast<std::size_t>(name)]; }

    // The number of characters between the text's beginning, `begin_`, and p.
    std::uint64_t position(const char* p) const noexcept { return static_cast<std::uint64_t>(p - begin_) - continuations_; }

    // Reads the line at p with its \n; returns the beginning of the next line.
    const char* read_line(const char* p, const char* end, std::uint64_t number) {
        const std::uint64_t line_position = position(p);
        const std::size_t first_word = word_hashes_.size();
        const char *word = nullptr, *line_begin = nullptr, *line_end = nullptr;
        std::uint64_t word_position = 0, stripped_first = 0, stripped_last = 0, alphabetic = 0, alphanumeric = 0;
        bool letters = false, javascript = false, policy = false, ended = false;
        const auto begin_word = [&](const char* start) {
            word = start, word_position = position(start), letters = false;
            if (line_begin == nullptr) line_begin = start, stripped_first = word_position;
        };
        const auto end_word = [&](const char* stop) {
            line_end = stop, stripped_last = position(stop);
            add_word(word, stop, static_cast<std::uint32_t>(stripped_last - word_position), letters);
            word = nullptr;
        };
        while (p != end) {
            const char* start = p;
            while (p != end && (characters::classes(*p) & characters::PLAIN)) ++p;
            if (p != start) {
                if (word == nullptr) begin_word(start);
                letters = true;
                alphabetic += static_cast<std::uint64_t>(p - start);
                alphanumeric += static_cast<std::uint64_t>(p - start);
                if (p == end) break;
                start = p;
            }
            std::uint8_t kind = characters::classes(*p);
            if (kind & characters::SPACE) {
                if (word != nullptr) end_word(p);
                if ((ended = *p++ == '\n')) break;
                continue;
            }
            if (static_cast<unsigned char>(*p) < 0x80) {
                ++p;
                if (word == nullptr) begin_word(start);
            } else {
                kind = read_other(unicode::decode(p, end));
                const bool space = (kind & characters::SPACE) != 0;
                if (space && word != nullptr) end_word(start);
                if (!space && word == nullptr) begin_word(start);
                continuations_ += static_cast<std::uint64_t>(p - start) - 1;  // after begin_word and end_word, which call position()
                if (space) continue;
            }
            letters |= (kind & characters::ALPHABETIC) != 0;
            alphabetic += (kind & characters::ALPHABETIC) != 0;
            alphanumeric += (kind & characters::ALPHANUMERIC) != 0;
            if (!(kind & characters::MARK)) continue;
            switch (*start | 0x20) {
                case '.':
                    while (p != end && *p == '.') ++p;
                    at(Statistic::ellipses) += static_cast<std::uint64_t>(p - start) / 3;
                    break;
                case '#': at(Statistic::hashes) += 1; break;
                case '{':
                case '}': at(Statistic::curly_brackets) += 1; break;
                case 'j': javascript |= found(start, end, 0, "javascript"); break;
                case 'k':
                    policy |= found(start, end, 3, "cookie") &&
                              (found(start, end, 3, "cookie policy") || found(start, end, 8, "uses cookies") ||
                               found(start, end, 10, "use of cookies") || found(start, end, 7, "use cookies"));
                    break;
                case 'v': policy |= found(start, end, 3, "privacy policy"); break;
                case 'f': policy |= found(start, end, 7, "terms of use"); break;
                case 'm': at(Statistic::lorem_ipsum) += found(start, end, 4, "lorem ipsum"); break;
                case 'g':
                    if (number < 5 && found(start, end, 0, "generated"))
                        at(Statistic::generated_marks) +=
                            found(start, end, 4, "autogenerated") || found(start, end, 5, "auto-generated") ||
                            found(start, end, 5, "auto generated") || found(start, end, 14, "automatically generated");
                    break;
                default: break;
            }
        }
        if (word != nullptr) end_word(p);
        at(Statistic::alphabetic_characters) += alphabetic;
        at(Statistic::alphanumeric_characters) += alphanumeric;
        at(Statistic::newlines) += ended;
        at(Statistic::longest_line) = std::max(at(Statistic::longest_line), position(p) - ended - line_position);
        if (line_begin == nullptr) {
            end_paragraph();
            return p;
        }
        const auto length = stripped_last - stripped_first;
        const auto size = static_cast<std::size_t>(line_end - line_begin);
        const char *first = line_begin, *last = line_end;
        const char32_t final = unicode::decode_before(line_begin, last);
        const bool ellipsis = final == U'…' || (size >= 3 && std::memcmp(line_end - 3, "...", 3) == 0);
        at(Statistic::lines) += 1;
        at(Statistic::line_characters) += length;
        at(Statistic::bullet_lines) += characters::is_bullet(unicode::decode(first, line_end));
        at(Statistic::ellipsis_lines) += ellipsis;
        at(Statistic::terminal_lines) += characters::ends_line(final);
        at(Statistic::short_lines) += length <= 30;
        at(Statistic::narrow_lines) += word_hashes_.size() - first_word < 3;
        at(Statistic::javascript_lines) += javascript;
        at(Statistic::policy_lines) += policy;
        lines_.push_back({hash_bytes(line_begin, size), static_cast<std::uint32_t>(length)});
        if (paragraph_.begin == nullptr) paragraph_.begin = line_begin, paragraph_.first = stripped_first;
        paragraph_.end = line_end, paragraph_.last = stripped_last;
        return p;
    }

    // Counts a character beyond ASCII by its properties.
    std::uint8_t read_other(char32_t c) noexcept {
        const std::uint8_t properties = unicode::properties(c);
        if (unicode::is_unspaced(c) && (properties & unicode::ALPHABETIC)) at(Statistic::unspaced_characters) += 1;
        at(Statistic::ellipses) += c == U'…';
        at(Statistic::sentences) += characters::ends_sentence(c);
        return static_cast<std::uint8_t>((properties & unicode::SPACE ? characters::SPACE : 0) |
                                         (properties & unicode::ALPHABETIC ? characters::ALPHABETIC : 0) |
                                         (properties & unicode::WORD ? characters::ALPHANUMERIC : 0));
    }

    // Whether `phrase` (ASCII, lower case) is in the text from `before` characters before p on, in any letter case.
    bool found(const char* p, const char* end, std::ptrdiff_t before, const char* phrase) const noexcept {
        if (p - begin_ < before) return false;
        for (p -= before; *phrase != '\0'; ++p, ++phrase) {
            if (p == end) return false;
            const char lower = *p >= 'A' && *p <= 'Z' ? static_cast<char>(*p + ('a' - 'A')) : *p;
            if (lower != *phrase) return false;
        }
        return true;
    }

    void add_word(const char* begin, const char* end, std::uint32_t length, bool alphabetic) {
        word_hashes_.push_back(hash_bytes(begin, static_cast<std::size_t>(end - begin)));
        word_lengths_.push_back(length);
        at(Statistic::word_characters) += length;
        at(Statistic::alphabetic_words) += alphabetic;
        at(Statistic::sentences) += is_sentence_end(begin, end);
        const auto punctuation = [](char c) { return (characters::classes(c) & characters::PUNCTUATION) != 0; };
        while (begin != end && punctuation(*begin)) ++begin;
        while (begin != end && punctuation(end[-1])) --end;
        if (end - begin < 2 || end - begin > 4) return;
        // The word as one number, with capitals lowered: 0x20 turns no other character into a letter.
        std::uint32_t letters = 0;
        for (; begin != end; ++begin) letters = letters << 8 | static_cast<unsigned char>(*begin | 0x20);
        const auto number = [](std::string_view stop_word) {
            std::uint32_t value = 0;
            for (const char c : stop_word) value = value << 8 | static_cast<unsigned char>(c);
            return value;
        };
        constexpr std::array<std::string_view, 8> STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"};
        for (unsigned i = 0; i < STOP_WORDS.size(); ++i)
            if (letters == number(STOP_WORDS[i])) stop_words_ |= 1U << i;
    }

    // Whether the word ends with . ! or ?, apart from closing brackets and quotation marks.
    static bool is_sentence_end(const char* begin, const char* end) noexcept {
        if (characters::classes(end[-1]) & characters::ALPHANUMERIC) return false;  // nearly all words
        while (begin != end) {
            const char32_t c = unicode::decode_before(begin, end);
            if (c == '.' || c == '!' || c == '?') return true;
            if (!characters::closes(c)) return false;
        }
        return false;
    }

    void end_paragraph() {
        if (paragraph_.begin == nullptr) return;
        const auto size = static_cast<std::size_t>(paragraph_.end - paragraph_.begin);
        paragraphs_.push_back(
            {hash_bytes(paragraph_.begin, size), static_cast<std::uint32_t>(paragraph_.last - paragraph_.first)});
        paragraph_ = Paragraph();
    }

    // The number of those of `spans` that equal an earlier one, and their characters.
    void count_duplicates(const std::vector<Span>& spans, Statistic number, Statistic characters) {
        first_.reset(spans.size());
        for (std::uint32_t i = 0; i < spans.size(); ++i) {
            if (first_.add(spans[i].hash, i) == i) continue;
            at(number) += 1;
            at(characters) += spans[i].characters;
        }
    }

    void finish() {
        at(Statistic::words) = word_hashes_.size();
        at(Statistic::stop_words) = static_cast<std::uint64_t>(__builtin_popcount(stop_words_));
        count_duplicates(lines_, Statistic::duplicate_lines, Statistic::duplicate_line_characters);
        count_duplicates(paragraphs_, Statistic::duplicate_paragraphs, Statistic::duplicate_paragraph_characters);
        at(Statistic::paragraphs) = paragraphs_.size();
        for (const Span& paragraph : paragraphs_) at(Statistic::paragraph_characters) += paragraph.characters;
        repetition_.count(word_hashes_, word_lengths_);
        for (std::size_t n = 2; n <= 4; ++n)
            counts_[static_cast<std::size_t>(Statistic::top_2_gram_characters) + n - 2] = repetition_.top[n];
        for (std::size_t n = 5; n <= 10; ++n)
            counts_[static_cast<std::size_t>(Statistic::duplicate_5_gram_characters) + n - 5] = repetition_.again[n];
    }

    std::array<std::uint64_t, STATISTICS> counts_{};
    const char* begin_ = nullptr;
    std::uint64_t continuations_ = 0;  // continuation bytes read
    unsigned stop_words_ = 0;     // one bit for each that occurred
    Paragraph paragraph_;
    std::vector<std::uint64_t> word_hashes_;
    std::vector<std::uint32_t> word_lengths_;
    std::vector<Span> lines_, paragraphs_;
    FirstPositions first_;
    Repetition repetition_;
};

}  // namespace cdrmix
