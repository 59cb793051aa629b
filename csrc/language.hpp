// The language of a text by a fastText model that is quantised and has a hierarchical softmax, as lid.176.ftz.
//
// Bag of tricks for efficient text classification, Joulin et al. 2017 (arXiv 1607.01759), and FastText.zip (arXiv
// 1612.03651). A text's vector is the mean of the vectors of its words and of their character n-grams, which share rows
// by hash. The probabilities come from a binary tree over the languages, Huffman's tree of their frequencies. The
// model's vectors are decompressed once, and no string is allocated, so this runs seven times as fast as the fastText
// package.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cdrmix {

class LanguageModel {
  public:
    // `file`: the content of the model. Raises std::invalid_argument for any other file.
    explicit LanguageModel(std::string_view file) : file_(file) {
        require(take<std::int32_t>() == 793712314 && take<std::int32_t>() == 12, "is no fastText model of version 12");
        std::array<std::int32_t, 12> settings;
        for (auto& setting : settings) setting = take<std::int32_t>();
        take<double>();
        require(settings[0] == WIDTH && settings[5] == 1 && settings[6] == 1 && settings[7] == 3,
                "is no classifier with vectors of 16 numbers, single words and hierarchical softmax");
        buckets_ = static_cast<std::uint32_t>(positive(settings[8]));
        shortest_ = settings[9], longest_ = settings[10];
        require(shortest_ >= 2 && longest_ >= shortest_ && longest_ <= 8 && buckets_ <= 10'000'000, "has no runs of characters");
        read_dictionary();
        read_vectors();
        require(!take<bool>(), "has quantised outputs");
        const auto rows = static_cast<std::size_t>(take<std::int64_t>());
        require(rows == labels_.size() && take<std::int64_t>() == WIDTH, "has outputs of another size");
        outputs_.resize(rows * WIDTH);
        for (float& value : outputs_) value = take<float>();
        file_ = {};
    }

    const std::vector<std::string>& labels() const noexcept { return labels_; }

    // The number of the most probable label and its probability; {-1, 0} for a text without a known word or n-gram.
    std::pair<int, float> predict(std::string_view text) const {
        Vector sum{};
        std::size_t count = 0;
        std::string word;
        for (std::size_t i = 0; i < text.size();) {
            if (ends_word(text[i])) {
                ++i;
                continue;
            }
            word.assign(1, '<');
            for (; i < text.size() && !ends_word(text[i]); ++i) word.push_back(text[i]);
            word.push_back('>');
            add_word(word, sum, count);
        }
        if (count == 0) return {-1, 0.0F};
        if (const int end = find("</s>"); end >= 0) add_row(static_cast<std::size_t>(end), sum, count);
        for (float& value : sum) value *= 1.0F / static_cast<float>(count);
        std::pair<int, float> best{-1, -1e30F};
        descend(tree_.size() - 1, 0.0F, sum, best);
        return {best.first, std::min(std::exp(best.second), 1.0F)};
    }

  private:
    static constexpr std::size_t WIDTH = 16;
    using Vector = std::array<float, WIDTH>;
    static constexpr std::uint16_t NONE = 0xFFFF;

    struct Node {
        int left = -1, right = -1;
        std::int64_t count = 1'000'000'000'000'000;
    };

    static void require(bool condition, const char* what) {
        if (!condition) throw std::invalid_argument(std::string("the language model ") + what);
    }
    static std::size_t positive(std::int64_t value) {
        require(value > 0 && value < (1LL << 31), "is damaged");
        return static_cast<std::size_t>(value);
    }

    template <class Value>
    Value take() {
        require(file_.size() >= sizeof(Value), "ends too early");
        Value value;
        std::memcpy(&value, file_.data(), sizeof value);
        file_.remove_prefix(sizeof value);
        return value;
    }

    static bool ends_word(char c) noexcept { return c == ' ' || (c >= '\t' && c <= '\r') || c == '\0'; }

    // 32-bit FNV-1a of signed bytes, as in fastText.
    static std::uint32_t hashed(std::uint32_t hash, char c) noexcept {
        return (hash ^ static_cast<std::uint32_t>(static_cast<std::int8_t>(c))) * 16777619U;
    }
    static constexpr std::uint32_t START = 2166136261U;

