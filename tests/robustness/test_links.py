"""Links out of a model's folder, pipes, sockets and devices are refused before anything is read."""

import os
import shutil
import socket

import pytest

from snnk.hf.calibration import load_calibration
from snnk.hf.folders import refuse_unsafe
from snnk.hf.hub import prepare

from helpers.commands import commands


def make_pipe(path, secret):
    os.mkfifo(path)


def make_socket(path, secret):
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path has 100 characters at most
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


def make_loop(path, secret):
    path.symlink_to(path.name)


def make_link(path, secret):
    path.symlink_to(secret)


def make_relative_link(path, secret):
    path.symlink_to(os.path.relpath(secret, path.parent))


def make_link_by_way_of_another(path, secret):
    (path.parent / "between").symlink_to(secret)
    path.symlink_to("between")


def make_folder_link(path, secret):
    path.symlink_to(secret.parent, target_is_directory=True)


def make_dangling_link(path, secret):
    path.symlink_to("nowhere")


def make_device_link(path, secret):
    path.symlink_to("/dev/zero")


MAKERS = {
    function.__name__.removeprefix("make_"): function
    for function in (
        make_pipe,
        make_socket,
        make_loop,
        make_link,
        make_relative_link,
        make_link_by_way_of_another,
        make_folder_link,
        make_dangling_link,
        make_device_link,
    )
}
PLACES = ("notes.txt", "config.json", "model.safetensors", "tokenizer.json", "README.md", "1_Pooling/config.json")


@pytest.mark.parametrize("kind", MAKERS)
def test_what_leads_out_of_the_folder_is_refused(kind, run, bert, texts):
    secret = bert.parent / "elsewhere" / "secret.txt"
    secret.parent.mkdir()
    secret.write_text("secret")
    for place in PLACES:
        path = bert / place
        path.parent.mkdir(exist_ok=True)
        aside = path.exists() and path.rename(bert.parent / "aside")
        MAKERS[kind](path, secret)
        for command, args in commands(bert, texts).items():
            if command == "finetune" and place != "config.json":  # it takes a second to start
                continue
            code, _, err = run(*args)
            assert code == 2 and err.count("\n") == 1, (command, place, err)
            assert "link" in err or "followed" in err or "pipe, socket or device" in err, (command, place, err)
            assert not (bert.parent / "out").exists(), (command, place)
        path.unlink()
        if aside:
            aside.rename(path)
        (bert / "between").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", MAKERS)
def test_exports_that_lead_out_of_the_folder_are_not_uploaded(kind, bert):
    """No command reads them, but `push_to_hub` publishes them."""
    (bert / "README.md").write_text("---\nlicense: mit\n---\n")
    secret = bert.parent / "elsewhere" / "secret.txt"
    secret.parent.mkdir()
    secret.write_text("secret")
    for place in ("onnx/x", "openvino/deeper/x"):
        path = bert / place
        path.parent.mkdir(exist_ok=True, parents=True)
        MAKERS[kind](path, secret)
        refuse_unsafe(bert)
        with pytest.raises(ValueError, match=r"outside the model's folder|cannot be followed|pipe, socket or device"):
            prepare(bert, "me/model", None)
        path.unlink()
        (path.parent / "between").unlink(missing_ok=True)
    (bert / "onnx" / "model.onnx").write_text("graph")
    assert "onnx/model.onnx" in dict(prepare(bert, "me/model", None))


def test_a_snapshot_of_the_hub_links_to_its_own_blobs(run, quick, bert, texts):
    """A link to the blobs of another model is refused."""
    cache = bert.parent / "hub" / "models--someone--bert"
    snapshot = cache / "snapshots" / "0123abcd"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(bert.iterdir())):
        shutil.copyfile(file, cache / "blobs" / f"{i}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    (cache / "blobs" / "note").write_text("kept")
    (snapshot / "note.txt").symlink_to("../../blobs/note")
    out = bert.parent / "out"
    code, _, _ = run("compress", snapshot, "--calibration", texts, "--out", out, "--refine", 0)
    assert code == 0 and (out / "note.txt").read_text() == "kept"
    assert not any(path.is_symlink() for path in out.rglob("*"))
    other = bert.parent / "hub" / "models--someone--private" / "blobs"
    other.mkdir(parents=True)
    (other / "0").write_text("secret")
    (snapshot / "more.txt").symlink_to("../../../models--someone--private/blobs/0")
    with pytest.raises(ValueError, match="outside the model's folder"):
        refuse_unsafe(snapshot)


def test_links_inside_the_folder_stay(run, quick, bert, texts):
    (bert / "weights").mkdir()
    (bert / "model.safetensors").rename(bert / "weights" / "first.safetensors")
    (bert / "model.safetensors").symlink_to("weights/first.safetensors")
    (bert / "again").symlink_to(".", target_is_directory=True)  # around in a circle
    linked = bert.parent / "linked"
    linked.symlink_to(bert, target_is_directory=True)  # the folder that a user names may be a link
    assert run("compress", linked, "--calibration", texts, "--out", bert.parent / "o", "--refine", 0)[0] == 0


@pytest.mark.parametrize("kind", ["pipe", "socket", "device_link", "dangling_link"])
def test_a_folder_of_images_has_images_only(kind, tmp_path):
    """A pipe would never end. Links to images elsewhere are allowed, as many data sets have them."""
    from PIL import Image
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "elsewhere.png")
    for i in range(10):
        (tmp_path / "images" / f"{i}.png").symlink_to(tmp_path / "elsewhere.png")
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    assert load_calibration(tmp_path / "images", processor).items == 10
    MAKERS[kind](tmp_path / "images" / "a.png", tmp_path)
    with pytest.raises(ValueError, match=r"a\.png"):
        load_calibration(tmp_path / "images", processor)
