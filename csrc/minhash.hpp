// MinHash signatures of shingles: k permutations in vectors of 32-bit lanes, on the widest instruction set available.
//
// Value i of a signature is the least (a_i x + b_i) mod 2^32 over the upper 32 bits x of the text's shingle hashes,
// with a_i odd. The share of equal values of two signatures estimates the Jaccard similarity of the shingle sets
// (Broder 1997). All instruction sets run the same source on integers, so their results are equal bit for bit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "words.hpp"

namespace cdrmix {

constexpr std::uint32_t EMPTY = 0xffffffffU;  // every value of the signature of a text without words

// mins[i] = min(mins[i], a[i] * x + b[i]) for each x of xs[0 .. count) and i < lanes, a multiple of MOST_LANES.
using MinimumKernel = void (*)(const std::uint32_t* xs, std::size_t count, const std::uint32_t* a,
                               const std::uint32_t* b, std::uint32_t* mins, std::size_t lanes);

namespace kernels {

constexpr std::size_t VECTORS = 4;  // at a time: their a, b and minima fill 12 of 16 registers

// Vectors of BYTES; the compiler builds them from narrower ones where a target lacks them.
template <std::size_t BYTES>
__attribute__((always_inline)) inline void minimum(const std::uint32_t* xs, std::size_t count, const std::uint32_t* a,
                                                   const std::uint32_t* b, std::uint32_t* mins, std::size_t lanes) {
    typedef std::uint32_t Vector __attribute__((vector_size(BYTES)));
    constexpr std::size_t LANES = BYTES / sizeof *xs;
    for (std::size_t first = 0; first < lanes; first += VECTORS * LANES) {
        Vector factor[VECTORS], summand[VECTORS], least[VECTORS];
        std::memcpy(factor, a + first, sizeof factor);
        std::memcpy(summand, b + first, sizeof summand);
        std::memcpy(least, mins + first, sizeof least);
        for (std::size_t i = 0; i < count; ++i) {
#pragma GCC unroll 4
            for (std::size_t v = 0; v < VECTORS; ++v) {
                const Vector value = factor[v] * xs[i] + summand[v];
                least[v] = value < least[v] ? value : least[v];
            }
        }
        std::memcpy(mins + first, least, sizeof least);
    }
}

inline void minimum_portable(const std::uint32_t* xs, std::size_t count, const std::uint32_t* a,
                             const std::uint32_t* b, std::uint32_t* mins, std::size_t lanes) {
    minimum<16>(xs, count, a, b, mins, lanes);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void minimum_avx2(const std::uint32_t* xs, std::size_t count,
                                                         const std::uint32_t* a, const std::uint32_t* b,
                                                         std::uint32_t* mins, std::size_t lanes) {
    minimum<32>(xs, count, a, b, mins, lanes);
}

__attribute__((target("avx512f"))) inline void minimum_avx512(const std::uint32_t* xs, std::size_t count,
                                                              const std::uint32_t* a, const std::uint32_t* b,
                                                              std::uint32_t* mins, std::size_t lanes) {
    minimum<64>(xs, count, a, b, mins, lanes);
}
#endif

constexpr std::size_t MOST_LANES = VECTORS * 64 / sizeof(std::uint32_t);

}  // namespace kernels

struct InstructionSet {
    const char* name;
    MinimumKernel minimum;
};

// The instruction sets of this processor, the narrowest first.
inline std::vector<InstructionSet> instruction_sets() {
    std::vector<InstructionSet> sets{{"portable", kernels::minimum_portable}};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) sets.push_back({"avx2", kernels::minimum_avx2});
    if (__builtin_cpu_supports("avx512f")) sets.push_back({"avx512", kernels::minimum_avx512});
#endif
    return sets;
}

// a_i and b_i of `count` permutations, padded to a multiple of MOST_LANES. They come from the sequence mix(start + j
// G), j = 1, 2, ..., of SplitMix64, where start = mix(seed) and G = 2^64 / golden ratio: a_i is the upper half of
// number 2i + 1, made odd, and b_i that of number 2i + 2.
struct Permutations {
    Permutations(std::size_t permutations, std::uint64_t seed) : count(permutations) {
        const std::size_t lanes = (count + kernels::MOST_LANES - 1) / kernels::MOST_LANES * kernels::MOST_LANES;
        std::uint64_t state = mix(seed);
        const auto draw = [&] { return static_cast<std::uint32_t>(mix(state += 0x9e3779b97f4a7c15ULL) >> 32); };
        for (std::size_t i = 0; i < lanes; ++i) {
            a.push_back(draw() | 1);
            b.push_back(draw());
        }
    }

