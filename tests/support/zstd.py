"""zstd of the standard library where it has it, else its backport."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, compress, decompress, train_dict
else:
    from backports.zstd import CompressionParameter, compress, decompress, train_dict

__all__ = ["CompressionParameter", "compress", "decompress", "train_dict"]
