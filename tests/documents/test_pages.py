"""Pages are followed to their ends: every command, in its order, as it is written."""

from __future__ import annotations

import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.documents.blocks import BLOCKS, PAGES, REASONS, Block, Fate, blocks, identity
from tests.documents.stage import SHELLS, follow, possible, run_here
from tests.support.rows import each_row

FOLLOWED = [page for page in PAGES if run_here(page)]


@pytest.mark.parametrize("page", FOLLOWED, ids=identity)
def test_a_page_is_followed_to_its_end(page: Path) -> None:
    if not possible():
        pytest.skip("needs unshare and ip, and to be allowed namespaces of its own")
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:  # a short path: unix sockets allow 107 bytes
        followed = follow(page, Path(folder))
    assert followed.code == 0, followed.output[-4000:]
    assert list(followed.reached) == [block.line for block in run_here(page)]


WRONG = """
```sh
vllm-gateway status >/dev/null
```

<!-- not run: it takes minutes -->
```sh
false
```

```sh
curl http://127.0.0.1:8000/v1/nothing
```

```python
print("not reached")
```
"""


def test_a_command_that_fails_is_where_it_ends(tmp_path: Path) -> None:
    if not possible():
        pytest.skip("needs unshare and ip, and to be allowed namespaces of its own")
    (tmp_path / "wrong.md").write_text(WRONG)
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        followed = follow(tmp_path / "wrong.md", Path(folder))
    assert (followed.code, followed.reached) == (22, (2, 11))
    assert "not_found" in followed.output and "not reached" not in followed.output


@each_row("block", blocks(*SHELLS), ids=identity)
def test_what_is_for_a_shell_is_well_formed(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_block_is_run_or_read_or_says_why_not() -> None:
    fates = Counter((block.fate.value, block.language) for block in BLOCKS)  # KeyError: an unknown language
    assert {block.comment for block in BLOCKS if block.comment is not None and block.reason is None} == set()
    marked = [block for block in BLOCKS if block.fate is Fate.MARKED]
    assert {block.reason for block in marked} <= set(REASONS)
    assert {block.language for block in marked} <= {*SHELLS, "python", "js"}
    assert len(marked) * 4 <= len(blocks(*SHELLS, "python", "js")), "marks are to stay few"
    print("\n".join(f"{count:4} {language} blocks: {fate}" for (fate, language), count in sorted(fates.items())))
    print("\n".join(f"     {block}: {block.reason}" for block in marked))
