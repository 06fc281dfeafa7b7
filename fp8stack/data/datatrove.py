"""datatrove's tokens, `.ds`, with the ends of documents in `.ds.index`. No torch here.

`NAME.ds` holds little-endian uint16, or uint32 for vocabularies above 65,535, without a header;
`NAME.ds.index` the number of tokens up to the end of each document as little-endian uint64.
https://github.com/huggingface/datatrove/blob/main/src/datatrove/pipeline/tokens/tokenizer.py
"""

import re
from pathlib import Path

from fp8stack.common.errors import UserError
from fp8stack.data.corpus import Ends, Segment, ascends, map_tokens
from fp8stack.data.files import head_and_size

WIDTHS = {2: "<u2", 4: "<u4"}
_BESIDE = re.compile(r"\.ds\.(index|metadata|loss)$")


def is_ds(path: Path) -> bool:
    """Return whether the path names a `.ds` file of tokens."""
    return path.suffix.lower() == ".ds"


def is_beside_ds(path: Path) -> bool:
    """Return whether datatrove writes a file of this name next to its tokens."""
    return _BESIDE.search(path.name) is not None


def ds_segment(path: Path) -> Segment:
    """The tokens of a `.ds` file, memory-mapped. Raises a UserError if its index is missing, or the
    files are damaged or disagree."""
    index = path.with_name(f"{path.name}.index")
    if not index.exists():
        raise UserError(
            f"{path} has no {index.name} beside it, which says where its documents end. Copy it "
            "too, or tokenize again with save_index=True."
        )
    (_, size), (_, index_size) = head_and_size(path), head_and_size(index)
    ends = map_tokens(index, "<u8") if index_size % 8 == 0 else None
    tokens = 0 if ends is None else int(ends[-1])
    dtype = WIDTHS.get(size // tokens) if tokens and size % tokens == 0 else None
    if ends is None or dtype is None or not ascends(ends):
        raise UserError(
            f"{path} has {size} bytes, and its index of {index_size} bytes does not fit them: it "
            f"ends at token {tokens}, and tokens have 2 or 4 bytes. Copy both files again."
        )
    documents = Ends(index=Segment(path=index, tokens=ends))
    return Segment(path=path, tokens=map_tokens(path, dtype), documents=documents)
