// Fuzzes all of _dedup's C++ with any bytes as texts: sanitizers check memory, plain definitions check results.
//
// The entry point is libFuzzer's; driver.cpp replaces libFuzzer where there is no clang. See `make fuzz`.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>

#include "fuzz/require.hpp"
#include "lsh.hpp"
#include "minhash.hpp"
#include "simhash.hpp"

using namespace cdrmix;

namespace {

// A text in memory of exactly its size, so that the sanitizer sees any access beyond its ends.
struct Text {
    Text(const std::uint8_t* from, std::size_t count) : bytes(new char[count]), size(count) {
        std::copy_n(from, count, bytes.get());
    }

    const char* begin() const { return bytes.get(); }

    std::unique_ptr<char[]> bytes;
    std::size_t size;
};

// The words of a text, character by character.
std::vector<std::string> words_of(const Text& text) {
    std::vector<std::string> words;
    bool inside = false;
    const char* const end = text.begin() + text.size;
    for (const char* p = text.begin(); p != end;) {
        const char* const start = p;
        unicode::decode_lower(text.begin(), p, end, [&](char32_t c) {
            require(c < unicode::CODE_POINTS, "a lower case is a code point");
            const bool alone = is_own_word(c, unicode::properties(c));
            const bool is_word = alone || (unicode::properties(c) & unicode::WORD);
            if (is_word && (alone || !inside)) words.emplace_back();
            char bytes[unicode::MOST_BYTES];
            if (is_word) words.back().append(bytes, unicode::encode(c, bytes));
            inside = is_word && !alone;
        });
        require(p > start && p <= end, "every character moves on, within the text");
    }
    return words;
}

// The formula of WordHash, byte by byte.
std::uint64_t hash_of(const std::string& word) {
    std::uint64_t state = 0x9e3779b97f4a7c15ULL, block = 0;
    for (std::size_t i = 0; i < word.size(); ++i) {
        block |= static_cast<std::uint64_t>(static_cast<unsigned char>(word[i])) << (8 * (i % 8));
        if (i % 8 == 7 || i + 1 == word.size()) {
            state = mix(state ^ block);
            block = 0;
        }
    }
    return mix(state ^ word.size());
}

std::vector<std::uint64_t> shingles_of(const std::vector<std::uint64_t>& words, std::size_t ngram) {
    std::vector<std::uint64_t> shingles;
    const std::size_t count = words.empty() ? 0 : words.size() < ngram ? 1 : words.size() - ngram + 1;
    for (std::size_t first = 0; first < count; ++first) {
        std::uint64_t value = 0;
        for (std::size_t i = first; i < std::min(first + ngram, words.size()); ++i)
            value = value * 0xd1342543de82ef95ULL + words[i];
        shingles.push_back(mix(value));
    }
    return shingles;
}

template <class Reader>
std::vector<std::uint64_t> all_of(Reader& reader, const Text& text) {
    std::vector<std::uint64_t> found, some(Reader::MOST);
    reader.open(text.begin(), text.size);
    while (const std::size_t count = reader.read(some.data())) {
        require(count <= Reader::MOST, "no more is read than fits the buffer");
        found.insert(found.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count));
    }
    return found;
}

void check_fingerprint(SimHash& hash, const Text& text, const std::vector<std::uint64_t>& words) {
    std::uint64_t expected = 0;
    for (unsigned bit = 0; bit < 64; ++bit) {
        std::size_t ones = 0;
        for (const std::uint64_t word : words) ones += word >> bit & 1;
        expected |= static_cast<std::uint64_t>(2 * ones > words.size()) << bit;
    }
    require(hash(text.begin(), text.size) == expected, "the fingerprint is the majority of its words' bits");
}

void check_pairs(const std::vector<std::vector<std::uint32_t>>& signatures, std::size_t rows, std::size_t limit) {
    const std::size_t bands = signatures[0].size() / rows;
    std::vector<BucketEntry> entries;
    for (std::size_t i = 0; i < signatures.size(); ++i)
        for (std::size_t band = 0; band < bands; ++band)
            entries.push_back({band_hash(signatures[i].data() + band * rows, rows, band), static_cast<std::int64_t>(i)});
    std::map<std::uint64_t, std::set<std::int64_t>> buckets;
    for (const auto& entry : entries)
        if (entry.hash != NO_BUCKET) buckets[entry.hash].insert(entry.id);
    std::set<Pair> expected;
    for (const auto& [hash, ids] : buckets) {
        const std::vector<std::int64_t> in_order(ids.begin(), ids.end());
        for (std::size_t j = 0; j < in_order.size(); ++j)
            for (std::size_t i = 0; i < j; ++i)
                if (i < limit || j - i <= NEIGHBOURS) expected.emplace(in_order[i], in_order[j]);
    }
    std::vector<Pair> pairs;
    append_bucket_pairs(entries, limit, pairs);
    sort_unique(pairs);
    require(std::vector<Pair>(expected.begin(), expected.end()) == pairs, "pairs are those of the buckets");
    std::vector<std::int64_t> names(signatures.size());
    std::iota(names.begin(), names.end(), 0);
    for (std::size_t round = 0; round < names.size(); ++round)
        for (const auto& [a, b] : pairs) {
            auto &x = names[static_cast<std::size_t>(a)], &y = names[static_cast<std::size_t>(b)];
            x = y = std::min(x, y);
        }
    require(clusters(pairs, names.size()) == names, "clusters are the components");
}

