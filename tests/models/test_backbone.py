"""A backbone from outside, tests/outside/value_decay, trains, decodes, comes back from disk and is timed, and headmax knows of nothing."""

import os
import subprocess
import sys
from pathlib import Path

OUTSIDE = Path(__file__).parents[1] / "outside"
PROGRAM = """
import sys
import torch
import headmax
from headmax.layers import MIXERS
from headmax_cli import main

out = sys.argv[1]

def command(*words):
    try:
        main(list(words))
    except SystemExit as end:
        assert not end.code, words

sizes = ["--batch-tokens", "196", "--model.hidden-size", "16", "--compute.micro-batch", "4", "--device", "cpu"]
command("train", "mqar-softmax-vd", "--out", f"{out}/run", "--max-steps", "3", "--checkpoint-every", "2", *sizes)
command("convert", f"{out}/run", f"{out}/model", "--to", "hf")
model = headmax.HeadmaxForCausalLM.from_pretrained(f"{out}/model").eval()
assert type(model.model.layers[0].mixer).__name__ == "ValueDecay"

with torch.no_grad():
    prompt = torch.arange(9)[None] % 64
    made = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(made[:, 9:], model(made[:, :-1]).logits[:, 8:].argmax(-1))
    model.save_pretrained(f"{out}/again")
    again = headmax.HeadmaxForCausalLM.from_pretrained(f"{out}/again")
    assert torch.equal(again(made).logits, model(made).logits)

mixer = MIXERS["value_decay"](normalizer=8.0)
settings = headmax.HeadmaxConfig(mixer=mixer, hidden_size=32, num_hidden_layers=1, vocab_size=64)
assert headmax.HeadmaxConfig.from_dict(settings.to_dict()).mixers[0].normalizer == 8.0
assert {"vd-tiny", "softmax-vd-340m", "mqar-vd"} <= set(headmax.recipes.names())
command("plan", "softmax-vd-340m", "--tokens", "1B")
lengths = ["--batches", "1", "--prompts", "8", "--decoded", "10", "--rounds", "2"]
command("bench", "decode", "--recipe", "softmax-vd-tiny", *lengths, "--device", "cpu")
"""


def test_a_backbone_from_outside(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(OUTSIDE), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "softmax-vd-tiny batch 1 context 8" in done.stdout


def test_a_broken_one_from_outside_is_named_and_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[headmax.mixers]\nbroken = no_such_module\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    program = "import headmax; print(headmax.recipes.get('gla-tiny').name)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "gla-tiny\n"
    assert "mixer no_such_module of another package is not available: ModuleNotFoundError" in done.stderr