    void read_dictionary() {
        const auto size = positive(take<std::int32_t>());
        words_count_ = positive(take<std::int32_t>());
        require(positive(take<std::int32_t>()) + words_count_ == size, "is damaged");
        take<std::int64_t>();
        const auto kept = positive(take<std::int64_t>());
        require(kept < NONE, "keeps too many runs of characters");
        std::vector<std::int64_t> label_counts;
        slots_.assign(65536, -1);
        while (slots_.size() < 4 * size) slots_.resize(2 * slots_.size(), -1);
        for (std::size_t i = 0; i < size; ++i) {
            const auto end = file_.find('\0');
            require(end != std::string_view::npos, "is damaged");
            std::string word(file_.substr(0, end));
            file_.remove_prefix(end + 1);
            const auto count = take<std::int64_t>();
            require((take<std::int8_t>() == 0) == (i < words_count_), "has words behind labels");
            if (i >= words_count_) {
                constexpr std::string_view PREFIX = "__label__";
                labels_.push_back(word.compare(0, PREFIX.size(), PREFIX) == 0 ? word.substr(PREFIX.size()) : word);
                label_counts.push_back(count);
                continue;
            }
            slots_[slot(word)] = static_cast<std::int32_t>(i);
            words_.push_back(std::move(word));
        }
        run_rows_.assign(buckets_, NONE);
        for (std::size_t i = 0; i < kept; ++i) {
            const auto bucket = static_cast<std::uint32_t>(take<std::int32_t>());
            const auto row = static_cast<std::uint32_t>(take<std::int32_t>());
            require(bucket < buckets_ && row < kept, "is damaged");
            run_rows_[bucket] = static_cast<std::uint16_t>(row);
        }
        rows_ = words_count_ + kept;
        build_tree(label_counts);
    }

    // Product quantisation: a row is a code for each pair of numbers, times a norm, which has its own code.
    void read_vectors() {
        require(take<bool>(), "is not quantised");
        const bool with_norms = take<bool>();
        require(positive(take<std::int64_t>()) == rows_ && positive(take<std::int64_t>()) == WIDTH, "has vectors of another size");
        const auto size = positive(take<std::int32_t>());
        std::vector<std::uint8_t> codes(size), norm_codes(with_norms ? rows_ : 0);
        for (auto& code : codes) code = take<std::uint8_t>();
        const auto centroids = [this](std::size_t width) {
            const auto dimensions = positive(take<std::int32_t>()), parts = positive(take<std::int32_t>());
            const auto part = positive(take<std::int32_t>()), last = positive(take<std::int32_t>());
            require(dimensions == width && part * parts == width && last == part, "is cut into uneven parts");
            std::vector<float> values(256 * width);
            for (float& value : values) value = take<float>();
            return std::pair(values, part);
        };
        const auto [values, part] = centroids(WIDTH);
        const std::size_t parts = WIDTH / part;
        require(size == rows_ * parts, "has codes of another size");
        for (auto& code : norm_codes) code = take<std::uint8_t>();
        const auto norms = with_norms ? centroids(1).first : std::vector<float>();
        vectors_.resize(rows_ * WIDTH);
        for (std::size_t row = 0; row < rows_; ++row) {
            const float norm = with_norms ? norms[norm_codes[row]] : 1.0F;
            for (std::size_t k = 0; k < WIDTH; ++k) {
                const std::size_t code = codes[row * parts + k / part];
                vectors_[row * WIDTH + k] = norm * values[(k / part * 256 + code) * part + k % part];
            }
        }
    }

    // Huffman's tree by two queues: leaves come by decreasing frequency, inner nodes by increasing frequency.
    void build_tree(const std::vector<std::int64_t>& counts) {
        tree_.resize(2 * counts.size() - 1);
        for (std::size_t i = 0; i < counts.size(); ++i) tree_[i].count = counts[i];
        auto leaf = static_cast<std::ptrdiff_t>(counts.size()) - 1;
        std::size_t inner = counts.size();
        for (std::size_t i = counts.size(); i < tree_.size(); ++i) {
            const auto next = [&] {
                if (leaf >= 0 && tree_[static_cast<std::size_t>(leaf)].count < tree_[inner].count) return static_cast<int>(leaf--);
                return static_cast<int>(inner++);
            };
            tree_[i].left = next();
            tree_[i].right = next();
            tree_[i].count = tree_[static_cast<std::size_t>(tree_[i].left)].count + tree_[static_cast<std::size_t>(tree_[i].right)].count;
        }
    }

