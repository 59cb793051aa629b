// The words of a UTF-8 text as 64-bit hashes, and the hashes of runs of n words (shingles).
//
// Words are those of Python's re.findall(r"\w+", text.lower()), but each character of a script that is written without
// spaces is a word: otherwise a whole clause would be one. A word's hash is that of its lower case in UTF-8. A
// buffer in the first-level cache holds a part of the text in lower case, and a bit for each byte that says whether it
// belongs to a word. ASCII is lowered and classified 16 bytes at a time, everything else by unicode.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "unicode.hpp"

namespace cdrmix {

// The finaliser of SplitMix64 (Stafford's variant 13): a bijection of 64 bits. Flipping any input bit flips each output
// bit with probability close to 1/2.
inline std::uint64_t mix(std::uint64_t x) noexcept {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

// The hash of a word of any length: h = SEED; h = mix(h ^ block) for each block of 8 bytes (little-endian, the last one
// padded with zeros, absent when the length is a multiple of 8); the hash is mix(h ^ length).
struct WordHash {
    std::uint64_t state = 0x9e3779b97f4a7c15ULL;  // SEED, 2^64 / golden ratio
    std::uint64_t length = 0;

    // Takes the next `size` bytes, a multiple of 8 unless they are the last; 8 bytes beyond them must be readable.
    void add(const char* bytes, std::size_t size) noexcept {
        length += size;
        for (; size > 8; bytes += 8, size -= 8) state = mix(state ^ block(bytes));
        if (size != 0) state = mix(state ^ (block(bytes) & (~0ULL >> (64 - 8 * size))));
    }

    std::uint64_t finish() const noexcept { return mix(state ^ length); }

  private:
    static std::uint64_t block(const char* bytes) noexcept {
        std::uint64_t value;
        std::memcpy(&value, bytes, sizeof value);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        value = __builtin_bswap64(value);
#endif
        return value;
    }
};

// Whether a character is a word by itself: letters, digits and vowel signs of Han, kana, Thai, Lao, Myanmar and Khmer.
// Tibetan separates its syllables by a mark.
inline bool is_own_word(char32_t c, std::uint8_t properties) noexcept {
    if (!unicode::is_unspaced(c) || (c >= 0x0F00 && c < 0x1000)) return false;
    if (properties & unicode::WORD) return true;
    const bool with_vowel_signs = c < 0x1800;  // Thai, Lao, Myanmar, Khmer
    return with_vowel_signs && !(properties & (unicode::SPACE | unicode::PUNCTUATION));
}

// Reads the words of texts, one text after the other.
class Words {
    static constexpr std::size_t CHUNK = 4096;  // bytes of lower case at a time
    static constexpr std::size_t STEP = 16;     // bytes of ASCII at a time

  public:
    static constexpr std::size_t MOST = CHUNK / 2 + 1;  // words that one read() gives

    void open(const char* text, std::size_t size) noexcept {
        begin_ = next_ = text;
        end_ = text + size;
        unfinished_ = WordHash();
        filled_ = 0;
    }

    // The hashes of the next words, in order, at most MOST; returns their number, 0 at the end of the text.
    std::size_t read(std::uint64_t* hashes) noexcept {
        while (next_ != end_ || filled_ != 0) {
            fill();
            if (const std::size_t count = hash(hashes)) return count;
        }
        return 0;
    }

  private:
    // Marks the bytes of `mask`, at most 32, as bytes of words; bit 0 is the byte at `position`.
    void mark(std::size_t position, std::uint64_t mask) noexcept {
        const unsigned shift = position % 64;
        in_word_[position / 64] |= mask << shift;
        if (shift > 32) in_word_[position / 64 + 1] |= mask >> (64 - shift);
    }

    // Lowers and classifies the STEP bytes at p, to lowered_[filled]; returns how many ASCII bytes they begin with.
    std::size_t add_ascii(const char* p, std::size_t filled) noexcept {
#if defined(__SSE2__)
        const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const auto within = [](__m128i value, char first, char last) {  // first <= value <= last, of unsigned bytes
            const auto offset = _mm_sub_epi8(value, _mm_set1_epi8(first));
            return _mm_cmpeq_epi8(_mm_min_epu8(offset, _mm_set1_epi8(static_cast<char>(last - first))), offset);
        };
        const auto upper = within(bytes, 'A', 'Z');
        const auto lowered = _mm_add_epi8(bytes, _mm_and_si128(upper, _mm_set1_epi8('a' - 'A')));
        const auto word = _mm_or_si128(_mm_or_si128(within(lowered, 'a', 'z'), within(bytes, '0', '9')),
                                       _mm_cmpeq_epi8(bytes, _mm_set1_epi8('_')));
        const unsigned other = static_cast<unsigned>(_mm_movemask_epi8(bytes));
        const std::size_t ascii = other == 0 ? STEP : static_cast<std::size_t>(__builtin_ctz(other));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(lowered_ + filled), lowered);
        const unsigned mask = static_cast<unsigned>(_mm_movemask_epi8(word));
#else
        unsigned mask = 0;
        std::size_t ascii = 0;
        for (; ascii < STEP && is_ascii(p[ascii]); ++ascii) {
            const auto c = static_cast<unsigned char>(p[ascii]);
            mask |= static_cast<unsigned>(unicode::properties(c) & unicode::WORD) << ascii;
            lowered_[filled + ascii] = static_cast<char>(unicode::lower(c));
        }
#endif
        mark(filled, mask & ((1U << ascii) - 1));
        return ascii;
    }

    static bool is_ascii(char byte) noexcept { return static_cast<unsigned char>(byte) < 0x80; }

    // Lowers and classifies one character; moves p after it, and `filled` after its lower case.
    void add_character(const char*& p, std::size_t& filled) noexcept {
        unicode::decode_lower(begin_, p, end_, [&](char32_t c) {
            const std::uint8_t properties = unicode::properties(c);
            const bool alone = is_own_word(c, properties);
            filled += alone;  // a byte that belongs to no word, before and behind it
            const auto size = static_cast<std::size_t>(unicode::encode(c, lowered_ + filled) - (lowered_ + filled));
            if (alone || (properties & unicode::WORD)) mark(filled, (1U << size) - 1);
            filled += size + alone;
        });
    }

    // Fills the buffer with lower case, as far as there is text.
    void fill() noexcept {
        static_assert(STEP >= 2 * (unicode::MOST_BYTES + 2), "a character must fit STEP bytes");
        const char* p = next_;
        std::size_t filled = filled_;
        while (p != end_ && filled + STEP <= CHUNK) {
            if (static_cast<std::size_t>(end_ - p) >= STEP) {
                const std::size_t ascii = add_ascii(p, filled);
                filled += ascii;
                p += ascii;
                if (ascii == STEP) continue;
            }
            // Until there are more ASCII bytes in a row than the space between two words.
            do {
                if (filled + STEP > CHUNK) break;
                add_character(p, filled);
            } while (p != end_ && (!is_ascii(*p) || (end_ - p > 1 && !is_ascii(p[1]))));
        }
        next_ = p;
        filled_ = filled;
    }

    // The hashes of the words in the buffer; it keeps only a last word that may continue.
    std::size_t hash(std::uint64_t* hashes) noexcept {
        std::size_t count = 0, start = 0;
        std::uint64_t before = 0;  // whether the byte before this block of 64 belongs to a word
        bool inside = false;
        const auto finish = [&](std::size_t stop) {
            unfinished_.add(lowered_ + start, stop - start);
            hashes[count++] = unfinished_.finish();
            unfinished_ = WordHash();
        };
        for (std::size_t block = 0; block * 64 < filled_; ++block) {
            const std::uint64_t mask = in_word_[block];
            in_word_[block] = 0;
            std::uint64_t edges = mask ^ (mask << 1 | before);  // where words begin and where they end, by turns
            before = mask >> 63;
            if (filled_ - 64 * block < 64) edges &= (1ULL << (filled_ - 64 * block)) - 1;  // the last may go on
            for (; edges != 0; edges &= edges - 1) {
                const std::size_t position = 64 * block + static_cast<std::size_t>(__builtin_ctzll(edges));
                if (inside)
                    finish(position);
                else
                    start = position;
                inside = !inside;
            }
        }
        const std::size_t stop = filled_;
        filled_ = 0;
        if (!inside) return count;
        if (next_ == end_) {
            finish(stop);
            return count;
        }
        // The word may continue: all of it is hashed except 1 to 8 bytes, with which the next buffer begins.
        const std::size_t hashed = (stop - start - 1) / 8 * 8;
        unfinished_.add(lowered_ + start, hashed);
        filled_ = stop - start - hashed;
        std::memmove(lowered_, lowered_ + start + hashed, filled_);
        mark(0, (1U << filled_) - 1);
        return count;
    }

    const char* begin_ = nullptr;
    const char* next_ = nullptr;  // not read yet
    const char* end_ = nullptr;
    WordHash unfinished_;  // of the word that the buffer begins with, where it began in an earlier buffer
    std::size_t filled_ = 0;
    char lowered_[CHUNK + STEP] = {};
    std::uint64_t in_word_[CHUNK / 64 + 2] = {};
};

// Reads the shingles of texts, one text after the other: the hash of each `ngram` consecutive words. A text of fewer
// words has one shingle of all of them; a text without words has none.
//
// The hash of words w_1 .. w_n is mix(w_1 M^(n-1) + ... + w_n) modulo 2^64, which advances by one word in two products.
class Shingles {
    static constexpr std::uint64_t M = 0xd1342543de82ef95ULL;  // odd; a multiplier of good spectrum (Steele, Vigna 2021)

