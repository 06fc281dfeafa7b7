"""Makes Transformer Engine use the cuDNN that torch uses."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch


@cache
def load_cudnn() -> None:
    """Load the cuDNN of torch's wheel, and tell Transformer Engine its folder. Call this
    before Transformer Engine is imported.

    TE 2.20 looks for libcudnn in `CUDNN_HOME`, then in the CUDA toolkit and on the system, and in
    Python packages last (`transformer_engine.common._load_cuda_library`). torch uses the copy in
    `nvidia/cudnn/lib` beside it. Two copies in one process fail where their versions differ, since
    cuDNN loads its own parts by name. Nothing is done if `CUDNN_HOME` or `CUDNN_PATH` is set, or if
    there is no such folder, as with a torch that was built against the system's cuDNN.
    """
    folder = Path(torch.__file__).parent.parent / "nvidia" / "cudnn"
    libraries = sorted(folder.glob("lib/libcudnn*.so.*"))
    if not libraries or {"CUDNN_HOME", "CUDNN_PATH"} & os.environ.keys():
        return
    # The other parts need libcudnn_graph, and would look for it by name.
    for library in sorted(libraries, key=lambda path: "_graph." not in path.name):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["CUDNN_HOME"] = str(folder)
