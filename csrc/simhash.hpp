// 64-bit SimHash of word term frequencies, and the exact join of two sets of fingerprints within a Hamming radius.
//
// Every occurrence of a word (words.hpp) votes for the bits of its hash, so a word's weight is its term frequency. Bit
// i of the fingerprint is 1 if more than half of the votes for it are 1. A text without words has fingerprint 0.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "words.hpp"

namespace cdrmix {

// Counts of ones for each of 64 bits. They are stored by bit planes: bit i of plane j is bit j of the count of bit i.
// So adding 64 votes takes a few 64-bit operations; full planes are added to ordinary counters.
class BitCounts {
  public:
    void add(std::uint64_t votes) noexcept {
        for (std::uint64_t& plane : planes_) {
            const std::uint64_t carry = plane & votes;
            plane ^= votes;
            votes = carry;
        }
        if (++pending_ == MOST) flush();
    }

    // The bits for which more than half of `total` votes are 1.
    std::uint64_t majority(std::uint64_t total) noexcept {
        flush();
        std::uint64_t bits = 0;
        for (unsigned bit = 0; bit < 64; ++bit) bits |= static_cast<std::uint64_t>(2 * counts_[bit] > total) << bit;
        return bits;
    }

  private:
    static constexpr unsigned PLANES = 8;
    static constexpr unsigned MOST = (1U << PLANES) - 1;  // most votes that the planes hold

    void flush() noexcept {
        for (unsigned plane = 0; plane < PLANES; ++plane)
            for (unsigned bit = 0; bit < 64; ++bit) counts_[bit] += (planes_[plane] >> bit & 1) << plane;
        planes_ = {};
        pending_ = 0;
    }

    std::array<std::uint64_t, PLANES> planes_{};
    std::array<std::uint64_t, 64> counts_{};
    unsigned pending_ = 0;
};

// Computes the fingerprints of texts, one after the other.
class SimHash {
  public:
    std::uint64_t operator()(const char* text, std::size_t size) noexcept {
        BitCounts counts;
        std::uint64_t total = 0;
        words_.open(text, size);
        while (const std::size_t read = words_.read(hashes_.data())) {
            for (std::size_t i = 0; i < read; ++i) counts.add(hashes_[i]);
            total += read;
        }
        return counts.majority(total);
    }

  private:
    Words words_;
    std::array<std::uint64_t, Words::MOST> hashes_;
};

inline int hamming_distance(std::uint64_t a, std::uint64_t b) noexcept {
    return __builtin_popcountll(a ^ b);
}

using Pair = std::pair<std::int64_t, std::int64_t>;

// All pairs (i, j) with hamming_distance(a[i], b[j]) <= radius, sorted by i, then j. Requires 0 <= radius < 64.
//
// The bits are split into radius + 1 blocks. Two fingerprints within the radius agree on at least one block
// (pigeonhole). So for each block `a` is sorted by it, and only fingerprints of `b` that are equal in it are compared.
// A pair that agrees on several blocks is reported for the first of them.
inline std::vector<Pair> join(const std::vector<std::uint64_t>& a, const std::vector<std::uint64_t>& b, int radius) {
    struct Entry {
        std::uint64_t key;
        std::uint64_t fingerprint;
        std::size_t index;
    };
    std::vector<Pair> pairs;
    std::vector<Entry> table(a.size());
    std::vector<std::uint64_t> masks;  // of the finished blocks and the current one
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
                    pairs.emplace_back(static_cast<std::int64_t>(entry->index), static_cast<std::int64_t>(j));
            }
        }
        masks.push_back(mask);
    }
    std::sort(pairs.begin(), pairs.end());
    return pairs;
}

}  // namespace cdrmix
