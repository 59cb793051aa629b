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
    // The 128-bit product of two odd-ish words folded to 64 bits mixes all of them (wyhash, Wang Yi 2019).
    const auto fold = [](std::uint64_t a, std::uint64_t b) {
        const auto product = static_cast<unsigned __int128>(a) * b;
        return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    };
    std::uint64_t hash = 0x9e3779b97f4a7c15ULL ^ size;
    for (; size > 8; bytes += 8, size -= 8) {
        std::uint64_t block;
        std::memcpy(&block, bytes, 8);
        hash = fold(hash ^ block, 0xa0761d6478bd642fULL);
    }
    std::uint64_t block = 0;
    std::memcpy(&block, bytes, size);
    return fold(hash ^ block, 0xe7037ed1a0b428dbULL);
}

// Keys -> the first place they were seen at; emptied with its buffer kept.
class FirstPlaces {
  public:
    void reset(std::size_t most) {
        std::size_t size = 16;
        while (size < 2 * most) size *= 2;
        if (entries_.size() < size) entries_.resize(size);
        std::fill_n(entries_.begin(), size, Entry{0, NONE});
        mask_ = size - 1;
    }

    // The place that the key was first seen at: `place` itself when the key is new.
    std::uint32_t add(std::uint64_t key, std::uint32_t place) noexcept {
        for (std::size_t i = (key * 0x9e3779b97f4a7c15ULL) >> 20 & mask_;; i = (i + 1) & mask_) {
            Entry& entry = entries_[i];
            if (entry.place == NONE) entry = {key, place};
            if (entry.key == key) return entry.place;
        }
    }

    static constexpr std::uint32_t NONE = 0xFFFFFFFF;

  private:
    struct Entry {
        std::uint64_t key;
        std::uint32_t place;
    };
    std::vector<Entry> entries_;
    std::size_t mask_ = 0;
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
    // looks at the places that n - 1 left: in prose half of them after n = 2, a tenth after n = 4. Runs are told apart
    // by the pair of the two shorter ones, exactly; only the words themselves rely on 64-bit hashes.
    void count(const std::vector<std::uint64_t>& hashes, const std::vector<std::uint32_t>& lengths) {
        top.fill(0), again.fill(0);
        run_.resize(hashes.size() + 1);
        times_.resize(hashes.size());
        places_.clear();
        first_.reset(hashes.size());
        for (std::uint32_t i = 0; i < hashes.size(); ++i) {
            const std::uint32_t first = first_.add(hashes[i], i);
            times_[first] = first == i ? 1 : times_[first] + 1;
            run_[i] = first;
        }
        run_[hashes.size()] = FirstPlaces::NONE;
        for (std::uint32_t i = 0; i < hashes.size(); ++i) keep_repeated(i);
        for (std::size_t n = 2; n <= LONGEST && !places_.empty(); ++n) {
            lengthen();
            if (n <= LONGEST_TOP) top[n] = characters_of_top(n, lengths);
            again[n] = characters(n, lengths, [this](std::uint32_t i) { return run_[i] != i; });
        }
    }

  private:
    // From the runs of n - 1 words at `places_` to those of n words; run_[i] is the first place of the run at i, or
    // NONE where no run repeats.
    void lengthen() {
        first_.reset(places_.size());
        for (const std::uint32_t i : places_) {
            if (run_[i + 1] == FirstPlaces::NONE) {
                run_[i] = FirstPlaces::NONE;
                continue;
            }
            const std::uint64_t key = static_cast<std::uint64_t>(run_[i]) << 32 | run_[i + 1];
            const std::uint32_t first = first_.add(key, i);
            times_[first] = first == i ? 1 : times_[first] + 1;
            run_[i] = first;
        }
        shorter_.swap(places_);
        places_.clear();
        for (const std::uint32_t i : shorter_) keep_repeated(i);
    }

    void keep_repeated(std::uint32_t i) {
        if (run_[i] != FirstPlaces::NONE && times_[run_[i]] >= 2)
            places_.push_back(i);
        else
            run_[i] = FirstPlaces::NONE;
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
    std::vector<std::uint32_t> run_, times_, places_, shorter_;
};

}  // namespace cdrmix
