"""The reader: which samples, in which order, with which boundaries."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from headmax import HeadmaxForCausalLM, recipes
from headmax.data import prepare as module
from headmax.data.dataset import TokenShards
from headmax.data.prepare import PrepareConfig, prepare
from headmax.data.shards import Index, verify
from tests.data.corpus import documents, write

LENGTH = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 3000)
        texts = [text if n % 3 else text[:30] for n, text in enumerate(documents(60, lines=4))]
        prepare(PrepareConfig((str(write(path / "a.jsonl", texts)),), valid_fraction=0.2, shard_tokens=2000), path / "out", workers=2)
    return path / "out"


@pytest.fixture(scope="module")
def stream(folder: Path) -> np.ndarray:
    """All tokens to train on, as they lie in the shards."""
    return np.concatenate([np.fromfile(folder / f"{shard.name}.tokens", np.uint16) for shard in Index.read(folder).splits["train"]])


def test_an_epoch_is_every_window_once_in_an_order_of_its_own(folder: Path, stream: np.ndarray) -> None:
    source = TokenShards(folder, length=LENGTH, seed=3)
    n = source.num_samples
    assert n == len(stream) // LENGTH > 20
    assert len(Index.read(folder).splits["train"]) > 2  # windows cross shards
    windows = stream[: n * LENGTH].reshape(n, LENGTH).astype(np.int64)
    orders = []
    for epoch in range(3):
        batch = source.batch(range(epoch * n, (epoch + 1) * n))
        assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
        assert torch.equal(batch.input_ids, batch.labels)
        assert batch.packing is None
        order = source.windows(range(epoch * n, (epoch + 1) * n))
        assert np.array_equal(batch.input_ids.numpy(), windows[order])
        assert sorted(order) == list(range(n))
        orders.append(order.tolist())
    assert orders[0] != orders[1] != orders[2] != list(range(n))
    assert TokenShards(folder, length=LENGTH, seed=4).windows(range(n)).tolist() != orders[0]


def test_ranks_and_restarts_see_the_same_samples(folder: Path) -> None:
    source, again = (TokenShards(folder, length=LENGTH, seed=0) for _ in range(2))
    steps = [source.batch(range(8 * step, 8 * step + 8)).input_ids for step in range(20)]
    for step in (19, 4, 11):
        ranks = [again.batch(range(8 * step + 2 * rank, 8 * step + 2 * rank + 2)).input_ids for rank in range(4)]
        assert torch.equal(torch.cat(ranks), steps[step])


@pytest.mark.parametrize("length", [7, LENGTH, 2500])
def test_documents_kept_apart(folder: Path, stream: np.ndarray, length: int) -> None:
    joined, source = (TokenShards(folder, length=length, seed=1, documents=how) for how in ("concatenate", "separate"))
    for first in range(0, 12, 3):
        batch = source.batch(range(first, first + 3))
        assert batch.input_ids.shape == batch.labels.shape == (1, 3 * length)
        assert torch.equal(batch.input_ids.view(3, length), joined.batch(range(first, first + 3)).input_ids)
        assert batch.packing is not None
        row = batch.input_ids[0]
        begins = sorted({0, length, 2 * length, *(row == 1).nonzero().flatten().tolist()})
        assert batch.packing.cu_seqlens.tolist() == [*begins, 3 * length]
        expected = row.clone()
        expected[begins] = -100
        assert torch.equal(batch.labels[0], expected)


def test_a_model_takes_the_batches(folder: Path) -> None:
    config = recipes.get("softmax-gla-tiny").model
    torch.manual_seed(0)
    model = HeadmaxForCausalLM(config).train()
    assert TokenShards(folder, length=64, seed=0).vocab_size <= config.vocab_size
    joined, apart = (TokenShards(folder, length=64, seed=0, documents=how).batch(range(4)) for how in ("concatenate", "separate"))
    assert torch.isfinite(model(joined.input_ids, labels=joined.labels).loss)
    packed = model(apart.input_ids, labels=apart.labels, cu_seqlens=apart.packing)
    losses = []
    for row in apart.input_ids[0].tensor_split(apart.packing.cu_seqlens[1:-1]):
        if len(row) > 1:
            losses += [model(row[None], labels=row[None]).loss] * (len(row) - 1)
    assert torch.allclose(packed.loss, torch.stack(losses).mean(), atol=1e-5)


def test_the_held_out_split(folder: Path) -> None:
    source = TokenShards(folder, length=50, seed=0, split="valid")
    assert source.num_samples == Index.read(folder).tokens("valid") // 50
    assert source.identity != TokenShards(folder, length=50, seed=0).identity


def test_identity_says_what_must_not_change(folder: Path, tmp_path: Path) -> None:
    identity = TokenShards(folder, length=LENGTH, seed=0).identity
    shutil.copytree(folder, tmp_path / "copy")
    assert TokenShards(tmp_path / "copy", length=LENGTH, seed=0).identity == identity
    for change in ({"length": 99}, {"seed": 1}, {"documents": "separate"}):
        assert TokenShards(folder, **({"length": LENGTH, "seed": 0} | change)).identity != identity
    assert all(isinstance(value, str | int) for value in identity.values())


def test_bad_requests(folder: Path, tmp_path: Path) -> None:
    for change, said in (
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"length": 10**6}, r"\d+ tokens in split 'train', fewer than one sample of 1000000"),
        ({"documents": "apart"}, "documents must be 'concatenate' or 'separate', got 'apart'"),
        ({"split": "test"}, "no split 'test', only train and valid"),
    ):
        with pytest.raises(ValueError, match=said):
            TokenShards(folder, **({"length": LENGTH, "seed": 0} | change))
    with pytest.raises(ValueError, match=r"no prepared data \(index\.json is missing\)"):
        TokenShards(tmp_path, length=LENGTH, seed=0)
    for indices in ([], [-1]):
        with pytest.raises(ValueError, match="indices must be one or more numbers of at least 0"):
            TokenShards(folder, length=LENGTH, seed=0).batch(indices)


def test_the_code_of_the_guide_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "data" / "mine")
    scope: dict = {}
    exec(guide.split("```python\n")[1].split("```")[0], scope)
    assert scope["batch"].input_ids.shape == (8, 4096)


def test_a_damaged_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tokens = copy / "train-00001.tokens"
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)
    TokenShards(copy, length=LENGTH, seed=0)
    with pytest.raises(ValueError, match=r"train-00001\.tokens: changed since it was prepared"):
        verify(copy)
    tokens.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"train-00001\.tokens: \d+ bytes, the index says \d+ bytes"):
        TokenShards(copy, length=LENGTH, seed=0)
    tokens.unlink()
    with pytest.raises(ValueError, match=r"train-00001\.tokens: missing"):
        TokenShards(copy, length=LENGTH, seed=0)
    for content_, said in (
        ('{"format": 99}', "prepared in format 99, but this headmax reads 1"),
        ("{", "not an index"),
        ('{"format": 1}', "not an index"),
    ):
        (copy / "index.json").write_text(content_)
        with pytest.raises(ValueError, match=said):
            TokenShards(copy, length=LENGTH, seed=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float99"}, "dtype cannot be 'float99'"),
        ({"vocab_size": "many"}, "vocab_size must be int, got 'many'"),
        ({"made_from": 3}, "made_from must be dict, got 3"),
        ({"splits": {}}, r"train is missing"),
        ({"splits": 3}, "not an index"),
        ({"splits": {"train": [{"name": "../x"}], "valid": []}}, "not an index"),
        ({"name": "../outside/x"}, "'../outside/x' is no name of a file beside it"),
        ({"tokens": 1.5}, r"tokens must be int, got 1\.5"),
    ],
)
def test_an_index_that_cannot_be(change: dict[str, object], said: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    fields = json.loads((copy / "index.json").read_text())
    target = fields["splits"]["train"][0] if change.keys() & {"name", "tokens"} else fields
    target.update(change)
    (copy / "index.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=said):
        Index.read(copy)


def test_a_token_outside_the_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    fields = json.loads((copy / "index.json").read_text())
    (copy / "index.json").write_text(json.dumps(fields | {"vocab_size": 5}))
    with pytest.raises(ValueError, match="is outside the vocabulary of 5; prepare the folder again"):
        TokenShards(copy, length=LENGTH, seed=0).batch([0])
    with pytest.raises(ValueError, match=r"train-00000\.tokens: token \d+ is outside the vocabulary of 5"):
        verify(copy)