  public:
    static constexpr std::size_t MOST = Words::MOST;  // shingles that one read() gives

    explicit Shingles(std::size_t ngram) : ngram_(ngram), hashes_(ngram + Words::MOST) {
        for (std::size_t i = 0; i < ngram; ++i) power_ *= M;
    }

    void open(const char* text, std::size_t size) noexcept {
        words_.open(text, size);
        std::fill_n(hashes_.begin(), ngram_, 0);
        count_ = 0;
        rolling_ = 0;
    }

    // The hashes of the next shingles, in order, at most MOST; returns their number, 0 at the end of the text.
    std::size_t read(std::uint64_t* shingles) noexcept {
        const std::uint64_t* const leaving = hashes_.data();  // of word i of those read now, the one `ngram` before it
        std::uint64_t* const words = hashes_.data() + ngram_;
        while (const std::size_t read = words_.read(words)) {
            std::size_t found = 0;
            for (std::size_t i = 0; i < read; ++i) {
                rolling_ = rolling_ * M + (words[i] - leaving[i] * power_);
                shingles[found] = mix(rolling_);
                found += count_ + i + 1 >= ngram_;
            }
            count_ += read;
            std::memmove(hashes_.data(), hashes_.data() + read, ngram_ * sizeof *words);
            if (found != 0) return found;
        }
        if (count_ == 0 || count_ >= ngram_) return 0;
        count_ = 0;
        *shingles = mix(rolling_);
        return 1;
    }

  private:
    Words words_;
    std::size_t ngram_;
    std::vector<std::uint64_t> hashes_;
    std::uint64_t power_ = 1;  // M^ngram
    std::size_t count_ = 0;    // words read
    std::uint64_t rolling_ = 0;
};

}  // namespace cdrmix
