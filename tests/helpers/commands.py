"""Every command that opens a folder of a model."""


def commands(folder, texts):
    out = str(folder.parent / "out")
    train = str(texts.parent / "train.tsv")
    return {
        "audit": ["audit", str(folder)],
        "audit against": ["audit", str(folder), "--original", str(folder), "--latency"],
        "compress": ["compress", str(folder), "--calibration", str(texts), "--out", out],
        "finetune": ["finetune", str(folder), "--train", train, "--out", out],
        "reproduce": ["reproduce", "compression", "--quick", "--model", str(folder), "--out", out],
    }
