"""Write labelled messages to a shop: train.tsv to fine-tune with, texts.txt without labels, and rows.csv to predict.

    python examples/messages.py [FOLDER]

The messages are put together from phrases, so that a high accuracy on them means little: they show the steps, and stand
in for a file of your own. Those of rows.csv have phrases that train.tsv does not have.
"""

import csv
import itertools
import sys
from pathlib import Path

OPENINGS = ("", "Hello, ", "Good morning, ", "Sorry to bother you, but ", "I have a question: ", "Just so you know, ")
ENDINGS = ("", " Thank you.", " Please write back.", " I have waited for three days.", " Is that normal?")
PHRASES = {
    "delivery": (
        "my parcel has not arrived.",
        "the courier left the box at the wrong house.",
        "when will my order be shipped?",
        "the tracking number does not work.",
        "can you send the package to my office?",
    ),
    "payment": (
        "my card was charged twice.",
        "the invoice has the wrong amount.",
        "can I pay by bank transfer?",
        "I would like my money back.",
        "the discount was not taken off the price.",
    ),
    "account": (
        "I cannot log in.",
        "how do I change my password?",
        "please delete my profile.",
        "the confirmation mail never came.",
        "my user name is shown with a mistake.",
    ),
    "praise": (
        "the shoes fit very well.",
        "your shop is the best I have found.",
        "the lamp looks lovely in our kitchen.",
        "everyone here likes the new kettle.",
        "I am very happy with the quality.",
    ),
}

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
train, rows = [], []
for label, phrases in PHRASES.items():
    for number, (phrase, opening, ending) in enumerate(itertools.product(phrases, OPENINGS, ENDINGS)):
        text = opening + (phrase if opening else phrase[0].upper() + phrase[1:]) + ending
        if phrase != phrases[-1]:
            train.append((text, label))
        elif number % 3 == 0:
            rows.append((len(rows), text, label))
with open(folder / "train.tsv", "w", encoding="utf-8", newline="") as file:
    csv.writer(file, delimiter="\t", lineterminator="\n").writerows([("text", "label"), *train])
(folder / "texts.txt").write_text("".join(f"{text}\n" for text, _ in train), encoding="utf-8")
with open(folder / "rows.csv", "w", encoding="utf-8", newline="") as file:
    csv.writer(file, lineterminator="\n").writerows([("id", "text", "label"), *rows])
print(f"wrote train.tsv with {len(train)} rows, texts.txt with the same texts, and rows.csv with {len(rows)} others")
