"""Import zstd from the standard library if it has it, otherwise from the backport."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, compress, decompress, train_dict
else:
    from backports.zstd import CompressionParameter, compress, decompress, train_dict

__all__ = ["CompressionParameter", "compress", "decompress", "train_dict"]
