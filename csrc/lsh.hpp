// Locality-sensitive hashing of MinHash signatures: band hashes, pairs with equal band hashes, clusters of pairs.
//
// A signature is split into bands of some rows. Two texts of Jaccard similarity s agree on all rows of at least one
// band with probability 1 - (1 - s^rows)^bands (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, section 3.4).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "minhash.hpp"

namespace cdrmix {

using Pair = std::pair<std::int64_t, std::int64_t>;

constexpr std::uint64_t NO_BUCKET = ~0ULL;  // band hash of a text without words: equal to no other, not even itself

// The hash of band number `band`: h = mix(band); h = mix(h ^ value) for each of its values. NO_BUCKET where all are
// EMPTY.
inline std::uint64_t band_hash(const std::uint32_t* values, std::size_t rows, std::uint64_t band) noexcept {
    std::uint64_t hash = mix(band + 1);
    bool empty = true;
    for (std::size_t row = 0; row < rows; ++row) {
        hash = mix(hash ^ values[row]);
        empty &= values[row] == EMPTY;
    }
    return empty ? NO_BUCKET : hash == NO_BUCKET ? NO_BUCKET - 1 : hash;
}

struct BucketEntry {
    std::uint64_t hash;
    std::int64_t id;
};

// Sorts by hash, then id. Hashes are evenly distributed, so one pass over their upper bits leaves parts that a
// comparison sort orders within the cache. With other hashes it is correct, but slower.
inline void sort_entries(std::vector<BucketEntry>& entries) {
    constexpr unsigned BITS = 10;
    constexpr std::size_t FEW = 4096;  // entries that fit the cache
    const auto less = [](const BucketEntry& x, const BucketEntry& y) {
        return x.hash != y.hash ? x.hash < y.hash : x.id < y.id;
    };
    if (entries.size() <= FEW) {
        std::sort(entries.begin(), entries.end(), less);
        return;
    }
    std::vector<std::size_t> ends((1U << BITS) + 1, 0);
    for (const BucketEntry& entry : entries) ++ends[(entry.hash >> (64 - BITS)) + 1];
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    std::vector<BucketEntry> parted(entries.size());
    std::vector<std::size_t> next(ends.begin(), ends.end() - 1);
    for (const BucketEntry& entry : entries) parted[next[entry.hash >> (64 - BITS)]++] = entry;
    for (std::size_t part = 0; part + 1 < ends.size(); ++part)
        std::sort(parted.begin() + static_cast<std::ptrdiff_t>(ends[part]),
                  parted.begin() + static_cast<std::ptrdiff_t>(ends[part + 1]), less);
    entries.swap(parted);
}

constexpr std::size_t NEIGHBOURS = 8;  // preceding ids with which an id of a crowded bucket is paired

// Appends the pairs (i, j), i < j, of different ids in one bucket, in any order of `entries`, which is sorted. In a
// bucket of more than `limit` ids that would be too many pairs. There each id is paired with the `limit` least ones
// and with the NEIGHBOURS before it. This keeps the bucket connected, and pairs the ids of a cluster, which are often
// neighbours.
inline void append_bucket_pairs(std::vector<BucketEntry>& entries, std::size_t limit, std::vector<Pair>& pairs) {
    entries.erase(std::remove_if(entries.begin(), entries.end(),
                                 [](const BucketEntry& entry) { return entry.hash == NO_BUCKET; }),
                  entries.end());
    sort_entries(entries);
    entries.erase(std::unique(entries.begin(), entries.end(),
                              [](const BucketEntry& x, const BucketEntry& y) { return x.hash == y.hash && x.id == y.id; }),
                  entries.end());
    for (std::size_t begin = 0, end = 0; begin < entries.size(); begin = end) {
        while (end < entries.size() && entries[end].hash == entries[begin].hash) ++end;
        for (std::size_t j = begin + 1; j < end; ++j) {
            const std::size_t first = std::min(j, begin + limit);  // ids before it are among the least ones
            for (std::size_t i = begin; i < first; ++i) pairs.emplace_back(entries[i].id, entries[j].id);
            for (std::size_t i = std::max(first, j - std::min(j, NEIGHBOURS)); i < j; ++i)
                pairs.emplace_back(entries[i].id, entries[j].id);
        }
    }
}

inline void sort_unique(std::vector<Pair>& pairs) {
    std::sort(pairs.begin(), pairs.end());
    pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
}

// The least index in each index's component of the graph of `pairs` over 0 .. count - 1.
template <class Pairs>
inline std::vector<std::int64_t> clusters(const Pairs& pairs, std::size_t count) {
    std::vector<std::int64_t> parent(count);
    std::iota(parent.begin(), parent.end(), 0);
    const auto root = [&](std::int64_t i) {
        while (parent[static_cast<std::size_t>(i)] != i) {
            auto& up = parent[static_cast<std::size_t>(i)];
            i = up = parent[static_cast<std::size_t>(up)];  // halves the path of the next search
        }
        return i;
    };
    for (const auto& pair : pairs) {
        const std::int64_t a = root(pair.first), b = root(pair.second);
        parent[static_cast<std::size_t>(std::max(a, b))] = std::min(a, b);
    }
    // A parent is never greater than its child, so parents are final before their children.
    for (auto& up : parent) up = parent[static_cast<std::size_t>(up)];
    return parent;
}

}  // namespace cdrmix
