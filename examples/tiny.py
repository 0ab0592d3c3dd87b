"""Write a small BERT with random weights, and a tokenizer trained on general English text: a stand-in for a real model.

    python examples/tiny.py FOLDER

The other examples use it if they are given no model, so that they run without a network. Its outputs mean nothing.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from snnk.hf.general import general_texts

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make(folder: Path) -> Path:
    """A model of 64 dimensions and two layers; returns its folder."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    pieces.train_from_iterator(
        general_texts(3000), trainers.WordPieceTrainer(vocab_size=2000, special_tokens=SPECIAL, show_progress=False)
    )
    ends = [(name, pieces.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    pieces.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, model_max_length=128, **names)

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print("wrote", make(Path(sys.argv[1])))
