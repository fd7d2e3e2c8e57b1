"""Language models of the hub, taken from its cache, or from the network after one request that
answers; shuffled weights.
"""

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch

from decisionllm.backbones.build import pretrained
from decisionllm.registry import build
from tests.backbones.test_backbones import weights, write
from tests.conftest import PATIENCE, node


@pytest.fixture
def hub():
    """A hub that answers each request with 503, which its clients try again: (address, the paths
    that were requested).
    """
    requested = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self):
            requested.append(self.path)
            self.send_error(503)

        do_HEAD = do_GET

        def log_message(self, *words):
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requested
    server.shutdown()
    server.server_close()


def of_hub(name, address, home):
    """What another process says that takes this model of the hub and its tokenizer at this address,
    with its cache in `home`.
    """
    script = (
        "from decisionllm.backbones.build import pretrained\n"
        f"model = pretrained(0, hub_id={name!r})\n"
        "model.encode(['Go'])\n"
        "print(model.width)"
    )
    outside = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=outside,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        encoding="utf-8",
    )


@pytest.mark.slow
def test_a_hub_that_fails_is_tried_once(hub, tmp_path):
    address, requested = hub
    done = of_hub("me/tiny", address, tmp_path)
    expected = (
        "backbone me/tiny: could not be loaded (no copy in the cache, and no network or no "
        "such model; backbone.folder=..."
    )
    assert f"OSError: {expected} reads a local folder): " in done.stderr.splitlines()[-1]
    assert [path for path in requested if "me/tiny" in path] == ["/api/models/me/tiny"]


@pytest.mark.slow
def test_a_copy_in_the_cache_of_the_hub_needs_no_network(hub, tmp_path):
    address, requested = hub
    folder = tmp_path / "hub" / "models--me--tiny"
    write(folder / "snapshots" / "0a1b")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0a1b", encoding="utf-8")
    done = of_hub("me/tiny", address, tmp_path)
    assert done.stdout.strip() == "32" and requested == [], done.stderr


def test_the_tokenizer_is_loaded_with_the_first_text(tmp_path):
    for file in write(tmp_path).glob("tokenizer*"):
        file.unlink()
    backbone = pretrained(0, folder=str(tmp_path), tune="frozen", text_layers=1, layers=2)
    assert backbone.encode(["", ""])[0].shape == (2, 0)
    with pytest.raises(OSError, match="could not be loaded .* expected the files of a tokenizer"):
        backbone.encode(["", "Go"])


def test_the_weights_of_a_folder_are_shuffled(tmp_path):
    """Shuffled within each tensor, as the seed says, whatever is tuned; adapters are left alone."""
    folder = str(write(tmp_path))
    stored, one, same, other = (
        pretrained(seed, folder=folder, weights=source, tune="frozen", text_layers=0, layers=0).core
        for seed, source in ((0, "pretrained"), (0, "shuffled"), (0, "shuffled"), (1, "shuffled"))
    )
    stored, one, same, other = map(weights, (stored, one, same, other))
    for name, weight in stored.items():
        assert torch.equal(weight.flatten().sort().values, one[name].flatten().sort().values)
        assert torch.equal(one[name], same[name])
    assert not any(
        torch.equal(one["embed_tokens.weight"], w["embed_tokens.weight"]) for w in (stored, other)
    )
    whole = {"text_layers": 0, "layers": 0}
    adapted = weights(pretrained(0, folder=folder, weights="shuffled", **whole).core)
    plain = weights(pretrained(0, folder=folder, **whole).core)
    assert torch.equal(
        adapted["layers.0.mlp.up_proj.base_layer.weight"], one["layers.0.mlp.up_proj.weight"]
    )
    assert all(
        torch.equal(weight, adapted[name]) for name, weight in plain.items() if "lora_" in name
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nano", {"layers": 0}, "backbone.layers: expected 1 or more, got 0"),
        ("nano", {"heads": 3}, "backbone.width: expected a multiple of backbone.heads=3, got 128"),
        (
            "nano",
            {"kv_heads": 3},
            "backbone.kv_heads: expected a divisor of backbone.heads=4, got 3",
        ),
        ("nano", {"width": 28}, "backbone.width: expected an even number for each of 4 heads"),
        ("dt", {"heads": 3}, "backbone.width: expected a multiple of backbone.heads=3, got 128"),
        ("dt", {"layers": 0}, "backbone.layers: expected 1 or more, got 0"),
        ("dt", {"dropout": 1}, "backbone.dropout: expected a share from 0 and below 1, got 1"),
    ],
)
def test_a_shape_that_no_backbone_can_have_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(node("backbone", name, **options), 0)
