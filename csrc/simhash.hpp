// 64-bit SimHash of word term frequencies, and the exact join of two sets of fingerprints within a Hamming radius.
//
// A word is a maximal run of ASCII letters and digits, '_' and bytes >= 0x80; ASCII letters are lowered. Every
// occurrence of a word votes with each bit of its hash, so a word weighs its term frequency; bit i of the fingerprint
// is 1 when more than half of the votes for it are. A text without words has fingerprint 0.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cdrmix {

// The finaliser of SplitMix64 (Stafford's variant 13): a bijection of 64 bits in which flipping any input bit flips
// each output bit with probability close to 1/2.
inline std::uint64_t mix(std::uint64_t x) noexcept {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

// The hash of a word, fed byte by byte: h = SEED; h = mix(h ^ block) for each block of 8 bytes (little-endian, the
// last one padded with zeros, absent when the length is a multiple of 8); the hash is mix(h ^ length).
class WordHash {
  public:
    void add(unsigned char byte) noexcept {
        block_ |= static_cast<std::uint64_t>(byte) << (8 * (length_ % 8));
        if (++length_ % 8 == 0) flush();
    }

    std::uint64_t finish() noexcept {
        if (length_ % 8 != 0) flush();
        return mix(state_ ^ length_);
    }

    bool empty() const noexcept { return length_ == 0; }

  private:
    static constexpr std::uint64_t SEED = 0x9e3779b97f4a7c15ULL;  // 2^64 / golden ratio

    void flush() noexcept {
        state_ = mix(state_ ^ block_);
        block_ = 0;
    }

    std::uint64_t state_ = SEED;
    std::uint64_t block_ = 0;
    std::uint64_t length_ = 0;
};

// Byte -> the byte as part of a word (letters lowered), or 0 when it ends one.
constexpr std::array<unsigned char, 256> word_bytes() noexcept {
    std::array<unsigned char, 256> table{};
    for (int byte = 0; byte < 256; ++byte) {
        const bool upper = byte >= 'A' && byte <= 'Z';
        const bool other =
            (byte >= 'a' && byte <= 'z') || (byte >= '0' && byte <= '9') || byte == '_' || byte >= 0x80;
        table[static_cast<std::size_t>(byte)] = static_cast<unsigned char>(upper ? byte + 32 : other ? byte : 0);
    }
    return table;
}

// The fingerprint of text[0 .. size).
inline std::uint64_t simhash(const char* text, std::size_t size) noexcept {
    static constexpr auto WORD_BYTE = word_bytes();
    std::array<std::uint32_t, 64> ones{};  // votes for 1, by bit; a word takes 2 bytes, so 2^32 words are 8 GiB
    std::uint64_t words = 0;
    WordHash word;
    for (std::size_t i = 0; i <= size; ++i) {
        const unsigned char byte = i < size ? WORD_BYTE[static_cast<unsigned char>(text[i])] : 0;
        if (byte != 0) {
            word.add(byte);
        } else if (!word.empty()) {
            const std::uint64_t hash = word.finish();
            for (unsigned bit = 0; bit < 64; ++bit) ones[bit] += static_cast<std::uint32_t>(hash >> bit) & 1U;
            ++words;
            word = WordHash();
        }
    }
    std::uint64_t fingerprint = 0;
    for (unsigned bit = 0; bit < 64; ++bit)
        fingerprint |= static_cast<std::uint64_t>(2 * static_cast<std::uint64_t>(ones[bit]) > words) << bit;
    return fingerprint;
}

inline int hamming_distance(std::uint64_t a, std::uint64_t b) noexcept {
    return __builtin_popcountll(a ^ b);
}

struct Pair {
    std::int64_t a;
    std::int64_t b;
};

// All pairs (i, j) with hamming_distance(a[i], b[j]) <= radius, sorted by i, then j. Requires 0 <= radius < 64.
//
// Cut into radius + 1 blocks of bits, two fingerprints within the radius agree on one whole block at least (pigeonhole).
// So each block in turn makes a table of `a` sorted by that block; only its equals in `b` are compared. A pair
// that agrees on several blocks is reported by the first of them.
inline std::vector<Pair> join(const std::vector<std::uint64_t>& a, const std::vector<std::uint64_t>& b, int radius) {
    struct Entry {
        std::uint64_t key;
        std::uint64_t fingerprint;
        std::size_t index;
    };
    std::vector<Pair> pairs;
    std::vector<Entry> table(a.size());
    std::vector<std::uint64_t> masks;  // of the blocks done and the one at hand
    const int blocks = radius + 1;
    for (int block = 0; block < blocks; ++block) {
        const int first = 64 * block / blocks, last = 64 * (block + 1) / blocks;  // bits [first, last)
        const std::uint64_t mask = (last - first == 64 ? ~0ULL : (1ULL << (last - first)) - 1) << first;
        for (std::size_t i = 0; i < a.size(); ++i) table[i] = {a[i] & mask, a[i], i};
        std::sort(table.begin(), table.end(), [](const Entry& x, const Entry& y) { return x.key < y.key; });
        for (std::size_t j = 0; j < b.size(); ++j) {
            const std::uint64_t key = b[j] & mask;
            auto entry = std::lower_bound(table.begin(), table.end(), key,
                                          [](const Entry& x, std::uint64_t wanted) { return x.key < wanted; });
            for (; entry != table.end() && entry->key == key; ++entry) {
                const std::uint64_t difference = entry->fingerprint ^ b[j];
                if (hamming_distance(difference, 0) > radius) continue;
                const bool seen = std::any_of(masks.begin(), masks.end(),
                                              [&](std::uint64_t earlier) { return (difference & earlier) == 0; });
                if (!seen)
                    pairs.push_back({static_cast<std::int64_t>(entry->index), static_cast<std::int64_t>(j)});
            }
        }
        masks.push_back(mask);
    }
    std::sort(pairs.begin(), pairs.end(), [](const Pair& x, const Pair& y) { return x.a != y.a ? x.a < y.a : x.b < y.b; });
    return pairs;
}

}  // namespace cdrmix
