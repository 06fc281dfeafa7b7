"""Write the run folders that `test_pinned_runs.py` resumes: `python -m tests.training.pin_runs`.

Each is made by the version of its day and never made again: what later versions read is what
users have on their disks. A new recipe adds a folder of its own. `went_on.json` has the losses
with which that version itself went on from the folder.
"""

import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path

from fp8stack import cli

PINNED = Path(__file__).parent / "pinned"
TEXT = PINNED / "text.txt"
STEPS, MORE = 6, 8
SHAPE = """\
vocabulary = 256
context = 32
layers = 1
width = 32
heads = 2
norm = "rmsnorm"
mlp_width = 32
activation = "swiglu"
positions = "rope"
qk_norm = true
bias = false
tied = true
"""
FLAGS = [
    "--model", "shape.toml", "--steps", str(STEPS), "--batch", "4", "--eval-every", "3",
    "--save-every", "6", "--device", "cpu", "--lr", "1e-2", "--seed", "5",
    "--set", "warmup_steps=2", "--set", "eval_windows=4",
    "--set", "sample_tokens=0", "--set", "telemetry_every=2",
]  # fmt: skip
NAMES = (
    *("fp32", "tf32", "bf16", "fp16", "delayed", "current", "block", "mxfp8", "rowwise"),
    *("mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4"),
    "nvfp4_last_bf16",  # shipped before the first release
)
RUNS = {
    **{name: ["--recipe", name] for name in NAMES},
    "current-torch": ["--recipe", "current", "--backend", "torch"],
    "phases": ["--recipe", "delayed", "--phases", "default"],
    "sgd": ["--recipe", "fp32", "--optimizer", "sgd"],
}


def main() -> int:
    PINNED.mkdir(exist_ok=True)
    TEXT.write_bytes(b"".join(b"%d squared is %d.\n" % (n, n * n) for n in range(400)))
    file = PINNED / "went_on.json"
    went_on = json.loads(file.read_text()) if file.exists() else {}
    for name in RUNS:
        archive = PINNED / f"{name}.tar.xz"
        if archive.exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            Path("shape.toml").write_text(SHAPE)
            _command("--data", str(TEXT), "--out", name, *FLAGS, *RUNS[name])
            with tarfile.open(archive, "w:xz") as tar:
                tar.add(name, filter=_anyones)
            _command("--resume", name, "--steps", str(MORE))
            rows = map(json.loads, Path(name, "metrics.jsonl").read_text().splitlines())
            went_on[name] = {row["step"]: row["loss"] for row in rows if row["step"] > STEPS}
            os.chdir("/")
        file.write_text(json.dumps(went_on, indent=1) + "\n")
    return 0


def _command(*words: str) -> None:
    try:
        cli.main(["pretrain", *words])
    except SystemExit as ended:
        if ended.code:
            raise


def _anyones(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """The member of the archive without its owner and time; None for a picture."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return None if member.name.endswith(".png") else member


if __name__ == "__main__":
    sys.exit(main())
