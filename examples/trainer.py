"""Fine-tune SNNK adapters with PEFT and the Trainer of transformers, save them, and load them again.

    python examples/trainer.py [MODEL] [--out adapter] [--epochs 2]

The data are those of messages.py. Without MODEL, a small one with random weights is made.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import tiny
import torch
from peft import PeftModel, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

import snnk.peft  # registers the method


def main(name: str, out: Path, epochs: int, folder: Path) -> None:
    subprocess.run([sys.executable, str(Path(__file__).with_name("messages.py")), str(folder)], check=True)
    with open(folder / "train.tsv", encoding="utf-8") as file:
        table = list(csv.DictReader(file, delimiter="\t"))
    labels = sorted({row["label"] for row in table})
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = [{**tokenizer(row["text"]), "labels": labels.index(row["label"])} for row in table]

    def base() -> torch.nn.Module:
        torch.manual_seed(0)  # the new classifier is random
        return AutoModelForSequenceClassification.from_pretrained(name, num_labels=len(labels))

    config = snnk.peft.SNNKConfig(
        num_features=8, feature_map="gelu", directions="pca", gate=False, task_type=TaskType.SEQ_CLS
    )
    model = get_peft_model(base(), config)
    texts = [row["text"] for row in table]
    batches = [dict(tokenizer(texts[i : i + 32], padding=True, return_tensors="pt")) for i in range(0, 160, 32)]
    snnk.peft.fit_directions_(model, batches)
    model.print_trainable_parameters()

    arguments = TrainingArguments(
        str(folder / "runs"),
        num_train_epochs=epochs,
        learning_rate=3e-3,
        report_to=[],
        save_strategy="no",
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer).train()
    model.save_pretrained(out)

    again = PeftModel.from_pretrained(base(), out).eval()
    with torch.inference_mode():
        logits = [m.eval()(**batches[0]).logits for m in (model.cpu(), again)]
    print(f"loaded again, the logits differ by {(logits[0] - logits[1]).abs().max():.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of a model, or its name on the hub")
    parser.add_argument("--out", type=Path, default=Path("adapter"))
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        tiny_folder = Path(temporary) / "tiny"
        main(args.model or str(tiny.make(tiny_folder)), args.out, args.epochs, Path(temporary))
