// A replacement for libFuzzer: `driver SECONDS [SEED]` calls LLVMFuzzerTestOneInput with mutated inputs for that time.
//
// It does not measure coverage. Instead it combines typical parts of texts, and mutates inputs that it made before.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

constexpr std::size_t LONGEST = 20'000;
constexpr std::size_t KEPT = 256;  // inputs kept for mutation

// Words and separators, characters of one to four bytes with unusual lower cases, bytes that are no UTF-8, and 0xF5, at
// which the targets split.
const std::string PIECES[] = {
    "a", "Z", "_", "0", " ", "\n", ".", "'", "the ", "Word ", "of eight", "a word of many letters", "sixteen letters!",
    "\xce\xa3", "\xcf\x83", "\xc4\xb0", "\xcc\x87", "\xcd\x85", "\xc2\xad", "\xe1\xba\x9e", "\xe2\x84\xaa", "\xc8\xba",
    "\xe1\x8e\xa0", "\xf0\x90\x90\x80", "\xe6\x97\xa5", "\xed\x95\x9c", "\xe2\x80\x8d", "\xc2\xb2", "\xf4\x8f\xbf\xbf",
    "\xff", "\x80", "\xc3", "\xe2\x82", "\xf0\x9f\x98", "\xed\xa0\x80", "\xf8", std::string(1, '\0'), "\xf5", "\xf5\xf5",
};

class Mutator {
  public:
    explicit Mutator(std::uint64_t seed) : random_(seed) {}

    std::size_t below(std::size_t bound) { return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random_); }

    std::string piece() {
        std::string text = PIECES[below(std::size(PIECES))];
        const std::size_t times = below(4) != 0 ? 1 : below(50) != 0 ? below(40) : below(5000);
        std::string repeated;
        for (std::size_t i = 0; i < times && repeated.size() < LONGEST; ++i) repeated += text;
        return repeated;
    }

    void change(std::string& input, const std::string& other) {
        const std::size_t at = below(input.size() + 1), length = below(below(2) ? 9 : input.size() + 1);
        switch (below(6)) {
            case 0: input.insert(at, piece()); break;
            case 1: input.erase(at, length); break;
            case 2: input.replace(at, length, piece()); break;
            case 3: input.insert(at, input.substr(below(input.size() + 1), length)); break;
            case 4: input.insert(at, other.substr(below(other.size() + 1), length)); break;
            default:
                if (at < input.size()) input[at] = static_cast<char>(below(256));
        }
        if (input.size() > LONGEST) input.resize(LONGEST);
    }

  private:
    std::mt19937_64 random_;
};

}  // namespace

int main(int count, char** arguments) {
    if (count < 2) {
        std::fprintf(stderr, "usage: %s SECONDS [SEED]\n", arguments[0]);
        return 2;
    }
    const std::chrono::duration<double> limit(std::atof(arguments[1]));
    const std::uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : std::random_device()();
    Mutator mutator(seed);
    std::vector<std::string> inputs(KEPT, std::string(4, '\0'));
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);  // for the case that a sanitizer ends the process
    const auto begun = std::chrono::steady_clock::now();
    std::uint64_t runs = 0;
    for (; std::chrono::steady_clock::now() - begun < limit; ++runs) {
        std::string input = inputs[mutator.below(KEPT)];
        for (std::size_t changes = 1 + mutator.below(6); changes != 0; --changes)
            mutator.change(input, inputs[mutator.below(KEPT)]);
        LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
        inputs[mutator.below(KEPT)] = std::move(input);
    }
    std::printf("%llu runs without a finding\n", static_cast<unsigned long long>(runs));
    return 0;
}