void check_join(const std::vector<std::uint64_t>& a, const std::vector<std::uint64_t>& b, int radius) {
    std::vector<Pair> expected;
    for (std::size_t i = 0; i < a.size(); ++i)
        for (std::size_t j = 0; j < b.size(); ++j)
            if (hamming_distance(a[i], b[j]) <= radius)
                expected.emplace_back(static_cast<std::int64_t>(i), static_cast<std::int64_t>(j));
    require(join(a, b, radius) == expected, "the join is that of all pairs");
}

// Vectors of 64 bytes on any processor; AVX-512 has them as registers.
void minimum_wide(const std::uint32_t* xs, std::size_t count, const std::uint32_t* a, const std::uint32_t* b,
                  std::uint32_t* mins, std::size_t lanes) {
    kernels::minimum<64>(xs, count, a, b, mins, lanes);
}

}  // namespace

// The first bytes choose sizes, 0xF5, which is no byte of UTF-8, ends a text, and the others are text.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 4) return 0;
    const std::size_t ngram = 1 + data[0] % 9, num_perm = 1 + data[1] % 70, rows = 1 + data[2] % num_perm;
    const int radius = data[3] % 64;
    std::vector<Text> texts;
    for (std::size_t start = 4, stop; start <= size && texts.size() < 40; start = stop + 1) {
        stop = static_cast<std::size_t>(std::find(data + start, data + size, 0xF5) - data);
        texts.emplace_back(data + start, stop - start);
    }

    const Permutations permutations(num_perm, data[0]);
    auto sets = instruction_sets();
    sets.push_back({"wide", minimum_wide});
    Words words;
    Shingles shingles(ngram);
    SimHash simhash;
    std::vector<MinHash> hashers;
    for (const auto& set : sets) hashers.emplace_back(permutations, ngram, set.minimum);
    std::vector<std::vector<std::uint32_t>> signatures;
    std::vector<std::vector<std::uint64_t>> shingle_sets;
    std::vector<std::uint64_t> fingerprints;
    for (const Text& text : texts) {
        std::vector<std::uint64_t> word_hashes;
        for (const std::string& word : words_of(text)) word_hashes.push_back(hash_of(word));
        require(all_of(words, text) == word_hashes, "words are those of the definition");
        const auto expected = shingles_of(word_hashes, ngram);
        require(all_of(shingles, text) == expected, "shingles are those of the definition");
        check_fingerprint(simhash, text, word_hashes);
        fingerprints.push_back(simhash(text.begin(), text.size));

        std::vector<std::uint32_t> signature(num_perm, EMPTY), found(num_perm);
        for (std::size_t i = 0; i < num_perm; ++i)
            for (const std::uint64_t shingle : expected)
                signature[i] = std::min(signature[i], permutations.a[i] * static_cast<std::uint32_t>(shingle >> 32) +
                                                          permutations.b[i]);
        for (auto& hasher : hashers) {
            hasher(text.begin(), text.size, found.data());
            require(found == signature, "signatures are those of the definition on every instruction set");
        }
        signatures.push_back(signature);

        shingle_sets.push_back(shingle_set(shingles, text.begin(), text.size));
        const std::set<std::uint64_t> distinct(expected.begin(), expected.end());
        require(std::vector<std::uint64_t>(distinct.begin(), distinct.end()) == shingle_sets.back(), "a set is one");
    }
    for (std::size_t i = 1; i < texts.size(); ++i) {
        const auto &a = shingle_sets[i - 1], &b = shingle_sets[i];
        std::vector<std::uint64_t> common;
        std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(common));
        const auto all = a.size() + b.size() - common.size();
        const double expected = all == 0 ? 0 : static_cast<double>(common.size()) / static_cast<double>(all);
        require(exact_jaccard(a, b) == expected, "the similarity is that of the sets");
        const float estimate = estimated_jaccard(signatures[i - 1].data(), signatures[i].data(), num_perm);
        require(estimate >= 0 && estimate <= 1, "an estimate is a share");
    }
    check_pairs(signatures, rows, 1 + data[3] % 7);
    check_join(fingerprints, {fingerprints.rbegin(), fingerprints.rend()}, radius);
    return 0;
}
