"""The cost of gates from records of the benchmarks, as far as there are any."""

from pathlib import Path

from headmax.records import Recorder, append
from lab.pages import efficiency
from lab.study.earlier import MISSING, Results


def cells(text: str, start: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(f"| {start} |")]


def page(results: Results) -> str:
    return "\n".join(
        line for part in (efficiency.training, efficiency.sizes, efficiency.decoding, efficiency.texts) for line in part(results)
    )


def test_without_records_everything_is_missing(tmp_path: Path) -> None:
    text = page(Results(tmp_path))
    assert all(row[1:] == [MISSING] * len(row[1:]) for name in ("GLA", "RetNet", "GDN") for row in cells(text, name))
    assert "gates cost" not in text


def test_panels(tmp_path: Path) -> None:
    train, decode = Recorder("train", "cpu"), Recorder("decode", "cpu")
    made = []
    for size, speed in (("16384x2", 90.0), ("4096x8", 100.0)):
        case = f"gla-340m {size}"
        made += [train(case, "headmax", "plain/tokens per second", 1000 * speed, "tokens/s")]
        made += [train(case, "headmax", "softmax/tokens per second", 990 * speed, "tokens/s")]
        made += [train(case, "headmax", "softmax/peak memory", 27.64, "GiB")]
        made += [train(case, "headmax", "softmax over plain/time", 1 + 1 / speed, "ratio", interval=[1.0, 1.02])]
        made += [train(case, "headmax", "softmax over plain/memory", 1.001, "ratio")]
        made += [train(case, "fla", "plain/tokens per second", 700 * speed, "tokens/s")]
        made += [train(f"retnet-340m {size}", "headmax", "transformer/tokens per second", 500 * speed, "tokens/s")]
    made += [train("gla-80m 4096x8", "headmax", "plain/tokens per second", 1.0, "tokens/s")]
    for count, seconds in ((16384, 6.0), (512, 0.25)):
        made += [decode(f"gla-340m batch 1 context 1024 decoded {count}", "headmax", "end to end", seconds, "s")]
        made += [decode(f"softmax-gla-340m batch 1 context 1024 decoded {count}", "headmax", "end to end", 1.02 * seconds, "s")]
    made += [decode("gla-340m batch 1 context 1024", "fla", "latency per token", 53.2, "ms")]
    made += [decode("transformer-340m, static cache batch 1 context 1024", "hf", "latency per token", 3.38, "ms")]
    append(tmp_path / "records.jsonl", made)
    text = page(Results(tmp_path))
    beside, short, long, token, *whole = cells(text, "GLA")
    assert beside == ["GLA", "100,000", "99,000", "1.010 (1.000 to 1.020)", "70,000", MISSING]
    assert short == ["GLA", "4096x8", "100,000", "99,000", "1.010 (1.000 to 1.020)", MISSING, "27.6"]
    assert long[1:3] == ["16384x2", "90,000"]
    assert token == ["GLA", MISSING, MISSING, MISSING, "53.20"]
    assert whole == [["GLA", "512", "0.25", "0.26", "1.020"], ["GLA", "16,384", "6.00", "6.12", "1.020"]]
    assert "Transformer++: 50,000 tokens/s." in text
    assert "Over all 2 settings measured, gates cost +1.0% to +1.1% in time, +0.1% in memory." in text
    assert f"Transformer++: {MISSING} ms in headmax's engine,\n3.38 ms as transformers' Llama" in text