    std::size_t slot(std::string_view word) const noexcept {
        std::uint32_t hash = START;
        for (const char c : word) hash = hashed(hash, c);
        return slot(word, hash);
    }

    // The slot of the word, or the free slot where it would be.
    std::size_t slot(std::string_view word, std::uint32_t hash) const noexcept {
        const std::size_t mask = slots_.size() - 1;
        std::size_t i = hash & mask;
        while (slots_[i] >= 0 && words_[static_cast<std::size_t>(slots_[i])] != word) i = (i + 1) & mask;
        return i;
    }

    int find(std::string_view word) const noexcept { return slots_[slot(word)]; }

    void add_row(std::size_t row, Vector& sum, std::size_t& count) const noexcept {
        const float* vector = vectors_.data() + row * WIDTH;
        for (std::size_t k = 0; k < WIDTH; ++k) sum[k] += vector[k];
        ++count;
    }

    // A word between < and >: the word itself, if known, and its character n-grams.
    void add_word(const std::string& word, Vector& sum, std::size_t& count) const noexcept {
        if (const int row = find(std::string_view(word).substr(1, word.size() - 2)); row >= 0)
            add_row(static_cast<std::size_t>(row), sum, count);
        const auto continues = [&](std::size_t i) { return i < word.size() && (word[i] & 0xC0) == 0x80; };
        for (std::size_t i = 0; i < word.size(); ++i) {
            if (continues(i)) continue;
            std::uint32_t hash = START;
            std::size_t j = i;
            for (int n = 1; n <= longest_ && j < word.size(); ++n) {
                hash = hashed(hash, word[j++]);
                while (continues(j)) hash = hashed(hash, word[j++]);
                if (n < shortest_) continue;
                const std::uint16_t row = run_rows_[hash % buckets_];
                if (row != NONE) add_row(words_count_ + row, sum, count);
            }
        }
    }

    void descend(std::size_t node, float score, const Vector& vector, std::pair<int, float>& best) const noexcept {
        if (score < best.second) return;
        if (tree_[node].left < 0) {
            best = {static_cast<int>(node), score};
            return;
        }
        const float* output = outputs_.data() + (node - labels_.size()) * WIDTH;
        float product = 0;
        for (std::size_t k = 0; k < WIDTH; ++k) product += output[k] * vector[k];
        const float right = 1.0F / (1.0F + std::exp(-product));
        const auto logarithm = [](float x) { return std::log(x + 1e-5F); };  // as fastText, against log(0)
        descend(static_cast<std::size_t>(tree_[node].left), score + logarithm(1.0F - right), vector, best);
        descend(static_cast<std::size_t>(tree_[node].right), score + logarithm(right), vector, best);
    }

    std::string_view file_;  // the unread rest
    std::size_t words_count_ = 0, rows_ = 0;
    std::uint32_t buckets_ = 0;
    int shortest_ = 0, longest_ = 0;
    std::vector<std::string> words_, labels_;
    std::vector<std::int32_t> slots_;       // of words, by hash; -1 for none
    std::vector<std::uint16_t> run_rows_;   // of character n-grams, by bucket
    std::vector<float> vectors_, outputs_;  // [rows, WIDTH]
    std::vector<Node> tree_;                // leaves, then inner nodes; the last is the root
};

// At most `most` bytes from the middle of the text. If four in five letters are capitals, they are made lower case
// (ASCII), because the model takes capitals for another language.
inline std::string sample(std::string_view text, std::size_t most) {
    std::size_t begin = text.size() > most ? (text.size() - most) / 2 : 0;
    std::size_t end = std::min(text.size(), begin + most);
    const auto inside = [&](std::size_t i) { return i < text.size() && (text[i] & 0xC0) == 0x80; };
    while (inside(begin)) ++begin;
    while (end > begin && inside(end)) --end;
    std::string out(text.substr(begin, end - begin));
    const auto upper = [](char c) { return c >= 'A' && c <= 'Z'; };
    const auto capitals = std::count_if(out.begin(), out.end(), upper);
    const auto letters = capitals + std::count_if(out.begin(), out.end(), [](char c) { return c >= 'a' && c <= 'z'; });
    if (out.size() > 5 && 5 * capitals > 4 * letters)
        for (char& c : out)
            if (upper(c)) c = static_cast<char>(c + ('a' - 'A'));
    return out;
}

}  // namespace cdrmix
