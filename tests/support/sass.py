"""Machine code of kernels (SASS): registers that are read before anything writes them.

ptxas leaves parts of a register unwritten where no result depends on them, such as the upper half
behind a 16-bit value, and names the stack pointer, R1, in place of a value that it lost. So each
bit is followed through the instructions that move bits, and counts where another reads it.
"""

from __future__ import annotations

import heapq
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

_ROW = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*(?:;.*|\?\w+.*)?// \|")
_STACK = 256  # the registers that stand for words of the stack
_WORD = 0xFFFFFFFF
_MOVES = re.compile(r"(?:IMAD\.MOV\.U32 (R\d+), RZ, RZ,|MOV (R\d+),) (R\w+)$")
_BYTES = re.compile(r"PRMT (R\d+), (R\w+), (0x[0-9a-f]+), (R\w+)")
_PACKED = re.compile(r"F2FP\S*MERGE_C (R\d+), (\S+), (\S+), (R\w+)")
_BYTE_STORE = re.compile(r"STG\S*\.U8\b.*, (R\d+)$")
_UPPER = re.compile(
    r"(?:IMAD\.U32|IMAD\.SHL\.U32) (R\d+), (R\d+), 0x10000|SHF\.L\.U32 (R\d+), (R\d+), 0x10,"
)
_FUNNEL = re.compile(r"SHF\.L\.W\.U32\.HI (R\d+), (R\w+), (0x[0-9a-f]+), (R\w+)")
_MASK = re.compile(r"LOP3\.LUT ([RP]\d+), (?:RZ, )?(R\d+), (0x[0-9a-f]+), RZ, 0x(c0|fc)")
_STACK_MOVE = re.compile(
    r"(?:STL(\S*) \[R1(\+0x[0-9a-f]+)?\], (R\w+)|LDL(\S*) (R\d+), \[R1(\+0x[0-9a-f]+)?\])"
)
_USES_STACK_POINTER = re.compile(r"(LDC|MOV|IADD3?|VIADD|IMAD\.MOV|IMAD\.IADD|UIADD3|R2UR)\b")


class Instruction(NamedTuple):
    """An instruction without its predicate, and the general registers that it reads and writes."""

    text: str
    predicated: bool
    reads: list[int]
    writes: list[int]


def unwritten_registers(cubin: bytes, folder: Path) -> list[str]:
    """The instructions that read bits which nothing has written on any way to them, and their
    registers, by Triton's own nvdisasm.

    Raises:
        ValueError: this nvdisasm cannot analyze code of this ptxas, as Triton 3.9's for 8.9.
    """
    instructions, labels = _disassembled(cubin, folder)
    returns = [i + 1 for i, row in enumerate(instructions) if row.text.startswith("CALL")]
    state: dict[int, int] = {0: (1 << 32 * 2 * _STACK) - 1}  # a bit for each that is unwritten
    pending, unwritten = [0], {}
    while pending:
        place = heapq.heappop(pending)
        after, registers = _executed(instructions[place], state[place])
        unwritten[place] = registers
        for following in _following(instructions[place], place, labels, returns):
            merged = after & state.get(following, -1)
            if following < len(instructions) and merged != state.get(following):
                state[following] = merged
                heapq.heappush(pending, following)
    return [
        f"{instructions[place].text}: {', '.join(unwritten[place])}"
        for place in sorted(unwritten)
        if unwritten[place]
    ]


