// Repetition in a text: its most frequent short runs of words, and the long runs that occur more than once.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace cdrmix {

// A 64-bit hash of bytes; it reads no byte beyond them.
inline std::uint64_t hash_bytes(const char* bytes, std::size_t size) noexcept {
    const auto load = [](const char* from, auto block) {
        std::memcpy(&block, from, sizeof block);
        return static_cast<std::uint64_t>(block);
    };
    // The 128-bit product folded to 64 bits mixes all bits of both (wyhash, Wang Yi 2019).
    const auto fold = [](std::uint64_t a, std::uint64_t b) {
        const auto product = static_cast<unsigned __int128>(a) * b;
        return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    };
    std::uint64_t hash = 0x9e3779b97f4a7c15ULL ^ size, last = 0;
    const char* end = bytes + size;
    for (; end - bytes > 8; bytes += 8) hash = fold(hash ^ load(bytes, std::uint64_t{}), 0xa0761d6478bd642fULL);
    // The last 8 bytes, which may overlap the loop's. A shorter text is read whole, at positions that its size fixes.
    if (size >= 8) {
        last = load(end - 8, std::uint64_t{});
    } else if (size >= 4) {
        last = load(bytes, std::uint32_t{}) | load(end - 4, std::uint32_t{}) << 32;
    } else if (size > 0) {
        last = load(bytes, std::uint8_t{}) | load(bytes + size / 2, std::uint8_t{}) << 8 | load(end - 1, std::uint8_t{}) << 16;
    }
    return fold(hash ^ last, 0xe7037ed1a0b428dbULL);
}

// Keys -> the position of their first occurrence. Resetting is free: entries of earlier generations do not count.
class FirstPositions {
  public:
    void reset(std::size_t most) {
        std::size_t size = 16;
        while (3 * size < 4 * most) size *= 2;
        if (entries_.size() < size) entries_.resize(size);
        mask_ = size - 1;
        if (++generation_ == 0) {
            std::fill(entries_.begin(), entries_.end(), Entry{});
            generation_ = 1;
        }
    }

    // The key's first position; `position` itself if the key is new. For at most `most` keys.
    std::uint32_t add(std::uint64_t key, std::uint32_t position) noexcept {
        for (std::size_t i = (key * 0x9e3779b97f4a7c15ULL) >> 32 & mask_;; i = (i + 1) & mask_) {
            Entry& entry = entries_[i];
            if (entry.generation != generation_) {
                entry = {key, position, generation_};
                return position;
            }
            if (entry.key == key) return entry.position;
        }
    }

    static constexpr std::uint32_t NONE = 0xFFFFFFFF;  // no position

  private:
    struct Entry {
        std::uint64_t key = 0;
        std::uint32_t position = 0, generation = 0;
    };
    std::vector<Entry> entries_;
    std::size_t mask_ = 0;
    std::uint32_t generation_ = 0;
};

// Characters within repeated runs of n words, n = 1 .. LONGEST.
//
// top[n]: characters within the run that occurs most often, if at least twice (the first one of several). again[n]:
// characters within runs that also occur earlier in the text. A character counts once, however many runs contain it.
class Repetition {
  public:
    static constexpr std::size_t LONGEST = 10, LONGEST_TOP = 4;
    std::array<std::uint64_t, LONGEST + 1> top{}, again{};

    // Of words given by their hashes and numbers of characters.
    //
    // A run of n words can repeat only where the runs of n - 1 words at the same and the next position do. So each n
    // tests only the positions that n - 1 left: in prose a third of them after n = 2, a tenth after n = 4. Two words
    // are compared by 64 bits of hash, longer runs by the pair of the two shorter runs, exactly.
    void count(const std::vector<std::uint64_t>& hashes, const std::vector<std::uint32_t>& lengths) {
        top.fill(0), again.fill(0);
        run_.assign(hashes.size() + 1, FirstPositions::NONE);
        times_.resize(hashes.size() + 1);
        positions_.resize(hashes.size());
        if (hashes.size() < 2) return;
        first_.reset(hashes.size() - 1);
        for (std::uint32_t i = 0; i + 1 < hashes.size(); ++i) {
            see(i, hashes[i] * 0xff51afd7ed558ccdULL + (hashes[i + 1] >> 1));
            positions_[i] = i;
        }
        positions_.resize(hashes.size() - 1);
        for (std::size_t n = 2; n <= LONGEST; ++n) {
            if (n > 2) lengthen();
            keep([this](std::uint32_t i) { return times_[run_[i]] >= 2; });
            forget_others();
            if (positions_.empty()) break;
            if (n <= LONGEST_TOP) top[n] = characters_of_top(n, lengths);
            again[n] = characters(n, lengths, [this](std::uint32_t i) { return run_[i] != i; });
        }
    }

  private:
    // From repeating runs of n - 1 words to runs of n words at the same positions: run_[i] becomes the first position
    // of the run at i, or NONE where none can repeat.
    void lengthen() {
        keep([this](std::uint32_t i) { return run_[i + 1] != FirstPositions::NONE; });
        first_.reset(positions_.size());
        // run_[i + 1] is still that of n - 1 words, because positions ascend and the others are reset afterwards.
        for (const std::uint32_t i : positions_) see(i, static_cast<std::uint64_t>(run_[i]) << 32 | run_[i + 1]);
        forget_others();
    }

    // The run at position i is this one.
    void see(std::uint32_t i, std::uint64_t key) noexcept {
        const std::uint32_t first = first_.add(key, i);
        times_[first] = (first == i ? 0 : times_[first]) + 1;
        run_[i] = first;
    }

    // Keeps those of `positions_` that are wanted. Without branches, because half of them would be mispredicted.
    template <class Wanted>
    void keep(Wanted wanted) {
        std::size_t count = 0, others = 0;
        others_.resize(positions_.size());
        for (const std::uint32_t i : positions_) {
            const bool kept = wanted(i);
            positions_[count] = i, others_[others] = i;
            count += kept, others += !kept;
        }
        positions_.resize(count), others_.resize(others);
    }

    // For the positions that keep() removed: no run repeats there.
    void forget_others() noexcept {
        for (const std::uint32_t i : others_) run_[i] = FirstPositions::NONE;
    }

    std::uint64_t characters_of_top(std::size_t n, const std::vector<std::uint32_t>& lengths) const {
        if (positions_.empty()) return 0;
        std::uint32_t best = positions_.front();  // a first position, because nothing earlier repeats
        for (const std::uint32_t i : positions_)
            if (run_[i] == i && times_[i] > times_[best]) best = i;
        return characters(n, lengths, [&](std::uint32_t i) { return run_[i] == best; });
    }

    // The characters of all words in the runs of n words at the selected `positions_`.
    template <class Chosen>
    std::uint64_t characters(std::size_t n, const std::vector<std::uint32_t>& lengths, Chosen chosen) const {
        std::uint64_t sum = 0;
        std::size_t counted = 0;  // the words before this one have been counted
        for (const std::uint32_t i : positions_) {
            if (!chosen(i)) continue;
            for (std::size_t word = std::max<std::size_t>(i, counted); word < i + n; ++word) sum += lengths[word];
            counted = i + n;
        }
        return sum;
    }

    FirstPositions first_;
    std::vector<std::uint32_t> run_, times_, positions_, others_;
};

}  // namespace cdrmix
