"""The speed of `prepare` in tokenizing JSON lines, compared with a plain loop of json and
`tokenizers`, and with a script of `datasets`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import report
from bench.report import Report
from fp8stack.analysis.benchmark.timing import interleaved
from fp8stack.data import load_corpora

PLAIN, SCRIPT = "plain loop", "script of datasets"
SHORT = ["--rounds", "3", "--mb", "4"]
VOCABULARY = 4096

# The plain loop, a separate process: it reads lines, collects the ids, and writes them by numpy.
_LOOP = """
import json, sys
import numpy as np
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(sys.argv[2])
end = tokenizer.token_to_id("<|endoftext|>")
ids = []
with open(sys.argv[1], encoding="utf-8") as lines:
    for line in lines:
        ids += tokenizer.encode(json.loads(line)["text"]).ids
        ids.append(end)
np.array(ids, dtype="<u2").tofile(sys.argv[3])
"""
# The usual script of the datasets library, without its cache. Batches go to the tokenizers library,
# which encodes them in all threads.
_DATASETS = """
import sys, tempfile
import numpy as np
from datasets import disable_caching, load_dataset
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(sys.argv[2])
end = tokenizer.token_to_id("<|endoftext|>")

def encode(batch):
    return {"ids": [encoding.ids + [end] for encoding in tokenizer.encode_batch(batch["text"])]}

if __name__ == "__main__":
    disable_caching()
    with tempfile.TemporaryDirectory() as cache:
        rows = load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=cache)
        rows = rows.map(encode, batched=True, remove_columns=rows.column_names)
        with open(sys.argv[3], "wb") as file:
            for batch in rows.with_format("arrow").iter(1000):
                ids = batch["ids"].combine_chunks().flatten()
                file.write(ids.to_numpy().astype("<u2").tobytes())
"""
_COMMAND = """
import sys
from fp8stack.cli import main

try:
    main(sys.argv[1:])
except SystemExit as done:
    assert not done.code
"""
# VmHWM, since a child's ru_maxrss includes its parent's memory at the fork.
_PEAKS = """
import resource
with open("/proc/self/status") as status:
    own = next(line.split()[1] for line in status if line.startswith("VmHWM"))
print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=6, help="runs of each (default: %(default)s)")
    add("--mb", type=int, default=32, help="of JSON lines, in 10^6 bytes (default: %(default)s)")


def measure(arguments: argparse.Namespace) -> Report:
    """Time whole processes, from start to end; they take turns."""
    peaks: dict[str, float] = {}
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        size = write_corpus(corpus, arguments.mb * 10**6)
        tokenizer = make_tokenizer(folder, corpus)
        plain = [_LOOP + _PEAKS, corpus, tokenizer, folder / "plain.bin"]
        arms: dict[str, Callable[[], object]] = {PLAIN: partial(run_arm, peaks, PLAIN, plain)}
        script = [_DATASETS + _PEAKS, corpus, tokenizer, folder / "datasets.bin"]
        arms[SCRIPT] = partial(run_arm, peaks, SCRIPT, script)
        for workers in sorted({1, cores}):
            arm = f"prepare, {workers} process" + ("es" if workers > 1 else "")
            words: list[object] = ["--tokenizer", tokenizer, "--out", folder / f"out-{workers}"]
            words += ["--overwrite", "--workers", workers, "--held-out", 0]
            arms[arm] = partial(prepare, peaks, arm, corpus, *words)
        timings = interleaved(arms, rounds=arguments.rounds, warm_up=1)
        require_equal(folder, cores)
    rows = report.rows_of("JSON lines", timings, PLAIN)
    for row in rows:
        row["mb_per_s"] = round(size / 1e3 / row["median_ms"], 3)
        row["peak_mib"] = round(peaks[row["arm"]], 1)
    settings = {"MB": round(size / 1e6, 1), "vocabulary": VOCABULARY}
    settings |= {"rounds": arguments.rounds, "cores": cores}
    return report.report_of("cpu", settings, rows, packages=["tokenizers", "datasets"])


def write_corpus(path: Path, size: int) -> int:
    """Write at least `size` bytes of JSON lines: the standard library's source, repeated, with 4000
    characters per document. Returns the number of bytes."""
    (source, _) = load_corpora(None, 256, 0.01)
    text = source.window(0, len(source)).astype("u1").tobytes().decode(errors="replace")
    documents = [text[start : start + 4000] for start in range(0, len(text), 4000)]
    written = 0
    with path.open("w", encoding="utf-8") as stream:
        while written < size:
            for number, document in enumerate(documents):
                written += stream.write(json.dumps({"id": number, "text": document}) + "\n")
                if written >= size:
                    break
    return written


def make_tokenizer(folder: Path, corpus: Path) -> Path:
    """Train a byte-level BPE on the first lines by `prepare`. Returns the path of the tokenizer."""
    beginning = folder / "beginning.jsonl"
    with corpus.open("rb") as lines:
        beginning.write_bytes(b"".join(line for line, _ in zip(lines, range(800), strict=False)))
    command = [sys.executable, "-m", "fp8stack", "prepare", str(beginning)]
    command += ["--train-bpe", str(VOCABULARY), "--out", str(folder / "bpe")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "bpe" / "tokenizer.json"


def prepare(peaks: dict[str, float], arm: str, *words: object) -> None:
    """Run `fp8stack prepare` as an arm."""
    run_arm(peaks, arm, [_COMMAND + _PEAKS, "prepare", *words])


def run_arm(peaks: dict[str, float], arm: str, words: list[object]) -> None:
    """Run Python with this code and these arguments; record the peak memory of a process."""
    command = [sys.executable, "-c", *map(str, words)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    kib = max(int(word) for word in done.stdout.splitlines()[-1].split())
    peaks[arm] = max(peaks.get(arm, 0.0), kib / 1024)


def require_equal(folder: Path, cores: int) -> None:
    """Check that all arms wrote the same tokens.

    Raises:
        ValueError: they did not.
    """
    expected = (folder / "plain.bin").read_bytes()
    if (folder / "datasets.bin").read_bytes() != expected:
        raise ValueError("The script of datasets gave other tokens than the loop.")
    for workers in {1, cores}:
        shards = sorted((folder / f"out-{workers}").glob("train-*.bin"))
        if b"".join(shard.read_bytes() for shard in shards) != expected:
            raise ValueError(f"prepare with {workers} workers gave other tokens than the loop.")


def table(data: Report) -> str:
    extra = {
        "MB/s": report.number("mb_per_s"),
        "peak MiB of one process": report.number("peak_mib", 0),
        f"time / {PLAIN}": report.paired_cell,
    }
    text = (
        "JSON lines of the standard library's source to a file of tokens: whole processes, with "
        "Python's start; MB/s of JSON at the median. The plain loop reads a line, parses it, "
        "encodes its text by the `tokenizers` library, adds the ids to a list, and writes that "
        "by numpy at the end; the script of `datasets` maps batches to ids in one process, "
        "while `tokenizers` encodes in all threads. All give the same tokens to the byte, which "
        "is checked."
    )
    return report.page(data, "Prepare", text, extra)


figure = report.ratios("Prepare", "mb_per_s", "MB/s of JSON lines")