    std::size_t count;
    std::vector<std::uint32_t> a, b;
};

// Computes the signatures of texts, one after the other.
class MinHash {
  public:
    MinHash(const Permutations& permutations, std::size_t ngram, MinimumKernel kernel)
        : permutations_(permutations), kernel_(kernel), shingles_(ngram), mins_(permutations.a.size()) {}

    // Writes the signature of text[0 .. size): as many values as there are permutations.
    void operator()(const char* text, std::size_t size, std::uint32_t* signature) noexcept {
        std::fill(mins_.begin(), mins_.end(), EMPTY);
        shingles_.open(text, size);
        while (const std::size_t count = shingles_.read(hashes_.data())) {
            for (std::size_t i = 0; i < count; ++i) xs_[i] = static_cast<std::uint32_t>(hashes_[i] >> 32);
            kernel_(xs_.data(), count, permutations_.a.data(), permutations_.b.data(), mins_.data(), mins_.size());
        }
        std::copy_n(mins_.begin(), permutations_.count, signature);
    }

  private:
    const Permutations& permutations_;
    MinimumKernel kernel_;
    Shingles shingles_;
    std::vector<std::uint32_t> mins_;
    std::array<std::uint64_t, Shingles::MOST> hashes_;
    std::array<std::uint32_t, Shingles::MOST> xs_;
};

// The share of equal values of two signatures of `count` values; EMPTY equals nothing.
inline float estimated_jaccard(const std::uint32_t* a, const std::uint32_t* b, std::size_t count) noexcept {
    std::uint32_t equal = 0;
    for (std::size_t i = 0; i < count; ++i) equal += (a[i] == b[i]) & (a[i] != EMPTY);
    return count == 0 ? 0.0F : static_cast<float>(equal) / static_cast<float>(count);
}

// The distinct shingles of text[0 .. size), ascending.
inline std::vector<std::uint64_t> shingle_set(Shingles& shingles, const char* text, std::size_t size) {
    std::vector<std::uint64_t> set;
    std::array<std::uint64_t, Shingles::MOST> hashes;
    shingles.open(text, size);
    while (const std::size_t count = shingles.read(hashes.data()))
        set.insert(set.end(), hashes.begin(), hashes.begin() + static_cast<std::ptrdiff_t>(count));
    std::sort(set.begin(), set.end());
    set.erase(std::unique(set.begin(), set.end()), set.end());
    return set;
}

// |a and b| / |a or b| of two ascending sets, 0 where both are empty. Different shingles have the same 64-bit hash so
// rarely (in one of 10^13 pairs of sets of 1000 shingles) that this is the similarity of the shingles themselves.
inline double exact_jaccard(const std::vector<std::uint64_t>& a, const std::vector<std::uint64_t>& b) noexcept {
    std::size_t i = 0, j = 0, common = 0;
    while (i < a.size() && j < b.size()) {
        const std::uint64_t x = a[i], y = b[j];
        common += x == y;
        i += x <= y;
        j += y <= x;
    }
    const std::size_t all = a.size() + b.size() - common;
    return all == 0 ? 0.0 : static_cast<double>(common) / static_cast<double>(all);
}

}  // namespace cdrmix
