"""The closed-form start of a classifier, against scikit-learn and against refits without each row."""

import math

import numpy as np
import pytest
import torch
import transformers as hf
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss

from snnk.hf import fit_classifier_
from snnk.hf.classify.heads import _collect

from helpers.architectures import make

N = 300


def texts(n=N, seed=0):
    return torch.randint(3, 40, (n, 6), generator=torch.Generator().manual_seed(seed))


def batches(ids, labels, size=64):
    return [{"input_ids": i, "labels": y} for i, y in zip(ids.split(size), labels.split(size), strict=True)]


def classes(ids, k=3):
    """Classes that depend on the first and last token, with some noise."""
    noise = torch.randint(0, 9, ids[:, 0].shape, generator=torch.Generator().manual_seed(5))
    return ((ids[:, 0] + ids[:, -1] + noise) * k // 92).clamp(max=k - 1)


def features(model, ids):
    """The inputs of BERT's classifier, in eval mode."""
    with torch.no_grad():
        return model.bert(input_ids=ids).pooler_output


def logits(model, **kwargs):
    with torch.no_grad():
        return model(**kwargs).logits


@pytest.fixture(scope="module")
def ids():
    return texts()


def classifier(k=3, **options):
    return make("bert", hf.AutoModelForSequenceClassification, num_labels=k, **options)


@pytest.mark.parametrize("signal", [0.0, 2.0])
def test_classes_near_logistic_regression(ids, signal):
    """On other texts: far better than the random start, near the optimum of the loss itself."""
    model, other = classifier(), texts(600, seed=1)
    truth = classes(torch.cat([ids, other]))
    h = features(model, torch.cat([ids, other]))
    if signal:  # classes that the features know more of
        generator = torch.Generator().manual_seed(4)
        h = (h - h.mean(0)) / h.std(0)
        known = h @ torch.randn(16, 3, generator=generator) / 4
        truth = (signal * known + torch.randn(known.shape, generator=generator)).argmax(1)
    y, truth = truth[:N], truth[N:].numpy()
    random = log_loss(truth, logits(model, input_ids=other).double().softmax(1))
    fit = fit_classifier_(model, batches(ids, y))
    out = logits(model, input_ids=other)
    ours, accuracy = log_loss(truth, out.double().softmax(1)), float((out.argmax(1).numpy() == truth).mean())
    train, test = (features(model, i).numpy() for i in (ids, other))
    best = LogisticRegression(C=1e3 if signal else 1.0, max_iter=5000).fit(train, y.numpy())
    assert ours < 0.9 * random and ours < 1.06 * log_loss(truth, best.predict_proba(test))
    assert accuracy > best.score(test, truth) - 0.03 and accuracy > (0.75 if signal else 0.6)
    # leave-one-out figures tell of other texts
    assert fit.accuracy == pytest.approx(accuracy, abs=0.06) and fit.loss == pytest.approx(ours, rel=0.12)
    assert (fit.task, fit.rows) == ("single_label_classification", N) and "cross-entropy" in str(fit)


def test_only_the_classifier_changes(ids):
    model = classifier(num_hidden_layers=1).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    fit_classifier_(model, batches(ids, classes(ids)))
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert not model.classifier._forward_hooks
    assert model.classifier.weight.requires_grad


@pytest.mark.parametrize("lam", ["auto", "gcv", "loo", 0.5])
def test_regression_is_ridge_regression(ids, lam):
    model, y = classifier(1), ids[:, 0].float() / 10
    fit = fit_classifier_(model, batches(ids, y), lam=lam)
    assert fit.task == "regression" and fit.loss is None and (lam != 0.5 or fit.solution.lam == 0.5)
    h = features(model, ids).double().numpy()
    wanted = Ridge(alpha=fit.solution.lam, solver="svd").fit(h, y.double().numpy())
    np.testing.assert_allclose(model.classifier.weight.detach()[0], wanted.coef_, atol=1e-4, rtol=1e-3)
    np.testing.assert_allclose(model.classifier.bias.detach()[0], wanted.intercept_, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("row", ["bert", "gpt2"])
def test_leave_one_out_is_exact(row):
    """With and without an intercept (GPT-2's classifier has no bias): refit without each row."""
    ids = texts(40)
    model = make(row, hf.AutoModelForSequenceClassification, num_labels=1)
    y = ids[:, -1].float() / 10
    fit = fit_classifier_(model, batches(ids, y, 16), lam=0.3)
    h = features(model, ids) if row == "bert" else last_tokens(model, ids)
    h, truth = h.double().numpy(), y.double().numpy()
    ridge = Ridge(alpha=fit.solution.lam, fit_intercept=row == "bert", solver="svd")
    wrong = [truth[i] - ridge.fit(np.delete(h, i, 0), np.delete(truth, i)).predict(h[i : i + 1])[0] for i in range(40)]
    assert fit.error == pytest.approx(np.mean(np.square(wrong)) / truth.var(), rel=1e-4)
    np.testing.assert_allclose(model.get_submodule("score" if row == "gpt2" else "classifier").weight.detach()[0],
                               ridge.fit(h, truth).coef_, atol=1e-4, rtol=1e-3)  # fmt: skip


def last_tokens(model, ids, mask=None):
    with torch.no_grad():
        hidden = model.transformer(input_ids=ids).last_hidden_state
    return hidden[:, -1] if mask is None else hidden[torch.arange(len(ids)), mask.sum(1) - 1]


def test_decoders_are_read_at_the_token_that_they_classify(ids):
    """Texts of two lengths, padded on the right with the token 0."""
    model = make("gpt2", hf.AutoModelForSequenceClassification, num_labels=3)
    ids = ids.clone()
    ids[::2, 4:] = 0
    mask = (ids != 0).long()
    y = (ids[torch.arange(N), mask.sum(1) - 1] * 3 // 41).clamp(max=2)
    batch = [{"input_ids": ids, "attention_mask": mask, "labels": y}]
    before = logits(model, input_ids=ids, attention_mask=mask).argmax(1)
    fit = fit_classifier_(model, batch)
    h = last_tokens(model, ids, mask).double().numpy()
    wanted = Ridge(alpha=fit.solution.lam, fit_intercept=False).fit(h, np.eye(3)[y] - 1 / 3).coef_
    got = model.score.weight.detach().double().numpy()
    np.testing.assert_allclose(got, fit.temperature * wanted, atol=1e-3, rtol=1e-2)
    found = logits(model, input_ids=ids, attention_mask=mask).argmax(1)
    assert (found == y).double().mean() > 0.6 > 0.5 > (before == y).double().mean()
    assert fit.accuracy > 0.55


def test_tokens_and_labels_to_ignore(ids):
    model = make("bert", hf.AutoModelForTokenClassification, num_labels=2)
    labels = (ids > 20).long()
    labels[:, 0] = -100
    fit = fit_classifier_(model, batches(ids, labels))
    assert fit.rows == N * 5
    found = logits(model, input_ids=ids).argmax(-1)
    assert (found == labels)[:, 1:].double().mean() > 0.7


def test_several_labels_at_once(ids):
    model = classifier(2)
    y = torch.stack([ids[:, 0] > 20, ids[:, -1] > 30], 1).float()
    fit = fit_classifier_(model, batches(ids, y))
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=y).loss)
    assert fit.task == "multi_label_classification" and fit.accuracy is None
    assert loss < 0.6 and fit.loss == pytest.approx(loss, rel=0.15)


def test_rows_that_are_kept_are_spread_over_all(ids, monkeypatch):
    """A file sorted by class: the leave-one-out figures must know all classes."""
    y = classes(ids, 2)
    order = y.argsort()
    model, other = classifier(2), classifier(2)
    whole = fit_classifier_(model, batches(ids[order], y[order], 7))
    monkeypatch.setattr("snnk.hf.classify.heads.KEPT_ROWS", 40)
    some = fit_classifier_(other, batches(ids[order], y[order], 7))
    assert some.rows == whole.rows == N and some.solution.lam == whole.solution.lam
    assert some.loss != whole.loss and some.loss == pytest.approx(whole.loss, rel=0.3)
    shares = [float(logits(m, input_ids=ids).softmax(1)[:, 1].mean()) for m in (model, other)]
    assert shares[0] == pytest.approx(float(y.double().mean()), abs=0.02) and shares[1] == pytest.approx(
        shares[0], abs=0.1
    )


@pytest.mark.parametrize("size", [1, 7, 300])
def test_rows_that_are_kept_are_evenly_spaced(ids, monkeypatch, size):
    """Whatever the batches: 80 rows are thinned to 40, and so on, until every fourth of 300 is left."""
    monkeypatch.setattr("snnk.hf.classify.heads.KEPT_ROWS", 40)
    model, y = classifier(1), torch.arange(float(N))
    kept = _collect(model, model.classifier, batches(ids, y, size))
    assert kept.y[:, 0].tolist() == y[:: 4 if size < 300 else 2].tolist() and kept.count == N
    torch.testing.assert_close(kept.h, features(model, ids)[kept.y[:, 0].long()].double(), atol=1e-5, rtol=1e-4)


def test_labels_that_features_know_nothing_of(ids):
    """The start is then the frequency of classes, and no confident noise."""
    model = classifier(2)
    y = (torch.rand(N, generator=torch.Generator().manual_seed(3)) < 0.2).long()
    fit = fit_classifier_(model, batches(ids, y))
    share = float(y.double().mean())
    chance = -share * np.log(share) - (1 - share) * np.log(1 - share)
    assert fit.temperature >= 0 and fit.loss < chance * 1.02
    assert float(logits(model, input_ids=ids).softmax(1)[:, 1].mean()) == pytest.approx(share, abs=0.05)


def test_few_rows_are_not_taken_for_certain():
    """Ten rows for sixteen features: fitted values are perfect, but not believed."""
    model, few = classifier(2), texts(10)
    y = (few[:, 0] > 20).long()
    fit = fit_classifier_(model, batches(few, y))
    assert np.isfinite(fit.loss) and logits(model, input_ids=few).abs().max() < 30


@pytest.mark.parametrize(
    ("row", "rows", "chosen"),
    [("bert", 9, "loo"), ("bert", 31, "loo"), ("bert", 32, "gcv"), ("gpt2", 31, "loo"), ("gpt2", 32, "gcv")],
)
def test_automatic_lam_is_that_of_left_out_rows_where_rows_are_few(row, rows, chosen):
    """Below two rows for each of 16 features."""
    few, fits = texts(rows), {}
    y = few[:, 0].float() / 10 + 0.3 * torch.randn(rows, generator=torch.Generator().manual_seed(2))
    for lam in ("auto", "gcv", "loo"):
        model = make(row, hf.AutoModelForSequenceClassification, num_labels=1)
        fits[lam] = fit_classifier_(model, batches(few, y), lam=lam).solution
    assert fits["auto"].lam == pytest.approx(fits[chosen].lam, rel=1e-6)
    assert fits["auto"].score == pytest.approx(fits[chosen].score, rel=1e-6)
    assert fits["loo"].score != pytest.approx(fits["gcv"].score, rel=1e-3)


@pytest.mark.parametrize("row", ["bert", "gpt2"])
@pytest.mark.parametrize("rows", [10, 24])
def test_loo_is_the_least_error_of_regressions_without_each_row(row, rows):
    """With fewer rows than the 16 features, and with more."""
    ids = texts(rows)
    y = ids[:, 0].float() / 10 + 0.3 * torch.randn(rows, generator=torch.Generator().manual_seed(2))
    model = make(row, hf.AutoModelForSequenceClassification, num_labels=1)
    found = fit_classifier_(model, batches(ids, y), lam="loo").solution
    h = (features(model, ids) if row == "bert" else last_tokens(model, ids)).double().numpy()
    truth, every = y.double().numpy(), np.arange(rows)

    def error(lam):
        ridge = Ridge(alpha=lam, solver="svd", fit_intercept=row == "bert")
        return np.mean(
            [(ridge.fit(h[every != i], truth[every != i]).predict(h[[i]])[0] - truth[i]) ** 2 for i in every]
        )

    assert found.score == pytest.approx(error(found.lam), rel=1e-4)
    assert all(error(found.lam * factor) >= found.score * (1 - 1e-4) for factor in (0.5, 0.9, 1.1, 2.0))
    # The curve, down to penalties at which ten rows are fitted exactly. Rounding is 2e-16 over lam / s, with s the
    # largest eigenvalue, which is 1e-4 of the largest lam: below 1e-6 here.
    largest = found.path[-1][0]
    curve = [(lam, score) for lam, score, _ in found.path[::5] if lam > 1e-9 * 1e-4 * largest]
    assert min(curve)[0] < 1e-7 * 1e-4 * largest
    assert all(score == pytest.approx(error(lam), rel=1e-5) for lam, score in curve)


@pytest.mark.once
def test_bad_calls(ids):
    model = classifier(3)
    with pytest.raises(ValueError, match=r"every batch needs 'labels'.*got input_ids"):
        fit_classifier_(model, [{"input_ids": ids}])
    with pytest.raises(ValueError, match="at least 2 labelled rows; the batches have 0"):
        fit_classifier_(model, [])
    with pytest.raises(ValueError, match=r"classes 0 to 2; got 7. Set num_labels"):
        fit_classifier_(model, batches(ids, torch.full((N,), 7)))
    with pytest.raises(ValueError, match=r"classes 0 to 2; got torch.int64 of shape \(64,\)"):
        fit_classifier_(model, batches(ids, torch.full((N,), -1)))
    with pytest.raises(ValueError, match=r"labels of shape \(3,\) do not fit features of shape \(300, 16\)"):
        fit_classifier_(model, [{"input_ids": ids, "labels": torch.zeros(3).long()}])
    with pytest.raises(ValueError, match=r"must be \(n, 3\); got shape \(64,\)"):
        fit_classifier_(model, batches(ids, torch.zeros(N)))
    with pytest.raises(ValueError, match="unknown lam 'best'"):
        fit_classifier_(model, [], lam="best")
    with pytest.raises(ValueError, match="num_labels = 2 outputs outside its base model; found none"):
        fit_classifier_(make("bert"), batches(ids, classes(ids, 2)))
    both = make("roberta", hf.AutoModelForSequenceClassification, num_labels=16)  # as many as hidden features
    with pytest.raises(ValueError, match=r"found classifier.dense, classifier.out_proj. Give its name as classifier="):
        fit_classifier_(both, batches(ids, classes(ids, 16)))
    assert fit_classifier_(both, batches(ids, classes(ids, 16)), classifier="classifier.out_proj").rows == N
    with pytest.raises(ValueError, match=r"classifier 'nothing' of Roberta.* must be an nn.Linear; got None"):
        fit_classifier_(both, [], classifier="nothing")
    with pytest.raises(TypeError, match="PreTrainedModel; got Linear"):
        fit_classifier_(torch.nn.Linear(2, 2), [])


def test_labels_that_say_nothing_give_the_shares_of_classes():
    """Far too large a penalty makes left-out rows worse than chance: the start must not be worse than the shares."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=90, **sizes)).eval()
    before = model.classifier.weight.clone()
    ids, labels = torch.randint(90, (300, 8), generator=generator), (torch.arange(300) % 10 < 7).long()
    fit = fit_classifier_(model, [{"input_ids": ids, "labels": labels}], lam=1e9)
    shares = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3))
    assert fit.temperature == 0 and fit.loss == pytest.approx(shares, abs=2e-3)
    assert torch.equal(model.classifier.weight, before)  # through zeros no gradient would reach the model
    odds = (model.classifier.bias[1] - model.classifier.bias[0]).item()
    assert odds == pytest.approx(math.log(7 / 3), abs=0.02)
