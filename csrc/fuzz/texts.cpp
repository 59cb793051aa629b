// Fuzzes the C++ of _text with any valid UTF-8, as Python's strings give it: sanitizers check memory, and assertions
// check properties of every text. The entry point is libFuzzer's; see `make fuzz`.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "fuzz/require.hpp"
#include "language.hpp"
#include "personal.hpp"
#include "statistics.hpp"

using namespace cdrmix;

namespace {

// The content of a Python string of these bytes: bytes that are no UTF-8 become replacement characters.
std::string valid(const char* p, const char* end) {
    std::string text;
    while (p != end) {
        char32_t c = unicode::decode(p, end);
        if (c >= 0xD800 && c < 0xE000) c = unicode::REPLACEMENT;
        char bytes[unicode::MOST_BYTES];
        text.append(bytes, unicode::encode(c, bytes));
    }
    return text;
}

using Counts = std::array<double, STATISTICS>;

}  // namespace

// The first byte chooses a size; the others are text.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static TextStatistics used;  // reused by all inputs: earlier ones must not change results
    if (size < 1) return 0;
    const char* const bytes = reinterpret_cast<const char*>(data);
    const std::string whole = valid(bytes + 1, bytes + size);
    const std::unique_ptr<char[]> text(new char[whole.size()]);  // of exactly that size
    std::copy(whole.begin(), whole.end(), text.get());

    Counts counts, again;
    used.measure(text.get(), whole.size(), counts.data());
    TextStatistics().measure(text.get(), whole.size(), again.data());
    require(counts == again, "a text's statistics do not depend on the texts before it");
    for (const double count : counts)
        require(count >= 0 && count == std::floor(count) && count <= 10.0 * static_cast<double>(whole.size() + 1),
                "a statistic is a count");
    require(counts[0] <= static_cast<double>(whole.size()), "there are not more characters than bytes");

    for (const auto& found : PersonalData().scan(text.get(), whole.size(), whole.size()))
        require(found.begin < found.end && found.end <= whole.size(), "personal data stands within the text");

    const std::size_t most = 8 + data[0];
    const std::string some = sample({text.get(), whole.size()}, most);
    require(some.size() <= most && some == valid(some.data(), some.data() + some.size()), "a sample is whole characters");
    return 0;
}
