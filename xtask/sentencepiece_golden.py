"""Small SentencePiece models, and what sentencepiece itself says of hard texts: `tests/golden/sentencepiece`.

    python xtask/sentencepiece_golden.py OUT_DIR       (needs `pip install sentencepiece`)

Each model is a directory as one of the hub: `tokenizer.model`, and `expected.json` with the ids and the decoded
text of each of `TEXTS`. Names of control tokens in a text stand for these tokens, as in transformers; each piece
of text between them is encoded for itself.
"""

import io
import json
import pathlib
import re
import sys

import sentencepiece

ROOT = pathlib.Path(__file__).resolve().parent.parent

OTHER_LANGUAGES = [
    "Füße, naïve café, Ærøskøbing, Łódź, İstanbul; el pingüino comió ñandú.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Всё хорошо.",
    "日本語の文章です。東京は日本の首都です。中文句子,北京是首都。",
    "한국어 문장입니다. 서울은 한국의 수도입니다.",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x ** 2}  # comment",
] * 20

TEXTS = [
    "",
    " ",
    "   ",
    "Hello, world!",
    " leading space",
    "trailing spaces  ",
    "  two   and    four    inside ",
    "a\tb\t\tc",
    "line\nline\n\nline\r\nend\n",
    "naïve café — Łódź",
    "e\u0301 o\u0308 n\u0303 \u1e69 s\u0323\u0307",
    "ＡＢＣ ｱｲｳ ① ½ ﬁ Ⅷ ㌔",
    "日本語 中文 한국어 テスト",
    "ไทย हिन्दी العربية עברית",
    "🎉 👩‍👩‍👧 🏳️‍🌈 ✈️ 👍🏽",
    "\u0000\u0001\u0007\u007f control",
    "zero\u200bwidth\u200dand\ufeffmark\u00a0hard\u3000wide",
    "▁ already ▁▁ marked",
    "▁begins marked",
    "The year 2889 costs $1,234.56 (or 99%).",
    "def f(x):\n    return {'a': [1, 2]}  # x",
    "<s>special</s> inside <unk> text<s></s>",
    "</s>",
    "<s> space after",
    "almost <s and <|im_start|> <pad",
    "A" * 70,
    "\U00010348\U0001F9EC\U000E0041 astral",
    "word<turn>word <turn> <turn><turn>",
    "\n\n\n",
]

MODELS = {
    # As Llama 2 and Mistral.
    "bpe": dict(model_type="bpe", vocab_size=700, byte_fallback=True, normalization_rule_name="identity",
                remove_extra_whitespaces=False),
    # As Gemma: no prefix, pieces that are always whole.
    "bpe_bare": dict(model_type="bpe", vocab_size=700, byte_fallback=True, normalization_rule_name="identity",
                     remove_extra_whitespaces=False, add_dummy_prefix=False,
                     user_defined_symbols=["<turn>", "\n", "\n\n", "▁▁", "▁▁▁"]),
    # As T5 and XLM-R, whose table of normal forms is most of the file.
    "unigram": dict(model_type="unigram", vocab_size=500, normalization_rule_name="nmt_nfkc"),
    "unigram_bytes": dict(model_type="unigram", vocab_size=600, byte_fallback=True,
                          normalization_rule_name="identity", remove_extra_whitespaces=False,
                          user_defined_symbols=["<turn>"], pad_id=3),
}


def train(settings):
    text = (ROOT / "aligner-data/src/tasks/in_the_year_2889.txt").read_text()
    sentences = [line for line in text.splitlines() if line.strip()] + OTHER_LANGUAGES
    model = io.BytesIO()
    # An iterator and a writer, so that the file has no names of this machine's.
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, minloglevel=2, num_threads=1, **settings)
    return model.getvalue()


def encode(processor, text):
    control = [processor.id_to_piece(i) for i in range(processor.get_piece_size())
               if processor.is_control(i) or processor.is_unknown(i)]
    names = "|".join(re.escape(name) for name in sorted(control, key=len, reverse=True))
    ids = []
    for part in re.split(f"({names})", text):
        ids += [processor.piece_to_id(part)] if part in control else processor.encode(part)
    return ids


def main():
    out = pathlib.Path(sys.argv[1])
    for name, settings in MODELS.items():
        model = train(settings)
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / "tokenizer.model").write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        cases = []
        for text in TEXTS:
            ids = encode(processor, text)
            # Unknown text is decoded as a sign that stands for nothing; transformers leaves it out.
            decoded = None if processor.unk_id() in ids else processor.decode(ids)
            cases.append({"text": text, "ids": ids, "decoded": decoded})
        (out / name / "expected.json").write_text(json.dumps(cases, ensure_ascii=True, indent=0) + "\n")
        print(name, len(model), "bytes,", processor.get_piece_size(), "pieces")


main()
