// What a text repeats: its most frequent short runs of words, and the long runs that it has more than once.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace cdrmix {

// A 64-bit hash of bytes; nothing beyond them is read.
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
    // The last 8 bytes, of which the loop may have had some; of a text of fewer bytes all, at places that its size fixes.
    if (size >= 8) {
        last = load(end - 8, std::uint64_t{});
    } else if (size >= 4) {
        last = load(bytes, std::uint32_t{}) | load(end - 4, std::uint32_t{}) << 32;
    } else if (size > 0) {
        last = load(bytes, std::uint8_t{}) | load(bytes + size / 2, std::uint8_t{}) << 8 | load(end - 1, std::uint8_t{}) << 16;
    }
    return fold(hash ^ last, 0xe7037ed1a0b428dbULL);
}

// Keys -> the first place they were seen at. Emptying it takes no time: entries of earlier generations do not count.
class FirstPlaces {
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

    // The place that the key was first seen at: `place` itself when the key is new. For at most `most` keys.
    std::uint32_t add(std::uint64_t key, std::uint32_t place) noexcept {
        for (std::size_t i = (key * 0x9e3779b97f4a7c15ULL) >> 32 & mask_;; i = (i + 1) & mask_) {
            Entry& entry = entries_[i];
            if (entry.generation != generation_) {
                entry = {key, place, generation_};
                return place;
            }
            if (entry.key == key) return entry.place;
        }
    }

    static constexpr std::uint32_t NONE = 0xFFFFFFFF;  // no place

  private:
    struct Entry {
        std::uint64_t key = 0;
        std::uint32_t place = 0, generation = 0;
    };
    std::vector<Entry> entries_;
    std::size_t mask_ = 0;
    std::uint32_t generation_ = 0;
};

// Characters within repeated runs of n words, n = 1 .. LONGEST.
//
// top[n]: within the occurrences of the run that occurs most often, if twice or more (of several, the one that begins
// first); again[n]: within the runs that stand further up already. A character counts once, however many runs hold it.
class Repetition {
  public:
    static constexpr std::size_t LONGEST = 10, LONGEST_TOP = 4;
    std::array<std::uint64_t, LONGEST + 1> top{}, again{};

    // Of words given by their hashes and numbers of characters.
    //
    // A run of n words can only repeat where the runs of n - 1 words at the same and at the next place do, so each n
    // looks at the places that n - 1 left: in prose a third of them after n = 2, a tenth after n = 4. Two words are told
    // apart by 64 bits of hash, longer runs by the pair of the two shorter ones, exactly.
    void count(const std::vector<std::uint64_t>& hashes, const std::vector<std::uint32_t>& lengths) {
        top.fill(0), again.fill(0);
        run_.assign(hashes.size() + 1, FirstPlaces::NONE);
        times_.resize(hashes.size() + 1);
        places_.resize(hashes.size());
        if (hashes.size() < 2) return;
        first_.reset(hashes.size() - 1);
        for (std::uint32_t i = 0; i + 1 < hashes.size(); ++i) {
            see(i, hashes[i] * 0xff51afd7ed558ccdULL + (hashes[i + 1] >> 1));
            places_[i] = i;
        }
        places_.resize(hashes.size() - 1);
        for (std::size_t n = 2; n <= LONGEST; ++n) {
            if (n > 2) lengthen();
            keep([this](std::uint32_t i) { return times_[run_[i]] >= 2; });
            forget_others();
            if (places_.empty()) break;
            if (n <= LONGEST_TOP) top[n] = characters_of_top(n, lengths);
            again[n] = characters(n, lengths, [this](std::uint32_t i) { return run_[i] != i; });
        }
    }

  private:
    // From the runs of n - 1 words that repeat to those of n words at the same places: run_[i] becomes the first place
    // of the run at i, NONE where none can repeat.
    void lengthen() {
        keep([this](std::uint32_t i) { return run_[i + 1] != FirstPlaces::NONE; });
        first_.reset(places_.size());
        // run_[i + 1] is still that of n - 1 words, for places ascend and the others are forgotten after.
        for (const std::uint32_t i : places_) see(i, static_cast<std::uint64_t>(run_[i]) << 32 | run_[i + 1]);
        forget_others();
    }

    // The run at place i is this one.
    void see(std::uint32_t i, std::uint64_t key) noexcept {
        const std::uint32_t first = first_.add(key, i);
        times_[first] = (first == i ? 0 : times_[first]) + 1;
        run_[i] = first;
    }

    // Leaves of `places_` those that are wanted. Without branches, for half of them would be foreseen wrongly.
    template <class Wanted>
    void keep(Wanted wanted) {
        std::size_t count = 0, others = 0;
        others_.resize(places_.size());
        for (const std::uint32_t i : places_) {
            const bool kept = wanted(i);
            places_[count] = i, others_[others] = i;
            count += kept, others += !kept;
        }
        places_.resize(count), others_.resize(others);
    }

    // Of the places that keep() left out: no run repeats there.
    void forget_others() noexcept {
        for (const std::uint32_t i : others_) run_[i] = FirstPlaces::NONE;
    }

    std::uint64_t characters_of_top(std::size_t n, const std::vector<std::uint32_t>& lengths) const {
        if (places_.empty()) return 0;
        std::uint32_t best = places_.front();  // a first place, since nothing earlier repeats
        for (const std::uint32_t i : places_)
            if (run_[i] == i && times_[i] > times_[best]) best = i;
        return characters(n, lengths, [&](std::uint32_t i) { return run_[i] == best; });
    }

    // The characters of all words in the runs of n words at the chosen ones of `places_`.
    template <class Chosen>
    std::uint64_t characters(std::size_t n, const std::vector<std::uint32_t>& lengths, Chosen chosen) const {
        std::uint64_t sum = 0;
        std::size_t counted = 0;  // the words before this one are done
        for (const std::uint32_t i : places_) {
            if (!chosen(i)) continue;
            for (std::size_t word = std::max<std::size_t>(i, counted); word < i + n; ++word) sum += lengths[word];
            counted = i + n;
        }
        return sum;
    }

    FirstPlaces first_;
    std::vector<std::uint32_t> run_, times_, places_, others_;
};

}  // namespace cdrmix
