"""Scores of `vaderSentiment` 3.3.2 for `vader.json`: the sentences of its README, and more that meet every rule."""

import json
import random
from pathlib import Path

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

README = [
    "VADER is smart, handsome, and funny.",
    "VADER is smart, handsome, and funny!",
    "VADER is very smart, handsome, and funny.",
    "VADER is VERY SMART, handsome, and FUNNY.",
    "VADER is VERY SMART, handsome, and FUNNY!!!",
    "VADER is VERY SMART, uber handsome, and FRIGGIN FUNNY!!!",
    "VADER is not smart, handsome, nor funny.",
    "The book was good.",
    "At least it isn't a horrible book.",
    "The book was only kind of good.",
    "The plot was good, but the characters are uncompelling and the dialog is not great.",
    "Today SUX!",
    "Today only kinda sux! But I'll get by, lol",
    "Make sure you :) or :D today!",
    "Catch utf-8 emoji such as 💘 and 💋 and 😁",
    "Not bad at all",
    "Sentiment analysis has never been good.",
    "Sentiment analysis has never been this good!",
    "Most automated sentiment analysis tools are shit.",
    "With VADER, sentiment analysis is the shit!",
    "Other sentiment analysis tools can be quite bad.",
    "On the other hand, VADER is quite bad ass",
    "VADER is such a badass!",
    "Without a doubt, excellent idea.",
    "Roger Dodger is one of the most compelling variations on this theme.",
    "Roger Dodger is at least compelling as a variation on the theme.",
    "Roger Dodger is one of the least compelling variations on this theme.",
    "Not such a badass after all.",
    "Without a doubt, an excellent idea.",
]