def _disassembled(cubin: bytes, folder: Path) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions, and the places of labels."""
    from triton import knobs

    (file := folder / "kernel.cubin").write_bytes(cubin)
    command = [knobs.nvidia.nvdisasm.path, "-c", "-lrm", "narrow", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or "flow analysis is disabled" in done.stderr:
        raise ValueError(f"No life ranges: {done.stderr.strip()}")
    first = 0
    rows: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in done.stdout.splitlines():
        _, bar, ranges = line.rpartition("// |")
        if header := re.match(r"\s+# (0\d+)", ranges):
            first = header.start(1)
        if label := re.match(r"^\s*([.$\w]+):", line):
            labels[label.group(1)] = len(rows)
        if bar and (row := _ROW.match(line)):
            uses = ranges[first : ranges.index("|")]
            text = re.sub(r"\.reuse\b", "", row.group(2))
            plain = re.sub(r"^@!?U?P\w+\s+", "", text)
            reads, writes = (
                [i for i, use in enumerate(uses) if use in kind] for kind in ("vx", "^x")
            )
            rows.append(Instruction(plain, plain != text, reads, writes))
    assert rows
    return rows, labels


def _following(
    row: Instruction, place: int, labels: dict[str, int], returns: list[int]
) -> list[int]:
    """The places that may run next; a subroutine may return behind any call."""
    target = re.search(r"`\((\S+?)\)", row.text)
    places = [labels[target.group(1)]] if target and target.group(1) in labels else []
    if row.text.startswith("CALL"):
        return places
    if row.text.startswith("RET"):
        places = returns
    elif not row.text.startswith(("BRA", "EXIT")):
        return [place + 1]  # BSSY names where threads meet again, and does not jump
    conditional = row.predicated or ", " in row.text
    return [*places, place + 1] if conditional else places


def _executed(row: Instruction, state: int) -> tuple[int, list[str]]:
    """The state after an instruction, and the registers of which it reads unwritten bits."""

    def bits(name: str) -> int:
        name = name.strip("|-,~")
        if not re.fullmatch(r"R\d+", name):
            return 0
        return _WORD if name == "R1" else state >> 32 * int(name[1:]) & _WORD

    results: dict[int, int] = {}
    reads: dict[str, int] = {}
    if match := _BYTES.match(row.text):
        source = bits(match[2]) | bits(match[4]) << 32
        places = [int(match[3], 16) >> 4 * i & 7 for i in range(4)]
        results[_number(match[1])] = sum(
            (source >> 8 * at & 0xFF) << 8 * i for i, at in enumerate(places)
        )
    elif match := _PACKED.match(row.text):
        # Two numbers become a byte each. Triton leaves one undefined where it converts one number.
        high, low = (0xFF if bits(name) else 0 for name in (match[2], match[3]))
        results[_number(match[1])] = (bits(match[4]) & 0xFFFF) << 16 | high << 8 | low
    elif match := _BYTE_STORE.match(row.text):
        reads = {f"R{n}": state >> 32 * n & _WORD for n in row.reads}
        reads[match[1]] = bits(match[1]) & 0xFF
    elif match := _UPPER.match(row.text):
        results[_number(match[1] or match[3])] = (bits(match[2] or match[4]) & 0xFFFF) << 16
    elif match := _FUNNEL.match(row.text):  # the upper word of two that are shifted to the left
        moved = (bits(match[4]) << 32 | bits(match[2])) << int(match[3], 16) % 32
        results[_number(match[1])] = moved >> 32 & _WORD
    elif match := _MOVES.match(row.text):
        results[_number(match[1] or match[2])] = bits(match[3])
    elif match := _MASK.match(row.text):
        mask, unwritten = int(match[3], 16), bits(match[2])
        unwritten &= mask if match[4] == "c0" else ~mask
        if match[1].startswith("P") or match[2] == "R1":
            reads[match[2]] = unwritten
        if match[1].startswith("R"):
            results[_number(match[1])] = unwritten
    elif match := _STACK_MOVE.match(row.text):
        words = {".64": 2, ".128": 4}.get((match[1] or match[4] or ""), 1)
        slot = _STACK + int((match[2] or match[6] or "+0x0")[1:], 16) // 4
        register = match[3] or match[5]
        for i in range(words):
            if register == "RZ":
                results[slot + i] = 0
            elif match[3]:
                results[slot + i] = bits(f"R{_number(register) + i}")
            else:
                results[_number(register) + i] = state >> 32 * (slot + i) & _WORD
    elif not row.text.startswith("CALL"):  # the subroutine's own instructions count
        reads = {f"R{n}": state >> 32 * n & _WORD for n in row.reads}
        results = dict.fromkeys(row.writes, 0)
        if re.search(r"\bR1\b(?![+\]])", row.text) and not _USES_STACK_POINTER.match(row.text):
            reads["R1"] = _WORD
    for number, unwritten in results.items():
        state = state & ~(_WORD << 32 * number) | unwritten << 32 * number
    return state, [name for name in reads if reads[name]]


def _number(name: str) -> int:
    return int(name[1:])
