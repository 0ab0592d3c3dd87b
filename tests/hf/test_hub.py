"""`push_to_hub` against a server on the loopback address that plays the endpoints of the hub."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest
import transformers

from snnk.finetune import finetune
from snnk.hf import compress, push_to_hub
from snnk.hf.hub import prepare

from helpers.texts import make_texts, save
from helpers.tuning import TINY, make_config


@pytest.fixture
def hub(monkeypatch):
    """The requests that a server got, [(path, content)]; `refused` is what it answers to a card, if that is not ""."""
    got, state = [], {"refused": ""}

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            got.append((self.path, body))
            status, answer = 200, {}
            if self.path == "/api/validate-yaml" and state["refused"]:
                status, answer = 400, state["refused"]
            elif self.path.endswith("/create"):
                answer = {"url": f"{address}/me/model", "name": "me/model", "id": "0"}
            elif "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                answer = {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
            elif "/commit/" in self.path:
                answer = {"success": True, "commitOid": "abc", "commitUrl": f"{address}/me/model/commit/abc"}
            text = answer if isinstance(answer, str) else json.dumps(answer)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield got, state
    server.shutdown()
    thread.join()
    server.server_close()


def committed(got):
    """Path -> content of the files of the one commit."""
    (body,) = [body for path, body in got if "/commit/" in path]
    lines = [json.loads(line) for line in body.splitlines()]
    return {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
    }


@pytest.fixture
def tuned(tmp_path):
    texts = make_texts(80)
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "".join(f"{t}\t{len(t) % 2}\n" for t in texts))
    model = transformers.BertModel(transformers.BertConfig(**TINY))
    (save(model, tmp_path / "bert") / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n")
    options = {"test": None, "max_steps": 0, "epochs": None, "method": "lora"}
    finetune(make_config(tmp_path, tmp_path / "tuned", **options))
    return tmp_path / "tuned"


def test_an_adapter_is_uploaded_with_the_name_of_its_base_model(hub, tuned):
    got, _ = hub
    (tuned / ".cache").mkdir()
    (tuned / ".cache" / "x").write_text("hidden")
    (tuned / "setup.py").write_text("code")
    url = push_to_hub(tuned, "me/model", base_model="org/bert", private=True, token="hf_x")
    assert url.endswith("/me/model/commit/abc")
    asked = [path for path, _ in got]
    assert asked[0] == "/api/validate-yaml" and "/api/repos/create" in asked  # the card first
    assert "private" in dict(got)["/api/repos/create"]
    found = committed(got)
    assert set(found) == {p.name for p in tuned.iterdir() if p.is_file()} - {"setup.py"}
    assert json.loads(found["adapter_config.json"])["base_model_name_or_path"] == "org/bert"
    card = huggingface_hub.ModelCard(found["README.md"].decode())
    expected = {"license": "mit", "language": "en", "base_model": "org/bert", "pipeline_tag": "text-classification"}
    assert expected.items() <= card.data.to_dict().items() and card.data.library_name == "peft"
    same = {name: (tuned / name).read_bytes() for name in set(found) - {"README.md", "adapter_config.json"}}
    assert same == {name: found[name] for name in same}
    assert str(tuned.parent) not in found["README.md"].decode() + found["metrics.json"].decode()


def test_a_compressed_model_is_uploaded(hub, quick, bert, texts, tmp_path):
    compress(bert, texts, out=tmp_path / "small", keep=0.5, recover=0, refine=0, joint=False, widen=False)
    push_to_hub(tmp_path / "small", "me/model")
    found = committed(hub[0])
    assert {"model.safetensors", "plan.json", "report.html", "README.md"} <= set(found)
    assert huggingface_hub.ModelCard(found["README.md"].decode()).data.base_model is None  # it has no name on the hub


def test_what_the_hub_refuses_is_not_uploaded(hub, tuned):
    got, state = hub
    state["refused"] = '"license" must be one of [...]'
    with pytest.raises(ValueError, match=r'the hub did not take .*tuned as me/model: "license" must be one of'):
        push_to_hub(tuned, "me/model", base_model="org/bert")
    assert [path for path, _ in got] == ["/api/validate-yaml"]


@pytest.mark.parametrize(
    ("name", "base_model", "card", "message"),
    [
        ("me/a/b", "org/bert", None, "'me/a/b' cannot be the name of a repository on the hub"),
        ("me/model", "a b", None, "'a b' cannot be the name of a base model on the hub"),
        ("me/model", None, None, "has the base model .*bert, a place on this machine; give its name on the hub"),
        ("me/model", "org/bert", "---\nlicense: [\n---\n", "README.md is no model card that can be read"),
        ("me/model", "org/bert", "# no front matter", r"README.md has no front matter"),
    ],
)
def test_bad_folders_and_names_are_refused_before_the_network(hub, tuned, name, base_model, card, message):
    if card is not None:
        (tuned / "README.md").write_text(card)
    with pytest.raises(ValueError, match=message):
        push_to_hub(tuned, name, base_model=base_model)
    assert hub[0] == []


def test_a_folder_without_a_card_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no README\.md, the model card that snnk writes"):
        prepare(tmp_path, "me/model", None)
    with pytest.raises(ValueError, match=r"there is no folder .*none"):
        prepare(tmp_path / "none", "me/model", None)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_base_model_without_a_slash_keeps_its_name(tmp_path, monkeypatch, adapter):
    """gpt2 may be a model on the hub or a local folder: an adapter names it, and other models are in the cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "README.md").write_text('---\nbase_model: "gpt2"\n---\n')

    def base_model():
        card = dict(prepare(folder, "me/model", None))["README.md"].decode()
        return huggingface_hub.ModelCard(card).data.base_model

    assert base_model() is None
    if adapter:
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    else:
        cached = tmp_path / "cache" / "models--gpt2"
        for file, text in (("refs/main", "0123abcd"), ("snapshots/0123abcd/config.json", "{}")):
            (cached / file).parent.mkdir(parents=True)
            (cached / file).write_text(text)
    assert base_model() == "gpt2"