RULES = [
    "", " ", "\n\t", "!", "???", "...", "no", "No!", "but", "BUT", "least good", "kind of", "kind", "of", ":)", ":-(", "<3 </3",
    "no good", "No good at all", "there is no good or bad answer", "no or good", "nor good", "no fun or joy", "no luck nor hope",
    "no problem", "no no no", "no war", "NO WAY, great", "no very good thing",
    "good but bad", "bad but good but bad", "but good", "good but", "good good but good good", "bad, good but great but awful",
    "great BUT terrible", "It was good But it was bad.", "love love love but hate hate",
    "never so good", "never this good", "never ever good", "never so very good", "This is never so damn good", "so good", "this good",
    "it has never been so good", "never was this a great idea", "this is so not good", "so this is good",
    "without doubt good", "without a doubt good", "without any real doubt good", "without good", "without the good", "doubt good",
    "least interesting", "at least interesting", "very least interesting", "the least interesting", "At LEAST interesting",
    "LEAST interesting", "the very least good", "least love",
    "the shit", "the bomb", "this is the bomb", "what a bad ass", "a bus stop is here", "the ugly bus stop", "yeah right", "oh yeah right sure",
    "the kiss of death came", "that cake was to die for", "a beating heart inside", "my beating heart", "upper hand", "hand to mouth",
    "this place is the shit", "you are the bad ass here", "he was such a bad ass dude", "wow what a bomb", "kiss of death", "to die for",
    "it is kind of good", "it is sort of good", "it was just enough good", "it is kind-of good", "kind of a good movie", "sort of the best",
    "a kind of very bad film", "KIND of good", "kind OF good", "it is Sort Of bad", "just enough fun",
    "extremely good", "EXTREMELY good", "extremely GOOD", "EXTREMELY GOOD", "EXTREMELY GOOD film", "extremely bad", "EXTREMELY bad film",
    "barely good", "BARELY good film", "barely bad", "slightly SLIGHTLY bad", "very very very good", "very, very bad", "hardly any good",
    "less good", "more bad", "most total utter joy", "somewhat awful!!!", "marginally happy", "not very good", "not really that bad",
    "isn't very good", "ISN'T good", "ain't bad", "aint bad", "can't complain", "cannot love", "neither good nor bad", "nothing good",
    "nobody likes it", "rarely good", "seldom bad", "despite good reviews", "uh-uh good", "wasn't it great", "couldn't be happier",
    "I don't hate it", "I do not hate it", "I do not really hate it", "I do not really truly hate it", "don't DON'T love", "mightn't win",
    "n't good", "xn'ty good", "o'n'tment good",
    "GOOD", "GOOD GOOD", "GOOD good", "Good GOOD bad", "BAD movie", "bad MOVIE", "A GOOD day", "I LOVE it", "i LOVE it", "GREAT 123", "ok OK",
    "ok 123 GREAT", "A", "É GOOD", "ÉCOLE good", "straße GOOD", "ǅ GOOD", "HATE it İ",
    "good?", "good??", "good???", "good????", "good?????", "good!", "good!!", "good!!!", "good!!!!", "good!!!!!", "bad!!!!!!", "bad?!?!?!",
    "meh!!!", "!!!! good", "? good ?", "nothing??", "(good)", "[bad]", "'good'", "\"bad\"", "good's", "good-bad", "good/bad", "g.o.o.d", "#good",
    "@bad", "good,", "good,bad", "good , bad", "...good...", "--bad--", "_love_", "*hate*", "~happy~",
    ":D", ":d", ":P", ":-p", "xD", "XD", "lol", "LOL", "ROFL :)", "<3", "</3", ":'(", ":')", ";)", ";-)", "=)", "8)", "O:)", "o.O", "(:", "):",
    "^_^", ":-)good", "good:)", "{:", "}:(", "d:", "|-:", ">:(", "(-:", "w00t", "h8 u", "gr8 m8", "luv ya", "ily", "omg wtf", "smh", "fml",
    "💘", "💘💘", "💘 💘", "a💘b", "good💘", "💘good", "😀😢", "😀 😢", " 😀", "😀 ", "😀\t😢", "😀!😢?", "❤", "❤️", "☹️", "👍🏽", "👨‍👩‍👧", "🤬 not 🤬",
    "not 😀", "VERY 😀", "😀 but 😢", "🙂🙃", "💔 no 💔", "☠ danger", "©®", "naïve good", "Ça va bien, love",
    "good\u00a0bad", "good\u2003bad", "good\x1cbad", "good\x85bad", "good\u200bbad", "good\u2028bad",
    "It was one of the worst movies I've seen, despite good reviews.", "Unbelievably bad acting!!", "Poor direction.", "VERY poor production.",
    "The movie was bad.", "Very bad movie.", "VERY BAD movie!",
    "I would not say that it is the worst, but it certainly is far from the best film I have EVER seen!!",
    "Not only is it ugly, it's also broken; still, I kind of love it.", "He is no fool, and no coward either.",
    "She said \"no\" and I cried :(", "If only it were any good...", "The best laid plans fail, BUT we try again!!!",
]

WORDS = (
    "good bad great awful love hate happy sad funny horrible nice terrible win lose like fear okay hope kill die joy pain "
    "GOOD BAD GREAT LOVE HATE very VERY so really kinda barely not never isn't don't without doubt no or nor but least at this the "
    "movie plot day it is was a and shit bomb ass kind of sort die for to yeah right quite less extremely 😁 💔 :) :( <3 lol ! ? !! ??"
).split()


def composed(count):
    draw = random.Random(7)
    for _ in range(count):
        words = [draw.choice(WORDS) for _ in range(draw.randint(2, 12))]
        text = " ".join(words)
        for mark in ("!", "?", "!!", "??"):
            text = text.replace(f" {mark}", mark)
        yield text + draw.choice(["", ".", "!", "?!", "!!!!!"])


analyzer = SentimentIntensityAnalyzer()
texts = dict.fromkeys(README + RULES + list(composed(200)))
rows = [{"text": text, **analyzer.polarity_scores(text)} for text in texts]
lines = ",\n".join(json.dumps(row, ensure_ascii=True) for row in rows)
Path(__file__).with_name("vader.json").write_text(f"[\n{lines}\n]\n")
